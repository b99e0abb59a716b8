"""Embedded models as folders, for engines that know nothing of truedraft."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def exported(folder: Path, name: str, pad_to: str | None = None) -> Path:
    """An embedded model, in bfloat16, as a folder inside another; made where it is not there."""
    made = folder / f"{name}-{pad_to or 'own'}"
    if not (made / "config.json").exists():
        padded = [] if pad_to is None else ["--pad-to", pad_to]
        command = [sys.executable, "-m", "truedraft", "export", "--model", f"embedded:{name}", "--dtype", "bfloat16"]
        subprocess.run([*command, "--out", str(made), *padded], check=True)
    return made
