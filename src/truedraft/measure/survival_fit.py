"""Fit the acceptance probability of guesses to heads' outputs along a target's own text, by logistic regression."""

from __future__ import annotations

import torch
from torch import Tensor

from truedraft.drafters.heads.acceptance import RAW, AcceptanceOdds, Odds, log_odds

RANKS = 32
"""Guesses used for the fit; later ones follow the same line."""
POSITIONS = 4000
"""Positions that are enough for five numbers; more are subsampled evenly."""
_PRIOR = 1.0  # weight of the prior RAW, which is the estimate for depths that no text reaches
_ROUNDS = 40


def fit_survival(log_probs: Tensor, ranks: Tensor) -> AcceptanceOdds:
    """The most likely odds of acceptance at each depth, from positions at which the text followed the guesses above it.

    Args:
        log_probs: `[depth, positions, guesses]`: log probabilities of the heads' guesses, falling.
        ranks: `[positions, depth]`, int64, of the true tokens; the number of guesses or more where none was right;
            below 0 where no token is drafted.
    """
    found = []
    followed = torch.ones(len(ranks), dtype=torch.bool)
    for own, of_true in zip(log_probs, ranks.T, strict=True):
        rows = (followed & (of_true >= 0)).nonzero()[:, 0]
        found.append(_fit(own[rows], of_true[rows]))
        followed = followed & (of_true >= 0) & (of_true < own.shape[-1])
    return AcceptanceOdds(tuple(found))


def _fit(log_probs: Tensor, ranks: Tensor) -> Odds:
    """Fit one depth; coefficients that would reverse the order of guesses are held at 0.

    Args:
        log_probs: `[positions, guesses]`.
        ranks: `[positions]`.
    """
    every = max(1, -(-len(ranks) // POSITIONS))
    own, ranks = log_odds(log_probs[::every, :RANKS].double()), ranks[::every]
    number = torch.arange(own.shape[1])
    first = (number == 0).double().expand_as(own)
    columns = [first, 1.0 - first, number.clamp(min=1).double().log().expand_as(own), own, (1.0 - first) * own[:, :1]]
    known = torch.stack(columns, dim=-1).flatten(0, 1)  # [guesses, 5]
    right = (ranks[:, None] == number).double().flatten()
    free = list(range(5))
    while True:
        odds = _logistic(known, right, free)
        wrong = [name for name, sign in ((2, -1.0), (3, 1.0)) if odds[name] * sign < 0.0]
        if not wrong:
            return Odds(*odds)
        free = [name for name in free if name not in wrong]


def _logistic(known: Tensor, right: Tensor, free: list[int]) -> list[float]:
    """Logistic regression by Newton's method with a weak prior at the raw odds; coefficients not in `free` are 0."""
    prior = torch.tensor(RAW, dtype=torch.float64)[free]
    x, found = known[:, free], prior.clone()
    for _ in range(_ROUNDS):
        chance = (x @ found).sigmoid()
        slope = x.T @ (chance - right) + _PRIOR * (found - prior)
        bend = (x * (chance * (1.0 - chance))[:, None]).T @ x + _PRIOR * torch.eye(len(free), dtype=torch.float64)
        step = torch.linalg.solve(bend, slope)
        step = step * min(1.0, 4.0 / max(float(step.abs().max()), 1e-9))  # far off, a whole step may lead astray
        found = found - step
        if float(step.abs().max()) < 1e-8:
            break
    odds = torch.zeros(5, dtype=torch.float64)
    odds[free] = found
    return [float(each) for each in odds]
