"""`truedraft certify --endpoint URL [--against URL]` and `--process MODULE:FUNCTION`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from truedraft.cli.certify import CertifyOptions, concluded, show_findings, write_report
from truedraft.cli.failures import DONE, FAILED, UNDECIDED, InterruptedCommandError, UndecidedError, exit_status
from truedraft.cli.failures import report as report_error
from truedraft.cli.prompts import read_prompts, user_path
from truedraft.cli.streams import visible
from truedraft.errors import DataError, OptionError, PeerError, errors_about

if TYPE_CHECKING:
    from truedraft.certify import Part
    from truedraft.certify.engines import EngineReport
    from truedraft.cli.terminal import Terminal
    from truedraft.models.base import LanguageModel
    from truedraft.peers import Peer

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
    from truedraft.cli.session import set_threads, waiting
    from truedraft.cli.terminal import Terminal

    terminal = Terminal()
    options = _with_whole_paths(options)
    set_threads(options.machine.threads)
    with contextlib.ExitStack() as open_things:
        open_things.enter_context(_ended_early(options, terminal))
        with waiting(terminal.err, "loading the model"):
            target, rounded = _judges(options)
        peers = [open_things.enter_context(each) for each in _peers(options, target, terminal)]
        try:
            report = _asked(options, peers, target, rounded, terminal)
        except PeerError as error:  # it was reached before, so that no argument is at fault
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
    suite = ElementTree.Element(
        "testsuite", name="truedraft certify", tests="1", failures="0", errors="1", skipped="0", time="0"
    )
    case = ElementTree.SubElement(suite, "testcase", classname="certify", name="a verdict is reached", time="0")
    ElementTree.SubElement(case, "error", message=visible(str(error)), type="undecided")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


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


def _judges(options: CertifyOptions) -> tuple[LanguageModel, LanguageModel | None]:
    """The model that scores, in float32 if that is not too large, and the same in its own dtype, for rounding."""
    from truedraft.cli.session import load_target

    with errors_about("model"):
        own = load_target(options.stack, options.machine)
        if options.check.no_float32 or options.others.against is not None:
            return own, None
        return load_target(options.stack, replace(options.machine, dtype="float32")), own


def _peers(
    options: CertifyOptions, target: LanguageModel, terminal: Terminal
) -> Iterator[contextlib.AbstractContextManager[Peer]]:
    """The engines, each with its transcript if one is kept."""
    from truedraft.peers import Endpoint, ProcessPeer, load_function

    others = options.others
    if others.process is not None:
        function = load_function("process", others.process)
        peer = ProcessPeer(
            function, name=others.process, vocab_size=target.vocab_size, eos_token_ids=target.eos_token_ids
        )
        yield _kept(peer, options, others.transcript)
    if not 0.0 < others.timeout < 1e6:
        raise OptionError(f"must be above 0, got {others.timeout:g}", field="timeout")
    for field in ("endpoint", "against"):
        url = getattr(others, field)
        if url is None:
            continue
        with errors_about(field):
            endpoint = Endpoint.open(
                url,
                others.served_model,
                api_key=_key(others.api_key_env),
                tokenizer=target.tokenizer,
                vocab_size=target.vocab_size,
                eos_token_ids=target.eos_token_ids,
                timeout_s=others.timeout,
                tell=terminal.note,
            )
        file = others.transcript
        if file is not None and field == "against":
            file = file.with_name(f"{file.stem}-against{file.suffix}")
        yield _kept(endpoint, options, file)


def _kept(peer: Any, options: CertifyOptions, file: Path | None) -> contextlib.AbstractContextManager[Peer]:
    """A peer whose answers are written down, if that is wanted."""
    from truedraft.peers import Recorded

    if file is None:
        return peer if hasattr(peer, "__enter__") else contextlib.nullcontext(peer)
    about = {"model": options.stack.model, "batch": options.check.batch, "seed": _first_seed(options)}
    return Recorded(peer, file, about)


def _first_seed(options: CertifyOptions) -> int | None:
    """That of the first request; None where none are sent. 0 unless another is given: a rerun asks the same again."""
    return options.sampling.seed or 0 if options.others.seed_per_request else None


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise OptionError(f"names a variable that is not set: {variable}", field="api_key_env")
    return key


def _asked(
    options: CertifyOptions,
    peers: list[Peer],
    target: LanguageModel,
    rounded: LanguageModel | None,
    terminal: Terminal,
) -> EngineReport:
    """Ask one engine, or compare two."""
    from truedraft.certify import Part
    from truedraft.certify.engines import certify_engine, compare_engines
    from truedraft.engine.prompts import encode_prompt

    params = replace(options.sampling, seed=_first_seed(options))
    room = max(1, target.context_length // 2)
    ids = [encode_prompt(target, each.prompt)[:room] for each in read_prompts(None, options.check.prompts)]
    how: dict[str, Any] = {
        "together": options.check.batch,
        "seconds": options.check.minutes * 60.0,
        "tokens": options.others.tokens,
        "sends_seeds": options.others.seed_per_request,
    }
    parts = [Part.GREEDY, Part.AGAINST if len(peers) > 1 else Part.SAMPLED, Part.BEHAVIOUR]
    with terminal.progress("certify", len(parts) * _STEPS) as show:

        def tell(part: Part, done: float) -> None:
            show(int((parts.index(part) + done) * _STEPS), part.value)

        if len(peers) > 1:
            return compare_engines(peers[0], peers[1], ids, params, tell=tell, **how)
        return certify_engine(
            peers[0],
            target,
            ids,
            params,
            rounded=rounded,
            drafts=_drafts(options),
            allowance=options.others.allowance,
            tell=tell,
            **how,
        )


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
