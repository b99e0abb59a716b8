"""What one contestant did with one group of prompts: raw, and as a row that can be written down."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from truedraft.bench.breakdown import Breakdown
from truedraft.core.counters import Counters
from truedraft.engine import StepRecord


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a contestant gives back for a group of prompts that it answered together.

    Attributes:
        token_ids: new tokens of each prompt, without the one that ended it.
        first_token_s: for each prompt, seconds until its first token; None where there is none.
        prefill_s: seconds spent on prompts, the first tokens included.
        forwards: forwards of the target after the prefill; each serves all prompts of the group.
        draft_forwards: forwards of the draft model.
        context_tokens: cached tokens that those target forwards read, summed over forwards and prompts.
        target_calls: target calls of the prompts, as far as they can be counted; None where they cannot.
        mean_acceptance_length: tokens per target call; None where it cannot be counted.
        counters: of our engine; None for a peer.
        steps: of our engine, in order.
        first_tokens: new tokens of a prompt that came with the prefill; several where that already judges a draft.
    """

    token_ids: tuple[tuple[int, ...], ...]
    first_token_s: tuple[float | None, ...]
    prefill_s: float
    forwards: int
    draft_forwards: int
    context_tokens: int
    target_calls: int | None
    mean_acceptance_length: float | None
    counters: Counters | None = None
    steps: Sequence[StepRecord] = field(default=(), repr=False)
    first_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant, one group of prompts, one run.

    Attributes:
        contestant: its name.
        prompts: names of the group's prompts.
        run: number of the run, from 0.
        place: when the contestant's turn came within the group, from 0.
        total_s: wall time from the first submission to the last answer, in seconds.
        cpu_s: CPU time of the whole process meanwhile, all threads together, in seconds.
        outcome: what it answered.
        breakdown: where the time went; None for a peer.
    """

    contestant: str
    prompts: tuple[str, ...]
    run: int
    place: int
    total_s: float
    cpu_s: float
    outcome: Outcome
    breakdown: Breakdown | None = None

    @property
    def tokens(self) -> int:
        """New tokens of all prompts of the group."""
        return sum(map(len, self.outcome.token_ids))

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second, prefill included."""
        return self.tokens / self.total_s if self.total_s else 0.0

    @property
    def decode_s(self) -> float:
        """Seconds after the prefill."""
        return self.total_s - self.outcome.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens that came after the prefill, per second after it."""
        later = sum(max(len(tokens) - self.outcome.first_tokens, 0) for tokens in self.outcome.token_ids)
        return later / self.decode_s if later and self.decode_s > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For the file of rows: counts and seconds, no rates, so that every rate can be computed again."""
        outcome = self.outcome
        return {
            "contestant": self.contestant,
            "prompts": list(self.prompts),
            "run": self.run,
            "place": self.place,
            "tokens": self.tokens,
            "total_s": self.total_s,
            "cpu_s": self.cpu_s,
            "first_token_s": list(outcome.first_token_s),
            "prefill_s": outcome.prefill_s,
            "first_tokens": outcome.first_tokens,
            "forwards": outcome.forwards,
            "draft_forwards": outcome.draft_forwards,
            "context_tokens": outcome.context_tokens,
            "target_calls": outcome.target_calls,
            "mean_acceptance_length": outcome.mean_acceptance_length,
            "counters": None if outcome.counters is None else dataclasses.asdict(outcome.counters),
            "breakdown": None if self.breakdown is None else dataclasses.asdict(self.breakdown),
            "token_ids": [list(tokens) for tokens in outcome.token_ids],
        }


def time_without_core(rows: Sequence[Row]) -> float:
    """The least fraction of their time in which this process ran on no core: 1 - CPU time / wall time, 0 or more.

    Decoding on the CPU computes all the time, so anything much above 0 means that others were using the machine. With
    several threads more may have gone unseen.
    """
    total_s = sum(row.total_s for row in rows)
    return max(0.0, 1.0 - sum(row.cpu_s for row in rows) / total_s) if total_s > 0 else 0.0
