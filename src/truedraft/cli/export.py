"""`truedraft export`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from truedraft.cli import options as opt
from truedraft.cli.failures import DONE
from truedraft.cli.prompts import user_path

_Out = Annotated[Path, opt.option("--out", "The folder to write; a new one, or an empty one.", "Report", "DIR")]


def export(
    *,
    model: opt.Model = "embedded:target",
    pad_to: opt.PadTo = None,
    out: _Out,
    dtype: opt.Dtype = "auto",
    threads: opt.Threads = None,
    json: opt.Json = False,
) -> int:
    """Write a model, padded to a larger size if wanted, as a Hugging Face folder for any other runtime."""
    from truedraft.cli.machine import machine_facts
    from truedraft.cli.session import quiet_hub, set_threads, waiting
    from truedraft.cli.terminal import Terminal
    from truedraft.models.export import export_model

    terminal = Terminal()
    set_threads(threads)
    started = time.perf_counter()
    with quiet_hub(), waiting(terminal.err, f"loading {model}") as show:
        exported = export_model(model, user_path(str(out)), pad_to=pad_to, dtype=dtype, on_stage=show)
    elapsed_s = time.perf_counter() - started
    size = f"{exported.parameters / 1e6:,.1f} M parameters, {exported.dtype}, {exported.bytes / 1e6:,.1f} MB"
    terminal.out.print(f"wrote {exported.folder}: {size}, in {elapsed_s:.1f} s", soft_wrap=True)
    if exported.note is not None:
        terminal.out.print(exported.note, soft_wrap=True)
    if json:
        terminal.json(
            {
                "command": "export",
                "model": model,
                "pad_to": pad_to,
                "out": str(exported.folder),
                "parameters": exported.parameters,
                "bytes": exported.bytes,
                "dtype": exported.dtype,
                "note": exported.note,
                "elapsed_s": elapsed_s,
                "machine": machine_facts(),
            }
        )
    return DONE
