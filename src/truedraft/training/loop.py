"""The training loop: phases of batches, accumulation, bfloat16 autocast, checkpoints that resume exactly.

A checkpoint and `run.json` hold the identity of the run, the values that decide its weights.
"""

from __future__ import annotations

import itertools
import json
import math
import pickle
import platform
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self, TypeAlias

import torch

from truedraft.errors import ChangedOptionsError, TrainingError
from truedraft.files import written_whole
from truedraft.machine import describe_machine, has_bfloat16
from truedraft.training.optimizer import MixedOptimizer, SeparateOptimizers
from truedraft.training.processes import Processes
from truedraft.training.workspace import LOG, write_whole, writing

CHECKPOINT = "checkpoint.pt"
CHECKPOINT_EVERY_S = 120.0
"""Seconds between two checkpoints: the most that a kill costs, and far more than writing one takes."""
Identity: TypeAlias = Mapping[str, str | int | float | bool | None]
RUN_RECORD = "run.json"
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
_TRIED_S = 5.0  # a step that takes longer is tried once
_FREE = frozenset({"device", "checkpoint_every_s", "start_from"})  # the starting weights count, not their path
WARMUP = "schedule.warmup_steps"
LENGTHS = ("schedule.stable_steps", "schedule.decay_steps")  # fields that may differ until a decay begins
_OLDER_DIGITS = 16
"""Digits of the weight hashes of older versions, which read 64 values of a tensor; now they have more."""
_WEIGHTS = ("target", "start_from")


class Objective(Protocol):
    """What a step minimises."""

    def accumulate(self, batch: torch.Tensor, scale: float, own: slice | None = None) -> dict[str, float]:
        """Add `scale` times the gradient of the batch's mean loss to the parameters' gradients.

        Returns means over its labels, for the log. With `own` both are the shares of these sequences, which add up.
        """


class Sampler(Protocol):
    """A source of batches: a pure function of an index, so that resuming needs no state."""

    @property
    def sequence_length(self) -> int:
        """Labels of one sequence; the maximum where they differ."""

    def batch(self, first: int, count: int) -> torch.Tensor:
        """Sequences `first` to `first + count - 1` of the run: int64 `[count, ...]`."""


@dataclass(frozen=True)
class Phase:
    """A number of steps on sequences of one length."""

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
        return self.sequences_per_step * self.sampler.sequence_length


@dataclass
class Progress:
    """The progress of a run, saved in its checkpoints."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0  # processor-bound wall time of the steps, over all resumptions


@dataclass(frozen=True)
class StepRecord:
    """One line of the log."""

    step: int
    tokens: int
    elapsed_s: float
    multiplier: float
    gradient_norm: float
    values: dict[str, float]
    learning_rate: float = 0.0  # the largest of the rates

    def as_line(self) -> str:
        fixed = {"step": self.step, "tokens": self.tokens, "elapsed_s": round(self.elapsed_s, 2)}
        fixed |= {"multiplier": round(self.multiplier, 5), "gradient_norm": round(self.gradient_norm, 4)}
        return json.dumps(fixed | {name: round(value, 5) for name, value in self.values.items()})


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was just written; `left_s` is the estimated time for the remaining steps."""

    step: int
    total_steps: int
    tokens: int
    loss: float
    left_s: float
    path: Path


@dataclass(frozen=True)
class Callbacks:
    """Callbacks of a training."""

    on_progress: Callable[[str, int, int, str], None] = lambda what, done, total, remark: None  # of each kind of work
    on_step: Callable[[StepRecord], None] = lambda record: None
    on_note: Callable[[str], None] = warnings.warn  # called with sentences on what differs from the request
    on_plan: Callable[[str], None] = lambda sentence: None  # called with sentences on disk space and time
    on_checkpoint: Callable[[Saved], None] = lambda saved: None


