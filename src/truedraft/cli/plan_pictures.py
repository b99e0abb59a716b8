"""The pictures of a plan, PNG and SVG: survival by depth, cost curves, speed-up over batch size; and closed forms.

Light: `truedraft plan --alpha` draws without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from truedraft.errors import DataError
from truedraft.pictures import Line, can_draw, check_drawing, line_chart, save


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
            self.can_draw = can_draw()
            if not is_file:
                check_drawing("pictures", "name a .json file with --out")
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

    def draw(
        self, name: str, lines: Mapping[str, Line], labels: tuple[str, str, str], log: bool = False, even: bool = False
    ) -> None:
        """Draw lines as `name`.png and `name`.svg, where that is possible here.

        Args:
            name: of the files.
            lines: points by the name of each.
            labels: heading, what is along, what is up.
            log: whether doublings are as far apart as doublings.
            even: whether a line at 1 says where nothing is gained.

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
