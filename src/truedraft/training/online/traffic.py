"""Recent answers, only in memory: tokens, the target's vectors of them, and what drafts read of prompts."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from truedraft.drafters.base import DraftRequest, Features, NoDrafter, StepOutcome
from truedraft.drafters.held import Held

MOST_TOKENS = 512
"""First tokens of an answer that are kept, and last tokens of a prompt, where the learning module reads prompts."""
_HELD_OUT = 4  # one answer of so many is held out
_FRESH = 96  # largest number of newest answers
_HELD_SHARE = 0.25  # share of the memory for held-out answers
_ID_BYTES = 8


class Score(NamedTuple):
    """The result of replaying an answer: its tokens but the first, and guesses kept of chains from every token."""

    tokens: int
    calls: int
    kept: int


@dataclass(eq=False, slots=True)
class Answered:
    """An answer, or the first part of one; of the prompt the end, or nothing where the learning module reads none.

    `layers`, by number, are outputs `[prompt + tokens - 1, width]` at each token of both but the last.
    """

    tokens: Tensor  # `[tokens]`, int64
    vectors: Tensor  # `[tokens, width]`: the input of the target's LM head for each token
    since_s: float = 0.0
    prompt: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    layers: Mapping[int, Tensor] = field(default_factory=dict)
    number: int = 0
    scores: dict[int, Score] = field(default_factory=dict)  # of replays, by the numbers of the candidates

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def n_bytes(self) -> int:
        kept = (self.vectors, self.prompt, *self.layers.values())
        return sum(each.nbytes for each in kept) + _ID_BYTES * len(self.tokens)


class Pool:
    """The `most_fresh` newest answers, and a sample of earlier ones, each in at most half of the memory.

    Reservoir sampling, so a change of traffic does not displace earlier answers.
    """

    def __init__(self, most_bytes: int, most_tokens: int, most_fresh: int) -> None:
        self._most_bytes, self._most_tokens, self._most_fresh = most_bytes, most_tokens, most_fresh
        self._chance = random.Random(0)
        self._passed = 0  # answers that left the newest
        self.fresh: deque[Answered] = deque()
        self.old: list[Answered] = []

    def add(self, answer: Answered) -> None:
        self.fresh.append(answer)
        while len(self.fresh) > self._most_fresh or (self.fresh and self._too_many(self.fresh)):
            self._sample(self.fresh.popleft())

    def _sample(self, answer: Answered) -> None:
        self._passed += 1
        self.old.append(answer)
        if not self._too_many(self.old):
            return
        if self._chance.random() * self._passed >= len(self.old):
            self.old.pop()
        while self._too_many(self.old):
            self.old.pop(self._chance.randrange(len(self.old)))

    def _too_many(self, answers: Sequence[Answered] | deque[Answered]) -> bool:
        n_bytes, tokens = sum(each.n_bytes for each in answers), sum(map(len, answers))
        return 2 * n_bytes > self._most_bytes or 2 * tokens > self._most_tokens

    def forget(self, before_s: float) -> None:
        while self.fresh and self.fresh[0].since_s < before_s:
            self.fresh.popleft()
        self.old = [each for each in self.old if each.since_s >= before_s]

    def __iter__(self) -> Iterator[Answered]:
        yield from self.fresh
        yield from self.old


class Traffic:
    """Answers for training, and others for replay, of one tenant or of all; `positions` counts training tokens."""

    def __init__(self, most_bytes: int, most_tokens: int, keep_s: float) -> None:
        self.trained, self.held = (
            Pool(int(share * most_bytes), int(share * most_tokens), int(share * _FRESH))
            for share in (1.0 - _HELD_SHARE, _HELD_SHARE)
        )
        self._keep_s = keep_s
        self.count = self.positions = 0
        self._guard = threading.Lock()  # the engine's thread adds, another one reads

    def add(self, answer: Answered) -> None:
        with self._guard:
            self.count += 1
            answer.number = self.count
            if self.count % _HELD_OUT == 0:
                self.held.add(answer)
            else:
                self.trained.add(answer)
                self.positions += len(answer)

    def forget(self, now_s: float) -> None:
        with self._guard:
            for pool in (self.trained, self.held):
                pool.forget(now_s - self._keep_s)

    def answers(self, pool: Pool) -> tuple[list[Answered], list[Answered]]:
        """The newest answers of one of the pools, and the sample of older ones, at this moment."""
        with self._guard:
            return list(pool.fresh), list(pool.old)

    @property
    def is_empty(self) -> bool:
        with self._guard:
            return self.count > 0 and not [*self.trained, *self.held]

    @property
    def n_bytes(self) -> int:
        with self._guard:
            return sum(each.n_bytes for each in (*self.trained, *self.held))


Take: TypeAlias = Callable[[Hashable, Answered], None]  # receives an answer, and the scope of its request


@dataclass(eq=False, slots=True)
class _Open:
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    vectors: list[Tensor] = field(default_factory=list)
    layers: list[Sequence[Tensor]] = field(default_factory=list)  # of each step, [rows, width] of each layer


class Recorder(NoDrafter):
    """Records tokens and vectors of each answer, never drafts; `prompts` records the last tokens of prompts.

    Answers to prompts with more than tokens, such as pictures, are left out, and so are rehearsals.
    """

    name: ClassVar[str] = "learner"
    observes_lazily = False

    def __init__(self, take: Take, width: int, layers: Sequence[int] = (), prompts: bool = False) -> None:
        self._take, self._width, self._layers = take, width, tuple(layers)
        self._prompts = prompts
        self._open: dict[int, _Open] = {}
        self.features: Features | None = Features("kept" if layers else "accepted", layers=self._layers)
        self.held = Held(noted=[self._open])

    def begin(self, request: DraftRequest) -> None:
        if request.kept and request.inputs is None:
            self._open[request.id] = _Open(list(request.tokens) if self._prompts else [])

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        for request, outcome in zip(batch, outcomes, strict=True):
            noted = self._open.get(request.id)
            if noted is None or outcome.hidden is None or len(noted.tokens) >= MOST_TOKENS:
                continue
            # A copy: the next forward may write over it.
            if self._layers:
                noted.layers.append([each[:, : self._width].clone() for each in outcome.layers])
            if outcome.tokens:
                # Row i is where the step's token i was drawn, after those of a prompt's last part.
                rows = outcome.hidden if noted.tokens else outcome.hidden[-1:]
                count = min(len(outcome.tokens), MOST_TOKENS - len(noted.tokens))
                noted.tokens.extend(outcome.tokens[:count])
                noted.vectors.append(rows[:count, : self._width].clone())

    def end(self, request: DraftRequest) -> None:
        noted = self._open.pop(request.id, None)
        if noted is None or not noted.tokens:
            return
        tokens, vectors = torch.tensor(noted.tokens), torch.cat(noted.vectors)
        seen = len(noted.prompt) + len(tokens) - 1
        rows = [torch.cat(each)[:seen] for each in zip(*noted.layers, strict=True)]
        if all(len(each) == seen for each in rows):
            prompt = noted.prompt[-MOST_TOKENS:]
            most = len(prompt) + len(tokens) - 1
            layers = {number: each[seen - most :].clone() for number, each in zip(self._layers, rows, strict=True)}
            answer = Answered(tokens, vectors, prompt=torch.tensor(prompt, dtype=torch.int64), layers=layers)
            self._take(request.scope, answer)
