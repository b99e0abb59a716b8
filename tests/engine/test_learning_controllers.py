"""Requests without a seed in one batch, under controllers that learn from all: each follows the target.

None share noise. If two did, and one that is a step ahead decided by its verdict whether the other drafts, the other
would draft just when its draft is going to be rejected. The joint distribution of an answer's tokens is known exactly;
over 2,000 pairs the chi-square statistic of the counts is compared with its 1 - 1e-6 quantile, so a correct pipeline
fails with probability below 1e-6 at each comparison. Noise that two share is planted, and caught.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from support.answers import finished
from support.chi_square import p_value
from support.fake_times import EvenGoodput
from support.pairwise import some_of
from support.random_decisions import RandomDecisions
from truedraft import Engine, SamplingParams
from truedraft.core.budget import NO_DRAFT
from truedraft.drafters import DraftModel, PromptLookup
from truedraft.drafters.portfolio import Portfolio
from truedraft.engine.policy import Budget, Controller, Decision, RequestView, StepRecord
from truedraft.testing import MarkovModel

VOCAB, LENGTH = 3, 4
PROMPT = [1, 0, 1]
PAIRS = 2_000
TOGETHER = 32
FALSE_ALARM = 1e-6

TARGET = MarkovModel.random(VOCAB, 5, sharpness=0.7)
DRAFT = MarkovModel.random(VOCAB, 6, sharpness=0.7)


def exact_dist() -> np.ndarray:
    """Of all tokens of an answer, `[vocab] * LENGTH`."""
    dist = np.ones((VOCAB,) * LENGTH)
    for answer in itertools.product(range(VOCAB), repeat=LENGTH):
        for place, token in enumerate(answer):
            dist[answer] *= float(TARGET.probs_after([*PROMPT, *answer[:place]])[token])
    return dist


def portfolio() -> Portfolio:
    return Portfolio([DraftModel(DRAFT, 3), PromptLookup(2, min_ngram=1), DraftModel(DRAFT, branching=(2, 2))])


def counts_of(
    controller: Controller, ahead: int, pairs: int, pairing: dict[int, int] | None = None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Counts of the answers of the first and the second request of each pair, and how many tokens were drafted.

    Args:
        controller: of all pairs, one batch of pairs after another.
        ahead: steps that the first ones make before the second ones come; a step is also their prompts'.
        pairs: how many.
        pairing: if given the two of a pair share their noise, and it gets the first one's number by the second one's.
    """
    engine = Engine(TARGET, portfolio(), controller=controller, max_batch=2 * TOGETHER, entropy=0)
    counts = np.zeros((2, *(VOCAB,) * LENGTH), dtype=np.int64)
    drafted = 0
    params = SamplingParams(max_tokens=LENGTH, temperature=1.0)
    for _ in range(0, pairs, TOGETHER):
        first = [engine.submit(PROMPT, params) for _ in range(TOGETHER)]
        for _ in range(ahead):
            engine.step()
        second = [engine.prepare(PROMPT, params) for _ in range(TOGETHER)]
        for one, other in zip(first, second, strict=True):
            if pairing is not None:
                other.noise_seed, pairing[other.id] = one.noise_seed, one.id
            engine.enqueue(other)
        for number, requests in enumerate((first, second)):
            for answer in finished(engine, requests):
                counts[number][tuple(answer.token_ids)] += 1
                drafted += answer.stats.draft_tokens
    return counts[0], counts[1], drafted


class Mixing(Controller):
    """A first draft is left out where the first draft of the request that it is paired with was accepted."""

    def __init__(self) -> None:
        self.pairing: dict[int, int] = {}
        self._verdicts: dict[int, bool] = {}  # of first drafts, by request
        self._first: set[int] = set()  # requests whose first draft is running

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        self._first = {view.id for view in views if not view.counters.target_calls}
        found = []
        for view in views:
            known = view.id in self._first and self._verdicts.get(self.pairing.get(view.id, -1), False)
            found.append(Decision("draft", NO_DRAFT if known else Budget(1)))
        return found

    def observe(self, record: StepRecord) -> None:
        for step in record.requests:
            if step.id in self._first and step.shares:
                self._verdicts[step.id] = step.accepted > 0


CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "goodput": EvenGoodput,
    "probing": lambda: EvenGoodput(probing=0.3),
    "random": lambda: RandomDecisions(3),
}


@pytest.mark.parametrize("controller", some_of(CONTROLLERS, ["probing", "random"]))
def test_each_request_follows_the_target(controller: str) -> None:
    first, second, drafted = counts_of(CONTROLLERS[controller](), 2, PAIRS)
    assert drafted > PAIRS
    assert p_value(first, exact_dist()) > FALSE_ALARM
    assert p_value(second, exact_dist()) > FALSE_ALARM


def test_noise_that_two_share_is_caught() -> None:
    controller = Mixing()
    first, second, _ = counts_of(controller, 2, PAIRS, controller.pairing)
    assert p_value(first, exact_dist()) > FALSE_ALARM, "the one that is ahead knows nothing"
    assert p_value(second, exact_dist()) < FALSE_ALARM, "as many pairs as the controllers above are counted over"
