"""How a request wants its tokens drawn. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

from truedraft.errors import OptionError
from truedraft.options import check_whole, flag, option


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

    max_tokens: int = option(128, "The most new tokens to write.", "N")
    temperature: float = option(0.0, "0 always takes the likeliest token (greedy).", "T")
    top_k: int = option(0, "Keep the K likeliest tokens; 0 keeps all.", "K")
    top_p: float = option(1.0, "Keep the likeliest tokens until their mass reaches P.", "P")
    min_p: float = option(0.0, "Drop tokens less likely than P times the likeliest.", "P")
    seed: int | None = option(None, "The same seed, the same answer.", "S", shown_default="drawn")
    coupled: bool = flag(
        "Draw each token by noise that its seed, place and id decide, for target and drafter alike: then a seed gives "
        "the same answer with every drafter and with none, at the cost of some accepted drafts. Without it a seed's "
        "answer depends on the drafter, though its distribution does not."
    )
    stop: tuple[str, ...] = option(
        (), r"End before this text, which may hold \n, \t, \\ and \uXXXX; may be repeated.", "TEXT"
    )
    stop_token_ids: tuple[int, ...] = option((), "End before this token; may be repeated.", "N", name="--stop-token-id")
    ignore_eos: bool = flag("Go on past the end of text.")

    def __post_init__(self) -> None:
        """Refuse values out of range; accept one stop text, and lists for tuples."""
        checked = {
            "stop": _texts(self.stop),
            "stop_token_ids": _ids(self.stop_token_ids),
            "max_tokens": check_whole("max_tokens", self.max_tokens, 1),
            "top_k": check_whole("top_k", self.top_k, 0),
            "temperature": _number("temperature", self.temperature, lambda value: 0.0 <= value < math.inf, "0 or more"),
            "top_p": _number("top_p", self.top_p, lambda value: 0.0 < value <= 1.0, "in (0, 1]"),
            "min_p": _number("min_p", self.min_p, lambda value: 0.0 <= value <= 1.0, "in [0, 1]"),
            "coupled": _truth("coupled", self.coupled),
            "ignore_eos": _truth("ignore_eos", self.ignore_eos),
            "seed": None if self.seed is None else check_whole("seed", self.seed, 0),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.seed is not None and self.seed >= 1 << 64:
            raise OptionError(f"must lie below 2^64, got {self.seed}", field="seed")

    @property
    def greedy(self) -> bool:
        """Whether the distribution of every node is one-hot."""
        return self.temperature == 0.0

    @property
    def private(self) -> bool:
        """Whether others may share its noise, sampled, with a seed that somebody chose: what becomes of its drafts must
        decide nothing about them (DESIGN section 2, predictable choice)."""
        return not (self.greedy or self.coupled or self.seed is None)

    @property
    def probs_key(self) -> tuple[float, int, float, float]:
        """What the distribution of a node depends on, beside its logits: equal keys share one computation."""
        return self.temperature, self.top_k, self.top_p, self.min_p


def _number(name: str, value: object, valid: Callable[[float], bool], expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not valid(float(value)):
        raise OptionError(f"must be a number, {expected}, got {value!r}", field=name)
    return float(value)


def _truth(name: str, value: object) -> bool:
    if not isinstance(value, bool) and str(getattr(value, "dtype", "")) != "bool":  # as numpy's own is
        raise OptionError(f"must be True or False, got {value!r}", field=name)
    return bool(value)


def _texts(given: object) -> tuple[str, ...]:
    """Stop texts as a tuple; one text stands for itself."""
    texts = (given,) if isinstance(given, str) else given
    if not isinstance(texts, tuple | list) or not all(isinstance(text, str) for text in texts):
        raise OptionError(f"must be a text or a list of texts, got {given!r}", field="stop")
    if "" in texts:
        raise OptionError("holds an empty text, which would end every answer at once; remove it", field="stop")
    return tuple(texts)


def _ids(given: object) -> tuple[int, ...]:
    """Stop ids as a tuple."""
    if not isinstance(given, tuple | list | set | frozenset):
        raise OptionError(f"must be a list of token ids, got {given!r}", field="stop_token_ids")
    return tuple(check_whole("stop_token_ids", token, 0) for token in given)
