"""Let a target write the text that heads are trained on (self-distillation, Medusa 2401.10774, section 2.3.2).

The hidden states are kept as the engine samples from them, so no second pass over the text is needed.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from truedraft.core.params import SamplingParams
from truedraft.drafters.base import Features, StepOutcome
from truedraft.engine import Engine
from truedraft.engine.request import Request
from truedraft.errors import OptionError, TrainingError
from truedraft.measure import StepWatcher, outputs_along
from truedraft.models.base import LanguageModel
from truedraft.training.loop import Callbacks, identity_of
from truedraft.training.options import WritingOptions
from truedraft.training.texts.prompts import prompts_hash
from truedraft.training.texts.self_distillation import AnswerFiles, SelfDistillationData, WrittenAnswer
from truedraft.training.workspace import TimeBudget, duration

_TRIED_STEPS = 25  # timed together
_TRIED_ROUNDS = 3
_LEAST_CUT = 16  # least tokens of an answer that is cut
_PACED = 32  # steps before the remaining time is reported

PromptToAnswer: TypeAlias = tuple[list[int], SamplingParams]
"""A prompt, and the sampling parameters of its answer."""
Elsewhere: TypeAlias = Callable[[Sequence[PromptToAnswer]], Iterator[tuple[list[int], bool]]]
"""Lets other machines answer prompts: yields in order the ids of each answer, and whether the target ended it."""


@dataclass(frozen=True)
class WritingConfig(WritingOptions):
    """How a target writes.

    Attributes:
        batch: answers written at once; affects only the speed.
        seed: of the noise; answer i has its own noise, independent of what was written before.
        elsewhere: writes the answers; None writes them in this process.

    Raises:
        OptionError: a value out of its range.
    """

    batch: int = 64
    seed: int = 0
    elsewhere: Elsewhere | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("answer_tokens", "batch"):
            if getattr(self, name) < 1:
                raise OptionError(f"must be 1 or more, got {getattr(self, name)}", field=name)
        if not self.temperatures:
            raise OptionError("temperatures must hold at least one; 0 is greedy")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)  # raises if it is invalid

    def params(self, number: int) -> SamplingParams:
        temperature = float(self.temperatures[number % len(self.temperatures)])
        seed = (self.seed * 1_000_003 + number) % (1 << 63)
        return SamplingParams(max_tokens=self.answer_tokens, temperature=temperature, seed=seed)


@dataclass(frozen=True)
class Watch:
    """Progress reports and the stopping time of a target's writing.

    Attributes:
        what: the current work, as "writing text".
        written: the kind of text, as "answers".
        share: of the budget at which the writing ends.
        begun: whether a training on the written text has begun, so that nothing is added.
        on_forecast: called once with an upper limit of the remaining seconds; None reports it as a note.
    """

    what: str = "writing text"
    written: str = "answers"
    callbacks: Callbacks = field(default_factory=Callbacks)
    budget: TimeBudget = field(default_factory=TimeBudget)
    share: float = 1.0
    begun: bool = False
    on_forecast: Callable[[float], None] | None = None

    def over(self) -> bool:
        return self.begun or self.budget.over(self.share)

    def came(self, done: int, total: int, name: str) -> None:
        self.callbacks.on_progress(self.what, done, total, f"{self.written} by {name}")

    def forecast(self, left_s: float) -> None:
        if self.on_forecast is not None:
            self.on_forecast(left_s)
        else:
            within_s = min(left_s, self.budget.left_s(self.share))
            if within_s > 0:
                self.callbacks.on_plan(f"{self.what.partition(' ')[0]} takes about {duration(within_s)}")


def write_answers(
    target: LanguageModel,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    name: str,
    config: WritingConfig,
    *,
    watch: Watch | None = None,
    width: int | None = None,
    least: int | None = None,
    least_tokens: int = _LEAST_CUT,
) -> SelfDistillationData:
    """Let the target answer the prompts, or resume after an interruption; the files are the same.

    Args:
        prompts: token ids; one that leaves no room in the target's context keeps its last tokens.
        name: of the files, see `AnswerFiles`.
        watch: at its stopping time running answers are cut and the written ones returned; None never stops.
        width: entries of each vector that are kept; None keeps all that heads read, 0 none.
        least: answers written even if the time is up, with `least_tokens` each; None is one at each temperature.

    Raises:
        OptionError: the folder holds answers to other prompts, of another target, or of another configuration.
        TrainingError: the target failed, or the files cannot be written.
    """
    about = identity_of(config, target=target.fingerprint, prompts_sha256=prompts_hash(prompts))
    about.pop("batch")
    width = target.head_width if width is None else width
    least = len(config.temperatures) if least is None else least
    files = AnswerFiles(folder, name, width, about)
    for record in files.records[files.covered :]:
        files.append_vectors(hidden_of(target, record))
    watch, prompts = watch or Watch(), _fitting(prompts, target, config)
    watch.came(len(files.records), len(prompts), target.name)
    if config.elsewhere is not None:
        _write_elsewhere(target, prompts, config, config.elsewhere, files, width, watch)
    answering = _Answering(target, prompts, config, files, width)
    trial, pace = ThreadTrial(target.device), _Pace(watch.forecast)
    try:
        while (written := len(files.records)) < len(prompts):
            if watch.over() and written + len(answering.long_enough(least_tokens)) >= least:
                answering.keep(answering.long_enough(_LEAST_CUT))  # also ended ones that wait for a long one
                break
            pace.stepped(trial.run(answering.step))
            if len(files.records) > written:
                watch.came(len(files.records), len(prompts), target.name)
    finally:
        trial.stop()
        answering.close()
    return files.read()


def _write_elsewhere(
    target: LanguageModel,
    prompts: Sequence[list[int]],
    config: WritingConfig,
    elsewhere: Elsewhere,
    files: AnswerFiles,
    width: int,
    watch: Watch,
) -> None:
    """Let other machines answer the remaining prompts; the vectors are recomputed here."""
    remaining = [(prompt, config.params(number)) for number, prompt in enumerate(prompts)][len(files.records) :]
    if not remaining or watch.over():
        return
    for (prompt, params), (ids, stopped) in zip(remaining, elsewhere(remaining), strict=True):
        answer = [*ids, target.eos_token_ids[0]] if stopped else ids
        record = WrittenAnswer(prompt, answer, float(params.temperature), stopped)
        files.append(record, hidden_of(target, record)[:, :width] if width else torch.empty(len(answer), 0))
        watch.came(len(files.records), len(prompts), target.name)
        if watch.over():
            return


@torch.inference_mode()
def hidden_of(target: LanguageModel, record: WrittenAnswer) -> Tensor:
    """Recompute the hidden states from which the tokens of an answer were drawn: `[tokens, width]`."""
    outputs = outputs_along(target, [*record.prompt, *record.answer[:-1]], len(record.prompt) - 1)
    return torch.cat([each.hidden[:, : target.head_width].clone() for each in outputs])


class ThreadTrial:
    """Runs steps on all of torch's threads and on one, then on whichever was faster; only on the CPU.

    A step of a small model has many short parts, and threads synchronise after each. Where they share a processor core,
    or wait for one, a second thread makes it slower.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._all = torch.get_num_threads()
        self._clock = clock
        self._times: dict[int, list[float]] = {self._all: [], 1: []}
        self._trials = [self._all, 1] * _TRIED_ROUNDS if device.type == "cpu" and self._all > 1 else []
        self._spent = 0.0
        self._steps = 0

    def run(self, step: Callable[[], int]) -> int:
        if not self._trials:
            return step()
        torch.set_num_threads(self._trials[0])
        began = self._clock()
        found = step()
        self._spent += self._clock() - began
        self._steps += 1
        if self._steps == _TRIED_STEPS:
            self._times[self._trials.pop(0)].append(self._spent)
            self._spent, self._steps = 0.0, 0
            if not self._trials:
                # The best time of each: the first one includes the warm-up, and other processes may disturb any.
                torch.set_num_threads(min(self._times, key=lambda threads: min(self._times[threads])))
        return found

    def stop(self) -> None:
        torch.set_num_threads(self._all)