def train_with_callbacks(
    loop: TrainingLoop,
    callbacks: Callbacks,
    remark: Callable[[StepRecord], str],
    time_is_up: Callable[[], bool] = lambda: False,
) -> Progress:
    """Train to the end or until the time is up; `remark` is shown with the number of a step."""

    def follow(record: StepRecord) -> None:
        callbacks.on_step(record)
        callbacks.on_progress("training", record.step + 1, loop.total_steps, remark(record))

    progress = loop.run(on_step=follow, on_checkpoint=callbacks.on_checkpoint, time_is_up=time_is_up)
    if progress.step < loop.total_steps:
        callbacks.on_note(f"the time was up after {progress.step:,} of {loop.total_steps:,} steps")
    return progress


def identity_of(config: object, **more: object) -> dict[str, str | int | float | bool | None]:
    """The fields of a configuration under dotted names, with what else decides the weights (hashes, schedules)."""
    own = {name: value for name, value in _flat(config, "") if name not in _FREE}
    return own | {name: value for part, each in more.items() for name, value in _flat(each, part)}


def refuse_another_run(before: Identity, now: Identity, *, step: int, folder: Path) -> None:
    """Refuse another configuration; lengths of the schedule may differ until a decay has begun.

    Raises ChangedOptionsError with the fields and both values; TrainingError for an older version's checkpoint, with
    weight hashes that do not cover most of the weights.
    """
    if any(len(str(before.get(name, ""))) == _OLDER_DIGITS for name in _WEIGHTS):
        raise TrainingError(
            f"the training in {str(folder)!r} was begun by an older version of truedraft, which identified models by a "
            "few of their weights: go on with that version, or begin again in another folder"
        )
    differing = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if all(step <= int(each.get(LENGTHS[0]) or 0) for each in (before, now)):
        differing = [name for name in differing if name not in LENGTHS]
    if differing:
        changes = {name: (before.get(name), now.get(name)) for name in differing}
        raise ChangedOptionsError(f"the training in {str(folder)!r}", changes)


def _flat(value: object, name: str) -> list[tuple[str, Any]]:
    if is_dataclass(value) and not isinstance(value, type) and fields(value):
        prefix = f"{name}." if name else ""
        deciding = [each for each in fields(value) if each.compare]
        return [pair for each in deciding for pair in _flat(getattr(value, each.name), prefix + each.name)]
    plain = value is None or isinstance(value, (str, int, float))
    return [(name, value if plain else repr(value))]


def typed_command() -> list[str]:
    """The words of the running command."""
    program = Path(sys.argv[0])
    first = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return [*first, *sys.argv[1:]]


def checkpoint_of(folder: Path) -> tuple[int, Identity] | None:
    """The step and the identity of a folder's checkpoint, as `read_checkpoint` reads it; None where there is none."""
    if not (folder / CHECKPOINT).is_file():
        return None
    state = read_checkpoint(folder / CHECKPOINT)
    return state["progress"]["step"], state.get("identity") or {}


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint, mapped from disk; TrainingError if it cannot be read."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise TrainingError(f"cannot read the checkpoint {str(path)!r}: remove it to begin again") from error
    return state


