"""The loops over fused layers give what the model's own modules give, up to rounding, in every shape of forward.

There are three: the fused one, the native one where a compiler is at hand, and the one over pages, recorded as on a
GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from support.backends import HostRecorder, fused_backend, graph_backend, llama_of, native_backend
from support.loops import CONFIGS, SMALL, apart, assert_equal_up_to_rounding, run_forwards, weights
from support.pairwise import pairwise_among
from support.tiny_models import PROMPTS, VOCAB, stock, stock_greedy, stock_logits
from truedraft import Engine, SamplingParams
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.drafters import DraftModel
from truedraft.models import HuggingFaceModel, Segment
from truedraft.models.backends.base import Backend, BackendMaker
from truedraft.models.backends.graphs import GraphBackend
from truedraft.models.backends.native import NativeBackend
from truedraft.models.backends.native.build import built
from truedraft.models.backends.stock import StockBackend
from truedraft.models.loading import fastest_backend
from truedraft.models.packed_linear import can_pack

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="this torch has no oneDNN")
DTYPES = [torch.float32, torch.bfloat16]


def fused(model: PreTrainedModel) -> Backend:
    if not can_pack(CPU, model.dtype):
        pytest.skip("this torch has no oneDNN")
    return fused_backend(model)


def native(model: PreTrainedModel) -> Backend:
    if built(model.dtype).library is None:
        pytest.skip(f"no native forward: {built(model.dtype).reason}")
    if not is_for_decoder_c(model.config):
        assert not NativeBackend.fits(llama_of(model))
        pytest.skip("decoder.c is not for these sizes or this activation")
    assert NativeBackend.fits(llama_of(model))
    return native_backend(model)


def is_for_decoder_c(config: PretrainedConfig) -> bool:
    """What decoder.c says of itself: whole vectors of 16, in half of what is rotated too; SiLU, or GELU by tanh."""
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    rope = config.rope_parameters
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turned = int(head * rope.get("partial_rotary_factor", 1.0))
    sizes = (config.hidden_size, config.intermediate_size, head, turned // 2)
    return all(size % 16 == 0 for size in sizes) and activation in ("silu", "swish", "gelu_pytorch_tanh")


def graphs(model: PreTrainedModel) -> Backend:
    llama = llama_of(model)
    one_rotation = model.config.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0 and llama.scale == 1.0
    if not one_rotation:
        assert GraphBackend.misfit(llama) is not None
        pytest.skip("recorded forwards turn whole heads, alike in all layers")
    return graph_backend(model, HostRecorder())


LOOPS: dict[str, BackendMaker] = {"fused": fused, "native": native, "graphs": graphs}
ALL: dict[str, BackendMaker] = LOOPS | {"modules": StockBackend}
in_all_loops = pytest.mark.parametrize("loop", LOOPS)
FLOAT32, BFLOAT16, PROMPT = pairwise_among(3, CONFIGS, LOOPS)


def looped(name: str, dtype: torch.dtype = torch.float32, loop: str = "fused") -> HuggingFaceModel:
    return HuggingFaceModel(weights(name, dtype), None, loop, ALL[loop])


LAYERS = (1, 0)  # whose outputs are shown, in this order


@pytest.mark.parametrize(("name", "loop"), FLOAT32)
def test_float32_equals_the_models_own_modules(name: str, loop: str) -> None:
    """Up to rounding. Each product sums about 100 terms and is off by some 1e-7 of its size.

    3 layers of wide random weights add that up to about 1e-5 of the spread in the worst of 6,000 entries, by either
    way. A wrong mask, position or weight gives about 1.
    """
    fast = run_forwards(looped(name, loop=loop), LAYERS)
    slow = run_forwards(HuggingFaceModel(weights(name), None, name), LAYERS)
    assert len(fast) == 2 + len(LAYERS)
    for ours, theirs in zip(fast, slow, strict=True):
        assert_equal_up_to_rounding(ours, theirs)


@pytest.mark.parametrize(("name", "loop"), BFLOAT16)
def test_bfloat16_is_as_near_to_the_exact_answer_as_the_models_own_modules(name: str, loop: str) -> None:
    """The exact answer is that of the same bfloat16 weights in float64.

    A number is rounded to 8 bits (0.4 %) some ten times a layer, which comes to 2 to 4 % of the spread of the logits
    in the root mean square, by either way; the loop rounds less often and so may not be further off.
    """
    bfloat16, exact = torch.bfloat16, weights(name, torch.bfloat16).double()
    truth = run_forwards(HuggingFaceModel(exact, None, name))
    fast = run_forwards(looped(name, bfloat16, loop))
    slow = run_forwards(HuggingFaceModel(weights(name, bfloat16), None, name))
    for true, ours, theirs in zip(truth, fast, slow, strict=True):
        spread = float(true.std())
        largest, typical = apart(ours, theirs, spread)
        assert largest <= 0.7
        assert typical <= 0.07
        assert apart(ours, true, spread)[1] <= 1.3 * apart(theirs, true, spread)[1]


@pytest.mark.parametrize(("name", "loop"), PROMPT)
def test_a_prompt_equals_transformers_own_forward(name: str, loop: str) -> None:
    """Without any of our code on the other side."""
    model = looped(name, loop=loop)
    for count in (40, 100):  # recorded forwards run long ones apart
        text = torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(6))
        logits = model.forward([Segment(model.new_cache(), text, chain_shape(count), range(count))]).logits
        assert_equal_up_to_rounding(logits, stock_logits(weights(name), text.tolist()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loop", ALL)
def test_only_the_asked_rows_come_back(dtype: torch.dtype, loop: str) -> None:
    """Also where the forward is padded to more rows, and where none is asked for."""
    model = looped("grouped heads", dtype, loop)
    ids, shape = torch.tensor([5, 9, 11, 3, 60]), TreeShape((-1, 0, 0, 1, 2))

    def run(wanted: list[int]) -> tuple[Tensor, Tensor]:
        output = model.forward([Segment(model.new_cache(), ids, shape, wanted)])
        return output.logits, output.hidden

    every = run([0, 1, 2, 3, 4])
    for rows in ([0, 1, 2, 3, 4], [4], [0, 3], []):
        some = run(rows)
        assert some[0].shape == (len(rows), VOCAB)
        assert some[1].shape == (len(rows), 128)
        assert some[0].dtype == some[1].dtype == dtype
        for ours, theirs in zip(some, every, strict=True):
            torch.testing.assert_close(ours, theirs[rows])


@in_all_loops
def test_text_that_outgrows_the_first_table_of_positions(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """600 tokens, then one at a time; the table starts with fewer."""
    monkeypatch.setitem(SMALL, "max_position_embeddings", 1024)
    text = torch.randint(VOCAB, (605,), generator=torch.Generator().manual_seed(7))
    model = looped("grouped heads", loop=loop)
    cache, rows = model.new_cache(), []
    for part in (text[:600], *text[600:].split(1)):
        rows.append(model.forward([Segment(cache, part, chain_shape(len(part)), range(len(part)))]).logits)
        cache.commit(range(len(part)))
    expected = stock_logits(weights("grouped heads"), text.tolist())
    assert apart(torch.cat(rows), expected, float(expected.std()))[0] <= 5e-5


@in_all_loops
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_far_from_zero(dtype: torch.dtype, loop: str) -> None:
    """silu(x) = x / (1 + e^-x) is 0 far below 0, also where e^-x is beyond the largest number (x < -88.7)."""

    def model(backend: BackendMaker) -> HuggingFaceModel:
        module: Any = weights("grouped heads", dtype)
        for layer in module.model.layers:
            layer.mlp.gate_proj.weight.data *= 40
            layer.mlp.up_proj.weight.data /= 40
        return HuggingFaceModel(module, None, "gates", backend)

    fast, slow = run_forwards(model(LOOPS[loop]))[0], run_forwards(model(StockBackend))[0]
    largest, typical = apart(fast, slow, float(slow.std()))
    assert largest <= (5e-5 if dtype == torch.float32 else 0.7)
    assert typical <= (5e-6 if dtype == torch.float32 else 0.07)


@pytest.mark.parametrize("loop", ["fused", "graphs", "modules"])  # the native one: test_native_forward.py
def test_a_failed_forward_leaves_the_model_usable(loop: str) -> None:
    model = looped("grouped heads", loop=loop)
    ids = torch.tensor([5, 9, 11])
    expected = model.forward([Segment(model.new_cache(), ids, chain_shape(3), range(3))]).logits
    cache = model.new_cache()
    for _ in range(2):
        with pytest.raises(IndexError):
            model.forward([Segment(cache, torch.tensor([VOCAB + 5]), chain_shape(1), (0,))])
    assert model.forward([Segment(cache, ids, chain_shape(3), range(3))]).logits.equal(expected)


WORDS = {
    "fused": ("packed weights", "fused projections", "one loop over the layers", "tabulated positions"),
    "native": ("native forward", "packed weights"),
}


@pytest.mark.parametrize("loop", WORDS)
@pytest.mark.parametrize("name", ["tied", "grouped heads", "qwen3"])
def test_linear_weights_are_freed_and_the_embedding_stays(name: str, loop: str) -> None:
    module: Any = weights(name)
    whole = sum(weight.nbytes for weight in module.parameters())
    embedding = module.get_input_embeddings().weight.clone()
    model = HuggingFaceModel(module, None, name, LOOPS[loop])
    assert model.fast_paths == WORDS[loop]
    assert module.get_input_embeddings().weight.equal(embedding)
    linears = [part for part in module.model.layers.modules() if isinstance(part, nn.Linear)]
    assert len(linears) == 3 * 7
    assert all(part.weight.numel() == 0 for part in linears)
    head = module.get_output_embeddings().weight
    assert head is module.get_input_embeddings().weight if name == "tied" else head.numel() == 0
    assert sum(weight.nbytes for weight in module.parameters()) < whole / 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_the_answer_is_the_models_own(dtype: torch.dtype) -> None:
    """Whatever is switched on there; in float32 it is that of transformers on the CPU."""
    model = HuggingFaceModel(stock("llama", dtype=dtype).to("cuda"), None, "llama", fastest_backend)  # type: ignore[arg-type]
    assert "packed weights" not in model.fast_paths
    params = SamplingParams(max_tokens=64)
    plain = Engine(model).generate(list(PROMPTS[0]), params).token_ids
    assert Engine(model, DraftModel(model, 3), controller="fixed").generate(list(PROMPTS[0]), params).token_ids == plain
    if dtype == torch.float32:
        assert plain == stock_greedy(stock("llama"), PROMPTS[0], 64)
