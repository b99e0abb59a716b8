"""Let a target write the text that heads are trained on (self-distillation, Medusa 2401.10774, section 2.3.2).

The hidden states are kept as the engine samples from them, so no second pass over the text is needed. Prompts come from
data files and from itself: after the opening of a user's message an instruct model writes questions like its training
data (Magpie, 2406.08464).
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from truedraft.core.params import SamplingParams
from truedraft.drafters.base import Features, StepOutcome
from truedraft.engine import Engine
from truedraft.engine.request import Request
from truedraft.errors import DataError, OptionError, PromptError, TrainingError
from truedraft.measure import StepWatcher, outputs_along
from truedraft.models.base import LanguageModel
from truedraft.text.tokenizer import Tokenizer
from truedraft.training.loop import Callbacks, identity_of
from truedraft.training.options import WritingOptions
from truedraft.training.texts.data import read_data, read_texts
from truedraft.training.texts.prompts import prompts_hash, shuffled
from truedraft.training.texts.self_distillation import AnswerFiles, SelfDistillationData, WrittenAnswer
from truedraft.training.workspace import WRITTEN, TimeBudget, duration

_TRIED_STEPS = 25  # timed together
_TRIED_ROUNDS = 3
_LEAST_CUT = 16  # least tokens of an answer that is cut
_PACED = 32  # steps before the remaining time is reported

PromptToAnswer: TypeAlias = tuple[list[int], SamplingParams]  # a prompt, and the sampling parameters of its answer
Elsewhere: TypeAlias = Callable[[Sequence[PromptToAnswer]], Iterator[tuple[list[int], bool]]]
"""Lets other machines answer prompts: yields in order the ids of each answer, and whether the target ended it."""


@dataclass(frozen=True)
class WritingConfig(WritingOptions):
    """How a target writes; OptionError for a value out of its range."""

    batch: int = 64  # answers written at once; affects only the speed
    seed: int = 0  # of the noise; answer i has its own noise, independent of what was written before
    elsewhere: Elsewhere | None = field(default=None, compare=False)  # writes the answers; None: this process does

    def __post_init__(self) -> None:
        for name, value in (("answer_tokens", self.answer_tokens), ("batch", self.batch)):
            if value < 1:
                raise OptionError(f"must be 1 or more, got {value}", field=name)
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
    """Progress reports and the stopping time of a target's writing."""

    what: str = "writing text"  # the current work, as "writing text"
    written: str = "answers"  # the kind of text, as "answers"
    callbacks: Callbacks = field(default_factory=Callbacks)
    budget: TimeBudget = field(default_factory=TimeBudget)
    share: float = 1.0  # of the budget at which the writing ends
    begun: bool = False  # whether a training on the written text has begun, so that nothing is added
    on_forecast: Callable[[float], None] | None = None  # called once with at most the remaining seconds; None: a note

    def over(self) -> bool:
        return self.begun or self.budget.over(self.share)

    def came(self, done: int, total: int, name: str) -> None:
        self.callbacks.on_progress(self.what, done, total, f"{self.written} by {name}")

    def forecast(self, left_s: float) -> None:
        within_s = min(left_s, self.budget.left_s(self.share))
        if self.on_forecast is not None:
            self.on_forecast(left_s)
        elif within_s > 0:
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

    Raises OptionError for a folder of other prompts, target or configuration, TrainingError if that fails.
    """
    about = identity_of(config, target=target.fingerprint, prompts_sha256=prompts_hash(prompts))
    about.pop("batch")
    width = target.head_width if width is None else width
    least = len(config.temperatures) if least is None else least
    files = AnswerFiles(folder, name, width, about)
    for record in files.records[files.covered :]:
        files.append_vectors(hidden_of(target, record))
    most = max(1, target.context_length - config.answer_tokens)
    watch, fitting = watch or Watch(), [list(prompt)[-most:] for prompt in prompts]
    watch.came(len(files.records), len(prompts), target.name)
    if config.elsewhere is not None:
        _write_elsewhere(target, fitting, config, config.elsewhere, files, width, watch)
    answering = _Answering(target, fitting, config, files, width)
    trial, times = ThreadTrial(target.device), list[float]()
    try:
        while (written := len(files.records)) < len(prompts):
            if watch.over() and written + len(answering.long_enough(least_tokens)) >= least:
                answering.keep(answering.long_enough(_LEAST_CUT))  # also ended ones that wait for a long one
                break
            steps_left = trial.run(answering.step)
            times.append(time.perf_counter())
            if len(times) == _PACED:  # the first steps with prompts are over
                watch.forecast((times[-1] - times[_PACED // 2]) / (_PACED // 2 - 1) * steps_left)
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


SELF = Path("self")  # takes the place of a data file: the target writes the prompts
ASKED = "questions"  # name of the files of questions
LONGEST = 160  # most tokens of a question; longer ones rarely end
_MARK = "\N{REPLACEMENT CHARACTER}"
_SPARE = 1.4  # factor of questions: some have no end, or are duplicates
_LEAST = 8  # characters
_FEWEST = 16  # questions written even if the time is up
_RUN, _ALIKE = 3, 0.7  # words of a run; share of runs that makes a near duplicate
_ANSWERS = "answers"  # name of the files of the target's answers
_QUESTIONS_WRITTEN = 0.25 * WRITTEN  # share of the time until which the target writes questions
_SHORT = 0.95  # share of the requested prompts that counts as all


@dataclass(frozen=True)
class Source:
    """The contents of the data files; `asks`: whether the target also writes prompts of its own."""

    texts: Sequence[str]
    prompts: Sequence[Sequence[int]]
    held_out: Sequence[str]
    asks: bool

    @classmethod
    def read(cls, data: Sequence[Path], held_out: Sequence[Path], tokenizer: Any) -> Source:
        """Read all files; with `SELF` the target writes prompts. DataError for an unreadable file or no data."""
        texts, prompts = read_data([path for path in data if path != SELF], tokenizer, empty=SELF in data)
        return cls(texts, prompts, read_texts(held_out, tokenizer) if held_out else [], SELF in data)

    @property
    def has_prompts(self) -> bool:
        return self.asks or bool(self.prompts)


@dataclass(frozen=True)
class Writing:
    """How a target answers prompts: about `tokens`, until the share `WRITTEN` of the budget is spent.

    `begun` is whether a training on the written text has begun, so that nothing is added.
    """

    tokens: int
    how: WritingConfig
    folder: Path
    callbacks: Callbacks
    budget: TimeBudget
    begun: bool = False

    def questions(self, model: LanguageModel, count: int) -> list[list[int]]:
        """Questions that the target writes itself; none are added once answers are written."""
        begun = self.begun or (self.budget.limited and (self.folder / f"{_ANSWERS}.json").is_file())
        watch = Watch("asking", "questions", self.callbacks, self.budget, _QUESTIONS_WRITTEN, begun)
        how = self.how
        return ask_itself(model, count, self.folder, seed=how.seed + 2, watch=watch, elsewhere=how.elsewhere)

    def answers(self, model: LanguageModel, prompts: Sequence[Sequence[int]], asks: bool) -> list[WrittenAnswer]:
        """Answers to prompts and, with `asks`, to its own questions: the missing ones, at least half of all."""
        count = -(-self.tokens // self.how.answer_tokens)
        if asks:
            prompts = [*prompts, *self.questions(model, max(count // 2, count - len(prompts)))]
        prompts = shuffled(prompts, self.how.seed)[:count] if asks or self.budget.limited else prompts[:count]
        if len(prompts) < _SHORT * count:
            self.callbacks.on_note(f"there are {len(prompts):,} prompts, and {count:,} are asked for with --tokens")
        watch = Watch(callbacks=self.callbacks, budget=self.budget, share=WRITTEN, begun=self.begun)
        written = write_answers(model, prompts, self.folder, _ANSWERS, self.how, watch=watch, width=0)
        if len(written.records) < len(prompts):
            got = f"{len(written.tokens):,} of about {self.tokens:,} tokens"
            self.callbacks.on_note(f"in the time given the target wrote {got}")
        return written.records


def names_of(data: Iterable[Path]) -> str:
    """A description of data files and `SELF`."""
    return ", ".join("questions of its own" if path == SELF else path.name for path in data)


def opening_of(tokenizer: Tokenizer) -> list[int]:
    """The ids before the text of a user's message; DataError without a chat template that keeps it unchanged."""
    try:
        before, mark, _ = tokenizer.conversation_text([{"role": "user", "content": _MARK}]).partition(_MARK)
    except PromptError as error:
        raise DataError(f"the model cannot ask itself: {error}; name prompts of your own with --data FILE") from error
    if not mark:
        raise DataError("the chat template does not write a user's message as it stands; name prompts of your own")
    return list(map(int, tokenizer.backend.encode(before, add_special_tokens=False)))


