"""The entry point: `truedraft COMMAND ...`."""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import typer

from truedraft import __version__
from truedraft.cli.bench import bench
from truedraft.cli.certify import sampler, stack
from truedraft.cli.certify_engines import compare, engine
from truedraft.cli.chat import chat
from truedraft.cli.doctor import doctor
from truedraft.cli.export import export
from truedraft.cli.failures import DONE, FAILED, UNDECIDED, error_record, report, warnings_as_lines
from truedraft.cli.generate import generate
from truedraft.cli.info import drafters, info
from truedraft.cli.parameters import Command, command
from truedraft.cli.plan import plan
from truedraft.cli.serve import serve
from truedraft.cli.terminal import json_line, output_is_open, output_was_taken, prepare_streams, say
from truedraft.cli.train import DRAFT_NAMES, HEAD_NAMES, draft, heads, ngram
from truedraft.drafters.kinds import KINDS

_PATIENCE_S = 2.0


def build_app(first: str | None = None) -> typer.Typer:
    """The command with all its subcommands; where `first` names one, with that one alone, which takes less time."""
    app = typer.Typer(
        name="truedraft",
        help="Faster answers from a causal language model, with exactly the answers of plain decoding.",
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    plain = (generate, bench, plan, doctor, serve, chat, export, info, drafters)
    subcommands: dict[str, Callable[[], None]] = {run.__name__: partial(_add, app, run) for run in plain}
    subcommands |= {"train": lambda: app.add_typer(_training()), "certify": lambda: app.add_typer(_proof())}
    for name, add in subcommands.items():
        if name == first or first not in subcommands:
            add()
    return app


def _add(app: typer.Typer, run: Command) -> None:
    app.command()(command(run))


def _training() -> typer.Typer:
    training = typer.Typer(name="train", help="Train a drafter for a target.")
    training.command()(command(draft, DRAFT_NAMES))
    for word, kind in KINDS.items():
        if kind.trains:
            training.command(word)(command(heads(word), HEAD_NAMES))
    training.command()(command(ngram, HEAD_NAMES))
    return training


def _proof() -> typer.Typer:
    proof = typer.Typer(name="certify", help="Prove that answers are the target's own, or find that they are not.")
    for each in (stack, engine, compare, sampler):
        _add(proof, each)
    return proof


def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> int:
    if version:
        sys.stdout.write(f"truedraft {__version__}\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")
    return DONE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by the arguments after the program's name (None is `sys.argv`); returns the exit status.

    0 done, 1 the check or run failed, 2 unusable arguments, 3 not enough evidence (certify), 130 interrupted.
    """
    prepare_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not output_is_open():
        return _unwritten_status(words, DONE)
    status = _run(words)
    return status if output_was_taken() else _unwritten_status(words, status)


def _run(words: list[str]) -> int:
    """Run one command; if a JSON object is requested, standard output ends with one in any case."""
    app = typer.main.get_command(build_app(next(iter(words), None)))
    slow = threading.Timer(_PATIENCE_S, _print_import)
    slow.daemon = True
    slow.start()
    try:
        with warnings.catch_warnings(), warnings_as_lines():
            warnings.simplefilter("ignore")
            status = app.main(args=words, prog_name="truedraft", standalone_mode=False)
    except SystemExit as stop:  # typer exits this way if the reader closed standard output
        return stop.code if isinstance(stop.code, int) and stop.code != FAILED else _unwritten_status(words, DONE)
    except typer.Abort:
        return _failed(words, KeyboardInterrupt())
    except (Exception, KeyboardInterrupt) as error:
        return _failed(words, error)
    finally:
        slow.cancel()
    return status if isinstance(status, int) else DONE


def _print_import() -> None:
    if "torch" in sys.modules and "truedraft.models.loading" not in sys.modules:
        say("loading torch and transformers")


def _failed(words: Sequence[str], error: BaseException) -> int:
    if not output_was_taken():
        return _unwritten_status(words, DONE)
    status = report(error)
    if "--json" in words:
        named = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
        typed = " ".join(named[: 2 if named[:1] in (["train"], ["certify"]) else 1]) or None
        sys.stdout.write(json_line(error_record(typed, error)))
    return status


def _unwritten_status(words: Sequence[str], status: int) -> int:
    """The exit status if standard output could not be written: 1; in certify 3, unless a check failed."""
    return UNDECIDED if words[:1] == ["certify"] and status != FAILED else FAILED
