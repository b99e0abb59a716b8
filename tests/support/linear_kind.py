"""A kind of heads of somebody else, in one file: a linear head for one position, with all that is offered of a kind."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from truedraft.core.budget import Budget
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.tree import TokenTree, chain_shape
from truedraft.drafters.exporting import Exports, ExportTarget, Way
from truedraft.drafters.heads.base import HeadDrafter
from truedraft.drafters.heads.head import Head, VectorHead, write_published
from truedraft.drafters.kinds import Kind
from truedraft.measure.variants import WIDE, Examined
from truedraft.models.base import LanguageModel
from truedraft.training.evaluate import EngineRound
from truedraft.training.head_config import Calibrated, HeadTrainingConfig
from truedraft.training.losses import DistillationLoss, ForwardKL
from truedraft.training.options import HeadRunOptions, HeadSizeOptions, Trains
from truedraft.training.report import HeadResult, Rows


@dataclass(frozen=True)
class LinearConfig:
    width: int
    vocab_size: int


class LinearHead(VectorHead):
    """h -> W h + h guesses the token after the next, through the target's own LM head."""

    kind: ClassVar[str] = "linear"
    noun: ClassVar[str] = "a linear head"
    plural: ClassVar[str] = "linear heads"
    place_word: ClassVar[str] = "place"
    sizes: ClassVar[type[Any]] = LinearConfig
    reach: ClassVar[int] = 1
    reads_tokens: ClassVar[bool] = False

    def __init__(self, config: LinearConfig) -> None:
        super().__init__(config)
        self.linear = nn.Linear(config.width, config.width)

    @property
    def outputs(self) -> Sequence[nn.Linear | None]:
        return [None]

    def start_from(self, weight: Tensor) -> None:
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(hidden)

    def unroll(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return self(hidden)[None]


class LinearDrafter(HeadDrafter[LinearHead, LinearHead]):
    """Proposes the likeliest token of the head."""

    name: ClassVar[str] = "linear"
    limits = Budget(1, 1, 1)
    kinds = frozenset({DrawKind.DETERMINISTIC})

    def _runner_for(self, target: LanguageModel) -> LinearHead:
        return self.head.to(target.device, target.dtype)

    @torch.inference_mode()
    def propose(self, batch, budgets, noise) -> list[Proposal]:
        head, target = self._running
        found = []
        for request, budget in zip(batch, budgets, strict=True):
            vector = self._vectors.get(request.id)
            if vector is None or budget.is_zero:
                found.append(Proposal.empty())
                continue
            ids = target.unembed(head(vector[None].to(target.dtype))).argmax(dim=-1)
            found.append(Proposal.deterministic(TokenTree(ids, chain_shape(1))))
        return found


@dataclass(frozen=True)
class LinearTrainingConfig(HeadTrainingConfig):
    head: ClassVar[type[Head]] = LinearHead

    def sizes(self, width: int, vocab_size: int) -> LinearConfig:
        return LinearConfig(width, vocab_size)

    @property
    def distillation_loss(self) -> DistillationLoss:
        return ForwardKL()

    @classmethod
    def describe(cls, result: HeadResult) -> Iterator[str | Rows]:
        yield f"seen: {result.report.facts['seen']}"
        yield [("temperature", "tokens"), ("0", f"{result.report.evaluations[0].stats.mean_acceptance_length:.2f}")]

    def calibrate(self, head, lm_head, target, text, on_progress) -> Calibrated:
        chain = {"num_speculative_tokens": 1}
        return Calibrated({"seen": len(text.tokens)}, [EngineRound(0.0, functools.partial(LinearDrafter, head), chain)])


def write(head: Any, folder: Path, target: ExportTarget) -> None:
    write_published(folder, head.state_dict(), {"architectures": ["Linear"], "target": target.name})


TRAINS = Trains("A linear head", "Train a linear head. For tests.", HeadSizeOptions, HeadRunOptions)
EXPORTS = Exports({"vllm": Way("linear", write)}, {"": "train another"})
EXAMINED = Examined("a linear head", LinearDrafter, (WIDE,), LinearHead)
_HERE = "support.linear_kind:"
KINDS: Mapping[str, Kind] = {
    "linear": Kind(
        _HERE + "LinearDrafter",
        "DIR",
        {},
        "one linear layer guesses one token",
        head=_HERE + "LinearHead",
        trains=_HERE + "TRAINS",
        training=_HERE + "LinearTrainingConfig",
        exports=_HERE + "EXPORTS",
        variants=_HERE + "EXAMINED",
    )
}
