"""A drafter that never drafts: the answer's statistics say why."""

from __future__ import annotations

import re

import pytest

from cli.tiny import save_tiny_llama
from truedraft import Engine, SamplingParams, load_model
from truedraft.drafters import DraftModel
from truedraft.models.base import LanguageModel

SOME = SamplingParams(max_tokens=12)
WEIGHED = (
    r"plain was expected to be faster \(draft: a draft of 4 takes [\d.]+ ms, a row [\d.]+ ms, and [\d.]+ of 4 were "
    r"expected to be accepted; a plain step takes [\d.]+ ms\)"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[LanguageModel, LanguageModel]:
    """A target, and a draft of its tokenizer that takes longer than it and guesses nothing."""
    folder = tmp_path_factory.mktemp("models")
    target = load_model(save_tiny_llama(folder / "target", seed=1, layers=1), dtype="float32")
    return target, load_model(save_tiny_llama(folder / "draft", seed=2, layers=12), dtype="float32")


def measured(engine: Engine) -> Engine:
    """One that knows what its steps take before it is asked anything."""
    while engine.measure_ahead():
        pass
    return engine


def test_it_is_told_why_nothing_was_drafted(models: tuple[LanguageModel, LanguageModel]) -> None:
    target, draft = models
    waiting = Engine(target, DraftModel(draft)).generate("def f(x):", SamplingParams(max_tokens=3)).stats
    assert waiting.undrafted == "what drafts take was still being measured"
    stats = measured(Engine(target, DraftModel(draft))).generate("def f(x):", SOME).stats
    assert stats.drafted_calls == 0 and stats.undrafted is not None
    assert re.fullmatch(WEIGHED, stats.undrafted), stats.undrafted
    several = measured(Engine(target, DraftModel(draft))).generate(["def f(x):", "class A:"], SOME)
    assert all(re.match("plain was expected to be faster", each.stats.undrafted or "") for each in several)
    drafted = Engine(target, DraftModel(draft), controller="fixed").generate("def f(x):", SOME).stats
    assert drafted.drafted_calls > 0 and drafted.undrafted is None
    assert (stats + drafted).undrafted == stats.undrafted and (stats + drafted).drafted_calls == drafted.drafted_calls


def test_a_drafter_that_finds_nothing_is_told_from_one_that_costs_too_much(
    models: tuple[LanguageModel, LanguageModel],
) -> None:
    target, _ = models
    nothing = SamplingParams(max_tokens=3)
    told = {"goodput": "no drafter found anything to propose", "fixed": "no drafter proposed anything"}
    for controller, words in told.items():
        engine = measured(Engine(target, "prompt-lookup,min_ngram=3", controller=controller))
        assert engine.generate([5, 6, 7, 8, 9], nothing).stats.undrafted == words
    assert Engine(target).generate([5, 6, 7], nothing).stats.undrafted is None
