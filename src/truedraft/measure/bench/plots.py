"""The plots of a benchmark, PNG and SVG."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from truedraft.core.rank_tree import RankTree
from truedraft.core.stats import PROBE
from truedraft.engine.policy.decisions import PLAIN, Decisions
from truedraft.measure.bench.summary import DraftedTree, Summary
from truedraft.pictures import COLOURS, GRID, line_chart, new_figure, save, write_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

_OURS, _PEERS = COLOURS[0], "#999999"
_MILLI = 1000
_NOT_DRAFTING = {PLAIN: "#cccccc", PROBE: "#000000"}
_COLUMNS = 120  # of a timeline, at most
# Of trees.
_BRANCH, _EDGE, _FILL = "#8c8c8c", "#5a7fa5", "#c6dbef"
_SHADES = ("#eaf2fb", "#9ecae1", "#4292c6", "#08519c", "#08306b")
_WHITE_FROM = 0.45  # share of the colour scale from which a label is white
_TICKS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # of the scale, which ends at the first
_MARGIN = 0.15  # share of the width that the names of the levels take
_LEVEL = 1.0  # inches between levels
_NARROW, _WIDE = 7.0, 13.0  # inches
_LARGEST = 17.0  # points across a node
_SMALLEST = 0.72  # the smallest node's share of the largest one's width
_WITH_NUMBERS = 12  # most nodes that leave room for their probabilities
_NOT_DRAFTED = "counted over all steps; drafted were other trees, chosen at each step by the heads' own probabilities"
_NAMES = ("1st", "2nd", "3rd")


def draw_all(
    folder: Path, summaries: Sequence[Summary], costs: Sequence[Mapping[str, float]], limit_s: float | None, under: str
) -> list[str]:
    """Draw the plots that there are numbers for; returns their names without suffix, in the report's order.

    `costs` are points of the target's cost curve (rows, context, seconds), `limit_s` seconds of reading the weights.
    """
    figures: dict[str, Figure] = {}
    if summaries:
        figures["speed"] = _speed(summaries, under)
    if costs:
        figures["cost"] = _costs(costs, limit_s, under)
    if any(summary.acceptance_per_position for summary in summaries):
        figures["acceptance"] = _acceptance(summaries, under)
    for name, figure in figures.items():
        save(figure, folder / name)
    return list(figures)


def _speed(summaries: Sequence[Summary], under: str) -> Figure:
    figure, axes = new_figure(1.9 + 0.42 * len(summaries))
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
    axes.xaxis.grid(True, color=GRID, linewidth=0.8)
    write_title(figure, axes, "Speed by method", under)
    return figure


def _costs(costs: Sequence[Mapping[str, float]], limit_s: float | None, under: str) -> Figure:
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in sorted(costs, key=lambda each: (each["context"], each["rows"])):
        name = f"{point['context']:,.0f} tokens of context"
        lines.setdefault(name, []).append((point["rows"], _MILLI * point["seconds"]))
    level = None if limit_s is None else (_MILLI * limit_s, "reading the weights once")
    labels = "Cost of k tokens in one forward", "tokens in one forward of the target", "milliseconds"
    return line_chart(lines, labels, under=under, log=True, level=level)


def _acceptance(summaries: Sequence[Summary], under: str) -> Figure:
    rates = {each.name: each.acceptance_per_position for each in summaries if each.acceptance_per_position}
    lines = {name: list(enumerate(own, 1)) for name, own in rates.items()}
    up = "accepted / tried (those before it were accepted)"
    figure = line_chart(lines, ("Acceptance by position", "drafted position", up), under=under)
    axes, longest = figure.axes[0], max(map(len, rates.values()))
    axes.set_xticks(range(1, longest + 1))
    axes.set_xlim(0.7, longest + 0.3)
    axes.set_ylim(0, 1.03)
    return figure


def draw_decisions(folder: Path, system: str, decisions: Decisions, under: str) -> str:
    """Draw which drafter drafted how much in a system, and what was accepted; returns the plot's name without suffix.

    Raises OSError if a file cannot be written.
    """
    name = _file_name("decisions", system)
    figure, upper = new_figure(5.4, panels=2)
    lower = figure.axes[1]
    columns = decisions.timeline(_COLUMNS)
    ends = list(itertools.accumulate(each.seconds for each in columns))
    starts, widths = [0.0, *ends[:-1]], [each.seconds for each in columns]
    below = [0.0] * len(columns)
    for what, usual in zip(decisions.ordered, itertools.cycle(COLOURS), strict=False):
        colour = _NOT_DRAFTING.get(what, usual)
        shares = [each.decisions.get(what, 0) / each.requests for each in columns]
        upper.bar(starts, shares, widths, below, align="edge", color=colour, label=what, linewidth=0)
        below = [low + share for low, share in zip(below, shares, strict=True)]
    upper.set_ylim(0, 1)
    upper.set_ylabel("share of steps")
    for what, colour in (("drafted", _FILL), ("accepted", _OURS)):
        nodes = [getattr(each, what) / each.requests for each in columns]
        lower.bar(starts, nodes, widths, align="edge", color=colour, label=what, linewidth=0)
    lower.set_ylabel("nodes a step")
    for axes in (upper, lower):
        axes.legend(edgecolor="none", loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
        axes.set_xlim(0, ends[-1])
    lower.set_xlabel("seconds of decoding, all answers one after the other")
    write_title(figure, upper, f"Decisions of {system}", under)
    save(figure, folder / name)
    return name


def _file_name(what: str, system: str) -> str:
    return f"{what}-{re.sub(r'[^0-9A-Za-z.=-]+', '-', system).strip('-')}"


def draw_drafted(folder: Path, drafted: DraftedTree, under: str) -> str:
    """Draw a system's tree into a folder; returns the plot's name without suffix.

    Where trees are chosen at each step it is the counted tree of the same heads, and the plot says so. Raises OSError
    if a file cannot be written.
    """
    name = _file_name("tree", drafted.system)
    nodes = f"{len(drafted.tree)} node{'s' if len(drafted.tree) > 1 else ''}"
    heading = f"Token tree of {drafted.system}: {nodes}"
    if drafted.chosen is not None:
        heading = f"Counted tree of the heads of {drafted.system}: {nodes}"
        under = f"{_NOT_DRAFTED}\n{under}"
    draw_tree(drafted.tree, folder / name, heading, under)
    return name


def draw_tree(tree: RankTree, stem: Path, heading: str, under: str) -> None:
    """Draw a tree of at least one node as `stem`.png and `stem`.svg: the root above, below it the nodes level by level,
    labelled by rank, and with `survival` coloured and sized by it. Raises OSError if a file cannot be written.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    places = _places(tree)
    leaves = len(tree.shape.leaves)
    width = min(_WIDE, max(_NARROW, 0.3 * leaves))
    figure, axes = new_figure(1.1 + _LEVEL * tree.depth, width)
    axes.set_axis_off()
    span = max(1.0, float(leaves - 1))
    axes.set_xlim(-_MARGIN / (1 - _MARGIN) * (span + 1.2) - 0.6, span + 0.6)
    axes.set_ylim(tree.depth + 0.35, -0.3)
    across = min(_LARGEST, 0.88 * 72 * width * (1 - _MARGIN) / (span + 1.2))
    scale = None
    if tree.survival:
        colours = LinearSegmentedColormap.from_list("survival", _SHADES)
        scale = ScalarMappable(LogNorm(_TICKS[0], 1.0, clip=True), colours)
    _draw_edges(axes, tree, places)
    _draw_nodes(axes, tree, places, scale, across)
    _name_levels(axes, tree)
    if scale is not None:
        bar = figure.colorbar(scale, ax=axes, fraction=0.035, pad=0.01, aspect=24, extend="min")
        bar.set_ticks(_TICKS, labels=[f"{share:g}" for share in _TICKS], fontsize=8)
        bar.minorticks_off()
        bar.set_label("accepted in this share of steps", fontsize=8)
    write_title(figure, axes, heading, under)
    save(figure, stem)


