"""Every error that truedraft raises on purpose, as one tree.

TruedraftError
├── OptionError            an option has an unusable value (also a ValueError)
│   ├── UnknownOptionError     an option or word that does not exist; names the nearest valid one
│   ├── FormMemoryError        the forms of open requests leave no room for one more
│   └── ChangedOptionsError    work started with some options cannot continue with others
├── PromptError            a request cannot be run (also a ValueError)
├── ModelError             a model cannot be loaded or run
│   ├── ModelNotFoundError     no such folder, file or hub name
│   ├── UnsupportedModelError  not a causal language model, or one that cannot run packed
│   └── InvalidLogitsError     the model answered NaN or infinity
├── CompositionError       parts that do not fit together
│   ├── VocabularyMismatchError  target and draft do not share a tokenizer
│   └── IncompatibleRuleError    the rule cannot judge the drafter's kinds of draws
├── DrafterError           a drafter broke its contract while running
├── CacheError             key/value memory was used out of order or ran out
├── DataError              training or prompt data cannot be read or used
├── TrainingError          training cannot start or continue
├── ProcessError           a step of a process gave no state
├── PeerError              another engine did not answer as it should
└── MissingExtraError      an optional dependency is not installed

Each message says what was wrong, with what value, and what to do; an error also has the option's name.
"""

from __future__ import annotations

import contextlib
import difflib
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


class TruedraftError(Exception):
    """Base of every error raised on purpose by this package.

    Args:
        message: a sentence; with a field, its predicate: "must be 1 or more, got 0".
        field: the option that the sentence begins with.

    Attributes:
        field: the option or field that caused the error, by its name in Python; None without one.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self._subject = field

    def __str__(self) -> str:
        return str(self.args[0]) if self._subject is None else f"{self._subject} {self.args[0]}"

    def call_fields(self, names: Mapping[str, str]) -> None:
        """Replace field names in the message by those that its reader uses, such as "--max-tokens"."""
        if self._subject is not None:
            self._subject = names.get(self._subject, self._subject)


@contextlib.contextmanager
def errors_about(field: str) -> Iterator[None]:
    """Set this field on errors from inside that have none."""
    try:
        yield
    except TruedraftError as error:
        error.field = error.field or field
        raise


class OptionError(TruedraftError, ValueError):
    """An option has an unusable value."""


_REPLACEMENTS = {
    "drafter early-exit": "self:int4, which drafts with the target itself, too",
    "option of drafter 'draft' outcomes": "only async=1, which drafts after the likeliest outcome",
    "option of drafter 'ngram' sampled": "nodes: trees are of the likeliest tokens",
    "option of controller 'goodput' explore": "only probing: estimates are upper bounds",
    "option of drafter 'ngram' branching": "nodes: trees are of the likeliest tokens",
}
"""Replacements of removed words, by what they named."""


class UnknownOptionError(OptionError):
    """An option or a word does not exist."""

    @classmethod
    def nearest(cls, what: str, given: str, valid: Iterable[str], also: str = "") -> UnknownOptionError:
        """Build the message: the given word, its replacement or the nearest valid word, and all valid words.

        Args:
            what: noun of the word; a single word is the option itself.
        """
        words = sorted(valid)
        close = difflib.get_close_matches(given, words, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}? " if close else ""
        hint = f"it is gone, take {replacement}; " if (replacement := _REPLACEMENTS.get(f"{what} {given}")) else hint
        error = cls(f"unknown {what} {given!r}{also}; {hint}valid: {', '.join(words)}")
        error.field = what if what.isidentifier() else None
        return error


class FormMemoryError(OptionError):
    """The forms of open requests leave no room for one more; a retry may succeed once some are closed."""


class ChangedOptionsError(OptionError):
    """Work started with some options cannot continue with others.

    Args:
        changes: by field, its value before and now.
    """

    def __init__(self, what: str, changes: Mapping[str, tuple[Any, Any]], kind: str = "folder") -> None:
        super().__init__(what)
        self.changes = changes
        self._kind = kind
        self._names: Mapping[str, str] = {}

    def __str__(self) -> str:
        changes = "; ".join(
            f"{self._names.get(name, name)} was {before} and is now {now}"
            for name, (before, now) in self.changes.items()
        )
        return (
            f"{self.args[0]} was begun with another configuration ({changes}): go on with the values it was begun "
            f"with, or name a new {self._kind}"
        )

    def call_fields(self, names: Mapping[str, str]) -> None:
        self._names = names


class PromptError(TruedraftError, ValueError):
    """A request cannot be run: its prompt is empty, too long or out of range."""


class PromptLengthError(PromptError):
    """A conversation is longer than the context, in any form."""


class ModelError(TruedraftError):
    """A model cannot be loaded or run."""


class ModelNotFoundError(ModelError):
    """No such folder, file or hub name."""


class UnsupportedModelError(ModelError):
    """The model is no causal language model, or cannot run in one packed forward."""


class InvalidLogitsError(ModelError):
    """The model answered NaN or infinity for a row of logits."""


class CompositionError(TruedraftError):
    """Parts that do not fit together were composed."""


class VocabularyMismatchError(CompositionError):
    """Target and draft do not share a tokenizer."""


class IncompatibleRuleError(CompositionError):
    """The verification rule cannot judge the drafter's kinds of draws."""


class DrafterError(TruedraftError):
    """A drafter broke its contract while running."""


class CacheError(TruedraftError):
    """Key/value memory was used out of order or ran out."""


class DataError(TruedraftError):
    """Training or prompt data cannot be read or used."""


class TrainingError(TruedraftError):
    """Training cannot start or continue."""


class ProcessError(TruedraftError):
    """A step of a process gave no state, or not one for each chain."""


class PeerError(TruedraftError):
    """Another engine did not answer, or not as it should.

    Attributes:
        status: HTTP status of its answer; None without one.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class MissingExtraError(TruedraftError):
    """An optional dependency is not installed."""


def first_line(error: BaseException) -> str:
    """First line of another library's error, for use in a sentence."""
    if isinstance(error, pickle.UnpicklingError):  # torch would have one load it with the code that it holds
        return "it is no pickle of only tensors"
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
