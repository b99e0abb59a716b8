"""How a request wants its tokens drawn. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real

from truedraft.errors import OptionError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What to draw and when to stop, for one request.

    Attributes:
        max_tokens: most new tokens to emit, at least 1.
        temperature: divides the logits; 0 is greedy (the argmax, ties to the lowest id).
        top_k: keep the k likeliest tokens, ties with the k-th included; 0 keeps all.
        top_p: keep the likeliest tokens until their mass reaches top_p, the crossing token included; in (0, 1].
        min_p: drop tokens less likely than min_p times the likeliest; in [0, 1].
        seed: keys all noise of the request; None draws one from the operating system.
        coupled: draw by Gumbel noise keyed by (seed, position, token), so that the tokens depend on
            model, prompt, options and seed alone, never on the drafter (arXiv 2408.07978).
        stop: texts that end the answer; the answer ends before them.
        stop_token_ids: ids that end the answer; the answer ends before them.
        ignore_eos: go on past the end-of-text token.

    Numbers of numpy are taken like Python's own, and kept as these.

    Raises:
        OptionError: a value is out of its range, or of another type.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    coupled: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Refuse values out of range; accept one stop text, and lists for tuples."""
        checked = {
            "stop": _texts(self.stop),
            "stop_token_ids": _ids(self.stop_token_ids),
            "max_tokens": _whole("max_tokens", self.max_tokens, lowest=1),
            "top_k": _whole("top_k", self.top_k, lowest=0),
            "temperature": _number("temperature", self.temperature, lambda value: 0.0 <= value < math.inf, "0 or more"),
            "top_p": _number("top_p", self.top_p, lambda value: 0.0 < value <= 1.0, "in (0, 1]"),
            "min_p": _number("min_p", self.min_p, lambda value: 0.0 <= value <= 1.0, "in [0, 1]"),
            "coupled": _truth("coupled", self.coupled),
            "ignore_eos": _truth("ignore_eos", self.ignore_eos),
            "seed": None if self.seed is None else _whole("seed", self.seed, lowest=0),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.seed is not None and self.seed >= 1 << 64:
            raise OptionError(f"seed must lie below 2^64, got {self.seed}")

    @property
    def greedy(self) -> bool:
        """Whether the law of every node is one-hot."""
        return self.temperature == 0.0

    @property
    def law_key(self) -> tuple[float, int, float, float]:
        """What the law of a node depends on, beside its logits: equal keys share one computation."""
        return self.temperature, self.top_k, self.top_p, self.min_p


def _number(name: str, value: object, valid: Callable[[float], bool], expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not valid(float(value)):
        raise OptionError(f"{name} must be a number, {expected}, got {value!r}")
    return float(value)


def _whole(name: str, value: object, lowest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < lowest:
        raise OptionError(f"{name} must be a whole number of {lowest} or more, got {value!r}")
    return int(value)


def _truth(name: str, value: object) -> bool:
    if not isinstance(value, bool) and str(getattr(value, "dtype", "")) != "bool":  # as numpy's own is
        raise OptionError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def _texts(given: object) -> tuple[str, ...]:
    """Stop texts as a tuple; one text stands for itself."""
    texts = (given,) if isinstance(given, str) else given
    if not isinstance(texts, tuple | list) or not all(isinstance(text, str) for text in texts):
        raise OptionError(f"stop must be a text or a list of texts, got {given!r}")
    if "" in texts:
        raise OptionError("stop holds an empty text, which would end every answer at once; remove it")
    return tuple(texts)


def _ids(given: object) -> tuple[int, ...]:
    """Stop ids as a tuple."""
    if not isinstance(given, tuple | list | set | frozenset):
        raise OptionError(f"stop_token_ids must be a list of token ids, got {given!r}")
    return tuple(_whole("each of stop_token_ids", token, lowest=0) for token in given)
