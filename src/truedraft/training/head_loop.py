"""Stage 1: the loop that trains Medusa heads on a frozen target's vectors (Medusa-1, 2401.10774, section 2.2.1)."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from truedraft.heads.medusa import MedusaConfig, MedusaHeads
from truedraft.training.head_loss import HeadLoss, HeadsObjective
from truedraft.training.head_trees import HeldOutAccuracy
from truedraft.training.identity import identity_of, weights_fingerprint
from truedraft.training.loop import Measurement, Phase, TrainingLoop
from truedraft.training.optimizer import MixedOptimizer, OptimizerConfig
from truedraft.training.records import write_run_record
from truedraft.training.windows import WindowSampler, pack

if TYPE_CHECKING:
    from truedraft.models.lm_head import LmHead
    from truedraft.training.medusa_config import MedusaTrainingConfig
    from truedraft.training.self_text import SelfText


def new_heads(config: MedusaTrainingConfig, lm_head: LmHead) -> MedusaHeads:
    """Heads that all start as the target's LM head, in float32 on the configured device."""
    vocab, width = lm_head.weight.shape
    heads = MedusaHeads(MedusaConfig(width, vocab, config.heads, config.layers, config.tied, config.reads_token))
    heads.start_from(lm_head.weight.float().cpu())
    return heads.to(config.device)


def heads_optimizer(heads: MedusaHeads, config: OptimizerConfig) -> MixedOptimizer:
    """Muon for the residual blocks, AdamW for biases and free outputs."""
    tables = [head.output.weight for head in heads.each() if head.output is not None]
    return MixedOptimizer(heads, config, tables)


def head_loop(
    config: MedusaTrainingConfig,
    heads: MedusaHeads,
    lm_head: LmHead,
    fingerprint: str,
    text: SelfText,
    held_out: SelfText,
    folder: Path,
) -> TrainingLoop:
    """The loop that trains the heads, and resumes from the folder's checkpoint.

    Args:
        config: what decides it.
        heads: as they begin.
        lm_head: of the target, on the configured device.
        fingerprint: of the target.
        text: to train on.
        held_out: answers that accuracy is measured on.
        folder: for checkpoint, log and record.

    Raises:
        DataError: the answers are shorter than what the heads reach.
        OptionError: the folder holds a training with another configuration.
    """
    sampler = WindowSampler(text, config.heads, config.window, config.seed)
    schedule = config.schedule(len(sampler.windows))
    identity = {name: value for name, value in identity_of(config).items() if name.split(".")[0] in _DECISIVE}
    identity |= identity_of_schedule(schedule) | {"target": fingerprint, "text_sha256": text_hash(text)}
    if config.start_from is not None:
        identity["start_from"] = weights_fingerprint(heads)
    loop = TrainingLoop(
        model=heads,
        optimizer=heads_optimizer(heads, config.optimizer),
        objective=HeadsObjective(
            heads,
            lm_head,
            functools.partial(pack, text, heads=config.heads),
            HeadLoss(heads, lm_head, decay=config.head_decay, law_share=config.law_share),
        ),
        phases=[Phase(schedule.total_steps, sampler, config.windows_per_step, config.windows_per_step)],
        schedule=schedule,
        folder=folder,
        checkpoint_every=config.checkpoint_every,
        identity=identity,
        measurement=Measurement(
            config.evaluate_every, HeldOutAccuracy.on(heads, lm_head, held_out, config.evaluated_positions)
        ),
    )
    write_run_record(folder, identity=identity, device=config.device)
    return loop


# Parts of the configuration that decide the heads, beside the text, whose hash counts, and the schedule.
_DECISIVE = frozenset(
    {
        "heads",
        "layers",
        "tied",
        "reads_token",
        "law_share",
        "head_decay",
        "optimizer",
        "positions_per_step",
        "window",
        "seed",
    }
)


def identity_of_schedule(schedule: object) -> dict[str, str | int | float | bool | None]:
    """The schedule's fields under the names that may differ until a decay begins."""
    return {f"schedule.{name}": value for name, value in identity_of(schedule).items()}


def text_hash(text: SelfText) -> str:
    """The sha256 of the tokens that a target wrote."""
    return hashlib.sha256(text.tokens.tobytes()).hexdigest()
