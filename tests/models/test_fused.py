"""The loops over fused layers give what the model's own modules give, up to rounding, in every shape of forward.

There are two: the fused one, and the native one where a compiler is at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma3TextConfig,
    Glm4Config,
    GlmConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from support.backends import fused_backend, llama_of, native_backend
from support.pairwise import pairwise, pairwise_among
from support.tiny_models import PROMPTS, VOCAB, WINDOW, build, stock, stock_greedy, stock_logits
from truedraft import Engine, SamplingParams
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.drafters import DraftModel
from truedraft.machine import has_bfloat16
from truedraft.models.backends.base import Backend, BackendMaker
from truedraft.models.backends.native import NativeBackend
from truedraft.models.backends.native.build import built
from truedraft.models.backends.stock import StockBackend
from truedraft.models.base import Segment
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.llama import Rotation
from truedraft.models.loading import fastest_backend
from truedraft.models.packed_linear import can_pack

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="this torch has no oneDNN")
needs_bfloat16 = pytest.mark.skipif(not has_bfloat16(CPU), reason="this CPU has no bfloat16 instructions")
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)]

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def rope(kind: str, **options: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "grouped heads": lambda: LlamaConfig(**SMALL),
    "a key head for each": lambda: LlamaConfig(**SMALL | {"num_key_value_heads": 4}),
    "one key head": lambda: LlamaConfig(**SMALL | {"num_key_value_heads": 1}),
    "one head": lambda: LlamaConfig(**SMALL | {"num_key_value_heads": 1, "num_attention_heads": 1}),
    "biases": lambda: LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "wide heads": lambda: LlamaConfig(**SMALL, head_dim=64),
    "odd sizes": lambda: LlamaConfig(**SMALL | {"hidden_size": 44, "intermediate_size": 90}, head_dim=14),
    "tied": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "gelu": lambda: LlamaConfig(**SMALL, hidden_act="gelu"),
    "gelu by tanh": lambda: LlamaConfig(**SMALL, hidden_act="gelu_pytorch_tanh"),
    "relu": lambda: LlamaConfig(**SMALL, hidden_act="relu"),
    "no activation": lambda: LlamaConfig(**SMALL, hidden_act="linear"),
    "rope llama3": lambda: LlamaConfig(
        **SMALL,
        **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "rope linear": lambda: LlamaConfig(**SMALL, **rope("linear", factor=4.0)),
    "rope yarn": lambda: LlamaConfig(**SMALL, **rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=None),
    "mistral with a window": lambda: MistralConfig(**SMALL, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "qwen2 with a window from the second layer on": lambda: Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=64),
    "qwen3, tied, with biases": lambda: Qwen3Config(
        **SMALL, head_dim=32, attention_bias=True, tie_word_embeddings=True
    ),
    "phi3, with a window": lambda: Phi3Config(**SMALL, sliding_window=WINDOW),
    "phi3, part of a head rotated": lambda: Phi3Config(
        **SMALL, head_dim=64, **rope("default", partial_rotary_factor=0.5)
    ),
    "glm": lambda: GlmConfig(**SMALL, head_dim=64, attention_bias=True, **rope("default", partial_rotary_factor=0.5)),
    "glm4": lambda: Glm4Config(**SMALL, head_dim=64, **rope("default", partial_rotary_factor=0.5)),
    "gemma3": lambda: Gemma3TextConfig(
        **SMALL,
        head_dim=32,
        query_pre_attn_scalar=20,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
TREE = TreeShape((-1, 0, 0, 1, 2, 2, 4))
"""A root token and below it 6 nodes with the leaves 3, 5 and 6; the path 0, 2, 4, 6 skips two of them."""


def weights(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model with its random weights, wide enough for attention to be far from even."""
    return build(config, seed=0, spread=0.15, dtype=dtype)


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


LOOPS: dict[str, BackendMaker] = {"fused": fused_backend, "native": native}
in_both_loops = pytest.mark.parametrize("loop", LOOPS)
FLOAT32, BFLOAT16, PROMPT = pairwise_among(3, CONFIGS, LOOPS)


def looped(config: PretrainedConfig, dtype: torch.dtype = torch.float32, loop: str = "fused") -> HuggingFaceModel:
    return HuggingFaceModel(weights(config, dtype), None, loop, LOOPS[loop])


class Rows(NamedTuple):
    """All rows of several forwards: logits `[rows, vocab]` and vectors before the head `[rows, width]`, float64."""

    logits: Tensor
    hidden: Tensor


