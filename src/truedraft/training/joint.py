"""Stage 2: heads and target learn together, and the target keeps its law (Medusa-2, 2401.10774, section 2.2.2).

On text that the target wrote itself its own loss is the divergence from its law before training (section 2.3.2 there).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from truedraft.models.architecture import load_causal_lm
from truedraft.models.lm_head import LmHead
from truedraft.training.adapters import adapters_off, merged, rank_for, with_adapters
from truedraft.training.blocks import BlockSampler, stream_hash
from truedraft.training.head_config import schedule_of
from truedraft.training.head_loop import identity_of_schedule
from truedraft.training.head_loss import HeadLoss
from truedraft.training.identity import identity_of, weights_fingerprint
from truedraft.training.lessons import Goal, Lesson
from truedraft.training.loop import Phase, TrainingLoop
from truedraft.training.losses import ForwardKL
from truedraft.training.objectives import law_gradient
from truedraft.training.optimizer import MixedOptimizer, SeparateOptimizers
from truedraft.training.records import write_run_record
from truedraft.training.trainee import heads_optimizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from truedraft.training.medusa_config import MedusaTrainingConfig
    from truedraft.training.medusa_trainee import MedusaTrainee
    from truedraft.training.self_text import SelfText


class JointModel(nn.Module):
    """A target in training with its heads; checkpoints hold what is trained, and nothing that stays as it was.

    Args:
        backbone: the target, or the target with adapters.
        heads: warmed up.
    """

    def __init__(self, backbone: nn.Module, heads: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.heads = heads

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """The trained weights, tied ones once."""
        return {name: weight.detach() for name, weight in self.named_parameters() if weight.requires_grad}

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """Restore what `state_dict` returned."""
        weights = dict(self.named_parameters())
        with torch.no_grad():
            for name, value in state_dict.items():
                weights[name].copy_(value)


class Backbone:
    """A target that is trained whole, or by adapters where it is large.

    Args:
        target: an embedded name, a folder, or a hub name.
        rank: of the adapters; 0 trains all weights, None decides by their number.
        device: where it is trained.

    Attributes:
        rank: of the adapters; 0 where all weights are trained.
        module: what is trained.
    """

    def __init__(self, target: str | Path, rank: int | None, device: str) -> None:
        before = load_causal_lm(target, dtype=torch.bfloat16, device=device).eval().requires_grad_(False)
        self.rank = rank_for(before.num_parameters()) if rank is None else rank
        self._before = None if self.rank else before
        self.module: Any = with_adapters(before, self.rank) if self.rank else load_causal_lm(target, device=device)
        self.lm_head = LmHead.of(self.model)

    @property
    def model(self) -> PreTrainedModel:
        """The model inside of `module`."""
        return cast("PreTrainedModel", self.module.get_base_model() if self.rank else self.module)

    @torch.no_grad()
    def logits_before(self, ids: Tensor) -> Tensor:
        """What the target said before it was trained: `[tokens, vocab]` for ids `[sequences, length]`."""
        if self._before is not None:
            return cast("Tensor", self._before(input_ids=ids, use_cache=False).logits.flatten(0, 1))
        with adapters_off(self.module):
            return cast("Tensor", self.module(input_ids=ids, use_cache=False).logits.flatten(0, 1))

    def run(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits `[tokens, vocab]` for ids `[sequences, length]`, and the vectors `[tokens, width]` that gave them."""
        with _entering(self.model.get_output_embeddings()) as entered:
            logits = self.module(input_ids=ids, use_cache=False).logits
        return logits.flatten(0, 1), entered[0].flatten(0, 1)

    def finished(self) -> PreTrainedModel:
        """The trained target as an ordinary model; adapters are merged, and training is over."""
        return cast("PreTrainedModel", merged(self.module) if self.rank else self.module)


