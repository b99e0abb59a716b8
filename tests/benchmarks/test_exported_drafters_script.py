"""The script behind `make test-vllm` and `make test-llamacpp`, without them: what it reads, starts and writes."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import exported_drafters as script
from cli.tiny import save_tiny_llama
from truedraft import load_model
from truedraft.errors import PeerError
from vllm_put_right import copied_to_tokens

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="model"} 40.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="model"} 120.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="model"} 61.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 33.0
"""
LOG = """(APIServer pid=8) WARNING 11-27 11:29:49 [system_utils.py:255] failed: OSError: [Errno 24] Too many files
(EngineCore pid=9) ERROR 11-27 11:30:00 [core.py:1] ValueError: Model Runner V1 does not support: dspark
(APIServer pid=8) RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_metrics_and_logs_are_read(tmp_path: Path) -> None:
    assert script.counted(METRICS) == (120.0, 61.0) and script.counted("") == (0.0, 0.0)
    theirs = "\n".join(re.sub(r"\{.*\}", "", line).replace("vllm:", "llamacpp:") for line in METRICS.splitlines()[:4])
    assert script.counted(theirs) == (120.0, 61.0)
    (tmp_path / "log").write_text(LOG)
    assert script.refusal(tmp_path / "log") == "ValueError: Model Runner V1 does not support: dspark"
    assert script.refusal(tmp_path / "none") == ""
    pydantic = "1 validation error for VllmConfig\n  Value error, no dspark here [type=value_error, input_value=1]\n"
    (tmp_path / "log").write_text(pydantic)
    assert script.refusal(tmp_path / "log") == "Value error, no dspark here"


def test_a_chain_of_each_kind() -> None:
    assert script.chain("medusa:a/b,nodes=3", "medusa", 3) == 'medusa:"a/b",branching=1-1-1'
    assert script.chain("eagle:a/b", "eagle", 5) == 'eagle:"a/b",num_speculative_tokens=5'


def test_where_answers_part_the_gap_is_the_targets(tmp_path: Path) -> None:
    folder = Path(save_tiny_llama(tmp_path / "target", seed=1, layers=2))
    prompts = [[5, 6], [7, 8], [9]]
    same, parted, short = [1, 2, 3], [1, 2, 4], [1, 2]
    assert script.first_gaps(folder, prompts, [same] * 3, [tuple(same)] * 3) == []
    first, second = script.first_gaps(folder, prompts, [same] * 3, [same, parted, short])
    assert 0.0 < first < 1e9 and second == 1e9
    assert script.first_gaps(folder, [[7, 8]], [parted], [same]) == [pytest.approx(first)]


ASKED = argparse.Namespace(
    model="tiny", minutes=1.0, tokens=10, max_tokens=8, prompts=[Path("HERE/gsm8k")], as_released=False, engine="vllm"
)


@pytest.mark.parametrize(("there", "verdict", "passed"), [
    (0.5, "no deviation found", True), (0.6, "no deviation found", False), (0.5, "deviates", False),
])  # fmt: skip
def test_a_line_passes_where_answers_acceptance_and_certificates_do(
    there: float, verdict: str, passed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words: list[str] = []

    @contextlib.contextmanager
    def served(name: str, commands: list[str], target: object, folder: Path, asked: object) -> Iterator[None]:
        words.extend(script._vllm(name, commands, folder, False).words[-4:-2])
        yield None

    about = json.dumps({"method": "eagle3", "model": "x", "num_speculative_tokens": 3})
    commands = ["first", f"vllm serve x --speculative-config '{about}'"]
    monkeypatch.setattr(script, "_exported", lambda words, out: {"tokens": 3, "commands": commands})
    monkeypatch.setattr(script, "served", served)
    monkeypatch.setattr(script, "greedy", lambda running, prompts, tokens: ([(1, 2)], there))
    monkeypatch.setattr(script, "certificate", lambda *_: {"verdict": verdict, "allowance": 0.1, "runs": [1]})
    monkeypatch.setattr(script, "ours", lambda *_: 0.52)
    line = script.checked("eagle:HERE/DIR", script.Bench(None, None, {}, [[3]]), tmp_path, [(1, 2)], ASKED)
    assert words == ["--speculative-config", about]
    assert (line["passed"], line["same_as_plain"], line["drafter"]) == (passed, 1, "eagle")
    assert line["certificates"] == [{"verdict": verdict, "allowance": 0.1}] * 2 and "HERE" not in json.dumps(line)
    assert (line["folder"], line["put_right"], line["prompts"]) == ("DIR", True, ["gsm8k"])
    near, far = (line | {"passed": None, "gaps_where_they_part": [0.0, gap]} for gap in (0.19, 0.21))
    assert script.passes(near) is passed and not script.passes(far), "answers part where rounding can part them"


def test_refusals_are_told_in_their_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def checked(word: str) -> tuple[str, str]:
        line = script.checked(word, script.Bench(None, None, {}, []), tmp_path, [], ASKED)
        return line["by"], line["refused"]

    def dies(*_: Any) -> None:
        raise PeerError("vllm dspark ended")

    monkeypatch.setattr(script, "_exported", lambda words, out: "vllm runs no redrafter drafters")
    assert checked("redrafter:DIR") == ("truedraft export", "vllm runs no redrafter drafters")
    monkeypatch.setattr(script, "_exported", lambda words, out: {"tokens": 3, "commands": ["vllm serve x"]})
    monkeypatch.setattr(script, "served", dies)
    monkeypatch.setattr(script, "RUNS", tmp_path)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "vllm-dspark.log").write_text(LOG)
    assert checked("dspark:DIR") == ("vllm", "ValueError: Model Runner V1 does not support: dspark")
    assert checked("eagle:DIR") == ("vllm", "vllm dspark ended")


def test_llamacpp_is_given_what_the_export_prints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The commands that make GGUF files are run, and the server gets the words of the last one."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$@" >> "$0.log"\ntest "$2" != bad || { echo no such model >&2; exit 1; }\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(script, "LLAMA_CPP", tmp_path)
    convert = "python convert_hf_to_gguf.py"
    serve = "llama-server -m t.gguf -md d.gguf --spec-type draft-eagle3 --spec-draft-n-max 5"
    launch = script._llamacpp(
        "x", [f"{convert} t --outfile t.gguf", f"{convert} d --outfile d.gguf", serve], Path("t"), False
    )
    made = [line.partition("convert_hf_to_gguf.py ")[2] for line in Path(f"{python}.log").read_text().splitlines()]
    assert made == ["t --outfile t.gguf", "d --outfile d.gguf"]
    assert launch.words[1:3] == ("--model", "t.gguf") and launch.words[-7:] == (*serve.split()[3:], "--metrics")
    plain = script._llamacpp("plain", [], Path("t"), False)
    assert plain.words[1:3] == ("--model", "t.gguf") and "--spec-type" not in plain.words
    with pytest.raises(PeerError, match=r"bad --outfile t\.gguf: no such model"):
        script._llamacpp("x", [f"{convert} bad --outfile t.gguf", serve], Path("t"), False)


def test_values_of_requests_are_copied_to_their_tokens() -> None:
    heats, ends = torch.tensor([0.0, 0.7, 1.5]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert copied_to_tokens(heats, ends, 5, 0, 1).tolist() == pytest.approx([1.0, 1.0, 1.5, 1.5, 1.5])
    assert copied_to_tokens(torch.tensor([3, 4]), torch.tensor([1, 3]), 3).tolist() == [3, 4, 4]


def test_questions_of_sets_are_asked_in_turn(tmp_path: Path) -> None:
    target = load_model(save_tiny_llama(tmp_path / "target", seed=1, layers=1, chat=True))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"question": f"{name}{number}", "answer": "#### 1"}) for number in range(3)]
        (tmp_path / name / "test.jsonl").write_text("\n".join(lines))
    texts = [target.tokenizer.decode(ids) for ids in script.asked_prompts(target, [tmp_path / "a", tmp_path / "b"])]
    assert texts == [f"<user>{each}<assistant>" for each in ("a0", "b0", "a1", "b1", "a2", "b2")]
