"""One head that learns: what is served, a shadow that trains, and who of the two is shown to bring more."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from truedraft.heads import VectorHead
from truedraft.learning.promotion import OWN, Candidate, Comparison, tokens_a_place, tokens_per_call
from truedraft.learning.replay import Narrowed, replayed
from truedraft.learning.traffic import Answered, Traffic
from truedraft.learning.versions import Versions
from truedraft.models.lm_head import LmHead
from truedraft.training.head_objective import HeadLoss, HeadsObjective
from truedraft.training.optimizer import MixedOptimizer, OptimizerConfig
from truedraft.training.texts.self_distillation import CollatedBatch

if TYPE_CHECKING:
    from truedraft.training.head_config import HeadTrainingConfig

_log = logging.getLogger("truedraft.learning")

_WINDOWS, _WINDOW = 16, 8  # of a step: stretches of answers, and positions of each
_NEWEST = 0.05  # that a step has in the mean of the weights, which is steadier than they are
_LESS, _LEAST = 0.7, 0.2  # of a change is taken where older answers would lose by all of it (2109.01903), and at least
_PASSES = 8  # over what came
_LEAST_ANSWERS = 4  # before anything is learned
_STEPS = 12  # between two candidates
_WATCH = 96  # answers after which a promotion is not doubted any more
_OLD = 12  # of the oldest answers, and of those before the newest, that a candidate must not be worse on
_ALLOWED = 0.01  # by more than this share
_IDS, _OTHERS = 8192, 2048  # a larger vocabulary is narrowed, to the traffic's ids and so many others


class Student:
    """Learns from one stream of answers, by one thread, a little at a time.

    Args:
        head: that is served, in the dtype in which it is.
        origin: that it comes from; on older answers nothing may ever be worse than it.
        lm_head: of the target, on the CPU.
        config: how such heads are trained.
        traffic: what it learns from.
        level: probability of a promotion that brings nothing, and of a rollback without cause.
        rate: of AdamW.
        versions: where promoted heads are written; None writes nothing.
        version: of the head that is served; 0 is the origin.
        serve: is given each head that is to be served from now on.

    Attributes:
        served: what is served.
        promotions: how many there were.
        rollbacks: likewise.
        trials: candidates that were held to what is served.
        gain: tokens per call by replay, before the last promotion and behind it; None where there was none.
    """

    def __init__(
        self,
        head: VectorHead,
        origin: VectorHead,
        lm_head: LmHead,
        config: HeadTrainingConfig,
        traffic: Traffic,
        level: float,
        rate: float,
        serve: Callable[[VectorHead], None],
        versions: Versions | None = None,
        version: int = 0,
    ) -> None:
        self.traffic = traffic
        self.origin = Candidate(origin, 0)
        self.served = Candidate(head, version) if version else self.origin
        self.promotions = self.rollbacks = self.trials = 0
        self.gain: tuple[float | None, float | None] | None = None
        self._lm_head, self._config, self._level, self._rate = lm_head, config, level, rate
        self._serve, self._versions = serve, versions
        self._dtype = next(head.parameters()).dtype
        self._written = self._dtype if self._dtype in (torch.bfloat16, torch.float16) else torch.float32
        self._chance = random.Random(0)
        self._trial: Comparison | None = None
        self._watch: Comparison | None = None
        self._winner: _Winner | None = None
        self._judged: set[int] = set()  # answers that trials have seen
        self._learned = 0  # positions
        self._scores_next = False
        self._start_over()

    def _start_over(self) -> None:
        """Let the shadow be what is served."""
        self._began = copy.deepcopy(self.served.head).float()
        self._average = copy.deepcopy(self._began)
        self._shadow = copy.deepcopy(self._average).requires_grad_(True).train()
        rates = OptimizerConfig(self._rate, self._rate, matrix_weight_decay=0.0)
        # Muon's own products would take twice the time of such a small step.
        self._optimizer = MixedOptimizer(self._shadow, rates, self._shadow.parameters())
        self._steps = 0

    def work(self) -> bool:
        """Do a little: a step of training, or the replay of an answer, in turn; returns whether there was any."""
        self._scores_next = self._winner is not None or not self._scores_next
        parts = (self._score, self._train) if self._scores_next else (self._train, self._score)
        return any(part() for part in parts)

    # ------------------------------------------------------------------------------------ training

    def _train(self) -> bool:
        """A step of the shadow, half of it on the newest answers and half on older ones."""
        if self._learned >= _PASSES * self.traffic.positions:
            return False
        reach = self._shadow.reach
        pools = [
            [each for each in some if len(each) > reach + 1] for some in self.traffic.answers(self.traffic.trained)
        ]
        fresh, old = pools
        if len(fresh) + len(old) < _LEAST_ANSWERS:
            return False
        halves = [some for some in (fresh, old) if some]
        chosen = [self._chance.choice(halves[number % len(halves)]) for number in range(_WINDOWS)]
        batch = self._batch(chosen, reach)
        narrowed = Narrowed.of(self._lm_head, self._config.distillation_loss, self._ids([*fresh, *old]))
        loss = HeadLoss(self._shadow, narrowed.lm_head, narrowed.loss, decay=self._config.place_decay)
        feed = self._config.feed(self._shadow, self._lm_head)
        objective = HeadsObjective(self._shadow, self._lm_head, lambda _: batch, feed, narrowed, loss)
        objective.accumulate(batch.places, 1.0)
        self._optimizer.step(1.0)
        with torch.no_grad():
            for mean, weight in zip(self._average.parameters(), self._shadow.parameters(), strict=True):
                mean.lerp_(weight, _NEWEST)
        self._steps += 1
        self._learned += len(batch.places)
        self._try_shadow()
        return True

    def _batch(self, chosen: Sequence[Answered], reach: int) -> CollatedBatch:
        """A stretch of each of some answers, with the rows that a head reaches from it."""
        tokens, vectors, places, end = [], [], [], 0
        for each in chosen:
            count = min(_WINDOW, len(each) - reach)
            first = self._chance.randrange(len(each) - reach - count + 1)
            rows = slice(first, first + count + reach)
            tokens.append(each.tokens[rows])
            vectors.append(each.vectors[rows].to("cpu"))
            places.append(torch.arange(end, end + count))
            end += count + reach
        return CollatedBatch(torch.cat(vectors), torch.cat(tokens), torch.cat(places), np.arange(end))

    def _ids(self, answers: Sequence[Answered]) -> torch.Tensor | None:
        """Ids that a step looks at: those of the traffic and some others, rising; None is all."""
        vocab = len(self._lm_head.weight)
        if vocab <= _IDS or any(output is not None for output in self._shadow.outputs):
            return None
        others = torch.tensor([self._chance.randrange(vocab) for _ in range(_OTHERS)])
        return torch.cat([*(each.tokens for each in answers), others]).unique()

    def _try_shadow(self) -> None:
        """Let the shadow as it is now be the candidate, if that is due."""
        trial = self._trial
        if self._steps < _STEPS or (trial is not None and (trial.own < OWN or trial.gains)):
            return
        self._steps = 0
        candidate = self._between(self._average, 1.0)
        self.trials += 1
        if trial is None:
            self._trial = Comparison(candidate, self.served, self._level, self._judged)
        else:
            trial.renew(candidate)

    def _between(self, head: VectorHead, share: float) -> Candidate:
        """So much of the way from where the shadow began to a head."""
        found = copy.deepcopy(self._began)
        with torch.no_grad():
            for weight, end in zip(found.parameters(), head.parameters(), strict=True):
                weight.lerp_(end.float(), share)
        return Candidate(found.to(self._dtype).eval().requires_grad_(False))

    # ------------------------------------------------------------------------------------- judging

    def _score(self) -> bool:
        """Replay one answer by one head of those that are compared, and decide what that decides."""
        missing = next(self._missing(), None)
        if missing is None:
            return False
        answer, candidates = missing
        found = replayed([each.head for each in candidates], self._lm_head, answer)
        answer.scores |= dict(zip((each.number for each in candidates), found, strict=True))
        self._judge()
        return True

    def _missing(self) -> Iterator[tuple[Answered, list[Candidate]]]:
        """Answers, and the heads that are still to be replayed on each."""
        fresh, old = self.traffic.answers(self.traffic.held)
        wanted: list[tuple[Answered, list[Candidate]]] = []
        if self._winner is not None:
            compared = [self._winner.now, self.served, self.origin]
            wanted = [(answer, compared) for some in self._winner.among([*old, *fresh]) for answer in some]
        for comparison in self._comparisons():
            both = [comparison.new, comparison.old]
            wanted += [(answer, both) for answer in reversed(comparison.waiting(fresh))]  # the newest say most
        for answer, candidates in wanted:
            left = {each.number: each for each in candidates if each.number not in answer.scores}
            if left:
                yield answer, list(left.values())

    def _comparisons(self) -> list[Comparison]:
        """Those that are open."""
        trial = self._trial if self._winner is None else None
        return [each for each in (self._watch, trial) if each is not None]

    def _judge(self) -> None:
        fresh, old = self.traffic.answers(self.traffic.held)
        self._judged.intersection_update(each.number for each in fresh)  # others are never looked at again
        for comparison in self._comparisons():
            for answer in comparison.waiting(fresh):
                if comparison.new.number in answer.scores and comparison.old.number in answer.scores:
                    comparison.see(answer)
        if self._watch is not None and self._watch.gains:
            self._roll_back(self._watch.new)
        elif self._watch is not None and self._watch.count >= _WATCH:
            self._watch = None
        trial = self._trial
        if self._winner is not None:
            self._judge_winner(self._winner, [*old, *fresh])
        elif trial is not None and trial.gains:
            looked_at = [*_older(fresh, old), fresh[-OWN:]]
            numbers = [{answer.number for answer in some} for some in looked_at]
            self._winner = _Winner(trial.new, trial.new, 1.0, numbers)
        elif trial is not None and trial.loses:
            self._trial = None
            self._start_over()

    def _judge_winner(self, winner: _Winner, answers: Sequence[Answered]) -> None:
        """Promote a candidate that gains, or less of it where older answers would lose; or none."""
        compared = [winner.now, self.served, self.origin]
        *older, newest = winner.among(answers)
        if not all(each.number in answer.scores for some in (*older, newest) for answer in some for each in compared):
            return
        self._winner = self._trial = None
        if tokens_a_place(winner.now, newest) <= tokens_a_place(self.served, newest):
            return  # what is left of it is too little
        if all(
            tokens_a_place(winner.now, some) >= (1.0 - _ALLOWED) * tokens_a_place(each, some)
            for some in older
            for each in compared
        ):
            self._promote(winner.now)
        elif (share := _LESS * winner.share) >= _LEAST:
            self._winner = winner._replace(now=self._between(winner.whole.head, share), share=share)

    def _promote(self, candidate: Candidate) -> None:
        fresh, _ = self.traffic.answers(self.traffic.held)
        before, self.served = self.served, candidate
        candidate.version = (
            self.promotions + 1 if self._versions is None else self._versions.write(candidate.head, self._written)
        )
        self._put(candidate)
        self._watch = Comparison(before, candidate, self._level, {each.number for each in fresh})
        self.promotions += 1
        both = [each for each in fresh if {before.number, candidate.number} <= each.scores.keys()]
        self.gain = tokens_per_call(before, both), tokens_per_call(candidate, both)

    def _roll_back(self, before: Candidate) -> None:
        self.served, self._watch, self._trial, self._winner = before, None, None, None
        self._put(before)
        self._start_over()
        self.rollbacks += 1

    def _put(self, candidate: Candidate) -> None:
        """Name a head as the one that is served, and hand it over."""
        if self._versions is not None:
            self._versions.name(candidate.version)
        _log.info("version %d of the %s is served from now on", candidate.version, candidate.head.plural)
        self._serve(candidate.head)


class _Winner(NamedTuple):
    """A candidate that was shown to gain, how much of it is looked at, and on which answers, by their numbers."""

    whole: Candidate
    now: Candidate
    share: float
    numbers: list[set[int]]  # two groups of older ones, and the newest

    def among(self, answers: Sequence[Answered]) -> list[list[Answered]]:
        """These groups of answers, as far as they are still kept."""
        return [[each for each in answers if each.number in some] for some in self.numbers]


def _older(fresh: list[Answered], old: list[Answered]) -> tuple[list[Answered], list[Answered]]:
    """The first of all, and the last before the newest: traffic may have changed behind either."""
    every = [*old, *fresh]
    return every[: min(_OLD, len(every) // 2)], old[-_OLD:]
