"""What a training of heads will take, found out before the target writes for hours: seconds of a step, and disk."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from truedraft.planning import TREE_TEMPERATURES
from truedraft.training.budget import duration
from truedraft.training.disk import free_bytes, in_bytes
from truedraft.training.head_job import Told
from truedraft.training.head_loop import head_loop
from truedraft.training.head_training import lm_head_of
from truedraft.training.self_text import SelfText, Written

if TYPE_CHECKING:
    from truedraft.training.head_job import HeadJob
    from truedraft.training.head_kind import HeadKind
    from truedraft.training.trainee import Trainee

_SIZE = 0.1  # of the entries of made-up vectors


def forecast(job: HeadJob[Any], kind: HeadKind[Any, Any], work: Path) -> HeadJob[Any]:
    """Say what disk and time a training will take; gives the job with the seconds of a step.

    Args:
        job: that is about to begin.
        kind: of the heads.
        work: where its working files will lie.

    Raises:
        UnsupportedModelError: heads cannot share the target's LM head.
    """
    config = job.config
    trainee = kind.new(lm_head_of(job.target, config.device))
    step_s, checkpoint = _trial(job, kind, trainee)
    answers = len(job.prompts.train) + len(TREE_TEMPERATURES) * len(job.prompts.tree)
    tokens, tree = (count * config.writing.answer_tokens for count in (len(job.prompts.train), answers))
    width = trainee.lm_head.weight.shape[1]
    disk = tree * 2 * width + tokens * config.law_bytes + 2 * checkpoint  # a new one is written beside the old one
    free = free_bytes(work)
    room = f"of which {in_bytes(free)} are free" if free >= disk else f"where only {in_bytes(free)} are free"
    most = config.schedule(max(1, tokens // config.window)).total_steps
    steps = job.budget.steps(most, step_s)
    took = f"about {duration(steps * step_s)} ({step_s:.2g} s each)"
    within = f", all within {job.budget.minutes:g} minutes" if job.budget.limited else ""
    job.told.on_plan(
        f"the target writes up to {tokens:,} tokens to train on; with their vectors and a checkpoint they take up to "
        f"{in_bytes(disk)} of the disk of {str(work)!r}, {room}; then come {steps:,} steps of training, {took}{within}"
    )
    return replace(job, step_s=step_s)


def _trial(job: HeadJob[Any], kind: HeadKind[Any, Any], trainee: Trainee) -> tuple[float, int]:
    """Seconds of a step on a made-up text, and bytes of a checkpoint; nothing of it is kept."""
    config = job.config
    vocab, width = trainee.lm_head.weight.shape
    length = max(config.writing.answer_tokens, trainee.reach + 2)
    count = 2 + config.positions_per_step // (length - trainee.reach)
    random = np.random.default_rng(config.seed)
    records = [Written([0], random.integers(vocab, size=length).tolist(), 1.0, False) for _ in range(count)]
    vectors = torch.from_numpy(random.standard_normal((count * length, width), dtype=np.float32) * np.float32(_SIZE))
    text = SelfText(records, vectors.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16))
    quiet = replace(job, told=Told())
    with tempfile.TemporaryDirectory() as place, torch.random.fork_rng(devices=[]):
        course = kind.course(trainee, text, quiet, Path(place))
        return head_loop(config, course, "", text, text, Path(place)).trial()