class _Pace:
    """Reports once how long the remaining steps will take, from the first steps without prompts."""

    def __init__(self, on_forecast: Callable[[float], None]) -> None:
        self._on_forecast = on_forecast
        self._times: list[float] = []

    def stepped(self, steps_left: int) -> None:
        if len(self._times) <= _PACED:
            self._times.append(time.perf_counter())
            if len(self._times) == _PACED:
                half = self._times[_PACED // 2 :]
                self._on_forecast((half[-1] - half[0]) / (len(half) - 1) * steps_left)


class _Answering:
    def __init__(
        self,
        target: LanguageModel,
        prompts: Sequence[Sequence[int]],
        config: WritingConfig,
        files: AnswerFiles,
        width: int,
    ) -> None:
        self._watcher, self._config, self._files, self._width = StepWatcher([Features()]), config, files, width
        self._stop_ids = target.eos_token_ids
        self._engine = Engine(target, self._watcher, max_batch=config.batch, controller="fixed")
        numbers = range(len(files.records), len(prompts))
        self._running = deque(self._engine.submit(prompts[number], config.params(number)) for number in numbers)

    def step(self) -> int:
        """Run a step of the engine; returns the most steps until all prompts are answered, with full batches."""
        self._engine.step()
        self.keep(list(itertools.takewhile(lambda request: request.closed, self._running)))
        return -(-len(self._running) // self._config.batch) * self._config.answer_tokens

    def long_enough(self, tokens: int) -> list[Request]:
        """The next answers that have ended, or have so many tokens."""
        return list(itertools.takewhile(lambda each: each.closed or each.emitted >= tokens, self._running))

    def keep(self, requests: Sequence[Request]) -> None:
        for request in requests:
            shown = [each for each in self._watcher.seen.pop(request.id, ()) if not each.partial]
            self._files.append(*_written(request, shown, self._width, self._stop_ids))
            self._running.popleft()
            self._engine.cancel(request)

    def close(self) -> None:
        for request in self._running:
            self._engine.cancel(request)


def _written(
    request: Request, shown: Sequence[StepOutcome], width: int, stop_ids: Sequence[int]
) -> tuple[WrittenAnswer, Tensor]:
    if request.error is not None:
        raise TrainingError(f"the target failed while it wrote text to train on: {request.error}") from request.error
    if request.warnings:
        raise TrainingError(f"the vectors of the target could not be kept: {request.warnings[0]}")
    hidden = torch.stack([each.hidden[-1, :width] for each in shown if each.hidden is not None])
    answer = request.tokens[request.prompt_tokens :]
    stopped = len(hidden) > len(answer)  # the last vector gave the end token
    if stopped:
        answer = [*answer, stop_ids[0]]
    prompt = request.tokens[: request.prompt_tokens]
    return WrittenAnswer(prompt, answer, float(request.params.temperature), stopped), hidden


def _fitting(prompts: Sequence[Sequence[int]], target: LanguageModel, config: WritingConfig) -> list[list[int]]:
    most = max(1, target.context_length - config.answer_tokens)
    return [list(prompt)[-most:] for prompt in prompts]
