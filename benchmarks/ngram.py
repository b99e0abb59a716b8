"""Tables of n-grams: what they are, what they propose, and what they bring: `python benchmarks/ngram.py`.

    python benchmarks/ngram.py [--pad-to 500M] [--prompts 32] [--tokens 64] [--orders 2 3] [--out FILE]

The tables are counted in the text that the embedded target was trained on, pinned by the recipe, of which no held-out
file is a part. `tables`: their sizes, and what a proposal costs. `acceptance`: of the target at its own size, on
held-out code, the whole of what each way drafts at every step; counts only. `speedup`: over plain decoding at the cost
of a larger model, by the default controller, decoding and prompt together; both answer each prompt in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for the recipes

from recipes.stdlib.sources import load_sources  # noqa: E402

from truedraft import Engine, SamplingParams, load_model  # noqa: E402
from truedraft.core.noise import KeyedNoise  # noqa: E402
from truedraft.drafters import DraftRequest, from_spec  # noqa: E402
from truedraft.drafters.ngram.table import NgramTable  # noqa: E402
from truedraft.embedded import heldout_prompts_file  # noqa: E402
from truedraft.machine import describe_machine  # noqa: E402
from truedraft.models.base import LanguageModel  # noqa: E402
from truedraft.models.loading import quiet_transformers  # noqa: E402
from truedraft.training import count_ngrams  # noqa: E402
from truedraft.training.options import NgramSizeOptions  # noqa: E402
from truedraft.training.texts.tokenizer import load_tokenizer  # noqa: E402

OUT = ROOT / "benchmarks" / "results" / "ngram.json"
NAMES = {1: "unigram", 2: "bigram", 3: "trigram"}
WAYS = {
    "likeliest tree": "",
    "likeliest chain of one": ",nodes=1",
}
TEMPERATURES = (0.0, 0.8)
BATCH = 16


def documents(target: LanguageModel, files: int | None) -> list[np.ndarray[Any, Any]]:
    """The ids of the text that the target was trained on, a file each."""
    tokenizer = load_tokenizer("embedded:target")
    texts = [source.text for source in load_sources() if not source.held_out][:files]
    found = []
    with quiet_transformers():  # which warns of texts longer than the context
        for text in texts:
            ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
            assert max(ids) < target.vocab_size
            found.append(np.array(ids, np.int32))
    return found


def write_tables(target: LanguageModel, folder: Path, orders: Sequence[int], files: int | None) -> dict[str, Path]:
    """A table of each order, by name."""
    texts, found = documents(target, files), {}
    assert target.tokenizer is not None
    for order in orders:
        table = count_ngrams(
            texts,
            target.vocab_size,
            order,
            min_count=NgramSizeOptions().min_count,
            tokenizer=target.tokenizer.fingerprint,
        )
        found[NAMES.get(order, f"{order}-gram")] = path = folder / f"{order}.ngram"
        table.write(path)
    return found


def proposals_s(target: LanguageModel, word: str, texts: Sequence[Sequence[int]], temperature: float) -> float:
    """Seconds of a proposal, the median."""
    drafter, params = from_spec(word, target), SamplingParams(temperature=temperature)
    seconds = []
    for number, text in enumerate(texts):
        for end in range(16, len(text), 4):
            request = DraftRequest(number, params, text[:end])
            noise = KeyedNoise(number, end, 0, greedy=params.greedy)
            began = time.perf_counter()
            drafter.propose([request], [drafter.limits], [noise])
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def described(target: LanguageModel, tables: dict[str, Path], prompts: Sequence[str]) -> dict[str, Any]:
    """What each table is, and the milliseconds of its proposals."""
    assert target.tokenizer is not None
    texts = [target.tokenizer.plain_ids(prompt) for prompt in prompts]
    found = {}
    for name, path in tables.items():
        table = NgramTable.open(path)
        found[name] = {
            "ngrams": table.ngrams,
            "bytes": path.stat().st_size,
            "counted_tokens": table.facts.counted_tokens,
            "min_count": table.facts.min_count,
            "proposal_ms": {
                f"{way}, temperature {at:g}": 1e3 * proposals_s(target, f"ngram:{path}{options}", texts, at)
                for way, options in WAYS.items()
                for at in TEMPERATURES
            },
        }
    return found


def acceptance(tables: dict[str, Path], prompts: list[str], tokens: int, rounds: int) -> dict[str, Any]:
    """Tokens per call, everything drafted at every step; at a temperature several times for each prompt."""
    target, found = load_model("embedded:target"), {}
    for name, path in tables.items():
        for way, options in WAYS.items():
            engine = Engine(target, f"ngram:{path}{options}", controller="fixed", max_batch=BATCH, entropy=0)
            for temperature in TEMPERATURES:
                stats = [
                    answer.stats
                    for _ in range(rounds if temperature else 1)
                    for answer in engine.generate(prompts, SamplingParams(tokens, temperature))
                ]
                calls, emitted, drafted, accepted = (
                    sum(getattr(each, field) for each in stats)
                    for field in ("target_calls", "emitted_tokens", "draft_tokens", "accepted_tokens")
                )
                found[f"{name}, {way}, temperature {temperature:g}"] = {
                    "mean_acceptance_length": emitted / calls,
                    "draft_acceptance_rate": accepted / drafted,
                    "nodes_per_call": drafted / calls,
                    "target_calls": calls,
                }
                print(f"{name}, {way}, temperature {temperature:g}: {emitted / calls:.3f}", file=sys.stderr)
    return found


def speedups(target: LanguageModel, tables: dict[str, Path], prompts: list[str], tokens: int) -> dict[str, Any]:
    """Of whole answers, geometric means over prompts."""
    found = {}
    plain = Engine(target)
    for name, path in tables.items():
        for way, options in WAYS.items():
            engine = Engine(target, f"ngram:{path}{options}")
            for temperature in TEMPERATURES:
                ratios, stats = [], []
                params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True)
                for prompt in [prompts[0], *prompts]:  # the first one warms up
                    seconds = []
                    for each in (plain, engine):
                        began = time.perf_counter()
                        answer = each.generate(prompt, params)
                        seconds.append((time.perf_counter() - began) / len(answer.token_ids))
                    ratios.append(seconds[0] / seconds[1])
                    stats.append(answer.stats)
                ratios, stats = ratios[1:], stats[1:]
                found[f"{name}, {way}, temperature {temperature:g}"] = row = {
                    "speedup": statistics.geometric_mean(ratios),
                    "least": min(ratios),
                    "most": max(ratios),
                    "mean_acceptance_length": sum(s.emitted_tokens for s in stats) / sum(s.target_calls for s in stats),
                }
                print(f"{name}, {way}, temperature {temperature:g}: {row['speedup']:.3f}", file=sys.stderr)
    return found


def main() -> int:
    """Measure all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pad-to", default="500M", help="size whose costs the speed-ups are at; none is its own")
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts for acceptance")
    parser.add_argument("--timed-prompts", type=int, default=6, help="of them for speed-ups")
    parser.add_argument("--rounds", type=int, default=2, help="answers to each prompt, for acceptance at a temperature")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--orders", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--files", type=int, default=None, help="only so many files of the training text")
    parser.add_argument("--only", choices=("acceptance", "speedup"), default=None)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    lines = heldout_prompts_file().read_text(encoding="utf-8").splitlines()
    prompts = [str(json.loads(line)["text"]) for line in lines[: asked.prompts]]
    pad_to = None if asked.pad_to == "none" else asked.pad_to
    found: dict[str, Any] = {"machine": describe_machine("cpu"), "padded_to": pad_to, "temperatures": TEMPERATURES}
    with tempfile.TemporaryDirectory() as folder:
        own = load_model("embedded:target")
        tables = write_tables(own, Path(folder), asked.orders, asked.files)
        found["tables"] = described(own, tables, prompts[:8])
        if asked.only != "speedup":
            found["acceptance"] = acceptance(tables, prompts, asked.tokens, asked.rounds)
        if asked.only != "acceptance":
            target = load_model("embedded:target", pad_to=pad_to)
            found["speedup"] = speedups(target, tables, prompts[: asked.timed_prompts], asked.tokens)
    asked.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
