"""Train a Llama from scratch on text: the embedded target, and a first start for its draft."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from truedraft.models.architecture import LlamaShape, new_llama, use_training_attention
from truedraft.training.blocks import stream_hash
from truedraft.training.checkpoints import CHECKPOINT_EVERY_S
from truedraft.training.curriculum import Curriculum
from truedraft.training.identity import identity_of
from truedraft.training.loop import TrainingLoop
from truedraft.training.losses import CrossEntropy
from truedraft.training.objectives import LawObjective
from truedraft.training.optimizer import MixedOptimizer, OptimizerConfig
from truedraft.training.records import write_run_record
from truedraft.training.schedule import WarmupStableDecay

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class PretrainConfig:
    """Everything that decides the weights, but for the data and the last bits of floating point."""

    shape: LlamaShape
    schedule: WarmupStableDecay
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    curriculum: Curriculum = field(default_factory=Curriculum)
    seed: int = 0
    device: str = "cpu"
    checkpoint_every_s: float = CHECKPOINT_EVERY_S


def pretraining_loop(config: PretrainConfig, stream: NDArray[np.uint32], folder: Path) -> TrainingLoop:
    """A new model and the loop that trains it; `loop.run()` starts, or resumes from the folder's checkpoint.

    The folder may be given the checkpoint of another run's stable stretch, as long as that is not longer than
    this one's: the run then branches from there.
    """
    identity = identity_of(config, data_sha256=stream_hash(stream))
    model = new_llama(config.shape, seed=config.seed)
    model.to(config.device)
    use_training_attention(model)
    loop = TrainingLoop(
        model=model,
        optimizer=MixedOptimizer(model, config.optimizer),
        objective=LawObjective(model, CrossEntropy()),
        phases=config.curriculum.phases(stream, config.schedule, seed=config.seed),
        schedule=config.schedule,
        folder=folder,
        checkpoint_every_s=config.checkpoint_every_s,
        identity=identity,
    )
    write_run_record(folder, identity=identity, device=config.device)
    return loop
