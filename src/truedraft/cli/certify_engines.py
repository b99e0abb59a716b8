"""`truedraft certify --endpoint URL [--against URL]` and `--process MODULE:FUNCTION`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from truedraft.cli.certify import CertifyOptions, concluded, show_findings, write_report
from truedraft.cli.failures import DONE, FAILED, UNDECIDED, InterruptedCommandError, UndecidedError, exit_status
from truedraft.cli.failures import report as report_error
from truedraft.cli.prompts import NamedPrompt, read_prompts, user_path
from truedraft.cli.streams import visible
from truedraft.errors import DataError, OptionError, PeerError, errors_about
from truedraft.peers.asking import Peer, Question, Reply

if TYPE_CHECKING:
    from truedraft.certify import Part
    from truedraft.certify.engines import EngineReport
    from truedraft.cli.terminal import Terminal
    from truedraft.models.base import LanguageModel, Reader
    from truedraft.peers import ProcessPeer
    from truedraft.progress import Progress

_STEPS = 1000


def certify_one_engine(options: CertifyOptions, folder: Path | None) -> int:
    """Ask an engine, judge it, and tell what came of it.

    Args:
        options: of the command.
        folder: for the report; None writes none.

    Returns:
        Exit status 0 if nothing was found, 1 if it deviates, 3 if there was not enough evidence.

    Raises:
        OptionError, DataError: unusable options or files.
        PeerError: the engine cannot be reached.
        UndecidedError: the engine could be asked no further, the model cannot be loaded, or something else broke.
        InterruptedCommandError: by Ctrl-C; says how to go on.
    """
    from truedraft.cli.session import set_threads
    from truedraft.cli.terminal import Terminal

    terminal = Terminal()
    options = _with_whole_paths(options)
    set_threads(options.machine.threads)
    with contextlib.ExitStack() as open_things:
        open_things.enter_context(_ended_early(options, terminal))
        prompts = read_prompts(None, options.check.prompts)
        reader, peers = _peers(options, terminal, open_things)
        try:
            report = _asked(options, prompts, reader, peers, terminal)
        except (PeerError, DataError) as error:  # engine and transcript were open, so that no argument is at fault
            raise UndecidedError(str(error)) from error
    return _told(options, report, folder, terminal)


def _with_whole_paths(options: CertifyOptions) -> CertifyOptions:
    """The options with the home folder in the place of ~, refused before the work where nothing can be written.

    Raises:
        DataError: there is no such folder.
    """
    whole: dict[str, Path] = {}
    for field in ("junit", "transcript"):
        file = getattr(options.others, field)
        if file is None:
            continue
        whole[field] = user_path(str(file))
        with errors_about(field):
            if not whole[field].absolute().parent.is_dir():
                raise DataError(f"there is no folder {str(file.parent)!r} to write {file.name!r} into; make it first")
            if whole[field].is_dir():
                raise DataError(f"is a folder, {str(file)!r}; name a file", field=field)
    return replace(options, others=replace(options.others, **whole))  # type: ignore[arg-type]


@contextlib.contextmanager
def _ended_early(options: CertifyOptions, terminal: Terminal) -> Iterator[None]:
    """What ends a run before its verdict is told with how to go on, and is an error of the tests where --junit asks.

    Raises:
        UndecidedError, InterruptedCommandError: in place of all errors but those of unusable arguments.
    """
    how = _how_to_go_on(options)
    try:
        yield
    except KeyboardInterrupt as error:
        raise InterruptedCommandError(f"interrupted; {how}") from error
    except Exception as error:
        if exit_status(error) not in (FAILED, UNDECIDED):
            raise
        undecided = UndecidedError.because(error, how)
        try:
            _write_junit(options.others.junit, _junit_of(undecided), terminal)
        except DataError as unwritten:
            report_error(unwritten)
        raise undecided from error


def _how_to_go_on(options: CertifyOptions) -> str:
    if options.others.transcript is None:
        return "nothing was decided; with --transcript FILE answers are kept, and the same command goes on from them"
    return f"what was answered is kept in {options.others.transcript}; the same command goes on from there"


def _junit_of(error: UndecidedError) -> str:
    """A run that ended early, as JUnit's XML: one test case that is an error."""
    from truedraft.certify.engines import xml_text

    suite = ElementTree.Element(
        "testsuite", name="truedraft certify", tests="1", failures="0", errors="1", skipped="0", time="0"
    )
    case = ElementTree.SubElement(suite, "testcase", classname="certify", name="a verdict is reached", time="0")
    ElementTree.SubElement(case, "error", message=visible(str(error)), type="undecided")
    return xml_text(suite)


