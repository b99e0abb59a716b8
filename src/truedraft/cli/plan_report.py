"""Tables, records and pictures of `truedraft plan`, and the results for a load (`--load`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.cli.terminal import Terminal, interval_text, json_line
from truedraft.errors import OptionError
from truedraft.files import write_errors
from truedraft.options import changed_fields, check_positive, option, record_of
from truedraft.pictures import Line, can_draw, check_drawing, line_chart, save

if TYPE_CHECKING:
    from truedraft.measure import Level, Plan, Prediction, WhatIf

_MEGA, _MILLI = 1e6, 1e3
_SERVED_BATCH = 32  # the default of `truedraft serve`


class PlanOutput:
    """The output of a plan: a folder with a record of this name and pictures as PNG and SVG, or a .json file with these
    next to it; without `out` nothing. Raises DataError if it cannot be written, MissingExtraError for a folder without
    a plotting library.
    """

    def __init__(self, out: Path | None, file: str, terminal: Terminal) -> None:
        self.record: Path | None = None
        self._terminal = terminal
        if out is None:
            return
        with write_errors(out):
            out = out.expanduser()
            is_file = out.suffix == ".json"
            if not is_file:
                check_drawing("pictures", "name a .json file with --out")
            self.record = out if is_file else out / file
            self._prefix = f"{out.stem}-" if is_file else ""
            self.record.parent.mkdir(parents=True, exist_ok=True)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the record; before the pictures, which may fail; DataError if it cannot be written."""
        if self.record is None:
            return
        with write_errors(self.record):
            self.record.write_text(json_line(record), encoding="utf-8")
        self._terminal.note(f"written: {self.record}")

    def draw(
        self, name: str, lines: Mapping[str, Line], labels: tuple[str, str, str], log: bool = False, even: bool = False
    ) -> None:
        """Draw lines as `name`.png and `name`.svg, if a plotting library is installed; DataError if that fails.

        `log` and the labels are of `line_chart`; `even` also draws a line at 1, where nothing is gained.
        """
        if self.record is None or not can_draw() or not any(lines.values()):
            return
        stem = self.record.parent / f"{self._prefix}{name}"
        figure = line_chart(lines, labels, log=log, level=(1.0, None) if even else None)
        with write_errors(stem):
            save(figure, stem)


def print_plan(made: Plan, best: Sequence[Prediction], terminal: Terminal) -> None:
    """Print the best size of each drafter."""
    rows = [
        (
            each.option.drafter,
            interval_text(each.option.tokens_per_call),
            interval_text(each.speedup),
            break_even_text(made, each),
            f"{_MILLI * (each.step_s - each.plain_s):+.2f}",
            f"{each.drafting.memory.weights / _MEGA:.0f}",
            f"{each.drafting.memory.cached_token}",
        )
        for each in best
    ]
    temperature = made.sampling.get("temperature")
    how = "greedy" if not temperature else f"temperature {temperature:g}"
    about = (
        f"{made.model.get('model')}, {made.model.get('dtype')}, {made.machine.get('threads')} threads, {how}, batch "
        f"{made.batch}; {made.prompts} prompts, {made.tokens} tokens, {made.memory.weights / _MEGA:.0f} MB of weights, "
        f"{made.memory.cached_token} bytes a cached token"
    )
    terminal.out.print()
    terminal.print(about, style="dim")
    titles = ("drafter, best size", "tokens per call", "predicted speed-up", "no gain from batch")
    terminal.table((*titles, "ms more a step", "MB", "bytes a token"), rows)
    ways = made.ways(best[0].drafting.drafter)
    if len(ways) > 1:
        listing = "; ".join(
            f"{each.option.drafter} {each.option.tokens_per_call.value:.2f}, {each.speedup.value:.2f}" for each in ways
        )
        how = "the best of each way to draft it, tokens per call and predicted speed-up"
        terminal.print(f"{how}: {listing}", style="dim")


def print_check(checked: Mapping[str, Any], terminal: Terminal) -> None:
    """Print the predicted and the measured speedup."""
    measured, tokens = checked["speedup"], checked["tokens_per_call"]
    faster = "-" if measured is None else interval_text(measured)
    rows = [
        ("tokens per call", interval_text(checked["predicted_tokens_per_call"]), f"{tokens:.2f}"),
        ("speed-up", interval_text(checked["predicted_speedup"]), faster),
        ("speed-up with as many tokens per call", f"{checked['predicted_at_measured_tokens']:.2f}", faster),
    ]
    prompts = f"{checked['prompts']} prompts that the plan has not seen"
    terminal.out.print()
    terminal.print(f"{checked['drafter']} run in alternation with plain decoding, {prompts}", style="dim")
    terminal.table(("", "predicted", "measured"), rows)
    high = None if measured is None else measured["high"]
    if high is not None and high < checked["predicted_at_measured_tokens"]:
        why = "the prediction has only forwards and drafting; verdicts and the host take the rest"
        terminal.print(f"note: slower than predicted, for {why}", style="dim")


