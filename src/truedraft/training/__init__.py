"""Training of drafts, n-gram tables and heads on a target's own answers; names are loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from truedraft.lazy import loads

if TYPE_CHECKING:
    from truedraft.kinds.medusa.training import MedusaTrainingConfig as MedusaTrainingConfig
    from truedraft.kinds.redrafter.training import RedrafterTrainingConfig as RedrafterTrainingConfig
    from truedraft.training.drafts import DraftConfig as DraftConfig
    from truedraft.training.drafts import DraftResult as DraftResult
    from truedraft.training.drafts import train_draft as train_draft
    from truedraft.training.head_config import Calibrated as Calibrated
    from truedraft.training.head_config import HeadTrainingConfig as HeadTrainingConfig
    from truedraft.training.head_config import JointConfig as JointConfig
    from truedraft.training.heads import train_heads as train_heads
    from truedraft.training.loop import Callbacks as Callbacks
    from truedraft.training.losses import distill as distill
    from truedraft.training.losses import loss_from_spec as loss_from_spec
    from truedraft.training.ngrams import NgramConfig as NgramConfig
    from truedraft.training.ngrams import NgramResult as NgramResult
    from truedraft.training.ngrams import count_ngrams as count_ngrams
    from truedraft.training.ngrams import train_ngrams as train_ngrams
    from truedraft.training.optimizer import OptimizerConfig as OptimizerConfig
    from truedraft.training.optimizer import WarmupStableDecay as WarmupStableDecay
    from truedraft.training.report import HeadReport as HeadReport
    from truedraft.training.report import HeadResult as HeadResult
    from truedraft.training.texts.answer_writer import WritingConfig as WritingConfig
    from truedraft.training.texts.prompts import PromptSets as PromptSets
    from truedraft.training.workspace import TimeBudget as TimeBudget

_MODULES = {
    "kinds.medusa.training": ("MedusaTrainingConfig",),
    "kinds.redrafter.training": ("RedrafterTrainingConfig",),
    "training.drafts": ("DraftConfig", "DraftResult", "train_draft"),
    "training.head_config": ("Calibrated", "HeadTrainingConfig", "JointConfig"),
    "training.heads": ("train_heads",),
    "training.loop": ("Callbacks",),
    "training.losses": ("distill", "loss_from_spec"),
    "training.ngrams": ("count_ngrams", "NgramConfig", "NgramResult", "train_ngrams"),
    "training.optimizer": ("OptimizerConfig", "WarmupStableDecay"),
    "training.report": ("HeadReport", "HeadResult"),
    "training.texts.answer_writer": ("WritingConfig",),
    "training.texts.prompts": ("PromptSets",),
    "training.workspace": ("TimeBudget",),
}
_HOMES = {name: f"truedraft.{module}" for module, names in _MODULES.items() for name in names}
__all__ = list(_HOMES)
__getattr__ = loads(__name__, _HOMES)
