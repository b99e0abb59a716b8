"""A picture of a tree of ranks: which guesses of each head are drafted, and how likely each is to be accepted."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from truedraft.bench.drafted_trees import DraftedTree
from truedraft.bench.plots import figure_of, save, title
from truedraft.core.rank_tree import RankTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

_LINE, _EDGE, _PLAIN = "#8c8c8c", "#5a7fa5", "#c6dbef"
_COLOURS = ("#eaf2fb", "#9ecae1", "#4292c6", "#08519c", "#08306b")
_WHITE_FROM = 0.45  # share of the colour scale from which a label is white
_TICKS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # of the scale; what is below the first is as pale as it
_MARGIN = 0.15  # share of the width that the names of the levels take
_LEVEL = 1.0  # inches between levels
_NARROW, _WIDE = 7.0, 13.0  # inches
_LARGEST = 17.0  # points across a node
_SMALLEST = 0.72  # the smallest node's share of the largest one's width
_WITH_NUMBERS = 12  # most nodes that leave room for their probabilities
_NOT_DRAFTED = "counted over all steps; drafted were other trees, chosen at each step by the heads' own probabilities"
_NAMES = ("1st", "2nd", "3rd")


def draw_drafted(folder: Path, drafted: DraftedTree, under: str) -> str:
    """Draw a contestant's tree into a folder; returns the picture's name without suffix.

    Where trees are chosen at each step it is the one that was counted for the same heads, and the picture says so.

    Raises:
        OSError: a file cannot be written.
    """
    name = f"tree-{re.sub(r'[^0-9A-Za-z.=-]+', '-', drafted.contestant).strip('-')}"
    nodes = f"{len(drafted.tree)} node{'s' if len(drafted.tree) > 1 else ''}"
    heading = f"Token tree of {drafted.contestant}: {nodes}"
    if drafted.chosen is not None:
        heading = f"Counted tree of the heads of {drafted.contestant}: {nodes}"
        under = f"{_NOT_DRAFTED}\n{under}"
    draw_tree(drafted.tree, folder / name, heading, under)
    return name


def draw_tree(tree: RankTree, stem: Path, heading: str, under: str) -> None:
    """Draw a tree as `stem`.png and `stem`.svg: the root above, below it the nodes level by level, labelled by rank.

    Args:
        tree: at least one node; with `reach` the nodes are coloured and sized by it.
        stem: path without suffix; its folder exists.
        heading: above the picture.
        under: what its figures were measured on, below it.

    Raises:
        OSError: a file cannot be written.
    """
    places = _places(tree)
    leaves = len(tree.shape.leaves)
    width = min(_WIDE, max(_NARROW, 0.3 * leaves))
    figure, axes = figure_of(1.1 + _LEVEL * tree.depth, width)
    axes.set_axis_off()
    span = max(1.0, float(leaves - 1))
    axes.set_xlim(-_MARGIN / (1 - _MARGIN) * (span + 1.2) - 0.6, span + 0.6)
    axes.set_ylim(tree.depth + 0.35, -0.3)
    across = min(_LARGEST, 0.88 * 72 * width * (1 - _MARGIN) / (span + 1.2))
    scale = _scale_of(tree)
    _draw_edges(axes, tree, places)
    _draw_nodes(axes, tree, places, scale, across)
    _name_levels(axes, tree)
    if scale is not None:
        bar = figure.colorbar(scale, ax=axes, fraction=0.035, pad=0.01, aspect=24, extend="min")
        bar.set_ticks(_TICKS, labels=[f"{share:g}" for share in _TICKS], fontsize=8)
        bar.minorticks_off()
        bar.set_label("accepted in this share of steps", fontsize=8)
    title(figure, axes, heading, under)
    save(figure, stem)


def _places(tree: RankTree) -> list[float]:
    """Where each slot (the root, then the nodes) stands from left to right.

    Leaves stand side by side in the order of ranks, a node over the middle between its first and last child.
    """
    children = [sorted(nodes, key=lambda node: tree.paths[node][-1]) for nodes in tree.shape.children]
    places = [0.0] * (len(tree) + 1)
    leaf = 0
    waiting = [(0, False)]
    while waiting:
        slot, below_is_placed = waiting.pop()
        below = [node + 1 for node in children[slot]]
        if below_is_placed:
            places[slot] = (places[below[0]] + places[below[-1]]) / 2
        elif below:
            waiting.append((slot, True))
            waiting.extend((child, False) for child in reversed(below))
        else:
            places[slot] = float(leaf)
            leaf += 1
    return places


def _scale_of(tree: RankTree) -> ScalarMappable | None:
    """From probability to colour, by its logarithm: it falls by about a factor with each level and rank."""
    if not tree.reach:
        return None
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, LogNorm

    return ScalarMappable(LogNorm(_TICKS[0], 1.0, clip=True), LinearSegmentedColormap.from_list("reach", _COLOURS))


def _shade(reach: float) -> float:
    """Where a probability lies on the scale, from 0 to 1."""
    return 1.0 - math.log(max(reach, _TICKS[0])) / math.log(_TICKS[0])


def _draw_edges(axes: Axes, tree: RankTree, places: list[float]) -> None:
    """Curves from parents to children, broader where more steps pass; they end upright, clear of other nodes."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    for node, parent in enumerate(tree.shape.parents):
        below = tree.shape.depths[node]
        left, right = places[parent + 1], places[node + 1]
        points = [(left, below - 1), (left, below - 0.45), (right, below - 0.75), (right, below)]
        width = 0.6 + (2.4 * tree.reach[node] if tree.reach else 0.0)
        curve = Curve(points, [Curve.MOVETO, *[Curve.CURVE4] * 3])
        axes.add_patch(PathPatch(curve, facecolor="none", edgecolor=_LINE, linewidth=width, zorder=1))


