"""Predicted speed-up: in the limit where rows are free it is the published form."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from truedraft.core.theory import (
    AcceptanceCurve,
    SizeOption,
    best_gamma,
    best_option,
    expected_tokens,
    predicted_speedup,
    size_options,
    speedup,
)
from truedraft.errors import OptionError


def best_length(
    alpha: float, verify_s: Callable[[int], float], draft_s: Callable[[int], float], limit: int = 16
) -> SizeOption:
    """The chain that pays best, of tokens that are accepted with probability alpha, independently."""
    curve = AcceptanceCurve(tuple(alpha**place for place in range(1, limit + 1)), tuple(range(limit + 1)))
    return best_option(size_options(curve, verify_s, draft_s))


def test_worked_value() -> None:
    # 3 tokens a call; a call takes 1.2 plain steps, its draft 0.3.
    assert predicted_speedup(3.0, plain_s=0.010, verify_s=0.012, draft_s=0.003) == pytest.approx(2.0)


@pytest.mark.parametrize("alpha", [0.12, 0.55, 0.8, 0.95])
@pytest.mark.parametrize("c", [0.01, 0.1, 0.5, 0.9])
def test_where_rows_are_free_it_is_the_published_speedup(alpha: float, c: float) -> None:
    plain_s = 0.02
    choice = best_length(alpha, lambda rows: plain_s, lambda length: length * c * plain_s, limit=40)
    assert choice.nodes == best_gamma(alpha, c, limit=40)
    assert choice.speedup == pytest.approx(speedup(alpha, choice.nodes, c))
    assert choice.expected_tokens == pytest.approx(expected_tokens(alpha, choice.nodes))


def test_rows_that_cost_shorten_the_draft() -> None:
    free = best_length(0.8, lambda rows: 1.0, lambda length: 0.02 * length)
    dear = best_length(0.8, lambda rows: 1.0 + 0.2 * (rows - 1), lambda length: 0.02 * length)
    full = best_length(0.8, lambda rows: float(rows), lambda length: 0.02 * length)
    assert free.nodes > dear.nodes > full.nodes
    assert full == SizeOption(0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: predicted_speedup(-1.0, 1.0, 1.0, 0.0), "tau must be"),
        (lambda: predicted_speedup(1.0, 0.0, 1.0, 0.0), "plain_s must be a number above 0, got 0.0"),
        (lambda: predicted_speedup(1.0, 1.0, 0.0, 0.0), "verify_s"),
        (lambda: predicted_speedup(1.0, 1.0, 1.0, -1.0), "draft_s"),
    ],
)
def test_bad_arguments(call: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()  # type: ignore[operator]
