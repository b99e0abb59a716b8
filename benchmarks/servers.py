"""Engines' servers as child processes: started, waited for until they are healthy, and ended.

vLLM's CPU build and llama.cpp's server, plain, with a draft model, with n-grams, live in environments of their own
(`make certify-peers` builds them); nothing of them is imported here.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from common import ROOT
from truedraft.errors import PeerError

PORT = "{port}"
"""Stands in a command where the port belongs."""

SERVED_NAME = "model"
"""What servers call the model they serve."""
VLLM, LLAMA_CPP = ROOT / ".venv-vllm", ROOT / ".venv-llamacpp"
VLLM_SERVER = ("-m", "vllm.entrypoints.openai.api_server")
"""By its module: the command asks for a package of the name vllm, and its CPU build has another."""
LLAMA_SERVER = LLAMA_CPP / "build" / "bin" / "llama-server"
PATIENCE_S = 1200.0
"""vLLM compiles before it answers, which takes minutes where others use the cores."""
_PATIENCE_S = 600.0
_STOP_S = 60.0
_NOTE_EVERY_S = 10.0
_LAST_LINES = 3


@dataclass(frozen=True, slots=True)
class Launch:
    """How an engine's server is started.

    Attributes:
        name: for its log and for reports.
        words: of its command; `PORT` stands where it is told its port.
        environment: beside this process's own.
        health: the path that answers 200 as soon as requests are taken.
        needs: programs, folders and files without which it cannot start, each with the line that brings it.
    """

    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    health: str = "/health"
    needs: Mapping[Path, str] = field(default_factory=dict)

    def at(self, port: int) -> list[str]:
        return [word.replace(PORT, str(port)) for word in self.words]


class Server:
    """An engine's server in a process of its own, in a process group of its own.

    Raises:
        PeerError: something that it needs is not there, or its program cannot be run.
    """

    def __init__(self, launch: Launch, logs: Path, port: int | None = None) -> None:
        self.name = launch.name
        self.launch = launch
        self.port = free_port() if port is None else port
        for path, brings in launch.needs.items():
            if not path.exists():
                raise PeerError(f"{launch.name} cannot start: there is no {path}; `{brings}` makes it")
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{_file_name(launch.name)}.log"
        environment = {**os.environ, **launch.environment}
        with self.log.open("w") as log:
            try:
                self._process = subprocess.Popen(
                    launch.at(self.port), stdout=log, stderr=log, env=environment, start_new_session=True
                )
            except OSError as error:
                raise PeerError(f"{launch.name} cannot start: {launch.words[0]} is no program ({error})") from error

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, note: Callable[[str], None] | None = None, patience_s: float = _PATIENCE_S) -> None:
        """Until it is healthy.

        Raises:
            PeerError: it ended, or is not healthy by then; the log's last lines are told.
        """
        began = told = time.monotonic()
        while True:
            healthy, now = self._healthy(), time.monotonic()
            # Looked at behind its health: another server may have taken the port of one that ended.
            if (status := self._process.poll()) is not None:
                raise PeerError(f"{self.name} ended with status {status} before it answered; {self._log_words()}")
            if healthy:
                return
            if now - began > patience_s:
                raise PeerError(f"{self.name} does not answer after {patience_s:.0f} s; {self._log_words()}")
            if note is not None and now - told >= _NOTE_EVERY_S:
                told = now
                note(f"{self.name} is starting, {now - began:.0f} s: {''.join(self._last_lines(1))}")
            time.sleep(0.2)

    def check(self) -> None:
        """Whether it still runs.

        Raises:
            PeerError: it does not; the log's last lines are told.
        """
        if (status := self._process.poll()) is not None:
            raise PeerError(f"{self.name} died with status {status}; {self._log_words()}")

    def stop(self) -> None:
        """End it, with whatever it has started: engines keep workers."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter on macOS, of one that ended
            os.killpg(self._process.pid, number)

    def _healthy(self) -> bool:
        try:
            return httpx2.get(self.url + self.launch.health, timeout=5.0, trust_env=False).status_code == 200
        except httpx2.HTTPError:
            return False

    def _last_lines(self, count: int) -> list[str]:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        return [line.strip() for line in lines if line.strip()][-count:]

    def _log_words(self) -> str:
        last = " | ".join(self._last_lines(_LAST_LINES))
        return f"{self.log} ends with: {last}" if last else f"{self.log} is empty"


