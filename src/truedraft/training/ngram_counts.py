"""Counting n-grams, and the distributions that interpolated Kneser-Ney smoothing makes of the counts.

Kneser and Ney 1995, in the interpolated form of Chen and Goodman 1999 with one discount D a level:

    P(w | h) = max(c(h w) - D, 0) / c(h) + backoff(h) P(w | h without its first token)

where c counts occurrences at the longest n-grams, and below them how many different tokens preceded an n-gram (the
start of a text is one more); D = n1 / (n1 + 2 n2) of the n-grams that were counted once and twice; and backoff(h) is
the rest of 1 after the n-grams in the table, so that P is a distribution even if n-grams were left out for size.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truedraft.drafters.ngram.table import MOST_ORDER, Level, NgramTable, TableFacts, table_bytes
from truedraft.errors import DataError, OptionError

_LEAST_DISCOUNT, _MOST_DISCOUNT = 0.1, 0.9
_ALWAYS_KEPT = 2  # tokens of n-grams that are never left out, because longer n-grams need their nodes


@dataclass(frozen=True, slots=True)
class _Counted:
    """The n-grams of one length in a text, sorted by their tokens, each `[n-grams]`.

    Attributes:
        tokens: their last tokens.
        prefixes: the index of each n-gram without its last token.
        suffixes: the index of each n-gram without its first token.
        weights: c of the formula.
    """

    times: NDArray[np.int64]
    tokens: NDArray[np.int64]
    prefixes: NDArray[np.int64]
    suffixes: NDArray[np.int64]
    weights: NDArray[np.int64]


def count_ngrams(
    texts: Sequence[Sequence[int] | NDArray[np.integer[Any]]],
    vocab_size: int,
    order: int,
    *,
    min_count: int = 1,
    max_bytes: int | None = None,
    tokenizer: str = "",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> NgramTable:
    """Make a table of texts.

    Args:
        texts: token ids below `vocab_size`; no n-gram crosses from one into the next.
        min_count: n-grams of three or more tokens that occur less often are left out, and their mass is backed off.
        max_bytes: limit of the table's arrays; `min_count` is raised until they fit.
        tokenizer: fingerprint of the ids.
        on_progress: called with the number of finished passes over the n-grams, and of all.

    Raises:
        DataError: there is no token, or n-grams of one and two tokens already take more bytes.
        OptionError: the order is out of range.
    """
    if not 1 <= order <= MOST_ORDER:
        raise OptionError(f"must be 1 or more and at most {MOST_ORDER}, got {order}", field="order")
    if not any(len(text) for text in texts):
        raise DataError("the text has no token; give more text")
    passes = itertools.count(1)

    def done() -> None:
        on_progress(next(passes), 2 * order)

    counted = _count(texts, vocab_size, order, done)
    min_count = _fitting(counted, min_count, max_bytes)
    facts = TableFacts(vocab_size, tokenizer, int(counted[0].times.sum()), min_count)
    weights = counted[0].weights.astype(np.float64)
    probs = [weights / weights.sum()]
    kept = [np.ones(vocab_size, bool)]
    backoffs: list[NDArray[np.float64]] = []
    for length, (shorter, own) in enumerate(itertools.pairwise(counted), start=2):
        keep = own.times >= (1 if length <= _ALWAYS_KEPT else min_count)
        contexts = len(shorter.times)
        given = np.bincount(own.prefixes, own.weights, contexts)
        seen = np.maximum(own.weights - _discount(own.weights), 0.0) / given[own.prefixes] * keep
        backoffs.append(np.clip(1.0 - np.bincount(own.prefixes, seen, contexts), 0.0, 1.0))
        probs.append(seen + backoffs[-1][own.prefixes] * probs[-1][own.suffixes])
        kept.append(keep)
        done()
    levels = _levels(counted, probs, kept, backoffs)
    done()
    return NgramTable(facts, levels)


def _fitting(counted: Sequence[_Counted], min_count: int, max_bytes: int | None) -> int:
    """The smallest count, at least `min_count`, with which the table fits."""
    if max_bytes is None:
        return min_count
    times = [np.sort(own.times) for own in counted]

    def size(least: int) -> int:
        return table_bytes(
            [
                len(own) if length <= _ALWAYS_KEPT else len(own) - int(np.searchsorted(own, least))
                for length, own in enumerate(times, start=1)
            ]
        )

    none_left = max(min_count, *(int(own[-1]) for own in times)) + 1
    if size(none_left) > max_bytes:
        raise DataError(
            f"n-grams of up to {min(_ALWAYS_KEPT, len(counted))} tokens alone take {size(none_left):,} bytes, and "
            f"{max_bytes:,} are allowed; allow more, or give less text"
        )
    return bisect_left(range(none_left + 1), True, lo=min_count, key=lambda least: size(least) <= max_bytes)


def _discount(weights: NDArray[np.int64]) -> float:
    once, twice = (int(np.count_nonzero(weights == times)) for times in (1, 2))
    share = once / (once + 2 * twice) if once else 0.0
    return min(max(share, _LEAST_DISCOUNT), _MOST_DISCOUNT)


def _count(
    texts: Sequence[Sequence[int] | NDArray[np.integer[Any]]], vocab_size: int, order: int, done: Callable[[], None]
) -> list[_Counted]:
    """Occurrences and weights of all n-grams; those of one token are all ids, whether they occur or not."""
    ids = np.concatenate([np.asarray(text, np.int64) for text in texts])
    depth = np.concatenate([np.arange(len(text)) for text in texts])  # tokens before each in its text
    none = np.zeros(0, np.int64)
    times = np.bincount(ids, minlength=vocab_size)
    counted = [_Counted(times, np.arange(vocab_size), none, none, times)]
    nodes = ids  # of the n-gram that ends at each place
    done()
    for length in range(2, order + 1):
        ends = np.flatnonzero(depth >= length - 1)
        keys, places, numbers, times = np.unique(
            nodes[ends - 1] * vocab_size + ids[ends], return_index=True, return_inverse=True, return_counts=True
        )
        suffixes = nodes[ends[places]]
        counted[-1] = _continued(counted[-1], suffixes, nodes[depth == length - 2])
        counted.append(_Counted(times, keys % vocab_size, keys // vocab_size, suffixes, times))
        nodes = np.full(len(ids), -1)
        nodes[ends] = numbers
        done()
    return counted


def _continued(own: _Counted, suffixes: NDArray[np.int64], starts: NDArray[np.int64]) -> _Counted:
    """N-grams shorter than the longest: each is weighted by the number of different tokens before it."""
    size = len(own.times)
    begun = np.bincount(starts, minlength=size) > 0
    return _Counted(own.times, own.tokens, own.prefixes, own.suffixes, np.bincount(suffixes, minlength=size) + begun)


def _levels(
    counted: Sequence[_Counted],
    probs: Sequence[NDArray[np.float64]],
    kept: Sequence[NDArray[np.bool_]],
    backoffs: Sequence[NDArray[np.float64]],
) -> list[Level]:
    """The arrays of a table, without the n-grams that are left out.

    Args:
        probs: probabilities of these n-grams.
        kept: whether each is in the table.
        backoffs: of those that are contexts.
    """
    levels: list[Level] = []
    empty: NDArray[Any] = np.zeros(0)
    top = int(probs[0].argmax())
    best = np.array([top]), probs[0][[top]]  # after each context of the level above
    for number, own in enumerate(counted):
        keep = kept[number]
        first = tokens = backoff = found = found_probs = empty
        if number:
            above = np.cumsum(kept[number - 1]) - 1
            prefixes = above[own.prefixes[keep]]
            first = np.searchsorted(prefixes, np.arange(int(kept[number - 1].sum()) + 1))
            tokens = own.tokens[keep]
        if number + 1 < len(counted):
            suffixes = own.suffixes if number else np.zeros(len(own.times), np.int64)
            longer = counted[number + 1]
            best = _best(best, suffixes, backoffs[number], longer, probs[number + 1], kept[number + 1])
            backoff, found, found_probs = backoffs[number][keep], best[0][keep], best[1][keep]
        levels.append(
            Level(
                probs[number][keep].astype(np.float32),
                tokens.astype(np.int32),
                first.astype(np.int64),
                backoff.astype(np.float32),
                found.astype(np.int32),
                found_probs.astype(np.float32),
            )
        )
    return levels


def _best(
    shorter: tuple[NDArray[np.int64], NDArray[np.float64]],
    suffixes: NDArray[np.int64],
    backoff: NDArray[np.float64],
    longer: _Counted,
    probs: NDArray[np.float64],
    keep: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The likeliest token after each context, and its probability.

    It is the likeliest one in the table, or else the likeliest after the shorter context: if that one were in the
    table, too, its probability would be higher than what is backed off to it.

    Args:
        shorter: the result for contexts that are one token shorter.
        suffixes: indices of the shorter contexts.
        longer: the n-grams of these contexts and one token.
        keep: whether each longer n-gram is in the table.
    """
    tokens, likely = shorter[0][suffixes], backoff * shorter[1][suffixes]
    prefixes, own_tokens, own_probs = longer.prefixes[keep], longer.tokens[keep], probs[keep]
    order = np.lexsort((own_tokens, -own_probs, prefixes))
    contexts, places = np.unique(prefixes[order], return_index=True)
    chosen = order[places]
    better = own_probs[chosen] >= likely[contexts]
    tokens[contexts[better]] = own_tokens[chosen[better]]
    likely[contexts[better]] = own_probs[chosen[better]]
    return tokens, likely
