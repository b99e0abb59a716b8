"""From a dataclass of options to a command: its fields become typer's parameters, and the parsed values a dataclass."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import typer

from truedraft.cli import words
from truedraft.cli.failures import InterruptedCommandError, describe, is_usage_error
from truedraft.errors import OptionError, TruedraftError, errors_about
from truedraft.lazy import compile_ahead
from truedraft.options import Group, Option

Command = Callable[[Any], int]
"""A command: from one dataclass of options to an exit status."""
Check = Callable[[str, Any], None]
"""Refuses invalid values; called with the option's name on the command line and the value."""
Read = TypeVar("Read")
_NOTHING = Group("")
_ALL = "help_all"
_FEW = 14
"""A command with at most so many options shows all in its short help."""
_FIRST = {
    "model", "drafter", "prompts", "prompt", "chat", "image", "system", "url", "max_tokens", "temperature", "top_p",
    "seed", "stop", "json", "compare", "show_drafts", "out", "data", "held_out", "minutes", "steps", "resume", "host",
    "port", "api_key_file", "served_model_name", "max_batch", "learn", "limit", "runs", "batch", "tokens",
}  # fmt: skip
"""The options in the short help of a command with more."""


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One option of a command.

    Attributes:
        default: in this command; `MISSING` if it is required.
        heading: its section in the help.
        bare: whether its value may also be a positional argument.
        hidden: whether the short help omits it.
    """

    name: str
    option: Option
    type: Any
    default: Any
    heading: str
    bare: bool = False
    hidden: bool = False

    @property
    def typed_name(self) -> str:
        """The option on the command line: `--max-tokens`."""
        return (self.option.name or f"--{self.name.replace('_', '-')}").partition("/")[0]

    @property
    def repeated(self) -> bool:
        return typing.get_origin(self.type) is tuple

    @property
    def bare_name(self) -> str:
        """typer's name of the positional argument."""
        return f"{self.name}_alone"

    def for_typer(self) -> Iterator[inspect.Parameter]:
        """The function parameters that typer reads."""
        kind = inspect.Parameter.KEYWORD_ONLY
        declared: Any = self.type
        default = inspect.Parameter.empty if self.default is dataclasses.MISSING else self.default
        if self.bare:
            declared, default = declared | None, None
            argument = typer.Argument(metavar=self.name.upper(), help=f"As {self.typed_name}.", show_default=False)
            yield inspect.Parameter(self.bare_name, kind, default=None, annotation=Annotated[declared, argument])
        if self.repeated:  # typer supports only lists, and would show a default list
            declared, default = list[typing.get_args(self.type)[0]] | None, None  # type: ignore[misc]
        more: dict[str, Any] = {"metavar": self.option.metavar, "help": self.option.meaning}
        info: Any
        if self.option.name is not None and not self.option.name.startswith("-"):
            info = typer.Argument(**more)
        else:
            more |= {"rich_help_panel": self.heading, "hidden": self.hidden}
            if self.option.shown_default is not None and default is not inspect.Parameter.empty:
                more["show_default"] = self.option.shown_default
            info = typer.Option(self.option.name or self.typed_name, **more)
        yield inspect.Parameter(self.name, kind, default=default, annotation=Annotated[declared, info])

    def value(self, typed: Any, check: Check) -> Any:
        """The field's value, from typer's.

        Raises:
            TruedraftError: it is invalid in any command, or required and missing.
        """
        if self.bare and typed is None:
            if self.default is dataclasses.MISSING:
                raise OptionError("must be given, or its value alone behind the command", field=self.name)
            return self.default
        with errors_about(self.name):
            for each in (typed or self.default) if self.repeated else [typed]:
                check(f"{self.typed_name} {self.option.metavar}", each)
        if self.repeated:
            return tuple(typed or self.default)
        least = self.option.least
        if typed is not None and least is not None and typed < least:
            raise OptionError(f"must be {least} or more, got {typed}", field=self.name)
        return typed


