"""The entry point: `truedraft COMMAND ...`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from truedraft import __version__
from truedraft.cli.bench import bench
from truedraft.cli.certify import certify
from truedraft.cli.export import export
from truedraft.cli.failures import DONE, FAILED, report, telling
from truedraft.cli.generate import generate
from truedraft.cli.info import info
from truedraft.cli.train import train_app


def build_app() -> typer.Typer:
    """The command with all its subcommands."""
    app = typer.Typer(
        name="truedraft",
        help="Faster answers from a causal language model, with exactly the answers it gives alone.",
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    app.command()(telling(generate))
    app.command()(telling(bench))
    app.command()(telling(certify))
    app.command()(telling(export))
    app.command()(telling(info))
    app.add_typer(train_app())
    return app


def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> int:
    if version:
        sys.stdout.write(f"truedraft {__version__}\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")
    return DONE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: those after the program's name; None takes them from the system.

    Returns:
        The exit status: 0 done, 1 the check or run failed, 2 unusable arguments, 130 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an answer may hold characters that a terminal cannot show
    command = typer.main.get_command(build_app())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            status = command.main(
                args=None if arguments is None else list(arguments), prog_name="truedraft", standalone_mode=False
            )
    except SystemExit as stop:  # typer ends so where standard output was closed by its reader
        return stop.code if isinstance(stop.code, int) else FAILED
    except typer.Abort:
        return report(KeyboardInterrupt())
    except (Exception, KeyboardInterrupt) as error:
        return report(error)
    return status if isinstance(status, int) else DONE
