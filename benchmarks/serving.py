"""The server against the engine in process and against vLLM's CPU server: `make bench-serve`.

    python benchmarks/serving.py [--rows ROW ...] [--minutes 75] [--vllm VENV] [--out FILE]
    python benchmarks/serving.py --report

Both servers are loaded once and asked in turns, so that a slow moment of the machine meets both; the one that is not
asked waits. Every turn of every cell is a line of JSON, written as soon as it is done, and a rerun goes on behind them;
the medians of all turns lie beside it.
Without a virtual environment that has vLLM the rows that need it are left out, and the report says so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import RESULTS, ROOT, Child, Lines, be_asked, exported, heldout_texts, note
from servers import PORT, SERVED_NAME, VLLM, Drafting, Launch, Server, vllm_launch
from serving_load import Answered, Load, LoadResult, Request, closed_loop, open_loop

if TYPE_CHECKING:
    from truedraft import Engine

RUNS = ROOT / "runs" / "serving"
SIZE = "500M"
ROWS = {
    "engine": "the server against `Engine` in process, 8 streams",
    "closed": "tokens per second with 1, 4, 8 and 16 clients, with the draft, against vLLM",
    "open": "tokens come at half and at 0.8 of the slower server's capacity: time per token, against vLLM",
    "shared": "8 clients whose prompts begin with the same 600 tokens, prefix caches on on both sides, against vLLM",
    "batch": "16 clients, plain and with the draft, against vLLM",
    "first": "first token of a prompt of 1,400 tokens, against vLLM",
    "prefix": "first token of a prompt of 1,600 tokens of which 1,500 were asked before, against a cold one",
    "form": "JSON by a schema against free text, own size, without drafts and with",
}
TURNS = 3
BATCH_TURNS = 5  # of the row batch, where single turns lay far apart
DRAFT_TOKENS = 3
_BURN = """
import sys, time
share = float(sys.argv[1])
while True:
    end = time.perf_counter() + 0.01 * share
    while time.perf_counter() < end:
        pass
    time.sleep(0.01 * (1 - share))
