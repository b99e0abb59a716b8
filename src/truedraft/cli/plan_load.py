"""`truedraft plan --load`: the gain of drafting as the load grows, and the number of replicas for a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from truedraft.cli.plan_pictures import PlanOutput
from truedraft.cli.terminal import Terminal, print_table
from truedraft.errors import OptionError
from truedraft.options import check_positive, option

if TYPE_CHECKING:
    from truedraft.measure import Level, Plan, WhatIf

_USUAL_BATCH = 32  # the default of `truedraft serve`


@dataclass(frozen=True)
class LoadOptions:
    """The load."""

    load: float | None = option(None, "Requests a second: how many replicas answer so many, drafting or not?", "R")
    prompt_tokens: int | None = option(
        None, "Tokens that are read for each.", "N", shown_default="the plan's mean", least=1
    )
    answer_tokens: int | None = option(None, "Tokens of an answer.", "N", shown_default="the plan's mean", least=2)
    token_ms: float | None = option(
        None, "Longest that a token may take: so few requests share a replica.", "MS", shown_default="no bound"
    )
    max_batch: int | None = option(
        None, "Most requests that a replica answers together.", "N", shown_default=f"{_USUAL_BATCH}", least=1
    )

    def check(self, with_curves: bool) -> None:
        """Refuse options without effect, and a load without curves, before anything is planned.

        Raises:
            OptionError: names the option.
        """
        if self.load is not None and not with_curves:
            raise OptionError(
                "needs a model's curves, which --alpha has none of; give --simulate or a model", field="load"
            )
        for each in fields(self):
            if self.load is None and getattr(self, each.name) is not None:
                raise OptionError("goes with --load; name the requests that come in a second", field=each.name)
        check_positive("load", 1.0 if self.load is None else self.load)
        check_positive("token_ms", 1.0 if self.token_ms is None else self.token_ms)


def tell_load(
    made: Plan, asked: LoadOptions, terminal: Terminal, output: PlanOutput | None, what_if: WhatIf | None = None
) -> dict[str, Any]:
    """Print and draw the results for a load; returns them for the record, empty if no load was given.

    Args:
        output: for the picture; None draws none.

    Raises:
        OptionError: a number is out of range.
    """
    from truedraft.measure import Traffic, levels, load_record

    if asked.load is None:
        return {}
    traffic = Traffic.of(made, asked.load, asked.prompt_tokens, asked.answer_tokens, asked.token_ms)
    found = levels(made, traffic, asked.max_batch or _USUAL_BATCH, what_if)
    record = load_record(found, traffic)
    measured = int(made.forwards.base.sizes[-1])
    _print_levels(found, measured, terminal)
    for line in _sentences(record):
        terminal.out.print(line, style="bold", soft_wrap=True)
    terminal.out.print(_assumed(record, found, measured), style="dim", soft_wrap=True)
    if output is not None:
        lines = {
            "plain": [(level.requests, level.plain.tokens_per_s) for level in found],
            "best": [(level.requests, level.best.tokens_per_s) for level in found],
        }
        output.draw("load", lines, ("Predicted of one replica", "requests open", "tokens a second"), log=True)
    return {"load": record}


def _print_levels(found: Sequence[Level], measured: int, terminal: Terminal) -> None:
    """Print a line for each doubling of the requests, and for the most."""
    shown = {found[2**power - 1].requests for power in range(len(found).bit_length())} | {found[-1].requests}
    rows = [
        (
            f"{level.requests}{'~' if level.rows > measured else ''}",
            f"{level.plain.tokens_per_s:.1f}",
            f"{level.best.tokens_per_s:.1f}",
            f"{level.ratio:.2f}",
            f"{level.plain.token_ms:.1f}",
            f"{level.best.token_ms:.1f}",
            level.best.drafter,
        )
        for level in found
        if level.requests in shown
    ]
    terminal.out.print()
    terminal.out.print("predicted of one replica with so many requests open", style="dim")
    titles = ("requests", "tokens/s plain", "tokens/s best", "ratio", "ms a token plain", "ms a token best", "best")
    print_table(titles, rows, terminal.out)


def _sentences(record: Mapping[str, Any]) -> list[str]:
    """The load at which drafting stops to gain, and the number of replicas, in sentences."""
    stops, most = record["stops_to_pay"], record["levels"][-1]["requests"]
    if stops is None:
        said = f"drafting pays up to {most} open requests, the most of a replica"
    elif stops == 1:
        said = "drafting does not pay, however few requests are open"
    else:
        said = f"drafting stops to pay at {stops} open requests"
    bound = "" if record["token_ms"] is None else f", a token in at most {record['token_ms']:g} ms"
    load = (
        f"{record['requests_per_s']:g} requests a second, each of {record['prompt']} prompt and {record['answer']} "
        f"answer tokens{bound}:"
    )
    return [said, load, *(f"  {name}: {_needed(each)}" for name, each in record["replicas"].items())]


def _needed(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "no number of replicas is enough, for one request alone takes longer for a token"
    way, count, requests = found["way"], found["count"], found["requests"]
    return (
        f"{count} replica{'' if count == 1 else 's'}, {requests} request{'' if requests == 1 else 's'} open in each, "
        f"{way['token_ms']:.1f} ms a token, drafter {way['drafter']}"
    )


def _assumed(record: Mapping[str, Any], found: Sequence[Level], measured: int) -> str:
    beyond = any(level.rows > measured for level in found)
    return (
        "assumed: requests are shared evenly, and a replica is asked for "
        f"{record['filled']:g} of what it could answer, for they do not come evenly; all draft alike, at their mean "
        "context; while a prompt is read the others wait, and no prefix of it is kept; host and verdicts take nothing"
        + (f"; ~ forwards of more than {measured} rows, which were not measured, go on as the last ones" * beyond)
    )
