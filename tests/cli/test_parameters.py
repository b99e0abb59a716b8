"""From dataclasses of options to commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from truedraft.cli.main import build_app
from truedraft.cli.parameters import command
from truedraft.core.params import SamplingParams
from truedraft.errors import OptionError
from truedraft.options import flag, group, option


@dataclass(frozen=True)
class Tools:
    """Options that are shared."""

    size: int = option(3, "How large.", "N", least=1)
    loud: bool = flag("Whether it is heard.")


@dataclass(frozen=True)
class Options:
    """Of one command."""

    out: Path = option(meaning="Where to.", metavar="DIR")
    word: str | None = option(None, "What.", "WORD", name="WORD")
    names: tuple[str, ...] = option(("a",), "Who.", "NAME", name="--name")
    tools: Tools = group("Tools", without=("loud",), size=5)
    sampling: SamplingParams = group("Answer")


@pytest.fixture
def typed() -> Callable[..., Options]:
    """What a command is given for words of the command line."""
    seen: list[Options] = []

    def run(options: Options) -> int:
        """Do it."""
        seen.append(options)
        return 0

    app = typer.Typer()
    app.command()(command(run))

    def call(*words: str) -> Options:
        typer.main.get_command(app).main(args=list(words), standalone_mode=False)
        return seen[-1]

    return call


def test_fields_are_what_was_typed(typed: Callable[..., Options]) -> None:
    found = typed("it", "--out", "x", "--name", "b", "--name", "c", "--size", "7", "--top-k", "4", "--stop", "E")
    assert (found.out, found.word, found.names, found.tools) == (Path("x"), "it", ("b", "c"), Tools(7))
    assert found.sampling == SamplingParams(top_k=4, stop=("E",))


def test_defaults_are_the_commands_own(typed: Callable[..., Options]) -> None:
    assert typed("--out", "x") == Options(out=Path("x"), tools=Tools(5), sampling=SamplingParams())
    with pytest.raises(Exception, match=r"(?i)no such option"):
        typed("--out", "x", "--loud")


def test_errors_name_options_as_they_are_typed(typed: Callable[..., Options]) -> None:
    for words, message in (
        (("--size", "0"), "--size must be 1 or more, got 0"),
        (("--top-p", "2"), r"--top-p must be a number, in \(0, 1\], got 2"),
        (("--stop-token-id", "-1"), "--stop-token-id must be a whole number of 0 or more"),
    ):
        with pytest.raises(OptionError, match=message):
            typed("--out", "x", *words)


def test_only_the_named_command_is_built() -> None:
    found = {first: set(typer.main.get_command(build_app(first)).commands) for first in (None, "plan", "train", "none")}  # type: ignore[attr-defined]
    assert found["plan"] == {"plan"} and found["train"] == {"train"}
    assert found["none"] == found[None] > {"plan", "train", "certify", "generate"}


def test_every_command_shares_what_options_mean() -> None:
    """The same option has the same help in all commands that answer prompts, but where what it names differs."""
    commands = typer.main.get_command(build_app()).commands  # type: ignore[attr-defined]
    named = commands["generate"], commands["bench"], commands["certify"].commands["stack"]
    options = {each.name: {own.name: own.help for own in each.params} for each in named}
    for name in ("model", "pad_to", "rule", "temperature", "top_p", "dtype", "device", "threads", "json"):
        assert len({found[name] for found in options.values()}) == 1, name
