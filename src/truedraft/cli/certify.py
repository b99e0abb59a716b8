"""`truedraft certify stack` and `sampler`, and what all `truedraft certify` commands share: time, files and reports."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from xml.etree import ElementTree

from truedraft.cli.failures import DONE, FAILED, UNDECIDED, InterruptedCommandError, UndecidedError, exit_status
from truedraft.cli.failures import report as report_error
from truedraft.cli.prompts import HELDOUT, PROMPTS_HELP, NamedPrompt, read_prompts
from truedraft.cli.session import MEASURING, ReportOptions, StackOptions, check_rule, load_engine, waiting, with_model
from truedraft.cli.terminal import Terminal, visible
from truedraft.core.params import SamplingParams
from truedraft.engine.policy.specs import controller_from_spec
from truedraft.errors import DataError, OptionError, errors_about
from truedraft.files import user_path, write_errors
from truedraft.options import MachineOptions, flag, group, option

if TYPE_CHECKING:
    from truedraft.certify import Report, Stack
    from truedraft.engine import Engine
    from truedraft.models.base import Reader

STEPS = 1000  # of a progress bar, for each part of a certificate
_AGAIN = "nothing was decided; run the same command again"
_JSON, _MARKDOWN = "certificate.json", "certificate.md"
_ABOVE = {"command", "findings", "failures", "undecided", "certified", "verdict"}
"""Keys of the record that a page shows before the circumstances."""


@dataclass(frozen=True)
class TimeOptions:
    """How long a certificate may take."""

    minutes: float = option(5.0, "How long to take at most; more find smaller deviations.", "N")

    @property
    def seconds(self) -> float:
        """The time in seconds; an `OptionError` if it is not a duration."""
        if not 0.0 < self.minutes < 1e6:
            raise OptionError(f"must be above 0, got {self.minutes:g}", field="minutes")
        return 60.0 * self.minutes


@dataclass(frozen=True)
class PromptOptions(TimeOptions):
    """The prompts, and the time."""

    prompts: str = option(HELDOUT, PROMPTS_HELP, "FILE")
    batch: int = option(1, "Requests that are answered together.", "N", least=1)


@dataclass(frozen=True)
class CheckOptions(PromptOptions):
    """The checks of a stack, and the time."""

    minutes: float = option(
        5.0, "How long to take, loading included; more find smaller deviations, and it says beforehand which.", "N"
    )
    seed: int | None = option(
        None, "Decides all noise. With --seeded seeds count up from it.", "S", shown_default="drawn", least=0
    )
    seeded: bool = flag("Certify requests with a seed; their tokens must be those of plain decoding.")
    no_float32: bool = flag("Leave out float32, for a model that is too large to load again.")


@dataclass(frozen=True)
class CertifyReport(ReportOptions):
    """Output of `truedraft certify`."""

    out: Path | None = option(None, f"Write {_MARKDOWN} and {_JSON} into this folder.", "DIR")
    junit: Path | None = option(None, "Write the checks as JUnit's XML.", "FILE")


NOT_CERTIFIED = ("seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "allowed_token_ids")
"""Sampling options without meaning for a certificate."""


@dataclass(frozen=True)
class CertifyOptions:
    """Options of `truedraft certify stack`."""

    stack: StackOptions = group(
        "Model and drafter", without=("plan", "max_cache_bytes", "gpu_memory_utilization"), controller="in-turn"
    )
    check: CheckOptions = group("Run")
    sampling: SamplingParams = group("Answer", without=NOT_CERTIFIED, max_tokens=64, temperature=1.0)
    report: CertifyReport = group("Report")
    machine: MachineOptions = group("Machine")


def stack(options: CertifyOptions) -> int:
    """Prove on this machine that a drafter and a rule leave the target's answers as they are.

    Exit status 0 if so, 1 if not, 3 if there was not enough time to decide or something broke on the way. A lossy rule
    is measured instead, which is exit status 0 unless another check fails.
    """
    began, seconds, terminal = time.monotonic(), options.check.seconds, Terminal()
    with ReportWriter.open("stack", options.report, terminal) as writer:
        seed = secrets.randbits(31) if options.check.seed is None else options.check.seed
        params = dataclasses.replace(options.sampling, seed=seed if options.check.seeded else None)
        check_rule(options.stack.rule, params, "seeded")
        prompts = read_prompts(None, options.check.prompts)
        options = dataclasses.replace(options, stack=with_model(options.stack))
        report, about = _certified(options, prompts, params, seed, began + seconds, terminal)
        return writer.write(report, about | {"seed": seed})


def _certified(
    options: CertifyOptions,
    prompts: Sequence[NamedPrompt],
    params: SamplingParams,
    seed: int,
    ends: float,
    terminal: Terminal,
) -> tuple[Report, dict[str, Any]]:
    """The report and its circumstances; `ends` is by the monotonic clock."""
    from truedraft.certify import EqualityInFloat32, Part, certify
    from truedraft.cli.report import circumstances_record

    began, parts = time.monotonic(), list(Part)
    engine, loaded = _loaded(options, options.machine, params, terminal)
    loading_s = time.monotonic() - began
    whole = dataclasses.replace(options.machine, dtype="float32")
    # If loading took nearly all of the time, a tenth remains.
    seconds = max(ends - time.monotonic(), options.check.seconds / 10.0)
    again = EqualityInFloat32(lambda: _loaded(options, whole, params, terminal)[1], loading_s, seconds)
    with terminal.progress("certify", len(parts) * STEPS) as show:
        report = certify(
            loaded.but(entropy=seed),
            encode_prompts(prompts, engine.target),
            params,
            batch=options.check.batch,
            seconds=seconds,
            most_seconds=seconds,
            tell=lambda part, done: show(int((parts.index(part) + done) * STEPS), part.value),
            announce=terminal.note,
            in_float32=None if options.check.no_float32 else again,
        )
    return report, circumstances_record(engine, options.stack, params)


def encode_prompts(prompts: Sequence[NamedPrompt], reader: Reader) -> list[list[int]]:
    """Prompts as token ids, truncated so that the context has room for an answer."""
    from truedraft.engine.prompts import encode_prompt

    return [encode_prompt(reader, each.prompt)[: max(1, reader.context_length // 2)] for each in prompts]


def _loaded(
    options: CertifyOptions, machine: MachineOptions, params: SamplingParams, terminal: Terminal
) -> tuple[Engine, Stack]:
    """The certified parts, in an engine and separately."""
    from truedraft.certify import Stack

    controller = controller_from_spec(options.stack.controller)
    engine = load_engine(options.stack, machine, terminal.err, params, options.check.batch)
    with waiting(terminal.err, MEASURING):  # otherwise the examined answers would be from plain decoding
        engine.measure(params)
    return engine, Stack(engine.target, engine.drafter, engine.rule, controller=controller)


@dataclass(frozen=True)
class SamplerOptions(TimeOptions):
    """Options of `truedraft certify sampler`."""

    sampler: str = option(
        meaning="A rejection sampler, called on models with a known exact answer; docs/certify_engines.md says what "
        "it is given.",
        metavar="MODULE:FUNCTION",
        name="SAMPLER",
    )
    seed: int | None = option(None, "Decides all noise.", "S", shown_default="drawn", least=0)
    report: CertifyReport = group("Report")


def sampler(options: SamplerOptions) -> int:
    """Run a rejection sampler on models with a known answer, and say whether it has the target's distribution.

    Exit status 0 if no deviation was found, 1 if it deviates, 3 if there was not enough evidence or something broke.
    """
    from truedraft.certify.samplers import certify_sampler, load_sampler
    from truedraft.machine import machine_facts

    seconds, terminal = options.seconds, Terminal()
    with ReportWriter.open("sampler", options.report, terminal) as writer:
        tested = load_sampler(options.sampler)
        with terminal.progress("certify", STEPS) as show:
            report = certify_sampler(
                tested,
                seconds=seconds,
                seed=secrets.randbits(31) if options.seed is None else options.seed,
                tell=lambda done: show(int(done * STEPS), tested.name),
            )
        return writer.write(report, {"machine": machine_facts()})


@dataclass(frozen=True)
class ReportWriter:
    """Writes a report to the terminal and to files, which are checked before the work, so that no result is lost."""

    command: str  # the part after `truedraft certify`
    json: bool
    folder: Path | None  # for the page and the record; None writes neither
    junit: Path | None  # for JUnit XML; None writes none
    terminal: Terminal

    @classmethod
    @contextlib.contextmanager
    def open(cls, command: str, options: CertifyReport, terminal: Terminal, advice: str = _AGAIN) -> Iterator[Self]:
        """Open a report; an error in the block gets advice on how to continue, and is also written as JUnit XML.

        Raises DataError for a file that cannot be written; UndecidedError or InterruptedCommandError in place of all
        errors but those of unusable arguments.
        """
        folder = None if options.out is None else _folder(options.out)
        writer = cls(command, options.json, folder, check_output_file("junit", options.junit), terminal)
        try:
            yield writer
        except KeyboardInterrupt as error:
            raise InterruptedCommandError(f"interrupted; {advice}") from error
        except Exception as error:
            if exit_status(error) not in (FAILED, UNDECIDED):
                raise
            undecided = UndecidedError.because(error, advice)
            for failed in writer._write_files({}, _junit_of(undecided)):
                report_error(failed)
            raise undecided from error

    def write(self, report: Report, about: Mapping[str, Any]) -> int:
        """Print a report, write its files and, if requested, the record; returns the exit status.

        Files that cannot be written are reported last, and replace only the status 0. `about` is more for the record.
        """
        _show(report, self.terminal)
        record = {"command": f"certify {self.command}"} | report.as_dict() | dict(about)
        page = report.page({name: value for name, value in record.items() if name not in _ABOVE})
        pages = {}
        if self.folder is not None:
            text = json.dumps(record, ensure_ascii=False, allow_nan=False, indent=1)
            pages = {self.folder / _MARKDOWN: page, self.folder / _JSON: text + "\n"}
        failed = self._write_files(pages, report.junit())
        if self.json:
            self.terminal.json(record)
        statuses = [report_error(error) for error in failed]
        status = FAILED if report.failures else UNDECIDED if report.undecided else DONE
        return status or max(statuses, default=DONE)

    def _write_files(self, pages: Mapping[Path, str], junit: str) -> list[DataError]:
        """Write pages and, if requested, JUnit XML; returns the errors."""
        failed = []
        for file, text in {**pages, **({} if self.junit is None else {self.junit: junit})}.items():
            try:
                with write_errors(file):
                    file.write_text(text, encoding="utf-8", errors="backslashreplace")
                self.terminal.note(f"written: {file}")
            except DataError as error:
                failed.append(error)
        return failed


def check_output_file(field: str, file: Path | None) -> Path | None:
    """A path with ~ expanded, checked before the work; DataError for a folder, or in none."""
    if file is None:
        return None
    whole = user_path(str(file))
    with errors_about(field):
        if not whole.absolute().parent.is_dir():
            raise DataError(f"there is no folder {str(file.parent)!r} to write {file.name!r} into; make it first")
        if whole.is_dir():
            raise DataError(f"is a folder, {str(file)!r}; name a file", field=field)
    return whole


def _folder(out: Path) -> Path:
    """Create the report's folder before the work, so that no result is lost, and no earlier report overwritten."""
    with write_errors(out):
        folder = out.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        there = [name for name in (_MARKDOWN, _JSON) if (folder / name).exists()]
    if there:
        raise DataError(
            f"{str(folder)!r} holds {' and '.join(there)} of an earlier run; name another folder with --out, or move "
            "the old report away"
        )
    return folder