def command(run: Command, names: Mapping[str, str] | None = None, check: Check = words.check) -> Callable[..., int]:
    """A function for typer with the options of the dataclass that `run` takes.

    An error about a field gets the option's name on the command line.

    Args:
        names: further names in errors, with their names on the command line.
        check: refuses values that are invalid in any command.
    """
    kind = next(iter(_types(run).values()))
    parameters = {each.name: each for each in _parameters(kind, _NOTHING)}
    hidden = [name for name in parameters if name not in _FIRST] if len(parameters) > _FEW else []
    must = dataclasses.MISSING
    parameters |= {
        name: dataclasses.replace(parameters[name], hidden=parameters[name].default is not must) for name in hidden
    }

    @functools.wraps(run)
    def call(**typed: Any) -> int:
        try:
            typed.pop(_ALL, None)
            for each in parameters.values():
                _take_bare(each, typed)
            values = {name: parameters[name].value(given, check) for name, given in typed.items()}
            if "model" in parameters:
                compile_ahead()
            return run(_made(kind, _NOTHING, values))
        except TruedraftError as error:
            error.call_fields({name: each.typed_name for name, each in parameters.items()} | dict(names or {}))
            raise
        except KeyboardInterrupt as error:  # some versions of typer would exit silently
            raise InterruptedCommandError("interrupted") from error

    signature = [declared for each in parameters.values() for declared in each.for_typer()]
    if hidden:
        signature.append(_help_all(len(hidden)))
    call.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in signature}
    return call


def _help_all(hidden: int) -> inspect.Parameter:
    def show(context: typer.Context, given: bool) -> None:
        if given:
            for each in context.command.params:
                each.hidden = False  # type: ignore[attr-defined]
            sys.stdout.write(context.get_help())
            raise typer.Exit

    words = f"Show this message with {hidden} more options."
    info = typer.Option("--help-all", is_eager=True, callback=show, help=words)
    return inspect.Parameter(_ALL, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, info])


def _take_bare(parameter: _Parameter, typed: dict[str, Any]) -> None:
    """Use a positional argument as the option's value.

    Raises:
        OptionError: both were given.
    """
    positional = typed.pop(parameter.bare_name, None)
    if positional is None:
        return
    if (given := typed[parameter.name]) is not None and given != positional:
        raise OptionError(f"is {given!r}, and {positional!r} stands behind the command; give one", field=parameter.name)
    typed[parameter.name] = positional


def read_words(kind: type[Read], words: Mapping[str, Any]) -> Read:
    """A dataclass of options from values by name, parsed as on the command line.

    Files are not checked, because the options may be used on another machine.

    Args:
        words: each value as on the command line, a list for repeated options, or a bool for flags.

    Raises:
        OptionError: an option is unknown, or its value invalid.
    """
    found: list[Read] = []

    def keep(options: Any) -> int:
        found.append(options)
        return 0

    keep.__annotations__ = {"options": kind}
    typed: list[str] = []
    for name, given in words.items():
        option, flag = f"--{name.replace('_', '-')}", str(given).lower()
        if flag in ("true", "false"):
            typed += [option] if flag == "true" else []
        else:
            for each in given if isinstance(given, list | tuple) else [given]:
                typed += [option, str(each)]
    app = typer.Typer(add_completion=False)
    app.command()(command(keep, check=lambda name, value: None))
    try:
        typer.main.get_command(app).main(typed, standalone_mode=False)
    except TruedraftError:
        raise
    except Exception as error:
        if is_usage_error(error):
            raise OptionError(describe(error)) from error
        raise
    return found[0]


def _parameters(kind: type, within: Group) -> Iterator[_Parameter]:
    """The options of a dataclass and its groups, in order."""
    hints = _types(kind)
    for each in dataclasses.fields(kind):
        inner: Group | None = each.metadata.get("group")
        option: Option | None = each.metadata.get("option")
        if inner is not None:
            yield from _parameters(hints[each.name], inner)
        elif option is not None and each.name not in within.without:
            default = within.defaults.get(each.name, each.default)
            bare = option.bare or each.name == within.bare
            yield _Parameter(each.name, option, hints[each.name], default, option.heading or within.heading, bare)


def _made(kind: type, within: Group, values: Mapping[str, Any]) -> Any:
    hints, fields = _types(kind), {}
    for each in dataclasses.fields(kind):
        inner: Group | None = each.metadata.get("group")
        if inner is not None:
            fields[each.name] = _made(hints[each.name], inner, values)
        elif each.name not in within.without and each.name in values:
            fields[each.name] = values[each.name]
    return kind(**fields)


def _types(of: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(of)
    return {name: hint for name, hint in hints.items() if name != "return" and not isinstance(hint, types.NoneType)}