class JointObjective:
    """KL(p0 || p) of the target, plus `heads_share` times the loss of the heads; gradients of both reach the target.

    Args:
        backbone: the target.
        trainee: heads of it.
        goal: what they learn from its tokens and laws before training.
        loss: of the heads.
        heads_share: lambda_0 of the paper.
    """

    def __init__(
        self, backbone: Backbone, trainee: MedusaTrainee, goal: Goal, loss: HeadLoss, heads_share: float
    ) -> None:
        self._backbone = backbone
        self._trainee = trainee
        self._goal = goal
        self._loss = loss
        self._heads_share = heads_share

    def accumulate(self, batch: Tensor, scale: float) -> dict[str, float]:
        """Add `scale` times the gradient of the mean loss over blocks `[sequences, length + 1]`."""
        inputs, labels = batch[:, :-1], batch[:, 1:].flatten()
        before = self._backbone.logits_before(inputs)
        logits, hidden = self._backbone.run(inputs)
        reach = self._trainee.reach
        rows = torch.arange(len(labels), device=batch.device).view(inputs.shape)
        places = rows[:, : inputs.shape[1] - reach].flatten()
        read = labels[places[:, None] + torch.arange(reach, device=batch.device)]
        vectors = self._trainee.vectors(hidden[places].float(), read)

        def lesson_of(some: slice) -> Lesson:
            return self._goal.lesson(labels[some], lambda: before[some])

        of_heads, values = self._loss.gradient(vectors, places, lesson_of, scale * self._heads_share)
        of_law, kept = law_gradient(logits, before, labels, ForwardKL(), scale)
        torch.autograd.backward([logits, vectors], [of_law, of_heads])
        heads = values.pop("loss")
        return {"loss": kept["loss"] + self._heads_share * heads, "kl_to_before": kept["loss"], "heads": heads} | values


def joint_stream(text: SelfText, separator: int) -> NDArray[np.uint32]:
    """All prompts with their answers, one behind another, as one stream of ids."""
    ids = [id_ for record in text.records for id_ in (*record.prompt, *record.answer, separator)]
    return np.array(ids, dtype=np.uint32)


def joint_loop(
    config: MedusaTrainingConfig,
    backbone: Backbone,
    trainee: MedusaTrainee,
    fingerprint: str,
    stream: NDArray[np.uint32],
    folder: Path,
) -> TrainingLoop:
    """The loop that trains both, and resumes from the folder's checkpoint.

    Args:
        config: what decides it.
        backbone: the target.
        trainee: heads, warmed up, on the configured device.
        fingerprint: of the target before.
        stream: what it wrote, see `joint_stream`.
        folder: for checkpoint, log and record.

    Raises:
        DataError: the stream is shorter than a sequence.
        OptionError: the folder holds a training with another configuration.
    """
    joint = config.joint
    schedule = schedule_of(joint.steps, joint.decay_share)
    numbers = {name: value for name, value in identity_of(config).items() if name.split(".")[0] in _DECISIVE}
    identity = numbers | identity_of_schedule(schedule)
    identity |= {"joint.lora_rank": backbone.rank, "target": fingerprint, "data_sha256": stream_hash(stream)}
    identity["start_from"] = weights_fingerprint(trainee.module)
    identity.pop("joint.steps")
    sequences = max(1, joint.tokens_per_step // joint.length)
    adapters = [weight for weight in backbone.module.parameters() if weight.requires_grad] if backbone.rank else []
    loop = TrainingLoop(
        model=JointModel(backbone.module, trainee.module),
        optimizer=SeparateOptimizers(
            heads_optimizer(trainee, joint.heads), MixedOptimizer(backbone.module, joint.backbone, adapters)
        ),
        objective=JointObjective(
            backbone, trainee, config.goal, HeadLoss(trainee, decay=config.place_decay), joint.heads_share
        ),
        phases=[Phase(schedule.total_steps, BlockSampler(stream, joint.length, config.seed), sequences, sequences)],
        schedule=schedule,
        folder=folder,
        checkpoint_every_s=config.checkpoint_every_s,
        identity=identity,
    )
    write_run_record(folder, identity=identity, device=config.device)
    return loop


_DECISIVE = frozenset({"heads", "layers", "tied", "law_share", "place_decay", "joint", "seed"})


@contextlib.contextmanager
def _entering(head: nn.Module) -> Iterator[list[Tensor]]:
    """What enters the LM head during a forward, gradients and all."""
    entered: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        entered.append(inputs[0])

    hook = head.register_forward_pre_hook(keep)
    try:
        yield entered
    finally:
        hook.remove()
