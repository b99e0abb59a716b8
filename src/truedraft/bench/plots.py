"""The pictures of a benchmark: speed by method, cost of k tokens, acceptance by position; PNG and SVG."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.bench.summary import Summary
from truedraft.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito: distinguishable without full colour vision; markers differ as well.
_OURS, _PEERS = "#0072B2", "#999999"
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = "osD^vP"
_GRID = "#dddddd"
_MILLI = 1000


def check_plotting() -> None:
    """Refuse to start a benchmark with plots where nothing can draw them.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError(
            "plots and report need matplotlib, which is not installed; `pip install 'truedraft[bench]'` brings it, "
            "or leave --out away"
        )


def draw_all(
    folder: Path, summaries: Sequence[Summary], costs: Sequence[Mapping[str, float]], limit_s: float | None, under: str
) -> list[str]:
    """Draw what there are numbers for.

    Args:
        folder: where pictures go; it exists.
        summaries: of the contestants to show.
        costs: points of the target's cost curve: rows, context, seconds.
        limit_s: seconds that reading the weights once takes; None where not known.
        under: the circumstances, written under each picture.

    Returns:
        Names of the pictures without suffix, in the report's order.
    """
    drawn = []
    if summaries:
        save(_speed(summaries, under), folder / "speed")
        drawn.append("speed")
    if costs:
        save(_costs(costs, limit_s, under), folder / "cost")
        drawn.append("cost")
    if any(summary.acceptance_per_position for summary in summaries):
        save(_acceptance(summaries, under), folder / "acceptance")
        drawn.append("acceptance")
    return drawn


def figure_of(height: float, width: float = 8.0) -> tuple[Figure, Axes]:
    """A figure of its own, in inches, outside pyplot's global list, drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _speed(summaries: Sequence[Summary], under: str) -> Figure:
    """Horizontal bars in the order of the table: names are long, so they stand beside the bars."""
    figure, axes = figure_of(1.9 + 0.42 * len(summaries))
    places = range(len(summaries))
    medians = [each.tokens_per_s.median for each in summaries]
    below = [each.tokens_per_s.median - each.tokens_per_s.low for each in summaries]
    above = [each.tokens_per_s.high - each.tokens_per_s.median for each in summaries]
    colours = [_OURS if each.ours else _PEERS for each in summaries]
    axes.barh(places, medians, color=colours, height=0.62)
    axes.errorbar(medians, places, xerr=[below, above], fmt="none", ecolor="black", elinewidth=1.2, capsize=3)
    for place, each in enumerate(summaries):
        ratio = "" if each.speedup is None else f"  ({each.speedup.mean:.2f}x plain)"
        text = f"{each.tokens_per_s.median:.1f}{ratio}"
        axes.annotate(
            text, (each.tokens_per_s.high, place), xytext=(7, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_yticks(list(places), [each.name for each in summaries])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4 * max([each.tokens_per_s.high for each in summaries] + [1e-9]))
    axes.set_xlabel("tokens per second, prefill included: median over prompts, whiskers at the quartiles", fontsize=9)
    axes.xaxis.grid(True, color=_GRID, linewidth=0.8)
    title(figure, axes, "Speed by method", under)
    return figure


def _costs(costs: Sequence[Mapping[str, float]], limit_s: float | None, under: str) -> Figure:
    """One line for each context: milliseconds of a forward by its number of tokens."""
    figure, axes = figure_of(4.6)
    contexts = sorted({point["context"] for point in costs})
    for number, context in enumerate(contexts):
        points = sorted((point["rows"], point["seconds"]) for point in costs if point["context"] == context)
        colour, marker = _LINES[number % len(_LINES)], _MARKERS[number % len(_MARKERS)]
        label = f"{context:,.0f} tokens of context"
        axes.plot(
            [rows for rows, _ in points],
            [_MILLI * seconds for _, seconds in points],
            label=label,
            color=colour,
            marker=marker,
            **_under_later_lines(number, len(contexts)),
        )
    if limit_s is not None:
        axes.axhline(_MILLI * limit_s, color="black", linestyle="--", linewidth=1.2, label="reading the weights once")
    ticks = sorted({int(point["rows"]) for point in costs})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(count) for count in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in one forward of the target")
    axes.set_ylabel("milliseconds")
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.legend(edgecolor="none", framealpha=1.0)
    title(figure, axes, "Cost of k tokens in one forward", under)
    return figure


def _acceptance(summaries: Sequence[Summary], under: str) -> Figure:
    """One line for each drafter: accepted over tried at each drafted position."""
    figure, axes = figure_of(4.6)
    drafting = [each for each in summaries if each.acceptance_per_position]
    for number, each in enumerate(drafting):
        rates = each.acceptance_per_position
        colour, marker = _LINES[number % len(_LINES)], _MARKERS[number % len(_MARKERS)]
        width = _under_later_lines(number, len(drafting))
        places = range(1, len(rates) + 1)
        # Not clipped: a rate of 0 or 1 lies on the edge, and its marker is to be seen whole.
        axes.plot(places, rates, label=each.name, color=colour, marker=marker, clip_on=False, zorder=3, **width)
    longest = max(len(each.acceptance_per_position) for each in drafting)
    axes.set_xticks(range(1, longest + 1))
    axes.set_xlim(0.7, longest + 0.3)
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("drafted position")
    axes.set_ylabel("accepted / tried (those before it were accepted)")
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.legend(edgecolor="none", framealpha=1.0, loc="best")
    title(figure, axes, "Acceptance by position", under)
    return figure


def _under_later_lines(number: int, count: int) -> dict[str, Any]:
    """Widths of one of several lines: the earlier ones are broader, so that they show where lines coincide."""
    later = min(count - 1 - number, 3)
    return {"linewidth": 1.5 + 0.9 * later, "markersize": 6.0 + 1.8 * later}


def title(figure: Figure, axes: Axes, heading: str, under: str) -> None:
    """Write the heading above the axes, and the circumstances below the picture."""
    axes.set_title(heading, loc="left", fontsize=12, fontweight="bold")
    figure.supxlabel(under, fontsize=7.5, color="#555555", wrap=True)


def save(figure: Figure, stem: Path) -> None:
    """Write `stem`.png and `stem`.svg."""
    figure.savefig(stem.with_suffix(".png"), dpi=150)
    figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None})
