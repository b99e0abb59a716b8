"""From a dataclass of options to a command: its fields become typer's parameters, and the parsed values a dataclass.

Values are checked before slow imports and before a model is loaded; the code that uses one parses it again, and refuses
what depends on a model or a device.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from truedraft.cli.failures import InterruptedCommandError, describe, is_usage_error
from truedraft.drafters.registry import ENGINES, refuse_no_folder
from truedraft.drafters.specs import check_drafter_words
from truedraft.engine.policy.specs import controller_from_spec
from truedraft.errors import DataError, OptionError, TruedraftError, UnknownOptionError, errors_about
from truedraft.files import named_adapter, refuse_lost_model, refuse_no_adapter, user_path
from truedraft.lazy import compile_ahead
from truedraft.models.embedded import embedded_folder
from truedraft.options import BITS, DTYPE_NAMES, KV_DTYPES, PADDED_NAMES, Group, Option, read_bytes
from truedraft.verification.specs import rule_words

Command = Callable[[Any], int]  # a command: from one dataclass of options to an exit status
Read = TypeVar("Read")
_NOTHING = Group("")
_ALL = "help_all"
_FEW = 14  # a command with at most so many options shows all in its short help
_FIRST = {
    "model", "drafter", "prompts", "prompt", "chat", "image", "system", "url", "max_tokens", "temperature", "top_p",
    "seed", "stop", "json", "compare", "show_drafts", "out", "data", "held_out", "minutes", "steps", "resume", "host",
    "port", "api_key_file", "served_model_name", "max_batch", "learn", "limit", "runs", "batch", "tokens",
}  # fmt: skip
"""The options in the short help of a command with more."""


@dataclass(frozen=True, slots=True)
class _Parameter:
    name: str
    option: Option
    type: Any
    default: Any  # in this command; `MISSING` if it is required
    heading: str  # its section in the help
    bare: bool = False  # whether its value may also be a positional argument
    hidden: bool = False  # whether the short help omits it

    @property
    def typed_name(self) -> str:
        """The option on the command line: `--max-tokens`."""
        return (self.option.name or f"--{self.name.replace('_', '-')}").partition("/")[0]

    @property
    def repeated(self) -> bool:
        return typing.get_origin(self.type) is tuple

    @property
    def bare_name(self) -> str:
        return f"{self.name}_alone"

    def for_typer(self) -> Iterator[inspect.Parameter]:
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

    def value(self, typed: Any, with_files: bool) -> Any:
        """The field's value, from typer's; `with_files` checks what all commands share, such as that files exist."""
        if self.bare and typed is None:
            if self.default is dataclasses.MISSING:
                raise OptionError("must be given, or its value as an argument", field=self.name)
            return self.default
        check = _CHECKS.get(f"{self.typed_name} {self.option.metavar}") or _CHECKS.get(self.typed_name)
        with errors_about(self.name):
            for each in (typed or self.default) if self.repeated else [typed]:
                if check is not None and with_files and each is not None:
                    check(each)
        if self.repeated:
            return tuple(typed or self.default)
        least = self.option.least
        if typed is not None and least is not None and typed < least:
            raise OptionError(f"must be {least} or more, got {typed}", field=self.name)
        return typed


def command(run: Command, names: Mapping[str, str] | None = None, with_files: bool = True) -> Callable[..., int]:
    """A function for typer with the options of the dataclass that `run` takes.

    An error about a field gets the option's name on the command line, or one of `names`; `with_files` is of
    `_Parameter.value`.
    """
    kind = next(iter(typing.get_type_hints(run).values()))
    parameters = {each.name: each for each in _parameters(kind, _NOTHING)}
    hidden = [name for name in parameters if name not in _FIRST] if len(parameters) > _FEW else []
    for name in hidden:
        must = parameters[name].default is dataclasses.MISSING
        parameters[name] = dataclasses.replace(parameters[name], hidden=not must)

    @functools.wraps(run)
    def call(**typed: Any) -> int:
        try:
            typed.pop(_ALL, None)
            for name, each in parameters.items():
                if (alone := typed.pop(each.bare_name, None)) is None:
                    continue
                if (given := typed[name]) not in (None, alone):
                    raise OptionError(f"is {given!r}, and the argument is {alone!r}; give one", field=name)
                typed[name] = alone
            values = {name: parameters[name].value(given, with_files) for name, given in typed.items()}
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
    # Terminals wrap the paragraphs of a help text by themselves.
    call.__doc__ = "\n\n".join(" ".join(each.split()) for each in (run.__doc__ or "").split("\n\n"))
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


def read_words(kind: type[Read], words: Mapping[str, Any]) -> Read:
    """A dataclass of options from values by name, parsed as on the command line.

    `words` are values as on the command line, lists for repeated options, or bools for flags. Files are not checked,
    because the options may be used on another machine. Raises OptionError for an unknown option or an invalid value.
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
    app.command()(command(keep, with_files=False))
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


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _one_of(what: str, *valid: str) -> Callable[[str], None]:
    def look(value: str) -> None:
        if value not in valid:
            raise UnknownOptionError.nearest(what, value, valid)

    return look


