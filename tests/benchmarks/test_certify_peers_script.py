"""The script behind `make certify-peers`: its cells, what it writes, when it repeats, goes on and starts anew."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import certify_peers as script
from truedraft.errors import PeerError
from truedraft.measure.peers import Peer, PeerFacts, Question, Reply


class Silent(Peer):
    facts = PeerFacts("fake", "1.0")

    def answers(self, questions: Sequence[Question]) -> Iterator[tuple[int, Reply | PeerError]]:
        yield from enumerate(PeerError("says nothing") for _ in questions)


Run = Callable[..., tuple[int, list[dict[str, Any]], list[int]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The script over a fake engine's four cells.

    `outcomes` are evidence of certificates, or errors; `opens` says of each start None or its error, of each check
    likewise. Gives the status, all lines of the file, and the seeds that were asked with.
    """

    def run(outcomes: list[Any], opens: list[Any], *more: str) -> tuple[int, list[dict[str, Any]], list[int]]:
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

        def certify(peer: Peer, target: object, prompts: object, params: Any, **options: Any) -> Any:
            assert options["together"] == 1 and params.max_tokens == 24
            seeds.append(params.seed)
            outcome = outcomes.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            record = {
                "evidence": abs(outcome), "undecided": [], "faults": [], "failures": ["a check"] * (outcome < 0),
                "tokens": 100, "allowance": 0.02, "findings": [{"smallest_detectable_tv": 0.05}],
            }  # fmt: skip
            return SimpleNamespace(failures=record["failures"], verdict="so", as_dict=lambda: record)

        monkeypatch.setattr(script, "engine_ways", lambda: [script.EngineWay("fake", "plain", opened, (1,))])
        monkeypatch.setattr(script, "certify_engine", certify)
        monkeypatch.setattr(script.Bench, "load", lambda: script.Bench(None, None, None, []))
        out = tmp_path / "peers.jsonl"
        monkeypatch.setattr(sys, "argv", ["certify_peers.py", "--out", str(out), *more])
        status = script.main()
        return status, [json.loads(line) for line in out.read_text().splitlines()], seeds

    return run


def test_every_engine_has_its_cells() -> None:
    """Plain and with drafts, at temperature 0, 0.8, 1 and with top-p 0.9, one request and eight where it takes them."""
    cells = [cell for way in script.engine_ways() for cell in script.cells(way)]
    assert len({cell.key for cell in cells}) == len(cells)
    for engine in ("vllm", "llama.cpp", "transformers"):
        own = [cell for cell in cells if cell.engine == engine]
        assert len({cell.way for cell in own}) >= 3 and {cell.batch for cell in own} == {1, 8}
        for way in {cell.way for cell in own}:
            found = {(cell.temperature, cell.top_p) for cell in own if (cell.way, cell.batch) == (way, 1)}
            assert found == {(0.0, 1.0), (0.8, 1.0), (1.0, 1.0), (0.8, 0.9)}


def test_what_speaks_against_an_engine_is_repeated(run: Run) -> None:
    """Evidence below 0 is of a failed check."""
    status, lines, seeds = run([0.7, -1e9, -1e7, -1e9, 3.0, -2.0, -2.0], [None])
    assert [line["verdict"] for line in lines] == [
        "no deviation found", "deviates", "suspicious: not certain twice", "suspicious: not certain twice",
    ]  # fmt: skip
    assert status == 1 and seeds == [0, 0, 1_000_000, 0, 1_000_000, 0, 1_000_000]
    assert lines[1]["evidence"] == [1e9, 1e7] and len(lines[1]["runs"]) == 2
    cell = "fake | plain | 0.8 | 1 | batch 1"
    assert lines[1]["reproduce"] == f"python benchmarks/certify_peers.py --cell '{cell}' --again"
    assert lines[0]["version"] == "1.0" and lines[0]["smallest_detectable_tv"] == 0.05
    assert run([], [])[0] == 0, "all cells are there"
    status, lines, seeds = run([1.0], [None], "--again", "--cell", cell)
    assert (status, len(lines), seeds, lines[-1]["verdict"]) == (0, 5, [0], "no deviation found")


def test_engines_that_die_are_started_again_and_their_cells_tried_again(run: Run) -> None:
    status, lines, _ = run([1.0, PeerError("it went away"), 1.0, 1.0], [None, None])
    assert status == 3 and [line["verdict"] for line in lines].count("no deviation found") == 3
    assert lines[1]["verdict"] == "failed" and lines[1]["error"] == "it went away"
    status, lines, _ = run([1.0], [None])
    assert status == 0 and len(lines) == 5 and lines[-1]["cell"] == lines[1]["cell"]


def test_engines_that_do_not_start_leave_a_line_for_each_cell(run: Run) -> None:
    missing = PeerError("fake cannot start: there is no fake; `make certify-peers` makes it")
    status, lines, _ = run([], [missing])
    assert status == 3 and [line["error"] for line in lines] == [str(missing)] * 4


def test_cells_that_do_not_exist_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["certify_peers.py", "--out", str(tmp_path / "none"), "--cell", "x"])
    assert script.main() == 2 and "there is no cell 'x' left" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["certify_peers.py", "--out", str(tmp_path / "none"), "--list"])
    assert script.main() == 0 and "vllm | draft model | 0.8 | 0.9 | batch 8" in capsys.readouterr().out
