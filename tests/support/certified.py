"""Drafters held to the checks of a certificate, by a clock that only steps move: the same on every machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from support.virtual_time import VirtualTime
from truedraft import SamplingParams
from truedraft.certify.checks import Check, Context, Stack, Status
from truedraft.certify.equality import Equality
from truedraft.certify.invariance import Invariance
from truedraft.certify.statistics import Statistics

SAMPLED = SamplingParams(max_tokens=24, temperature=1.0)
TOKENS: tuple[tuple[SamplingParams, Check], ...] = tuple(
    (params, check)
    for params in (SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1.0, seed=2))
    for check in (Equality(), Invariance())
)
"""Greedy and seeded requests answer as plain decoding does, alone as in batches."""


def assert_certified(
    monkeypatch: pytest.MonkeyPatch,
    stack: Stack,
    texts: Sequence[list[int]],
    checks: Iterable[tuple[SamplingParams, Check]] = (*TOKENS, (SAMPLED, Statistics())),
) -> None:
    """Each check holds or does not apply, and something of it holds; 200 steps for each, in batches of three."""
    VirtualTime(monkeypatch, step_s=0.001)
    for params, check in checks:
        found = list(check.run(Context(stack, texts, params, 3, 0.2)))
        told = [each.summary for each in found]
        assert Status.HOLDS in {each.status for each in found}, told
        assert {each.status for each in found} <= {Status.HOLDS, Status.DOES_NOT_APPLY}, told