def _draw_nodes(axes: Axes, tree: RankTree, places: list[float], scale: ScalarMappable | None, across: float) -> None:
    """Circles with ranks; the root is a dot."""
    axes.plot([places[0]], [0], marker="o", markersize=5, color="black", zorder=2)
    axes.annotate("last token", (places[0], 0), xytext=(8, 2), textcoords="offset points", fontsize=8, va="center")
    for node, path in enumerate(tree.paths):
        spot = (places[node + 1], tree.shape.depths[node])
        shade = 0.0 if scale is None else _shade(tree.reach[node])
        size = across * (1.0 if scale is None else _SMALLEST + (1 - _SMALLEST) * shade)
        face = _PLAIN if scale is None else scale.cmap(shade)
        ink = "white" if shade > _WHITE_FROM else "black"
        axes.scatter(*spot, s=size**2, color=[face], edgecolors=_EDGE, linewidths=0.6, zorder=2)
        axes.annotate(str(path[-1]), spot, fontsize=0.56 * size, color=ink, ha="center", va="center_baseline", zorder=3)
        if tree.reach and len(tree) <= _WITH_NUMBERS:
            beside = (0.55 * across + 2, 0)
            number = f"{tree.reach[node]:.2f}"
            axes.annotate(number, spot, xytext=beside, textcoords="offset points", fontsize=8, va="center")


def _name_levels(axes: Axes, tree: RankTree) -> None:
    """At the left, which drafted token a level guesses, and in what share of steps one of its nodes is accepted."""
    left, _ = axes.get_xlim()
    axes.annotate("in circles: the rank of\nthe head's guess, from 0", (left, 0), fontsize=8.5, va="center", ha="left")
    for depth in range(1, tree.depth + 1):
        name = f"{_NAMES[depth - 1] if depth <= len(_NAMES) else f'{depth}th'} token"
        if tree.reach:
            nodes = [node for node, each in enumerate(tree.shape.depths) if each == depth]
            name += f"\naccepted: {math.fsum(tree.reach[node] for node in nodes):.2f}"
        axes.annotate(name, (left, depth), fontsize=8.5, va="center", ha="left")
