"""`truedraft export`."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from truedraft.cli.failures import DONE
from truedraft.cli.session import ReportOptions, loading, quiet_hub, set_threads, with_model
from truedraft.cli.terminal import Terminal
from truedraft.errors import OptionError
from truedraft.files import user_path
from truedraft.options import UNNAMED, MachineOptions, ModelOptions, group, option, record_of


@dataclass(frozen=True)
class ExportOptions:
    """Options of `truedraft export`."""

    out: Path = option(meaning="The folder to write; a new one, or an empty one.", metavar="DIR", heading="Report")
    drafter: str | None = option(
        None,
        "A drafter, as --drafter takes it, with its folder, or only the folder: written in place of the model for "
        "the engine that --for names. Its target is --model, or the one that it names.",
        "DRAFTER",
        name="DRAFTER",
    )
    engine: str | None = option(
        None,
        "vllm, sglang or llamacpp: what is to draft with DRAFTER. The command that serves it there is printed. Or "
        "speculators, which trains it further.",
        "ENGINE",
        name="--for",
        heading="Drafter",
    )
    model: ModelOptions = group("Model and drafter", without=("weights",))
    machine: MachineOptions = group("Machine", without=("device", "kv_dtype", "no_fast_paths"))
    report: ReportOptions = group("Report")


def export(options: ExportOptions) -> int:
    """Write a model, padded to a larger size if requested, as a Hugging Face folder for any other runtime; or a drafter
    for another engine."""
    if options.drafter is not None or options.engine is not None:
        return _export_drafter(options)
    from truedraft.machine import machine_facts
    from truedraft.models.export import export_model

    terminal, model = Terminal(), with_model(options.model)
    set_threads(options.machine.threads)
    started = time.perf_counter()
    with loading(terminal.err, model.model) as show:
        folder = user_path(str(options.out))
        exported = export_model(model.model, folder, pad_to=model.pad_to, dtype=options.machine.dtype, on_stage=show)
    elapsed_s = time.perf_counter() - started
    size = f"{exported.parameters / 1e6:,.1f} M parameters, {exported.dtype}, {exported.bytes / 1e6:,.1f} MB"
    terminal.print(f"wrote {exported.folder}: {size}, in {elapsed_s:.1f} s")
    if exported.note is not None:
        terminal.print(exported.note)
    if options.report.json:
        record = {"command": "export", "model": model.model, "pad_to": model.pad_to, "out": str(exported.folder)}
        record |= record_of(exported, "parameters", "bytes", "dtype", "note")
        terminal.json(record | {"elapsed_s": elapsed_s, "machine": machine_facts()})
    return DONE


def _export_drafter(options: ExportOptions) -> int:
    from truedraft.drafters.exporting import export_drafter
    from truedraft.drafters.registry import ENGINES

    if options.engine is None:
        raise OptionError(f"is needed with DRAFTER: one of {', '.join(ENGINES)}", field="engine")
    if options.drafter is None:
        raise OptionError("is needed with --for: a drafter, as --drafter takes it, with its folder", field="drafter")
    if options.model.pad_to is not None:
        raise OptionError("is for a model that is written; leave it out: a drafter cannot be padded", field="pad_to")
    terminal, folder = Terminal(), user_path(str(options.out))
    named = None if options.model.model == UNNAMED else options.model.model
    with quiet_hub():
        made = export_drafter(options.drafter, options.engine, folder, named, dtype=options.machine.dtype)
    summary = f"wrote {folder}: {made.kind} for {made.engine}, which drafts {made.tokens} tokens with it"
    for line in (summary + "; to serve it:" * bool(made.commands), *made.commands):
        terminal.print(line)
    if options.report.json:
        terminal.json({"command": "export", "drafter": options.drafter, "out": str(folder)} | asdict(made))
    return DONE
