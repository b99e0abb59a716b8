"""What a training of Medusa heads gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.drafters.calibration import FACT, PROMISED_ON
from truedraft.planning import survival_of

if TYPE_CHECKING:
    from truedraft.planning import CountedTree
    from truedraft.training.served import Served


@dataclass(frozen=True)
class TrainedHeads:
    """What heads are worth after a stage.

    Attributes:
        trees: for "greedy" and "sampled" requests, with what each kind of trees promises.
        served: acceptance, measured in the engine on prompts that neither training nor trees have seen.
        promised_on: the text on which the promises were replayed, in words.
    """

    trees: Mapping[str, CountedTree]
    served: Sequence[Served]
    promised_on: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "trees": {kind: counted.as_dict() for kind, counted in self.trees.items()},
            FACT: {kind: survival.depths for kind, survival in survival_of(self.trees).items()},
            "served": [each.as_dict() for each in self.served],
            PROMISED_ON: self.promised_on,
        }


@dataclass(frozen=True)
class JointReport:
    """What stage 2 did.

    Attributes:
        target: the folder of the new target.
        lora_rank: of the adapters that were merged into it; 0 where all weights were trained.
        loss_before: of the target on held-out text before, in nats per token.
        loss_after: the same of the new target.
        loss_tokens: how many tokens that is the mean of.
        before: the heads before, with the target before.
    """

    target: Path
    lora_rank: int
    loss_before: float
    loss_after: float
    loss_tokens: int
    before: TrainedHeads

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "target": str(self.target),
            "lora_rank": self.lora_rank,
            "loss_before": self.loss_before,
            "loss_after": self.loss_after,
            "loss_tokens": self.loss_tokens,
            "before": self.before.as_dict(),
        }


@dataclass(frozen=True)
class Effort:
    """What a training took.

    Attributes:
        written_tokens: that the target wrote to be trained on.
        steps: updates of the last stage.
        positions: that they saw, counted as often as they were seen.
        elapsed_s: of those steps.
    """

    written_tokens: int
    steps: int
    positions: int
    elapsed_s: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class MedusaResult:
    """Trained heads: where they lie, what they are worth, and what it took.

    Attributes:
        folder: with the heads.
        heads: their trees and their acceptance.
        effort: what it took.
        joint: of stage 2; None after stage 1.
    """

    folder: Path
    heads: TrainedHeads
    effort: Effort
    joint: JointReport | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        joint = {} if self.joint is None else {"joint": self.joint.as_dict()}
        return self.effort.as_dict() | self.heads.as_dict() | joint
