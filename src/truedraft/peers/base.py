"""The contract of whatever answers prompts and can be measured: our engine, another library, another program."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from truedraft.core.params import SamplingParams
from truedraft.core.stats import Counters, StepRecord
from truedraft.models.base import LanguageModel


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a system gives back for a group of prompts that it answered together.

    Attributes:
        token_ids: new tokens of each prompt, without the one that ended it.
        first_token_s: for each prompt, seconds until its first token; None where there is none.
        prefill_s: seconds spent on prompts, the first tokens included.
        forwards: forwards of the target after the prefill; each serves all prompts of the group.
        draft_forwards: forwards of the draft model.
        context_tokens: cached tokens that those target forwards read, summed over forwards and prompts.
        target_calls: target calls of the prompts, as far as they can be counted; None where they cannot.
        mean_acceptance_length: tokens per target call; None where it cannot be counted.
        first_tokens: new tokens of a prompt that came with the prefill; several where that already judges a draft.
        counters: of our engine; None for a peer.
        steps: of our engine, in order.
        finish_reasons: of our engine, for each prompt.
        warnings: of our engine, about all prompts together.
    """

    token_ids: tuple[tuple[int, ...], ...]
    first_token_s: tuple[float | None, ...]
    prefill_s: float
    forwards: int
    draft_forwards: int
    context_tokens: int
    target_calls: int | None
    mean_acceptance_length: float | None
    first_tokens: int = 1
    counters: Counters | None = None
    steps: Sequence[StepRecord] = field(default=(), repr=False)
    finish_reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class System(ABC):
    """One way of answering: a system under test.

    Attributes:
        name: for reports; unique in a run.
    """

    name: str

    @abstractmethod
    def answer(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Outcome:
        """Answer prompts, given as token ids, together.

        Raises:
            TruedraftError: one of them could not be answered.
        """


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """What a peer is to run, so that it runs the same.

    Attributes:
        target: our target; the peer loads the same weights again, in its own way.
        model: the target's name or folder, as it was typed.
        pad_to: size that it is padded to, or None.
        draft: our draft model, which shares its name with the folder it came from; None without one.
        batch: prompts that are answered together.
    """

    target: LanguageModel
    model: str
    pad_to: str | None
    draft: LanguageModel | None
    batch: int


@dataclass(frozen=True, slots=True)
class PeerSystems:
    """What a peer brings.

    Attributes:
        systems: its ways of answering.
        best_of: names of which only the best is shown in tables, under one title.
        notes: what it cannot do here, a sentence each.
    """

    systems: Sequence[System]
    best_of: dict[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()