def run_forwards(model: HuggingFaceModel) -> Rows:
    """Ragged prefill; a tree, a chain and one token side by side; a tree alone, by levels; one token alone."""
    generator = torch.Generator().manual_seed(5)
    outputs = []
    caches = [model.new_cache() for _ in range(3)]
    first, second, third = caches

    def drawn(count: int) -> Tensor:
        return torch.randint(VOCAB, (count,), generator=generator)

    def forward(*segments: Segment) -> None:
        output = model.forward(segments)
        outputs.append((output.logits.double(), output.hidden.double()))

    def chain(cache: Any, count: int) -> Segment:
        return Segment(cache, drawn(count), chain_shape(count), range(count))

    forward(chain(first, 5), chain(second, 23), chain(third, 1))
    for cache, count in zip(caches, (5, 23, 1), strict=True):
        cache.commit(range(count))
    forward(Segment(first, drawn(7), TREE, range(7)), chain(second, 4), chain(third, 1))
    first.commit((0, 2, 4, 6))
    second.commit((0, 1))
    third.commit((0,))
    for written, until in ((0, 1), (1, 3), (3, 7)):
        level = TreeShape(TREE.parents[:until])
        forward(Segment(second, drawn(until - written), level, range(until - written), written))
    second.commit((0, 2, 5))
    forward(chain(third, 1))
    forward(chain(first, 16))
    for cache in caches:
        model.release_cache(cache)
    return Rows(*map(torch.cat, zip(*outputs, strict=True)))


def apart(left: Tensor, right: Tensor, spread: float) -> tuple[float, float]:
    """Largest and root mean square difference, in units of the spread of what is compared."""
    difference = (left - right) / spread
    return float(difference.abs().max()), float(difference.square().mean().sqrt())


@pytest.mark.parametrize(("name", "loop"), FLOAT32)
def test_float32_equals_the_models_own_modules(name: str, loop: str) -> None:
    """Up to rounding. Each product sums about 100 terms and is off by some 1e-7 of its size.

    3 layers of wide random weights add that up to about 1e-5 of the spread in the worst of 6,000 entries, by either
    way. A wrong mask, position or weight gives about 1.
    """
    fast = run_forwards(looped(CONFIGS[name](), loop=loop))
    slow = run_forwards(HuggingFaceModel(weights(CONFIGS[name]()), None, name))
    for ours, theirs in zip(fast, slow, strict=True):
        largest, typical = apart(ours, theirs, float(theirs.std()))
        assert largest <= 5e-5
        assert typical <= 5e-6


@needs_bfloat16
@pytest.mark.parametrize(("name", "loop"), BFLOAT16)
def test_bfloat16_is_as_near_to_the_exact_answer_as_the_models_own_modules(name: str, loop: str) -> None:
    """The exact answer is that of the same bfloat16 weights in float64.

    A number is rounded to 8 bits (0.4 %) some ten times a layer, which comes to 2 to 4 % of the spread of the logits
    in the root mean square, by either way; the loop rounds less often and so may not be further off.
    """
    bfloat16, exact = torch.bfloat16, weights(CONFIGS[name](), torch.bfloat16).double()
    truth = run_forwards(HuggingFaceModel(exact, None, name))
    fast = run_forwards(looped(CONFIGS[name](), bfloat16, loop))
    slow = run_forwards(HuggingFaceModel(weights(CONFIGS[name](), bfloat16), None, name))
    for true, ours, theirs in zip(truth, fast, slow, strict=True):
        spread = float(true.std())
        largest, typical = apart(ours, theirs, spread)
        assert largest <= 0.7
        assert typical <= 0.07
        assert apart(ours, true, spread)[1] <= 1.3 * apart(theirs, true, spread)[1]


@pytest.mark.parametrize(("name", "loop"), PROMPT)
def test_a_prompt_equals_transformers_own_forward(name: str, loop: str) -> None:
    """Without any of our code on the other side."""
    text = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(6))
    model = looped(CONFIGS[name](), loop=loop)
    logits = model.forward([Segment(model.new_cache(), text, chain_shape(40), range(40))]).logits
    expected = stock_logits(weights(CONFIGS[name]()), text.tolist())
    assert apart(logits, expected, float(expected.std()))[0] <= 5e-5


def test_the_window_is_seen_by_these_texts() -> None:
    """Mistral with and without: the comparisons above would notice a window that was lost."""
    with_window, without = (run_forwards(looped(CONFIGS[name]())) for name in ("mistral with a window", "mistral"))
    assert apart(with_window.logits, without.logits, float(without.logits.std()))[0] > 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", ["sine", "query norm", "residual"])