"""


class Measured(Server):
    def main_thread_s(self) -> float:
        """Processor seconds of its first thread: the event loop, where the engine has threads of its own."""
        fields = Path(f"/proc/{self.pid}/task/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ours(
    *more: str, name: str = "ours", drafter: str = "draft,num_speculative_tokens=12", size: str | None = SIZE
) -> Measured:
    padded = [] if size is None else ["--pad-to", size]
    words = (
        str(Path(sys.executable).with_name("truedraft")), "serve", "--model", "embedded:target", "--port", PORT,
        "--served-model-name", SERVED_NAME, "--drafter", drafter, "--no-playground", "--max-queue", "1024",
        *padded, *more,
    )  # fmt: skip
    return Measured(Launch(name, words), RUNS)


@contextlib.contextmanager
def warm(*servers: Measured) -> Iterator[None]:
    """Servers that have answered a request, ended with the block."""
    try:
        for server in servers:
            server.wait()
            run(closed_loop(server.port, Load([Request("x", 2)], 1)))
        yield
    finally:
        for server in servers:
            server.stop()


def prompts(count: int, tokens: int | None = None) -> list[str]:
    """Held-out code; of about so many tokens each, where that is asked."""
    texts = heldout_texts()
    if tokens is None:
        return [texts[number % len(texts)] + "\n" * (number // len(texts)) for number in range(count)]
    chance = random.Random(tokens)
    return ["\n\n".join(chance.sample(texts * 20, 20 * len(texts)))[: 3 * tokens] for _ in range(count)]


class Kept(Lines):
    """Turns of cells; none is begun behind the end of the time."""

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__(path)
        self._end = time.monotonic() + seconds

    def turns(self, row: str, name: str, most: int = TURNS) -> Iterator[int]:
        """Numbers of the turns of a cell that are to be measured, each to be kept before the next."""
        while (done := sum((line["row"], line["name"]) == (row, name) for line in self.records)) < most:
            if time.monotonic() >= self._end:
                return
            yield done

    def keep(self, row: str, name: str, found: Mapping[str, Any]) -> None:
        self.add({"row": row, "name": name, **found, "when": time.strftime("%Y-%m-%dT%H:%M:%S")})


def loads(clients: int, temperature: float, each: int = 4) -> Load:
    texts = prompts(max(each * clients, 12))
    return Load([Request(text, 64, temperature) for text in texts], clients)


def alike(temperature: float, turn: int) -> Load:
    """Requests of 8 clients that begin with the same 600 tokens or so, others in each turn, and end each in its own."""
    start = prompts(2 * TURNS, 600)[turn % TURNS + (TURNS if temperature else 0)]
    texts = prompts(24)
    return Load([Request(f"{start}\n\n{text}", 64, temperature) for text in texts], 8)


def against_vllm(row: str, venv: Path, kept: Kept) -> None:
    """The rows closed, open, shared, batch and first: both servers, in turns."""
    target, draft = exported(RUNS, "target", SIZE), Drafting(DRAFT_TOKENS, exported(RUNS, "draft"))
    off = () if row == "shared" else ("--prefix-cache-bytes", "0")
    caching = ["--enable-prefix-caching" if row == "shared" else "--no-enable-prefix-caching"]
    servers = []
    if row != "first":
        servers += [ours(*off), Measured(vllm_launch("vllm", venv, target, draft, caching), RUNS)]
    if row in ("first", "batch"):
        name, vllm = ("ours", "vllm") if row == "first" else ("ours plain", "vllm plain")
        servers += [ours(*off, name=name, drafter="none")]
        servers += [Measured(vllm_launch(vllm, venv, target, None, caching), RUNS)]
    with warm(*servers):
        for name, work in _cells(row, kept):
            for turn in kept.turns(row, name, BATCH_TURNS if row == "batch" else TURNS):
                kept.keep(row, name, {server.name: asdict(run(work(server.port, turn))) for server in servers})


Work = Callable[[int, int], Coroutine[Any, Any, LoadResult]]
"""A load on a port, in a turn."""


def _cells(row: str, kept: Kept) -> Iterator[tuple[str, Work]]:
    if row == "first":
        texts, numbers = prompts(TURNS * 2, 1400), itertools.count()
        yield (
            "1,400 tokens",
            lambda port, turn: closed_loop(port, Load([Request(texts[next(numbers) % len(texts)], 1)], 1)),
        )
        return
    for temperature in (0.0,) if row == "batch" else (0.0, 0.8):
        way = "greedy" if temperature == 0.0 else f"temperature {temperature}"
        if row == "shared":
            yield f"8 clients, {way}", lambda port, turn, t=temperature: closed_loop(port, alike(t, turn))
        elif row == "open":
            load = loads(6, temperature)
            for share in (0.5, 0.8):
                rate = share * _capacity(kept, way) / 64
                yield (
                    f"{share} of capacity, {way}",
                    lambda port, turn, load=load, rate=rate: open_loop(port, load, rate, random.Random(1)),
                )
        else:
            for clients in (16,) if row == "batch" else (1, 4, 8, 16):
                load = loads(clients, temperature, each=2 if row == "batch" else 4)
                yield f"{clients} clients, {way}", lambda port, turn, load=load: closed_loop(port, load)


def _capacity(kept: Kept, way: str) -> float:
    lines = [line for line in kept.records if line["row"] == "closed" and line["name"] == f"16 clients, {way}"]
    if not lines:
        raise RuntimeError("the row open needs the row closed")
    return min(statistics.median(line[name]["tokens_per_s"] for line in lines) for name in ("ours", "vllm"))


def run(work: Coroutine[Any, Any, LoadResult]) -> LoadResult:
    return asyncio.run(work)


def answer_in_process(engine: Engine, load: dict[str, Any]) -> LoadResult:
    from truedraft import SamplingParams

    asked = [(each["prompt"], SamplingParams(each["max_tokens"], each["temperature"])) for each in load["requests"]]
    running, done = [], []
    began = time.perf_counter()
    while asked or running:
        while asked and len(running) < load["clients"]:
            running.append(engine.submit(*asked.pop(0)))
        engine.step()
        done += [request for request in running if request.closed]
        running = [request for request in running if not request.closed]
    seconds = time.perf_counter() - began
    answers = [answer for request in done if (answer := request.pieces[-1].answer) is not None]
    timed = [(len(each.token_ids), each.timing.first_token_s or 0.0, each.timing.total_s) for each in answers]
    return LoadResult.of([Answered(*each) for each in timed], seconds)


def engine_beside_burner() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The engine without a server: answers loads beside a process that takes a share of a core."""
    from truedraft import load_model
    from truedraft.drafters.prediction import with_own_drafts
    from truedraft.drafters.specs import from_spec

    target = load_model("embedded:target", pad_to="500M")
    engine = Engine(target, with_own_drafts(from_spec("draft,num_speculative_tokens=12", target)), prefix_cache_bytes=0)
    engine.measure()

    def answer_load(asked: dict[str, Any]) -> dict[str, Any]:
        burner = subprocess.Popen([sys.executable, "-c", _BURN, str(asked["burn"])])
        try:
            return asdict(answer_in_process(engine, asked["load"]))
        finally:
            burner.kill()
            burner.wait()

    return answer_load


