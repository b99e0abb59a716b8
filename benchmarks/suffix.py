"""Suffix decoding: what it costs to look up and store, and what it brings: `python benchmarks/suffix.py`.

    python benchmarks/suffix.py [--rows store repeated edited trace own] [--pad-to 500M] [--out FILE]

`store` fills an index with synthetic text and times look-ups and insertions while an engine decodes on another thread.
`repeated` asks one request ten times, `edited` asks it with single tokens of the prompt replaced. `trace` are 200
requests, one in five of which resembles an earlier one; prompt lookup and plain decoding get the same, in turns. `own`
is a file followed by its own first lines. Rows that are asked for replace those that the file has.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from truedraft import Engine, SamplingParams, load_model
from truedraft.drafters import PromptLookup, SuffixDrafter
from truedraft.drafters.suffix import SuffixIndex
from truedraft.machine import describe_machine

OUT = Path(__file__).parent / "results" / "suffix.json"
DEPTH = 12
GREEDY = SamplingParams(max_tokens=64)


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Median and 99 % point, in microseconds."""
    ordered = sorted(seconds)
    return {"median_us": 1e6 * ordered[len(ordered) // 2], "p99_us": 1e6 * ordered[len(ordered) * 99 // 100]}


def store(asked: argparse.Namespace) -> dict[str, Any]:
    """An index of so many tokens, beside an engine that decodes."""
    index, drawn = SuffixIndex(1 << (asked.tokens - 1).bit_length()), np.random.default_rng(0)
    text = (drawn.zipf(1.3, asked.tokens) % 8000).astype(np.int32)
    for start in range(0, asked.tokens - 200_000, 2000):
        index.add(text[start : start + 2000], ends=True)
    engine, over = Engine(load_model("embedded:target")), threading.Event()

    def decode() -> None:
        while not over.is_set():
            engine.generate("import os\n", SamplingParams(max_tokens=64, ignore_eos=True))

    thread = threading.Thread(target=decode)
    thread.start()
    inserted, found = [], []
    for start in range(asked.tokens - 200_000, asked.tokens, 1000):
        began = time.perf_counter()
        index.add(text[start : start + 1000], ends=True)
        inserted.append((time.perf_counter() - began) / 1000)
    for _ in range(5000):
        place = int(drawn.integers(100, asked.tokens - 100))
        ending = text[place - 32 : place].tolist()
        began = time.perf_counter()
        index.find(ending, DEPTH)
        found.append(time.perf_counter() - began)
    over.set()
    thread.join()
    return {
        "stored": len(index),
        "bytes_per_token": index.n_bytes / asked.tokens,
        "look_up": quantiles(found),
        "insertion_per_token": quantiles(inserted),
    }


def prompts(tokenizer: Any, count: int, length: int = 96) -> list[list[int]]:
    """Beginnings of files of the standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [tokenizer.encode(file.read_text(encoding="utf-8", errors="ignore")[:4000]) for file in files]
    return [ids[:length] for ids in texts if len(ids) >= length][:count]


def edited_prompt(prompt: list[int], rng: random.Random, vocab: int) -> list[int]:
    """With one token in twenty-four replaced."""
    changed = list(prompt)
    for place in rng.sample(range(len(prompt) - 8), len(prompt) // 24):
        changed[place] = rng.randrange(3, vocab)
    return changed


def repeated(asked: argparse.Namespace) -> dict[str, Any]:
    """Tokens per call of a request asked ten times."""
    target = load_model("embedded:target")
    lengths = []
    for prompt in prompts(target.tokenizer, 8):
        drafter = SuffixDrafter(num_speculative_tokens=DEPTH)
        engine, found = Engine(target, drafter, controller="fixed"), []
        for _ in range(10):
            found.append(engine.generate(prompt, GREEDY).stats.mean_acceptance_length)
            drafter.store.settle()
        lengths.append(found)
    times = list(zip(*lengths, strict=True))
    return {
        "depth": DEPTH,
        "mean_acceptance_length": [statistics.mean(each) for each in times],
        "least_from_the_second_on": min(min(each) for each in times[1:]),
    }


def edited(asked: argparse.Namespace) -> dict[str, Any]:
    """Tokens per call of prompts that were answered before, with some tokens replaced."""
    target, rng = load_model("embedded:target"), random.Random(0)
    drafter, lookup = SuffixDrafter(num_speculative_tokens=DEPTH), PromptLookup(DEPTH)
    engine, other = (Engine(target, each, controller="fixed") for each in (drafter, lookup))
    asked_before = prompts(target.tokenizer, 24)
    for prompt in asked_before:
        engine.generate(prompt, GREEDY)
    drafter.store.settle()
    changed = [edited_prompt(prompt, rng, target.vocab_size) for prompt in asked_before]
    lengths = {
        name: [each.generate(prompt, GREEDY).stats.mean_acceptance_length for prompt in changed]
        for name, each in (("suffix", engine), ("prompt-lookup", other))
    }
    return {"mean_acceptance_length": {name: statistics.mean(found) for name, found in lengths.items()}}


def trace(asked: argparse.Namespace) -> dict[str, Any]:
    """200 requests at the cost of a larger model, each asked of all three in turns."""
    target, rng = load_model("embedded:target", pad_to=asked.pad_to), random.Random(1)
    fresh = prompts(target.tokenizer, 200)
    sequence: list[list[int]] = []
    for number in range(200):
        again = number > 10 and number % 5 == 0
        own = edited_prompt(rng.choice(sequence), rng, target.vocab_size) if again else fresh[number % len(fresh)]
        sequence.append(own)
    engines = {
        "plain": Engine(target),
        "prompt-lookup": Engine(target, PromptLookup(DEPTH)),
        "suffix": Engine(target, SuffixDrafter(num_speculative_tokens=DEPTH)),
    }
    seconds, calls, tokens = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0), dict.fromkeys(engines, 0)
    params = SamplingParams(max_tokens=asked.trace_tokens)
    for number, prompt in enumerate(sequence[: asked.requests]):
        order = list(engines)[number % 3 :] + list(engines)[: number % 3]
        answers = {}
        for name in order:
            began = time.perf_counter()
            answers[name] = engines[name].generate(prompt, params)
            seconds[name] += time.perf_counter() - began
            calls[name] += answers[name].stats.target_calls
            tokens[name] += answers[name].stats.emitted_tokens
        if len({tuple(each.token_ids) for each in answers.values()}) != 1:
            raise SystemExit(f"request {number} has different answers")
    return {
        "requests": min(asked.requests, 200),
        "padded_to": asked.pad_to,
        "speedup_over_plain": {name: seconds["plain"] / s for name, s in seconds.items()},
        "mean_acceptance_length": {name: tokens[name] / calls[name] for name in engines},
        "identical": True,
    }


def own(asked: argparse.Namespace) -> dict[str, Any]:
    """A file followed by its own first lines."""
    target = load_model("embedded:target", pad_to=asked.pad_to)
    engines = {
        "plain": Engine(target),
        "prompt-lookup": Engine(target, PromptLookup(DEPTH)),
        "suffix": Engine(target, SuffixDrafter(num_speculative_tokens=DEPTH)),
    }
    ratios: dict[str, list[float]] = {"prompt-lookup": [], "suffix": []}
    params = SamplingParams(max_tokens=96)
    for file in prompts(target.tokenizer, asked.files, 320):
        prompt = [*file, *file[:48]]
        for each in engines.values():
            each.generate(prompt, SamplingParams(max_tokens=2))
        seconds = {}
        for name, each in engines.items():
            seconds[name] = _decoding_s(each, prompt, params)
        for name, found in ratios.items():
            found.append(seconds["plain"] / seconds[name])
    return {"padded_to": asked.pad_to, "decoding_speedup": {name: statistics.median(f) for name, f in ratios.items()}}


def _decoding_s(engine: Engine, prompt: list[int], params: SamplingParams) -> float:
    """Seconds from the first token to the last."""
    pieces = engine.stream(prompt, params)
    next(pieces)
    began = time.perf_counter()
    for _ in pieces:
        pass
    return time.perf_counter() - began


ROWS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "store": store, "repeated": repeated, "edited": edited, "trace": trace, "own": own,
}  # fmt: skip


def main() -> int:
    """Measure the rows that are asked for; others that the file has stay there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--pad-to", default="500M")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--trace-tokens", type=int, default=48)
    parser.add_argument("--files", type=int, default=6)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    found = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    for name in asked.rows:
        found[name] = ROWS[name](asked)
        found["machine"] = describe_machine()
        asked.out.write_text(json.dumps(found) + "\n")
        print(name, json.dumps(found[name]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
