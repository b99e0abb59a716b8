"""Training data of drafters that learn from whole texts: texts, and the target's answers to prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.training.texts.answer_writer import Watch, WritingConfig, write_answers
from truedraft.training.texts.data import read_data, read_texts
from truedraft.training.texts.prompts import shuffled
from truedraft.training.texts.questions import SELF, ask_itself
from truedraft.training.workspace import WRITTEN, TimeBudget

if TYPE_CHECKING:
    from truedraft.models.base import LanguageModel
    from truedraft.training.loop import Callbacks
    from truedraft.training.texts.self_distillation import WrittenAnswer

_ANSWERS = "answers"  # name of the files of the target's answers
_QUESTIONS_WRITTEN = 0.25 * WRITTEN  # share of the time until which the target writes questions
_SHORT = 0.95  # share of the requested prompts that counts as all


@dataclass(frozen=True)
class Source:
    """The contents of the data files.

    Attributes:
        prompts: token ids, for the target to answer.
        held_out: texts to measure on; empty where a part of `texts` is held out.
        asks: whether the target also writes prompts of its own.
    """

    texts: Sequence[str]
    prompts: Sequence[Sequence[int]]
    held_out: Sequence[str]
    asks: bool

    @classmethod
    def read(cls, data: Sequence[Path], held_out: Sequence[Path], tokenizer: Any) -> Source:
        """Read all files; with `SELF` among them the target writes prompts of its own.

        Raises:
            DataError: one cannot be read, or they are empty.
        """
        texts, prompts = read_data([path for path in data if path != SELF], tokenizer, empty=SELF in data)
        return cls(texts, prompts, read_texts(held_out, tokenizer) if held_out else [], SELF in data)

    @property
    def has_prompts(self) -> bool:
        """Whether there are prompts for the target to answer."""
        return self.asks or bool(self.prompts)


@dataclass(frozen=True)
class Writing:
    """How a target answers prompts.

    Attributes:
        tokens: approximate number to write.
        budget: the target writes until the share `WRITTEN` of it is spent.
        begun: whether a training on the written text has begun, so that nothing is added.
    """

    tokens: int
    how: WritingConfig
    folder: Path
    told: Callbacks
    budget: TimeBudget
    begun: bool = False

    def ask(self, model: LanguageModel, count: int) -> list[list[int]]:
        """Questions that the target writes itself; none are added once answers are written."""
        begun = self.begun or (self.budget.limited and (self.folder / f"{_ANSWERS}.json").is_file())
        watch = Watch("asking", "questions", self.told, self.budget, _QUESTIONS_WRITTEN, begun)
        how = self.how
        return ask_itself(model, count, self.folder, seed=how.seed + 2, watch=watch, elsewhere=how.elsewhere)

    def answers(self, model: LanguageModel, prompts: Sequence[Sequence[int]], asks: bool) -> list[WrittenAnswer]:
        """The target's answers to prompts and, with `asks`, to its own questions: as many as are missing, at least half
        of all."""
        count = -(-self.tokens // self.how.answer_tokens)
        if asks:
            prompts = [*prompts, *self.ask(model, max(count // 2, count - len(prompts)))]
        prompts = shuffled(prompts, self.how.seed)[:count] if asks or self.budget.limited else prompts[:count]
        if len(prompts) < _SHORT * count:
            self.told.on_note(f"there are {len(prompts):,} prompts, and {count:,} are asked for with --tokens")
        watch = Watch(told=self.told, budget=self.budget, share=WRITTEN, begun=self.begun)
        written = write_answers(model, prompts, self.folder, _ANSWERS, self.how, watch=watch, width=0)
        if len(written.records) < len(prompts):
            got = f"{len(written.tokens):,} of about {self.tokens:,} tokens"
            self.told.on_note(f"in the time given the target wrote {got}")
        return written.records
