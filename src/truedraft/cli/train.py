"""`truedraft train`: draft models, Medusa heads, recurrent heads and n-gram tables."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.cli.failures import DONE, INTERRUPTED, error_record, warn
from truedraft.cli.session import ReportOptions, named_model, quiet_hub, set_threads
from truedraft.cli.terminal import Terminal, say
from truedraft.cli.train_options import DraftOptions, DraftRunOptions, HeadOptions, JobOptions, NgramOptions, options_of
from truedraft.drafters.kinds import KINDS, dotted
from truedraft.drafters.registry import TABLE, Registry, TrainedDrafter
from truedraft.errors import DataError, OptionError, TrainingError
from truedraft.models.embedded import FOR_HEADS, FOR_TABLES, refuse_no_text
from truedraft.options import check_positive
from truedraft.server.cluster import ray_module
from truedraft.training.workspace import PLACES, WORK, TimeBudget, clear_work, duration, finish_work, refuse_busy

if TYPE_CHECKING:
    from truedraft.progress import Progress
    from truedraft.training.loop import Callbacks, Saved
    from truedraft.training.options import Trains
    from truedraft.training.report import Tracker
    from truedraft.training.texts.answer_writer import Elsewhere, WritingConfig

_KEPT = ("answers.json", "questions.json")  # of the target's text for training
_QUIET_S = 120.0  # between two lines on one kind of work, without a terminal
_LENGTH, _DECAY_LENGTH, _DECAY_SHARE = 512, 2048, 0.2  # of a draft model

# The names in the library's configurations where they differ from the command line's.
_NAMES = {
    "target": "the fingerprint of --model",
    "schedule.warmup_steps": "the warm-up of --steps",
    "optimizer.matrix_rate": "--learning-rate",
    "optimizer.vector_rate": "--learning-rate",
}
DRAFT_NAMES = _NAMES | {
    "schedule.stable_steps": "--steps before the decay",
    "schedule.decay_steps": "--steps of the decay",
    "curriculum.stable_length": "--length",
    "curriculum.decay_length": "--decay-length",
    "curriculum.tokens_per_step": "--tokens-per-step",
    "curriculum.tokens_per_pass": "--tokens-per-step",
    "data_sha256": "the hash of --data",
    "start_from": "the draft in --start-from",
}
HEAD_NAMES = _NAMES | {
    "schedule.stable_steps": "the steps (--steps, --epochs) before the decay",
    "schedule.decay_steps": "the steps (--steps, --epochs) of the decay",
    "temperature": "--temperature",
    "positions_per_step": "the positions of a step (--minutes)",
    "joint.steps": "--joint-steps",
    "joint.lora_rank": "--lora-rank",
    "joint.backbone.matrix_rate": "--backbone-rate",
    "joint.backbone.vector_rate": "--backbone-rate",
    "prompts_sha256": "the prompts (--data, --held-out, --tokens, --prompt-tokens, --minutes)",
    "text_sha256": "the text that the target wrote",
    "data_sha256": "the text that the target wrote",
    "start_from": "the heads in --start-from",
}


def draft(options: DraftOptions) -> int:
    """Train a small model to guess what a target would say; measures how often it is right."""
    job, run = options.job, options.run

    def check() -> None:
        _lengths(run)
        check_positive("learning_rate", run.learning_rate)
        if not job.data:
            raise DataError("there is nothing to train on; name at least one file with --data FILE, or --data self")

    def train(model: str, callbacks: Callbacks, budget: TimeBudget, device: str) -> Any:
        from truedraft.training.drafts import DraftConfig, train_draft
        from truedraft.training.optimizer import OptimizerConfig, WarmupStableDecay
        from truedraft.training.texts.data import Curriculum

        config = DraftConfig(
            **dataclasses.asdict(options.size),
            schedule=WarmupStableDecay.of(run.steps, _DECAY_SHARE),
            optimizer=OptimizerConfig(run.learning_rate, run.learning_rate),
            curriculum=Curriculum(*_lengths(run), run.tokens_per_step, run.tokens_per_step),
            tokens=options.text.tokens,
            on_policy=run.on_policy,
            writing=_writing(options, model, run.seed),
            seed=run.seed,
            device=device,
        )
        return train_draft(model, job.data, job.out, config, held_out=job.held_out, callbacks=callbacks, budget=budget)

    return _run("draft", options, train, check)


def _lengths(run: DraftRunOptions) -> tuple[int, int]:
    """Tokens per sequence, before and in the decay; by default the longest that divide the tokens of a step."""
    step, found = run.tokens_per_step, []
    lengths = ("--length", run.length, _LENGTH), ("--decay-length", run.decay_length, _DECAY_LENGTH)
    for option_, given, usual in lengths:
        length = given or next((each for each in range(usual, 1, -1) if step % each == 0), 1)
        if step % length:
            raise OptionError(f"must be a multiple of {option_}, got {step} and {length}", field="tokens_per_step")
        found.append(length)
    return found[0], found[1]


def heads(word: str) -> Callable[[Any], int]:
    """The training command of a kind of heads, by its name: a function of options."""
    trains: Trains = dotted(KINDS[word].trains)

    def train(options: HeadOptions) -> int:
        return _train_heads(word, options)

    train.__name__, train.__doc__ = word.replace("-", "_"), trains.help
    train.__annotations__["options"] = options_of(word, trains)
    return train


def _train_heads(kind: str, options: HeadOptions) -> int:
    job = options.job

    def train(model: str, callbacks: Callbacks, budget: TimeBudget, device: str) -> Any:
        from truedraft.training.heads import train_heads

        common: dict[str, Any] = {
            **dataclasses.asdict(options.text),
            **dataclasses.asdict(options.size),
            **dataclasses.asdict(options.learning),
            "writing": _writing(options, model, max(0, options.learning.seed)),
            "device": device,
        }
        config = dotted(KINDS[kind].training).from_options(common, options.more)
        return train_heads(model, job.data, job.out, config, held_out=job.held_out, callbacks=callbacks, budget=budget)

    return _run(kind, options, train, lambda: _check_stage(job, getattr(options.more, "stage", 1)))


def ngram(options: NgramOptions) -> int:
    """Count a table of which token follows the last few, in text or in what the target writes; measures what it brings.

    It replaces a table that is in --out, which whoever drafts with it keeps until it ends.
    """
    job = options.job

    def train(model: str, callbacks: Callbacks, budget: TimeBudget, device: str) -> Any:
        from truedraft.training.ngrams import NgramConfig, train_ngrams

        how = _writing(options, model, options.seed)
        config = NgramConfig(
            **dataclasses.asdict(options.size),
            **dataclasses.asdict(options.text),
            answers=how if job.answers else None,
            seed=options.seed,
            device=device,
        )
        return train_ngrams(model, job.data, job.out, config, held_out=job.held_out, callbacks=callbacks, budget=budget)

    return _run("ngram", options, train)


def _writing(options: DraftOptions | HeadOptions | NgramOptions, model: str, seed: int) -> WritingConfig:
    """How the target writes its text, in this process or on a cluster; MissingExtraError without Ray, if asked for."""
    from truedraft.training.texts.answer_writer import WritingConfig

    elsewhere: Elsewhere | None = None
    if options.job.ray:
        ray_module("ray.data")
        from truedraft.server.cluster.predictor import answers_on_ray

        elsewhere = partial(answers_on_ray, model, options.machine.device)
    return WritingConfig(**dataclasses.asdict(options.writing), seed=seed, elsewhere=elsewhere)


def _run(
    kind: str,
    options: DraftOptions | HeadOptions | NgramOptions,
    train: Callable[[str, Callbacks, TimeBudget, str], Any],
    check: Callable[[], None] = lambda: None,
) -> int:
    """Train or clean up, report, and return the exit status, see `kept_promise`.

    `train` is called with the target, the callbacks, the time limit and the device; `check` refuses unusable options of
    this kind. Raises TruedraftError if it cannot be trained.
    """
    job = options.job
    if job.clean:
        return _clean(job, options.report)
    check()  # this and the next before imports that take seconds
    model = named_model(job.model)
    if kind != "draft":
        refuse_no_text(model, job.data, FOR_TABLES if kind == "ngram" else FOR_HEADS)
    budget = TimeBudget(options.run.minutes)
    from truedraft.cli import train_report
    from truedraft.machine import pick_device
    from truedraft.training.processes import Processes, joined
    from truedraft.training.report import Tracker

    terminal = Terminal()
    main, tracker = True, None
    try:
        with joined(str(pick_device(options.machine.device))) as device, quiet_hub(), contextlib.ExitStack() as shown:
            main = Processes.here().main
            if main:
                _check_folder(kind, job)
            if main and options.run.tracker is not None:
                tracker = Tracker(options.run.tracker, job.out, device)
            set_threads(options.machine.threads)
            result = train(model, _told(terminal, _Bars(terminal, shown), tracker), budget, device)
    except KeyboardInterrupt as stop:
        if not main:
            return INTERRUPTED
        terminal.end_line()
        kept = kind != "draft" or any((job.out / WORK / name).is_file() for name in _KEPT)
        say(how_to_go_on(job, keeps_answers=kept))
        if options.report.json:
            terminal.json(error_record(f"train {kind}", stop))
        return INTERRUPTED
    if not main:
        return DONE
    if tracker is not None:
        tracker.finish(result.evaluations)
    if not job.keep_work:
        finish_work(job.out)
    train_report.show(terminal, kind, model, result)
    registered = _register(terminal, result.folder)
    status = train_report.kept_promise(terminal, kind, model, result)
    if options.report.json:
        terminal.json(train_report.record_of(kind, model, result) | {"registered": registered})
    return status


def _told(terminal: Terminal, bars: _Bars, tracker: Tracker | None) -> Callbacks:
    """Notes above the bar, if there is one; a line for each checkpoint without a terminal."""
    from truedraft.training.loop import Callbacks

    def note(sentence: str) -> None:
        terminal.err.print(f"truedraft: note: {' '.join(sentence.split())}", soft_wrap=True)

    def checkpoint(saved: Saved) -> None:
        if not terminal.err.is_terminal:
            left = f", about {duration(saved.left_s)} left" if saved.step < saved.total_steps else ""
            say(
                f"step {saved.step:,} of {saved.total_steps:,}, loss {saved.loss:.3f}, {saved.tokens:,} tokens{left}; "
                f"saved in {saved.path}"
            )

    callbacks = Callbacks(bars.show, on_note=note, on_plan=note, on_checkpoint=checkpoint)
    return callbacks if tracker is None else dataclasses.replace(callbacks, on_step=tracker.step)


def _register(terminal: Terminal, folder: Path) -> bool:
    """Register a trained drafter for `auto`, and print it; returns whether that was possible."""
    made = TrainedDrafter.read(folder)
    if made is None:
        warn(f"{folder} does not say which target it is for; name it with --drafter")
        return False
    try:
        registry = Registry()
        problem = registry.add(made)
    except OptionError as error:  # no cache folder can be used; the trained drafter exists regardless
        problem = f"{folder} could not be noted: {error}"
    if problem is not None:
        warn(problem)
        return False
    said = "--drafter auto takes it for its target as long as it stays there"
    if made.brings_too_little:
        said = f"--drafter auto leaves it out, for {made.most_tokens_per_call:.2f} tokens per target call cannot pay"
    terminal.out.print(f"noted in {registry.file}: {said}", soft_wrap=True)
    return True


def _check_folder(kind: str, job: JobOptions) -> None:
    """Refuse a folder that holds other files than the training to be resumed, or where a process is training."""
    out, resume, table = job.out, job.resume, kind == "ngram"
    problem = None
    if out.exists() and not out.is_dir():
        raise OptionError(f"{str(out)!r} is a file; name a folder", field="out")
    refuse_busy(out / WORK)
    names = ("checkpoint.pt", *_KEPT) if kind == "draft" else ("",)
    started = any((out / WORK / name).exists() for name in names)
    if started and not resume:
        problem = "holds a training; add --resume to go on with it, or name a new folder"
    if resume and not started:
        problem = "holds no training to go on with; leave --resume out"
    if (out / "config.json").is_file() and (table or not started):
        problem = "holds a model, which would be overwritten; name a new folder"
    if (out / TABLE).is_file() and not table:
        problem = "holds a table of n-grams, and a folder is for one drafter; name a new folder"
    if problem is not None:
        raise OptionError(f"{str(out)!r} {problem}", field="out")


def _check_stage(job: JobOptions, stage: int) -> None:
    out, second = job.out, (job.out / "stage-1").is_dir()
    if job.resume and stage == 1 and second:
        raise OptionError(
            f"{str(out)!r} holds a training of stage 2; go on with --stage 2, or name a new folder", field="out"
        )
    if job.resume and stage == 2 and not second and (out / "heads.safetensors").is_file():
        raise OptionError(
            f"{str(out)!r} holds finished heads of stage 1, which stage 2 would overwrite; name a new folder, "
            f"and these heads with --start-from {out}",
            field="out",
        )


def _clean(job: JobOptions, report: ReportOptions) -> int:
    from truedraft.machine import in_bytes

    freed, terminal, out = clear_work(job.out), Terminal(), job.out
    terminal.out.print(f"removed the working files of the training in {out}: {in_bytes(freed)} freed", soft_wrap=True)
    if report.json:
        terminal.json({"command": "train --clean", "out": str(out), "freed_bytes": freed})
    return DONE


def how_to_go_on(job: JobOptions, *, keeps_answers: bool) -> str:
    """How to use what is kept of an interrupted training: also before the first checkpoint, if it `keeps_answers`."""
    from truedraft.training.loop import CHECKPOINT, checkpoint_of

    same = "the same command" if job.resume else "the same command with --resume"
    for place in (job.out / each for each in PLACES):
        try:
            found = checkpoint_of(place)
        except TrainingError as error:
            return f"interrupted; {error}"
        if found is not None:
            where = f"the training is saved in {place / CHECKPOINT} as of step {found[0]:,}"
            return f"interrupted; {where}; {same} goes on from there"
    if not keeps_answers:
        return "interrupted before the first checkpoint; the same command begins again"
    if not (job.out / WORK).is_dir():
        return "interrupted before anything was written; the same command begins again"
    return f"interrupted; {same} goes on, with the answers that are written"


class _Bars:
    """One bar after another, one for each kind of work."""

    def __init__(self, terminal: Terminal, stack: contextlib.ExitStack) -> None:
        self._terminal, self._stack = terminal, stack
        self._what: str | None = None
        self._update: Progress = lambda done, remark: None
        self._said = time.monotonic()

    def show(self, what: str, done: int, total: int, remark: str) -> None:
        if what != self._what:
            self._stack.close()
            self._update = self._stack.enter_context(self._terminal.progress(what, total))
            self._what, self._said = what, time.monotonic()
        self._update(done, remark)
        quiet = what == "training" or self._terminal.err.is_terminal  # training has a line for each checkpoint
        if not quiet and time.monotonic() - self._said >= _QUIET_S:
            self._said = time.monotonic()
            say(f"{what}: {done:,} of {total:,} {remark}")
