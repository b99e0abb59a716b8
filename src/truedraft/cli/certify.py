"""`truedraft certify`."""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from truedraft.cli import options as opt
from truedraft.cli.failures import DONE, FAILED, UNDECIDED
from truedraft.cli.prompts import HELDOUT, NamedPrompt, read_prompts
from truedraft.core.sampling import SamplingParams
from truedraft.errors import DataError, OptionError

if TYPE_CHECKING:
    from truedraft.certify import Certificate, Stack
    from truedraft.cli.session import Setup
    from truedraft.cli.terminal import Terminal
    from truedraft.engine import Engine

_RUN = "Run"
_STEPS = 100
_JSON, _MARKDOWN = "certificate.json", "certificate.md"

_Prompts = Annotated[
    str,
    opt.option("--prompts", "heldout: those that ship; or a .jsonl or .txt file.", _RUN, "FILE"),
]
_Batch = Annotated[int, opt.option("--batch", "Requests that are answered together.", _RUN, "N")]
_Minutes = Annotated[
    float,
    opt.option(
        "--minutes",
        "About how long to take, at most four times that; more find smaller deviations.",
        _RUN,
        "N",
    ),
]
_NoFloat32 = Annotated[
    bool, opt.flag("--no-float32", "Leave out float32, for a model that is too large to load again.", _RUN)
]
_Out = Annotated[Path | None, opt.option("--out", f"Write {_MARKDOWN} and {_JSON} into this folder.", "Report", "DIR")]


def certify(
    model: opt.Model = "embedded:target",
    pad_to: opt.PadTo = None,
    drafter: opt.Drafter = "auto",
    rule: opt.RuleWord = "speculative",
    prompts: _Prompts = HELDOUT,
    batch: _Batch = 1,
    minutes: _Minutes = 5.0,
    max_tokens: opt.MaxTokens = 64,
    temperature: opt.Temperature = 1.0,
    top_p: opt.TopP = 1.0,
    top_k: opt.TopK = 0,
    min_p: opt.MinP = 0.0,
    seed: opt.Seed = None,
    coupled: opt.Coupled = False,
    out: _Out = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    no_fast_paths: opt.NoFastPaths = False,
    no_float32: _NoFloat32 = False,
    json: opt.Json = False,
) -> int:
    """Prove on this machine that a drafter and a rule leave the target's answers as they are.

    Exit status 0 if so, 1 if not, 3 if there was not enough time to tell. A lossy rule is measured instead, which is
    exit status 0 unless another check fails.
    """
    from truedraft.cli.lossy import check_rule
    from truedraft.cli.session import Setup, sampling

    if batch < 1:
        raise OptionError(f"--batch must be 1 or more, got {batch}")
    if not 0.0 < minutes < 1e6:
        raise OptionError(f"--minutes must be above 0, got {minutes:g}")
    params = sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        coupled=coupled,
    )
    check_rule(rule, params)
    folder = None if out is None else _folder(out)
    setup = Setup(model, drafter, rule, dtype, device, threads, pad_to, not no_fast_paths)
    return _run(setup, read_prompts(None, prompts), params, batch, minutes * 60.0, folder, json, no_float32)


def _folder(out: Path) -> Path:
    """Where the report goes: made before the work, so that nothing is lost after it, nor of an earlier one."""
    try:
        folder = out.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        there = [name for name in (_MARKDOWN, _JSON) if (folder / name).exists()]
    except (OSError, RuntimeError) as error:  # the latter: the home of nobody
        raise DataError(f"cannot write into {str(out)!r}: {getattr(error, 'strerror', None) or error}") from error
    if there:
        raise DataError(
            f"{str(folder)!r} holds {' and '.join(there)} of an earlier run; name another folder with --out, or move "
            "the old report away"
        )
    return folder


