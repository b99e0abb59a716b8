"""`truedraft info`: versions, devices, models, drafters, and what would be used."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truedraft.cli.failures import DONE
from truedraft.cli.session import ReportOptions, quiet_hub
from truedraft.cli.terminal import Terminal
from truedraft.drafters.registry import TrainedDrafter, list_drafters
from truedraft.drafters.specs import drafter_described, drafter_words
from truedraft.errors import ModelNotFoundError, OptionError, errors_about
from truedraft.files import SMOLLM2, parameters_in
from truedraft.models.embedded import EMBEDDED, EMBEDDED_HEADS, embedded_folder, embedded_heads, smollm2_missing
from truedraft.options import group, option, record_of

_ROWS, _SHOWN, _CONTEXT, _PARTS = (1, 2, 3, 4, 5, 6, 8, 12, 16), (1, 8, 16), 256, 100
_KL_OF_TYPES = (
    "SmolLM2 135M: Q4_0 0.0057, Q4_1 0.0050, Q5_0 0.0047, Q5_1 0.0065, Q8_0 0.0047, Q4_K_S 0.0047, Q5_K_S 0.0055, "
    "Q6_K 0.0043; Gemma 3 270M: Q4_0 0.0068, Q5_0 0.0091, Q8_0 0.0068, Q4_K_M 0.0073, Q6_K 0.0110"
)
"""KL divergence of two models with weights in each type, in bfloat16."""
_OF_CODES = (
    "answers are those of plain decoding of these quantised weights by this engine; the distance of distributions from "
    f"those of the same weights in float32, as mean KL by the type of the file, of {_KL_OF_TYPES} (docs/models.md)"
)


@dataclass(frozen=True)
class InfoOptions:
    """Options of `truedraft info`."""

    model: str | None = option(
        None,
        "Say how this model runs, what its forwards cost, and which trained drafters belong to it.",
        "M",
        bare=True,
    )
    drafters_dir: tuple[Path, ...] = option((), "A folder of trained drafters to list, too; may be repeated.", "DIR")
    report: ReportOptions = group("Report")


def info(options: InfoOptions) -> int:
    """Show versions, devices, fast paths, the embedded models and the trained drafters that can be found."""
    from truedraft.engine.policy import CostStore
    from truedraft.machine import machine_facts, pick_device, pick_dtype
    from truedraft.models.backends.native.build import built
    from truedraft.models.loading import load_model

    terminal, lacking = Terminal(), smollm2_missing()
    drafters = list_drafters(options.model, options.drafters_dir)
    own = None if options.model is None else _model(options.model, terminal)
    fingerprint = None if own is None else own["fingerprint"]
    drafters.sort(key=lambda each: each.fingerprint != fingerprint)  # the model's own first
    facts = machine_facts()
    models = [_embedded(name, embedded_folder) for name in EMBEDDED]
    models += [_embedded(name, embedded_heads) for name in EMBEDDED_HEADS]
    paths = equality = None
    if models[0]["installed"]:
        target = load_model("embedded:target")
        paths, equality = list(target.fast_paths), target.equality
    native = built(pick_dtype(facts["dtype_auto"], pick_device("cpu"))).reason or "compiled for this machine"
    found = {"fast_paths": paths, "equality": equality, "native_forward": native, "cost_curves": CostStore().describe()}
    rows = _rows(facts, models, found)
    rows[SMOLLM2] = "installed" if lacking is None else f"not installed; run {lacking}"
    if own is not None:
        rows |= _model_rows(own)
    rows["trained drafters"] = "\n".join(_describe_drafter(each, own) for each in drafters) or "none found"
    _print(terminal, rows)
    if options.report.json:
        trained = [
            each.as_dict() | {"found": each.source, "belongs": fingerprint and each.fingerprint == fingerprint}
            for each in drafters
        ]
        requested = {SMOLLM2: lacking is None, "model": options.model, "fingerprint": fingerprint, "runs": own}
        terminal.json(
            {"command": "info"} | facts | found | {"embedded_models": models} | requested | {"drafters": trained}
        )
    return DONE


@dataclass(frozen=True)
class DraftersOptions:
    """Options of `truedraft drafters`."""

    kind: str | None = option(None, "Describe this one, with its options.", "KIND", name="KIND")
    report: ReportOptions = group("Report")


def drafters(options: DraftersOptions) -> int:
    """List what can be given as --drafter, or describe one."""
    terminal = Terminal()
    if options.kind is None:
        described = drafter_words()
        _print(terminal, {word: re.split("[:;] ", meaning)[0] for word, meaning in described.items()})
    else:
        described = drafter_described(options.kind.partition(":")[0])
        _print(terminal, described)
    if options.report.json:
        terminal.json({"command": "drafters", "status": DONE, "drafters": described})
    return DONE


def _model(name: str, terminal: Terminal) -> dict[str, Any]:
    from truedraft.engine.memory import bytes_of_cache
    from truedraft.engine.policy import StepCosts, read_bandwidth
    from truedraft.machine import dtype_name
    from truedraft.models.loading import load_model
    from truedraft.text.notations import notation_of

    with quiet_hub(), errors_about("model"):
        model = load_model(name)
    with terminal.progress("forwards", _PARTS) as show:
        costs = StepCosts(model, progress=lambda share, remark: show(round(_PARTS * share), remark))
        forwards = costs.forwards()
    for warning in costs.warnings:
        terminal.err.print(warning)
    template = model.tokenizer.chat_template if model.tokenizer is not None else ""
    notation = notation_of(template) if template else None
    marks = notation.reasoning if notation is not None else None
    context = max(min(_CONTEXT, model.context_length - max(_ROWS)), 0)
    bandwidth = None
    with contextlib.suppress(OptionError):  # too little free memory for the measurement
        bandwidth = read_bandwidth(model.device)
    return {
        "dtype": dtype_name(model.dtype),
        **record_of(model, "parameters", "fingerprint", "fast_paths", "equality", "note", "weight_bytes"),
        "quantised": _OF_CODES if any(path.startswith("weights of") for path in model.fast_paths) else None,
        "chat": "no chat template" if notation is None else notation.described,
        "calls": None if notation is None else notation.name,
        "reasoning": None if marks is None else [marks.opening, marks.closing],
        "read_bytes_per_s": bandwidth,
        "context_length": model.context_length,
        "cache_bytes": bytes_of_cache(model, model.context_length),
        "context": context,
        "forward_s": {str(rows): forwards(rows, [context]) for rows in _ROWS if context + rows <= model.context_length},
    }


def _model_rows(model: dict[str, Any]) -> dict[str, str]:
    paths = ", ".join(model["fast_paths"]) or "its own modules as they are"
    seconds = {rows: model["forward_s"].get(str(rows)) for rows in _SHOWN}
    takes = ", ".join(f"{rows} token{'s' * (rows > 1)} {1e3 * s:.1f} ms" for rows, s in seconds.items() if s)
    size, speed = model["weight_bytes"], model["read_bytes_per_s"]
    lines = [
        f"{model['parameters'] / 1e6:.2f} M parameters, {model['dtype']}; runs by: {paths}",
        f"a forward after {model['context']} tokens: {takes}; a drafter pays where a call gives more tokens than it "
        "costs forwards of 1 token, drafting included",
        f"memory is read at {speed / 1e9:.1f} GB/s: weights of {size / 1e6:.0f} MB in {1e3 * size / speed:.1f} ms"
        if speed
        else "",
        f"a chat of {model['context_length']:,} tokens takes {model['cache_bytes'] / 1e6:,.1f} MB of keys and values, "
        "shorter ones in proportion",
        f"greedy answers are {model['equality']} the same with a drafter",
        f"chats: {model['chat']}",
        model["quantised"],
        model["note"],
    ]
    return {"--model": "\n".join(line for line in lines if line)}


def _embedded(name: str, folder_of: Callable[[str], Path]) -> dict[str, Any]:
    try:
        folder = folder_of(name)
    except ModelNotFoundError:
        return {"name": f"embedded:{name}", "installed": False}
    weights, card = sorted(folder.glob("*.safetensors")), folder / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    first_line = re.search(r"^\s*# .*\n\s*(\S.*)", text, re.MULTILINE)  # after the title
    return {
        "name": f"embedded:{name}",
        "installed": True,
        "parameters": sum(map(parameters_in, weights)),
        "bytes": sum(path.stat().st_size for path in weights),
        "card": None if first_line is None else first_line[1].strip(),
    }


def _rows(facts: dict[str, Any], models: list[dict[str, Any]], found: dict[str, Any]) -> dict[str, str]:
    paths = found["fast_paths"]
    bfloat16 = "with" if facts["bfloat16_instructions"] else "without"
    rows = {
        "truedraft": facts["truedraft"],
        "versions": ", ".join(f"{name} {facts[name]}" for name in ("python", "torch", "transformers")),
        "platform": facts["platform"],
        "cpu": f"{facts['cpu']}, {facts['cores']} cores, {facts['cpu_capability']}, {bfloat16} bfloat16 instructions",
        "cuda": ", ".join(facts["cuda_devices"]) or "no device",
        "by default": f"device {facts['device_auto']}, dtype {facts['dtype_auto']}, threads {facts['threads']}",
    }
    if paths is not None:
        rows["fast paths"] = "; ".join(paths) or "none; models run through the packed forward as they are"
        rows["greedy answers"] = f"{found['equality']} the same with a drafter, by the embedded target in this dtype"
    rows |= {"native forward": found["native_forward"], "cost curves": found["cost_curves"]}
    for model in models:
        if not model["installed"]:
            rows[model["name"]] = "not installed"
            continue
        size = f"{model['parameters'] / 1e6:.2f} M parameters, {model['bytes'] / 1e6:.1f} MB"
        rows[model["name"]] = f"{size}\n{model['card']}" if model["card"] else size
    return rows


def _print(terminal: Terminal, rows: dict[str, str]) -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")  # so that paths are not truncated
    for name, value in rows.items():
        table.add_row(name, value)
    terminal.out.print(table)


def _most_gain(tokens: float, forward_s: Mapping[str, float]) -> float | None:
    """Upper bound of the speedup at so many tokens per target call, with free drafting and a forward of as many rows.

    None if no such forward was measured.
    """
    cost = next((s for rows, s in forward_s.items() if int(rows) >= tokens), None)
    return None if cost is None else tokens * forward_s["1"] / cost


def _describe_drafter(drafter: TrainedDrafter, own: Mapping[str, Any] | None) -> str:
    """A drafter's kind, folder, target and measurements, and its possible gain for the model `own`."""
    is_own = own is not None and drafter.fingerprint == own["fingerprint"]
    belongs = ": belongs to --model" if is_own else ""
    target = f"{drafter.target_name or 'a target without a name'} ({drafter.fingerprint})"
    measured = [f"{tokens:.2f} at temperature {at:g}" for at, tokens in sorted(drafter.tokens_per_call.items())]
    lines = [f"{drafter.kind}:{drafter.folder}", f"  {drafter.source}; for {target}{belongs}"]
    if measured:
        left = "; auto leaves it out, for that cannot pay" if drafter.brings_too_little else ""
        lines.append(f"  tokens per target call, at most: {', '.join(measured)}{left}")
    most = drafter.most_tokens_per_call
    if own is not None and is_own and most and (gain := _most_gain(most, own["forward_s"])):
        lines.append(f"  so at most {gain:.2f} times plain decoding here, before the time that drafting takes")
    return "\n".join(lines)
