"""Every error that truedraft raises on purpose, as one tree.

TruedraftError
├── OptionError            an option has an unusable value (also a ValueError)
│   └── UnknownOptionError     an option or word that does not exist; names the nearest valid one
├── PromptError            a request cannot be run as asked (also a ValueError)
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
├── TrainingError          training cannot start or go on
└── MissingExtraError      an optional dependency is not installed

Each message says what was wrong, with what value, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TruedraftError(Exception):
    """Base of every error raised on purpose by this package."""


class OptionError(TruedraftError, ValueError):
    """An option has an unusable value."""


class UnknownOptionError(OptionError):
    """An option or a word does not exist."""

    @classmethod
    def nearest(cls, what: str, given: str, valid: Iterable[str]) -> UnknownOptionError:
        """Build the message: what was given, the nearest valid word, and all valid words."""
        words = sorted(valid)
        close = difflib.get_close_matches(given, words, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return cls(f"unknown {what} {given!r}; {hint}valid: {', '.join(words)}")


class PromptError(TruedraftError, ValueError):
    """A request cannot be run as asked: its prompt is empty, too long or out of range."""


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
    """Training cannot start or go on."""


class MissingExtraError(TruedraftError):
    """An optional dependency is not installed."""
