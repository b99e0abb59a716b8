"""`truedraft certify engine` and `truedraft certify compare`: engines that are tested as black boxes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from truedraft.cli.certify import (
    NOT_CERTIFIED,
    STEPS,
    CertifyReport,
    PromptOptions,
    ReportWriter,
    check_output_file,
    encode_prompts,
)
from truedraft.cli.failures import UndecidedError
from truedraft.cli.prompts import read_prompts
from truedraft.cli.session import StackOptions, load_target, quiet_hub, set_threads, waiting
from truedraft.cli.terminal import Terminal
from truedraft.core.params import SamplingParams
from truedraft.errors import DataError, OptionError, PeerError, errors_about
from truedraft.measure.peers.asking import Peer, Question, Reply
from truedraft.options import NEEDED, MachineOptions, changed_fields, flag, group, option

if TYPE_CHECKING:
    from truedraft.certify import Part, Report
    from truedraft.models.base import LanguageModel, Reader
    from truedraft.progress import Progress

_OURS = (
    "adapters", "drafter", "drafters_dir", "rule", "controller", "plan", "max_cache_bytes", "gpu_memory_utilization"
)  # fmt: skip
# The tests choose the lengths of answers, and request logprobs where the engine has them.
_NOT_REQUESTED = (*NOT_CERTIFIED, "max_tokens", "logprobs", "logprobs_mode")


@dataclass(frozen=True)
class ServerOptions:
    """How servers are reached."""

    served_model: str | None = option(None, "The model's name at the server.", "NAME", shown_default="its first")
    api_key_env: str | None = option(None, "The environment variable that holds the server's key.", "NAME")
    timeout: float = option(120.0, "Seconds that a server may take for one answer.", "S")


@dataclass(frozen=True)
class RequestOptions(PromptOptions):
    """The requests to engines, and the time."""

    seed_per_request: bool = flag("Send each request a seed of its own, where the server takes seeds.")
    seed: int | None = option(None, "With --seed-per-request: the first seed.", "S", shown_default="0", least=0)
    tokens: int = option(8000, "Sampled tokens to request.", "N", least=1)
    transcript: Path | None = option(
        None, "Keep questions and answers in this file, and go on from it after an interruption.", "FILE"
    )

    @property
    def first_seed(self) -> int | None:
        """The seed of the first request, by default 0, so that a rerun sends the same requests; None sends no seeds."""
        if self.seed is not None and not self.seed_per_request:
            raise OptionError("needs --seed-per-request; give that, too", field="seed")
        return self.seed or 0 if self.seed_per_request else None


@dataclass(frozen=True)
class EndpointOptions:
    """Options that `certify engine` and `certify compare` share."""

    stack: StackOptions = group(
        "Model", without=(*_OURS, "pad_to", "weights", "merge_adapter", "tensor_parallel"), model=NEEDED
    )
    server: ServerOptions = group("Server")
    requests: RequestOptions = group("Run")
    sampling: SamplingParams = group("Answer", without=_NOT_REQUESTED, temperature=1.0)
    report: CertifyReport = group("Report")


@dataclass(frozen=True)
class EngineOptions(EndpointOptions):
    """Options of `truedraft certify engine`."""

    stack: StackOptions = group("Model", without=_OURS, model=NEEDED)
    machine: MachineOptions = group("Machine")
    endpoint: str | None = option(
        None,
        "A server with OpenAI's completions, or llama.cpp's own, that is said to run --model: its answers are scored "
        "under the model's own forward. docs/certify_engines.md says what is sent and tested.",
        "URL",
        name="URL",
    )
    process: str | None = option(
        None,
        "A Python function from token ids to new token ids, in place of a server; it is given those of max_tokens, "
        "temperature, top_p, top_k, min_p, seed and stop that it names.",
        "MODULE:FUNCTION",
    )
    draft_model: str | None = option(
        None,
        "The draft model that the engine uses, so that faults of judging its drafts are named.",
        "M",
        heading="Model",
    )
    allowance: float | None = option(
        None, "How far its log-probabilities may lie from the model's.", "X", heading="Model", shown_default="measured"
    )
    no_float32: bool = flag("Leave out float32, for a model that is too large to load again.", heading="Model")


@dataclass(frozen=True)
class CompareOptions(EndpointOptions):
    """Options of `truedraft certify compare`."""

    endpoint: str = option(meaning="A server with OpenAI's completions, or llama.cpp's own.", metavar="URL", name="URL")
    against: str = option(meaning="A second server.", metavar="OTHER_URL", name="OTHER_URL")


def engine(options: EngineOptions) -> int:
    """Ask an engine for answers, and say whether they are those of the model that it is said to run.

    Exit status 0 if no deviation was found, 1 if it deviates, 3 if there was not enough evidence or something broke.
    """
    from truedraft.certify import Part
    from truedraft.certify.engines import certify_engine
    from truedraft.models.loading import load_model

    if options.endpoint is not None and options.process is not None:
        raise OptionError("and URL name two things to certify; leave one of them out", field="process")
    if options.endpoint is None and options.process is None:
        raise OptionError("names what is certified, or --process MODULE:FUNCTION does; give one", field="endpoint")
    if options.process is not None and (given := changed_fields(options.server)):
        raise OptionError("is for a server, and --process names a function; leave it out", field=given[0])
    with contextlib.ExitStack() as opened:
        session = _Session("engine", options, opened)
        set_threads(options.machine.threads)
        if options.process is not None:
            session.add_function(options.process)
        else:
            session.add_servers(endpoint=options.endpoint)
        with _errors_undecided():
            with waiting(session.terminal.err, "loading the model"):
                target, rounded = _judges(options)
                drafts: dict[str, LanguageModel] = {}
                if options.draft_model is not None:
                    with errors_about("draft_model"):
                        drafts["the draft model"] = load_model(options.draft_model, **options.machine.of_models)
            run = partial(certify_engine, rounded=rounded, drafts=drafts, allowance=options.allowance)
            report = session.report(run, [Part.GREEDY, Part.SAMPLED, Part.BEHAVIOUR], judge=[target])
        return session.write(report)


def compare(options: CompareOptions) -> int:
    """Ask two servers the same, and say whether they answer alike; no model's weights are needed.

    Exit status 0 if no deviation was found, 1 if they deviate, 3 if there was not enough evidence or something broke.
    """
    from truedraft.certify import Part
    from truedraft.certify.engines import compare_engines

    with contextlib.ExitStack() as opened:
        session = _Session("compare", options, opened)
        session.add_servers(endpoint=options.endpoint, against=options.against)
        with _errors_undecided():
            report = session.report(compare_engines, [Part.GREEDY, Part.AGAINST, Part.BEHAVIOUR])
        return session.write(report)


def _judges(options: EngineOptions) -> tuple[LanguageModel, LanguageModel | None]:
    """The scoring model, in float32 if it is not too large, and the same in the engine's dtype, for rounding.

    "auto" is bfloat16 here, because the fastest dtype of this machine says nothing about the engine's.
    """
    with errors_about("model"):
        machine = options.machine
        if options.no_float32:
            return load_target(options.stack, machine), None
        coarse = replace(machine, dtype="bfloat16") if machine.dtype == "auto" else machine
        rounded = load_target(options.stack, coarse)
        return load_target(options.stack, replace(machine, dtype="float32")), rounded


@contextlib.contextmanager
def _errors_undecided() -> Iterator[None]:
    """Inside the block, arguments are valid and files open: other errors leave the result undecided."""
    try:
        yield
    except (PeerError, DataError) as error:
        raise UndecidedError(str(error)) from error


class _Session:
    """The engines under test, each with its transcript if one is kept; `opened` closes both."""

    def __init__(self, command: str, options: EndpointOptions, opened: contextlib.ExitStack) -> None:
        self._options, self._requests, self._opened = options, options.requests, opened
        _ = self._requests.seconds  # an invalid time is refused before anything is opened
        self._params = replace(options.sampling, seed=self._requests.first_seed)
        self._transcript = check_output_file("transcript", self._requests.transcript)
        advice = f"what was answered is kept in {self._requests.transcript}; the same command continues from there"
        if self._transcript is None:
            kept = "with --transcript FILE answers are kept, and the same command continues from them"
            advice = f"nothing was decided; {kept}"
        self.terminal = Terminal()
        self._writer = opened.enter_context(ReportWriter.open(command, options.report, self.terminal, advice))
        self._prompts = read_prompts(None, self._requests.prompts)
        self._peers: list[Peer] = []

    def add_function(self, name: str) -> None:
        from truedraft.measure.peers import ProcessPeer, load_function

        function = load_function("process", name)
        self._reader = reader = self._read()
        peer = ProcessPeer(function, name=name, vocab_size=reader.vocab_size, eos_token_ids=reader.eos_token_ids)
        if refused := peer.refuses(self._params):
            warm = " (the temperature is 1 by default; 0 requests greedy answers)" if "temperature" in refused else ""
            raise OptionError(
                f"{name!r} has no argument {refused}; name it in the function's signature, or leave the option "
                f"out{warm}",
                field="process",
            )
        self._add(peer, self._transcript)

    def add_servers(self, **urls: str | None) -> None:
        """Add servers, by the name of the option with each one's address. Loads no weights."""
        from truedraft.measure.peers import Endpoint, Patience

        server = self._options.server
        if not 0.0 < server.timeout < 1e6:
            raise OptionError(f"must be above 0, got {server.timeout:g}", field="timeout")
        key = None if server.api_key_env is None else os.environ.get(server.api_key_env)
        if server.api_key_env is not None and not key:
            raise OptionError(f"names a variable that is not set: {server.api_key_env}", field="api_key_env")
        self._reader = reader = self._read()
        # Wait for a busy server at most as long as the whole run may take.
        patience = Patience(total_s=min(Patience().total_s, self._requests.seconds))
        for field, url in urls.items():
            with errors_about(field):
                endpoint = Endpoint.open(
                    url or "",
                    server.served_model,
                    api_key=key,
                    tokenizer=reader.tokenizer,
                    vocab_size=reader.vocab_size,
                    eos_token_ids=reader.eos_token_ids,
                    timeout_s=server.timeout,
                    patience=patience,
                    tell=self.terminal.note,
                )
            self._opened.enter_context(endpoint)
            file = self._transcript
            if file is not None and self._peers:
                file = file.with_name(f"{file.stem}-{field}{file.suffix}")
            self._add(endpoint, file)

    def _read(self) -> Reader:
        from truedraft.models.loading import load_reader

        with quiet_hub(), errors_about("model"):
            return load_reader(self._options.stack.model)

    def _add(self, peer: Peer, file: Path | None) -> None:
        from truedraft.measure.peers import Recorded

        if file is not None:
            about = {"model": self._options.stack.model, "batch": self._requests.batch, "seed": self._params.seed}
            peer = self._opened.enter_context(Recorded(peer, file, about))
        self._peers.append(peer)

    def report(self, run: Callable[..., Report], parts: Sequence[Part], judge: Sequence[LanguageModel] = ()) -> Report:
        ids = encode_prompts(self._prompts, next(iter(judge), self._reader))
        with self.terminal.progress("certify", len(parts) * STEPS) as show:
            bar = _EngineBar(parts, show)
            return run(
                *(_CountedPeer(peer, bar) for peer in self._peers),
                *judge,
                ids,
                self._params,
                together=self._requests.batch,
                seconds=self._requests.seconds,
                tokens=self._requests.tokens,
                tell=bar.start,
            )

    def write(self, report: Report) -> int:
        from truedraft.machine import machine_facts

        about = {"model": self._options.stack.model, "prompts": self._requests.prompts, "seed": self._params.seed}
        return self._writer.write(report, about | {"machine": machine_facts()})


class _EngineBar:
    """Progress of a run, with the number of answers, because a round of a slow engine takes minutes."""

    def __init__(self, parts: Sequence[Part], show: Progress) -> None:
        self._parts, self._show = parts, show
        self._part, self._done, self._answers = parts[0], 0, 0

    def start(self, part: Part, done: float) -> None:
        """Set the progress of a part; `done` is in 0 to 1."""
        self._part, self._done = part, int((self._parts.index(part) + done) * STEPS)
        self.count(0)

    def count(self, answers: int = 1) -> None:
        self._answers += answers
        self._show(self._done, f"{self._part.value}; {self._answers:,} came in all")


class _CountedPeer(Peer):
    def __init__(self, peer: Peer, bar: _EngineBar) -> None:
        self.facts = peer.facts
        self._peer, self._bar = peer, bar

    def answers(self, questions: Sequence[Question]) -> Iterator[tuple[int, Reply | PeerError]]:
        for answer in self._peer.answers(questions):
            self._bar.count()
            yield answer
