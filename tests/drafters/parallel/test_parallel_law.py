"""The exact distribution of answers that are drafted ahead for: hit, miss and mixed, by every number that noise may be.

All probabilities are multiples of a quarter (the target's) or a half (the draft's), and what is left after a rejection
is one token. So each decision depends on which quarter or half its number lies in, and an engine's whole run, worker
included, is a function of a few choices among two or four. They are gone through one by one, keyed as the engine keys
its noise, and the answers' distribution is compared with the target's own to 1e-12.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch

from support.parallel_drafting import beside
from truedraft import Engine, SamplingParams
from truedraft.core.noise import KeyedNoise, Purpose
from truedraft.testing import MarkovModel
from truedraft.verification.exact import distance, target_dist

LENGTH = 5  # the prefill's token, and four from steps that draft
PROMPT = [1, 2]
EXACT = 1e-12
PARTS = {Purpose.DRAFT: 2, Purpose.ACCEPT: 2, Purpose.RECOVERED: 1, Purpose.BONUS: 4}

Key = tuple[Purpose, int, int, int]


def quarters(seed: int) -> MarkovModel:
    """A target of three tokens, each row 1/4, 1/4 and 1/2 in some order; behind the prompt it is sure."""
    model = _shuffled(torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64), seed)
    model.probs[tuple(PROMPT)] = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    return model


def halves(seed: int) -> MarkovModel:
    """A draft, each row 0, 1/2 and 1/2 in some order: p / q is 1/2 or 1, and a rejection leaves one token."""
    return _shuffled(torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64), seed)


def _shuffled(row: torch.Tensor, seed: int) -> MarkovModel:
    generator = torch.Generator().manual_seed(seed)
    rows = [row[torch.randperm(3, generator=generator)] for _ in range(9)]
    return MarkovModel(torch.stack(rows).view(3, 3, 3))


class EveryNoise:
    """Gives each key one of the parts of its number's range; run by run, all combinations in turn.

    Args:
        shares: the key whose number a key has; a right engine needs none that is another's.
    """

    def __init__(self, shares: bool = False) -> None:
        self._shares = shares
        self._choices: list[tuple[int, int]] = []  # of the run: which part, of how many
        self._known: dict[Key, float] = {}
        self._done = 0

    def uniform(self, noise: KeyedNoise, purpose: Purpose, depth: int, index: int = 0) -> float:
        _, position, step, *_ = noise.key
        key = purpose, position + depth, step, index
        parts = PARTS[purpose] if step else 1
        if self._shares and purpose is Purpose.DRAFT and step > 1:  # the number of the token drawn just before it
            key, parts = (Purpose.BONUS, key[1] - 1, step - 1, 0), PARTS[Purpose.BONUS]
        if key not in self._known:
            if self._done == len(self._choices):
                self._choices.append((0, parts))
            part, of = self._choices[self._done]
            self._done += 1
            self._known[key] = (part + 0.5) / of
        return self._known[key]

    @property
    def mass(self) -> float:
        """Probability of the run that was made."""
        mass = 1.0
        for _, parts in self._choices[: self._done]:
            mass /= parts
        return mass

    def advance(self) -> bool:
        """To the next combination; whether there is one."""
        del self._choices[self._done :]
        self._known.clear()
        self._done = 0
        while self._choices:
            part, parts = self._choices.pop()
            if part + 1 < parts:
                self._choices.append((part + 1, parts))
                return True
        return False


def dist_of_answers(
    monkeypatch: pytest.MonkeyPatch, every: EveryNoise, target: MarkovModel, draft: MarkovModel
) -> tuple[dict[tuple[int, ...], float], float]:
    """Of all runs: the distribution of answers, and how many proposals of a run were hits in the mean."""
    monkeypatch.setattr(KeyedNoise, "uniform", lambda *given: every.uniform(*given))
    dist: dict[tuple[int, ...], float] = defaultdict(float)
    hits = 0.0
    ahead, worker = beside(draft, 1, pickled=False)  # there are tens of thousands of messages
    engine = Engine(target, ahead, controller="fixed")
    params = SamplingParams(max_tokens=LENGTH, temperature=1.0)
    for _ in itertools.count():
        worker.replies.clear()
        answer = engine.generate(PROMPT, params)
        assert not answer.warnings
        dist[tuple(answer.token_ids)] += every.mass
        hits += every.mass * sum(reply.hits for reply in worker.replies)
        if not every.advance():
            return dict(dist), hits
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_the_distribution_of_answers_is_the_targets(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    target, draft = quarters(seed), halves(seed + 10)
    dist, hits = dist_of_answers(monkeypatch, EveryNoise(), target, draft)
    assert sum(dist.values()) == pytest.approx(1.0, abs=1e-12)
    assert distance(dist, target_dist(lambda prefix: target.probs_after([*PROMPT, *prefix]), LENGTH)) < EXACT
    assert 0.05 < hits < 0.95  # runs of both sorts


@pytest.mark.slow
def test_noise_that_decided_another_token_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting for an outcome with the number that draws it, which a careless drafter might."""
    target, draft = quarters(2), halves(12)
    dist, hits = dist_of_answers(monkeypatch, EveryNoise(shares=True), target, draft)
    assert sum(dist.values()) == pytest.approx(1.0, abs=1e-12) and hits > 0.0
    assert distance(dist, target_dist(lambda prefix: target.probs_after([*PROMPT, *prefix]), LENGTH)) > 0.01