def _write_junit(file: Path | None, text: str, terminal: Terminal) -> None:
    """Write the checks as JUnit's XML, if that is wanted.

    Raises:
        DataError: that cannot be done.
    """
    if file is None:
        return
    try:
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise DataError(f"cannot write {str(file)!r}: {error.strerror or error}") from error
    terminal.note(f"written: {file}")


def _peers(options: CertifyOptions, terminal: Terminal, open_things: contextlib.ExitStack) -> tuple[Reader, list[Peer]]:
    """The engines, each with its transcript if one is kept, and how their model reads; its weights come later."""
    from truedraft.peers import Endpoint, Patience, ProcessPeer, load_function

    others = options.others
    if others.process is not None:
        function = load_function("process", others.process)
        reader = _reader(options)
        peer = ProcessPeer(
            function, name=others.process, vocab_size=reader.vocab_size, eos_token_ids=reader.eos_token_ids
        )
        _check_takes(peer, options)
        return reader, [_kept(peer, options, others.transcript, open_things)]
    if not 0.0 < others.timeout < 1e6:
        raise OptionError(f"must be above 0, got {others.timeout:g}", field="timeout")
    key = _key(others.api_key_env)
    reader = _reader(options)
    # No busy server is waited for longer than the whole run may take.
    patience = Patience(total_s=min(Patience().total_s, options.check.minutes * 60.0))
    found: list[Peer] = []
    for field in ("endpoint", "against"):
        url, file = getattr(others, field), others.transcript
        if url is None:
            continue
        with errors_about(field):
            endpoint = Endpoint.open(
                url,
                others.served_model,
                api_key=key,
                tokenizer=reader.tokenizer,
                vocab_size=reader.vocab_size,
                eos_token_ids=reader.eos_token_ids,
                timeout_s=others.timeout,
                patience=patience,
                tell=terminal.note,
            )
        open_things.enter_context(endpoint)
        if file is not None and field == "against":
            file = file.with_name(f"{file.stem}-against{file.suffix}")
        found.append(_kept(endpoint, options, file, open_things))
    return reader, found


def _check_takes(peer: ProcessPeer, options: CertifyOptions) -> None:
    """Refuse options that a function has no argument for."""
    refused = peer.refuses(replace(options.sampling, seed=_first_seed(options)))
    if refused:
        warm = " (the temperature is 1 by default; 0 asks for greedy answers)" if "temperature" in refused else ""
        raise OptionError(
            f"{options.others.process!r} has no argument {refused}; name it in the function's signature, or leave the "
            f"option out{warm}",
            field="process",
        )


def _reader(options: CertifyOptions) -> Reader:
    from truedraft.cli.session import quiet_hub
    from truedraft.models.loading import load_reader

    with quiet_hub(), errors_about("model"):
        return load_reader(options.stack.model)


def _kept(peer: Peer, options: CertifyOptions, file: Path | None, open_things: contextlib.ExitStack) -> Peer:
    """A peer whose answers are written down, if that is wanted."""
    from truedraft.peers import Recorded

    if file is None:
        return peer
    about = {"model": options.stack.model, "batch": options.check.batch, "seed": _first_seed(options)}
    return open_things.enter_context(Recorded(peer, file, about))


def _first_seed(options: CertifyOptions) -> int | None:
    """That of the first request; None where none are sent. 0 unless another is given: a rerun asks the same again."""
    return options.check.seed or 0 if options.others.seed_per_request else None


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise OptionError(f"names a variable that is not set: {variable}", field="api_key_env")
    return key


