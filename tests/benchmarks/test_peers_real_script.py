"""`benchmarks/peers_real.py`: its turns, what it keeps and goes on behind, and its arithmetic, without the engines."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import peers_real
from common import Child
from peers_real import NEVER, Served, Turn, Weights
from truedraft import SamplingParams
from truedraft.errors import PeerError
from truedraft.measure.peers import PeerFacts, Question, Reply

CLOCK = SimpleNamespace(now=0.0)


class Way:
    """Takes a second for the first tokens and `per_token` for each further one of a prompt."""

    def __init__(self, per_token: float, most: int = 8) -> None:
        self.per_token, self.most = per_token, most
        self.asked: list[Turn] = []

    def tokens(self, turn: Turn) -> int:
        self.asked.append(turn)
        if self.per_token < 0:
            raise PeerError("it died")
        CLOCK.now += 1 + self.per_token * (turn.max_tokens - 1)
        return len(turn.prompts) * turn.max_tokens


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> dict[str, Way]:
    """Engines that are opened in place of the real ones."""
    made = {"truedraft plain": Way(0.02), "truedraft auto": Way(0.01), "other": Way(0.04, most=1)}

    @contextlib.contextmanager
    def opened(weights: Weights, *_: Any) -> Iterator[Any]:
        encoded = lambda texts, chat: [list(range(len(text) % 50 + 1)) for text in texts]  # noqa: E731
        yield SimpleNamespace(ways=made, facts={"ours": {}}, encoded=encoded)

    monkeypatch.setattr(peers_real, "opened", opened)
    monkeypatch.setattr(peers_real, "time", SimpleNamespace(
        perf_counter=lambda: CLOCK.now, monotonic=lambda: CLOCK.now, strftime=lambda _: "now",
    ))  # fmt: skip
    return made


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Of the command, with five questions."""
    for name, record in {
        "mt_bench": {"question_id": 1, "category": "writing", "turns": ["Write."]},
        "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"},
        "gsm8k": {"question": "How many?", "answer": "2"},
        "spec_bench": {"question_id": 2, "category": "rag", "turns": ["Answer from this."]},
    }.items():
        (tmp_path / "prompts" / name).mkdir(parents=True)
        (tmp_path / "prompts" / name / "test.jsonl").write_text(2 * (json.dumps(record) + "\n"))
    found = ["--prompts", tmp_path / "prompts", "--file", "a.gguf", "--commit", "abc", "--out", tmp_path / "out.jsonl"]
    return ["peers_real.py", *map(str, found), "--only", "decode", "first", "requests", "--max-tokens", "101"]


def run(monkeypatch: pytest.MonkeyPatch, words: Sequence[str]) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", list(words))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    peers_real.main()
    return [json.loads(line) for line in Path(words[words.index("--out") + 1]).read_text().splitlines()]


def test_all_engines_take_turns_and_figures_are_medians(
    ways: dict[str, Way], words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run(monkeypatch, [*words, "--rounds", "2", "--whole-rounds", "1", "--minutes", "100"])
    assert lines[0]["cell"] == "settings" and {line["commit"] for line in lines} == {"abc"}
    counts = {cell: sum(line["cell"] == cell for line in lines) for cell in peers_real.CELLS}
    assert (counts["decode"], counts["first"], counts["requests"]) == (2 * 2 * 2, 2, 2 * 5)
    eight = next(line for line in lines if line["name"] == "eight")
    assert len(eight["prompt_tokens"]) == 8 and "other" not in eight["ways"]
    figures = peers_real.rows(lines)
    decoding = figures["q4_1, decoding eight, temperature 0, tokens/s"]
    assert decoding == {"truedraft plain": pytest.approx(8 / 0.02), "truedraft auto": pytest.approx(8 / 0.01)}
    whole = figures["q4_1, whole requests, temperature 0.8, tokens/s"]
    assert whole == {"truedraft plain": pytest.approx(101 / 3), "truedraft auto": pytest.approx(101 / 2),
                     "other": pytest.approx(101 / 5)}  # fmt: skip
    assert figures["q4_1, first token of 1000 tokens, s"] == dict.fromkeys(ways, pytest.approx(1.0))
    assert "truedraft auto" in capsys.readouterr().out
    ended = [turn.ignore_eos for turn in ways["other"].asked[1:] if turn.max_tokens == 101]
    assert True in ended and False in ended  # decoding goes on behind ends, whole requests do not


def test_a_rerun_measures_what_is_missing(
    ways: dict[str, Way], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*words, "--rounds", "1", "--whole-rounds", "1"]
    some = run(monkeypatch, [*words, "--minutes", "0.5"])
    every = run(monkeypatch, [*words, "--minutes", "100"])
    assert 1 < len(some) < len(every)
    assert run(monkeypatch, [*words, "--minutes", "100"]) == every
    assert len({(line["cell"], line["name"], line["temperature"], line["round"]) for line in every}) == len(every) - 2
    words[words.index("abc")] = "def"
    # Settings and means were written twice.
    assert len(run(monkeypatch, [*words, "--minutes", "100"])) == 2 * len(every) - 2


def test_an_engine_that_dies_has_no_figure(
    ways: dict[str, Way], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways["other"].per_token = -1.0
    lines = run(monkeypatch, [*words, "--rounds", "1", "--whole-rounds", "1", "--minutes", "100"])
    assert all(line["ways"]["other"] == {"error": "it died"} for line in lines if "other" in line["ways"])
    assert all("other" not in each and "truedraft auto" in each for each in peers_real.rows(lines).values())


def test_a_server_that_knows_no_going_on_is_forbidden_to_end() -> None:
    asked: list[Question] = []

    def ask(questions: Sequence[Question]) -> list[Reply]:
        asked.extend(questions)
        return [Reply((5, 6))] * len(questions)

    served = Served(SimpleNamespace(facts=PeerFacts("llama.cpp"), ask=ask), [2])  # type: ignore[arg-type]
    assert served.tokens(Turn("decode", "two", [[1], [3, 4]], 2, 0.8)) == 4
    assert asked[1] == Question((3, 4), SamplingParams(2, 0.8, logit_bias={2: NEVER}))
    served.tokens(Turn("requests", "one", [[1]], 2))
    assert asked[-1].params == SamplingParams(2, 0.0)


def test_a_child_answers_and_prints_beside(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    folder = str(Path(peers_real.__file__).parent)
    script.write_text(
        f"import sys; sys.path.insert(0, {folder!r})\nfrom common import be_asked\n"
        "def double(asked):\n    print('noise')\n    return 2 * asked['x']\nbe_asked(lambda: double)\n"
    )
    child = Child([str(script)])
    assert child.read() == "ready"
    assert [child.ask({"x": each}) for each in (1, 4)] == [2, 8]
    child.close()
