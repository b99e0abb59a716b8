"""Options, each defined once: name, type, default and help are a field of a dataclass. And words that name parts.

Commands and servers read both: `truedraft.cli.parameters` makes typer's parameters of such dataclasses, and
`Words.parse` reads `KIND[:PATH][,option=value]...` and `KIND(MEMBER;MEMBER...)`, as drafters and rules are typed.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import math
import re
import reprlib
import sys
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from types import ModuleType, SimpleNamespace, UnionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from truedraft.errors import OptionError, UnknownOptionError

_Given = TypeVar("_Given", contravariant=True)
_Kept = TypeVar("_Kept", covariant=True)
_Read = TypeVar("_Read")

if TYPE_CHECKING:

    class Takes(Generic[_Given, _Kept]):
        """The type of a dataclass field that is given in several forms and kept in one: `Takes[GIVEN, KEPT]`.

        Type checkers see a descriptor and take the argument of `__set__` as the constructor's.
        """

        def __get__(self, owner: object, kind: Any = None) -> _Kept: ...
        def __set__(self, owner: object, given: _Given) -> None: ...
else:

    class Takes:
        """At run time the type as kept, which commands read."""

        def __class_getitem__(cls, forms: tuple[Any, Any]) -> Any:
            return forms[1]


_COMPOSED = re.compile(r"\s*([A-Za-z][\w-]*)\s*\(")


@dataclass(frozen=True, slots=True)
class Option:
    """How a field is typed, and its help."""

    meaning: str
    metavar: str | None = None  # name of its value; "" for one that takes no value
    name: str | None = None  # as it is typed; None is the field's own, with dashes. One without dashes is an argument
    heading: str | None = None  # in the help; None is that of the group of its dataclass
    shown_default: str | None = None
    least: int | None = None  # of a whole number
    bare: bool = False  # whether its value may also be a plain argument of the command


@dataclass(frozen=True, slots=True)
class Group:
    """How a dataclass of options is a part of another one."""

    heading: str
    without: Collection[str] = ()  # fields that cannot be typed here; they keep their defaults
    defaults: Mapping[str, Any] = field(default_factory=dict)  # replace those of the dataclass
    bare: str | None = None  # the field with a value that may also be a plain argument of the command


def option(default: Any = dataclasses.MISSING, meaning: str = "", metavar: str | None = None, **more: Any) -> Any:
    """A field that is an option; `more` are further fields of `Option`. Without a default it is required."""
    needed = default is dataclasses.MISSING
    return field(default=default, kw_only=needed, metadata={"option": Option(meaning, metavar, **more)})


def untyped(default: Any) -> Any:
    """A field that is no option of a command."""
    return default


def flag(meaning: str, **more: Any) -> Any:
    """An option that takes no value, and is off by default."""
    return option(False, meaning, "", **more)


def group(heading: str, without: Collection[str] = (), bare: str | None = None, **defaults: Any) -> Any:
    """A field that holds a dataclass of options."""
    return field(kw_only=True, metadata={"group": Group(heading, without, defaults, bare)})


NEEDED = dataclasses.MISSING
"""Default of an option that is required in a group."""
UNNAMED = "auto"
"""The default model: `smollm2` if it is installed, else the embedded target."""
MODEL_HELP = "smollm2, a folder, a GGUF file, a name on the Hugging Face hub, or embedded:target, a fixture of tests."
UNNAMED_HELP = "smollm2 if it is installed, else embedded:target"


DTYPE_NAMES = ("float32", "bfloat16", "float16")
"""Formats of weights, as they are typed and written."""
BITS = {"q8": 8, "q4": 4}
"""Bits of a weight that is quantised at load, by the word typed."""
KV_DTYPES = ("auto", "int8")
"""Formats of keys and values, as they are typed."""
PADDED_NAMES = ("110M", "500M", "7B")
"""Sizes that models are padded to."""


@dataclass(frozen=True)
class ModelOptions:
    """The target model."""

    model: str = option(UNNAMED, MODEL_HELP, "M", shown_default=UNNAMED_HELP)
    pad_to: str | None = option(
        None, "110M, 500M or 7B: the model's answers at the cost of a model of that size.", "SIZE"
    )
    weights: str | None = option(
        None, "q8 or q4: linear weights are quantised to 8 or 4 bits at load; answers are those of these weights.", "Q"
    )

    @property
    def of_target(self) -> dict[str, Any]:
        """Keyword arguments of `load_model`."""
        return record_of(self, "pad_to", "weights")


@dataclass(frozen=True)
class MachineOptions:
    """Device and number formats of models."""

    dtype: str = option("auto", "auto, float32, bfloat16 or float16.", "DTYPE")
    kv_dtype: str = option(
        "auto",
        "Of keys and values: auto, the model's dtype, or int8, half of bfloat16's memory and answers of its own.",
        "DTYPE",
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N.", "DEVICE")
    threads: int | None = option(None, "CPU threads.", "N", shown_default="torch's choice", least=1)
    no_fast_paths: bool = flag("Run models as they were loaded: nothing packed, nothing fused.")

    @property
    def of_models(self) -> dict[str, Any]:
        """Keyword arguments of `load_model`."""
        return record_of(self, "dtype", "device", "kv_dtype") | {"fast_paths": not self.no_fast_paths}


@dataclass(frozen=True, slots=True)
class Words:
    """A part by its words, `KIND[:PATH][,option=value]...`: `draft:some/folder,num_speculative_tokens=3`.

    Or one made of others, `KIND(MEMBER;MEMBER...)[,option=value]...`: `portfolio(draft;prompt-lookup)`.
    """

    what: str  # noun for messages, "drafter" or "rule"
    kind: str
    path: str | None  # after the kind
    options: Mapping[str, str]
    members: Sequence[str] = ()  # words of each, as typed; empty without parentheses

    @classmethod
    def parse(cls, what: str, typed: str) -> Words:
        """Read the words; double quotes keep commas, semicolons and parentheses in a path or a value.

        Raises OptionError if a part is not of that form, or an option is there twice.
        """
        if typed.count('"') % 2:
            raise OptionError(f"{what} {typed!r} has a double quote without its second")
        composed = _COMPOSED.match(typed)
        if composed is None:
            head, *parts = _split(typed)
            kind, _, path = head.partition(":")
            return cls(what, kind.strip(), path or None, _options(what, typed, parts))
        members, rest = _members(what, typed, composed.end())
        head, *parts = _split(rest)
        if head.strip():
            raise OptionError(f"{what} {typed!r}: its members are followed by {head.strip()!r}; write ,option=value")
        return cls(what, composed[1], None, _options(what, typed, parts), members)

    def check(self, options: Collection[str], takes_path: bool = False, takes_members: bool = False) -> None:
        """Refuse a path, members or options that this kind does not take, and members that it needs."""
        for name in self.options:
            if name not in options:
                valid = options or ["(none)"]
                raise UnknownOptionError.nearest(f"option of {self.what} {self.kind!r}", name, valid)
        if self.path is not None and not takes_path:
            raise OptionError(f"{self.what} {self.kind!r} takes no path, got {self.path!r}")
        if self.members and not takes_members:
            raise OptionError(f"{self.what} {self.kind!r} has no members, got ({';'.join(self.members)})")
        if takes_members and not self.members:
            raise OptionError(f"{self.what} {self.kind!r} needs members in parentheses: {self.kind}(A;B)")


def _options(what: str, typed: str, parts: Sequence[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in parts:
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not name or not value:
            raise OptionError(f"{what} {typed!r}: {part.strip()!r} is not of the form option=value")
        if name in options:
            raise OptionError(f"{what} {typed!r} has {name} twice; give it once")
        options[name] = value
    return options


def _split(typed: str) -> list[str]:
    """The parts between commas outside double quotes, without the quotes."""
    parts = [""]
    for number, piece in enumerate(typed.split('"')):
        first, *others = [piece] if number % 2 else piece.split(",")
        parts[-1] += first
        parts += others
    return parts


def _members(what: str, typed: str, start: int) -> tuple[list[str], str]:
    """The members between the semicolons of a parenthesis opened before `start`, and the text after it.

    Semicolons and parentheses in double quotes or in inner parentheses belong to a member; its quotes are kept.
    """
    members: list[str] = []
    depth, quoted, first = 1, False, start
    for place in range(start, len(typed)):
        character = typed[place]
        if character == '"':
            quoted = not quoted
        elif not quoted:
            depth += (character == "(") - (character == ")")
            if depth == 0 or (depth == 1 and character == ";"):
                members.append(typed[first:place].strip())
                first = place + 1
            if depth == 0:
                break
    else:
        raise OptionError(f"{what} {typed!r} has a parenthesis without its second")
    if "" in members:
        raise OptionError(f"{what} {typed!r} has an empty member; write as many as there are, as in (A;B)")
    return members, typed[first:]


def _reader(kind: Callable[[str], _Read], noun: str) -> Callable[[str, str], _Read]:
    """A function that reads the value of a named option from text, or raises an OptionError."""

    def read(name: str, typed: str) -> _Read:
        try:
            return kind(typed)
        except (ValueError, KeyError) as error:
            raise OptionError(f"must be {noun}, got {typed!r}", field=name) from error

    return read


read_whole = _reader(int, "a whole number")
read_number = _reader(float, "a number")


def _read_wholes(name: str, typed: str) -> Sequence[int]:
    """Read whole numbers, as 3-2-1 or as a Python list."""
    numbers = typed.strip("[()], ").replace(",", "-") if typed[:1] in ("[", "(") else typed
    return [read_whole(name, number) for number in numbers.split("-")]


_READERS: Mapping[object, Callable[[str, str], Any]] = {
    int: read_whole,
    float: read_number,
    bool: _reader({"true": True, "false": False}.__getitem__, "true or false"),
    str: lambda name, typed: typed,
    Sequence[int]: _read_wholes,
}


def _read_as(name: str, typed: str, annotation: object) -> Any:
    """Read a value as its annotation says, or else as a Python literal."""
    if typing.get_origin(annotation) in (typing.Union, UnionType):
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not type(None))
    if annotation in _READERS:
        return _READERS[annotation](name, typed)
    try:
        return ast.literal_eval(typed)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return typed


def called(
    make: Callable[..., Any],
    options: Mapping[str, str],
    given: Mapping[str, object],
    parts: Mapping[str, Callable[..., object]] | None = None,
) -> Any:
    """Call a function or a class with options as typed, each read by its parameter's annotation.

    `parts` make the values of some parameters, and are called in the same way with the options that they have. Raises
    OptionError if a value is not as it is annotated.
    """
    parameters = inspect.signature(make).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    hints = _hints(make.__init__ if isinstance(make, type) else make)  # type: ignore[misc]
    typed = {name: value for name, value in options.items() if name in parameters or takes_any}
    arguments = {name: _read_as(name, value, hints.get(name)) for name, value in typed.items()}
    arguments |= {name: value for name, value in given.items() if name in parameters}
    return make(**arguments, **{name: called(part, options, given) for name, part in (parts or {}).items()})


def _hints(function: Any) -> dict[str, Any]:
    """Annotations of its parameters that can be evaluated, without those only for type checkers."""
    hints: dict[str, Any] = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        one = SimpleNamespace(__annotations__={name: annotation})
        with contextlib.suppress(Exception):
            hints |= typing.get_type_hints(one, function.__globals__)
    return hints


def read_bytes(name: str, typed: str) -> int:
    """Read a number of bytes: 1000000, or 512K, 300M, 1.5G, in powers of 1,024; or raise an `OptionError`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", typed.strip(), re.IGNORECASE)
    if found is None:
        raise OptionError(f"must be a size as 1000000, 300M or 1.5G, got {typed!r}", field=name)
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def read_record(kind: Any, data: object) -> Any:
    """Read a value from JSON data: a dataclass, as `dataclasses.asdict` gives it, a (named) tuple, a mapping or a plain
    type. Raises OptionError if it is another kind of value, or an object with other fields.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(data, dict):
        hints, names = typing.get_type_hints(kind), {each.name for each in dataclasses.fields(kind)}
        if set(data) == names:
            return kind(**{name: read_record(hints[name], value) for name, value in data.items()})  # type: ignore[operator]
    elif origin is tuple and isinstance(data, list):
        kinds = inner[:1] * len(data) if inner[-1] is Ellipsis else inner
        if len(kinds) == len(data):
            return tuple(map(read_record, kinds, data))
    elif hasattr(kind, "_fields") and isinstance(data, list) and len(data) == len(kind._fields):
        return kind(*map(read_record, typing.get_type_hints(kind).values(), data))
    elif kind is float and isinstance(data, int | float) and not isinstance(data, bool):
        return float(data)
    elif isinstance(data, origin or kind) and (kind is bool or not isinstance(data, bool)):
        return data
    raise OptionError(f"a record of {getattr(kind, '__name__', kind)} is needed, got {reprlib.repr(data)}")


def record_of(value: Any, *names: str) -> dict[str, Any]:
    """Attributes of a value for JSON, by name; without names all fields of a dataclass.

    Dataclasses within become objects, of their `as_dict` where they have one; tuples become lists.
    """
    return {name: _plain(getattr(value, name)) for name in names or [each.name for each in dataclasses.fields(value)]}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return value.as_dict() if hasattr(value, "as_dict") else record_of(value)
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def changed_fields(record: Any) -> list[str]:
    """Names of a dataclass's fields that differ from their defaults; all fields have one."""
    usual = type(record)()
    return [each.name for each in dataclasses.fields(record) if getattr(record, each.name) != getattr(usual, each.name)]


