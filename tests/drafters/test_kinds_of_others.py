"""Kinds of drafters that other packages bring by entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from truedraft.drafters import kinds
from truedraft.drafters.kinds import KINDS


def test_one_that_cannot_be_imported_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = {*KINDS}  # found before entry points are replaced, whichever tests ran before
    mine = [EntryPoint("broken", "no_such_package:KINDS", "truedraft.kinds")]
    mine += [EntryPoint("linear", "truedraft.kinds.dflash2:MORE", "truedraft.kinds")]
    monkeypatch.setattr("truedraft.kinds.dflash2.MORE", {"linear": KINDS["dflash2"]}, raising=False)
    monkeypatch.setattr(kinds.metadata, "entry_points", lambda group: mine)
    found = kinds._Kinds()
    assert set(found) == {*known, "linear"} and found["linear"] is KINDS["dflash2"]
    (record,) = caplog.records
    assert "the kind of drafters 'broken' of no_such_package:KINDS is left out" in record.getMessage()
