"""Models that record their forwards on the host, and a clock that only their forwards move, as a GPU's would.

The first forward of a shape takes five times as long as those that are replayed, and one that is being recorded
fifteen times. Which is which is seen at the recorder, not asked of `warmups`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from support.backends import HostRecorder, llama_of
from support.fake_times import FakeClock
from support.tiny_models import build, llama
from truedraft.engine import engine, failures, request, step
from truedraft.engine.policy import kept
from truedraft.models.backends.graphs import GraphBackend
from truedraft.models.base import ForwardOutput, Segment
from truedraft.models.huggingface import HuggingFaceModel

UNRECORDED, RECORDING = 5.0, 15.0
_LONGEST = 64  # longer segments never are recorded


class TimedBackend(GraphBackend):
    """Its forwards take known seconds.

    Args:
        module: what runs.
        clock: is moved.
        seconds: of a replay, by rows.
        forgets: whether no recording is ever used, so that every forward is as a first one.
    """

    def __init__(
        self, module: PreTrainedModel, clock: FakeClock, seconds: Callable[[int], float], forgets: bool = False
    ) -> None:
        self.recorder = HostRecorder()
        super().__init__(llama_of(module), self.recorder)
        self.forwards = 0
        self._clock, self._seconds, self._forgets = clock, seconds, forgets

    @property
    def warmups(self) -> int:  # type: ignore[override]
        return self.forwards if self._forgets else super().warmups

    def forward(self, segments: Sequence[Segment], device: torch.device, layers: Sequence[int] = ()) -> ForwardOutput:
        self.forwards += 1
        recorded, replayed = self._seen()
        output = super().forward(segments, device, layers)
        more, again = self._seen()
        factor = RECORDING if more > recorded else 1.0 if again > replayed else UNRECORDED
        if self._forgets:
            factor = UNRECORDED
        elif max(len(segment.tokens) for segment in segments) > _LONGEST:
            factor = 1.0
        self._clock.now += factor * self._seconds(sum(len(segment.tokens) for segment in segments))
        return output

    def _seen(self) -> tuple[int, int]:
        return len(self.recorder.made), sum(each.replays for each in self.recorder.made)


def recorded_model(
    name: str, clock: FakeClock, seconds: Callable[[int], float], *, positions: int = 512, forgets: bool = False
) -> HuggingFaceModel:
    """A small Llama, the same weights for every name."""
    module = build(llama(intermediate_size=64, max_position_embeddings=positions), seed=3)
    made = partial(TimedBackend, clock=clock, seconds=seconds, forgets=forgets)
    return HuggingFaceModel(module, None, name, made)


def go_by(clock: FakeClock, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let engines take their time from a clock, for steps, drafts and what is measured; costs are kept in a folder."""
    for module in (step, failures, request, kept):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(engine, "RunningTimes", partial(engine.RunningTimes, clock=clock))
    monkeypatch.setattr(kept, "measure_target", partial(kept.measure_target, clock=clock))
    monkeypatch.setattr(kept, "measure_drafter", partial(kept.measure_drafter, clock=clock))
    monkeypatch.setattr(kept, "TargetTimes", partial(kept.TargetTimes, clock=clock))
    monkeypatch.setattr(kept, "DrafterTimes", partial(kept.DrafterTimes, clock=clock))
    monkeypatch.setattr(kept, "run_delay_s", lambda: 0.0)
    monkeypatch.setattr(kept, "cache_folder", lambda: folder)
