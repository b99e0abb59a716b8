"""truedraft beside llama.cpp, OpenVINO GenAI, vLLM's CPU build and transformers on real models: `make bench-peers`.

    python benchmarks/peers_real.py --prompts FOLDER --folder SMOLLM2 --draft DRAFT [--gemma FILE] [--texts FILE ...]
    python benchmarks/peers_real.py --report

All engines that can read some weights are loaded once and answer the same token ids in turns, a line of JSON for each
turn of all of them, written as soon as it is done; a rerun of the same commit goes on behind the lines that are there.
Cells: whole requests of published questions (`requests`), decoding alone of one prompt and of eight at once (`decode`:
an answer of one token is taken off, whose time is that of the first tokens), the first token of a long prompt
(`first`), llama.cpp's own benchmark of a batch (`batched`), perplexity beside llama.cpp's (`perplexity`), memory and
loading (`memory`). Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from common import RESULTS, ROOT, Child, ChildEndedError, Lines, asked_once, commit, note
from peers_engines import llamacpp_surprise
from peers_ours import ASSISTED
from real_prompts import SETS, TEMPERATURES
from servers import LLAMA_SERVER, PATIENCE_S, VLLM, Drafting, Launch, answering, llamacpp_launch, vllm_launch
from truedraft import SamplingParams
from truedraft.errors import PeerError
from truedraft.machine import machine_facts
from truedraft.measure.bench.prompts import read_questions, spread
from truedraft.measure.bench.runs import rotated
from truedraft.measure.peers import Question
from truedraft.measure.peers.endpoint import Endpoint
from truedraft.models.embedded import smollm2_file

DRAFT_FILE = ROOT / "packages" / "truedraft-smollm2" / "src" / "truedraft_smollm2" / "draft" / "draft-Q4_0.gguf"
PEERS = ("llama.cpp", "OpenVINO", "vLLM", "transformers")
CELLS = ("decode", "first", "requests", "batched", "perplexity", "memory")
LONG = 1000
"""Tokens of the prompt of `first`."""
WARM_UP = 16
"""Tokens of a prompt that each engine reads before it is timed."""
LONG_TEXTS = ("summarization", "rag")
PIECES, PIECE_TOKENS = 2, 256
"""Of each text whose perplexity is measured."""
RUNS = ROOT / "runs" / "peers_real"
OPENVINO = ROOT / ".venv-openvino"
OURS = str(Path(__file__).with_name("peers_ours.py"))
DRAFTED = 4
"""Tokens that engines draft at a time with our draft model, which keeps 2.9 of four and one, and with n-grams."""
VLLM_CACHE_GB = "1"
NEVER = -100.0


# ------------------------------------------------------------------- engines, each loaded once, in a process of its own


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
    """What all engines do, one behind the other: prompts, as token ids, are answered together.

    `number` is that of the round, and the seed for engines that would answer alike without one.
    """

    cell: str
    name: str
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    temperature: float = 0.0
    number: int = 0

    @property
    def ignore_eos(self) -> bool:
        """Whether answers go on behind the token that ends them."""
        return self.cell != "requests"


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
    """Engines over some weights."""

    ours: Child  # the process of truedraft
    facts: dict[str, Any]  # about ours, and the versions and commands of the others
    ways: dict[str, Way]  # by name; an engine that cannot be opened is told of and left out

    def encoded(self, texts: Sequence[str], *, chat: bool) -> list[list[int]]:
        found: list[list[int]] = self.ours.ask({"texts": list(texts), "chat": chat})["ids"]
        return found

    def add(self, child: Child, engine: str, ways: Sequence[str], eos: Sequence[int], most: int = 8) -> None:
        self.ways.update({f"{engine} {way}": InProcess(child, way, eos, most) for way in ways})


@contextlib.contextmanager
def opened(weights: Weights, threads: int, only: Sequence[str]) -> Iterator[Engines]:
    """truedraft and the engines that are asked for over some weights, which end with the block."""
    drafting = weights.draft is not None
    with contextlib.ExitStack() as stack:
        ours = _started(stack, [OURS, "truedraft", str(threads), str(weights.path), "all" if drafting else "plain"])
        facts = ours.ask({"texts": [], "chat": False})
        eos = list(facts["eos"])
        found = Engines(ours, {"ours": facts}, {})
        found.add(ours, "truedraft", ("plain", "auto") if drafting else ("plain",), eos)
        for launch in _servers(weights, threads, only):
            with _left_out(launch.name):
                about = {"vocab_size": facts["vocab_size"], "eos_token_ids": eos, "timeout_s": PATIENCE_S}
                _, endpoint = stack.enter_context(answering(launch, RUNS, **about))
                found.ways[launch.name] = Served(endpoint, eos)
                found.facts[launch.name] = {"version": endpoint.facts.version, "command": " ".join(launch.words)}
        if "OpenVINO" in only and weights.is_file:
            with _left_out("OpenVINO"):
                python = OPENVINO / "bin" / "python"
                if not python.exists():
                    raise PeerError(f"there is no {python}; `make bench-peers` makes it")
                script = str(Path(__file__).with_name("peers_openvino.py"))
                words = [script, str(weights.path), str(weights.draft or "-"), str(threads)]
                child = _started(stack, [*words, str(DRAFTED), str(RUNS / "openvino")], python)
                found.add(child, "OpenVINO", ("plain", "lookup", "draft") if drafting else ("plain",), eos)
                found.facts["OpenVINO"] = {"version": package_version(python, "openvino-genai")}
        if "transformers" in only and not weights.is_file:
            with _left_out("transformers"):
                child = _started(stack, [OURS, "transformers", str(threads), str(weights.path), str(weights.draft)])
                found.add(child, "transformers", ("plain",), eos)
                found.add(child, "transformers", ("lookup", *ASSISTED), eos, most=1)
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
    ngram = Drafting(DRAFTED, None, 2 if weights.is_file else 3)
    ways = {"plain": None, "ngram": ngram, "draft": Drafting(DRAFTED, draft)}
    for way, drafting in ways.items() if draft else [("plain", None)]:
        name = f"{engine} {way}"
        if weights.is_file:
            # Behind the launch's own words: all cores, and nothing kept of an earlier prompt.
            more = ["--threads", str(threads), "--threads-batch", str(threads), "--no-cache-prompt", "--cache-ram", "0"]
            yield llamacpp_launch(name, LLAMA_SERVER, weights.path, drafting, more)
        else:
            launch = vllm_launch(name, VLLM, weights.path, drafting, ["--no-enable-prefix-caching"])
            yield replace(launch, environment={**launch.environment, "VLLM_CPU_KVCACHE_SPACE": VLLM_CACHE_GB})


def package_version(python: Path, package: str) -> str:
    words = [str(python), "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


# ------------------------------------------------------------------------------------------------------------- cells


def place_of(cell: str, weights: str, name: str = "", temperature: float = 0.0, number: int = 0) -> dict[str, Any]:
    """Fields of a line that are unique in a file for one commit."""
    return {"cell": cell, "weights": weights, "name": name, "temperature": temperature, "round": number}


def is_done(kept: Lines, place: Mapping[str, Any]) -> bool:
    return any(place.items() <= line.items() for line in kept.records)


def keep(kept: Lines, place: Mapping[str, Any], found: Mapping[str, Any], **more: Any) -> None:
    kept.add({**place, **more, "ways": found, "when": time.strftime("%Y-%m-%dT%H:%M:%S")})


def turns(engines: Engines, weights: Weights, asked: argparse.Namespace) -> Iterator[Turn]:
    names, texts = zip(*questions(asked.prompts, asked.limit), strict=True)
    ids = dict(zip(names, engines.encoded(texts, chat=weights.chat), strict=True))
    mixed = engines.encoded([text for _, text in questions(asked.prompts, 8 // len(SETS))], chat=weights.chat)
    long = (engines.encoded(["\n".join(texts) * 4], chat=weights.chat)[0] * LONG)[:LONG]
    most = asked.max_tokens
    for number in range(asked.rounds):
        for heat in TEMPERATURES:
            for name, prompts in {"one": mixed[:1], "eight": mixed}.items():
                yield Turn("decode", name, prompts, most, heat, number)
        yield Turn("first", f"{LONG} tokens", [long], 1, number=number)
    for number in range(asked.whole_rounds):
        for heat in TEMPERATURES:
            for name, prompt in ids.items():
                yield Turn("requests", name, [prompt], most, heat, number)


def questions(folder: Path, limit: int) -> list[tuple[str, str]]:
    """Names and texts, so many of each set; of Spec-Bench those with long texts."""
    found = []
    for name in SETS:
        every = read_questions(folder / name)[1]
        every = [question for question in every if name != "spec_bench" or question.category in LONG_TEXTS]
        found += [(f"{name} {question.name}", question.text) for question in spread(every, limit)]
    return found


def taken(turn: Turn, engines: Engines) -> dict[str, dict[str, Any]]:
    """What each way took, beginning with another one in each turn."""
    able = [(name, way) for name, way in engines.ways.items() if len(turn.prompts) <= way.most]
    found: dict[str, dict[str, Any]] = {}
    for name, way in rotated(able, turn.number + len(turn.name)):
        try:
            # Behind another engine caches are cold, and its threads may still wait on a core.
            way.tokens(replace(turn, prompts=[turn.prompts[0][:WARM_UP]], max_tokens=1))
            first_s = None
            if turn.cell == "decode":
                began = time.perf_counter()
                way.tokens(replace(turn, max_tokens=1))
                first_s = time.perf_counter() - began
            began = time.perf_counter()
            tokens = way.tokens(turn)
            found[name] = {"tokens": tokens, "seconds": time.perf_counter() - began, "first_s": first_s}
        except (PeerError, ChildEndedError, OSError) as error:
            found[name] = {"error": str(error)}
            note(f"{name}: {error}")
    return {name: found[name] for name, _ in able}


def measure(weights: Weights, kept: Lines, asked: argparse.Namespace, left_s: Callable[[], float]) -> None:
    if not {"decode", "first", "requests"} & {*asked.only} or left_s() < 0:
        return
    with opened(weights, asked.threads, asked.engines) as engines:
        every = [turn for turn in turns(engines, weights, asked) if turn.cell in asked.only]
        if weights.draft is None:  # plain decoding alone, of a base model
            every = [turn for turn in every if turn.cell != "requests" and turn.temperature == 0.0]
        places = [place_of(turn.cell, weights.name, turn.name, turn.temperature, turn.number) for turn in every]
        todo = [(place, turn) for place, turn in zip(places, every, strict=True) if not is_done(kept, place)]
        if not todo:
            return
        settings = {"machine": machine_facts(), "threads": asked.threads, "drafted": DRAFTED, "engines": engines.facts}
        keep(kept, place_of("settings", weights.name), {}, settings=settings)
        for way in engines.ways.values():  # what happens once, as compiling, falls outside
            with contextlib.suppress(PeerError):  # what fails here is told when it is measured
                way.tokens(replace(todo[0][1], max_tokens=16))
        for number, (place, turn) in enumerate(todo):
            if left_s() < 0:
                note(f"the time is over; {len(todo) - number} turns of {weights.name} are left")
                return
            lengths = [len(prompt) for prompt in turn.prompts]
            keep(kept, place, taken(turn, engines), prompt_tokens=lengths, max_tokens=turn.max_tokens)


def once(weights: Weights, kept: Lines, asked: argparse.Namespace) -> None:
    """Cells of a file that are measured once: `batched`, `perplexity` and `memory`."""
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "batched": lambda: batched(weights.path, asked.threads),
        "perplexity": lambda: perplexities(weights.path, asked.texts, asked.threads),
        "memory": lambda: {"truedraft": remembered(weights.path, asked.threads)},
    }
    for cell, way in ways.items():
        place = place_of(cell, weights.name)
        if cell in asked.only and not is_done(kept, place) and (cell != "perplexity" or asked.texts):
            try:
                keep(kept, place, way())
            except (PeerError, ChildEndedError, OSError, subprocess.CalledProcessError) as error:
                note(f"{cell} of {weights.name} is left out: {error}")


def batched(file: Path, threads: int) -> dict[str, Any]:
    """What `llama-batched-bench` says of one and of eight prompts of 256 tokens and answers of 128."""
    program = LLAMA_SERVER.with_name("llama-batched-bench")
    shape = ["-npp", "256", "-ntg", "128", "-npl", "1,8", "-c", "4096", "-t", str(threads), "-tb", str(threads)]
    command = [str(program), "-m", str(file), *shape, "--output-format", "jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {f"llama-batched-bench, {each['pl']}": each for each in found}


def perplexities(file: Path, texts: Sequence[Path], threads: int) -> dict[str, Any]:
    parts = [text.read_text(encoding="utf-8")[: 8 * PIECES * PIECE_TOKENS] for text in texts]
    what = {"texts": parts, "pieces": PIECES, "tokens": PIECE_TOKENS}
    ours = asked_once([OURS, "perplexity", str(threads), str(file)], what)
    theirs = llamacpp_surprise(file, ours["pieces"], threads)
    mine = math.exp(ours["surprise"])
    return {"truedraft": {"perplexity": mine}, "llama.cpp": {"perplexity": math.exp(theirs)}}


def remembered(file: Path, threads: int) -> dict[str, Any]:
    found: dict[str, Any] = asked_once([OURS, "memory", str(threads), str(file), str(LONG), "128"], {})
    own = found["peak_bytes"] - found["imported_bytes"] - found["cache_bytes"]
    return found | {"over_file": own / found["file_bytes"]}


def rows(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By what is measured a figure for each way: medians over rounds, geometric means of those over prompts."""
    values: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for line in lines:
        for way, found in line["ways"].items():
            for what, value in figures(line["cell"], line, found):
                label = f"{line['weights']}, {what}"
                values[label][way][line["name"]].append(value)
    return {
        label: {way: statistics.geometric_mean(map(statistics.median, each.values())) for way, each in ways.items()}
        for label, ways in values.items()
    }


