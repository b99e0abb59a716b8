"""Questions that an instruct model writes itself, as the user's message of its chat template.

After only the opening of a user's turn such a model writes questions like those of its training data (Magpie, Xu et al.
2406.08464).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from truedraft.errors import DataError, PromptError, TrainingError
from truedraft.training.texts.answer_writer import Elsewhere, Watch, WritingConfig, write_answers

if TYPE_CHECKING:
    from truedraft.models.base import LanguageModel
    from truedraft.text.tokenizer import Tokenizer

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


def names_of(data: Iterable[Path]) -> str:
    """A description of data files and `SELF`."""
    return ", ".join("questions of its own" if path == SELF else path.name for path in data)


def opening_of(tokenizer: Tokenizer) -> list[int]:
    """The ids of an empty user's turn: what the chat template has before the message.

    Raises:
        DataError: there is no chat template, or it does not contain the message unchanged.
    """
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
    """Let an instruct model write up to `count` questions, or resume after an interruption; returns prompts in its chat
    template.

    Raises:
        DataError: the target has no chat template.
        OptionError: the folder holds questions of another configuration.
        TrainingError: the target failed, no question ended, or the files cannot be written.
    """
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise DataError("the model has no tokenizer, and asks nothing without one")
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
            f"{target.name} asked itself nothing: no question of {len(written.records):,} had an end within {LONGEST} "
            "tokens; name prompts of your own with --data FILE"
        )
    return [tokenizer.chat([{"role": "user", "content": text}]) for text in found]


def distinct(questions: Iterable[str]) -> list[str]:
    """Questions without near duplicates, which share most of their trigrams of words with an earlier one.

    Surrounding spaces are removed, and so are questions of a few characters.
    """
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
