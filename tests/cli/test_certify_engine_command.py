"""`truedraft certify` of somebody else's engine: verdict, exit status, reports, going on, and bad input."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cli.tiny import Run
from measure.peers.scripted_server import Made, models, scripted
from support.faulty_engines import embedded_models, named
from support.faulty_peer import FaultyPeer, serve
from truedraft.certify import Part, xml_text
from truedraft.cli.terminal import Terminal
from truedraft.errors import DataError

FUNCTION = """
import random

calls = []

def last_again(prompt, max_tokens, temperature, seed):
    calls.append(seed)
    return [prompt[-1]] * max_tokens

def breaks_down(prompt, max_tokens, temperature, top_p):
    if len(calls) > 1:
        raise RuntimeError("the machine is gone")
    calls.append(None)
    return [prompt[-1]] * max_tokens
"""


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.txt"
    file.write_text("hello\nab\nthe quick brown fox\nlorem ipsum dolor\n")
    return str(file)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's own; each test's under a name of its own, as modules are kept."""
    name = f"engine_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FUNCTION)
    monkeypatch.chdir(tmp_path)
    return name


@pytest.fixture
def asked(module: str, target: str, prompts: str) -> tuple[str, ...]:
    """The command about a function that gives the last token again."""
    return ("certify", "engine", "--process", f"{module}:last_again", "--model", target, "--prompts", prompts)


def test_what_no_xml_can_hold_is_replaced() -> None:
    allowed = '\t\n\x20\x7f\x85\ud7ff\ue000\ufdd0\ufffd\U00010000\U0010ffff<&">'
    forbidden = [*map(chr, range(9)), "\x0b", "\x0c", "\x0e", "\x1b", "\x1f", "\ud800", "\udfff", "\ufffe", "\uffff"]
    said = allowed + "".join(forbidden)
    suite = ElementTree.Element("suite", message=said)
    suite.text = said
    text = xml_text(suite)
    read = ElementTree.fromstring(text.encode())
    assert read.text == read.attrib["message"] == allowed + "\ufffd" * len(forbidden)


def test_a_function_that_deviates_in_every_form(run: Run, asked: tuple[str, ...], module: str, tmp_path: Path) -> None:
    out, xml = tmp_path / "report", tmp_path / "junit.xml"
    done = run(
        *(*asked, "--seed-per-request", "--tokens", "300", "--batch", "4", "--minutes", "10"),
        *("--out", str(out), "--junit", str(xml), "--json"),
    )
    assert done.status == 1, done.err
    record = done.record
    assert record["certified"] is False
    assert record["evidence"] >= 1e6
    assert record["engine"]["name"] == f"{module}:last_again"
    assert "state of another text" in record["faults"]
    assert "checks failed (" in done.out
    assert json.loads((out / "certificate.json").read_text()) == record
    assert (out / "certificate.md").read_text().startswith("# Certificate of an engine\n\n**NO CERTIFICATE: ")
    suite = ElementTree.fromstring(xml.read_text())
    assert int(suite.attrib["failures"]) == len(record["failures"]) > 0
    assert int(suite.attrib["tests"]) == len(suite) == len(record["findings"])


def test_an_engine_that_breaks_down_is_gone_on_with(
    run: Run, asked: tuple[str, ...], target: str, prompts: str, module: str, tmp_path: Path
) -> None:
    kept = tmp_path / "kept.jsonl"
    words = (
        *("certify", "engine", "--process", f"{module}:breaks_down", "--model", target, "--prompts", prompts),
        *("--tokens", "200", "--transcript", str(kept), "--junit", str(tmp_path / "junit.xml"), "--json"),
    )
    done = run(*words)
    assert done.status == 3 == done.record["status"]
    assert "the machine is gone" in done.record["error"]
    suite = ElementTree.fromstring((tmp_path / "junit.xml").read_text())
    assert (suite.attrib["errors"], suite.attrib["failures"], len(suite)) == ("1", "0", 1)
    error = suite[0].find("error")
    assert error is not None and error.attrib["message"] == done.record["error"]
    assert "the machine is gone" in done.err
    assert f"kept in {kept}" in " ".join(done.err.split())
    lines = kept.read_text().splitlines()
    assert len(lines) == 3  # the head and what was answered
    again = run(*words)  # it breaks down at once, so what is kept was not asked for again
    assert again.status == 3
    assert kept.read_text().splitlines() == lines


@pytest.mark.slow
def test_a_server_with_a_fault_is_found_and_one_without_takes_its_time(run: Run, tmp_path: Path) -> None:
    words = ("--model", "embedded:target", "--no-float32", "--dtype", "float32", "--batch", "8", "--seed-per-request")
    with serve(FaultyPeer(named("greedy above 0"))) as url:
        done = run("certify", "engine", url, *words, "--temperature", "0.7", "--tokens", "300", "--json")
        assert done.status == 1, done.err
        assert done.record["faults"] == ["greedy above temperature 0"]
        assert done.record["engine"]["prompts"] == "ids"
    with serve(FaultyPeer(named("plain"))) as url:
        done = run("certify", "engine", url, *words, "--tokens", "40", "--json")
        assert done.status == 3, done.out
        assert done.record["failures"] == []
        assert "NO CERTIFICATE: not enough evidence" in done.out