def _run(
    setup: Setup,
    prompts: Sequence[NamedPrompt],
    params: SamplingParams,
    batch: int,
    seconds: float,
    folder: Path | None,
    json: bool,
    no_float32: bool,
) -> int:
    from truedraft.certify import Part, Stack
    from truedraft.certify import certify as certify_stack
    from truedraft.cli.session import load_engine
    from truedraft.cli.terminal import Terminal

    terminal = Terminal()
    engine = load_engine(setup, terminal.err, params, batch)
    ids = _ids(engine, prompts)
    parts = list(Part)
    with terminal.progress("certify", len(parts) * _STEPS) as show:

        def tell(part: Part, done: float) -> None:
            show(int((parts.index(part) + done) * _STEPS), part.value)

        certificate = certify_stack(
            Stack(engine.target, engine.drafter, engine.rule),
            ids,
            params,
            batch=batch,
            seconds=seconds,
            tell=tell,
            in_float32=None if no_float32 else _in_float32(setup, params, batch, terminal),
        )
    _show(certificate, terminal)
    record = _record(certificate, engine, setup, params)
    if folder is not None:
        _write(folder, certificate, record)
        terminal.note(f"written: {folder / _MARKDOWN}, {folder / _JSON}")
    if json:
        terminal.json(record)
    if certificate.failures:
        return FAILED
    return UNDECIDED if certificate.undecided else DONE


def _ids(engine: Engine, prompts: Sequence[NamedPrompt]) -> list[list[int]]:
    """Prompts as token ids, cut so that the target has room to answer."""
    from truedraft.engine.prompts import encode_prompt

    room = max(1, engine.target.context_length // 2)
    return [encode_prompt(engine.target, each.prompt)[:room] for each in prompts]


def _in_float32(setup: Setup, params: SamplingParams, batch: int, terminal: Terminal) -> Callable[[], Stack]:
    """The same stack in float32, loaded when it is asked for."""

    def load() -> Stack:
        from truedraft.certify import Stack
        from truedraft.cli.session import load_engine

        engine = load_engine(dataclasses.replace(setup, dtype="float32"), terminal.err, params, batch)
        return Stack(engine.target, engine.drafter, engine.rule)

    return load


def _record(certificate: Certificate, engine: Engine, setup: Setup, params: SamplingParams) -> dict[str, Any]:
    from truedraft.cli.report import circumstances_record

    times = {"batch": certificate.batch, "seconds": certificate.seconds}
    return {"command": "certify"} | certificate.as_dict() | times | circumstances_record(engine, setup, params)


def _show(certificate: Certificate, terminal: Terminal) -> None:
    from rich.table import Table

    from truedraft.certify import MARKS, Status, by_part, meaning, verdict

    styles = {Status.HOLDS: "green", Status.FAILS: "bold red", Status.MEASURED: "cyan", Status.DOES_NOT_APPLY: "dim"}
    styles[Status.NOT_ENOUGH] = "bold yellow"
    table = Table(show_lines=False, pad_edge=False)
    table.add_column("check", ratio=2, overflow="fold")
    table.add_column("", no_wrap=True)
    table.add_column("what came of it", ratio=5, overflow="fold")
    for part, findings in by_part(certificate).items():
        table.add_row(part.value, "", "", style="bold")
        for finding in findings:
            table.add_row(f"  {finding.name}", MARKS[finding.status], finding.summary, style=styles[finding.status])
        table.add_section()
    terminal.out.print(table)
    terminal.out.print(verdict(certificate), style="bold", soft_wrap=True)
    for line in meaning(certificate):
        terminal.note(line)


def _write(folder: Path, certificate: Certificate, record: dict[str, Any]) -> None:
    from truedraft.certify import markdown

    left_out = {"command", "findings", "failures", "undecided", "certified"}
    circumstances = {name: value for name, value in record.items() if name not in left_out}
    try:
        (folder / _MARKDOWN).write_text(markdown(certificate, circumstances), encoding="utf-8")
        text = json_module.dumps(record, ensure_ascii=False, allow_nan=False, indent=1)
        (folder / _JSON).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot write into {str(folder)!r}: {error.strerror or error}") from error