def _places(tree: RankTree) -> list[float]:
    """The horizontal position of each tree row; a node is in the middle between its first and last child."""
    children = [sorted(nodes, key=lambda node: tree.paths[node][-1]) for nodes in tree.shape.children]
    places = [0.0] * (len(tree) + 1)
    leaf = 0
    waiting = [(0, False)]
    while waiting:
        row, below_is_placed = waiting.pop()
        below = [node + 1 for node in children[row]]
        if below_is_placed:
            places[row] = (places[below[0]] + places[below[-1]]) / 2
        elif below:
            waiting.append((row, True))
            waiting.extend((child, False) for child in reversed(below))
        else:
            places[row] = float(leaf)
            leaf += 1
    return places


def _shade(survival: float) -> float:
    return 1.0 - math.log(max(survival, _TICKS[0])) / math.log(_TICKS[0])


def _draw_edges(axes: Axes, tree: RankTree, places: list[float]) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    for node, parent in enumerate(tree.shape.parents):
        below = tree.shape.depths[node]
        left, right = places[parent + 1], places[node + 1]
        points = [(left, below - 1), (left, below - 0.45), (right, below - 0.75), (right, below)]
        width = 0.6 + (2.4 * tree.survival[node] if tree.survival else 0.0)
        curve = Curve(points, [Curve.MOVETO, *[Curve.CURVE4] * 3])
        axes.add_patch(PathPatch(curve, facecolor="none", edgecolor=_BRANCH, linewidth=width, zorder=1))


def _draw_nodes(axes: Axes, tree: RankTree, places: list[float], scale: ScalarMappable | None, across: float) -> None:
    axes.plot([places[0]], [0], marker="o", markersize=5, color="black", zorder=2)
    axes.annotate("last token", (places[0], 0), xytext=(8, 2), textcoords="offset points", fontsize=8, va="center")
    for node, path in enumerate(tree.paths):
        spot = (places[node + 1], tree.shape.depths[node])
        shade = 0.0 if scale is None else _shade(tree.survival[node])
        size = across * (1.0 if scale is None else _SMALLEST + (1 - _SMALLEST) * shade)
        face = _FILL if scale is None else scale.cmap(shade)
        ink = "white" if shade > _WHITE_FROM else "black"
        axes.scatter(*spot, s=size**2, color=[face], edgecolors=_EDGE, linewidths=0.6, zorder=2)
        axes.annotate(str(path[-1]), spot, fontsize=0.56 * size, color=ink, ha="center", va="center_baseline", zorder=3)
        if tree.survival and len(tree) <= _WITH_NUMBERS:
            offset = (0.55 * across + 2, 0)
            number = f"{tree.survival[node]:.2f}"
            axes.annotate(number, spot, xytext=offset, textcoords="offset points", fontsize=8, va="center")


def _name_levels(axes: Axes, tree: RankTree) -> None:
    left, _ = axes.get_xlim()
    axes.annotate("in circles: the rank of\nthe head's guess, from 0", (left, 0), fontsize=8.5, va="center", ha="left")
    for depth in range(1, tree.depth + 1):
        name = f"{_NAMES[depth - 1] if depth <= len(_NAMES) else f'{depth}th'} token"
        if tree.survival:
            nodes = [node for node, each in enumerate(tree.shape.depths) if each == depth]
            name += f"\naccepted: {math.fsum(tree.survival[node] for node in nodes):.2f}"
        axes.annotate(name, (left, depth), fontsize=8.5, va="center", ha="left")