def test_a_transcript_is_of_one_seed(run: Run, asked: tuple[str, ...], tmp_path: Path) -> None:
    """Answers to seeds that both runs send would be given back, and a finding would repeat by itself."""
    words = (*asked, "--seed-per-request", "--tokens", "60", "--transcript", str(tmp_path / "kept.jsonl"), "--json")
    first = run(*words, "--seed", "3")
    assert (first.status, first.record["seed"]) == (1, 3)
    assert run(*words, "--seed", "3").status == 1
    other = run(*words, "--seed", "4")
    assert other.status == 2
    assert "--seed was 3 and is now 4" in other.err


def crash(*_: object, **__: object) -> None:
    raise ZeroDivisionError("in the middle")


def full(*_: object, **__: object) -> None:
    raise DataError("the transcript cannot be written (No space left on device)")


def test_a_crash_or_a_full_disk_decides_nothing(
    run: Run, asked: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 1 would say that the engine deviates."""
    xml = tmp_path / "junit.xml"
    for fails, said in ((crash, "ZeroDivisionError: in the middle"), (full, "No space left on device")):
        monkeypatch.setattr("truedraft.certify.engines.certify_engine", fails)
        done = run(*asked, "--json", "--junit", str(xml))
        assert (done.status, done.record["status"]) == (3, 3)
        assert said in done.record["error"] and "--transcript FILE" in done.record["error"]
        assert "Traceback" not in done.err
        assert ElementTree.fromstring(xml.read_text()).attrib["errors"] == "1"


def test_an_interrupt_says_how_to_go_on(
    run: Run, asked: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("truedraft.certify.engines.certify_engine", interrupt)
    words = (*asked, "--json")
    done = run(*words, "--transcript", str(tmp_path / "kept.jsonl"))
    assert done.status == 130 == done.record["status"]
    assert "interrupted; what was answered is kept in" in done.record["error"]
    assert "the same command continues from there" in done.record["error"]
    assert "with --transcript FILE" in run(*words).record["error"]


def test_rounding_is_that_of_the_engines_dtype_and_not_of_this_machine(
    run: Run, asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where this machine is slow in bfloat16, servers are not; and who says float32 means it."""
    monkeypatch.setattr("truedraft.machine.has_bfloat16", lambda device: False)
    words = (*asked, "--seed-per-request", "--tokens", "60", "--json")
    assert run(*words).record["allowance"] > 1e-3
    assert run(*words, "--dtype", "float32").record["allowance"] == pytest.approx(1.5e-4)


def test_the_bar_tells_of_each_answer(run: Run, asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of a slow engine takes minutes, in which nothing else would be seen to move."""
    shown: list[tuple[int, str]] = []

    @contextlib.contextmanager
    def progress(*_: object) -> Iterator[Callable[[int, str], None]]:
        yield lambda done, remark: shown.append((done, remark))

    monkeypatch.setattr(Terminal, "progress", progress)
    assert run(*asked, "--seed-per-request", "--tokens", "60").status == 1
    greedy = [remark for done, remark in shown if done == 0]
    assert greedy == [f"{Part.GREEDY.value}; {count} came in all" for count in range(1, 5)]
    assert shown == sorted(shown, key=lambda each: each[0])
    assert shown[-1][0] == 3000


def test_files_at_home_and_files_that_cannot_be_written(
    run: Run, asked: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    words = (*asked, "--json", "--seed-per-request", "--tokens", "60", "--minutes", "10")
    done = run(*words, "--junit", "~/junit.xml", "--transcript", "~/kept.jsonl")
    assert done.status == 1, done.err
    assert (tmp_path / "junit.xml").exists() and (tmp_path / "kept.jsonl").exists()
    full = run(*words, "--junit", "/dev/full")  # told last, and the verdict stands
    assert full.status == 1
    assert full.record["certified"] is False
    assert "error: cannot write '/dev/full': No space left on device" in full.err


def test_two_servers_are_compared_without_weights(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_servers = embedded_models()
    monkeypatch.setattr("truedraft.models.loading.load_model", crash)
    words = ("--model", "embedded:target", "--batch", "8", "--seed-per-request", "--tokens", "120", "--json")
    kept = tmp_path / "kept.jsonl"
    with serve(FaultyPeer(named("plain"), of_servers)) as url:
        other = run("certify", "compare", url, url, *words, "--transcript", str(kept))
    assert other.status == 0, other.out
    assert other.record["against"]["name"] == other.record["engine"]["name"]
    assert kept.exists() and (tmp_path / "kept-against.jsonl").exists()


def test_a_busy_server_is_waited_for_no_longer_than_the_run_takes(run: Run, target: str, prompts: str) -> None:
    with scripted() as server:
        server.handlers["/v1/models"] = models("vllm", "m")
        server.handlers["/v1/completions"] = lambda _: Made(b"", 429, {"Retry-After": "30"})
        words = ("--model", target, "--prompts", prompts, "--minutes", "0.05", "--json")
        done = run("certify", "engine", server.url, *words)
    assert done.status == 3
    assert "would be waited for 30 s, of at most 3 s" in done.record["error"]
