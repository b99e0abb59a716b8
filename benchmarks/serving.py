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
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import psutil

from common import RESULTS, ROOT, Child, Lines, be_asked, exported, heldout_texts, note
from servers import PORT, SERVED_NAME, VLLM, Drafting, Launch, Server, vllm_launch
from serving_load import Answered, Load, LoadResult, Request, ask, closed_loop, open_loop

if TYPE_CHECKING:
    from truedraft import Engine

OUT = RESULTS / "serving.jsonl"
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
    "hostile": "requests of others beside 20 schemas that take minutes to prepare, own size",
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


@dataclass(frozen=True)
class Cell:
    row: str
    name: str


class Measured(Server):
    def warm(self) -> None:
        self.wait(note)
        asyncio.run(closed_loop(self.port, Load([Request("x", 2)], 1)))

    def main_thread_s(self) -> float:
        """Processor seconds of its first thread: the event loop, where the engine has threads of its own."""
        fields = Path(f"/proc/{self.pid}/task/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        own = psutil.Process(self.pid)
        return sum(each.memory_info().rss for each in (own, *own.children(recursive=True))) / 2**20


def ours(
    *more: str,
    port: int = 8101,
    name: str = "ours",
    drafter: str = "draft,num_speculative_tokens=12",
    size: str | None = SIZE,
) -> Measured:
    padded = [] if size is None else ["--pad-to", size]
    words = (
        str(Path(sys.executable).with_name("truedraft")), "serve", "--model", "embedded:target", "--port", PORT,
        "--served-model-name", SERVED_NAME, "--drafter", drafter, "--no-playground", "--max-queue", "1024",
        *padded, *more,
    )  # fmt: skip
    return Measured(Launch(name, words), RUNS, port)


def prompts(count: int, tokens: int | None = None) -> list[str]:
    """Held-out code; of about so many tokens each, where that is asked."""
    texts = heldout_texts()
    if tokens is None:
        return [texts[number % len(texts)] + "\n" * (number // len(texts)) for number in range(count)]
    chance = random.Random(tokens)
    return ["\n\n".join(chance.sample(texts * 20, 20 * len(texts)))[: 3 * tokens] for _ in range(count)]


class Kept(Lines):
    def turns(self, cell: Cell) -> int:
        return sum((line["row"], line["name"]) == (cell.row, cell.name) for line in self.records)

    def keep(self, cell: Cell, found: Mapping[str, Any]) -> None:
        self.add({**asdict(cell), **found, "when": time.strftime("%Y-%m-%dT%H:%M:%S")})


def loads(clients: int, temperature: float, each: int = 4) -> Load:
    texts = prompts(max(each * clients, 12))
    return Load([Request(text, 64, temperature) for text in texts], clients)


def alike(temperature: float, turn: int) -> Load:
    """Requests of 8 clients that begin with the same 600 tokens or so, others in each turn, and end each in its own."""
    start = prompts(2 * TURNS, 600)[turn % TURNS + (TURNS if temperature else 0)]
    texts = prompts(24)
    return Load([Request(f"{start}\n\n{text}", 64, temperature) for text in texts], 8)


def against_vllm(row: str, venv: Path, kept: Kept, left_s: Callable[[], float]) -> None:
    """The rows closed, open, shared, batch and first: both servers, in turns."""
    target, draft = exported(RUNS, "target", SIZE), Drafting(DRAFT_TOKENS, exported(RUNS, "draft"))
    plain = row == "first"
    caching = row == "shared"
    off = () if caching else ("--prefix-cache-bytes", "0")
    vllm_caching = "--enable-prefix-caching" if caching else "--no-enable-prefix-caching"
    servers = [
        ours(*off, drafter="none" if plain else "draft,num_speculative_tokens=12"),
        Measured(vllm_launch("vllm", venv, target, None if plain else draft, [vllm_caching]), RUNS, 8102),
    ]
    if row == "batch":
        servers += [
            ours(*off, port=8103, name="ours plain", drafter="none"),
            Measured(vllm_launch("vllm plain", venv, target, None, [vllm_caching]), RUNS, 8104),
        ]
    try:
        for server in servers:
            server.warm()
        for cell, work in _cells(row, kept):
            while kept.turns(cell) < (BATCH_TURNS if row == "batch" else TURNS) and left_s() > 0:
                kept.keep(cell, {server.name: asdict(work(server.port)) for server in servers})
    finally:
        for server in servers:
            server.stop()


def _cells(row: str, kept: Kept) -> Iterator[tuple[Cell, Callable[[int], LoadResult]]]:
    if row == "first":
        texts = prompts(TURNS * 2, 1400)
        numbers = iter(range(1 << 30))
        yield (
            Cell(row, "1,400 tokens"),
            lambda port: run(closed_loop(port, Load([Request(texts[next(numbers) % len(texts)], 1)], 1))),
        )
        return
    for temperature in (0.0,) if row == "batch" else (0.0, 0.8):
        way = "greedy" if temperature == 0.0 else f"temperature {temperature}"
        if row == "shared":
            cell = Cell(row, f"8 clients, {way}")
            yield cell, lambda port, cell=cell, t=temperature: run(closed_loop(port, alike(t, kept.turns(cell))))
            continue
        for clients in (16,) if row == "batch" else (1, 4, 8, 16):
            load = loads(clients, temperature, each=2 if row == "batch" else 4)
            if row != "open":
                yield Cell(row, f"{clients} clients, {way}"), lambda port, load=load: run(closed_loop(port, load))
        if row == "open":
            capacity = _capacity(kept, way)
            for share in (0.5, 0.8):
                rate = share * capacity / 64
                yield (
                    Cell(row, f"{share} of capacity, {way}"),
                    lambda port, rate=rate, t=temperature: run(open_loop(port, loads(6, t), rate, random.Random(1))),
                )


def _capacity(kept: Kept, way: str) -> float:
    lines = [line for line in kept.records if line["row"] == "closed" and line["name"] == f"16 clients, {way}"]
    if not lines:
        raise RuntimeError("the row open needs the row closed")
    return min(statistics.median(line[name]["tokens_per_s"] for line in lines) for name in ("ours", "vllm"))


def run(work: Any) -> LoadResult:
    return asyncio.run(work)


def answer_in_process(engine: Engine, load: dict[str, Any]) -> LoadResult:
    from truedraft import SamplingParams

    waiting = [
        (each["prompt"], SamplingParams(each["max_tokens"], each["temperature"])) for each in reversed(load["requests"])
    ]
    running, done = [], []
    began = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < load["clients"]:
            running.append(engine.submit(*waiting.pop()))
        engine.step()
        done += [request for request in running if request.closed]
        running = [request for request in running if not request.closed]
    seconds = time.perf_counter() - began
    answers = [request.pieces[-1].answer for request in done]
    found = [
        Answered(len(each.token_ids), each.timing.first_token_s or 0.0, each.timing.total_s)
        for each in answers
        if each is not None
    ]
    return LoadResult.of(found, seconds)


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


def engine_row(kept: Kept, left_s: Callable[[], float]) -> None:
    """The server and, in turns, the engine in a process of its own beside one that burns as much as the client did."""
    server = ours("--prefix-cache-bytes", "0")
    child = Child([__file__, "--as-engine"])
    try:
        child.read()
        server.warm()
        for clients in (1, 8):
            cell, load = Cell("engine", f"{clients} clients, greedy"), loads(clients, 0.0)
            while kept.turns(cell) < 2 * TURNS and left_s() > 0:
                before, began, own = server.main_thread_s(), time.perf_counter(), time.process_time()
                served = asdict(run(closed_loop(server.port, load)))
                wall = time.perf_counter() - began
                client_share = (time.process_time() - own) / wall
                outside = (server.main_thread_s() - before) / wall
                engine = child.ask({"load": asdict(load), "burn": client_share})
                shares = {"client_share": client_share, "outside_share": outside}
                kept.keep(cell, {"ours": served, "engine": engine, **shares})
    finally:
        server.stop()
        child.close()


def prefix_row(kept: Kept, left_s: Callable[[], float]) -> None:
    """A conversation's first 1,500 tokens and another 100, cold and again."""
    cell = Cell("prefix", "1,500 of 1,600 tokens")
    server = ours(drafter="draft,num_speculative_tokens=12")
    try:
        server.warm()
        while kept.turns(cell) < TURNS and left_s() > 0:
            number = kept.turns(cell)
            chance = random.Random(number)
            shared = [chance.randrange(300, 8000) for _ in range(1500)]
            ends = [[chance.randrange(300, 8000) for _ in range(100)] for _ in range(2)]
            found = [asdict(run(closed_loop(server.port, Load([Request([*shared, *end], 2)], 1)))) for end in ends]
            kept.keep(cell, {"cold": found[0], "warm": found[1]})
    finally:
        server.stop()


def form_row(kept: Kept, left_s: Callable[[], float]) -> None:
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
    server = ours(drafter="auto", size=None)
    try:
        server.warm()
        for clients in (1, 8):
            cell = Cell("form", f"{clients} clients")
            while kept.turns(cell) < TURNS and left_s() > 0:
                texts = prompts(4 * clients)
                asked = {"free": {"ignore_eos": True}, "json": {"structured_outputs": {"json": schema}}}
                asked |= {f"{name}_plain": {**of, "speculation": {"enabled": False}} for name, of in asked.items()}
                found = {}
                for name, fields in asked.items():
                    load = Load([Request(text, 128, 0.0, fields) for text in texts], clients)
                    found[name] = asdict(run(closed_loop(8101, load)))
                kept.keep(cell, found)
    finally:
        server.stop()


def hostile_row(kept: Kept, left_s: Callable[[], float]) -> None:
    """Seconds of plain requests, of structured ones and of long bodies: idle, and beside 20 hostile schemas at once.

    Memory is the server's and its children's: before them, at most beside them, and after them. Kept prefixes of the
    others' long bodies would grow beside it, so none are kept.
    """
    server = ours("--request-timeout-s", "30", "--prefix-cache-bytes", "0", drafter="auto", size=None)
    try:
        server.warm()
        cell = Cell("hostile", "20 schemas")
        for turn in range(kept.turns(cell), TURNS):
            if left_s() > 0:
                kept.keep(cell, asyncio.run(_beside_hostile(server, turn)))
    finally:
        server.stop()


async def _beside_hostile(server: Measured, turn: int) -> dict[str, Any]:
    memory = [server.memory_mb()]
    idle = await _seconds_of_others(turn, 8)
    hostile = [asyncio.create_task(_told(_hostile_schema(100 * turn + number))) for number in range(20)]
    beside: dict[str, list[float]] = defaultdict(list)
    while not all(task.done() for task in hostile):
        for name, seconds in (await _seconds_of_others(turn + len(memory) * TURNS, 1)).items():
            beside[name] += seconds
        memory.append(server.memory_mb())
    await asyncio.sleep(5.0)
    times = {name: statistics.median(values) for name, values in idle.items()}
    slowed = {f"{name} beside": statistics.median(values) for name, values in beside.items()}
    statuses = sorted(task.result() for task in hostile)
    memories = {"before_mb": memory[0], "peak_mb": max(memory), "after_mb": server.memory_mb()}
    return {**times, **slowed, "asked_beside": len(memory) - 1, "statuses": statuses, **memories}


async def _seconds_of_others(seed: int, each: int) -> dict[str, list[float]]:
    """What answers of 32 tokens take, one at a time; each schema and each long prompt is a new one."""
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(each):
        mark = f"{seed}_{number}"
        schema = {"type": "object", "properties": {f"name_{mark}": {"type": "string", "minLength": 40}}}
        schema |= {"required": list(schema["properties"])}
        text = f"# {mark}\n{prompts(1)[0]}"
        asked = {
            "plain": Request(text, 32, 0.0, {"ignore_eos": True}),
            "structured": Request(text, 32, 0.0, {"structured_outputs": {"json": schema}}),
            "long body": Request(f"# {mark}\n{prompts(1, 1500)[0]}", 32, 0.0, {"ignore_eos": True}),
        }
        for name, request in asked.items():
            found[name].append((await ask(8101, request)).total_s)
    return found


def _hostile_schema(number: int) -> dict[str, Any]:
    factors = random.Random(number).sample(range(99_001, 99_992, 2), 40)
    properties = {f"p{place}": {"type": "integer", "multipleOf": factor} for place, factor in enumerate(factors)}
    return {"type": "object", "properties": properties, "required": list(properties)}


async def _told(schema: Mapping[str, Any]) -> int:
    """The status with which a form is answered, waited for in a thread of its own."""

    def wait() -> int:
        fields = {"model": SERVED_NAME, "prompt": "x", "max_tokens": 8, "structured_outputs": {"json": schema}}
        found = httpx2.post("http://127.0.0.1:8101/v1/completions", json=fields, timeout=120.0)
        return found.status_code

    return await asyncio.to_thread(wait)


def summary(kept: Kept) -> Iterator[dict[str, Any]]:
    """The medians of all cells, and between which values the turns lay."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in kept.records:
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
    elif row == "hostile":
        for name in ("plain", "structured", "long body"):
            yield f"seconds of an answer, {name}, beside / idle", ratio(f"{name} beside", name)
        yield "memory after less before, MB", [turn["after_mb"] - turn["before_mb"] for turn in turns]
        yield "memory at most less before, MB", [turn["peak_mb"] - turn["before_mb"] for turn in turns]
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
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--as-engine", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.as_engine:
        be_asked(engine_beside_burner)
        return 0
    kept = Kept(asked.out)
    end = time.monotonic() + 60 * asked.minutes

    def left_s() -> float:
        return end - time.monotonic()

    own = {"engine": engine_row, "prefix": prefix_row, "form": form_row, "hostile": hostile_row}
    for row in () if asked.report else asked.rows:
        if row in own:
            own[row](kept, left_s)
        elif (asked.vllm / "bin" / "vllm").exists():
            against_vllm(row, asked.vllm, kept, left_s)
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
