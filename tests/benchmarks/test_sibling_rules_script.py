"""The script that compares rules for several draws: its sums are right by kernels and by linear programming."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from truedraft.core.proposal import DrawKind
from truedraft.verification import SpeculativeSampling
from truedraft.verification.exact import PlannedDraw, emitted_dist
from truedraft.verification.rule import Outcome

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sibling_rules.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def pairs() -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(3)
    return [(generator.dirichlet([a] * 4), generator.dirichlet([b] * 4)) for a in (0.3, 1, 5) for b in (0.3, 1, 5)]


def accepted(p: np.ndarray, q: np.ndarray, draws: int, kind: DrawKind) -> float:
    """By the rule's kernel over all that may be drawn."""

    class Counting(SpeculativeSampling):
        def outcomes(self, group: Any) -> list[Outcome]:
            """An accepted draft emits token 0, everything else token 1."""
            found = super().outcomes(group)
            return [Outcome(each.probability, (1 - each.accepted,), each.accepted) for each in found]

    plan = [PlannedDraw(0, torch.from_numpy(q), kind)] * draws
    dist = emitted_dist(Counting(), lambda prefix: torch.from_numpy(p), lambda prefix, drafted: plan, 1)
    return dist.get((0,), 0.0)


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_recursive_rejection(script: dict[str, Any], draws: int) -> None:
    for p, q in pairs():
        alone = accepted(p, q, draws, DrawKind.INDEPENDENT)
        assert script["independent"](p, q, draws) == pytest.approx(alone, abs=1e-12)
        without = accepted(p, q, draws, DrawKind.WITHOUT_REPLACEMENT)
        assert script["without_replacement"](p, q, draws) == pytest.approx(without, abs=1e-12)
        generator = np.random.default_rng(1)
        estimated = [script["estimated_without_replacement"](p, q, draws, generator) for _ in range(2000)]
        assert np.mean(estimated) == pytest.approx(without, abs=0.02)


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_k_seq_leaves_a_residual(script: dict[str, Any], draws: int) -> None:
    """What acceptance emits is at most p, and together they are p; with a smaller rho it would be more somewhere."""
    for p, q in pairs():
        share, rho = script["k_seq"](p, q, draws)
        assert 1.0 <= rho <= draws
        beta = np.minimum(p / rho, q).sum()
        emitted = np.minimum(p / rho, q) * (1.0 - (1.0 - beta) ** draws) / beta
        assert emitted.sum() == pytest.approx(share, abs=1e-12) and (emitted <= p + 1e-12).all()
        smaller = 0.99 * rho
        less = np.minimum(p / smaller, q).sum()
        assert rho == pytest.approx(1.0) or 1.0 - (1.0 - less) ** draws > smaller * less


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_the_bound_is_that_of_optimal_transport(script: dict[str, Any], draws: int) -> None:
    """By linear programming: mass flows from drawn tuples to the tokens that they hold, at most p(x) into each."""
    for p, q in pairs():
        tuples = list(itertools.product(range(4), repeat=draws))
        edges = [(number, token) for number, each in enumerate(tuples) for token in sorted(set(each))]
        rows = np.zeros((len(tuples) + 4, len(edges)))
        for place, (number, token) in enumerate(edges):
            rows[number, place] = rows[len(tuples) + token, place] = 1.0
        limits = np.concatenate([[q[list(each)].prod() for each in tuples], p])
        best = -linprog(-np.ones(len(edges)), A_ub=rows, b_ub=limits).fun
        assert script["bound"](p, q, draws) == pytest.approx(best, abs=1e-8)
        ways = script["independent"](p, q, draws), script["k_seq"](p, q, draws)[0]
        assert ways[0] <= ways[1] + 1e-9 <= best + 2e-9
        assert ways[1] >= (1.0 - 1.0 / np.e) * best


def test_chains_judged_by_k_seq_are_accepted_as_often_as_one_place_says(script: dict[str, Any]) -> None:
    """Over all tokens of the target, the shares that chains pass sum to the acceptance of as many draws."""
    for p, q in pairs():
        for count in (1, 2, 3):
            total = 0.0
            for token in range(4):
                draws = script["KSeqDraws"](count)
                draws.note(float(p[token]), torch.from_numpy(p), torch.from_numpy(q), token)
                total += float(p[token]) * float(draws.survival(0, 1)[0])
            assert total == pytest.approx(script["k_seq"](p, q, count)[0], abs=1e-9)


def test_random_rows_have_every_way(script: dict[str, Any]) -> None:
    rows = script["random_rows"](2)
    assert len(rows) == 18
    assert all(0.0 < row["independent"] <= row["k_seq"] + 1e-9 <= row["bound"] + 2e-9 for row in rows)
