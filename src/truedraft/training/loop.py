"""The one training loop: phases of batches, accumulation, bfloat16 autocast, checkpoints that resume exactly.

What makes a run that run, the values that decide its weights, stands in its checkpoints, and resuming compares it;
`run.json` has it too, with versions and machine, so that the run can be made again.

Ctrl-C comes between two steps in place of inside one: what is half done cannot be saved.
"""

from __future__ import annotations

import itertools
import json
import pickle
import platform
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeAlias

import torch

from truedraft.errors import ChangedOptionsError, TrainingError
from truedraft.files import written_whole
from truedraft.machine import describe_machine, has_bfloat16
from truedraft.training.processes import Processes
from truedraft.training.workspace import LOG, write_whole, writing

CHECKPOINT = "checkpoint.pt"
CHECKPOINT_EVERY_S = 120.0
"""Seconds between two checkpoints: what a kill costs at the most, and far more than writing one takes."""
Identity: TypeAlias = Mapping[str, str | int | float | bool | None]
RUN_RECORD = "run.json"
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
_TRIED_S = 5.0  # of a trial: a step that takes longer is tried once
_FREE = frozenset({"device", "checkpoint_every_s", "start_from"})  # the weights to start from count, not where they lie
WARMUP = "schedule.warmup_steps"
LENGTHS = ("schedule.stable_steps", "schedule.decay_steps")
"""What may differ until a decay begins."""
_OLDER_DIGITS = 16
"""Of the hashes of weights that older versions wrote, which read 64 values of a tensor; now they have more."""
_WEIGHTS = ("target", "start_from")


class Objective(Protocol):
    """What a step minimises."""

    def accumulate(self, batch: torch.Tensor, scale: float, own: slice | None = None) -> dict[str, float]:
        """Add `scale` times the gradient of the batch's mean loss to the parameters' gradients.

        The batch is what the sampler gave; the answer holds means over its labels, for the log. With `own` both are the
        shares of these sequences in them: shares of all sequences add up to the whole.
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

    peak: float
    """The highest rate."""

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
    learning_rate: float = 0.0  # the highest

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


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was just written.

    Attributes:
        step: updates that it holds.
        total_steps: of the whole training.
        tokens: that those updates saw.
        loss: of the last of them.
        left_s: seconds that the rest will take, as the steps of this run did.
        path: of the checkpoint.
    """

    step: int
    total_steps: int
    tokens: int
    loss: float
    left_s: float
    path: Path


OnProgress: TypeAlias = Callable[[str, int, int, str], None]
"""Called with what is being done, how much of it is done, how much there is, and a remark."""


@dataclass(frozen=True)
class Callbacks:
    """Who is told of a training, and of what.

    Attributes:
        on_progress: how far each kind of work has come.
        on_step: the record of each step.
        on_note: sentences on what is done otherwise than asked for.
        on_plan: sentences on the disk and the time that it will take.
        on_checkpoint: each checkpoint.
    """

    on_progress: OnProgress = lambda what, done, total, remark: None
    on_step: Callable[[StepRecord], None] = lambda record: None
    on_note: Callable[[str], None] = warnings.warn
    on_plan: Callable[[str], None] = lambda sentence: None
    on_checkpoint: Callable[[Saved], None] = lambda saved: None


def train_told(
    loop: TrainingLoop,
    told: Callbacks,
    remark: Callable[[StepRecord], str],
    time_is_up: Callable[[], bool] = lambda: False,
) -> Progress:
    """Train to the end, or until the time is up, and tell of it.

    Args:
        loop: of the training.
        told: who is told.
        remark: what is said beside the number of a step.
        time_is_up: as of `TrainingLoop.run`.
    """

    def follow(record: StepRecord) -> None:
        told.on_step(record)
        told.on_progress("training", record.step + 1, loop.total_steps, remark(record))

    progress = loop.run(on_step=follow, on_checkpoint=told.on_checkpoint, time_is_up=time_is_up)
    if progress.step < loop.total_steps:
        told.on_note(f"the time was up after {progress.step:,} of {loop.total_steps:,} steps")
    return progress


def identity_of(config: object, **more: str) -> dict[str, str | int | float | bool | None]:
    """The fields of a configuration under dotted names, and what else decides the weights (hashes of data, models)."""
    return {name: value for name, value in _flat(config, "") if name not in _FREE} | more


