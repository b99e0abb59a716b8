"""`truedraft generate` without --compare."""

from __future__ import annotations

import io
import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cli.tiny import Run, prompts_in, start
from truedraft.cli.report import undrafted_line
from truedraft.cli.terminal import visible
from truedraft.core.stats import Counters
from truedraft.core.theory import DraftCost, DraftPoint
from truedraft.drafters.prompt_lookup import PromptLookup
from truedraft.engine.policy.goodput import Goodput
from truedraft.engine.policy.kept import StepCosts
from truedraft.models.backends.native.build import built

pytestmark = pytest.mark.usefixtures("loaded_once")
TOKENS = ("--max-tokens", "24", "--dtype", "float32", "--ignore-eos")


def pipe(monkeypatch: pytest.MonkeyPatch, content: str | bytes) -> None:
    content = content.encode() if isinstance(content, str) else content
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def test_standard_output_holds_nothing_but_the_answer(run: Run, target: str) -> None:
    result = run("generate", "hello world", "--model", target, "--json", *TOKENS).ok
    record = result.record
    (answer,) = record["prompts"]
    *lines, last = result.out.splitlines(keepends=True)
    assert json.loads(last) == record
    assert "".join(lines).removesuffix("\n") == visible(answer["text"]).removesuffix("\n")
    assert len(answer["token_ids"]) == 24 and answer["finish_reason"] == "length"
    assert "24 tokens" in result.err and "tokens per second" in result.err


@pytest.mark.parametrize(
    ("words", "drafter", "kept", "place", "said"),
    [
        pytest.param(
            ("--weights", "q8"), "prompt-lookup", {"weights": "q8"}, "fast_paths", "weights of 8 bits",
            marks=pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason),
        ),
        (("--kv-dtype", "int8"), "draft,kv_dtype=int8", {"kv_dtype": "int8"}, "note", "kept in 8 bits"),
    ],
    ids=["weights", "keys and values"],
)  # fmt: skip
def test_numbers_may_have_eight_bits(
    run: Run, words: tuple[str, ...], drafter: str, kept: dict[str, Any], place: str, said: str
) -> None:
    words = ("generate", "def add(a, b):", "--model", "embedded:target", "--json", *TOKENS, *words)
    plain, drafted = (run(*words, "--drafter", each) for each in ("none", drafter))
    assert plain.status == drafted.status == 0, drafted.err
    assert kept.items() <= plain.record.items()
    assert said in str(plain.record[place])  # of weights, then what the processor lacks
    ids = [each.record["prompts"][0]["token_ids"] for each in (plain, drafted)]
    assert ids[0] == ids[1]


def test_record_says_what_ran_where(run: Run, target: str) -> None:
    record = run("generate", "hello", "--model", target, "--drafter", "none", "--json", *TOKENS).record
    assert record["weights"] is None
    assert record["command"] == "generate" and record["tokens_per_s"] > 0
    assert "speedup" not in record and "identical" not in record
    assert (record["model"], record["drafter"], record["dtype"], record["device"]) == (target, "none", "float32", "cpu")
    assert record["machine"]["threads"] >= 1 and record["machine"]["torch"] and record["sampling"]["max_tokens"] == 24
    assert record["stats"]["draft_tokens"] == 0 and record["stats"]["mean_acceptance_length"] == 1.0


def test_the_drafter_does_not_change_a_greedy_answer(run: Run, target: str, draft: str) -> None:
    drafters = ("none", "prompt-lookup", f"draft:{draft}", f"draft:{target},branching=2-2")
    words = ("generate", "abcabcabc", "--model", target, "--controller", "fixed", "--json", *TOKENS)
    records = [run(*words, "--drafter", drafter).record for drafter in drafters]
    assert len({tuple(record["prompts"][0]["token_ids"]) for record in records}) == 1
    assert records[-1]["stats"]["accepted_tokens"] > 0


