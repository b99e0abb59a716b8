"""Odds of acceptance are found again in text that was drawn by them; noise is drawn that could have drawn a text."""

from __future__ import annotations

import pytest
import torch

from truedraft.drafters.heads.acceptance import AcceptanceOdds
from truedraft.kinds.medusa.traced_guesses import noise_behind
from truedraft.measure.replay import fit_survival, raw_is_kept

TRUE = AcceptanceOdds.of([[1.5, -1.5, -0.6, 0.8, -0.4], [0.5, -0.5, -0.2, 1.1, -0.2]])
POSITIONS, RANKS = 4000, 12


def drawn_by(survival: AcceptanceOdds) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probabilities `[heads, positions, ranks]`, and ranks that are right as often as survival says."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, POSITIONS, 40, generator=generator) * 2.0
    given = logits.log_softmax(-1).sort(dim=-1, descending=True).values[..., :RANKS]
    ranks = []
    for depth in (1, 2):
        chance = survival(given[depth - 1], depth).exp()
        chance = chance / chance.sum(-1, keepdim=True).clamp(min=1.0)
        missed = (1.0 - chance.sum(-1, keepdim=True)).clamp(min=0.0)
        ranks.append(torch.multinomial(torch.cat([chance, missed], dim=-1), 1, generator=generator)[:, 0])
    return given, torch.stack(ranks, dim=1)


def test_odds_are_found_again() -> None:
    given, ranks = drawn_by(TRUE)
    ranks[:, 1] = ranks[:, 1].where(ranks[:, 0] < RANKS, 0)  # the text left the guesses above: nothing to learn from
    fitted = fit_survival(given, ranks)
    for depth, rows in enumerate(given, 1):
        chance, found = TRUE(rows, depth).exp(), fitted(rows, depth).exp()
        kept = chance.sum(-1) < 1.0  # elsewhere they could not be drawn by
        assert (chance[kept] - found[kept]).abs().mean() < 0.01
    raw = AcceptanceOdds.of([[0, 0, 0, 1, 0]])
    assert (raw(given[0], 1).exp() - TRUE(given[0], 1).exp()).abs().mean() > 0.03


def test_numbers_keep_the_order_of_guesses() -> None:
    """Where unlikely guesses are accepted more often than likely ones, these numbers stay at 0."""
    given, _ = drawn_by(TRUE)
    last = torch.full((POSITIONS, 1), RANKS - 1)
    odds = fit_survival(given[:1], last).depths[0]
    assert odds.rank == 0.0 and odds.own >= 0.0


def test_without_text_guesses_are_as_likely_as_heads_say() -> None:
    given, ranks = drawn_by(TRUE)
    nothing = fit_survival(given, torch.full_like(ranks, -1))
    assert nothing.depths == ((0.0, 0.0, 0.0, 1.0, 0.0),) * 2


def test_noise_that_draws_a_text_again() -> None:
    """Given each drawn token it draws that one, and over all of them it is the Gumbel noise that it would have been."""
    generator = torch.Generator().manual_seed(2)
    log_probs = (torch.randn(1, 6, generator=generator) * 1.5).log_softmax(-1).expand(20_000, -1)
    tokens = torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]
    noise = noise_behind(log_probs, tokens, generator)
    assert torch.equal((log_probs + noise).argmax(dim=-1), tokens)
    # Gumbel variables: mean 0.5772, variance 1.6449; 20,000 of them stray by 0.009 and 0.028 (one deviation).
    assert noise.mean(dim=0).tolist() == pytest.approx([0.5772] * 6, abs=0.05)
    assert noise.var(dim=0).tolist() == pytest.approx([1.6449] * 6, abs=0.15)
    correlation = torch.corrcoef(noise.T) - torch.eye(6)
    assert correlation.abs().max() < 0.04


def test_when_the_heads_own_probabilities_stay() -> None:
    """At temperature 1 they are what heads learned: a little more is no reason to leave them."""
    little, much = {"calibrated": 2.01, "raw": 2.0}, {"calibrated": 2.03, "raw": 2.0}
    assert raw_is_kept(little, 1.0) and not raw_is_kept(little, 0.0) and not raw_is_kept(much, 1.0)
    assert raw_is_kept({"calibrated": 1.99, "raw": 2.0}, 0.0) and not raw_is_kept({}, 1.0)
