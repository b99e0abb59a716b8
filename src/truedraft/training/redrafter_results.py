"""What a training of a recurrent head gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.drafters.calibration import PROMISED_ON
from truedraft.planning import facts_of

if TYPE_CHECKING:
    from truedraft.planning import ReplayedBeams
    from truedraft.training.medusa_results import Effort
    from truedraft.training.redrafter_served import ServedBeams


@dataclass(frozen=True)
class TrainedRedrafter:
    """What a recurrent head is worth.

    Attributes:
        accuracy: `place_K_top_1` and `place_K_top_5`, K from 1: the share of held-out positions at which the token at
            a place was the head's first guess, or one of five, given the tokens before it.
        replayed: for "greedy" and "sampled" requests, by what beams are chosen, and what those of each width and length
            are expected to bring.
        served: acceptance, measured in the engine on prompts that were not trained on.
        promised_on: the text on which the promises were replayed, in words.
    """

    accuracy: Mapping[str, float]
    replayed: Mapping[str, ReplayedBeams]
    served: Sequence[ServedBeams]
    promised_on: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "accuracy": dict(self.accuracy),
            **facts_of(self.replayed),
            "served": [each.as_dict() for each in self.served],
            PROMISED_ON: self.promised_on,
        }


@dataclass(frozen=True)
class RedrafterResult:
    """A trained recurrent head: where it lies, what it is worth, and what it took.

    Attributes:
        folder: with the head.
        head: its accuracy and its acceptance.
        effort: what it took.
    """

    folder: Path
    head: TrainedRedrafter
    effort: Effort

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self.effort.as_dict() | self.head.as_dict()
