"""Counts against the distribution that they should follow."""

from __future__ import annotations

import numpy as np
from scipy import stats


def p_value(counts: np.ndarray, dist: np.ndarray) -> float:
    """Chi-square p-value of counts under a distribution; cells with fewer than 10 expected are merged into one."""
    expected = dist.ravel() * counts.sum()
    observed = counts.ravel()
    rare = expected < 10
    groups_expected = np.append(expected[~rare], expected[rare].sum())
    groups_observed = np.append(observed[~rare], observed[rare].sum())
    if groups_expected[-1] == 0.0:
        if groups_observed[-1]:
            return 0.0  # something impossible was emitted
        groups_expected, groups_observed = groups_expected[:-1], groups_observed[:-1]
    statistic = float(((groups_observed - groups_expected) ** 2 / groups_expected).sum())
    return float(stats.chi2.sf(statistic, df=len(groups_expected) - 1))
