"""The pictures of a plan, PNG and SVG: survival by depth, cost curves, speed-up over batch size; and closed forms.

Light: `truedraft plan --alpha` draws without torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from truedraft.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Line = Sequence[tuple[float, float]]
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito
_MARKERS = "osD^vP"
_GRID = "#dddddd"


class PlanOutput:
    """Where a plan goes: a folder with `plan.json` and pictures, or a .json file with pictures beside it.

    Args:
        out: as it was typed.
        file: what the record is called in a folder.

    Raises:
        DataError: it cannot be written.
        MissingExtraError: it is a folder, and pictures cannot be drawn here.
    """

    def __init__(self, out: Path, file: str) -> None:
        try:
            out = out.expanduser()
            is_file = out.suffix == ".json"
            self.can_draw = importlib.util.find_spec("matplotlib") is not None
            if not is_file and not self.can_draw:
                raise MissingExtraError(
                    "pictures need matplotlib, which is not installed; `pip install 'truedraft[bench]'` brings it, or "
                    "name a .json file with --out"
                )
            self.record = out if is_file else out / file
            self._prefix = f"{out.stem}-" if is_file else ""
            self.record.parent.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:  # the latter: the home of nobody
            raise DataError(f"cannot write {str(out)!r}: {getattr(error, 'strerror', None) or error}") from error

    def write(self, text: str) -> None:
        """Write the record.

        Raises:
            DataError: it cannot be written.
        """
        try:
            self.record.write_text(text, encoding="utf-8")
        except OSError as error:
            raise DataError(f"cannot write {str(self.record)!r}: {error.strerror or error}") from error

    def draw(self, name: str, lines: Mapping[str, Line], labels: tuple[str, str, str], **axes: bool) -> None:
        """Draw lines as `name`.png and `name`.svg, where that is possible here.

        Args:
            name: of the files.
            lines: points by the name of each.
            labels: heading, what is along, what is up.
            axes: see `_lines`.

        Raises:
            DataError: a file cannot be written.
        """
        if not self.can_draw or not any(lines.values()):
            return
        figure = _lines(lines, labels, **axes)
        stem = self.record.parent / f"{self._prefix}{name}"
        try:
            figure.savefig(stem.with_name(f"{stem.name}.png"), dpi=150)
            figure.savefig(stem.with_name(f"{stem.name}.svg"), metadata={"Date": None})
        except OSError as error:
            raise DataError(f"cannot write {str(stem)!r}: {error.strerror or error}") from error


def _lines(lines: Mapping[str, Line], labels: tuple[str, str, str], log: bool = False, even: bool = False) -> Figure:
    """One line for each name.

    Args:
        lines: points.
        labels: heading, what is along, what is up.
        log: whether doublings are as far apart as doublings.
        even: whether a line at 1 says where nothing is gained.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Axes = figure.add_subplot()
    axes.set_axisbelow(True)
    for number, (name, points) in enumerate(lines.items()):
        colour, marker = _LINES[number % len(_LINES)], _MARKERS[number % len(_MARKERS)]
        along, up = zip(*points, strict=True)
        axes.plot(along, up, label=name, color=colour, marker=marker, markersize=4)
    if even:
        axes.axhline(1.0, color="black", linestyle="--", linewidth=1.0)
    if log:
        ticks = sorted({along for points in lines.values() for along, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_ylim(bottom=0)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_title(labels[0], loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel(labels[1])
    axes.set_ylabel(labels[2])
    axes.legend(edgecolor="none", framealpha=1.0)
    return figure
