"""The one training loop: phases of batches, accumulation, bfloat16 autocast, checkpoints that resume exactly."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from truedraft.errors import TrainingError
from truedraft.training.checkpoints import (
    CHECKPOINT,
    CHECKPOINT_EVERY_S,
    LOG,
    Saved,
    cut_log,
    read_checkpoint,
    tensor_bytes,
)
from truedraft.training.disk import writing
from truedraft.training.identity import refuse_another_run
from truedraft.training.interrupts import held_interrupts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from truedraft.training.identity import Identity


class Objective(Protocol):
    """What a step minimises."""

    def accumulate(self, batch: torch.Tensor, scale: float) -> dict[str, float]:
        """Add `scale` times the gradient of the batch's mean loss to the parameters' gradients.

        The batch is what the sampler gave; the answer holds means over its labels, for the log.
        """


class Sampler(Protocol):
    """Where batches come from: a pure function of an index, so that resuming needs no state."""

    @property
    def sequence_length(self) -> int:
        """Labels of one sequence, the most where they differ."""

    def batch(self, first: int, count: int) -> torch.Tensor:
        """Sequences number `first` to `first + count - 1` of the run: int64 [count, ...]."""


class Optimizer(Protocol):
    """What updates the parameters from their gradients."""

    def step(self, multiplier: float) -> float:
        """Update, and clear the gradients; returns their norm. The rates are the peak rates times the multiplier."""

    def state_dict(self) -> list[Any]:
        """For a checkpoint."""

    def load_state_dict(self, states: list[Any]) -> None:
        """Restore what `state_dict` returned."""


@dataclass(frozen=True)
class Measurement:
    """Something to measure now and then during training, for the log.

    Attributes:
        every: steps between two; it also follows the last.
        values: measures; it must leave the model and torch's random numbers as they are.
    """

    every: int
    values: Callable[[], Mapping[str, float]]


@dataclass(frozen=True)
class Phase:
    """A stretch of steps that read sequences of one length."""

    steps: int
    sampler: Sampler
    sequences_per_step: int
    sequences_per_pass: int

    def __post_init__(self) -> None:
        if self.sequences_per_step % self.sequences_per_pass:
            raise TrainingError(
                f"sequences_per_step ({self.sequences_per_step}) must be a multiple of "
                f"sequences_per_pass ({self.sequences_per_pass})"
            )

    @property
    def tokens_per_step(self) -> int:
        """Labels that one update sees."""
        return self.sequences_per_step * self.sampler.sequence_length


@dataclass
class Progress:
    """Where a run stands; saved in its checkpoints."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0  # processor-bound wall time of the steps alone, over all resumptions


@dataclass(frozen=True)
class StepRecord:
    """One line of the log."""

    step: int
    tokens: int
    elapsed_s: float
    multiplier: float
    gradient_norm: float
    values: dict[str, float]

    def as_line(self) -> str:
        """One JSON object."""
        rounded = {name: round(value, 5) for name, value in self.values.items()}
        fixed = {
            "step": self.step,
            "tokens": self.tokens,
            "elapsed_s": round(self.elapsed_s, 2),
            "multiplier": round(self.multiplier, 5),
            "gradient_norm": round(self.gradient_norm, 4),
        }
        return json.dumps(fixed | rounded)


