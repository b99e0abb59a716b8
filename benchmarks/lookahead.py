"""Lookahead decoding: what it accepts, and what it brings beside prompt lookup: `python benchmarks/lookahead.py`.

    python benchmarks/lookahead.py [--rows acceptance speed] [--sizes own 110M 500M] [--stories DIR] [--out FILE]

Two targets whose answers are of different entropy: the embedded one on held-out code, which repeats itself, and
stories260K on openings that it drew itself at temperature 1, which do not. `acceptance` drafts as much as each drafter
can at every step, and counts tokens and drafted nodes for each call of the target: these hang on no clock. `speed` is
the decoding time of plain decoding over that of each drafter, prompts apart, at the target's own size and at the cost
of larger ones; all answer each prompt in turns, by the default controller and with all they can draft at every step.
Rows that are asked for replace those that the file has. Without DIR there is the embedded target alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from truedraft import Engine, SamplingParams, load_model
from truedraft.drafters import Drafter, Lookahead, PromptLookup
from truedraft.embedded import heldout_prompts_file
from truedraft.machine import describe_machine
from truedraft.models.base import LanguageModel

OUT = Path(__file__).parent / "results" / "lookahead.json"
STORIES = Path(__file__).resolve().parents[2] / "shared" / "data" / "models" / "stories260K" / "stories260K-hf"
OWN = "own"
TEMPERATURES = (0.0, 0.8)
DRAFTERS: Mapping[str, Callable[[], Drafter]] = {
    "prompt-lookup": PromptLookup,
    "prompt-lookup, min_ngram=1": lambda: PromptLookup(min_ngram=1),
    "lookahead": Lookahead,
    "lookahead, window=0": lambda: Lookahead(window=0),
    "lookahead, window=4, ngram=3, candidates=3": lambda: Lookahead(4, 3, 3),
    "lookahead, window=4, ngram=4, candidates=3": lambda: Lookahead(4, 4, 3),
    "lookahead, window=15, ngram=5, candidates=15": lambda: Lookahead(15, 5, 15),
}
TIMED = tuple(DRAFTERS)[:5]

Prompts = Sequence[Sequence[int]]


def code(target: LanguageModel, count: int) -> Prompts:
    """Held-out code."""
    assert target.tokenizer is not None
    lines = heldout_prompts_file().read_text(encoding="utf-8").splitlines()[:count]
    return [target.tokenizer.encode(str(json.loads(line)["text"])) for line in lines]


def stories(target: LanguageModel, count: int) -> Prompts:
    """Openings of stories that the model drew."""
    engine, params = Engine(target, entropy=0), SamplingParams(max_tokens=16, temperature=1.0)
    return [[1, *engine.generate([1], params).token_ids] for _ in range(count)]


def targets(asked: argparse.Namespace) -> dict[str, tuple[str, Callable[[LanguageModel, int], Prompts]]]:
    """By name: what to load, and what makes its prompts."""
    found: dict[str, tuple[str, Callable[[LanguageModel, int], Prompts]]] = {"code": ("embedded:target", code)}
    if asked.stories.is_dir():
        found["stories"] = str(asked.stories), stories
    return found


def acceptance(asked: argparse.Namespace) -> dict[str, Any]:
    """Tokens and drafted nodes for each call, of each drafter alone at its largest."""
    found: dict[str, Any] = {}
    for name, (model, prompts_of) in targets(asked).items():
        target = load_model(model)
        prompts = prompts_of(target, asked.prompts)
        for temperature in TEMPERATURES:
            params = SamplingParams(max_tokens=asked.max_tokens, temperature=temperature)
            plain = Engine(target).generate(prompts, params)
            for word, made in DRAFTERS.items():
                answers = [
                    Engine(target, made(), controller="fixed", entropy=0).generate(prompt, params) for prompt in prompts
                ]
                if not temperature and [a.token_ids for a in answers] != [p.token_ids for p in plain]:
                    raise SystemExit(f"{word} answers {name} otherwise than plain decoding")
                stats = [answer.stats for answer in answers]
                calls, tokens, nodes = (
                    sum(getattr(each, count) for each in stats)
                    for count in ("target_calls", "emitted_tokens", "draft_tokens")
                )
                found.setdefault(f"{name}, temperature {temperature:g}", {})[word] = {
                    "mean_acceptance_length": round(tokens / calls, 2), "nodes": round(nodes / calls, 1),
                }  # fmt: skip
    sizes = {"prompts": asked.prompts, "max_tokens": asked.max_tokens, "temperatures": TEMPERATURES}
    return sizes | {"greedy_identical": True} | found


def speed(asked: argparse.Namespace) -> dict[str, Any]:
    """Plain decoding's time over each drafter's, geometric means over prompts, at several costs of a call."""
    found: dict[str, Any] = {"prompts": asked.prompts, "max_tokens": asked.max_tokens}
    params = SamplingParams(max_tokens=asked.max_tokens)
    for name, (model, prompts_of) in targets(asked).items():
        prompts = prompts_of(load_model(model), asked.prompts)
        for size in asked.sizes:
            target = load_model(model) if size == OWN else load_model(model, pad_to=size)
            engines = {"plain": Engine(target)}
            for word in TIMED:
                engines[f"{word}: by the controller"] = Engine(target, DRAFTERS[word]())
                engines[f"{word}: at every step"] = Engine(target, DRAFTERS[word](), controller="fixed")
            for each in engines.values():
                each.generate(prompts[0], params)
            seconds: dict[str, list[float]] = {word: [] for word in engines}
            for number, prompt in enumerate(prompts):
                turn = number % len(engines)
                for word in [*list(engines)[turn:], *list(engines)[:turn]]:
                    seconds[word].append(_token_s(engines[word], prompt, params))
            found[f"{name}, {size}"] = {
                word: round(statistics.geometric_mean(p / o for p, o in zip(seconds["plain"], own, strict=True)), 2)
                for word, own in seconds.items()
                if word != "plain"
            } | {"plain_ms_per_token": round(1e3 * statistics.median(seconds["plain"]), 2)}
    return found


def _token_s(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> float:
    """Seconds from the first token to the last, for each token between."""
    pieces = engine.stream(prompt, params)
    next(pieces)
    began, tokens = time.perf_counter(), 0
    for piece in pieces:
        tokens += len(piece.token_ids)
    return (time.perf_counter() - began) / max(tokens, 1)


ROWS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"acceptance": acceptance, "speed": speed}


def main() -> int:
    """Measure the rows that are asked for; others that the file has stay there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--sizes", nargs="*", default=[OWN, "110M", "500M"])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--stories", type=Path, default=STORIES)
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