def engine_row(kept: Kept) -> None:
    """The server and, in turns, the engine in a process of its own beside one that burns as much as the client did."""
    server = ours("--prefix-cache-bytes", "0")
    child = Child([__file__, "--as-engine"])
    with contextlib.closing(child), warm(server):
        child.read()
        for clients in (1, 8):
            name, load = f"{clients} clients, greedy", loads(clients, 0.0)
            for _ in kept.turns("engine", name, 2 * TURNS):
                before, began, own = server.main_thread_s(), time.perf_counter(), time.process_time()
                served = asdict(run(closed_loop(server.port, load)))
                wall = time.perf_counter() - began
                shares = {"client_share": (time.process_time() - own) / wall}
                shares["outside_share"] = (server.main_thread_s() - before) / wall
                engine = child.ask({"load": asdict(load), "burn": shares["client_share"]})
                kept.keep("engine", name, {"ours": served, "engine": engine, **shares})


def prefix_row(kept: Kept) -> None:
    """A conversation's first 1,500 tokens and another 100, cold and again."""
    name, server = "1,500 of 1,600 tokens", ours()
    with warm(server):
        for turn in kept.turns("prefix", name):
            chance = random.Random(turn)
            shared, *ends = ([chance.randrange(300, 8000) for _ in range(count)] for count in (1500, 100, 100))
            found = [run(closed_loop(server.port, Load([Request([*shared, *end], 2)], 1))) for end in ends]
            kept.keep("prefix", name, dict(zip(("cold", "warm"), map(asdict, found), strict=True)))


def form_row(kept: Kept) -> None:
    """Tokens per second of structured answers and of free ones of the same length, with drafts and without.

    Without drafts their ratio is what the form costs; with drafts it also says how well each text can be guessed.
    """
    schema = {
        "type": "object",
        "properties": {"items": {"type": "array", "minItems": 12, "items": {"type": "object", "properties": {
            "name": {"type": "string", "maxLength": 12}, "size": {"type": "integer", "minimum": 0, "maximum": 999},
        }, "required": ["name", "size"], "additionalProperties": False}}},
        "required": ["items"], "additionalProperties": False,
    }  # fmt: skip
    asked: dict[str, dict[str, Any]] = {"free": {"ignore_eos": True}, "json": {"structured_outputs": {"json": schema}}}
    asked |= {f"{name}_plain": {**of, "speculation": {"enabled": False}} for name, of in asked.items()}
    server = ours(drafter="auto", size=None)
    with warm(server):
        for clients in (1, 8):
            texts = prompts(4 * clients)
            lists = {name: [Request(text, 128, 0.0, more) for text in texts] for name, more in asked.items()}
            for _ in kept.turns("form", f"{clients} clients"):
                found = {name: run(closed_loop(server.port, Load(each, clients))) for name, each in lists.items()}
                kept.keep("form", f"{clients} clients", {name: asdict(each) for name, each in found.items()})