def _asked(
    options: CertifyOptions, prompts: Sequence[NamedPrompt], reader: Reader, peers: Sequence[Peer], terminal: Terminal
) -> EngineReport:
    """Judge one engine by its model, or compare two, for which no weights are loaded."""
    from truedraft.certify import Part
    from truedraft.certify.engines import certify_engine, compare_engines
    from truedraft.cli.session import waiting
    from truedraft.engine.prompts import encode_prompt

    run: Callable[..., EngineReport] = compare_engines
    judge: list[LanguageModel] = []
    parts = [Part.GREEDY, Part.AGAINST, Part.BEHAVIOUR]
    if len(peers) == 1:
        with waiting(terminal.err, "loading the model"):
            target, rounded = _judges(options)
            drafts = _drafts(options)
        run = partial(certify_engine, rounded=rounded, drafts=drafts, allowance=options.others.allowance)
        reader, judge = target, [target]
        parts[1] = Part.SAMPLED
    room = max(1, reader.context_length // 2)
    ids = [encode_prompt(reader, each.prompt)[:room] for each in prompts]
    with terminal.progress("certify", len(parts) * _STEPS) as show:
        bar = _EngineBar(parts, show)
        return run(
            *(_Watched(peer, bar.answered) for peer in peers),
            *judge,
            ids,
            replace(options.sampling, seed=_first_seed(options)),
            together=options.check.batch,
            seconds=options.check.minutes * 60.0,
            tokens=options.others.tokens,
            sends_seeds=options.others.seed_per_request,
            tell=bar.tell,
        )


class _EngineBar:
    """How far a run has come, and how many answers it has: a round of a slow engine's takes minutes.

    Args:
        parts: of the run, in their order.
        show: moves the bar.
    """

    def __init__(self, parts: Sequence[Part], show: Progress) -> None:
        self._parts, self._show = parts, show
        self._part, self._done, self._answers = parts[0], 0, 0

    def tell(self, part: Part, done: float) -> None:
        """A part has come so far."""
        self._part, self._done = part, int((self._parts.index(part) + done) * _STEPS)
        self.answered(0)

    def answered(self, count: int = 1) -> None:
        """So many answers came."""
        self._answers += count
        self._show(self._done, f"{self._part.value}; {self._answers:,} came in all")


class _Watched(Peer):
    """A peer that tells of each answer as it comes."""

    def __init__(self, peer: Peer, tell: Callable[[], None]) -> None:
        self.facts = peer.facts
        self._peer = peer
        self._tell = tell

    def ask(self, questions: Sequence[Question]) -> list[Reply | PeerError]:
        found = dict(self.answers(questions))
        return [found[number] for number in range(len(questions))]

    def answers(self, questions: Sequence[Question]) -> Iterator[tuple[int, Reply | PeerError]]:
        for answer in self._peer.answers(questions):
            self._tell()
            yield answer


def _judges(options: CertifyOptions) -> tuple[LanguageModel, LanguageModel | None]:
    """The model that scores, in float32 if that is not too large, and the same in the engine's dtype, for rounding.

    "auto" is bfloat16 here: what this machine is fast at says nothing of the engine's.
    """
    from truedraft.cli.session import load_target

    with errors_about("model"):
        machine = options.machine
        if options.check.no_float32:
            return load_target(options.stack, machine), None
        coarse = replace(machine, dtype="bfloat16") if machine.dtype == "auto" else machine
        rounded = load_target(options.stack, coarse)
        return load_target(options.stack, replace(machine, dtype="float32")), rounded


def _drafts(options: CertifyOptions) -> Mapping[str, LanguageModel]:
    """The draft model that the engine is said to use."""
    from truedraft.models.loading import load_model

    if options.others.draft_model is None:
        return {}
    with errors_about("draft_model"):
        return {"the draft model": load_model(options.others.draft_model, **options.machine.of_models)}


def _told(options: CertifyOptions, report: EngineReport, folder: Path | None, terminal: Terminal) -> int:
    """Show the report, write it, and say what it comes to."""
    from truedraft.certify.engines import engine_meaning, engine_page, engine_verdict, junit
    from truedraft.machine import machine_facts

    show_findings(report.findings, engine_verdict(report), engine_meaning(report), terminal)
    about = {"model": options.stack.model, "prompts": options.check.prompts, "seed": _first_seed(options)}
    record = {"command": "certify"} | report.as_dict() | about | {"machine": machine_facts()}
    circumstances = {name: value for name, value in record.items() if name not in ("command", "findings")}

    status = FAILED if report.deviates else UNDECIDED if report.undecided else DONE
    return concluded(
        status,
        options,
        record,
        terminal,
        lambda: write_report(folder, engine_page(report, circumstances), record, terminal),
        lambda: _write_junit(options.others.junit, junit(report), terminal),
    )
