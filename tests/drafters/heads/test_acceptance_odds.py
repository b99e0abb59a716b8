"""Calibrated survival: odds by hand, an order that no numbers upset, and rows that do not see each other."""

from __future__ import annotations

import math

import pytest
import torch

from truedraft.drafters.heads.acceptance import AcceptanceOdds, Odds, numbers_of, scores_by
from truedraft.errors import OptionError

RAW = AcceptanceOdds.of([[0, 0, 0, 1, 0]])
FLAT = AcceptanceOdds.of([[3.0, -1.5, -1.4, 1.0, -1.0], [2.0, -1.0, -0.5, 0.8, -0.3]])


def log_probs(*shape: int, seed: int = 0) -> torch.Tensor:
    """Of the likeliest 7 of 11 ids."""
    logits = torch.randn(*shape, 11, generator=torch.Generator().manual_seed(seed)) * 3.0
    return logits.log_softmax(-1).sort(dim=-1, descending=True).values[..., :7]


def test_odds_by_hand() -> None:
    """Guesses of 0.5 and 0.25 have odds of 1 and 1/3; the second's log odds are -1.5 + log 1/3 - 1.0 log 1."""
    given = torch.tensor([0.5, 0.25, 0.125]).log()
    own = [0.0, math.log(1 / 3), math.log(1 / 7)]
    expected = [3.0, -1.5 + own[1], -1.5 - 1.4 * math.log(2) + own[2]]
    assert FLAT(given, 1).exp().tolist() == pytest.approx([1 / (1 + math.exp(-x)) for x in expected])
    assert FLAT(given, 2)[0].item() == pytest.approx(math.log(1 / (1 + math.exp(-2.0))))
    assert torch.equal(FLAT(given, 9), FLAT(given, 2)), "the last depth serves for deeper ones"


def test_the_heads_own_probabilities_are_a_special_case() -> None:
    given = log_probs(5)
    assert torch.allclose(RAW(given, 1), given, atol=1e-5)


def test_no_guess_survives_more_than_one_of_lower_rank() -> None:
    """Whatever was fitted: here the first guess is given worse odds than the others, and deep ranks none."""
    odd = AcceptanceOdds.of([[-5.0, 4.0, 0.0, 0.1, -2.0]])
    for survival in (RAW, FLAT, odd):
        found = survival(log_probs(200), 1)
        assert (found <= 0.0).all() and (found.diff(dim=-1) <= 0.0).all() and found.isfinite().all()
    impossible = torch.tensor([0.0, -1e30, -1e30])
    assert odd(impossible, 1).isfinite().all()


def test_a_row_depends_on_itself_alone() -> None:
    given = log_probs(37)
    together = FLAT(given, 1)
    assert all(torch.equal(FLAT(given[row : row + 1], 1)[0], together[row]) for row in range(37))


@pytest.mark.parametrize("shape", [(4, 3), (4,), (1, 8)], ids=["beams", "requests", "one"])
def test_requests_of_several_kinds_get_what_each_gets_alone(shape: tuple[int, ...]) -> None:
    kinds = [FLAT, None, RAW, FLAT][: shape[0]]
    for depth in (1, 2, 3):
        given = log_probs(*shape, seed=depth)
        found = scores_by(numbers_of(kinds, 3, 7, given.device))(given, depth)
        for row, kind in enumerate(kinds):
            assert torch.equal(found[row], given[row] if kind is None else kind(given[row], depth))
        assert scores_by(numbers_of([None, None], 3, 7, given.device))(given, depth) is given


def test_all_depths_at_once() -> None:
    given = log_probs(4, 5)
    assert FLAT.of_depths(given).equal(torch.stack([FLAT(own, depth) for depth, own in enumerate(given, 1)]))


def test_between_two_temperatures() -> None:
    cold, hot = AcceptanceOdds.of([[2, -2, -1, 1, 0]]), AcceptanceOdds.of([[0, 0, 0, 2, -1]])
    assert cold.between(hot, 0.25).depths == (Odds(1.5, -1.5, -0.75, 1.25, -0.25),)


@pytest.mark.parametrize(
    "depths",
    [[], [[1, 2, 3]], [[0, 0, 0.1, 1, 0]], [[0, 0, 0, -0.1, 0]], [[math.nan, 0, 0, 1, 0]], [[0, 0, 0, 1e9, 0]], 3, [3]],
)
def test_what_has_no_order_is_refused(depths: object) -> None:
    with pytest.raises(OptionError, match="odds of acceptance are"):
        AcceptanceOdds.of(depths)  # type: ignore[arg-type]
