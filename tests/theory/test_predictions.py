"""Predicted speed-up and goodput: in the limit where rows are free they are the published forms."""

from __future__ import annotations

import pytest

from truedraft.errors import OptionError
from truedraft.theory import (
    GoodputChoice,
    SizeOption,
    best_gamma,
    best_length,
    best_length_under_load,
    expected_tokens,
    goodput,
    predicted_speedup,
    speedup,
)


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


def test_goodput_by_hand() -> None:
    # Two requests, one token drafted each: 1.5 + 1.9 tokens in 0.02 s.
    assert goodput([0.5, 0.9], 1, 0.02) == pytest.approx(170.0)
    assert goodput([0.5, 0.9], 0, 0.01) == pytest.approx(200.0)


def test_load_shortens_the_draft_down_to_none() -> None:
    """Up to 16 rows a forward costs the same, beyond that in proportion; a draft token costs a twentieth of it."""

    def choice(requests: int) -> GoodputChoice:
        def step_s(length: int) -> float:
            return max(1.0, requests * (length + 1) / 16) + 0.05 * length

        return best_length_under_load([0.7] * requests, step_s)

    lengths = [choice(requests).length for requests in (1, 4, 8, 16, 64)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= 3
    assert lengths[-1] == 0
    assert choice(64).tokens_per_s == pytest.approx(16.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: predicted_speedup(-1.0, 1.0, 1.0, 0.0), "tau must be"),
        (lambda: predicted_speedup(1.0, 0.0, 1.0, 0.0), "plain_s must be a number above 0, got 0.0"),
        (lambda: predicted_speedup(1.0, 1.0, 0.0, 0.0), "verify_s"),
        (lambda: predicted_speedup(1.0, 1.0, 1.0, -1.0), "draft_s"),
        (lambda: best_length(0.5, lambda rows: -1.0, lambda length: 0.0), "plain_s"),
        (lambda: best_length(0.5, lambda rows: 1.0, lambda length: 0.0, limit=-1), "limit"),
        (lambda: goodput([], 1, 1.0), "at least one request"),
        (lambda: goodput([0.5], 1, 0.0), "step_s"),
        (lambda: best_length_under_load([], lambda length: 1.0), "at least one request"),
    ],
)
def test_bad_arguments(call: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        call()  # type: ignore[operator]
