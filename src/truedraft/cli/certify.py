"""`truedraft certify`."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.cli.failures import DONE, FAILED, UNDECIDED, UndecidedError, exit_status, report
from truedraft.cli.parameters import defaults_of
from truedraft.cli.prompts import HELDOUT, NamedPrompt, read_prompts
from truedraft.cli.session import ReportOptions, StackOptions
from truedraft.control.specs import controller_from_spec
from truedraft.core.params import SamplingParams
from truedraft.errors import DataError, OptionError
from truedraft.options import MachineOptions, flag, group, option

if TYPE_CHECKING:
    from truedraft.certify import Certificate, Finding, Stack
    from truedraft.cli.terminal import Terminal
    from truedraft.engine import Engine

_STEPS = 100
_AGAIN = "nothing was decided; run the same command again when that is mended"
_JSON, _MARKDOWN = "certificate.json", "certificate.md"


@dataclass(frozen=True)
class CheckOptions:
    """What is checked, and how long."""

    prompts: str = option(HELDOUT, "heldout: those that ship; or a .jsonl or .txt file.", "FILE")
    batch: int = option(1, "Requests that are answered together.", "N", least=1)
    minutes: float = option(5.0, "About how long to take, at most four times that; more find smaller deviations.", "N")
    seed: int | None = option(
        None,
        "Decides all noise. With --seeded and --seed-per-request seeds of requests count up from it.",
        "S",
        shown_default="drawn; 0 with --seed-per-request",
        least=0,
    )
    seeded: bool = flag("Certify requests that have a seed, whose tokens must be plain decoding's.")
    no_float32: bool = flag("Leave out float32, for a model that is too large to load again.")


@dataclass(frozen=True)
class OthersOptions:
    """Whose work is certified instead of our stack."""

    endpoint: str | None = option(
        None,
        "A server with OpenAI's completions, or llama.cpp's own, that is said to run --model: its answers are scored "
        "under the model's own forward. docs/certify_engines.md says what is sent and tested.",
        "URL",
    )
    against: str | None = option(None, "A second server: the two are compared, without the model's weights.", "URL")
    process: str | None = option(
        None,
        "A Python function from token ids to new token ids, in place of a server; it is given those of max_tokens, "
        "temperature, top_p, top_k, min_p, seed and stop that it names.",
        "MODULE:FUNCTION",
    )
    served_model: str | None = option(None, "The model's name at the server.", "NAME", shown_default="its first")
    api_key_env: str | None = option(None, "The environment variable that holds the server's key.", "NAME")
    seed_per_request: bool = flag("Send each request a seed of its own, where the server takes seeds.")
    draft_model: str | None = option(
        None, "The draft model that the server uses, so that faults of judging its drafts are named.", "M"
    )
    allowance: float | None = option(
        None, "How far its log-probabilities may lie from the model's.", "X", shown_default="measured"
    )
    tokens: int = option(8000, "Sampled tokens that a server is asked for.", "N", least=1)
    timeout: float = option(120.0, "Seconds that a server may take for one answer.", "S")
    transcript: Path | None = option(
        None, "Keep questions and answers in this file, and go on from it after an interruption.", "FILE"
    )
    junit: Path | None = option(None, "Write the checks of a server as JUnit's XML.", "FILE")
    sampler: str | None = option(
        None,
        "A rejection sampler, called on worlds whose exact answer is known; docs/certify_samplers.md says what it is "
        "given. Of the other options it takes --minutes, --seed, --out and --json.",
        "MODULE:FUNCTION",
    )


@dataclass(frozen=True)
class CertifyReport(ReportOptions):
    """What `truedraft certify` tells."""

    out: Path | None = option(None, f"Write {_MARKDOWN} and {_JSON} into this folder.", "DIR")


@dataclass(frozen=True)
class CertifyOptions:
    """Options of `truedraft certify`."""

    stack: StackOptions = group("Model and drafter", without=("plan", "max_cache_bytes"), controller="in-turn")
    others: OthersOptions = group("Others' work")
    check: CheckOptions = group("Run")
    sampling: SamplingParams = group(
        "Answer",
        without=("seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "allowed_token_ids"),
        max_tokens=64,
        temperature=1.0,
    )
    report: CertifyReport = group("Report")
    machine: MachineOptions = group("Machine")


def certify(options: CertifyOptions) -> int:
    """Prove on this machine that a drafter and a rule leave the target's answers as they are.

    Exit status 0 if so, 1 if not, 3 if there was not enough time to tell or something broke on the way. A lossy rule is
    measured instead, which is exit status 0 unless another check fails. With --endpoint, --process or --sampler the
    work of others is certified.
    """
    try:
        return _certified(options)
    except Exception as error:
        if exit_status(error) != FAILED:
            raise
        raise UndecidedError.because(error, _AGAIN) from error


def _certified(options: CertifyOptions) -> int:
    from truedraft.cli.session import check_rule

    if not 0.0 < options.check.minutes < 1e6:
        raise OptionError(f"must be above 0, got {options.check.minutes:g}", field="minutes")
    folder = None if options.report.out is None else _folder(options.report.out)
    _check_whose(options)
    if options.others.sampler is not None:
        from truedraft.cli.certify_samplers import certify_one_sampler

        return certify_one_sampler(options, folder)
    if options.others.endpoint is not None or options.others.process is not None:
        from truedraft.cli.certify_engines import certify_one_engine

        return certify_one_engine(options, folder)
    seed = first_seed(options)
    params = dataclasses.replace(options.sampling, seed=seed if options.check.seeded else None)
    check_rule(options.stack.rule, params)
    return _run(options, read_prompts(None, options.check.prompts), params, seed, folder)


def first_seed(options: CertifyOptions) -> int:
    """The seed that was given, else one drawn, so that it can be told."""
    return secrets.randbits(31) if options.check.seed is None else options.check.seed


def _check_whose(options: CertifyOptions) -> None:
    """Refuse to certify two things at once, and options that would be looked at by nobody."""
    others = options.others
    given = [name for name in ("endpoint", "process", "sampler") if getattr(others, name) is not None]
    if len(given) > 1:
        raise OptionError(f"and --{given[0]} name two things to certify; leave one of them out", field=given[1])
    mode = "against" if given == ["endpoint"] and others.against is not None else "".join(given)
    defaults = defaults_of(CertifyOptions)
    for name, value in _values(options):
        if name not in defaults or value == defaults[name]:
            continue
        if mode and name not in _TAKEN_BY[mode]:
            got = "" if value is True else f", got {value}"
            raise OptionError(f"says nothing of {_WORDS[mode]}; leave it out{got}", field=name)
        if not mode and name in _OTHERS:
            needs = " or ".join(f"--{each}" for each in ("endpoint", "process", "sampler") if name in _TAKEN_BY[each])
            raise OptionError(f"is for {needs} alone; give that, too", field=name)
    if mode in _ENGINES and options.check.seed is not None and not others.seed_per_request:
        raise OptionError("is for --seed-per-request alone; give that, too", field="seed")


def _values(options: Any) -> Iterator[tuple[str, Any]]:
    for each in dataclasses.fields(options):
        value = getattr(options, each.name)
        if dataclasses.is_dataclass(value):
            yield from _values(value)
        else:
            yield each.name, value


_OTHERS = {each.name for each in dataclasses.fields(OthersOptions)}
# An engine is asked for answers of lengths of its own, and what it says of them is asked for where it can tell.
_ASKED = {each.name for each in dataclasses.fields(SamplingParams)} - {"max_tokens", "logprobs", "logprobs_mode"}
_ASKED |= {"model", "prompts", "batch", "minutes", "seed_per_request", "tokens", "transcript", "junit", "out", "json"}
_JUDGED = _ASKED | {"pad_to", "merge_adapter", "draft_model", "allowance", "no_float32"}
_JUDGED |= {each.name for each in dataclasses.fields(MachineOptions)}
_SERVED = {"endpoint", "against", "served_model", "api_key_env", "timeout"}
_TAKEN_BY = {
    "endpoint": _JUDGED | _SERVED,
    "against": _ASKED | _SERVED,
    "process": _JUDGED | {"process"},
    "sampler": {"sampler", "minutes", "seed", "out", "json"},
}
_WORDS = {
    "endpoint": "an engine that is asked from outside",
    "against": "two servers that are compared, where no model judges",
    "process": "a function that is asked from outside",
    "sampler": "a sampler, which is run by itself",
}
_ENGINES = ("endpoint", "against", "process")


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
    options: CertifyOptions, prompts: Sequence[NamedPrompt], params: SamplingParams, seed: int, folder: Path | None
) -> int:
    from truedraft.certify import Part, Stack, markdown, meaning, verdict
    from truedraft.certify import certify as certify_stack
    from truedraft.cli.session import load_engine
    from truedraft.cli.terminal import Terminal

    terminal, batch = Terminal(), options.check.batch
    controller = controller_from_spec(options.stack.controller)
    engine = load_engine(options.stack, options.machine, terminal.err, params, batch)
    ids = _ids(engine, prompts)
    parts = list(Part)
    with terminal.progress("certify", len(parts) * _STEPS) as show:

        def tell(part: Part, done: float) -> None:
            show(int((parts.index(part) + done) * _STEPS), part.value)

        certificate = certify_stack(
            Stack(engine.target, engine.drafter, engine.rule, controller=controller),
            ids,
            params,
            batch=batch,
            seconds=options.check.minutes * 60.0,
            entropy=seed,
            tell=tell,
            in_float32=None if options.check.no_float32 else _in_float32(options, params, terminal),
        )
    show_findings(certificate.findings, verdict(certificate), meaning(certificate), terminal)
    record = _record(certificate, engine, options.stack, params) | {"seed": seed}
    left_out = {"command", "findings", "failures", "undecided", "certified"}
    page = markdown(certificate, {name: value for name, value in record.items() if name not in left_out})
    status = FAILED if certificate.failures else UNDECIDED if certificate.undecided else DONE
    return concluded(status, options, record, terminal, lambda: write_report(folder, page, record, terminal))


def _ids(engine: Engine, prompts: Sequence[NamedPrompt]) -> list[list[int]]:
    """Prompts as token ids, cut so that the target has room to answer."""
    from truedraft.engine.prompts import encode_prompt

    room = max(1, engine.target.context_length // 2)
    return [encode_prompt(engine.target, each.prompt)[:room] for each in prompts]


def _in_float32(options: CertifyOptions, params: SamplingParams, terminal: Terminal) -> Callable[[], Stack]:
    """The same stack in float32, loaded when it is asked for."""

    def load() -> Stack:
        from truedraft.certify import Stack
        from truedraft.cli.session import load_engine

        machine = dataclasses.replace(options.machine, dtype="float32")
        engine = load_engine(options.stack, machine, terminal.err, params, options.check.batch)
        controller = controller_from_spec(options.stack.controller)
        return Stack(engine.target, engine.drafter, engine.rule, controller=controller)

    return load


def _record(certificate: Certificate, engine: Engine, stack: StackOptions, params: SamplingParams) -> dict[str, Any]:
    from truedraft.cli.report import circumstances_record

    times = {"batch": certificate.batch, "seconds": certificate.seconds}
    return {"command": "certify"} | certificate.as_dict() | times | circumstances_record(engine, stack, params)


def show_findings(findings: Sequence[Finding], bold: str, lines: Sequence[str], terminal: Terminal) -> None:
    """A table of findings, what it all comes to, and sentences about it."""
    from rich.table import Table

    from truedraft.certify import MARKS, Status, by_part

    styles = {Status.HOLDS: "green", Status.FAILS: "bold red", Status.MEASURED: "cyan", Status.DOES_NOT_APPLY: "dim"}
    styles[Status.NOT_ENOUGH] = "bold yellow"
    table = Table(show_lines=False, pad_edge=False)
    table.add_column("check", ratio=2, overflow="fold")
    table.add_column("", no_wrap=True)
    table.add_column("what came of it", ratio=5, overflow="fold")
    for part, own in by_part(findings).items():
        table.add_row(part.value, "", "", style="bold")
        for finding in own:
            table.add_row(f"  {finding.name}", MARKS[finding.status], finding.summary, style=styles[finding.status])
        table.add_section()
    terminal.out.print(table)
    terminal.out.print(bold, style="bold", soft_wrap=True)
    for line in lines:
        terminal.note(line)


def concluded(
    status: int, options: CertifyOptions, record: dict[str, Any], terminal: Terminal, *writes: Callable[[], None]
) -> int:
    """Write files, tell the record if it is wanted, and give the exit status.

    A file that cannot be written is told last, and changes no status but that of "done".

    Args:
        status: by the verdict.
        options: of the command.
        record: of the certificate.
        terminal: where it is told.
        writes: each writes files; DataError where that cannot be done.
    """
    unwritten: list[DataError] = []
    for write in writes:
        try:
            write()
        except DataError as error:
            unwritten.append(error)
    if options.report.json:
        terminal.json(record)
    statuses = [report(error) for error in unwritten]
    return status or max(statuses, default=DONE)


def write_report(folder: Path | None, page: str, record: dict[str, Any], terminal: Terminal) -> None:
    """Write a certificate as a page and as a record.

    Args:
        folder: that is written into; None writes nothing.
        page: in Markdown.
        record: of the certificate.
        terminal: where it is said.

    Raises:
        DataError: that cannot be done.
    """
    if folder is None:
        return
    try:
        (folder / _MARKDOWN).write_text(page, encoding="utf-8", errors="backslashreplace")
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, indent=1)
        (folder / _JSON).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise DataError(f"cannot write into {str(folder)!r}: {error.strerror or error}") from error
    terminal.note(f"written: {folder / _MARKDOWN}, {folder / _JSON}")
