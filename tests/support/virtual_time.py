"""A clock for certificates that only engines' steps move, so that what they come to does not depend on the machine."""

from __future__ import annotations

import pytest

from truedraft import Engine
from truedraft.certify import checks


class VirtualTime:
    """Stands in for the clock of `truedraft.certify`.

    Args:
        monkeypatch: puts the clock back.
        step_s: seconds that a step of any engine takes.

    Attributes:
        seconds: that have passed.
        step_s: may be changed on the way.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
        self.seconds = 0.0
        self.step_s = step_s
        step = Engine.step

        def counted(engine: Engine) -> bool:
            self.seconds += self.step_s
            return step(engine)

        monkeypatch.setattr(Engine, "step", counted)
        monkeypatch.setattr(checks, "now", lambda: self.seconds)
