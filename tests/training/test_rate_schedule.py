"""Warm-up, stable stretch, decay."""

from __future__ import annotations

import pytest

from truedraft.training.optimizer import WarmupStableDecay


def test_values():
    schedule = WarmupStableDecay(warmup_steps=4, stable_steps=10, decay_steps=3)
    assert [schedule(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert [schedule(step) for step in range(4, 10)] == [1.0] * 6
    assert [schedule(step) for step in range(10, 13)] == pytest.approx([1 - 0.25**0.5, 1 - 0.5**0.5, 1 - 0.75**0.5])
    assert schedule.total_steps == 13
    assert schedule(1000) == 0.0


def test_floor():
    schedule = WarmupStableDecay(1, 1, 1, floor=0.1)
    assert schedule(10_000) == pytest.approx(0.1)


def test_the_stable_stretch_does_not_know_when_the_decay_begins():
    short, long = WarmupStableDecay(4, 10, 5), WarmupStableDecay(4, 100, 50)
    assert [short(step) for step in range(10)] == [long(step) for step in range(10)]


def test_a_run_shorter_than_its_warm_up():
    assert WarmupStableDecay(10, 2, 1)(0) == pytest.approx(0.1)