class RunFolder:
    """The folder of one training, written only by the main process.

    Raises OptionError for another training's folder, TrainingError if reading a checkpoint or writing fails.
    """

    def __init__(
        self, path: Path, identity: Identity, device: str, checkpoint_every_s: float = CHECKPOINT_EVERY_S
    ) -> None:
        self.path = path
        self.checkpoint = path / CHECKPOINT
        self.checkpoint_every_s = checkpoint_every_s
        self._identity = dict(identity)
        self._writes = Processes.here().main
        if self.checkpoint.exists():
            state = read_checkpoint(self.checkpoint)
            before = state.get("identity") or self._identity
            refuse_another_run(before, self._identity, step=state["progress"]["step"], folder=path)
        if not self._writes:
            return
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            for torn in path.glob(f"{CHECKPOINT}.*"):  # left by a kill
                torn.unlink()
        record = {
            "command": typed_command(),
            "python": platform.python_version(),
            "versions": {name: metadata.version(name) for name in _PACKAGES},
            "machine": describe_machine(device),
            "threads": torch.get_num_threads(),
            "identity": self._identity,
        }
        write_whole(path / RUN_RECORD, json.dumps(record, indent=1) + "\n")

    def append(self, record: StepRecord) -> None:
        if self._writes:
            with writing(self.path / LOG), (self.path / LOG).open("a") as log:
                log.write(record.as_line() + "\n")

    def save(self, state: Mapping[str, Any]) -> None:
        if self._writes:
            with writing(self.checkpoint), written_whole(self.checkpoint) as file:
                torch.save({**state, "identity": self._identity}, file)  # it hides write errors of files that it opens

    def resume(self) -> dict[str, Any] | None:
        """The checkpoint, with the log cut to whole lines of its steps; without one, the log is removed."""
        state = read_checkpoint(self.checkpoint) if self.checkpoint.exists() else None
        step, log = 0 if state is None else state["progress"]["step"], self.path / LOG
        if self._writes and not step:
            log.unlink(missing_ok=True)
        elif self._writes and log.exists():
            lines = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
            write_whole(log, "".join(line for line in lines if json.loads(line)["step"] < step))
        return state


