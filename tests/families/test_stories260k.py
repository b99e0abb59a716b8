"""A real model: the 200 golden ids of stories260K, plain and by speculation. Skipped where its folder is absent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from truedraft import Engine, SamplingParams, load_model
from truedraft.drafters import Drafter, DraftModel, Lookahead, PromptLookup
from truedraft.models.huggingface import HuggingFaceModel

HOME = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "models" / "stories260K"
GOLDEN = HOME / "greedy200_ids.txt"
FOLDER = HOME / "stories260K-hf"
PROMPT = [1]

pytestmark = pytest.mark.skipif(
    not (GOLDEN.is_file() and FOLDER.is_dir()), reason="../shared/data/models/stories260K is absent"
)


@pytest.fixture(scope="module")
def model() -> HuggingFaceModel:
    return load_model(FOLDER, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def golden() -> list[int]:
    return [int(word) for word in GOLDEN.read_text().replace(",", " ").split()]


DRAFTERS: dict[str, Callable[[HuggingFaceModel], Drafter | None]] = {
    "none": lambda model: None,
    "prompt lookup": lambda model: PromptLookup(),
    "lookahead": lambda model: Lookahead(window=5, ngram=4, candidates=4),
    "itself": lambda model: DraftModel(model, num_speculative_tokens=4),
    "itself as a tree": lambda model: DraftModel(model, branching=(3, 2, 1)),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_golden_ids(drafter: str, model: HuggingFaceModel, golden: list[int]) -> None:
    assert len(golden) == 200
    assert len(set(golden)) >= 20
    engine = Engine(model, DRAFTERS[drafter](model), controller="fixed")
    answer = engine.generate(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
    assert answer.token_ids == golden
    assert not answer.warnings
    if drafter in ("prompt lookup", "lookahead"):
        assert answer.stats.accepted_tokens > 0
    if drafter.startswith("itself"):
        depth = 4 if drafter == "itself" else 3
        assert answer.stats.target_calls == -(-199 // (depth + 1))


def test_beside_others(model: HuggingFaceModel, golden: list[int]) -> None:
    """In a batch of ragged prompts the golden answer stays, and each other continues the same story."""
    prompts = [PROMPT, PROMPT + golden[:40], PROMPT + golden[:7]]
    answers = Engine(model, DraftModel(model), controller="fixed").generate(
        prompts, SamplingParams(max_tokens=160, ignore_eos=True)
    )
    assert [answer.token_ids for answer in answers] == [golden[:160], golden[40:200], golden[7:167]]
