"""Every number that decides the embedded pair: sizes, rates, seeds, and how many steps each stage takes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from truedraft.models.architecture import LlamaShape
from truedraft.training.drafts import DraftConfig
from truedraft.training.optimizer import OptimizerConfig, WarmupStableDecay
from truedraft.training.texts.data import Curriculum

SETTINGS = Path(__file__).parent / "settings.json"
VOCAB_SIZE = 8192
CONTEXT = 2048
WARMUP_STEPS = 10
TARGET_SHAPE = LlamaShape(
    vocab_size=VOCAB_SIZE, width=384, layers=8, heads=6, kv_heads=2, intermediate=1024, context=CONTEXT
)
DRAFT_SHAPE = LlamaShape(
    vocab_size=VOCAB_SIZE, width=128, layers=2, heads=2, kv_heads=1, intermediate=512, context=CONTEXT
)
CURRICULUM = Curriculum(stable_length=512, decay_length=CONTEXT, tokens_per_step=4096, tokens_per_pass=4096)


@dataclass(frozen=True)
class Settings:
    """Steps of each stage, 4,096 tokens a step. The committed file holds those of the committed weights."""

    target_stable_steps: int
    target_decay_steps: int
    first_target_stable_steps: int  # where the first, early target branches off
    first_target_decay_steps: int
    draft_start_steps: int  # next-token training on the text, before the first distillation
    first_draft_stable_steps: int
    first_draft_decay_steps: int
    draft_stable_steps: int
    draft_decay_steps: int

    @classmethod
    def load(cls, path: Path = SETTINGS) -> Settings:
        return cls(**json.loads(path.read_text()))

    def pretraining(self, stage: str) -> tuple[LlamaShape, DraftConfig]:
        """Of `target`, of `first_target`, which is the same run decayed early, and of `draft_start`: the draft as a
        language model of its own, cheap steps before the dear ones."""
        if stage == "target":
            return TARGET_SHAPE, _config(self.target_stable_steps, self.target_decay_steps, 2e-3, 0)
        if stage == "first_target":
            return TARGET_SHAPE, _config(self.first_target_stable_steps, self.first_target_decay_steps, 2e-3, 0)
        return DRAFT_SHAPE, _config(self.draft_start_steps, 0, 4e-3, 1)

    def distillation(self, stage: str) -> DraftConfig:
        """Of `first_draft` and `draft`."""
        if stage == "first_draft":
            return _config(self.first_draft_stable_steps, self.first_draft_decay_steps, 3e-3, 2)
        return _config(self.draft_stable_steps, self.draft_decay_steps, 3e-3, 3)


def _config(stable: int, decay: int, rate: float, seed: int) -> DraftConfig:
    schedule, optimizer = WarmupStableDecay(WARMUP_STEPS, stable, decay), OptimizerConfig(rate, rate)
    return DraftConfig(schedule=schedule, optimizer=optimizer, curriculum=CURRICULUM, seed=seed)
