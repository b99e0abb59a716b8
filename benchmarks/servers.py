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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from common import ROOT, note
from truedraft.errors import PeerError
from truedraft.measure.peers.endpoint import Endpoint

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
_STOP_S = 60.0
_NOTE_EVERY_S = 10.0
_LAST_LINES = 3
_EXPORT, _MAKE = "truedraft export", "make certify-peers"


@dataclass(frozen=True, slots=True)
class Launch:
    """How an engine's server is started."""

    name: str  # for its log and for reports
    words: tuple[str, ...]  # of its command; `PORT` stands where it is told its port
    environment: Mapping[str, str] = field(default_factory=dict)  # beside this process's own
    needs: Mapping[Path, str] = field(default_factory=dict)  # without which it cannot start, and what brings each

    def at(self, port: int) -> list[str]:
        return [word.replace(PORT, str(port)) for word in self.words]


class Server:
    """An engine's server in a process of its own, in a process group of its own.

    Raises:
        PeerError: something that it needs is not there, or its program cannot be run.
    """

    def __init__(self, launch: Launch, logs: Path, port: int | None = None) -> None:
        self.name, self.port = launch.name, free_port() if port is None else port
        for path, brings in launch.needs.items():
            if not path.exists():
                raise PeerError(f"{launch.name} cannot start: there is no {path}; `{brings}` makes it")
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / ("".join(each if each.isalnum() or each in "-." else "-" for each in launch.name) + ".log")
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

    def wait(self, patience_s: float = PATIENCE_S) -> None:
        """Until it is healthy.

        Raises:
            PeerError: it ended, or is not healthy by then; the log's last lines are told.
        """
        began = told = time.monotonic()
        while True:
            healthy, now = self._healthy(), time.monotonic()
            # Looked at behind its health: another server may have taken the port of one that ended.
            self.check(" before it answered")
            if healthy:
                return
            if now - began > patience_s:
                raise PeerError(f"{self.name} does not answer after {patience_s:.0f} s; {self._log_words()}")
            if now - told >= _NOTE_EVERY_S:
                told = now
                note(f"{self.name} is starting, {now - began:.0f} s: {''.join(self._last_lines(1))}")
            time.sleep(0.2)

    def check(self, when: str = "") -> None:
        """Whether it still runs.

        Raises:
            PeerError: it does not; the log's last lines are told.
        """
        if (status := self._process.poll()) is not None:
            raise PeerError(f"{self.name} ended with status {status}{when}; {self._log_words()}")

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
            return httpx2.get(f"{self.url}/health", timeout=5.0, trust_env=False).status_code == 200
        except httpx2.HTTPError:
            return False

    def _last_lines(self, count: int) -> list[str]:
        lines = self.log.read_text(errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip()][-count:]

    def _log_words(self) -> str:
        last = " | ".join(self._last_lines(_LAST_LINES))
        return f"{self.log} ends with: {last}" if last else f"{self.log} is empty"


@contextlib.contextmanager
def serving(launch: Launch, logs: Path, patience_s: float = PATIENCE_S) -> Iterator[Server]:
    """A server that is healthy, and ended afterwards.

    Raises:
        PeerError: it cannot start, or is not healthy in time.
    """
    server = Server(launch, logs)
    try:
        server.wait(patience_s)
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def answering(launch: Launch, logs: Path, **about: Any) -> Iterator[tuple[Server, Endpoint]]:
    """A server with an endpoint that asks it, told `about` its model as `Endpoint.open` is."""
    with (
        serving(launch, logs) as server,
        contextlib.closing(Endpoint.open(server.url, SERVED_NAME, **about)) as endpoint,
    ):
        yield server, endpoint


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a server drafts."""

    tokens: int  # drafted at a time, at most
    model: Path | None = None  # folder of the draft model, or its GGUF file; None drafts n-grams of the text itself
    ngram: int = 3  # tokens that must match before an n-gram draft: for vLLM at most so many and at least one


def vllm_launch(
    name: str,
    venv: Path,
    target: Path,
    drafting: Drafting | None = None,
    more: Sequence[str] = (),
    program: Sequence[str] = VLLM_SERVER,
) -> Launch:
    words = [str(venv / "bin" / "python"), *program, "--model", str(target), "--host", "127.0.0.1", "--port", PORT]
    words += ["--served-model-name", SERVED_NAME, "--dtype", "bfloat16", "--max-num-seqs", "32"]
    needs = {venv / "bin" / "vllm": _MAKE, target: _EXPORT}
    if drafting is not None:
        tokens = {"num_speculative_tokens": drafting.tokens}
        if drafting.model is not None:
            how = {"method": "draft_model", "model": str(drafting.model), **tokens}
            needs[drafting.model] = _EXPORT
        else:
            how = {"method": "ngram", **tokens, "prompt_lookup_max": drafting.ngram, "prompt_lookup_min": 1}
        words += ["--speculative-config", json.dumps(how)]
    return Launch(name, (*words, *more), _vllm_environment(venv), needs)


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
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = sorted(os.sched_getaffinity(0)) if has_affinity else range(os.cpu_count() or 1)
    return {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "ONEDNN_MAX_CPU_ISA": "DEFAULT",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "LD_PRELOAD": ":".join(str(path) for path in found if path is not None),
    }


def llamacpp_launch(
    name: str, program: Path, target: Path, drafting: Drafting | None = None, more: Sequence[str] = ()
) -> Launch:
    words = [str(program), "--model", str(target), "--alias", SERVED_NAME, "--host", "127.0.0.1", "--port", PORT]
    # The context, of 2,048 tokens for each slot, is shared among the slots. Its threads spin while they wait, which
    # costs seconds on cores that others use too, so it gets one; words behind these say otherwise.
    words += ["--parallel", "8", "--ctx-size", "16384", "--threads", "1"]
    needs = {program: _MAKE, target: _MAKE}
    if drafting is not None:
        tokens = str(drafting.tokens)
        if drafting.model is not None:
            words += ["--model-draft", str(drafting.model), "--spec-type", "draft-simple", "--spec-draft-n-max", tokens]
            needs[drafting.model] = _EXPORT
        else:
            words += ["--spec-type", "ngram-simple", "--spec-draft-n-max", tokens]
            words += ["--spec-ngram-simple-size-n", str(drafting.ngram), "--spec-ngram-simple-size-m", tokens]
    return Launch(name, (*words, *more), needs=needs)
