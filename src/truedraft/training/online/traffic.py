"""What was answered lately, in memory alone: tokens, the target's vectors that they were drawn from, and of prompts
what drafts read of them."""

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
"""Of an answer that are kept, its first ones; and of a prompt, its last ones, where what learns reads prompts."""
_HELD_OUT = 4  # one answer of so many is not trained on
_FRESH = 96  # answers that are new
_HELD_SHARE = 0.25  # of the memory, for these
_ID_BYTES = 8


class Score(NamedTuple):
    """What replay of an answer came to.

    Attributes:
        tokens: that are replayed, the answer's first apart.
        calls: of the target that they take.
        kept: guesses that agree with the answer, over chains that begin behind every token. It says more than the calls
            do, which hang on the places where chains happened to begin.
    """

    tokens: int
    calls: int
    kept: int


@dataclass(eq=False, slots=True)
class Answered:
    """An answer, or the first part of one.

    Attributes:
        tokens: `[tokens]`, int64.
        vectors: `[tokens, width]`: what entered the target's LM head where each was drawn; its distribution is what the
            LM head makes of it.
        since_s: when it was over.
        prompt: the end of the prompt; no token where nothing that learns reads prompts.
        layers: `[prompt + tokens - 1, width]` of each layer of the target that is read, by its number: its output at
            each token but the last, of the prompt as it is here and of the answer.
        number: counted up; no other one of its traffic has it.
        scores: what replay by heads came to, by their numbers.
    """

    tokens: Tensor
    vectors: Tensor
    since_s: float = 0.0
    prompt: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    layers: Mapping[int, Tensor] = field(default_factory=dict)
    number: int = 0
    scores: dict[int, Score] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def n_bytes(self) -> int:
        """That it takes."""
        kept = (self.vectors, self.prompt, *self.layers.values())
        return sum(each.nbytes for each in kept) + _ID_BYTES * len(self.tokens)


class Pool:
    """The newest answers, and a sample of those before them, each in half of the room at most.

    An older answer is kept with the same probability whenever it came (reservoir sampling), so a change of traffic does
    not drive out what was asked before it.

    Args:
        most_bytes: of all.
        most_tokens: likewise.
        most_fresh: how many are the newest.
        chance: of the sample.

    Attributes:
        fresh: the newest, the oldest of them first.
        old: the sample.
    """

    def __init__(self, most_bytes: int, most_tokens: int, most_fresh: int, chance: random.Random) -> None:
        self._most_bytes, self._most_tokens, self._most_fresh = most_bytes, most_tokens, most_fresh
        self._chance = chance
        self._passed = 0  # that left the newest
        self.fresh: deque[Answered] = deque()
        self.old: list[Answered] = []

    def add(self, answer: Answered) -> None:
        """Take one, and let go of what there is no room for."""
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
        """Let go of what was over before a moment."""
        while self.fresh and self.fresh[0].since_s < before_s:
            self.fresh.popleft()
        self.old = [each for each in self.old if each.since_s >= before_s]

    def __iter__(self) -> Iterator[Answered]:
        yield from self.fresh
        yield from self.old


class Traffic:
    """Answers to train on, and answers to replay, of one tenant or of all; one answer is never both.

    Args:
        most_bytes: of all.
        most_tokens: likewise.
        keep_s: seconds after which an answer is forgotten.
        seed: of the sample of older answers.

    Attributes:
        trained: those to train on.
        held: those to replay.
        count: answers that ever came.
        positions: tokens to train on that ever came.
    """

    def __init__(self, most_bytes: int, most_tokens: int, keep_s: float, seed: int = 0) -> None:
        shares = 1.0 - _HELD_SHARE, _HELD_SHARE
        self.trained, self.held = (
            Pool(int(share * most_bytes), int(share * most_tokens), int(share * _FRESH), random.Random(seed))
            for share in shares
        )
        self._keep_s = keep_s
        self.count = self.positions = 0
        self._guard = threading.Lock()  # the thread that steps adds, another one reads

    def add(self, answer: Answered) -> None:
        """Take an answer."""
        with self._guard:
            self.count += 1
            answer.number = self.count
            if self.count % _HELD_OUT == 0:
                self.held.add(answer)
            else:
                self.trained.add(answer)
                self.positions += len(answer)

    def forget(self, now_s: float) -> None:
        """Let go of what is too old."""
        with self._guard:
            for pool in (self.trained, self.held):
                pool.forget(now_s - self._keep_s)

    def answers(self, pool: Pool) -> tuple[list[Answered], list[Answered]]:
        """The newest answers of one of the two, and the sample of older ones, as they are now."""
        with self._guard:
            return list(pool.fresh), list(pool.old)

    @property
    def is_empty(self) -> bool:
        """Whether all that came was let go of."""
        with self._guard:
            return self.count > 0 and not any(True for pool in (self.trained, self.held) for _ in pool)

    @property
    def n_bytes(self) -> int:
        """That all of it takes."""
        with self._guard:
            return sum(each.n_bytes for pool in (self.trained, self.held) for each in pool)


Take: TypeAlias = Callable[[Hashable, Answered], None]
"""Takes an answer, and the scope of its request."""


@dataclass(eq=False, slots=True)
class _Open:
    """What was noted of an answer that is being written."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    vectors: list[Tensor] = field(default_factory=list)
    layers: list[Sequence[Tensor]] = field(default_factory=list)  # of each step, [rows, width] of each layer


class Recorder(NoDrafter):
    """Never drafts; notes tokens and vectors of each answer, and hands them over when it is over.

    Answers to prompts that have something beside their tokens, such as pictures, are left out, and so are rehearsals.

    Args:
        take: is called for each answer, by the thread that steps.
        width: entries of a vector that heads read.
        layers: numbers of the target's layers whose output is noted, too.
        prompts: whether the last tokens of prompts are.
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
                # Row i is where the step's token i was drawn, behind those of a prompt's last part.
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
