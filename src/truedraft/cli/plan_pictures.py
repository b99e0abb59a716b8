"""Pictures of a plan, as PNG and SVG: survival by depth, cost curves, speedup by batch size, and closed forms.

Imports no torch, so that `truedraft plan --alpha` is fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from truedraft.errors import DataError
from truedraft.pictures import Line, can_draw, check_drawing, line_chart, save


class PlanOutput:
    """The output of a plan: a folder with `plan.json` and pictures, or a .json file with pictures next to it.

    Args:
        file: name of the record in a folder.

    Raises:
        DataError: it cannot be written.
        MissingExtraError: it is a folder, and no plotting library is installed.
    """

    def __init__(self, out: Path, file: str) -> None:
        try:
            out = out.expanduser()
            is_file = out.suffix == ".json"
            self.can_draw = can_draw()
            if not is_file:
                check_drawing("pictures", "name a .json file with --out")
            self.record = out if is_file else out / file
            self._prefix = f"{out.stem}-" if is_file else ""
            self.record.parent.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: ~ without a home folder
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

    def draw(
        self, name: str, lines: Mapping[str, Line], labels: tuple[str, str, str], log: bool = False, even: bool = False
    ) -> None:
        """Draw lines as `name`.png and `name`.svg, if a plotting library is installed.

        Args:
            lines: by their names in the legend.
            labels: heading, x axis, y axis.
            log: whether the x axis is logarithmic to base 2.
            even: whether to draw a line at 1, where nothing is gained.

        Raises:
            DataError: a file cannot be written.
        """
        if not self.can_draw or not any(lines.values()):
            return
        stem = self.record.parent / f"{self._prefix}{name}"
        try:
            save(line_chart(lines, labels, log=log, level=(1.0, None) if even else None), stem)
        except OSError as error:
            raise DataError(f"cannot write {str(stem)!r}: {error.strerror or error}") from error