def figures(cell: str, line: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    if "error" in found:
        return
    heat = f"temperature {line['temperature']:g}"
    if cell == "requests" and found["tokens"]:
        yield f"whole requests, {heat}, tokens/s", found["tokens"] / found["seconds"]
    elif cell == "decode":
        decoded = found["tokens"] - len(line["prompt_tokens"])
        yield f"decoding {line['name']}, {heat}, tokens/s", decoded / max(found["seconds"] - found["first_s"], 1e-9)
        yield f"first tokens of {line['name']}, {heat}, s", found["first_s"]
        yield f"answering {line['name']}, prompts included, {heat}, tokens/s", found["tokens"] / found["seconds"]
    elif cell == "first":
        yield f"first token of {line['name']}, s", found["seconds"]
    elif cell == "batched":
        yield f"llama-batched-bench, {found['pl']} at once, tokens/s", found["speed_tg"]
    elif cell == "perplexity":
        yield "perplexity", found["perplexity"]
    elif cell == "memory":
        yield "memory without imports and cache over the file", found["over_file"]
        yield "load to first token, s", found["load_to_first_token_s"]


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    """A list for each figure, each way with its figure and that over our plain decoding's."""
    out = []
    for label, ways in sorted(rows(lines).items()):
        base = ways.get("truedraft plain")
        out.append(f"\n{label}")
        out += [f"  {way:36} {value:10.3f}" + (f" {value / base:8.2f}" if base else "") for way, value in ways.items()]
    return "\n".join(out)


def main() -> None:
    asked = _asked()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended too
    kept = Lines(asked.out, commit=asked.commit)
    end, before = time.monotonic() + 60 * asked.minutes, len(kept.records)
    every = [Weights("q4_1", asked.file, asked.draft_file)] if asked.file else []
    every += [Weights("bf16", asked.folder, asked.draft)] if asked.folder and asked.draft else []
    every += [Weights("gemma q4_k_m", asked.gemma, chat=False)] if asked.gemma else []
    for weights in [] if asked.report else [each for each in every if each.name in asked.weights]:
        measure(weights, kept, asked, lambda: end - time.monotonic())
        if weights.is_file and time.monotonic() < end:
            once(weights, kept, asked)
    found = [line for line in kept.records if line["cell"] not in ("settings", "summary")]
    if len(kept.records) > before:
        keep(kept, place_of("summary", ""), {}, rows=rows(found))
    print(report(found))


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="a folder with a folder for each set")
    parser.add_argument("--file", type=Path, default=smollm2_file(), help="SmolLM2's GGUF file; its wheel's")
    parser.add_argument("--draft-file", type=Path, default=DRAFT_FILE, help="its draft model's")
    parser.add_argument("--folder", type=Path, help="SmolLM2 in bfloat16")
    parser.add_argument("--draft", type=Path, help="its draft model as a folder")
    parser.add_argument("--gemma", type=Path, help="Gemma's GGUF file")
    parser.add_argument("--texts", nargs="+", type=Path, default=[], help="files of plain text, for perplexities")
    parser.add_argument("--weights", nargs="+", default=["q4_1", "bf16", "gemma q4_k_m"])
    parser.add_argument("--engines", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--only", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--limit", type=int, default=2, help="prompts of a set")
    parser.add_argument("--rounds", type=int, default=3, help="of decode and first")
    parser.add_argument("--whole-rounds", type=int, default=2, help="of whole requests")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=45.0)
    parser.add_argument("--commit", default=commit(), help="of the turns that are there; this checkout's")
    parser.add_argument("--out", type=Path, default=RESULTS / "peers_real.jsonl")
    parser.add_argument("--report", action="store_true")
    asked = parser.parse_args()
    if asked.prompts is None and not asked.report:
        parser.error("--prompts is needed: a folder with folders mt_bench, humaneval, gsm8k and spec_bench")
    return asked


if __name__ == "__main__":
    main()