def _device(value: str) -> None:
    _one_of("device", "auto", "cpu", "cuda")(value.partition(":")[0])


def _model(value: str) -> None:
    if value.startswith("embedded:"):
        embedded_folder(value.removeprefix("embedded:"))
    else:
        refuse_lost_model(value)


def _plan(file: Path) -> None:
    if not user_path(file).exists():
        raise DataError(f"cannot read the plan {str(file)!r}: No such file or directory")


def _data(value: Path) -> None:
    if str(value) != "self" and not str(value).startswith("hf:") and not user_path(value).exists():
        raise DataError(f"there is no data file {str(value)!r}; check the path")


def _prompts(value: str | Path) -> None:
    file = user_path(value)
    if {*file.suffixes} & {".json", ".jsonl", ".txt"} and not file.exists():
        raise DataError(f"there is no prompts file {str(value)!r}; check the path")


def _readable(field: str) -> Callable[[Path], None]:
    def look(file: Path) -> None:
        try:
            file.open("rb").close()
        except OSError as error:
            raise OptionError(f"cannot be read ({error.strerror or error}): {str(file)!r}", field=field) from error

    return look


def _port(value: int) -> None:
    if value > 65_535:
        raise OptionError(f"must be at most 65535, got {value}", field="port")


_CHECKS: Mapping[str, Callable[[Any], object]] = {
    "--adapters": named_adapter,
    "--allow-rule": rule_words,
    "--api-key-file": _readable("api_key_file"),
    "--chat-template": _readable("chat_template"),
    "--controller": controller_from_spec,
    "--data": _data,
    "--device": _device,
    "--drafter D": check_drafter_words,  # in other commands it is a path
    "--drafters-dir": refuse_no_folder,
    "--dtype": lambda value: _one_of("dtype", "auto", *DTYPE_NAMES)(value.removeprefix("torch.")),
    "--for": _one_of("engine", *ENGINES),
    "--held-out": _data,
    "--kv-dtype": _one_of("kv dtype", *KV_DTYPES),
    "--max-body-bytes": lambda value: read_bytes("max_body_bytes", value),
    "--max-cache-bytes": lambda value: read_bytes("max_cache_bytes", value),
    "--merge-adapter": refuse_no_adapter,
    "--model": _model,
    "MODEL": _model,
    "--pad-to": _one_of("padding size", *PADDED_NAMES),
    "--plan": _plan,
    "--port": _port,
    "--prefix-cache-bytes": lambda value: read_bytes("prefix_cache_bytes", value),
    "--prompts": _prompts,
    "--rule": rule_words,
    "--simulate": _plan,
    "--start-from": lambda folder: refuse_lost_model(str(folder)),
    "--tls-certificate": _readable("tls_certificate"),
    "--tls-key": _readable("tls_key"),
    "--weights": _one_of("weights", *BITS),
}