def test_why_a_drafter_drafts_nothing_is_told(
    run: Run, target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the controller says; what it says hangs on what is measured, in place of which every draft takes ages."""
    words = ("generate", "hello world", "--model", target, "--json", *TOKENS)
    monkeypatch.setattr(StepCosts, "drafting", lambda *_: DraftCost((DraftPoint(1, 1, 1e3),)))
    monkeypatch.setattr(Goodput, "undrafted", lambda self, request: "plain was expected to be faster")
    told = "not drafted: plain was expected to be faster; --controller fixed drafts always"
    for drafter in (f"draft:{draft}", "prompt-lookup,min_ngram=9,max_ngram=9"):
        result = run(*words, "--drafter", drafter)
        assert result.record["stats"]["drafted_calls"] == 0
        assert result.record["stats"]["undrafted"] == "plain was expected to be faster"
        assert told in result.err and "acceptance" not in result.err
    compared = run(*words, "--drafter", f"draft:{draft}", "--compare")
    assert told in compared.out and told not in compared.err
    drafted = run(*words, "--drafter", f"draft:{draft}", "--controller", "fixed")
    assert "not drafted" not in drafted.err and "acceptance rate" in drafted.err


def test_little_drafting_is_told_too() -> None:
    weighing = SimpleNamespace(controller=SimpleNamespace(weighs_costs=True))
    few = Counters(target_calls=60, drafted_calls=1, undrafted="plain was expected to be faster")
    told = "drafted in 1 of 60 calls: plain was expected to be faster; --controller fixed drafts always"
    assert undrafted_line(weighing, few) == told  # type: ignore[arg-type]
    assert undrafted_line(weighing, replace(few, drafted_calls=40)) is None  # type: ignore[arg-type]


def test_what_a_drafter_reports_of_itself_is_told(run: Run, target: str, draft: str) -> None:
    words = ("generate", "abcabcabc", "--model", target, "--controller", "fixed", "--json", *TOKENS)
    plain, ahead = (run(*words, "--drafter", f"draft:{draft}{more}") for more in ("", ",async=1"))
    assert plain.record["drafter_reports"] == {} and "ahead hit rate" not in plain.err
    report = ahead.record["drafter_reports"]["draft"]
    assert 0 < report["proposals"] <= ahead.record["stats"]["target_calls"] and 0.0 <= report["ahead_hit_rate"] < 1.0
    assert "draft: proposals " in ahead.err and "ahead hit rate" in ahead.err
    for what in ("token_ids", "stats", "finish_reason"):
        assert ahead.record["prompts"][0][what] == plain.record["prompts"][0][what]


@pytest.mark.parametrize("content", ["hello world", "hello world\n"])
@pytest.mark.parametrize("argument", [["-"], []])
def test_a_piped_prompt_is_the_prompt_without_its_last_line_break(
    run: Run, target: str, monkeypatch: pytest.MonkeyPatch, content: str, argument: list[str]
) -> None:
    expected = run("generate", "hello world", "--model", target, *TOKENS).out
    pipe(monkeypatch, content)
    assert run("generate", *argument, "--model", target, *TOKENS).out == expected


def test_an_argument_wins_over_standard_input_that_nobody_asked_for(
    run: Run, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(monkeypatch, "something else")
    result = run("generate", "hello", "--model", target, "--json", *TOKENS)
    assert result.record["prompts"][0]["prompt_tokens"] == 5


def test_prompts_of_a_file_are_answered_like_single_ones(run: Run, target: str, tmp_path: Path) -> None:
    prompts = ["hello", "def f(x):\n    return", "日本"]
    lines = {"prompt": prompts[0]}, {"id": "second", "text": prompts[1]}, {"prompt": list(prompts[2].encode())}
    file = prompts_in(tmp_path, *lines, "", "")
    result = run("generate", "--prompts", file, "--model", target, "--json", *TOKENS).ok
    answers = result.record["prompts"]
    assert [answer["id"] for answer in answers] == ["1", "second", "3"]
    assert "second (length)" in result.out
    for prompt, answer in zip(prompts[:2], answers[:2], strict=True):
        (alone,) = run("generate", prompt, "--model", target, "--json", *TOKENS).record["prompts"]
        assert alone["text"] == answer["text"]


def test_a_prompt_that_fails_leaves_the_others_alone(run: Run, target: str, tmp_path: Path) -> None:
    file = prompts_in(tmp_path, {"prompt": "fine"}, {"prompt": "too long" * 100})
    result = run("generate", "--prompts", file, "--model", target, "--json", *TOKENS)
    assert result.status == 1
    assert [answer["finish_reason"] for answer in result.record["prompts"]] == ["length", "error"]
    assert "truedraft: error: prompt 2: the prompt has 800 tokens" in result.err


def test_a_seed_gives_one_answer_whatever_drafts(run: Run, target: str, draft: str) -> None:
    sampled = ("generate", "hello", "--model", target, "--temperature", "1", "--top-p", "0.9", "--json", *TOKENS)
    drafters = ("", "--drafter none", f"--drafter draft:{draft} --rule block", "--controller in-turn")
    results = [run(*sampled, "--seed", "7", *words.split()) for words in drafters]
    assert len({result.record["prompts"][0]["text"] for result in results}) == 1
    assert all(result.record["seed"] == 7 and "seed 7" in result.err for result in results)
    fresh = [run(*sampled) for _ in range(2)]
    assert len({result.record["prompts"][0]["text"] for result in (*fresh, results[0])}) == 3
    assert all(result.record["seed"] is None and "seed" not in result.err for result in fresh)


def test_stop_text_and_stop_id_end_the_answer(run: Run, target: str) -> None:
    words = ("generate", "hello world", "--model", target, "--json", *TOKENS)
    (whole,) = run(*words).record["prompts"]
    stop = whole["text"][6:8]
    (stopped,) = run(*words, "--stop", stop).record["prompts"]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == whole["text"][: whole["text"].index(stop)]
    (ended,) = run(*words, "--stop-token-id", str(whole["token_ids"][5])).record["prompts"]
    assert ended["token_ids"] == whole["token_ids"][: whole["token_ids"].index(whole["token_ids"][5])]


def test_chat_uses_the_template(run: Run, chat_target: str) -> None:
    words = ("--model", chat_target, "--json", *TOKENS)
    chat = run("generate", "hi", "--chat", *words).record
    plain = run("generate", "<user>hi<assistant>", *words).record
    assert chat["prompts"][0]["token_ids"] == plain["prompts"][0]["token_ids"]


def test_show_drafts_marks_tokens_and_explains_the_marks(run: Run, target: str) -> None:
    words = ("generate", "hello", "--model", target, "--drafter", f"draft:{target}", *TOKENS)
    plain, shown = run(*words), run(*words, "--show-drafts")
    assert shown.out != plain.out
    assert shown.out.translate(dict.fromkeys(map(ord, "⟦⟧⟨⟩"))) == plain.out
    assert "drafted and accepted" in shown.err and "⟨bonus" in shown.err


def test_a_drafter_that_raises_is_a_warning(run: Run, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of ideas")

    monkeypatch.setattr(PromptLookup, "propose", broken)
    result = run("generate", "hello", "--model", target, "--controller", "fixed", *TOKENS).ok
    assert "truedraft: warning: drafter 'prompt-lookup' failed (RuntimeError: out of ideas)" in result.err


@pytest.mark.slow
def test_ctrl_c_ends_the_stream_cleanly(target: str, tmp_path: Path) -> None:
    written = tmp_path / "out.txt"
    with written.open("w") as out:
        words = ("--model", target, "--max-tokens", "480", "--ignore-eos", "--json")
        process = start("generate", "hello", *words, stdout=out)
        while not written.stat().st_size and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err and "finish: cancelled" in err
    *_, last = written.read_text().splitlines()
    (answer,) = json.loads(last)["prompts"]
    assert answer["finish_reason"] == "cancelled" and 0 < len(answer["token_ids"]) < 480


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error_message(target: str) -> None:
    process = start("generate", "hello", "--model", target, "--max-tokens", "480", "--ignore-eos")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(2)
    process.stdout.close()
    said = process.stderr.read().splitlines()
    assert not [line for line in said if "loading" not in line]  # which is said where it takes long
    assert process.wait(timeout=60) == 1
