"""Learning from one stream: the served module, a shadow in training, and bets which of the two is better.

For differences D_1, D_2, ... in [-1, 1] with a conditional mean of 0 or less, given those before, the product of (1 +
b_i D_i) is a supermartingale for any bets b_i in [0, 1) that depend only on what came before D_i. By Ville's inequality
it ever reaches 1/a with probability a at most, however often and whenever one looks (Waudby-Smith and Ramdas, arXiv
2010.09686, section 4).

Learned modules are in `FOLDER/versions/N`, and `FOLDER/current.json` names the served one. A version is complete before
it is named, so a process that is killed leaves one that loads.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import math
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from truedraft.errors import CompositionError, ModelError, OptionError, errors_about
from truedraft.files import object_of, take_place, written_whole
from truedraft.models.base import LanguageModel
from truedraft.models.checkpoint import weights_hash
from truedraft.training.online.learnable import Learnable, in_dtype
from truedraft.training.online.traffic import Answered, Traffic
from truedraft.training.optimizer import MixedOptimizer, OptimizerConfig

_log = logging.getLogger("truedraft.training.online")

OWN = 8  # least answers on which a candidate itself has to be better
_UNIT = 0.1  # kept guesses per place that count as a difference of 1, so that no single answer decides
_MOST_BET, _MEMORY = 0.8, 0.95  # largest bet; decay of a difference's weight in later bets
_NEWEST = 0.05  # weight of a step in the average of the weights, which varies less
_LESS, _LEAST = 0.7, 0.2  # factor and lower limit of a change where older answers lose by all of it (2109.01903)
_PASSES = 8  # over the answers
_LEAST_ANSWERS = 4  # before training begins
_STEPS = 12  # between two candidates
_WATCH = 96  # answers after which a promotion is final
_OLD = 12  # of the oldest answers, and of those before the newest, that a candidate must not be worse on
_ALLOWED = 0.01  # allowed loss, as a share


@dataclass(eq=False)
class Candidate:
    """A module in evaluation mode, with a unique number for its replays; `version` is 0 for the original."""

    module: nn.Module
    version: int = 0
    number: int = field(default_factory=itertools.count().__next__)


def tokens_per_call(candidate: Candidate, answers: Iterable[Answered]) -> float | None:
    """Mean over the answers that it was replayed on; None where there are none."""
    found = [answer.scores[candidate.number] for answer in answers if candidate.number in answer.scores]
    calls = sum(each.calls for each in found)
    return sum(each.tokens for each in found) / calls if calls else None


def tokens_a_place(candidate: Candidate, answers: Iterable[Answered]) -> float:
    """Tokens per call, for calls that begin at every place of answers that it was replayed on; 1 without any."""
    found = [answer.scores[candidate.number] for answer in answers]
    return 1.0 + sum(each.kept for each in found) / max(sum(each.tokens for each in found), 1)


class GainTest:
    """Evidence that differences are above 0 on average; `now` and `most` are its logarithm and the maximum so far.

    The bet is the mean of the earlier differences over the mean of their squares, with which the product grows nearly
    as fast as possible (2010.09686, appendix B.3); without a gain the bets are almost 0.
    """

    def __init__(self) -> None:
        self.now = self.most = 0.0
        self._sum, self._squares = 0.1, 1.0  # so the first bet is 0.1

    def see(self, difference: float) -> None:
        """Bet on one more difference, cut to [-1, 1]."""
        cut, bet = max(-1.0, min(1.0, difference)), max(0.0, min(self._sum / self._squares, _MOST_BET))
        self.now += math.log1p(bet * cut)
        self.most = max(self.most, self.now)
        self._sum, self._squares = _MEMORY * self._sum + cut, _MEMORY * self._squares + cut * cut

    def sure(self, level: float) -> bool:
        """Whether the evidence was ever enough for an error of probability `level`."""
        return self.most >= -math.log(level)


class Comparison:
    """Compares a served module `old` and a candidate `new` on answers as they come, each answer once.

    A later candidate may continue an earlier one's comparison: it is chosen before an answer is read, so evidence of a
    gain is evidence that some of them had one. `own` answers were compared with the current `new`.
    """

    def __init__(self, new: Candidate, old: Candidate, level: float, seen: set[int]) -> None:
        self.old = old
        self.count = 0
        self._level = level
        self._gain, self._loss = GainTest(), GainTest()
        self._seen = seen
        self.renew(new)

    def renew(self, new: Candidate) -> None:
        self.new, self.own, self._own_gain = new, 0, 0.0

    def waiting(self, answers: Iterable[Answered]) -> list[Answered]:
        return [each for each in answers if each.number not in self._seen]

    def see(self, answer: Answered) -> None:
        self._seen.add(answer.number)
        new, old = answer.scores[self.new.number], answer.scores[self.old.number]
        if new.tokens:
            difference = (new.kept - old.kept) / new.tokens / _UNIT
            self._gain.see(difference)
            self._loss.see(-difference)
            self.count += 1
            self.own += 1
            self._own_gain += difference

    @property
    def gains(self) -> bool:
        """Whether some candidate is surely better, and the current one is better so far."""
        return self._gain.sure(self._level) and self.own >= OWN and self._own_gain > 0.0

    @property
    def loses(self) -> bool:
        return self._loss.sure(self._level)


class Student:
    """Learns from one stream of answers, in one thread, in small parts.

    `serve` is called with each module to be served. `gain` is the tokens per call by replay, before and after the last
    promotion. No module may be worse than its origin on older answers.
    """

    def __init__(
        self,
        module: nn.Module,
        learnable: Learnable[Any],
        traffic: Traffic,
        level: float,
        rate: float,
        serve: Callable[[nn.Module], None],
        versions: Versions | None = None,
        version: int = 0,
    ) -> None:
        self.traffic = traffic
        self.origin = Candidate(learnable.origin, 0)
        self.served = Candidate(module, version) if version else self.origin
        self.promotions = self.rollbacks = self.trials = self.unwritten = 0
        self.gain: tuple[float | None, float | None] | None = None
        self._learnable, self._level, self._rate = learnable, level, rate
        self._serve, self._versions = serve, versions
        self._chance = random.Random(0)
        self._trial: Comparison | None = None
        self._watch: Comparison | None = None
        self._winner: _Winner | None = None
        self._judged: set[int] = set()  # answers used in trials
        self._learned = 0  # positions
        self._scores_next = False
        self._start_over()

    def _start_over(self) -> None:
        self._began = in_dtype(copy.deepcopy(self.served.module), torch.float32)
        self._average = copy.deepcopy(self._began)
        self._shadow = copy.deepcopy(self._average).requires_grad_(True).train()
        rates = OptimizerConfig(self._rate, self._rate, matrix_weight_decay=0.0)
        # Muon's products would take twice the time of such a small step.
        self._optimizer = MixedOptimizer(self._shadow, rates, self._shadow.parameters())
        self._steps = 0

    def work(self) -> bool:
        """Do a training step or the replay of an answer, alternately; returns whether there was work."""
        self._scores_next = self._winner is not None or not self._scores_next
        parts = (self._score, self._train) if self._scores_next else (self._train, self._score)
        return any(part() for part in parts)

    def _train(self) -> bool:
        if self._learned >= _PASSES * self.traffic.positions:
            return False
        least, pools = self._learnable.least, self.traffic.answers(self.traffic.trained)
        fresh, old = ([each for each in some if len(each) >= least] for some in pools)
        if len(fresh) + len(old) < _LEAST_ANSWERS:
            return False
        halves = [some for some in (fresh, old) if some]
        chosen = [self._chance.choice(halves[number % len(halves)]) for number in range(self._learnable.answers)]
        self._learned += self._learnable.learn(self._shadow, chosen, [*fresh, *old], self._chance)
        self._optimizer.step(1.0)
        with torch.no_grad():
            for mean, weight in zip(self._average.parameters(), self._shadow.parameters(), strict=True):
                mean.lerp_(weight, _NEWEST)
        self._steps += 1
        self._try_shadow()
        return True

    def _try_shadow(self) -> None:
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

    def _between(self, module: nn.Module, share: float) -> Candidate:
        """A module at a fraction of the way from the shadow's start to `module`."""
        found = copy.deepcopy(self._began)
        with torch.no_grad():
            for weight, end in zip(found.parameters(), module.parameters(), strict=True):
                weight.lerp_(end.float(), share)
        return Candidate(in_dtype(found, self._learnable.dtype).eval().requires_grad_(False))

    def _score(self) -> bool:
        if (missing := next(self._missing(), None)) is None:
            return False
        answer, candidates = missing
        found = self._learnable.replayed([each.module for each in candidates], answer)
        answer.scores |= dict(zip((each.number for each in candidates), found, strict=True))
        self._judge()
        return True

    def _missing(self) -> Iterator[tuple[Answered, list[Candidate]]]:
        fresh, old = self.traffic.answers(self.traffic.held)
        pending: list[tuple[Answered, list[Candidate]]] = []
        if self._winner is not None:
            compared = [self._winner.now, self.served, self.origin]
            pending = [(answer, compared) for some in self._winner.among([*old, *fresh]) for answer in some]
        for comparison in self._comparisons():
            both = [comparison.new, comparison.old]
            pending += [(answer, both) for answer in reversed(comparison.waiting(fresh))]  # the newest say most
        for answer, candidates in pending:
            if left := {each.number: each for each in candidates if each.number not in answer.scores}:
                yield answer, list(left.values())

    def _comparisons(self) -> list[Comparison]:
        trial = self._trial if self._winner is None else None
        return [each for each in (self._watch, trial) if each is not None]

    def _judge(self) -> None:
        fresh, old = self.traffic.answers(self.traffic.held)
        self._judged.intersection_update(each.number for each in fresh)  # others are never used again
        for comparison in self._comparisons():
            for answer in comparison.waiting(fresh):
                if {comparison.new.number, comparison.old.number} <= answer.scores.keys():
                    comparison.see(answer)
        if self._watch is not None and self._watch.gains:
            self._roll_back(self._watch.new)
        elif self._watch is not None and self._watch.count >= _WATCH:
            self._watch = None
        trial = self._trial
        if self._winner is not None:
            self._judge_winner(self._winner, [*old, *fresh])
        elif trial is not None and trial.gains:
            every = [*old, *fresh]
            # The oldest, and the last ones before the newest: traffic may have changed after either.
            looked_at = every[: min(_OLD, len(every) // 2)], old[-_OLD:], fresh[-OWN:]
            numbers = [{answer.number for answer in some} for some in looked_at]
            self._winner = _Winner(trial.new, trial.new, 1.0, numbers)
        elif trial is not None and trial.loses:
            self._trial = None
            self._start_over()

    def _judge_winner(self, winner: _Winner, answers: Sequence[Answered]) -> None:
        """Promote a candidate, or a fraction of its change where older answers would lose; or none."""
        compared = {each.number for each in (winner.now, self.served, self.origin)}
        *older, newest = winner.among(answers)
        if not all(compared <= answer.scores.keys() for some in (*older, newest) for answer in some):
            return
        self._winner = self._trial = None
        if tokens_a_place(winner.now, newest) <= tokens_a_place(self.served, newest):
            return  # the rest of it is too small
        if all(
            tokens_a_place(winner.now, some) >= (1.0 - _ALLOWED) * tokens_a_place(each, some)
            for some in older
            for each in (winner.now, self.served, self.origin)
        ):
            self._promote(winner.now)
        elif (share := _LESS * winner.share) >= _LEAST:
            self._winner = winner._replace(now=self._between(winner.whole.module, share), share=share)

    def _promote(self, candidate: Candidate) -> None:
        fresh, _ = self.traffic.answers(self.traffic.held)
        versions = self._versions
        candidate.version = self.promotions + 1 if versions is None else versions.write(candidate.module)
        before, self.served = self.served, candidate
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
        """Serve a candidate before it is recorded, so that a disk failure does not stop serving."""
        self._serve(candidate.module)
        _log.info("version %d of the %s is served from now on", candidate.version, self._learnable.plural)
        if self._versions is not None:
            try:
                self._versions.name(candidate.version)
            except ModelError as error:
                self.unwritten += 1
                _log.warning("a start from the folder will serve another version than this (%s)", error)


class _Winner(NamedTuple):
    """A candidate with a proven gain, the fraction of it under test, and the test answers, by their numbers."""

    whole: Candidate
    now: Candidate
    share: float
    numbers: list[set[int]]  # two groups of older ones, and the newest

    def among(self, answers: Sequence[Answered]) -> list[list[Answered]]:
        return [[each for each in answers if each.number in some] for some in self.numbers]


_POINTER, _VERSIONS = "current.json", "versions"
_KEPT = 4  # versions in addition to the served one


class Versions:
    """The versions of one drafter's module; its origin is version 0 and is not written.

    Raises OptionError for versions of another drafter or target, ModelError if the target's weights cannot be read.
    """

    def __init__(self, folder: Path, learnable: Learnable[Any], target: LanguageModel) -> None:
        self._folder, self._learnable = folder, learnable
        self._about = {"kind": learnable.kind, "origin": weights_hash(learnable.origin), "target": target.fingerprint}
        kept = object_of(folder / _POINTER)
        if kept and (differ := [name for name, each in self._about.items() if kept.get(name) != each]):
            raise OptionError(
                f"{str(folder)!r} holds versions of another {differ[0]} ({kept.get(differ[0])!r}, here it is "
                f"{self._about[differ[0]]!r}); name another folder",
                field="learn_folder",
            )

    def load(self) -> tuple[int, nn.Module] | None:
        """The version served last, None if the origin; OptionError if it is missing, damaged or does not fit."""
        number = object_of(self._folder / _POINTER).get("version", 0)
        if not number:
            return None
        path = self._folder / _VERSIONS / str(number)
        try:
            with errors_about("learn_folder"):
                return int(number), self._learnable.load(path)
        except (ModelError, CompositionError) as error:
            raise OptionError(
                f"{str(path)!r} cannot be served ({error}); remove the folder", field="learn_folder"
            ) from error

    def write(self, module: nn.Module) -> int:
        """Write a version, not yet named as served, and return its number; ModelError if that fails."""
        versions = self._folder / _VERSIONS
        try:
            versions.mkdir(parents=True, exist_ok=True)
            there = sorted(int(each.name) for each in versions.iterdir() if each.name.isdecimal())
            number = max(there, default=0) + 1
            partial = versions / f"{number}.tmp"
            shutil.rmtree(partial, ignore_errors=True)
            self._learnable.save(module, partial)
            for file in partial.iterdir():
                take_place(file, file)  # flushes it to the disk
            take_place(partial, versions / str(number))
            served = object_of(self._folder / _POINTER).get("version", 0)
            for each in there[:-_KEPT]:
                if each != served:
                    shutil.rmtree(versions / str(each), ignore_errors=True)
        except OSError as error:
            raise ModelError(f"cannot write a version into {str(versions)!r} ({error}); make room there") from error
        return number

    def name(self, number: int) -> None:
        """Name a version as the served one, 0 for the origin; ModelError if that fails."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with written_whole(self._folder / _POINTER) as file:
                file.write(json.dumps({"version": number, **self._about}).encode() + b"\n")
        except OSError as error:
            raise ModelError(f"cannot write {str(self._folder / _POINTER)!r} ({error}); make room there") from error
