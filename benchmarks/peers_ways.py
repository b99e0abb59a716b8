"""Ways in which engines answer real models, opened for `peers_real.py`: each loaded once, in a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from common import Child, ChildEndedError
from launches import SERVED_NAME, Drafting, llamacpp_launch, vllm_launch
from peers_engines import LLAMA_CPP, NGRAM, PATIENCE_S, ROOT, VLLM, note
from peers_ours import ASSISTED
from servers import Launch, serving
from truedraft import SamplingParams
from truedraft.errors import PeerError
from truedraft.peers import Question
from truedraft.peers.endpoint import Endpoint

RUNS = ROOT / "runs" / "peers_real"
OPENVINO = ROOT / ".venv-openvino"
OURS = Path(__file__).with_name("peers_ours.py")
DRAFTED = {"llama.cpp": 4, "OpenVINO": 4, "vLLM": 4}
"""Tokens that engines draft at a time with our draft model, which keeps 2.9 of four and one, and with n-grams."""
VLLM_CACHE_GB = "1"
NEVER = -100.0


@dataclass(frozen=True)
class Asked:
    """How prompts are to be answered.

    Attributes:
        max_tokens: of each answer.
        temperature: of it.
        ignore_eos: whether it goes on behind the token that ends it.
        seed: for engines that would answer alike without one.
    """

    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int = 0


class Way(Protocol):
    """A way of answering; `most` is how many prompts it takes at once."""

    most: int

    def tokens(self, prompts: Sequence[Sequence[int]], asked: Asked) -> int:
        """Answer prompts together, and say how many new tokens that were."""


@dataclass(frozen=True)
class Weights:
    """Of what is measured.

    Attributes:
        name: for records.
        path: a GGUF file or a folder.
        draft: our draft model in the same form; None measures plain decoding alone.
        chat: whether prompts are messages of a user.
    """

    name: str
    path: Path
    draft: Path | None = None
    chat: bool = True

    @property
    def is_file(self) -> bool:
        """Whether it is a GGUF file."""
        return self.path.suffix == ".gguf"


@dataclass(frozen=True)
class InProcess:
    """A way of a child process."""

    child: Child
    way: str
    eos: Sequence[int]
    most: int = 8

    def tokens(self, prompts: Sequence[Sequence[int]], asked: Asked) -> int:
        """As of `Way`."""
        words = {"way": self.way, "prompts": [list(prompt) for prompt in prompts], "eos": list(self.eos)}
        return int(self.child.ask(words | asdict(asked)))


@dataclass(frozen=True)
class Served:
    """A way of a server."""

    endpoint: Endpoint
    eos: Sequence[int]
    most: int = 8

    def tokens(self, prompts: Sequence[Sequence[int]], asked: Asked) -> int:
        """As of `Way`; where a server does not go on behind an end, the end is forbidden."""
        end: dict[str, Any] = {"ignore_eos": True}
        if "ignore_eos" not in self.endpoint.facts.takes:
            end = {"logit_bias": dict.fromkeys(self.eos, NEVER)}
        params = SamplingParams(asked.max_tokens, asked.temperature, **(end if asked.ignore_eos else {}))
        replies = self.endpoint.ask([Question(tuple(prompt), params) for prompt in prompts])
        for reply in replies:
            if isinstance(reply, PeerError):
                raise reply
        return sum(len(reply.token_ids) for reply in replies if not isinstance(reply, PeerError))


class Engines:
    """Engines over some weights.

    Args:
        stack: ends them.
        weights: of them.
        threads: that each computes on.
        only: engines; truedraft is always there.

    Attributes:
        ways: by name; an engine that cannot be opened is told of and left out.
        facts: about ours, and the versions and commands of the others.
    """

    def __init__(self, stack: contextlib.ExitStack, weights: Weights, threads: int, only: Sequence[str]) -> None:
        self._stack, self._weights, self._threads = stack, weights, threads
        self.ways: dict[str, Way] = {}
        which = "all" if weights.draft else "plain"
        self._ours = self._child([str(OURS), "truedraft", str(threads), str(weights.path), which])
        self.facts: dict[str, Any] = {"ours": self._ours.ask({"texts": [], "chat": False})}
        self._in_process("truedraft", self._ours, ["plain", "auto"] if weights.draft else ["plain"])
        for engine, opened in {"llama.cpp": self._llamacpp, "OpenVINO": self._openvino, "vLLM": self._vllm,
                               "transformers": self._transformers}.items():  # fmt: skip
            if engine in only:
                try:
                    opened()
                except (PeerError, ChildEndedError, OSError) as error:
                    note(f"{engine} is left out: {error}")

    @property
    def _eos(self) -> Sequence[int]:
        return list(self.facts["ours"]["eos"])

    def encoded(self, texts: Sequence[str], *, chat: bool) -> list[list[int]]:
        """Texts as token ids."""
        found: list[list[int]] = self._ours.ask({"texts": list(texts), "chat": chat})["ids"]
        return found

    def _child(self, words: list[str], python: Path | None = None) -> Child:
        child = Child(words, python=python)
        self._stack.callback(child.close)
        child.read()
        return child

    def _in_process(self, engine: str, child: Child, ways: Sequence[str], alone: Sequence[str] = ()) -> None:
        for way in ways:
            self.ways[f"{engine} {way}"] = InProcess(child, way, self._eos, 1 if way in alone else 8)

    def _served(self, name: str, launch: Launch) -> None:
        """One that cannot be opened leaves the engine's others."""
        try:
            server = self._stack.enter_context(serving(launch, RUNS, note, PATIENCE_S))
        except PeerError as error:
            note(f"{name} is left out: {error}")
            return
        facts = self.facts["ours"]
        endpoint = Endpoint.open(
            server.url, SERVED_NAME, vocab_size=facts["vocab_size"], eos_token_ids=facts["eos"], timeout_s=PATIENCE_S
        )
        self._stack.callback(endpoint.close)
        self.ways[name] = Served(endpoint, self._eos)
        self.facts[name] = {"version": endpoint.facts.version, "command": " ".join(launch.words)}

    def _llamacpp(self) -> None:
        if not self._weights.is_file:
            return
        server = LLAMA_CPP / "build" / "bin" / "llama-server"
        threads = str(self._threads)
        # Behind the launch's own words: all cores, and nothing kept of an earlier prompt.
        more = ["--threads", threads, "--threads-batch", threads, "--no-cache-prompt", "--cache-ram", "0"]
        tokens, draft = DRAFTED["llama.cpp"], self._weights.draft
        ways = {"plain": None, "ngram": Drafting(tokens, None, NGRAM), "draft": Drafting(tokens, draft)}
        for way, drafting in ways.items() if draft else [("plain", None)]:
            name = f"llama.cpp {way}"
            self._served(name, llamacpp_launch(name, server, self._weights.path, drafting, more))

    def _vllm(self) -> None:
        if self._weights.is_file:
            return
        tokens = DRAFTED["vLLM"]
        ways = {"plain": None, "ngram": Drafting(tokens), "draft": Drafting(tokens, self._weights.draft)}
        for way, drafting in ways.items():
            name = f"vLLM {way}"
            launch = vllm_launch(name, VLLM, self._weights.path, drafting, ["--no-enable-prefix-caching"])
            environment = {**launch.environment, "VLLM_CPU_KVCACHE_SPACE": VLLM_CACHE_GB}
            self._served(name, replace(launch, environment=environment))

    def _openvino(self) -> None:
        if not self._weights.is_file:
            return
        python, draft = OPENVINO / "bin" / "python", self._weights.draft
        if not python.exists():
            raise PeerError(f"there is no {python}; `make bench-peers` makes it")
        script = Path(__file__).with_name("peers_openvino.py")
        words = [str(script), str(self._weights.path), str(draft or "-"), str(self._threads), str(DRAFTED["OpenVINO"])]
        child = self._child([*words, str(RUNS / "openvino")], python)
        self._in_process("OpenVINO", child, ["plain", "lookup", "draft"] if draft else ["plain"])
        self.facts["OpenVINO"] = {"version": package_version(python, "openvino-genai")}

    def _transformers(self) -> None:
        if self._weights.is_file:
            return
        words = [str(OURS), "transformers", str(self._threads), str(self._weights.path), str(self._weights.draft)]
        drafting = ["lookup", *ASSISTED]
        self._in_process("transformers", self._child(words), ["plain", *drafting], drafting)


def package_version(python: Path, package: str) -> str:
    """Of a package in another environment."""
    words = [str(python), "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def opened(weights: Weights, threads: int, only: Sequence[str]) -> Iterator[Engines]:
    """Engines over some weights, which end with the block."""
    with contextlib.ExitStack() as stack:
        yield Engines(stack, weights, threads, only)