def ask_itself(
    target: LanguageModel,
    count: int,
    folder: Path,
    *,
    seed: int = 0,
    batch: int = 64,
    watch: Watch | None = None,
    elsewhere: Elsewhere | None = None,
) -> list[list[int]]:
    """Let an instruct model write up to `count` questions, or resume; returns prompts in its chat template.

    Raises DataError without a chat template, OptionError for a folder of another configuration, TrainingError if the
    target or writing the files fails, or no question ended.
    """
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise DataError("the model has no tokenizer, and writes no questions without one")
    written = write_answers(
        target,
        [opening_of(tokenizer)] * math.ceil(_SPARE * count),
        folder,
        ASKED,
        WritingConfig(answer_tokens=LONGEST, temperatures=(1.0,), batch=batch, seed=seed, elsewhere=elsewhere),
        watch=watch,
        width=0,
        least=_FEWEST,
        least_tokens=LONGEST,  # a question without an end is not used
    )
    ended = (tokenizer.decode(record.answer[:-1]) for record in written.records if record.stopped)
    found = distinct(ended)[:count]
    if not found:
        raise TrainingError(
            f"{target.name} wrote no question: none of {len(written.records):,} had an end within {LONGEST} "
            "tokens; name prompts of your own with --data FILE"
        )
    return [tokenizer.chat([{"role": "user", "content": text}]) for text in found]


def distinct(questions: Iterable[str]) -> list[str]:
    """Questions of more than a few characters without near duplicates, which share most trigrams of words."""
    kept: list[str] = []
    first: dict[tuple[str, ...], int] = {}  # the first question with a run
    for text in map(str.strip, questions):
        words = re.findall(r"\w+", text.lower())
        runs = {tuple(words[place : place + _RUN]) for place in range(max(1, len(words) - _RUN + 1))}
        shared = Counter(first[run] for run in runs if run in first)
        if len(text) <= _LEAST or max(shared.values(), default=0) >= _ALIKE * len(runs):
            continue
        for run in runs:
            first.setdefault(run, len(kept))
        kept.append(text)
    return kept
