"""Figures drawn without a display and saved as PNG and SVG, and line charts; matplotlib loads when used."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from truedraft.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito: distinguishable without full colour vision; markers differ as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GRID = "#dddddd"
_MARKERS = "osD^vP"

Line = Sequence[tuple[float, float]]


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_drawing(what: str, instead: str) -> None:
    """Refuse to start work that ends with pictures where matplotlib is missing, by a `MissingExtraError`."""
    if not can_draw():
        raise MissingExtraError(
            f"{what} need matplotlib, which is not installed; run `pip install 'truedraft[bench]'`, or {instead}"
        )


def new_figure(height: float, width: float = 8.0, panels: int = 1) -> tuple[Figure, Axes]:
    """A figure in inches outside pyplot's global list, drawn without a display; and its upper panel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    for panel in range(panels):
        axes = figure.add_subplot(panels, 1, panel + 1)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure, figure.axes[0]


def line_chart(
    lines: Mapping[str, Line],
    labels: tuple[str, str, str],
    *,
    under: str = "",
    log: bool = False,
    level: tuple[float, str | None] | None = None,
) -> Figure:
    """A chart with one line for each name.

    Args:
        labels: heading, x label, y label.
        log: whether the x axis is logarithmic to base 2, with a tick at each point.
        level: position of a dashed horizontal line, and its name.
    """
    figure, axes = new_figure(4.6)
    for number, (name, points) in enumerate(lines.items()):
        along, up = zip(*points, strict=True)
        # Earlier lines are broader, so that they show where lines coincide. Not clipped: a point may lie on the edge.
        later = min(len(lines) - 1 - number, 3)
        colour, marker = COLOURS[number % len(COLOURS)], _MARKERS[number % len(_MARKERS)]
        (line,) = axes.plot(along, up, label=name, color=colour, marker=marker, clip_on=False, zorder=3)
        line.set(linewidth=1.5 + 0.9 * later, markersize=6.0 + 1.8 * later)
    if level is not None:
        axes.axhline(level[0], color="black", linestyle="--", linewidth=1.2, label=level[1])
    if log:
        ticks = sorted({along for points in lines.values() for along, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_xlabel(labels[1])
    axes.set_ylabel(labels[2])
    axes.legend(edgecolor="none", framealpha=1.0)
    write_title(figure, axes, labels[0], under)
    return figure


def write_title(figure: Figure, axes: Axes, heading: str, under: str = "") -> None:
    """Write the heading above the axes, and the circumstances below the picture."""
    axes.set_title(heading, loc="left", fontsize=12, fontweight="bold")
    if under:
        figure.supxlabel(under, fontsize=7.5, color="#555555", wrap=True)


def save(figure: Figure, stem: Path) -> None:
    """Write `stem`.png and `stem`.svg; OSError if a file cannot be written."""
    figure.savefig(stem.with_name(f"{stem.name}.png"), dpi=150)
    figure.savefig(stem.with_name(f"{stem.name}.svg"), metadata={"Date": None})
