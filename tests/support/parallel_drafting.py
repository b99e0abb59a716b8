"""Drafting ahead inside the process of the test, and small drafts that another process can make."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from truedraft import SamplingParams
from truedraft.drafters import DraftModel, ParallelDraft
from truedraft.drafters.parallel import AheadDrafter, DraftProcess
from truedraft.drafters.parallel.ahead import Call, Reply
from truedraft.engine import Answer
from truedraft.models.base import ForwardOutput, LanguageModel, Segment
from truedraft.testing import MarkovModel, altered

VOCAB = 6
TEXTS = [[1, 2, 3], [4], [5, 5, 0, 2, 1, 0], [3, 1]]
WAYS = {
    "greedy": SamplingParams(max_tokens=40),
    "sampled": SamplingParams(max_tokens=40, temperature=0.8),
    "seeded": SamplingParams(max_tokens=40, temperature=0.8, seed=1),
}


def seen(answer: Answer) -> tuple[object, ...]:
    """All of an answer but the times."""
    return answer.token_ids, answer.finish_reason, answer.origins, answer.warnings, answer.stats


class SameProcess(DraftProcess):
    """A worker that drafts here, ahead as soon as it was asked.

    Args:
        drafter: that it has.
        pickled: whether all that it is told and tells is pickled on the way.

    Attributes:
        replies: that it gave.
    """

    alive = True

    def __init__(self, drafter: AheadDrafter, pickled: bool) -> None:  # starts none
        self.drafter = drafter
        self.pickled = pickled
        self.replies: list[Reply] = []

    def propose(self, calls: Sequence[Call]) -> Reply:
        reply: Reply = self._carried(self.drafter.propose(self._carried(calls)))
        self.replies.append(reply)
        self.drafter.draft_ahead()
        return reply

    def _carried(self, message: Any) -> Any:
        return pickle.loads(pickle.dumps(message)) if self.pickled else message

    def end(self, request: int) -> None:
        self.drafter.end(request)


def beside(
    model: LanguageModel, length: int = 4, min_probability: float = 0.0, pickled: bool = True
) -> tuple[ParallelDraft, SameProcess]:
    """A drafter that drafts ahead in this process, and its worker."""
    drafts = [DraftModel(model, length, min_probability=min_probability) for _ in range(2)]
    worker = SameProcess(AheadDrafter(drafts[1]), pickled)
    return ParallelDraft(drafts[0], worker), worker


def markov(seed: int = 2, sharpness: float = 1.5) -> MarkovModel:
    """A table; the same one for the same numbers, in every process."""
    return MarkovModel.random(VOCAB, seed=seed, sharpness=sharpness)


def near(target: MarkovModel) -> MarkovModel:
    """A draft that mostly thinks as the target does, so that whole chains are accepted now and then."""
    return MarkovModel(0.7 * target.probs + 0.3 * markov().probs, context_length=target.context_length)


def near_markov() -> MarkovModel:
    """The draft that is near the first table, in every process."""
    return near(markov(1))


def tiny_llama() -> LanguageModel:
    """Random weights, the same in every process."""
    from support.tiny_models import packed  # not for the processes of tables: it loads for seconds

    return packed("llama")


def _before_each(act: Callable[[], object]) -> LanguageModel:
    """The draft that is near, which does something before each forward."""
    model = near_markov()

    def forward(segments: Sequence[Segment]) -> ForwardOutput:
        act()
        return model.forward(segments)

    return altered(model, forward=forward)


def slow_markov() -> LanguageModel:
    """Its forwards take as long as they like: mostly nothing, now and then 30 milliseconds."""
    calls = iter(range(1 << 30))
    return _before_each(lambda: time.sleep(0.03 if next(calls) % 7 == 3 else 0.0))


def dying_markov(forwards: int) -> LanguageModel:
    """A draft whose process dies in its so-manieth forward."""
    calls = iter(range(forwards))
    return _before_each(lambda: next(calls, None) is not None or os._exit(7))


def failing_markov() -> LanguageModel:
    """A draft that cannot be loaded."""
    raise FileNotFoundError("no such draft")


def broken_markov(forwards: int) -> LanguageModel:
    """A draft that fails in its so-manieth forward."""
    calls = iter(range(forwards))

    def act() -> None:
        if next(calls, None) is None:
            raise RuntimeError("the draft is broken")

    return _before_each(act)


def off_by_one(target: MarkovModel) -> MarkovModel:
    """A draft that is always wrong, and thinks the target's choice second best."""
    best = target.probs.argmax(dim=-1)
    probs = torch.full_like(target.probs, 0.1 / (VOCAB - 2))
    probs.scatter_(-1, best[..., None], 0.2).scatter_(-1, (best[..., None] + 1) % VOCAB, 0.7)
    return MarkovModel(probs)
