"""What decides the training of Medusa heads, but for the target and the data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from truedraft.errors import OptionError
from truedraft.options import check_whole
from truedraft.training.head_config import HeadTrainingConfig, check_share
from truedraft.training.lessons import TokensAndLaws
from truedraft.training.optimizer import OptimizerConfig


@dataclass(frozen=True)
class JointConfig:
    """Stage 2: heads and target are trained together (Medusa-2, 2401.10774, section 2.2.2).

    The target keeps its own loss, the divergence KL(p0 || p) from its law before training, as that paper does for
    self-distilled text (section 2.3.2): a cross-entropy of its own answers would only sharpen it.

    Attributes:
        steps: updates.
        tokens_per_step: of one update.
        length: tokens of a sequence.
        heads: rates of the heads.
        backbone: rates of the target, smaller.
        heads_share: weight of the heads' loss beside the target's own, lambda_0 of the paper.
        decay_share: of the steps, at the end, in which the rates decay.
        lora_rank: rank of LoRA adapters, which are merged when the target is saved; 0 trains all weights; None decides
            by the number of weights.
    """

    steps: int = 300
    tokens_per_step: int = 4096
    length: int = 256
    heads: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(5e-3, 5e-3))
    backbone: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(5e-4, 5e-4, matrix_weight_decay=0.0))
    heads_share: float = 0.2
    decay_share: float = 0.3
    lora_rank: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in ("steps", "tokens_per_step", "length"):
            check_whole(f"joint.{name}", getattr(self, name), 1)
        if not 0.0 < self.heads_share < math.inf:
            raise OptionError(f"must be a number above 0, got {self.heads_share}", field="joint.heads_share")
        check_share("joint.decay_share", self.decay_share)
        if self.lora_rank is not None:
            check_whole("joint.lora_rank", self.lora_rank, 0)


@dataclass(frozen=True)
class MedusaTrainingConfig(HeadTrainingConfig):
    """All numbers of a training of Medusa heads; in stage 2 `start_from` takes the place of a first stage.

    Attributes:
        heads: how many tokens after the next are guessed.
        layers: residual blocks of a head.
        reads_token: whether heads also read the token that was drawn from their vector, see `MedusaConfig`.
        stage: 1 trains the heads of a frozen target; 2 trains both, after the heads were warmed up so.
        law_share: how much of the loss is the target's law at a place, and how much its token: (1 - law_share)
            CE(token) + law_share KL(p || q). Medusa 2401.10774, section 2.2.1, has the token alone; a whole law says
            more about a position than one draw from it.
        joint: what decides stage 2.

    Raises:
        OptionError: a value out of its range.
    """

    decisive: ClassVar[frozenset[str]] = HeadTrainingConfig.decisive | {"heads", "layers", "reads_token", "law_share"}

    heads: int = 4
    layers: int = 1
    reads_token: bool = True
    stage: int = 1
    law_share: float = 1.0
    joint: JointConfig = field(default_factory=JointConfig)

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything is loaded or written."""
        super().__post_init__()
        for name in ("heads", "layers"):
            check_whole(name, getattr(self, name), 1)
        if self.stage not in (1, 2):
            raise OptionError(f"must be 1 (heads alone) or 2 (heads and target), got {self.stage}", field="stage")
        check_share("law_share", self.law_share)

    @property
    def goal(self) -> TokensAndLaws:
        """What each head learns."""
        return TokensAndLaws(1.0 - self.law_share, self.law_share)
