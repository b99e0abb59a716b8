"""Forwards over a arena give what the model's own modules give, up to rounding, in every shape of forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from support.backends import HostRecorder, graph_backend
from support.tiny_models import PROMPTS, VOCAB, WINDOW, build, noisy_stock, packed, reference, stock, stock_logits
from truedraft import Engine, SamplingParams
from truedraft.cache import RequestCache
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.drafters import DraftModel
from truedraft.errors import CacheError
from truedraft.machine import has_bfloat16
from truedraft.models.backends.graphs import GraphBackend
from truedraft.models.base import Segment
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.llama import Llama
from truedraft.models.loading import fastest_backend
from truedraft.models.probe import check_against_stock, probe_patterns

needs_bfloat16 = pytest.mark.skipif(not has_bfloat16(torch.device("cpu")), reason="no bfloat16 instructions")

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "grouped heads": lambda: LlamaConfig(**SMALL),
    "a key head for each": lambda: LlamaConfig(**SMALL | {"num_key_value_heads": 4}),
    "one key head": lambda: LlamaConfig(**SMALL | {"num_key_value_heads": 1}),
    "biases": lambda: LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "odd sizes": lambda: LlamaConfig(**SMALL | {"hidden_size": 44, "intermediate_size": 90}, head_dim=14),
    "tied": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "gelu": lambda: LlamaConfig(**SMALL, hidden_act="gelu"),
    "rope yarn": lambda: LlamaConfig(**SMALL, rope_parameters=YARN),
    "mistral with a window": lambda: MistralConfig(**SMALL, sliding_window=WINDOW),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "qwen2 with a window from the second layer on": lambda: Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=64),
}
TREE = TreeShape((-1, 0, 0, 1, 2, 2, 4))
"""A root token and below it 6 nodes with the leaves 3, 5 and 6; the path 0, 2, 4, 6 skips two of them."""
LARGE_TREE = TreeShape((-1, 0, 0, *range(1, 69)))
"""71 nodes: two branches in turns, more than one number of 64 bits tells about."""


def recorded(model: PreTrainedModel) -> GraphBackend:
    return graph_backend(model, HostRecorder())


def weights(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return build(CONFIGS[name](), seed=0, spread=0.15, dtype=dtype)


def graphs(model: PreTrainedModel) -> HuggingFaceModel:
    return HuggingFaceModel(model, None, "graphs", recorded)


def by_modules(model: PreTrainedModel) -> HuggingFaceModel:
    return HuggingFaceModel(model, None, "modules")


def run_forwards(model: HuggingFaceModel) -> tuple[Tensor, Tensor]:
    """All rows of prefills, chains and trees, mixed and alone, by levels; slots that move; a arena that grows.

    Returns:
        Logits `[rows, vocab]` and vectors before the head `[rows, width]`, float64, on the CPU.
    """
    generator = torch.Generator().manual_seed(5)
    outputs: list[tuple[Tensor, Tensor]] = []

    def drawn(count: int) -> Tensor:
        return torch.randint(VOCAB, (count,), generator=generator).to(model.device)

    def forward(*segments: Segment) -> None:
        output = model.forward(segments)
        outputs.append((output.logits.double().cpu(), output.hidden.double().cpu()))

    def chain(cache: RequestCache, count: int) -> Segment:
        return Segment(cache, drawn(count), chain_shape(count), range(count))

    def tree(cache: RequestCache, shape: TreeShape = TREE, rows: Sequence[int] | None = None) -> Segment:
        return Segment(cache, drawn(len(shape)), shape, range(len(shape)) if rows is None else rows)

    first, second, third = (model.new_cache() for _ in range(3))
    forward(chain(first, 5), chain(second, 90), chain(third, 1))  # a long prompt between short ones
    for cache, count in zip((first, second, third), (5, 90, 1), strict=True):
        cache.commit(range(count))
    for _ in range(2):
        forward(tree(first), chain(second, 4), chain(third, 1))
        first.commit((0, 2, 4, 6))
        second.commit((0, 1))
        third.commit((0,))
    for written, until in ((0, 1), (1, 3), (3, 7)):
        level = TreeShape(TREE.parents[:until])
        forward(Segment(second, drawn(until - written), level, range(until - written), written))
    second.commit((0, 2, 5))
    forward(chain(third, 1))
    forward(tree(second, rows=(1, 6)), chain(first, 2))  # another order, few rows
    second.commit(())
    second.rollback(40)
    model.release_cache(first)  # the last of the slots moves
    forward(chain(second, 3), tree(third, LARGE_TREE, range(0, 71, 7)))
    third.commit((0, 1, 3, 5))
    second.commit((0, 1, 2))
    fourth, fifth = model.new_cache(), model.new_cache()
    forward(chain(fourth, 30), chain(third, 1), chain(fifth, 2))
    for cache, count in ((fourth, 30), (third, 1), (fifth, 2)):
        cache.commit(range(count))
    forward(Segment(fourth, drawn(230), chain_shape(230), ()))  # nothing wanted; capacity grows
    fourth.commit(range(230))
    forward(tree(fourth), tree(second), chain(fifth, 1))
    for cache in (second, third, fourth, fifth):
        model.release_cache(cache)
    logits, hidden = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    return logits, hidden


def apart(left: Tensor, right: Tensor, spread: float) -> tuple[float, float]:
    """Largest and root mean square difference, in units of the spread of what is compared."""
    difference = (left - right) / spread
    return float(difference.abs().max()), float(difference.square().mean().sqrt())


def assert_equal_up_to_rounding(ours: Tensor, theirs: Tensor) -> None:
    """Each product sums about 100 terms and is off by some 1e-7 of its size; a wrong mask or position gives 1."""
    largest, typical = apart(ours, theirs, float(theirs.std()))
    assert largest <= 5e-5
    assert typical <= 5e-6


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_equals_the_models_own_modules(name: str) -> None:
    for ours, theirs in zip(run_forwards(graphs(weights(name))), run_forwards(by_modules(weights(name))), strict=True):
        assert_equal_up_to_rounding(ours, theirs)


@pytest.mark.parametrize("name", ["grouped heads", "mistral with a window", "qwen3"])
def test_unrecorded_forwards_give_the_same(name: str) -> None:
    """On a device without graphs, everything runs as it is."""
    plain = HuggingFaceModel(weights(name), None, name, graph_backend)
    for ours, theirs in zip(run_forwards(plain), run_forwards(graphs(weights(name))), strict=True):
        assert ours.equal(theirs)


@needs_bfloat16
@pytest.mark.parametrize("name", ["grouped heads", "mistral with a window", "qwen3", "biases"])
def test_bfloat16_is_as_near_to_the_exact_answer_as_the_models_own_modules(name: str) -> None:
    """The exact answer is that of the same bfloat16 weights in float64; both ways round some ten times a layer."""
    bfloat16 = torch.bfloat16
    truth = run_forwards(by_modules(weights(name, bfloat16).double()))
    fast, slow = (run_forwards(make(weights(name, bfloat16))) for make in (graphs, by_modules))
    for true, ours, theirs in zip(truth, fast, slow, strict=True):
        spread = float(true.std())
        largest, typical = apart(ours, theirs, spread)
        assert largest <= 0.7
        assert typical <= 0.07
        assert apart(ours, true, spread)[1] <= 1.3 * apart(theirs, true, spread)[1]


def test_the_window_is_seen_by_these_texts() -> None:
    """The comparisons above would notice a window that was lost."""
    with_window, without = (run_forwards(graphs(weights(name)))[0] for name in ("mistral with a window", "mistral"))
    assert apart(with_window, without, float(without.std()))[0] > 0.5


@pytest.mark.parametrize("name", ["grouped heads", "tied", "qwen3"])
def test_a_prompt_equals_transformers_own_forward(name: str) -> None:
    """Without any of our code on the other side; short and long ones run differently."""
    for count in (40, 100):
        text = torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(6))
        model = graphs(weights(name))
        logits = model.forward([Segment(model.new_cache(), text, chain_shape(count), range(count))]).logits
        assert_equal_up_to_rounding(logits, stock_logits(weights(name), text.tolist()))


def test_a_row_does_not_notice_its_neighbours() -> None:
    """The batch decides which kernels run, so only up to rounding."""
    model = graphs(weights("qwen3"))
    texts = [torch.arange(count) * 7 % VOCAB for count in (9, 30, 3)]
    together = model.forward([Segment(model.new_cache(), text, chain_shape(len(text)), (2,)) for text in texts]).logits
    alone = [model.forward([Segment(model.new_cache(), text, chain_shape(len(text)), (2,))]).logits for text in texts]
    assert_equal_up_to_rounding(together, torch.cat(alone))


@pytest.mark.parametrize("tokens", [5, 80])
def test_a_broken_request_leaves_its_neighbours_and_its_heirs_alone(tokens: int) -> None:
    """NaN in the keys of one request, whose slot another one takes afterwards."""
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


def test_a_failed_forward_leaves_the_model_usable() -> None:
    model = graphs(weights("grouped heads"))
    ids = torch.tensor([5, 9, 11])
    expected = model.forward([Segment(model.new_cache(), ids, chain_shape(3), range(3))]).logits
    cache = model.new_cache()
    for _ in range(2):
        with pytest.raises(IndexError):
            model.forward([Segment(cache, torch.tensor([VOCAB + 5]), chain_shape(1), (0,))])
    assert model.forward([Segment(cache, ids, chain_shape(3), range(3))]).logits.equal(expected)


def test_a_foreign_cache_is_refused() -> None:
    model, other = graphs(weights("grouped heads")), graphs(weights("grouped heads"))
    for cache in (RequestCache(512), other.new_cache()):
        with pytest.raises(CacheError, match="made by another model"):
            model.forward([Segment(cache, torch.tensor([5]), chain_shape(1), (0,))])


def test_the_check_at_load_holds_it_to_the_stock_forward() -> None:
    module = stock("llama")
    check = check_against_stock(module, "llama")
    check(graphs(module))


def test_which_models_fit() -> None:
    for family, fits in (("llama", True), ("mistral", True), ("qwen3", True), ("gemma3", False), ("gpt2", False)):
        module = stock(family)
        llama = Llama.of(module, probe_patterns(module))
        assert (llama is not None and GraphBackend.fits(llama)) is fits
    module = stock("llama")
    assert not isinstance(HuggingFaceModel(module, None, "cpu", fastest_backend)._backend, GraphBackend)
    assert "CUDA graphs" not in graphs(stock("llama")).fast_paths


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("max_batch", [1, 3])
def test_greedy_answers_equal_those_of_transformers(family: str, max_batch: int) -> None:
    """Plain, by a chain and by a tree, from a draft that often errs; requests come and go, so slots move."""
    expected = [list(tokens)[:64] for tokens in reference(family)]
    prompts = [list(prompt) for prompt in PROMPTS]
    target, draft = graphs(stock(family)), graphs(noisy_stock(family, 0.1))
    for drafter in (None, DraftModel(draft, 3), DraftModel(draft, branching=(3, 2, 1))):
        engine = Engine(target, drafter, max_batch=max_batch, controller="fixed")
        answers = engine.generate(prompts, SamplingParams(max_tokens=64))
        assert [answer.token_ids for answer in answers] == expected
        if drafter is not None:
            assert all(0 < answer.stats.accepted_tokens < answer.stats.draft_tokens for answer in answers)
    assert target.pool.in_use == draft.pool.in_use == 0


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
    """Recorded for real; float32 products of the GPU sum in another order than those of the CPU."""
    model = HuggingFaceModel(weights(name).to("cuda"), None, name, fastest_backend)  # type: ignore[arg-type]
    assert "CUDA graphs" in model.fast_paths
    theirs = run_forwards(by_modules(weights(name).double()))
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
        answers = Engine(target, drafter, controller="fixed").generate(prompts, SamplingParams(max_tokens=128))
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
