"""The one training loop: phases of batches, accumulation, bfloat16 autocast, checkpoints that resume exactly."""

from __future__ import annotations

import json
import pickle
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from truedraft.errors import TrainingError
from truedraft.training.disk import write_whole, writing
from truedraft.training.identity import refuse_another_run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from truedraft.training.identity import Identity

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"


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
        checkpoint_every: int = 50,
        autocast: bool = True,
        identity: Identity | None = None,
        measurement: Measurement | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.objective = objective
        self.phases = tuple(phases)
        self.schedule = schedule
        self.folder = folder
        self.checkpoint_every = checkpoint_every
        self.autocast = autocast
        self.identity = identity
        self.measurement = measurement
        self.progress = Progress()
        self._refuse_another_run()
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def total_steps(self) -> int:
        """Steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    def run(self, *, until: int | None = None, on_step: Callable[[StepRecord], None] | None = None) -> Progress:
        """Train to step `until` (default: to the end), from the checkpoint if there is one.

        An interruption loses at most the steps since the last checkpoint; the result is the same to the bit.
        """
        last = self.total_steps if until is None else min(until, self.total_steps)
        self._resume()
        self.model.train()
        while self.progress.step < last:
            record = self._step()
            self._measure(record, last)
            with writing(self.folder / LOG), (self.folder / LOG).open("a") as log:
                log.write(record.as_line() + "\n")
            if on_step is not None:
                on_step(record)
            if self.progress.step == last or self.progress.step % self.checkpoint_every == 0:
                self._save()
        return self.progress

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
            state = _read_checkpoint(path)
            step, before = state["progress"]["step"], state.get("identity")
            refuse_another_run(before or self.identity, self.identity, step=step, folder=self.folder)

    def _resume(self) -> None:
        path = self.folder / CHECKPOINT
        if not path.exists():
            (self.folder / LOG).unlink(missing_ok=True)
            return
        state = _read_checkpoint(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        torch.set_rng_state(state["random"])
        _cut_log(self.folder / LOG, self.progress.step)


def _read_checkpoint(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise TrainingError(f"cannot read the checkpoint {str(path)!r}: remove it to begin again") from error
    return state


def _cut_log(path: Path, step: int) -> None:
    """Drop the lines of steps that will be run again, and a last one that a full disk or a kill cut short."""
    if path.exists():
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        write_whole(path, "".join(line for line in lines if json.loads(line)["step"] < step))


def _is_finite(value: float) -> bool:
    return value - value == 0.0
