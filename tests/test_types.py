"""A user's code is taken by `mypy --strict`, runs, and what it shows of parts is of use."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cli.tiny import save_tiny_llama
from truedraft import Engine, SamplingParams
from truedraft.errors import OptionError, PromptError, UnknownOptionError
from truedraft.testing import MarkovModel

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests/typed"))
import users_code  # noqa: E402

FEW = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tiny_llama(tmp_path_factory.mktemp("model"), seed=3, layers=1, chat=True))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return users_code.load(folder)


def test_a_users_code_is_checked_with_ours() -> None:
    mypy = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert mypy["strict"] and "users_code" in mypy["modules"] and "tests/typed" in mypy["mypy_path"]
    assert (ROOT / "src/truedraft/py.typed").is_file()


def mypy(code: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """As a user calls it, who has no configuration of ours."""
    words = ["--strict", "--config-file=", "--ignore-missing-imports"]
    return subprocess.run(
        [sys.executable, "-m", "mypy", *words, f"--cache-dir={cache}", str(code)],
        env=os.environ | {"MYPYPATH": str(ROOT / "src")},
        cwd=code.parent,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow  # it reads torch's types, too
def test_mypy_as_a_user_has_it(tmp_path: Path) -> None:
    (wrong := tmp_path / "wrong.py").write_text(
        "from truedraft import Engine, SamplingParams\n"
        "SamplingParams(stop=3)\n"
        "SamplingParams(structured='{}')\n"
        "Engine('smollm2').generate([{'role': 'user', 'content': 'hi'}])\n"
    )
    found = mypy(Path(users_code.__file__), tmp_path / "cache")
    assert not re.search(r"users_code\.py:\d+: error", found.stdout), found.stdout
    found = mypy(wrong, tmp_path / "cache")
    assert [f"wrong.py:{line}: error" in found.stdout for line in (1, 2, 3, 4)] == [False, True, True, True]


def test_a_users_code_runs(engine: Engine, folder: Path) -> None:
    for params in users_code.options():
        assert all(answer.finish_reason in ("stop", "length") for answer in users_code.ask(engine, params))
        assert users_code.kept(params)[1] in ({}, {1: 2.0})
    assert users_code.kept(users_code.options()[0])[0] == ("\n",)
    whole = [engine.generate("The capital of France is", FEW), engine.chat(users_code.QUESTION, FEW)]
    assert "".join(users_code.stream(engine, FEW)) == "".join(answer.text or "" for answer in whole)
    assert asyncio.run(users_code.ask_async(engine, FEW)) == "".join(answer.text or "" for answer in whole)
    assert users_code.token_ids(folder)[-5:] == engine.target.tokenizer.encode("Paris")  # type: ignore[union-attr]
    assert "the prompt is empty" in users_code.refused(engine)
    assert "tokens a call" in users_code.drafting(whole[0])


def test_chats(engine: Engine) -> None:
    tokenizer = engine.target.tokenizer
    assert tokenizer is not None
    france, italy = ([{"role": "user", "content": f"capital of {name}?"}] for name in ("France", "Italy"))
    alone = [engine.generate(tokenizer.chat(chat), FEW).token_ids for chat in (france, italy)]
    assert engine.chat(france, FEW).token_ids == alone[0]
    assert [answer.token_ids for answer in engine.chat([france, italy], FEW)] == alone
    assert [len(answer.token_ids) for answer in engine.chat((france, italy), [FEW, SamplingParams(max_tokens=2)])] == [
        4,
        2,
    ]
    last = list(engine.stream(france, FEW, trust_control_tokens=True))[-1].answer
    assert last is not None and last.token_ids == alone[0]
    answers = engine.chat([france, [{"role": "user", "content": "long " * 200}], italy], FEW)
    assert [answer.finish_reason for answer in answers] == ["length", "error", "length"]
    assert "context of 512" in (answers[1].error or "")


@pytest.mark.parametrize("messages", [users_code.QUESTION, [users_code.QUESTION], tuple(users_code.QUESTION)])
def test_messages_are_no_prompt(engine: Engine, messages: Any) -> None:
    with pytest.raises(PromptError, match=r"messages of a chat are no prompt; give them to engine\.chat"):
        engine.generate(messages, FEW)


def test_what_is_no_chat_is_refused(engine: Engine) -> None:
    for given, got in (
        ("hello", "got a str"),
        (["hello"], "got a list of str"),
        ([users_code.QUESTION, 3], "int and list"),
    ):
        with pytest.raises(PromptError, match=rf"a chat is a list of messages as .*{got}"):
            engine.chat(given, FEW)  # type: ignore[call-overload]
    for given, told in (
        ([], "messages is empty"),
        ([{"rol": "user", "content": "hi"}], r"messages\[0\] has no 'role', only 'rol', 'content'"),
        ([[*users_code.QUESTION, {"role": "user"}]], r"messages\[1\] has no 'content', only 'role'"),
    ):
        with pytest.raises(PromptError, match=told):
            engine.chat(given, FEW)
    with pytest.raises(OptionError, match=r"is a sampling option; give SamplingParams\(max_tokens=...\)"):
        engine.chat(users_code.QUESTION, max_tokens=4)  # type: ignore[call-overload]
    with pytest.raises(UnknownOptionError, match="unknown option of a chat 'tool'; did you mean 'tools'"):
        engine.chat(users_code.QUESTION, FEW, tool=[])  # type: ignore[call-overload]
    with pytest.raises(PromptError, match="has no tokenizer, so no chat template"):
        Engine(MarkovModel.random(8, seed=1)).chat(users_code.QUESTION)


def test_parts_show_what_they_are(engine: Engine, folder: Path) -> None:
    model = f"<HuggingFaceModel '{folder}': 0.0"
    assert repr(engine.target).startswith(model) and repr(engine.target).endswith("float32 on cpu, context 512>")
    assert repr(engine.target.tokenizer).startswith(f"<Tokenizer '{folder}': ")
    assert repr(engine).startswith(f"<Engine of {model}")
    assert repr(engine).endswith(
        "drafter prompt-lookup, rule speculative, controller FixedBudget, at most 32 requests at once>"
    )
