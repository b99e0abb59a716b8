"""The loop that trains heads on a frozen target's vectors (Medusa-1, 2401.10774, section 2.2.1; ReDrafter)."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from truedraft.training.head_loss import HeadLoss, HeadsObjective
from truedraft.training.held_out import HeldOutAccuracy
from truedraft.training.identity import identity_of, weights_fingerprint
from truedraft.training.loop import Measurement, Phase, TrainingLoop
from truedraft.training.records import write_run_record
from truedraft.training.trainee import heads_optimizer
from truedraft.training.windows import WindowSampler, pack

if TYPE_CHECKING:
    from truedraft.training.feeding import Feed
    from truedraft.training.head_config import HeadTrainingConfig
    from truedraft.training.lessons import Teacher
    from truedraft.training.self_text import SelfText
    from truedraft.training.trainee import Trainee


@dataclass(frozen=True)
class Course:
    """Heads, and how they are taught.

    Attributes:
        trainee: the heads as they begin, on the configured device.
        feed: which tokens they read.
        teacher: what they learn.
    """

    trainee: Trainee
    feed: Feed
    teacher: Teacher


def head_loop(
    config: HeadTrainingConfig, course: Course, fingerprint: str, text: SelfText, held_out: SelfText, folder: Path
) -> TrainingLoop:
    """The loop that trains heads, and resumes from the folder's checkpoint.

    Args:
        config: what decides it.
        course: heads and teacher.
        fingerprint: of the target.
        text: to train on.
        held_out: answers that accuracy is measured on.
        folder: for checkpoint, log and record.

    Raises:
        DataError: the answers are shorter than what the heads reach.
        OptionError: the folder holds a training with another configuration.
    """
    trainee = course.trainee
    sampler = WindowSampler(text, trainee.reach, config.window, config.seed)
    schedule = config.schedule(len(sampler.windows))
    identity = decisive_fields(config) | identity_of_schedule(schedule)
    identity |= {"target": fingerprint, "text_sha256": text_hash(text)}
    if config.start_from is not None:
        identity["start_from"] = weights_fingerprint(trainee.module)
    loop = TrainingLoop(
        model=trainee.module,
        optimizer=heads_optimizer(trainee, config.optimizer),
        objective=HeadsObjective(
            trainee,
            functools.partial(pack, text, reach=trainee.reach),
            course.feed,
            course.teacher,
            HeadLoss(trainee, decay=config.place_decay),
        ),
        phases=[Phase(schedule.total_steps, sampler, config.windows_per_step, config.windows_per_step)],
        schedule=schedule,
        folder=folder,
        checkpoint_every_s=config.checkpoint_every_s,
        identity=identity,
        measurement=Measurement(
            config.evaluate_every, HeldOutAccuracy.on(trainee, held_out, config.evaluated_positions)
        ),
    )
    write_run_record(folder, identity=identity, device=config.device)
    return loop


def decisive_fields(config: HeadTrainingConfig) -> dict[str, str | int | float | bool | None]:
    """The values of a configuration that decide the heads."""
    return {name: value for name, value in identity_of(config).items() if name.split(".")[0] in config.decisive}


def identity_of_schedule(schedule: object) -> dict[str, str | int | float | bool | None]:
    """The schedule's fields under the names that may differ until a decay begins."""
    return {f"schedule.{name}": value for name, value in identity_of(schedule).items()}


def text_hash(text: SelfText) -> str:
    """The sha256 of the tokens that a target wrote."""
    return hashlib.sha256(text.tokens.tobytes()).hexdigest()
