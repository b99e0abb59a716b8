"""Greedy and coupled answers of the embedded target are bit for bit the same with and without speculation.

Over 10,000 tokens of each kind, in bfloat16, on held-out prompts: alone against in batches, chains against trees. Where
a kernel let a row depend on its neighbours, near ties of the argmax would break this at about one token in a hundred
(docs/lossless.md). The models are loaded as users load them, with the fast paths that this machine has.
"""

from __future__ import annotations

import json

import pytest
import torch

from truedraft import Engine, SamplingParams, load_model
from truedraft.drafters import DraftModel, PromptLookup
from truedraft.embedded import embedded_folder, heldout_prompts_file
from truedraft.errors import ModelNotFoundError
from truedraft.machine import has_bfloat16
from truedraft.models.backends.fused import FusedBackend
from truedraft.models.backends.native import NativeBackend
from truedraft.models.backends.native.build import built
from truedraft.models.backends.stock import StockBackend
from truedraft.models.base import LanguageModel
from truedraft.models.huggingface import HuggingFaceModel

try:
    embedded_folder("target")
except ModelNotFoundError:
    pytest.skip("the embedded models are not in this checkout", allow_module_level=True)

needs_bfloat16 = pytest.mark.skipif(
    not has_bfloat16(torch.device("cpu")), reason="this CPU has no bfloat16 instructions, so no row-invariant products"
)
TOKENS = 313  # for each of 32 prompts: 10,016 in all
OPTIONS = {
    "greedy": SamplingParams(max_tokens=TOKENS, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=1.0, seed=11),
}


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [json.loads(line)["text"] for line in heldout_prompts_file().read_text().splitlines()]


@pytest.fixture(scope="module")
def target() -> HuggingFaceModel:
    return load_model("embedded:target", dtype="bfloat16", device="cpu")


@pytest.fixture(scope="module")
def draft() -> HuggingFaceModel:
    return load_model("embedded:draft", dtype="bfloat16", device="cpu")


@needs_bfloat16
def test_these_are_the_fast_paths(target: HuggingFaceModel, draft: HuggingFaceModel) -> None:
    """What the tests below compare is what `load_model` gives, and it is not the models' own modules."""
    assert target.fast_paths
    assert draft.fast_paths
    assert not isinstance(target._backend, StockBackend)
    assert type(target._backend) is type(draft._backend)
    assert isinstance(target._backend, FusedBackend if built(torch.bfloat16).library is None else NativeBackend)


@pytest.fixture(scope="module")
def plain(target: LanguageModel, prompts: list[str]) -> dict[str, list[list[int]]]:
    """Plain answers, in batches of 11."""
    engine = Engine(target, max_batch=11)
    return {name: [a.token_ids for a in engine.generate(prompts, params)] for name, params in OPTIONS.items()}


@needs_bfloat16
@pytest.mark.parametrize("name", OPTIONS)
def test_ten_thousand_tokens_are_the_same_with_a_chain(
    target: LanguageModel, draft: LanguageModel, prompts: list[str], plain: dict[str, list[list[int]]], name: str
) -> None:
    answers = Engine(target, DraftModel(draft, 4), max_batch=7, controller="fixed").generate(prompts, OPTIONS[name])
    assert sum(len(answer.token_ids) for answer in answers) >= 10_000
    assert [answer.token_ids for answer in answers] == plain[name]
    assert sum(answer.stats.accepted_tokens for answer in answers) > 2_000  # speculation did take place


@needs_bfloat16
@pytest.mark.parametrize("name", OPTIONS)
def test_answers_alone_and_with_trees_are_the_same(
    target: LanguageModel, draft: LanguageModel, prompts: list[str], plain: dict[str, list[list[int]]], name: str
) -> None:
    tree = Engine(target, DraftModel(draft, branching=(3, 2, 1)), max_batch=5, controller="fixed")
    assert [answer.token_ids for answer in tree.generate(prompts[:8], OPTIONS[name])] == plain[name][:8]
    for engine in (Engine(target), Engine(target, PromptLookup(), controller="fixed")):
        assert engine.generate(prompts[8], OPTIONS[name]).token_ids == plain[name][8]


def test_answers_are_not_all_repetition(plain: dict[str, list[list[int]]]) -> None:
    """The comparison would be weak on answers that repeat one token."""
    assert sum(len(set(tokens)) for tokens in plain["seeded"]) / len(plain["seeded"]) > 60
