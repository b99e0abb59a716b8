"""Certificates of processes: sound ones hold, and every broken coupling is found."""

from __future__ import annotations

import pytest
import torch

from process.worlds import Letters, Walk, Wells
from truedraft.certify.processes import (
    AlikeCovariances,
    AlwaysKept,
    DiscreteDrawnAgain,
    GaussianDrawnAgain,
    SeenNoise,
    WrongAxis,
    certify_process,
    planted,
)
from truedraft.errors import OptionError
from truedraft.process import Cheaper, LastOutput, Process, Stays

FAR = Cheaper(lambda points, steps: -3.0 * points + 2.0)
"""A draft for wells that is often rejected."""


def certified(process: Process, steps: int = 30, seed: int = 1):
    wells = Wells().start(1).expand(200, -1)
    return certify_process(process, wells, steps, draft=FAR, seed=seed)


@pytest.mark.parametrize("spread", [0.0, 0.4], ids=["equal", "unequal"])
def test_steps_of_sound_gaussians_hold(spread: float) -> None:
    report = certified(Wells(spread=spread))
    assert report.holds and report.p_value > 0.01 and report.steps == 2 * 200 * 30 and report.accepted > 1000


@pytest.mark.parametrize("fault", [WrongAxis, GaussianDrawnAgain, SeenNoise])
def test_broken_gaussian_couplings_are_found(fault: type[Process]) -> None:
    assert certified(planted(Wells(), fault)).certainly_fails


def test_covariances_taken_as_equal_are_found() -> None:
    assert certified(planted(Wells(spread=0.4), AlikeCovariances)).certainly_fails


def test_steps_of_letters_hold_and_a_draw_from_the_target_is_found() -> None:
    start = torch.zeros(400, dtype=torch.int64)
    report = certify_process(Letters(), start, 30, draft=Letters.draft)
    assert report.holds and report.same_path is None
    assert certify_process(planted(Letters(), DiscreteDrawnAgain), start, 30, draft=Letters.draft).certainly_fails


def test_paths_under_shared_noise_are_compared() -> None:
    process = Walk(0.8)
    start = process.initial(torch.zeros(4, 3, dtype=torch.float64))
    report = certify_process(process, start, 40, draft=Stays())
    assert report.same_path is True and report.holds
    assert certify_process(planted(process, AlwaysKept), start, 40, draft=Stays()).same_path is False


def test_a_certificate_without_a_window_is_refused() -> None:
    with pytest.raises(OptionError, match="windows"):
        certify_process(Wells(), Wells().start(), 5, draft=LastOutput(), windows=())