def refuse_another_run(before: Identity, now: Identity, *, step: int, folder: Path) -> None:
    """Refuse to go on with a checkpoint that was made by another configuration.

    The lengths of the schedule may differ as long as neither decay has begun: until then the runs are the same.

    Raises:
        ChangedOptionsError: names the fields that differ, with both values.
        TrainingError: an older version made it, whose hashes of weights say nothing of most of them.
    """
    if any(len(str(before.get(name, ""))) == _OLDER_DIGITS for name in _WEIGHTS):
        raise TrainingError(
            f"the training in {str(folder)!r} was begun by an older version of truedraft, which told models apart by a "
            "few of their weights: go on with that version, or begin again in another folder"
        )
    differing = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if all(step <= int(each.get(LENGTHS[0]) or 0) for each in (before, now)):
        differing = [name for name in differing if name not in LENGTHS]
    if differing:
        changes = {name: (before.get(name), now.get(name)) for name in differing}
        raise ChangedOptionsError(f"the training in {str(folder)!r}", changes)


def _flat(value: object, name: str) -> list[tuple[str, Any]]:
    """A dataclass as its leaves; what is no plain value, such as a loss, as its repr."""
    if is_dataclass(value) and not isinstance(value, type) and fields(value):
        prefix = f"{name}." if name else ""
        deciding = [each for each in fields(value) if each.compare]
        return [pair for each in deciding for pair in _flat(getattr(value, each.name), prefix + each.name)]
    plain = value is None or isinstance(value, (str, int, float))
    return [(name, value if plain else repr(value))]


def typed_command() -> list[str]:
    """The words of the command that runs."""
    program = Path(sys.argv[0])
    first = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return [*first, *sys.argv[1:]]


