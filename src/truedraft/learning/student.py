"""One head that learns: what is served, a shadow that trains, and who of the two is shown to bring more."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from truedraft.heads import VectorHead
from truedraft.learning.promotion import ENOUGH, Candidate, Comparison, tokens_per_call, trial_level
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
_LESS = 0.7  # of the way from where it began to that mean (2109.01903) is gone where older answers would lose by more
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
        self._since = 0  # trials since the last promotion
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
        self._taken = 1.0

    def work(self) -> bool:
        """Do a little: a step of training, or the replay of an answer, in turn; returns whether there was any."""
        self._scores_next = not self._scores_next
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
        """Let the shadow as it is now be a candidate, if there is none and it is due."""
        fresh, _ = self.traffic.answers(self.traffic.held)
        if self._trial is not None or self._steps < _STEPS or len(fresh) < ENOUGH:
            return
        self._steps = 0
        head = copy.deepcopy(self._began)
        with torch.no_grad():
            for weight, mean in zip(head.parameters(), self._average.parameters(), strict=True):
                weight.lerp_(mean, self._taken)  # what is left out keeps what it was good at
        head = head.to(self._dtype).eval().requires_grad_(False)
        self._since += 1
        self.trials += 1
        self._trial = Comparison(Candidate(head), self.served, trial_level(self._level, self._since))

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
        wanted = [
            (answer, [comparison.new, comparison.old])
            for comparison in (self._watch, self._trial)
            if comparison is not None
            and not comparison.gains  # else answers that come in would keep the older ones back
            for answer in comparison.waiting(fresh)
        ]
        if self._trial is not None and self._trial.gains:
            compared = [self._trial.new, self.served, self.origin]
            wanted += [(answer, compared) for some in _older(fresh, old) for answer in some]
        for answer, candidates in wanted:
            left = {each.number: each for each in candidates if each.number not in answer.scores}
            if left:
                yield answer, list(left.values())

    def _judge(self) -> None:
        fresh, old = self.traffic.answers(self.traffic.held)
        for comparison in (each for each in (self._watch, self._trial) if each is not None):
            for answer in comparison.waiting(fresh):
                if comparison.new.number in answer.scores and comparison.old.number in answer.scores:
                    comparison.see(answer)
        if self._watch is not None and self._watch.gains:
            self._roll_back(self._watch.new)
        elif self._watch is not None and self._watch.count >= _WATCH:
            self._watch = None
        trial = self._trial
        if trial is None:
            return
        if trial.gains:
            compared = trial.new, self.served, self.origin
            older = _older(fresh, old)
            if all(each.number in answer.scores for some in older for answer in some for each in compared):
                self._trial = None
                if all(self._keeps(trial.new, some) for some in older):
                    self._promote(trial.new)
                else:
                    self._taken *= _LESS
        elif trial.loses:
            self._trial = None
            self._start_over()
        elif trial.hopeless:
            self._trial = None

    def _keeps(self, candidate: Candidate, older: Sequence[Answered]) -> bool:
        """Whether a candidate brings as much on older answers as what is served, and as what it all began with."""
        own = tokens_per_call(candidate, older)
        others = [tokens_per_call(each, older) for each in (self.served, self.origin)]
        return own is None or all(each is None or own >= (1.0 - _ALLOWED) * each for each in others)

    def _promote(self, candidate: Candidate) -> None:
        fresh, _ = self.traffic.answers(self.traffic.held)
        before, self.served, self._trial = self.served, candidate, None
        candidate.version = (
            self.promotions + 1 if self._versions is None else self._versions.write(candidate.head, self._written)
        )
        self._put(candidate)
        self._watch = Comparison(before, candidate, self._level)
        self._watch.skip(fresh)
        self._since = 0
        self.promotions += 1
        both = [each for each in fresh if {before.number, candidate.number} <= each.scores.keys()]
        self.gain = tokens_per_call(before, both), tokens_per_call(candidate, both)

    def _roll_back(self, before: Candidate) -> None:
        self.served, self._watch, self._trial, self._since = before, None, None, 0
        self._put(before)
        self._start_over()
        self.rollbacks += 1

    def _put(self, candidate: Candidate) -> None:
        """Name a head as the one that is served, and hand it over."""
        if self._versions is not None:
            self._versions.name(candidate.version)
        _log.info("version %d of the %s is served from now on", candidate.version, candidate.head.plural)
        self._serve(candidate.head)


def _older(fresh: list[Answered], old: list[Answered]) -> tuple[list[Answered], list[Answered]]:
    """The first of all, and the last before the newest: traffic may have changed behind either."""
    every = [*old, *fresh]
    return every[: min(_OLD, len(every) // 2)], old[-_OLD:]
