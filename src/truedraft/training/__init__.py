"""Training: drafts, tables of n-grams, heads of any kind on a target's own answers, also together with the target.

Each name loads on first use: the words for a training need none of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from truedraft.training.drafts import DraftConfig, DraftResult, train_draft
    from truedraft.training.head_config import Calibrated, HeadTrainingConfig, JointConfig
    from truedraft.training.heads import train_heads
    from truedraft.training.loop import Callbacks
    from truedraft.training.losses import distill, loss_from_spec
    from truedraft.training.medusa import MedusaTrainingConfig
    from truedraft.training.ngram_counts import count_ngrams
    from truedraft.training.ngrams import NgramConfig, NgramResult, train_ngrams
    from truedraft.training.optimizer import OptimizerConfig, WarmupStableDecay
    from truedraft.training.redrafter import RedrafterTrainingConfig
    from truedraft.training.report import HeadReport, HeadResult
    from truedraft.training.texts.answer_writer import WritingConfig
    from truedraft.training.texts.prompts import PromptSets
    from truedraft.training.workspace import TimeBudget

_HOMES = {
    "Calibrated": "head_config",
    "Callbacks": "loop",
    "DraftConfig": "drafts",
    "DraftResult": "drafts",
    "HeadReport": "report",
    "HeadResult": "report",
    "HeadTrainingConfig": "head_config",
    "JointConfig": "head_config",
    "MedusaTrainingConfig": "medusa",
    "NgramConfig": "ngrams",
    "NgramResult": "ngrams",
    "OptimizerConfig": "optimizer",
    "PromptSets": "texts.prompts",
    "RedrafterTrainingConfig": "redrafter",
    "TimeBudget": "workspace",
    "WarmupStableDecay": "optimizer",
    "WritingConfig": "texts.answer_writer",
    "count_ngrams": "ngram_counts",
    "distill": "losses",
    "loss_from_spec": "losses",
    "train_draft": "drafts",
    "train_heads": "heads",
    "train_ngrams": "ngrams",
}

__all__ = [
    "Calibrated",
    "Callbacks",
    "DraftConfig",
    "DraftResult",
    "HeadReport",
    "HeadResult",
    "HeadTrainingConfig",
    "JointConfig",
    "MedusaTrainingConfig",
    "NgramConfig",
    "NgramResult",
    "OptimizerConfig",
    "PromptSets",
    "RedrafterTrainingConfig",
    "TimeBudget",
    "WarmupStableDecay",
    "WritingConfig",
    "count_ngrams",
    "distill",
    "loss_from_spec",
    "train_draft",
    "train_heads",
    "train_ngrams",
]


def __getattr__(name: str) -> object:
    """Load a public name from its home on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'truedraft.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"truedraft.training.{_HOMES[name]}"), name)