def _junit_of(error: UndecidedError) -> str:
    """A run that ended early as JUnit XML: one test case with an error."""
    from truedraft.certify import xml_text

    about = {"name": "truedraft certify", "tests": "1", "failures": "0", "errors": "1", "skipped": "0", "time": "0"}
    suite = ElementTree.Element("testsuite", about)
    case = ElementTree.SubElement(suite, "testcase", classname="certify", name="a verdict is reached", time="0")
    ElementTree.SubElement(case, "error", message=visible(str(error)), type="undecided")
    return xml_text(suite)


def _show(report: Report, terminal: Terminal) -> None:
    from rich.table import Table

    from truedraft.certify import MARKS, Status, by_part

    styles = {Status.HOLDS: "green", Status.FAILS: "bold red", Status.MEASURED: "cyan", Status.DOES_NOT_APPLY: "dim"}
    styles[Status.NOT_ENOUGH] = "bold yellow"
    table = Table(show_lines=False, pad_edge=False)
    table.add_column("check", ratio=2, overflow="fold")
    table.add_column("", no_wrap=True)
    table.add_column("what came of it", ratio=5, overflow="fold")
    for part, own in by_part(report.findings).items():
        table.add_row(part.value, "", "", style="bold")
        for finding in own:
            table.add_row(f"  {finding.name}", MARKS[finding.status], finding.summary, style=styles[finding.status])
        table.add_section()
    terminal.out.print(table)
    for note in report.notes:
        terminal.note(note)
    terminal.print(report.verdict, style="bold")
