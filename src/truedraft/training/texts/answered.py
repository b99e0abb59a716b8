"""What drafters that learn from whole texts are trained on: texts, and the target's answers to prompts."""

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

_ANSWERS = "answers"  # name of the files that the target's answers are in
_ASKED = 0.25 * WRITTEN  # of the time, until which the target asks itself
_SHORT = 0.95  # of the answers that are asked for is as good as all


@dataclass(frozen=True)
class Source:
    """What the data files hold.

    Attributes:
        texts: as they stand.
        prompts: token ids, for the target to answer.
        held_out: texts to measure on; empty where a part of the others is kept back for that.
        asks: whether the target asks itself, too.
    """

    texts: Sequence[str]
    prompts: Sequence[Sequence[int]]
    held_out: Sequence[str]
    asks: bool

    @classmethod
    def read(cls, data: Sequence[Path], held_out: Sequence[Path], tokenizer: Any) -> Source:
        """All files; `SELF` among them lets the target ask itself.

        Raises:
            DataError: one cannot be read, or there is nothing in them.
        """
        texts, prompts = read_data([path for path in data if path != SELF], tokenizer, empty=SELF in data)
        return cls(texts, prompts, read_texts(held_out, tokenizer) if held_out else [], SELF in data)

    @property
    def has_prompts(self) -> bool:
        """Whether there is anything for the target to answer."""
        return self.asks or bool(self.prompts)


@dataclass(frozen=True)
class Writing:
    """How a target answers.

    Attributes:
        tokens: that it writes, about.
        how: it writes them.
        folder: where answers and questions lie.
        told: of how far it has come.
        budget: until `WRITTEN` of it is gone the target writes.
        begun: whether there is a training on what is written, so that nothing is added.
    """

    tokens: int
    how: WritingConfig
    folder: Path
    told: Callbacks
    budget: TimeBudget
    begun: bool = False

    def ask(self, model: LanguageModel, count: int) -> list[list[int]]:
        """What the target asks itself; nothing more is asked once answers are written."""
        begun = self.begun or (self.budget.limited and (self.folder / f"{_ANSWERS}.json").is_file())
        watch = Watch("asking", "questions", self.told, self.budget, _ASKED, begun)
        how = self.how
        return ask_itself(model, count, self.folder, seed=how.seed + 2, watch=watch, elsewhere=how.elsewhere)

    def answers(self, model: LanguageModel, prompts: Sequence[Sequence[int]], asks: bool) -> list[WrittenAnswer]:
        """The target's answers to prompts, and to as many questions of its own as are missing, half of all at least."""
        wanted = -(-self.tokens // self.how.answer_tokens)
        if asks:
            prompts = [*prompts, *self.ask(model, max(wanted // 2, wanted - len(prompts)))]
        prompts = shuffled(prompts, self.how.seed)[:wanted] if asks or self.budget.limited else prompts[:wanted]
        if len(prompts) < _SHORT * wanted:
            self.told.on_note(f"there are {len(prompts):,} prompts, and {wanted:,} are asked for with --tokens")
        watch = Watch(told=self.told, budget=self.budget, share=WRITTEN, begun=self.begun)
        written = write_answers(model, prompts, self.folder, _ANSWERS, self.how, watch=watch, width=0)
        if len(written.records) < len(prompts):
            got = f"{len(written.tokens):,} of about {self.tokens:,} tokens"
            self.told.on_note(f"in the time given the target wrote {got}")
        return written.records
