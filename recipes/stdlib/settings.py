"""Every number that decides the embedded pair: sizes, rates, seeds, and how many steps each stage takes."""

from __future__ import annotations

from typing import NamedTuple

from truedraft.models.architecture import LlamaShape
from truedraft.training.drafts import DraftConfig
from truedraft.training.optimizer import OptimizerConfig, WarmupStableDecay
from truedraft.training.texts.data import Curriculum

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


class Stage(NamedTuple):
    """A training of a model: steps of 4,096 tokens before and in the decay, the highest rate, and the seed."""

    shape: LlamaShape
    stable: int
    decay: int
    rate: float
    seed: int

    @property
    def config(self) -> DraftConfig:
        schedule = WarmupStableDecay(WARMUP_STEPS, self.stable, self.decay)
        optimizer = OptimizerConfig(self.rate, self.rate)
        return DraftConfig(schedule=schedule, optimizer=optimizer, curriculum=CURRICULUM, seed=self.seed)


STAGES = {
    "target": Stage(TARGET_SHAPE, 1120, 250, 2e-3, 0),
    "first_target": Stage(TARGET_SHAPE, 300, 30, 2e-3, 0),  # the same run, decayed early
    "draft_start": Stage(DRAFT_SHAPE, 260, 0, 4e-3, 1),  # on the text alone: cheap steps before the dear ones
    "first_draft": Stage(DRAFT_SHAPE, 140, 30, 3e-3, 2),
    "draft": Stage(DRAFT_SHAPE, 2390, 590, 3e-3, 3),
}
"""Those of the committed weights."""
