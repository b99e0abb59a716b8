"""Controllers by name: the one place where words become controllers, and where help takes its list of them from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from truedraft.control.base import Controller, FixedBudget
from truedraft.control.goodput import Goodput
from truedraft.control.heuristics import AssistedHeuristic, ConfidenceStop, InTurn, Schedule
from truedraft.control.survival import Exploration, Thompson, UpperBound
from truedraft.errors import OptionError, UnknownOptionError, errors_about
from truedraft.options import Words, read_number, read_whole


@dataclass(frozen=True, slots=True)
class ControllerKind:
    """A kind of controllers, as it is typed.

    Attributes:
        options: each with its default, or an example.
        meaning: what it does, in a phrase.
        make: the controller, from a word whose options are known.
    """

    options: Mapping[str, str]
    meaning: str
    make: Callable[[Words], Controller]


def controller_from_spec(spec: str) -> Controller:
    """Make a controller from its word, as `--controller` takes it: `KIND[,option=value]...`.

    A schedule's options are numbers of requests: `schedule,1=4,4=2,16=0`.

    Raises:
        UnknownOptionError: a word or an option that does not exist; names the nearest valid one.
        OptionError: an unusable value.
    """
    with errors_about("controller"):
        words = Words.parse("controller", spec)
        kind = KINDS.get(words.kind)
        if kind is None:
            raise UnknownOptionError.nearest("controller", words.kind, tuple(KINDS))
        words.check(words.options if words.kind == "schedule" else kind.options)  # a schedule's are numbers
        return kind.make(words)


def controller_help() -> str:
    """Every kind of controllers and its options, a sentence each."""
    kinds = []
    for word, kind in KINDS.items():
        options = ", ".join(f"{name}={value}" for name, value in kind.options.items())
        kinds.append(f"{word}{f', options {options}' if options else ''}: {kind.meaning}")
    return ".\n\n".join(kinds) + "."


def _goodput(words: Words) -> Controller:
    explore = words.options.get("explore", "ucb")
    explorations: dict[str, Callable[[], Exploration]] = {"ucb": UpperBound, "thompson": Thompson}
    if explore not in explorations:
        raise UnknownOptionError.nearest("explore", explore, tuple(explorations))
    probing = read_number("probing", words.options.get("probing", "0.01"))
    if not 0.0 <= probing <= 0.5:
        raise OptionError(f"must be a share of time in [0, 0.5], got {probing:g}", field="probing")
    return Goodput(explorations[explore](), probing=probing)


def _heuristic(words: Words) -> Controller:
    return AssistedHeuristic(read_whole("start", words.options.get("start", "5")))


def _confidence(words: Words) -> Controller:
    return ConfidenceStop(read_number("threshold", words.options.get("threshold", "0.4")))


def _schedule(words: Words) -> Controller:
    return Schedule({read_whole("requests", name): read_whole("length", to) for name, to in words.options.items()})


KINDS: Mapping[str, ControllerKind] = {
    "goodput": ControllerKind(
        {"explore": "ucb|thompson", "probing": "0.01"},
        "at each step the drafters and lengths from which most tokens a second are expected, from measured costs and "
        "running acceptance, or plain decoding; so much of the time goes into trying others",
        _goodput,
    ),
    "fixed": ControllerKind({}, "always the first drafter, as far as its options allow", lambda words: FixedBudget()),
    "heuristic": ControllerKind(
        {"start": "5"}, "two tokens more after a proposal that was accepted whole, else one less", _heuristic
    ),
    "confidence": ControllerKind(
        {"threshold": "0.4"}, "no further behind a token that the drafter gave less than this", _confidence
    ),
    "in-turn": ControllerKind(
        {}, "every drafter in turn, and merged two by two, with all budgets; for checks", lambda words: InTurn()
    ),
    "schedule": ControllerKind(
        {"1": "4", "4": "2", "16": "0"}, "lengths by the number of requests, from each number on", _schedule
    ),
}
"""The kinds of controllers by their words."""
