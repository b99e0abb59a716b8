"""Recorded models in the engine: which steps are settled, and that a draft which pays is drafted with at once."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.tiny import save_tiny_llama
from support.answers import fixed
from support.backends import HostRecorder, graph_backend
from support.fake_times import FakeClock
from support.random_decisions import RandomDecisions
from support.recorded_time import go_by, recorded_model
from support.records import watched
from support.tiny_models import PROMPTS, noisy, noisy_stock, packed
from truedraft import Engine, SamplingParams, load_model
from truedraft.drafters import Drafter, DraftModel, PromptLookup
from truedraft.drafters.cascade import Cascade
from truedraft.drafters.portfolio import Portfolio
from truedraft.engine.policy import FixedBudget, Goodput
from truedraft.engine.policy.decisions import PROBE, what_was_decided
from truedraft.errors import TruedraftError
from truedraft.models.base import LanguageModel
from truedraft.models.huggingface import HuggingFaceModel

PROMPT = [place * 7919 % 97 for place in range(40)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeClock:
    made = FakeClock()
    go_by(made, monkeypatch, tmp_path)
    return made


def drafting(clock: FakeClock, draft_s: float = 0.25e-3) -> Engine:
    """A draft that costs a twentieth of the target's forward, or so much, and is always right; five rows cost the
    target as good as one."""
    target = recorded_model("target", clock, lambda rows: 5.5e-3 + 1e-5 * rows, positions=2048)
    draft = recorded_model("draft", clock, lambda rows: draft_s)
    return Engine(target, DraftModel(draft, 4), controller=Goodput(clock=clock))


def test_a_draft_that_pays_is_drafted_with_from_the_first_measurement_on(clock: FakeClock) -> None:
    engine = drafting(clock, draft_s=0.15e-3)  # it would stop by its own probabilities, which are low, from 0.2 ms on
    engine.measure()
    steps = watched(engine)
    engine.generate(PROMPT, SamplingParams(max_tokens=48))
    decoding = [step for step in steps if not step.prefill]
    decided = [step for step in decoding if what_was_decided(step.requests[0]) != PROBE]
    assert not decided[0].settled, "its shape is new, which says nothing of what it will take"
    assert [step.nodes for step in decided[:4]] == [4] * 4
    assert sum(step.nodes for step in decoding) / len(decoding) > 2.0


def test_answers_go_on_plainly_while_costs_are_measured_for_half_the_time(clock: FakeClock) -> None:
    engine = drafting(clock)
    for _ in range(21):  # or recording its shapes would take longer than the answer
        engine.measure_ahead()
    steps, ends = watched(engine), []
    engine.listeners.append(lambda step: ends.append(clock()))
    answer = engine.generate(PROMPT, SamplingParams(max_tokens=400))
    decoding = [(step, end) for step, end in zip(steps, ends, strict=True) if not step.prefill]
    reasons = [None if (it := step.requests[0].decision) is None else it.reason for step, _ in decoding]
    plain = reasons.count("measuring")
    assert plain > 20 and set(reasons[:plain]) == {"measuring"}, "they come first"
    assert all(step.nodes == 0 for step, _ in decoding[:plain])
    assert sum(step.nodes for step, _ in decoding[plain:]) > 40
    steps_s = sum(step.total_s for step, _ in decoding[1:plain])
    measuring_s = decoding[plain - 1][1] - decoding[0][1] - steps_s
    assert 0.9 * steps_s < measuring_s < steps_s + 0.4, "a quarter of a second at once, and the end of a recording"
    assert answer.token_ids == Engine(engine.target).generate(PROMPT, SamplingParams(max_tokens=400)).token_ids
    again = Engine(engine.target, engine.drafter, controller=Goodput(clock=clock))
    seen = watched(again)
    again.generate(PROMPT, SamplingParams(max_tokens=24))
    assert sum(step.nodes for step in seen) > 8, "what was measured is kept"


def test_measuring_ahead_needs_no_request(clock: FakeClock) -> None:
    engine = drafting(clock)
    assert sum(1 for _ in itertools.takewhile(bool, iter(engine.measure_ahead, None))) > 100
    assert not engine.measure_ahead() and engine.costs.measuring_s == 0.0 and engine.check_idle() == []
    steps = watched(engine)
    engine.generate(PROMPT, SamplingParams(max_tokens=24))
    assert sum(step.nodes for step in steps) > 8
    engine.listeners.append(lambda step: engine.measure_ahead())
    with pytest.raises(TruedraftError, match="inside a step"):
        engine.generate(PROMPT, SamplingParams(max_tokens=8))
    assert not Engine(engine.target).measure_ahead()


def test_a_draft_that_does_not_pay_is_left_alone(clock: FakeClock) -> None:
    """It takes as long as the target: what the engine measures says so, too."""
    engine = drafting(clock, draft_s=5.5e-3)
    engine.measure()
    steps = watched(engine)
    engine.generate(PROMPT, SamplingParams(max_tokens=48))
    assert sum(step.nodes for step in steps) < 12


DRAFTERS: dict[str, Callable[[LanguageModel], Drafter]] = {
    "draft model": lambda draft: DraftModel(draft, 3),
    "portfolio": lambda draft: Portfolio([PromptLookup(min_ngram=1), DraftModel(draft, 3)]),
    "middle of a cascade": lambda draft: Cascade(PromptLookup(min_ngram=1), DraftModel(draft), 4),
    "first of a cascade": lambda draft: Cascade(DraftModel(draft, 3), DraftModel(noisy("llama", 0.1)), 4),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_steps_in_which_a_draft_is_recorded_are_not_settled(name: str) -> None:
    recorder = HostRecorder()
    draft = HuggingFaceModel(noisy_stock("llama", 0.2), None, "draft", lambda module: graph_backend(module, recorder))
    controller = RandomDecisions(4) if name == "portfolio" else FixedBudget()
    engine = Engine(packed("llama"), DRAFTERS[name](draft), controller=controller)
    seen: list[int] = []
    engine.listeners.append(lambda record: seen.append(draft.warmups))
    steps = watched(engine)
    for _ in range(3):
        engine.generate(list(PROMPTS[0]), SamplingParams(max_tokens=24))
    said = [step.settled for step in steps]
    assert said == [now == before for before, now in itertools.pairwise([0, *seen])]
    assert recorder.made and not all(said)
    assert all(said[-3:])


# ------------------------------------------------------------------------------------------ why nothing is drafted

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
    stats = measured(Engine(target, DraftModel(draft))).generate("def f(x):", SamplingParams(max_tokens=12)).stats
    assert stats.drafted_calls == 0 and stats.undrafted is not None
    assert re.fullmatch(WEIGHED, stats.undrafted), stats.undrafted
    several = measured(Engine(target, DraftModel(draft))).generate(
        ["def f(x):", "class A:"], SamplingParams(max_tokens=12)
    )
    assert all(re.match("plain was expected to be faster", each.stats.undrafted or "") for each in several)
    drafted = fixed(target, DraftModel(draft)).generate("def f(x):", SamplingParams(max_tokens=12)).stats
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
