"""Training whole language models on streams of text: towards the text itself, or towards a target's distributions.

The first makes the embedded target, and a first start for its draft; the second is how drafts are distilled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from truedraft.models.architecture import LlamaShape, new_llama, use_training_attention
from truedraft.training.data import Curriculum, stream_hash
from truedraft.training.identity import identity_of
from truedraft.training.loop import CHECKPOINT_EVERY_S, RunFolder, TrainingLoop
from truedraft.training.losses import CrossEntropy, DistillationLoss, distillation_gradient
from truedraft.training.optimizer import MixedOptimizer, OptimizerConfig, WarmupStableDecay

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedModel


class StreamObjective:
    """Trains a model towards a target's distributions along a text; without a target, towards the text itself.

    The logits' gradient is computed chunk by chunk in float32 and handed to the model in one backward pass.

    Args:
        model: in training.
        loss: between the distributions.
        target: learned from; None where the loss looks at the text alone.
    """

    def __init__(self, model: PreTrainedModel, loss: DistillationLoss, target: PreTrainedModel | None = None) -> None:
        self._model = model
        self._loss = loss
        self._target = target

    def accumulate(self, batch: torch.Tensor, scale: float) -> dict[str, float]:
        """Add `scale` times the gradient of the mean loss over the batch [sequences, length + 1].

        Answers with the mean loss and, with a target, `alpha` of the batch's first chunk.
        """
        inputs, labels = batch[:, :-1], batch[:, 1:].flatten()
        target = None
        if self._target is not None:
            with torch.no_grad():
                target = self._target(input_ids=inputs, use_cache=False).logits.flatten(0, 1)
        logits = self._model(input_ids=inputs, use_cache=False).logits.flatten(0, 1)  # [tokens, vocab]
        gradient, values = distillation_gradient(logits, target, labels, self._loss, scale)
        logits.backward(gradient)
        return values


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
    model = new_llama(config.shape, seed=config.seed)
    model.to(config.device)
    use_training_attention(model)
    phases = config.curriculum.phases(stream, config.schedule, seed=config.seed)
    identity = identity_of(config, data_sha256=stream_hash(stream))
    return TrainingLoop(
        model,
        MixedOptimizer(model, config.optimizer),
        StreamObjective(model, CrossEntropy()),
        phases,
        config.schedule,
        RunFolder(folder, identity, config.device, config.checkpoint_every_s),
    )