class TrainingLoop:
    """Runs phases one after another in a folder, and resumes from the folder's checkpoint.

    `schedule` maps a step to the multiplier of the peak rates; `autocast` (products in bfloat16) is by default on where
    the device has instructions for it; `clock` returns seconds, for the time between checkpoints. `measure` returns
    values for the log, `every` so many steps and after the last; it changes no weight and no random state.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: MixedOptimizer | SeparateOptimizers,
        objective: Objective,
        phases: Sequence[Phase],
        schedule: Callable[[int], float],
        run: RunFolder,
        measure: Callable[[], Mapping[str, float]] | None = None,
        every: int = 1,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.objective = objective
        self.phases = tuple(phases)
        self.schedule = schedule
        self.folder = run
        self.measure, self.every = measure, every
        self.progress = Progress()
        self.autocast = has_bfloat16(next(model.parameters()).device)
        self.clock: Callable[[], float] = time.perf_counter
        self.processes = Processes.here()

    @property
    def total_steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def run(
        self,
        *,
        until: int | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        on_checkpoint: Callable[[Saved], None] | None = None,
        time_is_up: Callable[[], bool] = lambda: False,
    ) -> Progress:
        """Train to step `until` (default: the end), or resume from a checkpoint, with the same result to the bit.

        Ctrl-C, or `time_is_up`, writes a checkpoint after the step, because a half-done step cannot be saved; a second
        Ctrl-C interrupts at once.
        """
        last = self.total_steps if until is None else min(until, self.total_steps)
        self._resume()
        self.model.train()
        saved = began = self.clock()
        first, stopped = self.progress.step, False
        with Interrupts() as interrupts:
            while self.progress.step < last and not stopped:
                record = self._step()
                self._measure(record, last)
                self.folder.append(record)
                if on_step is not None:
                    on_step(record)
                step, now = self.progress.step, self.clock()
                stopped = self.processes.anywhere(time_is_up())
                if self.processes.anywhere(interrupts.waiting):
                    interrupts.waiting = True  # in all processes
                if step == last or stopped or interrupts.waiting or now - saved >= self.folder.checkpoint_every_s:
                    self._save()
                    saved = self.clock()
                    if on_checkpoint is not None:
                        left_s = (now - began) / (step - first) * (last - step)
                        loss, path = record.values["loss"], self.folder.checkpoint
                        on_checkpoint(Saved(step, self.total_steps, record.tokens, loss, left_s, path))
                interrupts.let_through()
        return self.progress

    def trial(self, steps: int = 3) -> tuple[float, int]:
        """Seconds of a step of this process, and bytes of a checkpoint; the loop cannot be used afterwards."""
        self.processes = replace(self.processes, together=False)
        self.model.train()
        took: list[float] = []
        while len(took) < min(steps, self.total_steps) and self.progress.elapsed_s < _TRIED_S:
            took.append(self._step().elapsed_s)
        size = tensor_bytes([trained_weights(self.model), self.optimizer.state_dict()])
        return min(after - before for before, after in itertools.pairwise([0.0, *took])), size

    def _step(self) -> StepRecord:
        started = time.perf_counter()
        step = self.progress.step
        phase, within = self._locate(step)
        passes = phase.sequences_per_step // phase.sequences_per_pass
        first = within * phase.sequences_per_step
        own = self.processes.part(phase.sequences_per_pass)
        sums: dict[str, float] = {}
        for index in range(0 if own is not None and own.start == own.stop else passes):
            batch = phase.sampler.batch(first + index * phase.sequences_per_pass, phase.sequences_per_pass)
            batch = batch.to(next(self.model.parameters()).device)
            with torch.autocast(batch.device.type, torch.bfloat16, enabled=self.autocast):
                values = self.objective.accumulate(batch, 1.0 / passes, own)
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value / passes
        sums = self.processes.summed(sums)
        if not all(map(math.isfinite, sums.values())):
            raise TrainingError(f"the loss is not finite at step {step}: lower the learning rate")
        self.processes.sum_gradients(self.model.parameters())
        multiplier = self.schedule(step)
        norm = self.optimizer.step(multiplier)
        self.progress.step += 1
        self.progress.tokens += phase.tokens_per_step
        self.progress.elapsed_s += time.perf_counter() - started
        so_far, rate = self.progress, multiplier * self.optimizer.peak
        return StepRecord(step, so_far.tokens, so_far.elapsed_s, multiplier, norm, sums, rate)

    def _measure(self, record: StepRecord, last: int) -> None:
        step = self.progress.step
        if self.measure is not None and self.processes.main and (step == last or step % self.every == 0):
            self.model.eval()
            with torch.no_grad():
                record.values.update(self.measure())
            self.model.train()

    def _locate(self, step: int) -> tuple[Phase, int]:
        for phase in self.phases:
            if step < phase.steps:
                return phase, step
            step -= phase.steps
        raise TrainingError(f"step {step} is after the last phase")

    def _save(self) -> None:
        state = {"model": trained_weights(self.model), "optimizer": self.optimizer.state_dict()}
        self.folder.save(state | {"progress": vars(self.progress), "random": torch.get_rng_state()})

    def _resume(self) -> None:
        state = self.folder.resume()
        if state is not None:
            for name, weight in trained_weights(self.model).items():
                weight.copy_(state["model"][name])
            self.optimizer.load_state_dict(state["optimizer"])
            self.progress = Progress(**state["progress"])
            torch.set_rng_state(state["random"])


def trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The trained weights, tied ones once: what a checkpoint holds of a model."""
    return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}


def tensor_bytes(states: object) -> int:
    """The bytes of all tensors in nested lists and dictionaries, each counted once."""
    sizes: dict[int, int] = {}
    pending = [states]
    while pending:
        each = pending.pop()
        if isinstance(each, torch.Tensor):
            sizes[each.data_ptr()] = each.numel() * each.element_size()
        elif isinstance(each, dict | list | tuple):
            pending += each.values() if isinstance(each, dict) else each
    return sum(sizes.values())


class Interrupts:
    """Delays Ctrl-C inside the block until it is let through; a second one takes effect at once.

    It has no effect where Ctrl-C is ignored, or in a thread that does not receive it.
    """

    def __enter__(self) -> Self:
        self.waiting = False
        self._before: Any = signal.getsignal(signal.SIGINT)
        self._holds = callable(self._before) and threading.current_thread() is threading.main_thread()
        if self._holds:
            signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *_: object) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, self._before)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self.waiting:
            self._before(number, frame)
        self.waiting = True

    def let_through(self) -> None:
        """Do what the interruption would have done, by default KeyboardInterrupt, if there was one."""
        if self.waiting:
            self.waiting = False
            self._before(signal.SIGINT, None)
