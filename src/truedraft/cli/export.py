"""`truedraft export`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from truedraft.cli.failures import DONE
from truedraft.cli.session import ReportOptions
from truedraft.errors import OptionError, errors_about
from truedraft.files import user_path
from truedraft.options import UNNAMED, MachineOptions, ModelOptions, group, option


@dataclass(frozen=True)
class ExportOptions:
    """Options of `truedraft export`."""

    out: Path = option(meaning="The folder to write; a new one, or an empty one.", metavar="DIR", heading="Report")
    head: str | None = option(
        None,
        "The folder of a head, written in place of the model; its target is --model, or the one that the head names.",
        "DIR",
        heading="Head",
    )
    format: str | None = option(
        None,
        "What is to read the head: speculators (and vLLM), eagle (EAGLE, SGLang, SpecForge), dflash (z-lab), dspark "
        "(DeepSpec) or vllm-medusa.",
        "FORMAT",
        heading="Head",
    )
    model: ModelOptions = group("Model and drafter", without=("weights",))
    machine: MachineOptions = group("Machine", without=("device", "no_fast_paths"))
    report: ReportOptions = group("Report")


def export(options: ExportOptions) -> int:
    """Write a model, padded to a larger size if wanted, as a Hugging Face folder for any other runtime; or a head."""
    if options.head is not None or options.format is not None:
        return _export_head(options)
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


def _export_head(options: ExportOptions) -> int:
    from truedraft.cli.session import quiet_hub
    from truedraft.cli.terminal import Terminal
    from truedraft.heads.exporting import FORMATS, export_head

    if options.head is None or options.format is None or options.model.pad_to is not None:
        raise OptionError(
            f"a head is written by --head DIR and --format, one of {', '.join(FORMATS)}, and nothing is padded then",
            field="head" if options.head is None else "format",
        )
    terminal, folder = Terminal(), user_path(str(options.out))
    named = None if options.model.model == UNNAMED else options.model.model
    with quiet_hub():
        head = export_head(user_path(options.head), options.format, folder, named)
    terminal.out.print(f"wrote {folder}: {head.noun} for {options.format}", soft_wrap=True)
    if options.report.json:
        about = {"command": "export", "head": options.head, "format": options.format, "out": str(folder)}
        terminal.json(about | {"kind": head.kind, "target": named or head.record.target_name})
    return DONE
