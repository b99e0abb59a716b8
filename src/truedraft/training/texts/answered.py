"""Prompts for a target from data files and by itself, and its answers to them.

After the opening of a user's message an instruct model writes questions like its training data (Magpie, 2406.08464).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.errors import DataError, PromptError, TrainingError
from truedraft.training.texts.answer_writer import Elsewhere, Watch, WritingConfig, write_answers
from truedraft.training.texts.data import read_data, read_texts
from truedraft.training.texts.prompts import shuffled
from truedraft.training.workspace import WRITTEN, TimeBudget

if TYPE_CHECKING:
    from truedraft.models.base import LanguageModel
    from truedraft.text.tokenizer import Tokenizer
    from truedraft.training.loop import Callbacks
    from truedraft.training.texts.self_distillation import WrittenAnswer

SELF = Path("self")
"""Takes the place of a data file: the target writes the prompts."""
ASKED = "questions"
"""Name of the files of questions."""
LONGEST = 160
"""Most tokens of a question; longer ones rarely end."""
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
