"""Greedy and coupled answers of the embedded target are bit for bit the same with and without speculation.

In bfloat16, on held-out prompts: alone against in batches, chains against trees. Where a kernel let a row depend on
its neighbours, near ties of the argmax would break this at about one token in a hundred (docs/lossless.md): over 10,000
tokens of each kind are compared. The models are loaded as users load them, with the fast paths that this machine has.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from support.embedded_models import embedded
from truedraft import Answer, Engine, SamplingParams
from truedraft.drafters import DraftModel, PromptLookup
from truedraft.machine import has_bfloat16
from truedraft.models import HuggingFaceModel, LanguageModel
from truedraft.models.backends.fused import FusedBackend
from truedraft.models.backends.native import NativeBackend
from truedraft.models.backends.native.build import built
from truedraft.models.backends.stock import StockBackend
from truedraft.models.embedded import heldout_prompts_file

needs_bfloat16 = pytest.mark.skipif(
    built(torch.bfloat16).library is None and not has_bfloat16(torch.device("cpu")),
    reason="this CPU has neither bfloat16 instructions nor a compiler, so no row-invariant products",
)
Options = dict[str, SamplingParams]


TOKENS = 313
"""Of each of 32 prompts: 10,016 in all."""


@pytest.fixture(scope="module")
def options() -> Options:
    greedy = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    return {"greedy": greedy, "seeded": replace(greedy, temperature=1.0, seed=11)}


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [json.loads(line)["text"] for line in heldout_prompts_file().read_text().splitlines()]


@pytest.fixture(scope="module")
def target() -> HuggingFaceModel:
    return embedded(dtype="bfloat16", device="cpu")


@pytest.fixture(scope="module")
def draft() -> HuggingFaceModel:
    return embedded("draft", dtype="bfloat16", device="cpu")


@needs_bfloat16
def test_these_are_the_fast_paths(target: HuggingFaceModel, draft: HuggingFaceModel) -> None:
    """What the tests below compare is what `load_model` gives, and it is not the models' own modules."""
    assert target.fast_paths
    assert draft.fast_paths
    assert not isinstance(target._backend, StockBackend)
    assert type(target._backend) is type(draft._backend)
    assert isinstance(target._backend, FusedBackend if built(torch.bfloat16).library is None else NativeBackend)


def answers_of(engine: Engine, prompts: list[str], options: Options) -> dict[str, list[Answer]]:
    """Greedy and seeded ones, which wait together and stand beside each other in batches."""
    found = engine.generate(prompts * len(options), [each for each in options.values() for _ in prompts])
    return {name: found[at * len(prompts) : (at + 1) * len(prompts)] for at, name in enumerate(options)}


@pytest.fixture(scope="module")
def plain(target: LanguageModel, prompts: list[str], options: Options) -> dict[str, list[list[int]]]:
    """Plain answers, in batches of 22."""
    found = answers_of(Engine(target, max_batch=22), prompts, options)
    return {name: [answer.token_ids for answer in answers] for name, answers in found.items()}


@pytest.mark.slow
@needs_bfloat16
def test_answers_with_a_chain_are_the_same(
    target: LanguageModel, draft: LanguageModel, prompts: list[str], options: Options, plain: dict[str, list[list[int]]]
) -> None:
    engine = Engine(target, DraftModel(draft, 4), max_batch=14, controller="fixed")
    for name, answers in answers_of(engine, prompts, options).items():
        assert [answer.token_ids for answer in answers] == plain[name]
        assert sum(len(answer.token_ids) for answer in answers) == 32 * TOKENS
        assert sum(answer.stats.accepted_tokens for answer in answers) > 32 * TOKENS // 5  # speculation did take place


@pytest.mark.slow
@needs_bfloat16
def test_answers_alone_and_with_trees_are_the_same(
    target: LanguageModel, draft: LanguageModel, prompts: list[str], options: Options, plain: dict[str, list[list[int]]]
) -> None:
    tree = Engine(target, DraftModel(draft, branching=(3, 2, 1)), max_batch=5, controller="fixed")
    for name, answers in answers_of(tree, prompts[:5], options).items():
        assert [answer.token_ids for answer in answers] == plain[name][:5]
    for engine in (Engine(target), Engine(target, PromptLookup(), controller="fixed")):
        for name, params in options.items():
            assert engine.generate(prompts[8], params).token_ids == plain[name][8]


@pytest.mark.slow
def test_answers_are_not_all_repetition(plain: dict[str, list[list[int]]]) -> None:
    """The comparison would be weak on answers that repeat one token."""
    assert sum(len(set(each)) for each in plain["seeded"]) / len(plain["seeded"]) > TOKENS // 5