def write_run_record(folder: Path, *, identity: Identity, device: str) -> None:
    """Write the command, the versions, the machine, and what decides the weights (with the hash of the data)."""
    record = {
        "command": typed_command(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "machine": describe_machine(device),
        "threads": torch.get_num_threads(),
        "identity": dict(identity),
    }
    write_whole(folder / RUN_RECORD, json.dumps(record, indent=1) + "\n")


def checkpoint_of(folder: Path) -> tuple[int, Identity] | None:
    """The step of a folder's checkpoint, and what decides its weights; None where there is none.

    Raises:
        TrainingError: it cannot be read.
    """
    path = folder / CHECKPOINT
    if not path.is_file():
        return None
    state = read_checkpoint(path)
    return state["progress"]["step"], state.get("identity") or {}


def read_checkpoint(path: Path) -> dict[str, Any]:
    """All of a checkpoint, mapped from disk.

    Raises:
        TrainingError: it cannot be read.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise TrainingError(f"cannot read the checkpoint {str(path)!r}: remove it to begin again") from error
    return state


class RunFolder:
    """The folder of one training: its checkpoint, its log, and the record of what it is; the main process writes it.

    Args:
        path: is made if it does not exist.
        identity: what decides the weights.
        device: where it runs.
        checkpoint_every_s: seconds between two checkpoints.

    Raises:
        OptionError: the folder holds a training with another configuration.
        TrainingError: a checkpoint cannot be read, or the folder cannot be written.
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
            for torn in path.glob(f"{CHECKPOINT}.*"):  # what a kill left of one
                torn.unlink()
        write_run_record(path, identity=self._identity, device=device)

    def append(self, record: StepRecord) -> None:
        """Add a line to the log."""
        if self._writes:
            with writing(self.path / LOG), (self.path / LOG).open("a") as log:
                log.write(record.as_line() + "\n")

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint; a kill leaves the old one or the new one."""
        if self._writes:
            with writing(self.checkpoint), written_whole(self.checkpoint) as file:
                torch.save({**state, "identity": self._identity}, file)  # which hides failures of files that it opens

    def resume(self) -> dict[str, Any] | None:
        """The checkpoint, with the log cut to it; None where there is none, and then no log either."""
        state = read_checkpoint(self.checkpoint) if self.checkpoint.exists() else None
        if self._writes:
            self._cut_log(0 if state is None else state["progress"]["step"])
        return state

    def _cut_log(self, step: int) -> None:
        """Drop the lines of steps that will be run again, and a last one that a full disk or a kill cut short."""
        log = self.path / LOG
        if not step:
            log.unlink(missing_ok=True)
        elif log.exists():
            lines = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
            write_whole(log, "".join(line for line in lines if json.loads(line)["step"] < step))


class TrainingLoop:
    """Runs phases one after another inside a folder, and resumes from the folder's checkpoint.

    Args:
        model: in training.
        optimizer: of its parameters.
        objective: what is minimised.
        phases: of batches.
        schedule: from a step to the multiplier of the peak rates.
        run: the folder.
        measurement: what is measured now and then.

    Attributes:
        progress: where it stands.
        autocast: whether products are in bfloat16, as where the device has instructions for them.
        clock: seconds, for the time between checkpoints.
        processes: that train together; the main one measures.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        objective: Objective,
        phases: Sequence[Phase],
        schedule: Callable[[int], float],
        run: RunFolder,
        measurement: Measurement | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.objective = objective
        self.phases = tuple(phases)
        self.schedule = schedule
        self.folder = run
        self.measurement = measurement
        self.progress = Progress()
        self.autocast = has_bfloat16(next(model.parameters()).device)
        self.clock: Callable[[], float] = time.perf_counter
        self.processes = Processes.here()

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
            time_is_up: asked after each step; where it says so, a checkpoint is written and the training stops, in all
                processes.
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
                self.folder.append(record)
                if on_step is not None:
                    on_step(record)
                step, now = self.progress.step, self.clock()
                stopped = self.processes.anywhere(time_is_up())
                if self.processes.anywhere(interrupts.waiting):
                    interrupts.waiting = True  # in all of them
                if step == last or stopped or interrupts.waiting or now - saved >= self.folder.checkpoint_every_s:
                    self._save()
                    saved = self.clock()
                    if on_checkpoint is not None:
                        left_s = (now - began) / (step - first) * (last - step)
                        on_checkpoint(self._saved(record, left_s))
                interrupts.let_through()
        return self.progress

    def _saved(self, record: StepRecord, left_s: float) -> Saved:
        where = self.folder.checkpoint
        return Saved(self.progress.step, self.total_steps, record.tokens, record.values["loss"], left_s, where)

    def trial(self, steps: int = 3) -> tuple[float, int]:
        """Seconds of a step, and bytes of a checkpoint: trains a little and saves nothing, so it is of no use later.

        Of several processes the one that asks takes its part alone.
        """
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
        if not all(map(_is_finite, sums.values())):
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
        """Add what is measured now and then to the record of a step."""
        wanted, step = self.measurement, self.progress.step
        if wanted is not None and self.processes.main and (step == last or step % wanted.every == 0):
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
        self.folder.save(
            {
                "model": trained_weights(self.model),
                "optimizer": self.optimizer.state_dict(),
                "progress": vars(self.progress),
                "random": torch.get_rng_state(),
            }
        )

    def _resume(self) -> None:
        state = self.folder.resume()
        if state is not None:
            for name, weight in trained_weights(self.model).items():
                weight.copy_(state["model"][name])
            self.optimizer.load_state_dict(state["optimizer"])
            self.progress = Progress(**state["progress"])
            torch.set_rng_state(state["random"])


def _is_finite(value: float) -> bool:
    return value - value == 0.0


def trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights that are trained, tied ones once: what a checkpoint holds of a model."""
    return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}


def tensor_bytes(states: object) -> int:
    """The bytes of all tensors in nested lists and dictionaries, each once."""
    return sum({each.data_ptr(): each.numel() * each.element_size() for each in _tensors(states)}.values())


def _tensors(states: object) -> Iterator[torch.Tensor]:
    if isinstance(states, torch.Tensor):
        yield states
    inner = states.values() if isinstance(states, dict) else states if isinstance(states, list | tuple) else ()
    for each in inner:
        yield from _tensors(each)


class Interrupts:
    """An interruption that waits until it is let through.

    Attributes:
        waiting: whether there is one.
    """

    def __init__(self, before: Any) -> None:
        self.waiting = False
        self._before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The first one waits; who interrupts again will not wait."""
        if self.waiting:
            self._before(number, frame)
        self.waiting = True

    def let_through(self) -> None:
        """Do now what the interruption would have done, if there was one.

        Raises:
            KeyboardInterrupt: as a rule.
        """
        if self.waiting:
            self.waiting = False
            self._before(signal.SIGINT, None)


@contextmanager
def held_interrupts() -> Iterator[Interrupts]:
    """Hold Ctrl-C back inside the block; where it is ignored, or in a thread that never sees it, nothing changes."""
    before = signal.getsignal(signal.SIGINT)
    interrupts = Interrupts(before)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
