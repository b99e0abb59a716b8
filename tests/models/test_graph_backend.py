"""Forwards over pages give what the model's own modules give, up to rounding, in every shape of forward."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from transformers import PreTrainedModel

from support.backends import HostRecorder, graph_backend, llama_of
from support.loops import CONFIGS, TREE, apart, assert_equal_up_to_rounding, run_forwards, weights
from support.pairwise import pairwise
from support.tiny_models import COUNT, PROMPTS, VOCAB, drafter_of, noisy_stock, packed, reference, stock, stock_logits
from truedraft import Engine, SamplingParams
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.drafters import DraftModel
from truedraft.errors import CacheError
from truedraft.models import HuggingFaceModel, Segment, loading
from truedraft.models.attention import Full
from truedraft.models.backends.graphs import GraphBackend
from truedraft.models.backends.graphs import attention as graph_attention
from truedraft.models.cache import RequestCache
from truedraft.models.llama import Llama
from truedraft.models.loading import fastest_backend, packed_backend
from truedraft.models.probe import probe_patterns


def recorded(model: PreTrainedModel) -> GraphBackend:
    return graph_backend(model, HostRecorder())


def graphs(model: PreTrainedModel) -> HuggingFaceModel:
    return HuggingFaceModel(model, None, "graphs", recorded)


@pytest.mark.parametrize("tokens", [5, 80])
def test_a_broken_request_leaves_its_neighbours_and_its_heirs_alone(tokens: int) -> None:
    """NaN in the keys of one request, whose pages another one takes afterwards."""
    module = weights("grouped heads")
    module.get_input_embeddings().weight.data[3] = torch.nan
    model = graphs(module)
    texts = [torch.full((tokens,), 3), torch.arange(4, 4 + tokens)]
    broken, sound = (model.new_cache() for _ in range(2))
    segments = [
        Segment(cache, text, chain_shape(tokens), (1,)) for cache, text in zip((broken, sound), texts, strict=True)
    ]
    logits = model.forward(segments).logits
    assert bool(logits[0].isnan().all())
    assert bool(logits[1].isfinite().all())
    model.release_cache(broken)
    heir = model.new_cache()
    again = model.forward([Segment(heir, texts[1][:3], chain_shape(3), (1,))]).logits
    assert_equal_up_to_rounding(again[0], logits[1])


def test_rejected_tokens_with_nan_are_forgotten() -> None:
    """In their own forward they make every row of their request NaN, never a wrong number; later they are gone."""
    module = weights("grouped heads")
    module.get_input_embeddings().weight.data[3] = torch.nan
    model, text = graphs(module), torch.tensor([5, 9, 11, 60])
    cache, other = model.new_cache(), model.new_cache()
    model.forward([Segment(cache, text[:3], chain_shape(3), ())])
    cache.commit(range(3))
    for shape in (chain_shape(6), TreeShape((-1, 0, 0, 1, 2, 2))):
        broken = Segment(cache, torch.tensor([60, 7, 3, 3, 3, 3]), shape, (0, 5))
        logits = model.forward([broken, Segment(other, text, chain_shape(4), (3,))]).logits
        assert bool(logits[:2].isnan().all())
        assert_equal_up_to_rounding(logits[2], stock_logits(module, text.tolist())[3])
        cache.commit(())
        logits = model.forward([Segment(cache, text[3:], chain_shape(1), (0,))]).logits
        assert_equal_up_to_rounding(logits[0], stock_logits(module, text.tolist())[3])
        cache.commit(())


def test_a_foreign_cache_is_refused() -> None:
    model, other = graphs(weights("grouped heads")), graphs(weights("grouped heads"))
    for cache in (RequestCache(512), other.new_cache()):
        with pytest.raises(CacheError, match="made by another model"):
            model.forward([Segment(cache, torch.tensor([5]), chain_shape(1), (0,))])


def test_which_models_fit() -> None:
    for family, misfit in (
        ("llama", None), ("mistral", None), ("qwen3", None), ("gemma3", "its layers rotate heads differently"),
        ("gpt2", "its layers are not those of Llama"), ("mixtral", "it has experts or sinks"),
    ):  # fmt: skip
        module = stock(family)
        assert GraphBackend.misfit(Llama.of(module, probe_patterns(module))) == misfit
    for name in ("glm", "phi3, part of a head rotated"):
        assert GraphBackend.misfit(llama_of(weights(name))) == "it rotates a part of each head"
    module = stock("llama")
    assert not isinstance(HuggingFaceModel(module, None, "cpu", fastest_backend)._backend, GraphBackend)
    assert "CUDA graphs" not in graphs(stock("llama")).fast_paths


def test_what_is_not_recorded_on_a_gpu_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreTrainedModel, "device", property(lambda model: torch.device("cuda")))
    for family, why in (("gpt2", "its layers are not those of Llama"), ("mixtral", "it has experts or sinks")):
        module = stock(family)
        patterns = [Full()] * module.config.num_hidden_layers
        monkeypatch.setattr(loading, "probe_patterns", lambda module, known=patterns: known)
        assert fastest_backend(module).note == f"its forwards are not recorded as CUDA graphs: {why}"
        adapted = packed_backend({"one": {}}, True)(module, patterns)
        assert adapted.note == "its forwards are not recorded as CUDA graphs: adapters stand beside its weights"
        assert packed_backend({}, True)(module, patterns).note is None


@pytest.mark.parametrize(
    ("family", "max_batch", "drafted"), pairwise(["llama", "qwen3", "mistral"], [1, 3], ["none", "chain", "tree"])
)
def test_greedy_answers_equal_those_of_transformers(family: str, max_batch: int, drafted: str) -> None:
    """From a draft that often errs; requests come and go, so pages change hands."""
    expected = [list(tokens)[:64] for tokens in reference(family)]
    target, draft = graphs(stock(family)), graphs(noisy_stock(family, 0.1))
    engine = Engine(target, drafter_of(drafted, draft), max_batch=max_batch, controller="fixed")
    answers = engine.generate([list(prompt) for prompt in PROMPTS], SamplingParams(max_tokens=64))
    assert [answer.token_ids for answer in answers] == expected
    if drafted != "none":
        assert all(0 < answer.stats.accepted_tokens < answer.stats.draft_tokens for answer in answers)
    assert target.pool.in_use == draft.pool.in_use == 0


def test_kernels_run_on_a_cpu_by_the_interpreter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not graph_attention.has_kernels(cpu)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert graph_attention.has_kernels(cpu) == (find_spec("triton") is not None)
    assert not graph_attention.has_kernels(torch.device("meta"))
    monkeypatch.setattr(graph_attention, "find_spec", lambda name: None)
    assert not graph_attention.has_kernels(cpu)


@pytest.mark.slow
def test_nothing_but_the_kernels_needs_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import truedraft.models.backends.graphs as graphs"
    kernels = "import truedraft.models.backends.graphs.layer_kernels"
    subprocess.run([sys.executable, "-c", code], check=True)
    failed = subprocess.run([sys.executable, "-c", f"{code}; {kernels}"], capture_output=True, text=True, check=False)
    assert failed.returncode and "triton" in failed.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["grouped heads", "mistral with a window", "qwen3"])
def test_unrecorded_forwards_give_the_same(name: str) -> None:
    """On a device without graphs, everything runs as it is."""
    plain = HuggingFaceModel(weights(name), None, name, graph_backend)
    for ours, theirs in zip(run_forwards(plain), run_forwards(graphs(weights(name))), strict=True):
        assert ours.equal(theirs)


def test_a_row_does_not_notice_its_neighbours() -> None:
    """The batch decides which kernels run, so only up to rounding."""
    model = graphs(weights("qwen3"))
    texts = [torch.arange(count) * 7 % VOCAB for count in (9, 30, 3)]
    together = model.forward([Segment(model.new_cache(), text, chain_shape(len(text)), (2,)) for text in texts]).logits
    alone = [model.forward([Segment(model.new_cache(), text, chain_shape(len(text)), (2,))]).logits for text in texts]
    assert_equal_up_to_rounding(together, torch.cat(alone))


def test_sampled_answers_do_not_depend_on_how_the_forward_runs() -> None:
    """Float32 rounds alike enough for 64 tokens of each prompt."""
    prompts = [list(prompt) for prompt in PROMPTS]
    for seed in (None, 7):
        params = SamplingParams(max_tokens=64, temperature=0.8, top_p=0.9, seed=seed)
        answers = [
            Engine(target, DraftModel(packed("qwen3"), 3), controller="fixed", entropy=7).generate(prompts, params)
            for target in (graphs(stock("qwen3")), packed("qwen3"))
        ]
        assert [a.token_ids for a in answers[0]] == [a.token_ids for a in answers[1]]


on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("name", CONFIGS)
def test_on_cuda_replayed_forwards_equal_the_models_own(name: str) -> None:
    """Recorded for real where a model fits; float32 products of a GPU sum in another order than those of a CPU."""
    llama = Llama.of(weights(name), probe_patterns(weights(name)))
    model = HuggingFaceModel(weights(name).to("cuda"), None, name, fastest_backend)  # type: ignore[arg-type]
    assert ("CUDA graphs" in model.fast_paths) is (GraphBackend.misfit(llama) is None)
    theirs = run_forwards(HuggingFaceModel(weights(name).double(), None, "modules"))
    for _ in range(2):  # the second time more is replayed
        for ours, exact in zip(run_forwards(model), theirs, strict=True):
            largest, typical = apart(ours, exact, float(exact.std()))
            assert largest <= 1e-3
            assert typical <= 1e-4


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_on_cuda_greedy_answers_equal_those_of_transformers(family: str) -> None:
    expected = [list(tokens) for tokens in reference(family)]
    prompts = [list(prompt) for prompt in PROMPTS]
    target, draft = (
        HuggingFaceModel(module.to("cuda"), None, family, fastest_backend)  # type: ignore[arg-type]
        for module in (stock(family), noisy_stock(family, 0.1))
    )
    for drafter in (None, DraftModel(draft, 3), DraftModel(draft, branching=(3, 2, 1))):
        answers = Engine(target, drafter, controller="fixed").generate(prompts, SamplingParams(max_tokens=COUNT))
        assert [answer.token_ids for answer in answers] == expected


@pytest.mark.gpu
@on_cuda
def test_on_cuda_a_forward_waits_for_nothing() -> None:
    """The driver's own word: any wait raises while this mode is on."""
    model = HuggingFaceModel(stock("mistral").to("cuda"), None, "mistral", fastest_backend)  # type: ignore[arg-type]
    cache, ids = model.new_cache(), torch.arange(7, device="cuda")
    model.forward([Segment(cache, ids, chain_shape(7), ())])
    cache.commit(range(7))
    segments = [Segment(cache, ids, TREE, (1, 6))]
    for _ in range(2):
        model.forward(segments)  # the second records
        cache.rollback(7)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.forward(segments)
        cache.commit((0, 2, 4))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@on_cuda
def test_on_cuda_what_was_returned_outlives_later_replays() -> None:
    model = HuggingFaceModel(stock("llama").to("cuda"), None, "llama", fastest_backend)  # type: ignore[arg-type]
    cache, ids = model.new_cache(), torch.arange(4, device="cuda")
    kept = [model.forward([Segment(cache, ids + step, chain_shape(4), range(4))]).logits for step in range(4)]
    copies = [logits.clone() for logits in kept]
    for shape in (chain_shape(4), TreeShape((-1, 0, 0, 1))):
        for _ in range(3):
            model.forward([Segment(cache, ids + 9, shape, range(4))])
    assert all(logits.equal(copy) for logits, copy in zip(kept, copies, strict=True))