@contextlib.contextmanager
def serving(
    launch: Launch, logs: Path, note: Callable[[str], None] | None = None, patience_s: float = _PATIENCE_S
) -> Iterator[Server]:
    """A server that is healthy, and ended afterwards.

    Raises:
        PeerError: it cannot start, or is not healthy in time.
    """
    server = Server(launch, logs)
    try:
        server.wait(note, patience_s)
        yield server
    finally:
        server.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in name)


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a server drafts.

    Attributes:
        tokens: drafted at a time, at most.
        model: folder of the draft model, or its GGUF file; None drafts n-grams of the text itself.
        ngram: tokens that must match before an n-gram draft: for vLLM at most so many and at least one.
    """

    tokens: int
    model: Path | None = None
    ngram: int = 3

    def check_model(self) -> dict[Path, str]:
        return {} if self.model is None else {self.model: _EXPORT}


_EXPORT = "truedraft export"
_MAKE = "make certify-peers"
_SEQUENCES = 32
_SLOTS = 8
_SLOT_TOKENS = 2048


def vllm_launch(
    name: str,
    venv: Path,
    target: Path,
    drafting: Drafting | None = None,
    more: Sequence[str] = (),
    program: Sequence[str] = VLLM_SERVER,
) -> Launch:
    started = (str(venv / "bin" / "python"), *program, "--model", str(target))
    named = ("--host", "127.0.0.1", "--port", PORT, "--served-model-name", SERVED_NAME, "--dtype", "bfloat16")
    limits = ("--max-num-seqs", str(_SEQUENCES))
    speculation = () if drafting is None else ("--speculative-config", json.dumps(_vllm_drafting(drafting)))
    needs = {venv / "bin" / "vllm": _MAKE, target: _EXPORT, **({} if drafting is None else drafting.check_model())}
    return Launch(name, (*started, *named, *limits, *speculation, *more), _vllm_environment(venv), needs=needs)


def _vllm_drafting(drafting: Drafting) -> Mapping[str, object]:
    if drafting.model is not None:
        return {"method": "draft_model", "model": str(drafting.model), "num_speculative_tokens": drafting.tokens}
    return {
        "method": "ngram", "num_speculative_tokens": drafting.tokens,
        "prompt_lookup_max": drafting.ngram, "prompt_lookup_min": 1,
    }  # fmt: skip


def _vllm_environment(venv: Path) -> dict[str, str]:
    """What vLLM's pages advise for CPUs: all cores (it would keep one for its front), its OpenMP, and tcmalloc.

    A model that was loaded in this process in bfloat16 has forbidden oneDNN tiles of AMX by the environment. vLLM would
    take that over, and its own attention uses tiles all the same: it is oneDNN that asks the system for them, and
    without that the first one is an illegal instruction. So oneDNN is told its default here.
    """
    wanted = (
        (venv / "lib", "libiomp5.so"),
        (Path("/usr/lib"), "libtcmalloc_minimal.so.4"),
        (Path("/usr/lib"), "libtcmalloc.so.4"),
    )
    found = [next(iter(sorted(folder.rglob(name))), None) for folder, name in wanted]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "ONEDNN_MAX_CPU_ISA": "DEFAULT",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, _cores())),
        "LD_PRELOAD": ":".join(str(path) for path in found if path is not None),
    }


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def llamacpp_launch(
    name: str, program: Path, target: Path, drafting: Drafting | None = None, more: Sequence[str] = ()
) -> Launch:
    served = (str(program), "--model", str(target), "--alias", SERVED_NAME, "--host", "127.0.0.1", "--port", PORT)
    # The context is shared among the slots. Its threads spin while they wait, which costs seconds on cores that others
    # use too, so it gets one; words behind these say otherwise.
    slots = ("--parallel", str(_SLOTS), "--ctx-size", str(_SLOTS * _SLOT_TOKENS), "--threads", "1")
    speculation = () if drafting is None else _llamacpp_drafting(drafting)
    needs = {program: _MAKE, target: _MAKE, **({} if drafting is None else drafting.check_model())}
    return Launch(name, (*served, *slots, *speculation, *more), needs=needs)


def _llamacpp_drafting(drafting: Drafting) -> tuple[str, ...]:
    tokens = str(drafting.tokens)
    if drafting.model is not None:
        return "--model-draft", str(drafting.model), "--spec-type", "draft-simple", "--spec-draft-n-max", tokens
    sizes = ("--spec-ngram-simple-size-n", str(drafting.ngram), "--spec-ngram-simple-size-m", tokens)
    return "--spec-type", "ngram-simple", "--spec-draft-n-max", tokens, *sizes