def summary(kept: Kept) -> Iterator[dict[str, Any]]:
    """The medians of all cells, and between which values the turns lay."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in kept.records:
        if line["row"] in ROWS:  # others are of older scripts
            cells[line["row"], line["name"]].append(line)
    for (row, name), turns in sorted(cells.items(), key=lambda cell: list(ROWS).index(cell[0][0])):
        for what, values in _figures(row, turns):
            found = {"median": statistics.median(values), "least": min(values), "most": max(values)}
            yield {"row": row, "name": name, "what": what, "turns": len(turns), **found}


def report(figures: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| row | cell | what | turns | median |", "|---|---|---|---|---|"]
    for each in figures:
        spread = "{median:.3f} ({least:.3f} to {most:.3f})".format(**each)
        lines.append(f"| {each['row']} | {each['name']} | {each['what']} | {each['turns']} | {spread} |")
    return "\n".join(lines)


def _figures(row: str, turns: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[float]]]:
    def ratio(one: str, other: str, figure: str = "") -> list[float]:
        return [turn[one][figure] / turn[other][figure] if figure else turn[one] / turn[other] for turn in turns]

    if row == "engine":
        yield "tokens per second, server / engine", ratio("ours", "engine", "tokens_per_s")
        yield (
            "first token, server less engine, ms",
            [1e3 * (turn["ours"]["first_s"] - turn["engine"]["first_s"]) for turn in turns],
        )
        yield "processor time of the event loop / wall time", [turn["outside_share"] for turn in turns]
        yield "processor time of the client / wall time", [turn["client_share"] for turn in turns]
    elif row == "prefix":
        yield "first token, warm / cold", ratio("warm", "cold", "first_s")
    elif row == "form":
        yield "tokens per second without drafts, JSON / free", ratio("json_plain", "free_plain", "tokens_per_s")
        yield "tokens per second, JSON / free", ratio("json", "free", "tokens_per_s")
        yield "tokens per second, JSON with drafts / without", ratio("json", "json_plain", "tokens_per_s")
    elif row == "first":
        yield "first token, ours / vLLM", ratio("ours", "vllm", "first_s")
    else:
        yield "tokens per second, ours / vLLM", ratio("ours", "vllm", "tokens_per_s")
        yield "95 % of times per token, ours / vLLM", ratio("ours", "vllm", "per_token_p95_s")
        if row == "shared":
            yield "first token, ours / vLLM", ratio("ours", "vllm", "first_s")
        if "ours plain" in turns[0]:
            yield "plain, tokens per second, ours / vLLM", ratio("ours plain", "vllm plain", "tokens_per_s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--minutes", type=float, default=75.0)
    parser.add_argument("--vllm", type=Path, default=VLLM)
    parser.add_argument("--out", type=Path, default=RESULTS / "serving.jsonl")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--as-engine", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.as_engine:
        be_asked(engine_beside_burner)
        return 0
    kept = Kept(asked.out, 60 * asked.minutes)
    own = {"engine": engine_row, "prefix": prefix_row, "form": form_row}
    for row in () if asked.report else asked.rows:
        if row in own:
            own[row](kept)
        elif (asked.vllm / "bin" / "vllm").exists():
            against_vllm(row, asked.vllm, kept)
        else:
            note(f"{row} is left out: there is no vLLM in {asked.vllm}")
    figures = list(summary(kept))
    asked.out.with_name(f"{asked.out.stem}_summary.jsonl").write_text(
        "".join(f"{json.dumps(each)}\n" for each in figures)
    )
    print(report(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