class TrainingLoop:
    """Runs phases one after another inside a folder, and resumes from the folder's checkpoint."""

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: Optimizer,
        objective: Objective,
        phases: Sequence[Phase],
        schedule: Callable[[int], float],
        folder: Path,
        checkpoint_every_s: float = CHECKPOINT_EVERY_S,
        autocast: bool = True,
        identity: Identity | None = None,
        measurement: Measurement | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.objective = objective
        self.phases = tuple(phases)
        self.schedule = schedule
        self.folder = folder
        self.checkpoint_every_s = checkpoint_every_s
        self.autocast = autocast
        self.identity = identity
        self.measurement = measurement
        self.clock = clock
        self.progress = Progress()
        self._refuse_another_run()
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def total_steps(self) -> int:
        """Steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    def run(
        self,
        *,
        until: int | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        on_checkpoint: Callable[[Saved], None] | None = None,
        time_is_up: Callable[[], bool] = lambda: False,
    ) -> Progress:
        """Train to step `until` (default: to the end), from the checkpoint if there is one.

        Ctrl-C ends the step, writes a checkpoint and then interrupts; a second one interrupts at once. A kill loses at
        most the steps since the last checkpoint. The result of going on is the same to the bit.

        Args:
            until: the step to stop at.
            on_step: called after each step.
            on_checkpoint: called after each checkpoint.
            time_is_up: asked after each step; where it says so, a checkpoint is written and the training stops.
        """
        last = self.total_steps if until is None else min(until, self.total_steps)
        self._resume()
        self.model.train()
        began, first = self.clock(), self.progress.step
        saved = began
        stopped = False
        with held_interrupts() as interrupts:
            while self.progress.step < last and not stopped:
                record = self._step()
                self._measure(record, last)
                with writing(self.folder / LOG), (self.folder / LOG).open("a") as log:
                    log.write(record.as_line() + "\n")
                if on_step is not None:
                    on_step(record)
                step, now, stopped = self.progress.step, self.clock(), time_is_up()
                if step == last or stopped or interrupts.waiting or now - saved >= self.checkpoint_every_s:
                    self._save()
                    saved = self.clock()
                    if on_checkpoint is not None:
                        left_s = (now - began) / (step - first) * (last - step)
                        on_checkpoint(self._saved(record, left_s))
                interrupts.let_through()
        return self.progress

    def _saved(self, record: StepRecord, left_s: float) -> Saved:
        where = self.folder / CHECKPOINT
        return Saved(self.progress.step, self.total_steps, record.tokens, record.values["loss"], left_s, where)

    def trial(self, steps: int = 3) -> tuple[float, int]:
        """Seconds of a step, and bytes of a checkpoint: trains a little and saves nothing, so it is of no use later."""
        self.model.train()
        took = [self._step().elapsed_s for _ in range(min(steps, self.total_steps))]
        size = tensor_bytes([self.model.state_dict(), self.optimizer.state_dict()])
        return min(after - before for before, after in itertools.pairwise([0.0, *took])), size

    def _step(self) -> StepRecord:
        started = time.perf_counter()
        step = self.progress.step
        phase, within = self._locate(step)
        passes = phase.sequences_per_step // phase.sequences_per_pass
        first = within * phase.sequences_per_step
        sums: dict[str, float] = {}
        for index in range(passes):
            batch = phase.sampler.batch(first + index * phase.sequences_per_pass, phase.sequences_per_pass)
            batch = batch.to(next(self.model.parameters()).device)
            with torch.autocast(batch.device.type, torch.bfloat16, enabled=self.autocast):
                values = self.objective.accumulate(batch, 1.0 / passes)
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value / passes
        if not all(map(_is_finite, sums.values())):
            raise TrainingError(f"the loss is not finite at step {step}: lower the learning rate")
        multiplier = self.schedule(step)
        norm = self.optimizer.step(multiplier)
        self.progress.step += 1
        self.progress.tokens += phase.tokens_per_step
        self.progress.elapsed_s += time.perf_counter() - started
        return StepRecord(step, self.progress.tokens, self.progress.elapsed_s, multiplier, norm, sums)

    def _measure(self, record: StepRecord, last: int) -> None:
        """Add what is measured now and then to the record of a step."""
        wanted = self.measurement
        if wanted is not None and (self.progress.step == last or self.progress.step % wanted.every == 0):
            self.model.eval()
            with torch.no_grad():
                record.values.update(wanted.values())
            self.model.train()

    def _locate(self, step: int) -> tuple[Phase, int]:
        """The phase that a step belongs to, and the step's number inside it."""
        for phase in self.phases:
            if step < phase.steps:
                return phase, step
            step -= phase.steps
        raise TrainingError(f"step {step} lies behind the last phase")

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": vars(self.progress),
            "random": torch.get_rng_state(),
            "identity": None if self.identity is None else dict(self.identity),
        }
        partial = self.folder / (CHECKPOINT + ".partial")
        try:
            with writing(self.folder / CHECKPOINT):
                with partial.open("wb") as file:  # torch hides the reason where it opens the file itself
                    torch.save(state, file)
                partial.replace(self.folder / CHECKPOINT)  # atomic: a kill leaves the old checkpoint or the new one
        finally:
            partial.unlink(missing_ok=True)

    def _refuse_another_run(self) -> None:
        """Refuse a folder whose checkpoint another configuration made, before anything is written into it."""
        path = self.folder / CHECKPOINT
        if self.identity is not None and path.exists():
            state = read_checkpoint(path)
            step, before = state["progress"]["step"], state.get("identity")
            refuse_another_run(before or self.identity, self.identity, step=step, folder=self.folder)

    def _resume(self) -> None:
        path = self.folder / CHECKPOINT
        if not path.exists():
            (self.folder / LOG).unlink(missing_ok=True)
            return
        state = read_checkpoint(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        torch.set_rng_state(state["random"])
        cut_log(self.folder / LOG, self.progress.step)


def _is_finite(value: float) -> bool:
    return value - value == 0.0
