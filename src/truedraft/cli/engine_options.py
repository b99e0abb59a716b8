"""Engines that `truedraft certify engine` and `compare` test: connection, progress, transcript and report."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from truedraft.certify import Part, Report
from truedraft.cli.certify import Telling, ids_of, usable_file
from truedraft.cli.failures import UndecidedError
from truedraft.cli.prompts import read_prompts
from truedraft.cli.terminal import Terminal
from truedraft.errors import DataError, OptionError, PeerError, errors_about
from truedraft.measure.peers.asking import Peer, Question, Reply
from truedraft.models.base import LanguageModel, Reader
from truedraft.progress import Progress

if TYPE_CHECKING:
    from truedraft.cli.certify_engines import AskedOptions

_STEPS = 1000


@contextlib.contextmanager
def asking(command: str, options: AskedOptions) -> Iterator[Asking]:
    """Open the engines of a command, and close them after the block."""
    with contextlib.ExitStack() as opened:
        yield Asking(command, options, opened)


class Asking:
    """The engines under test, each with its transcript if one is kept.

    Args:
        opened: closes the engines and files.
    """

    def __init__(self, command: str, options: AskedOptions, opened: contextlib.ExitStack) -> None:
        self._options, self._ask, self._opened = options, options.ask, opened
        _ = self._ask.seconds  # an invalid time is refused before anything is opened
        self._params = replace(options.sampling, seed=self._ask.first_seed)
        self._transcript = usable_file("transcript", self._ask.transcript)
        how = "nothing was decided; with --transcript FILE answers are kept, and the same command goes on from them"
        if self._transcript is not None:
            how = f"what was answered is kept in {self._ask.transcript}; the same command goes on from there"
        self.terminal = Terminal()
        self._telling = opened.enter_context(Telling.of(command, options.report, self.terminal, how))
        self._prompts = read_prompts(None, self._ask.prompts)
        self._peers: list[Peer] = []

    def add_function(self, name: str) -> None:
        """Add a Python function.

        Raises:
            OptionError: it does not exist, or has no argument for an option.
        """
        from truedraft.measure.peers import ProcessPeer, load_function

        function = load_function("process", name)
        self._reader = reader = self._read()
        peer = ProcessPeer(function, name=name, vocab_size=reader.vocab_size, eos_token_ids=reader.eos_token_ids)
        if refused := peer.refuses(self._params):
            warm = " (the temperature is 1 by default; 0 asks for greedy answers)" if "temperature" in refused else ""
            raise OptionError(
                f"{name!r} has no argument {refused}; name it in the function's signature, or leave the option "
                f"out{warm}",
                field="process",
            )
        self._add(peer, self._transcript)

    def add_servers(self, **urls: str | None) -> None:
        """Add servers, by the name of the option with each one's address. Loads no weights.

        Raises:
            OptionError, PeerError: unusable options, or one cannot be reached.
        """
        from truedraft.measure.peers import Endpoint, Patience

        server = self._options.server
        if not 0.0 < server.timeout < 1e6:
            raise OptionError(f"must be above 0, got {server.timeout:g}", field="timeout")
        key = _key(server.api_key_env)
        self._reader = reader = self._read()
        # Wait for a busy server at most as long as the whole run may take.
        patience = Patience(total_s=min(Patience().total_s, self._ask.seconds))
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
        from truedraft.cli.session import quiet_hub
        from truedraft.models.loading import load_reader

        with quiet_hub(), errors_about("model"):
            return load_reader(self._options.stack.model)

    def _add(self, peer: Peer, file: Path | None) -> None:
        from truedraft.measure.peers import Recorded

        if file is not None:
            about = {"model": self._options.stack.model, "batch": self._ask.batch, "seed": self._params.seed}
            peer = self._opened.enter_context(Recorded(peer, file, about))
        self._peers.append(peer)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Inside the block, arguments are valid and files open: other errors leave the result undecided."""
        try:
            yield
        except (PeerError, DataError) as error:
            raise UndecidedError(str(error)) from error

    def report(self, run: Callable[..., Report], parts: Sequence[Part], judge: Sequence[LanguageModel] = ()) -> Report:
        """Run a certificate.

        Args:
            run: `certify_engine` or `compare_engines`.
            parts: of the certificate, in the order of their progress.
            judge: the scoring model, if `run` takes one.
        """
        ids = ids_of(self._prompts, next(iter(judge), self._reader))
        with self.terminal.progress("certify", len(parts) * _STEPS) as show:
            bar = _EngineBar(parts, show)
            return run(
                *(_Watched(peer, bar.answered) for peer in self._peers),
                *judge,
                ids,
                self._params,
                together=self._ask.batch,
                seconds=self._ask.seconds,
                tokens=self._ask.tokens,
                tell=bar.tell,
            )

    def told(self, report: Report) -> int:
        """Write the report; returns the exit status."""
        from truedraft.machine import machine_facts

        about = {"model": self._options.stack.model, "prompts": self._ask.prompts, "seed": self._params.seed}
        return self._telling.told(report, about | {"machine": machine_facts()})


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise OptionError(f"names a variable that is not set: {variable}", field="api_key_env")
    return key


class _EngineBar:
    """Progress of a run, with the number of answers, because a round of a slow engine takes minutes."""

    def __init__(self, parts: Sequence[Part], show: Progress) -> None:
        self._parts, self._show = parts, show
        self._part, self._done, self._answers = parts[0], 0, 0

    def tell(self, part: Part, done: float) -> None:
        """Set the progress of a part; `done` is in 0 to 1."""
        self._part, self._done = part, int((self._parts.index(part) + done) * _STEPS)
        self.answered(0)

    def answered(self, count: int = 1) -> None:
        self._answers += count
        self._show(self._done, f"{self._part.value}; {self._answers:,} came in all")


class _Watched(Peer):
    """A peer that calls `tell` for each answer."""

    def __init__(self, peer: Peer, tell: Callable[[], None]) -> None:
        self.facts = peer.facts
        self._peer = peer
        self._tell = tell

    def answers(self, questions: Sequence[Question]) -> Iterator[tuple[int, Reply | PeerError]]:
        for answer in self._peer.answers(questions):
            self._tell()
            yield answer
