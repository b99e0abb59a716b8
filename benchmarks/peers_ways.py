"""Ways in which engines answer real models, opened for `peers_real.py`: each loaded once, in a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from common import ROOT, Child, ChildEndedError, note
from peers_ours import ASSISTED
from servers import LLAMA_SERVER, PATIENCE_S, SERVED_NAME, VLLM, Drafting, Launch, llamacpp_launch, serving, vllm_launch
from truedraft import SamplingParams
from truedraft.errors import PeerError
from truedraft.measure.peers import Question
from truedraft.measure.peers.endpoint import Endpoint

RUNS = ROOT / "runs" / "peers_real"
OPENVINO = ROOT / ".venv-openvino"
OURS = str(Path(__file__).with_name("peers_ours.py"))
DRAFTED = {"llama.cpp": 4, "OpenVINO": 4, "vLLM": 4}
"""Tokens that engines draft at a time with our draft model, which keeps 2.9 of four and one, and with n-grams."""
VLLM_CACHE_GB = "1"
NEVER = -100.0


@dataclass(frozen=True)
class Weights:
    name: str
    path: Path
    draft: Path | None = None
    chat: bool = True

    @property
    def is_file(self) -> bool:
        return self.path.suffix == ".gguf"


@dataclass(frozen=True)
class Turn:
    """What all engines do, one behind the other.

    Attributes:
        cell: of the record.
        name: of its prompts.
        prompts: token ids, answered together.
        max_tokens: of each answer.
        temperature: of it.
        ignore_eos: whether it goes on behind the token that ends it.
        number: of the round, and the seed for engines that would answer alike without one.
        alone: what is timed before, with one token alone: the first tokens.
    """

    cell: str
    name: str
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = False
    number: int = 0
    alone: bool = False


@dataclass(frozen=True)
class InProcess:
    """A way of a child process; `most` is how many prompts it takes at once."""

    child: Child
    way: str
    eos: Sequence[int]
    most: int = 8

    def tokens(self, turn: Turn) -> int:
        how = {"max_tokens": turn.max_tokens, "temperature": turn.temperature, "seed": turn.number}
        what = {"way": self.way, "prompts": [list(prompt) for prompt in turn.prompts], "eos": list(self.eos)}
        return int(self.child.ask(what | how | {"ignore_eos": turn.ignore_eos}))


@dataclass(frozen=True)
class Served:
    """A way of a server; likewise."""

    endpoint: Endpoint
    eos: Sequence[int]
    most: int = 8

    def tokens(self, turn: Turn) -> int:
        """Likewise; where a server does not go on behind an end, the end is forbidden."""
        end: dict[str, Any] = {"ignore_eos": True}
        if "ignore_eos" not in self.endpoint.facts.takes:
            end = {"logit_bias": dict.fromkeys(self.eos, NEVER)}
        params = SamplingParams(turn.max_tokens, turn.temperature, **(end if turn.ignore_eos else {}))
        total = 0
        for reply in self.endpoint.ask([Question(tuple(prompt), params) for prompt in turn.prompts]):
            if isinstance(reply, PeerError):
                raise reply
            total += len(reply.token_ids)
        return total


Way: TypeAlias = InProcess | Served


@dataclass(frozen=True)
class Engines:
    """Engines over some weights.

    Attributes:
        ours: the process of truedraft.
        facts: about ours, and the versions and commands of the others.
        ways: by name; an engine that cannot be opened is told of and left out.
    """

    ours: Child
    facts: dict[str, Any]
    ways: dict[str, Way]

    def encoded(self, texts: Sequence[str], *, chat: bool) -> list[list[int]]:
        found: list[list[int]] = self.ours.ask({"texts": list(texts), "chat": chat})["ids"]
        return found


@contextlib.contextmanager
def opened(weights: Weights, threads: int, only: Sequence[str]) -> Iterator[Engines]:
    """truedraft and the engines that are asked for over some weights, which end with the block."""
    drafting = weights.draft is not None
    with contextlib.ExitStack() as stack:
        ours = _started(stack, [OURS, "truedraft", str(threads), str(weights.path), "all" if drafting else "plain"])
        facts = ours.ask({"texts": [], "chat": False})
        eos = list(facts["eos"])
        ways: dict[str, Way] = {
            f"truedraft {way}": InProcess(ours, way, eos) for way in ("plain", "auto")[: 1 + drafting]
        }
        found = Engines(ours, {"ours": facts}, ways)
        for launch in _servers(weights, threads, only):
            with _left_out(launch.name):
                server = stack.enter_context(serving(launch, RUNS, note, PATIENCE_S))
                endpoint = Endpoint.open(
                    server.url, SERVED_NAME, vocab_size=facts["vocab_size"], eos_token_ids=eos, timeout_s=PATIENCE_S
                )
                stack.callback(endpoint.close)
                ways[launch.name] = Served(endpoint, eos)
                found.facts[launch.name] = {"version": endpoint.facts.version, "command": " ".join(launch.words)}
        if "OpenVINO" in only and weights.is_file:
            with _left_out("OpenVINO"):
                child = _started(stack, _openvino(weights, threads), OPENVINO / "bin" / "python")
                names = ["plain", "lookup", "draft"] if drafting else ["plain"]
                ways |= {f"OpenVINO {way}": InProcess(child, way, eos) for way in names}
                found.facts["OpenVINO"] = {"version": package_version(OPENVINO / "bin" / "python", "openvino-genai")}
        if "transformers" in only and not weights.is_file:
            with _left_out("transformers"):
                child = _started(stack, [OURS, "transformers", str(threads), str(weights.path), str(weights.draft)])
                ways["transformers plain"] = InProcess(child, "plain", eos)
                ways |= {f"transformers {way}": InProcess(child, way, eos, 1) for way in ("lookup", *ASSISTED)}
        yield found


@contextlib.contextmanager
def _left_out(name: str) -> Iterator[None]:
    try:
        yield
    except (PeerError, ChildEndedError, OSError) as error:
        note(f"{name} is left out: {error}")


def _started(stack: contextlib.ExitStack, words: list[str], python: Path | None = None) -> Child:
    child = Child(words, python=python)
    stack.callback(child.close)
    child.read()
    return child


def _servers(weights: Weights, threads: int, only: Sequence[str]) -> Iterator[Launch]:
    """llama.cpp's server for a file and vLLM's for a folder: plain and, with a draft model, drafting both ways."""
    engine, draft = "llama.cpp" if weights.is_file else "vLLM", weights.draft
    if engine not in only:
        return
    tokens, ngram = DRAFTED[engine], 2 if weights.is_file else 3
    ways = {"plain": None, "ngram": Drafting(tokens, None, ngram), "draft": Drafting(tokens, draft)}
    for way, drafting in ways.items() if draft else [("plain", None)]:
        name = f"{engine} {way}"
        if weights.is_file:
            # Behind the launch's own words: all cores, and nothing kept of an earlier prompt.
            more = ["--threads", str(threads), "--threads-batch", str(threads), "--no-cache-prompt", "--cache-ram", "0"]
            yield llamacpp_launch(name, LLAMA_SERVER, weights.path, drafting, more)
        else:
            launch = vllm_launch(name, VLLM, weights.path, drafting, ["--no-enable-prefix-caching"])
            yield replace(launch, environment={**launch.environment, "VLLM_CPU_KVCACHE_SPACE": VLLM_CACHE_GB})


def _openvino(weights: Weights, threads: int) -> list[str]:
    if not (OPENVINO / "bin" / "python").exists():
        raise PeerError(f"there is no {OPENVINO / 'bin' / 'python'}; `make bench-peers` makes it")
    script, draft = str(Path(__file__).with_name("peers_openvino.py")), str(weights.draft or "-")
    return [script, str(weights.path), draft, str(threads), str(DRAFTED["OpenVINO"]), str(RUNS / "openvino")]


def package_version(python: Path, package: str) -> str:
    words = [str(python), "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()