def print_recommended(made: Plan, run: Prediction, terminal: Terminal) -> None:
    """Print the recommended drafter, and why it is not the predicted one if so."""
    found, words = made.recommended(), run.option.drafter
    why = ""
    if found != words:
        why = f"; {words} was predicted {run.speedup.value:.2f}"
        why += f", and measured {made.measured[words]:.2f}" if words in made.measured else ""
    elif words not in made.measured:
        why = "; it was not measured"
    terminal.print(f"recommended: {found}{why}", style="bold")


def break_even_text(made: Plan, prediction: Prediction, what_if: WhatIf | None = None) -> str:
    """The batch from which drafting gains nothing."""
    from truedraft.measure import BATCHES

    found = made.break_even(prediction, what_if)
    return f"above {BATCHES[-1]}" if found is None else str(found)


def plan_record(made: Plan, best: Sequence[Prediction], checked: Mapping[str, Any]) -> dict[str, Any]:
    """The plan for the JSON record."""
    from truedraft.measure import prediction_record

    measured = checked["speedup"]
    predicted = [
        {
            **prediction_record(each),
            "break_even_batch": made.break_even(each),
            "weight_bytes": each.drafting.memory.weights,
            "cached_token_bytes": each.drafting.memory.cached_token,
            "ms_more_a_step": _MILLI * (each.step_s - each.plain_s),
        }
        for each in best
    ]
    return {
        "command": "plan",
        "recommended": made.recommended(),
        "speedup": None if measured is None else measured["value"],
        "tokens_per_s": checked["decode_tokens_per_s"],
        "identical": checked["identical"],
        "predicted": predicted,
        "ways": [prediction_record(each) for each in made.ways(best[0].drafting.drafter)],
        "check": dict(checked),
        **record_of(made, "model", "machine", "sampling", "prompts", "tokens", "context", "batch"),
        "weight_bytes": made.memory.weights,
        "cached_token_bytes": made.memory.cached_token,
    }


def draw_plan(made: Plan, best: Sequence[Prediction], output: PlanOutput) -> None:
    """Draw survival by depth, cost curves, and speedup by batch size, of each drafter's best size."""
    survival = {
        each.drafting.drafter: [(float(depth), share) for depth, share in enumerate(each.drafting.survival, 1)]
        for each in best
    }
    output.draw("survival", survival, ("Survival by depth", "drafted token", "share of steps in which it is accepted"))
    costs = {"the target's forward, by rows": [(n, _MILLI * made.forwards(n, [made.context])) for n in range(1, 33)]}
    for each in best:
        costs[f"{each.drafting.drafter}, by depth"] = [
            (point.depth, _MILLI * point.seconds) for point in each.drafting.cost.points
        ]
    output.draw("costs", costs, ("What forwards and proposals cost", "rows, or depth", "milliseconds"))
    draw_batches(made, best, output, "batches")


def draw_batches(
    made: Plan, best: Sequence[Prediction], output: PlanOutput, name: str, what_if: WhatIf | None = None
) -> None:
    """Draw the predicted speedup by batch size."""
    over = {each.option.drafter: list(made.there(what_if).over_batches(each)) for each in best}
    labels = ("Predicted speed-up over batch size", "requests answered together", "times plain decoding")
    output.draw(name, over, labels, log=True, even=True)


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
        None, "Most requests that a replica answers together.", "N", shown_default=f"{_SERVED_BATCH}", least=1
    )

    def check(self, with_curves: bool) -> None:
        """Refuse options without effect, and a load without curves, before anything is planned.

        OptionError names the option.
        """
        if self.load is not None and not with_curves:
            why = "needs a model's curves, which --alpha has none of; give --simulate or a model"
            raise OptionError(why, field="load")
        if self.load is None and (given := changed_fields(self)):
            raise OptionError("is for --load; name the requests that come in a second", field=given[0])
        check_positive("load", 1.0 if self.load is None else self.load)
        check_positive("token_ms", 1.0 if self.token_ms is None else self.token_ms)


def report_load(
    made: Plan, options: LoadOptions, terminal: Terminal, output: PlanOutput, what_if: WhatIf | None = None
) -> dict[str, Any]:
    """Print and draw the results for a load; returns them for the record, empty if no load was given.

    Raises OptionError for a number out of range.
    """
    from truedraft.measure import Traffic, levels, load_record

    if options.load is None:
        return {}
    traffic = Traffic.of(made, options.load, options.prompt_tokens, options.answer_tokens, options.token_ms)
    found = levels(made, traffic, options.max_batch or _SERVED_BATCH, what_if)
    record = load_record(found, traffic)
    measured = int(made.forwards.base.sizes[-1])
    _print_levels(found, measured, terminal)
    for line in _sentences(record):
        terminal.print(line, style="bold")
    terminal.print(_assumed(record, found, measured), style="dim")
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
    terminal.table(titles, rows)


def _sentences(record: Mapping[str, Any]) -> list[str]:
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
        return "no number of replicas is enough, because a single request takes longer for a token"
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
