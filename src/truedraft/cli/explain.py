"""`--explain`: the decision of each step, its reason and its gain, as a table and a timeline of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from truedraft.cli.streams import visible
from truedraft.cli.terminal import print_table
from truedraft.core.stats import PROBE
from truedraft.engine.policy.decisions import PLAIN, Decisions, StepWindow
from truedraft.measure.bench import decisions_table

if TYPE_CHECKING:
    from rich.console import Console


_MARKS = {PLAIN: ".", PROBE: "?"}
_LABELS = ("drafter", "drafted", "accepted")
_SPARE = "abcdefghijklmnopqrstuvwxyz"
_WIDEST = 100


def explain(decisions: Decisions, has_drafter: bool, console: Console) -> None:
    """Print the decisions and their estimated gain.

    Args:
        has_drafter: whether any drafter could draft.
    """
    if not has_drafter:
        console.print("nothing was decided: there is no drafter, so every step was plain decoding", soft_wrap=True)
        return
    if not decisions.steps:
        console.print("nothing was decided: no step came behind the prompt", soft_wrap=True)
        return
    table = decisions_table(decisions)
    print_table(table.headings, table.rows, console)
    for line in timeline(decisions, min(console.width, _WIDEST)):
        console.print(visible(line), soft_wrap=True)
    console.print(verdict(decisions), soft_wrap=True)


def verdict(decisions: Decisions) -> str:
    """The estimated speedup in a sentence, or why there is none."""
    if not decisions.drafted:
        return "nothing was drafted: every step was plain decoding"
    speedup = decisions.speedup()
    if speedup is None:
        return "no speed-up is estimated: there are no costs, and too few plain steps tell what one takes"
    return speedup.describe()


def timeline(decisions: Decisions, width: int) -> list[str]:
    """The steps from left to right: drafter, drafted and accepted tokens; then a legend.

    Args:
        decisions: at least one step.
    """
    marks = marks_of(list(decisions.ordered))
    room = max(width - max(map(len, _LABELS)) - 1, 1)
    columns = decisions.timeline(room)
    rows = (
        "".join(marks[_most_frequent(each)] for each in columns),
        "".join(_digit(each.drafted, each) for each in columns),
        "".join(_digit(each.accepted, each) for each in columns),
    )
    lines = [f"{label:<{max(map(len, _LABELS))}} {row}" for label, row in zip(_LABELS, rows, strict=True)]
    steps = max(each.steps for each in columns)
    column = "a step" if steps == 1 else f"{steps} steps"
    meanings = " · ".join(f"{mark} {name}" for name, mark in marks.items())
    many = any(each.requests > each.steps for each in columns) or steps > 1
    numbers = "tokens, the mean of a step and request, + from ten on" if many else "tokens, + from ten on"
    return [*lines, f"{meanings} · each column is {column}, numbers are {numbers}"]


def marks_of(names: Sequence[str]) -> Mapping[str, str]:
    """A character for each name: its first letter that no other name has.

    >>> marks_of(["draft", "draft-2", "plain"])
    {'draft': 'd', 'draft-2': 'r', 'plain': '.'}
    """
    marks: dict[str, str] = {}
    for name in names:
        letters = (letter for letter in name.lower() + _SPARE if letter.isalpha() and letter not in marks.values())
        marks[name] = _MARKS[name] if name in _MARKS else next(letters, "#")
    return marks


def _most_frequent(column: StepWindow) -> str:
    return max(column.decisions, key=lambda name: column.decisions[name])


def _digit(tokens: int, column: StepWindow) -> str:
    """Mean tokens per step and request as one character; a blank if nothing was drafted."""
    mean = tokens / column.requests
    if not tokens:
        return " " if not column.drafted else "0"
    return "+" if round(mean) > 9 else str(round(mean))
