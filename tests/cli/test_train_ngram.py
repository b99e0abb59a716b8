"""`truedraft train ngram`, and its table behind `--drafter` and `certify`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cli.tiny import Run, prompts_in
from support.virtual_time import VirtualTime
from truedraft.drafters.ngram.table import NgramTable
from truedraft.training import evaluate, ngrams

FEW = ("--tokens", "48", "--prompt-tokens", "32", "--answer-tokens", "12")


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured at the end takes most of the time of these tests."""
    monkeypatch.setattr(evaluate, "_TOKENS", 8)
    monkeypatch.setattr(ngrams, "_TEST_PROMPTS", 2)


@pytest.fixture
def table(run: Run, target: str, text: str, tmp_path: Path) -> Path:
    """A table of a text, in its folder."""
    out = tmp_path / "table"
    assert run("train", "ngram", "--model", target, "--data", text, "--out", str(out)).status == 0
    return out


def test_a_counted_table_drafts(
    run: Run, target: str, text: str, tmp_path: Path, registry_of_its_own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "table"
    words = ("train", "ngram", "--model", target, "--data", text, "--out", str(out))
    result = run(*words, "--json").silent
    record = result.record
    assert record["command"] == "train ngram" and record["order"] == 3 and record["machine"]
    assert record["bytes"] == (out / "table.ngram").stat().st_size
    assert record["ngrams"] == list(NgramTable.open(out).ngrams)
    for phrase in (
        f"counted {record['counted_tokens']:,} tokens of text.txt",
        "with trees of 7 nodes",
        "try it: truedraft generate",
    ):
        assert phrase in result.out
    assert f"{record['served'][0]['mean_acceptance_length']:.2f}" in result.out
    assert record["registered"] is True and f"noted in {registry_of_its_own}: --drafter auto" in result.out

    plain = run("generate", "def f", "--model", target, "--drafter", "none", "--max-tokens", "12", "--json")
    for drafter in (f"ngram:{out}", f"ngram:{out}/table.ngram", "auto"):
        drafted = run("generate", "def f", "--model", target, "--drafter", drafter, "--max-tokens", "12", "--json").ok
        assert drafted.out.splitlines()[:-1] == plain.out.splitlines()[:-1]
    assert drafted.record["drafters"] == ["ngram", "prompt-lookup"]
    listed = run("info", "--model", target, "--json").record["drafters"][0]
    assert listed["kind"] == "ngram" and listed["belongs"] is True

    monkeypatch.setattr("truedraft.drafters.registry._LEAST_TOKENS_OF_TABLE", 9.0)
    again = run(*words, "--order", "2", "--json")
    assert "it brings nothing: " in again.out and "--drafter auto leaves it out" in again.out
    assert again.status == 0 and again.record["order"] == NgramTable.open(out).order == 2, (
        "it takes the old one's place"
    )


def test_what_the_target_writes_is_counted(run: Run, target: str, text: str, tmp_path: Path) -> None:
    out = tmp_path / "table"
    words = ("train", "ngram", "--model", target, "--data", text, "--out", str(out), "--answers", "--keep-work", *FEW)
    result = run(*words, "--json").silent
    assert "what the target answers to prompts from text.txt" in result.out
    answers = [json.loads(line)["answer"] for line in (out / "work" / "answers.jsonl").read_text().splitlines()]
    assert result.record["counted_tokens"] == sum(map(len, answers)) and len(answers) == 4
    before = (out / "table.ngram").read_bytes()

    run(*words).refused("holds a training; add --resume")
    (out / "table.ngram").unlink()
    assert run(*words, "--resume").status == 0 and (out / "table.ngram").read_bytes() == before
    other = run(*words, "--resume", "--answer-tokens", "13", "--temperature", "1", "--seed", "3")
    assert other.status == 2 and other.complaint.count("\n") == 1
    for phrase in ("--answer-tokens was 12 and is now 13", "--temperature was (0.0, 1.0) and is now (1.0,)"):
        assert phrase in other.err
    cleaned = run("train", "ngram", "--model", target, "--out", str(out), "--clean", "--json")
    assert cleaned.status == 0 and cleaned.record["freed_bytes"] > 0
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "drafter.json", "table.ngram"]


def test_broken_tables_are_one_sentence(run: Run, target: str, table: Path, tmp_path: Path) -> None:
    def complaint(path: Path) -> str:
        done = run("generate", "x", "--model", target, "--drafter", f"ngram:{path}", "--max-tokens", "4")
        assert done.status == 1 and done.err.count("\n") == 1, done.err
        return done.err

    content = (table / "table.ngram").read_bytes()
    file = tmp_path / "broken"
    for damaged, message in (
        (content[: len(content) // 2], "is cut off after"),
        (content[:8] + b"\x09" + content[9:], "is of version 9, and this truedraft reads version 1; count it again"),
        (content[:-70] + bytes([content[-70] ^ 1]) + content[-69:], "is damaged: the checksum of"),
        (b"{}", "begins as no n-gram table does; name a file or folder that truedraft train ngram wrote"),
        (b"", "is empty"),
    ):
        file.write_bytes(damaged)
        assert message in complaint(file)
    assert "cannot read the n-gram table" in complaint(tmp_path / "nowhere")
    trained = run("generate", "x", "--model", target, "--drafter", "ngram", "--max-tokens", "4")
    assert trained.status == 0, "the table that was trained for the target"
    shutil.rmtree(table)
    done = run("generate", "x", "--model", target, "--drafter", "ngram")
    assert done.status == 2 and "needs its table: ngram:FILE, as truedraft train ngram wrote it" in done.err


def test_a_broken_table_is_told_and_left_out_of_auto(run: Run, target: str, table: Path) -> None:
    (table / "table.ngram").write_bytes((table / "table.ngram").read_bytes()[:99])
    done = run("generate", "x", "--model", target, "--max-tokens", "4", "--json")
    assert done.status == 0 and done.record["drafters"] == ["prompt-lookup"]
    assert f"the drafter ngram:{table} is left out" in done.err
    (table / "table.ngram").unlink()
    done = run("generate", "x", "--model", target, "--max-tokens", "4", "--json")
    assert done.status == 0 and "ngram" not in done.err and done.record["drafters"] == ["prompt-lookup"]


def test_a_table_of_another_tokenizer_is_one_sentence(run: Run, target: str, table: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(target, other)
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))
    done = run("generate", "x", "--model", str(other), "--drafter", f"ngram:{table}", "--max-tokens", "4")
    assert done.status == 2 and done.err.count("\n") == 1
    assert "was counted with another tokenizer than that of target" in done.err
    assert "count one for it with truedraft train ngram" in done.err


@pytest.mark.parametrize("temperature", ["0", pytest.param("0.8", marks=pytest.mark.slow)])
def test_its_certificate(
    run: Run, target: str, table: Path, tmp_path: Path, temperature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A greedy one is over when all prompts are compared; in few steps a sampled one may lack evidence."""
    VirtualTime(monkeypatch, step_s=0.0 if temperature == "0" else 0.04)
    prompts = prompts_in(tmp_path, "def f1(x):", "return", "x + 3")
    done = run(
        *("certify", "stack", "--model", target, "--drafter", f"ngram:{table}", "--prompts", prompts, "--json"),
        *("--temperature", temperature, "--minutes", "0.05", "--max-tokens", "12", "--batch", "2"),
    )
    assert done.status in ({0} if temperature == "0" else {0, 3}), done.out
    assert done.record["failures"] == [] and "'ngram'" in json.dumps(done.record)
    if done.status == 0:
        assert done.record["certified"] is True