def check_whole(name: str, value: object, least: int) -> int:
    """Refuse anything but a whole number of `least` or more, by an `OptionError`; one of numpy becomes Python's own."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise OptionError(f"must be a whole number of {least} or more, got {value!r}", field=name)
    return int(value)


def check_share(name: str, value: float) -> None:
    """Refuse anything but a number in [0, 1], by an `OptionError`."""
    _check_number(name, value, "in [0, 1]", lambda number: 0.0 <= number <= 1.0)


def check_not_negative(name: str, value: float) -> None:
    """Refuse anything but a finite number of 0 or more, by an `OptionError`."""
    _check_number(name, value, "of 0 or more", lambda number: 0.0 <= number < math.inf)


def check_positive(name: str, value: float) -> None:
    """Refuse anything but a finite number above 0, by an `OptionError`."""
    _check_number(name, value, "above 0", lambda number: 0.0 < number < math.inf)


def _check_number(name: str, value: object, bounds: str, holds: Callable[[Any], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not holds(value):
        raise OptionError(f"must be a number {bounds}, got {value!r}", field=name)


def imported_module(name: str, what: str) -> ModuleType | None:
    """A user's own module, installed or in the working directory; None if there is none, OptionError if it breaks."""
    here = str(Path.cwd())
    sys.path.insert(0, here)  # as in `python -m`
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise OptionError(f"the module {name!r} {what} cannot be imported ({error})") from error
    except (Exception, SystemExit) as error:
        raise OptionError(f"the module {name!r} {what} cannot be imported ({type(error).__name__}: {error})") from error
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)
