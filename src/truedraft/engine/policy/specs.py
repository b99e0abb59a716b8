"""Controllers by name: the only place where words become controllers; help takes its list from here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from truedraft.engine.policy.base import Controller, FixedBudget
from truedraft.engine.policy.goodput import Goodput
from truedraft.engine.policy.heuristics import AssistedHeuristic, ConfidenceStop, RoundRobin, Schedule
from truedraft.errors import OptionError, UnknownOptionError, errors_about
from truedraft.options import Words, called, read_whole


@dataclass(frozen=True, slots=True)
class ControllerKind:
    """Options with their defaults or an example, and what makes the controller."""

    options: Mapping[str, str]
    meaning: str
    made: Callable[..., Controller]


def controller_from_spec(spec: str) -> Controller:
    """Make a controller from its word, as `--controller` takes it: `KIND[,option=value]...`.

    A schedule's options are numbers of requests: `schedule,1=4,4=2,16=0`.
    """
    with errors_about("controller"):
        words = Words.parse("controller", spec)
        kind = KINDS.get(words.kind)
        if kind is None:
            raise UnknownOptionError.nearest("controller", words.kind, tuple(KINDS))
        words.check(words.options if words.kind == "schedule" else kind.options)  # a schedule's are numbers
        controller: Controller = called(kind.made, words.options, {"lengths": words.options})
        return controller


def controller_help() -> str:
    """Every kind of controller with its options, a sentence each."""
    kinds = []
    for word, kind in KINDS.items():
        options = ", ".join(f"{name}={value}" for name, value in kind.options.items())
        kinds.append(f"{word}{f', options {options}' if options else ''}: {kind.meaning}")
    return ".\n\n".join(kinds) + "."


def _goodput(probing: float = 0.01) -> Controller:
    if not 0.0 <= probing <= 0.5:
        raise OptionError(f"must be a share of time in [0, 0.5], got {probing:g}", field="probing")
    return Goodput(probing=probing)


def _schedule(lengths: Mapping[str, str]) -> Controller:
    return Schedule({read_whole("requests", name): read_whole("length", to) for name, to in lengths.items()})


KINDS: Mapping[str, ControllerKind] = {
    "goodput": ControllerKind(
        {"probing": "0.01"},
        "at each step the drafters and lengths from which most tokens a second are expected, from measured costs and "
        "running acceptance, or plain decoding; this share of the time is used to try others",
        _goodput,
    ),
    "fixed": ControllerKind({}, "always the first drafter, as far as its options allow", FixedBudget),
    "heuristic": ControllerKind(
        {"start": "5"}, "two tokens more after a proposal that was accepted whole, else one less", AssistedHeuristic
    ),
    "confidence": ControllerKind(
        {"threshold": "0.4"}, "stops after a token to which the drafter gave less than this", ConfidenceStop
    ),
    "in-turn": ControllerKind(
        {}, "every drafter in turn, and merged two by two, with all budgets; for checks", RoundRobin
    ),
    "schedule": ControllerKind(
        {"1": "4", "4": "2", "16": "0"}, "lengths by the number of requests, from each number on", _schedule
    ),
}
"""The kinds of controllers by their words."""
