"""`truedraft export`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from truedraft.cli.failures import DONE
from truedraft.cli.session import ReportOptions
from truedraft.errors import errors_about
from truedraft.files import user_path
from truedraft.options import MachineOptions, ModelOptions, group, option


@dataclass(frozen=True)
class ExportOptions:
    """Options of `truedraft export`."""

    out: Path = option(meaning="The folder to write; a new one, or an empty one.", metavar="DIR", heading="Report")
    model: ModelOptions = group("Model and drafter", without=("weights",))
    machine: MachineOptions = group("Machine", without=("device", "no_fast_paths"))
    report: ReportOptions = group("Report")


def export(options: ExportOptions) -> int:
    """Write a model, padded to a larger size if wanted, as a Hugging Face folder for any other runtime."""
    from truedraft.cli.session import quiet_hub, set_threads, waiting, with_model
    from truedraft.cli.terminal import Terminal
    from truedraft.machine import machine_facts
    from truedraft.models.export import export_model

    terminal, model = Terminal(), with_model(options.model)
    set_threads(options.machine.threads)
    started = time.perf_counter()
    with quiet_hub(), errors_about("model"), waiting(terminal.err, f"loading {model.model}") as show:
        folder = user_path(str(options.out))
        exported = export_model(model.model, folder, pad_to=model.pad_to, dtype=options.machine.dtype, on_stage=show)
    elapsed_s = time.perf_counter() - started
    size = f"{exported.parameters / 1e6:,.1f} M parameters, {exported.dtype}, {exported.bytes / 1e6:,.1f} MB"
    terminal.out.print(f"wrote {exported.folder}: {size}, in {elapsed_s:.1f} s", soft_wrap=True)
    if exported.note is not None:
        terminal.out.print(exported.note, soft_wrap=True)
    if options.report.json:
        terminal.json(
            {
                "command": "export",
                "model": model.model,
                "pad_to": model.pad_to,
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
