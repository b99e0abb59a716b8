"""A drafter that fails because of what it drew bends no answer: what it had drawn by then is judged.

The second tokens of answers are counted against the target's own distribution; a sound engine fails a case with
probability below `FALSE_ALARM`. Noise is fixed, so a run repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from support.chi_square import p_value
from support.layer_heads import random_head, target
from support.tiny_models import CONTEXT, PROMPTS
from support.tiny_models import VOCAB as WORDS
from truedraft import Engine, SamplingParams
from truedraft.core.noise import Purpose, UniformKeys, uniforms
from truedraft.core.probs import draw
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.drafters import Budget, Cascade, CutShortError, Drafter, DraftModel, Eagle3
from truedraft.kinds.eagle.module import Eagle3Config, Eagle3Head
from truedraft.models.base import ForwardOutput, Segment
from truedraft.testing import MarkovModel
from truedraft.verification import BlockVerification, Rule, SpeculativeSampling

pytestmark = pytest.mark.plants_failures
VOCAB, BATCH, BATCHES = 4, 50, 16
FALSE_ALARM = 1e-6
WARM = SamplingParams(max_tokens=5, temperature=1.0)


class FailsAtZero(MarkovModel):
    """Fails whenever it is fed token 0."""

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        if any(0 in segment.tokens.tolist() for segment in segments):
            raise RuntimeError("out of order")
        return super().forward(segments)


def uneven(kind: type[MarkovModel] = MarkovModel, *weights: float) -> MarkovModel:
    """The same distribution everywhere."""
    return kind(torch.tensor(weights or (0.3, 0.3, 0.2, 0.2), dtype=torch.float64).expand(VOCAB, VOCAB, VOCAB).clone())


EVEN = uneven(MarkovModel, 0.25, 0.25, 0.25, 0.25)
EVEN.probs[1, 2] = torch.tensor([0.0, 1.0, 1.0, 1.0]) / 3  # no answer begins with 0, so all are drafted for


class ByHand(Drafter):
    """Draws chains of two from even distributions, and fails behind token 0; it says what it drew, or not."""

    name = "by hand"
    limits = Budget(2)
    kinds = frozenset({DrawKind.INDEPENDENT})  # type: ignore[assignment]

    def __init__(self, tells: bool) -> None:
        self._tells = tells

    def propose(self, batch, budgets, noise):  # type: ignore[no-untyped-def]
        return [self._chain(len(batch), *each) for each in zip(budgets, noise, strict=True)]

    def _chain(self, asked, budget, noise):  # type: ignore[no-untyped-def]
        tokens: list[int] = []
        rows = torch.full((budget.depth, VOCAB), 1 / VOCAB, dtype=torch.float64)
        for depth in range(budget.depth):
            uniform = torch.tensor([noise.uniform(Purpose.DRAFT, depth)], dtype=torch.float64)
            tokens.append(int(draw(rows[:1], uniform)))
            if tokens[-1] == 0:
                error = RuntimeError("out of order")
                drawn = Proposal.chain(torch.tensor(tokens), rows[: len(tokens)])
                if self._tells and asked == 1:
                    raise CutShortError(drawn) from error
                raise error
        return Proposal.chain(torch.tensor(tokens), rows) if tokens else Proposal.empty()


MAKERS: dict[str, Callable[[], Drafter]] = {
    "chain": lambda: DraftModel(uneven(FailsAtZero), 2),
    "without replacement": lambda: DraftModel(uneven(FailsAtZero), branching=(2, 1)),
    "several chains": lambda: DraftModel(uneven(FailsAtZero), 2, chains=2),
    "inside a cascade": lambda: Cascade(DraftModel(uneven(FailsAtZero), 3), DraftModel(uneven(), 4), 4),
    "the middle of a cascade": lambda: Cascade(DraftModel(EVEN, 3), DraftModel(uneven(FailsAtZero), 4), 4),
    "by hand": lambda: ByHand(tells=True),
}


def chance(drafter: Drafter, rule: Rule) -> float:
    engine = Engine(EVEN, drafter, rule, controller="fixed", max_batch=BATCH, entropy=3)
    counts = np.zeros(VOCAB, dtype=np.int64)
    for _ in range(BATCHES):
        for answer in engine.generate([[1, 2]] * BATCH, WARM):
            assert answer.error is None
            counts[answer.token_ids[1]] += 1
    return p_value(counts, np.full(VOCAB, 1 / VOCAB))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", MAKERS)
def test_the_answers_follow_the_target(name: str) -> None:
    assert chance(MAKERS[name](), SpeculativeSampling()) > FALSE_ALARM


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_so_they_do_where_blocks_are_judged() -> None:
    assert chance(MAKERS["chain"](), BlockVerification()) > FALSE_ALARM


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0, seed=4)], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize("name", MAKERS)
def test_greedy_and_seeded_answers_stay_what_they_are(name: str, params: SamplingParams) -> None:
    if name == "by hand":
        pytest.skip("it draws for sampled requests alone")
    model, prompts = MarkovModel.random(VOCAB, seed=2), [[1, 2], [3, 3], [2, 1]]
    params = replace(params, max_tokens=12)
    plain = [answer.token_ids for answer in Engine(model).generate(prompts, params)]
    made = Engine(model, MAKERS[name](), controller="fixed").generate(prompts, params)
    assert [answer.token_ids for answer in made] == plain


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_where_nobody_knows_what_was_drawn_there_is_no_answer() -> None:
    engine = Engine(EVEN, ByHand(tells=False), controller="fixed", max_batch=BATCH, entropy=3)
    answers = engine.generate([[1, 2]] * BATCH, WARM)
    failed = [answer for answer in answers if answer.error is not None]
    assert 0 < len(failed) < BATCH
    assert all("did not say what (RuntimeError: out of order)" in str(answer.error) for answer in failed)


class DrawsMany(ByHand):
    """Draws as many numbers at once as are worked out together, and fails then."""

    def _chain(self, asked, budget, noise):  # type: ignore[no-untyped-def]
        numbers = np.arange(64)
        uniforms([noise], Purpose.DRAFT, UniformKeys(numbers * 0, numbers * 0, numbers))
        raise RuntimeError("out of order")


class FailsBefore(ByHand):
    """Fails together after it has drawn, and alone before it does."""

    def _chain(self, asked, budget, noise):  # type: ignore[no-untyped-def]
        if asked > 1:
            noise.uniform(Purpose.DRAFT, 0)
        raise RuntimeError("out of order")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_numbers_that_are_worked_out_together_are_drawn_as_well() -> None:
    (answer,) = Engine(EVEN, DrawsMany(tells=False), controller="fixed").generate([[1, 2]], WARM)
    assert "did not say what (RuntimeError: out of order)" in str(answer.error)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_was_drawn_together_is_not_drawn_where_each_is_asked_for_alone() -> None:
    answers = Engine(EVEN, FailsBefore(tells=False), controller="fixed", max_batch=BATCH).generate([[1, 2]] * 4, WARM)
    assert [(answer.error, len(answer.token_ids)) for answer in answers] == [(None, 5)] * 4


def eagle() -> Eagle3:
    sizes = Eagle3Config(48, WORDS, (0, 1), heads=4, kv_heads=2, head=16, inner=64, reach=3, most_positions=CONTEXT)
    return Eagle3(random_head(Eagle3Head, sizes))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("at", [1, 2], ids=["reading", "below a drawn token"])
def test_heads_draft_on_after_a_batch_that_failed(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Together they fail once, each alone does not: the same is drafted as if nothing had failed."""
    params, drafted = SamplingParams(max_tokens=12, temperature=1.0), []
    for fails in (False, True):
        drafter = eagle()
        engine = Engine(target(), drafter, controller="fixed", entropy=3)
        runner, calls = drafter._running[0], [0]
        forward = runner.forward

        def failing(segments, vectors, observed, forward=forward, calls=calls, fails=fails):  # type: ignore[no-untyped-def]
            calls[0] += len(segments) > 1
            if fails and len(segments) > 1 and calls[0] == at:
                raise RuntimeError("out of memory")
            return forward(segments, vectors, observed)

        monkeypatch.setattr(runner, "forward", failing)
        answers = engine.generate([list(each) for each in PROMPTS], params)
        drafted.append([(answer.token_ids, answer.stats.draft_tokens, answer.warnings) for answer in answers])
        assert sum(answer.stats.recoveries for answer in answers) == fails * len(PROMPTS)
    assert drafted[0] == drafted[1] and min(count for _, count, _ in drafted[0]) > 12


@pytest.mark.parametrize("level", [1, 2])
def test_what_a_head_drew_before_it_failed_is_proposed(monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    drafter = eagle()
    engine = Engine(target(), drafter, controller="fixed", entropy=3)
    runner, calls = drafter._running[0], [0]
    forward = runner.forward

    def failing(segments, vectors, observed):  # type: ignore[no-untyped-def]
        calls[0] = 0 if observed else calls[0] + 1
        if calls[0] == level:
            raise RuntimeError("out of order")
        return forward(segments, vectors, observed)

    monkeypatch.setattr(runner, "forward", failing)
    answer = engine.generate(list(PROMPTS[0]), SamplingParams(max_tokens=12, temperature=1.0))
    assert answer.stats.draft_tokens == level and "out of order" in answer.warnings[0]