def test_a_small_fault_in_the_loop_is_noticed(part: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds above are far below what a wrong part gives."""
    expected = run_forwards(looped(CONFIGS["qwen3"](), dtype))
    broken = looped(CONFIGS["qwen3"](), dtype)
    if part == "sine":
        turn = Rotation.__call__
        monkeypatch.setattr(Rotation, "__call__", lambda self, heads: turn(self, heads.flip(-1)).flip(-1))
    elif part == "query norm":
        for layer in broken._backend._layers:  # type: ignore[attr-defined]
            layer.query_norm.weight.mul_(2.0)
    else:
        down = broken._backend._layers[1].down  # type: ignore[attr-defined]
        monkeypatch.setattr(down, "plus", lambda x, residual: down(x))
    found = run_forwards(broken)
    largest, typical = apart(found.logits, expected.logits, float(expected.logits.std()))
    assert largest > 1.0
    assert typical > 0.1


@pytest.mark.parametrize(("rows", "dtype", "loop"), pairwise([[0, 1, 2, 3, 4], [4], [0, 3], []], DTYPES, LOOPS))
def test_only_the_asked_rows_come_back(rows: list[int], dtype: torch.dtype, loop: str) -> None:
    """Also where the forward is padded to more rows, and where none is asked for."""
    model = looped(CONFIGS["grouped heads"](), dtype, loop)
    ids, shape = torch.tensor([5, 9, 11, 3, 60]), TreeShape((-1, 0, 0, 1, 2))

    def run(wanted: list[int]) -> tuple[Tensor, Tensor]:
        output = model.forward([Segment(model.new_cache(), ids, shape, wanted)])
        return output.logits, output.hidden

    every, some = run([0, 1, 2, 3, 4]), run(rows)
    assert some[0].shape == (len(rows), VOCAB)
    assert some[1].shape == (len(rows), 128)
    assert some[0].dtype == some[1].dtype == dtype
    for ours, theirs in zip(some, every, strict=True):
        torch.testing.assert_close(ours, theirs[rows])


@in_both_loops
def test_text_that_outgrows_the_first_table_of_positions(loop: str) -> None:
    """600 tokens, then one at a time; the table starts with fewer."""
    config = CONFIGS["grouped heads"]()
    config.max_position_embeddings = 1024
    text = torch.randint(VOCAB, (605,), generator=torch.Generator().manual_seed(7))
    model = looped(config, loop=loop)
    cache, rows = model.new_cache(), []
    for part in (text[:600], *text[600:].split(1)):
        rows.append(model.forward([Segment(cache, part, chain_shape(len(part)), range(len(part)))]).logits)
        cache.commit(range(len(part)))
    expected = stock_logits(weights(config), text.tolist())
    assert apart(torch.cat(rows), expected, float(expected.std()))[0] <= 5e-5


@in_both_loops
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_far_from_zero(dtype: torch.dtype, loop: str) -> None:
    """silu(x) = x / (1 + e^-x) is 0 far below 0, also where e^-x is beyond the largest number (x < -88.7)."""

    def model(backend: BackendMaker) -> HuggingFaceModel:
        module: Any = weights(CONFIGS["grouped heads"](), dtype)
        for layer in module.model.layers:
            layer.mlp.gate_proj.weight.data *= 40
            layer.mlp.up_proj.weight.data /= 40
        return HuggingFaceModel(module, None, "gates", backend)

    fast, slow = run_forwards(model(LOOPS[loop])).logits, run_forwards(model(StockBackend)).logits
    largest, typical = apart(fast, slow, float(slow.std()))
    assert largest <= (5e-5 if dtype == torch.float32 else 0.7)
    assert typical <= (5e-6 if dtype == torch.float32 else 0.07)


def test_a_failed_forward_leaves_the_model_usable() -> None:
    model = looped(CONFIGS["grouped heads"]())
    ids = torch.tensor([5, 9, 11])
    expected = model.forward([Segment(model.new_cache(), ids, chain_shape(3), range(3))]).logits
    cache = model.new_cache()
    with pytest.raises(IndexError):
        model.forward([Segment(cache, torch.tensor([VOCAB + 5]), chain_shape(1), (0,))])
    assert model.forward([Segment(cache, ids, chain_shape(3), range(3))]).logits.equal(expected)


WORDS = {
    "fused": ("packed weights", "fused projections", "one loop over the layers", "tabulated positions"),
    "native": ("native forward", "packed weights"),
}


@in_both_loops
@pytest.mark.parametrize("name", ["tied", "grouped heads", "qwen3"])
def test_linear_weights_are_freed_and_the_embedding_stays(name: str, loop: str) -> None:
    module: Any = weights(CONFIGS[name]())
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
