"""The script behind `make certify-peers`: its cells, what it writes, when it repeats, goes on and starts anew."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from truedraft.errors import PeerError
from truedraft.measure.peers import Peer, PeerFacts, Question, Reply

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module("certify_peers")
    for name in ("certify_peers", "peers_engines"):
        sys.modules.pop(name, None)


class Silent(Peer):
    facts = PeerFacts("fake", "1.0")

    def answers(self, questions: Sequence[Question]) -> Iterator[tuple[int, Reply | PeerError]]:
        yield from enumerate(PeerError("says nothing") for _ in questions)


class Report:
    """What the script reads of a certificate."""

    def __init__(self, evidence: float, deviates: bool = False) -> None:
        self.evidence, self.failures = evidence, ["a check"] * deviates
        self.verdict = str(evidence)

    def as_dict(self) -> dict[str, Any]:
        return {
            "evidence": self.evidence, "undecided": [], "faults": [], "failures": self.failures,
            "tokens": 100, "allowance": 0.02, "findings": [{"smallest_detectable_tv": 0.05}],
        }  # fmt: skip


def test_every_engine_has_its_cells(script: ModuleType) -> None:
    """Plain and with drafts, at temperature 0, 0.8, 1 and with top-p 0.9, one request and eight where it takes them."""
    ways = script.engine_ways()
    cells = [cell for way in ways for cell in script.cells(way)]
    assert len({cell.key for cell in cells}) == len(cells)
    for engine in ("vllm", "llama.cpp", "transformers"):
        own = [cell for cell in cells if cell.engine == engine]
        assert len({cell.way for cell in own}) >= 3 and {cell.batch for cell in own} == {1, 8}
        for way in {cell.way for cell in own}:
            found = {(cell.temperature, cell.top_p) for cell in own if (cell.way, cell.batch) == (way, 1)}
            assert found == {(0.0, 1.0), (0.8, 1.0), (1.0, 1.0), (0.8, 0.9)}


def run(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    out: Path,
    outcomes: list[Any],
    *,
    opens: list[Any],
    more: str = "",
) -> tuple[int, list[dict[str, Any]], list[int]]:
    """One run over a fake engine's four cells; `opens` says of each start None or its error, of each check likewise."""
    seeds: list[int] = []

    @contextlib.contextmanager
    def opened(target: object) -> Iterator[Any]:
        error = opens.pop(0)
        if error is not None:
            raise error

        def check() -> None:
            if opens:
                raise PeerError("fake died")

        yield script.Running(lambda together, seed: Silent(), check, "fake --port {port}")

    def certify(peer: Peer, target: object, prompts: object, params: Any, **options: Any) -> Report:
        assert options["together"] == 1 and params.max_tokens == 24
        seeds.append(params.seed)
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return Report(*outcome)

    monkeypatch.setattr(script, "engine_ways", lambda: [script.EngineWay("fake", "plain", opened, (1,))])
    monkeypatch.setattr(script, "certify_engine", certify)
    monkeypatch.setattr(script.Bench, "load", lambda: script.Bench(None, None, None, []))
    monkeypatch.setattr(
        sys, "argv", ["certify_peers.py", "--out", str(out), *more.split("\t" if "\t" in more else None)]
    )
    status = script.main()
    return status, [json.loads(line) for line in out.read_text().splitlines()], seeds


def test_what_speaks_against_an_engine_is_repeated(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "peers.jsonl"
    outcomes = [(0.7,), (1e9, True), (1e7, True), (1e9, True), (3.0,), (2.0, True), (2.0, True)]
    status, lines, seeds = run(script, monkeypatch, out, outcomes, opens=[None])
    assert [line["verdict"] for line in lines] == [
        "no deviation found", "deviates", "suspicious: not certain twice", "suspicious: not certain twice",
    ]  # fmt: skip
    assert status == 1 and seeds == [0, 0, 1_000_000, 0, 1_000_000, 0, 1_000_000]
    assert lines[1]["evidence"] == [1e9, 1e7] and len(lines[1]["runs"]) == 2
    assert (
        lines[1]["reproduce"] == "python benchmarks/certify_peers.py --cell 'fake | plain | 0.8 | 1 | batch 1' --again"
    )
    assert lines[0]["version"] == "1.0" and lines[0]["smallest_detectable_tv"] == 0.05
    # All cells are there, so nothing is asked again, unless it is wanted.
    assert run(script, monkeypatch, out, [], opens=[])[0] == 0
    cell = "--again\t--cell\tfake | plain | 0.8 | 1 | batch 1"
    status, lines, seeds = run(script, monkeypatch, out, [(1.0,)], opens=[None], more=cell)
    assert (status, len(lines), seeds, lines[-1]["verdict"]) == (0, 5, [0], "no deviation found")


def test_engines_that_die_are_started_again_and_their_cells_tried_again(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "peers.jsonl"
    failed = PeerError("it went away")
    status, lines, _ = run(script, monkeypatch, out, [(1.0,), failed, (1.0,), (1.0,)], opens=[None, None])
    assert status == 3 and [line["verdict"] for line in lines].count("no deviation found") == 3
    assert lines[1]["verdict"] == "failed" and lines[1]["error"] == "it went away"
    status, lines, _ = run(script, monkeypatch, out, [(1.0,)], opens=[None])
    assert status == 0 and len(lines) == 5 and lines[-1]["cell"] == lines[1]["cell"]


def test_engines_that_do_not_start_leave_a_line_for_each_cell(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = PeerError("fake cannot start: there is no fake; `make certify-peers` makes it")
    status, lines, _ = run(script, monkeypatch, tmp_path / "peers.jsonl", [], opens=[missing])
    assert status == 3 and [line["error"] for line in lines] == [str(missing)] * 4


def test_cells_that_do_not_exist_are_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["certify_peers.py", "--out", str(tmp_path / "none"), "--cell", "x"])
    assert script.main() == 2 and "there is no cell 'x' left" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["certify_peers.py", "--out", str(tmp_path / "none"), "--list"])
    assert script.main() == 0 and "vllm | draft model | 0.8 | 0.9 | batch 8" in capsys.readouterr().out
