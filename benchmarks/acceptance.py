"""Tokens for each call of the target, by drafter, on questions of published sets: counts and no times.

    python benchmarks/acceptance.py MODEL DRAFTER... --prompts FOLDER
    python benchmarks/acceptance.py MODEL eagle:HEAD eagle:HEAD,context=1024 --text FILE --lengths 512 2000 8000 --alone

A drafter drafts at every step what its options say (controller "fixed"), for all questions at once, so what comes of it
hangs on no machine's speed; name the nodes of heads, which costs would choose. Questions are messages of a user where
the model has a chat template; long ones are cut. With --text prompts are pieces of it, of so many tokens each, and the
sets are their lengths. With --alone one is answered after another, and seconds after first tokens are told, which hold
what the drafter then reads of the prompt. Adds a line of JSON for each drafter and temperature.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from common import RESULTS, Lines, ids_of
from real_prompts import SETS, TEMPERATURES
from truedraft import Engine, SamplingParams, load_model
from truedraft.core.intervals import ratio_over_prompts
from truedraft.core.stats import Counters
from truedraft.drafters.specs import from_spec
from truedraft.machine import dtype_name
from truedraft.measure.bench.prompts import read_questions, spread
from truedraft.models.base import LanguageModel

LONGEST = 1500
"""Characters of a question that are asked."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("drafters", nargs="+", metavar="DRAFTER")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompts", type=Path, help="a folder with a folder for each set")
    given.add_argument("--text", type=Path, help="a file of text, of which prompts of --lengths are pieces")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8000], help="in tokens")
    parser.add_argument("--alone", action="store_true", help="answer one prompt after another, and time it")
    parser.add_argument("--sets", nargs="+", default=list(SETS), help="folders of it")
    parser.add_argument("--limit", type=int, default=6, help="prompts of a set")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperatures", nargs="+", type=float, default=TEMPERATURES)
    parser.add_argument("--entropy", type=int, default=1, help="fixes the noise of sampled answers")
    parser.add_argument("--out", type=Path, default=RESULTS / "acceptance.jsonl")
    options = parser.parse_args()
    target, lines = load_model(options.model), Lines(options.out)
    if options.text is None:
        asked = {name: encoded(target, options.prompts / name, options.limit) for name in options.sets}
    else:
        asked = {f"{length} tokens": pieces(target, options.text, length, options.limit) for length in options.lengths}
    for word in options.drafters:
        drafter = from_spec(word, target)
        for temperature in options.temperatures:
            engine = Engine(target, drafter, controller="fixed", entropy=options.entropy)
            found = measured(engine, asked, SamplingParams(options.max_tokens, temperature), alone=options.alone)
            how = {"prompts": options.limit, "max_tokens": options.max_tokens, "entropy": options.entropy}
            who = {"model": target.name, "dtype": dtype_name(target.dtype), "drafter": word}
            lines.add({**who, "temperature": temperature, **how, **found})
            print(json.dumps(lines.records[-1]), flush=True)


def encoded(target: LanguageModel, folder: Path, limit: int) -> list[list[int]]:
    return ids_of(target, [question.text[:LONGEST] for question in spread(read_questions(folder)[1], limit)])


def pieces(target: LanguageModel, file: Path, length: int, limit: int) -> list[list[int]]:
    """Pieces of a text of `length` tokens each, at places as far apart as there are."""
    assert target.tokenizer is not None
    ids = target.tokenizer.encode(file.read_text(encoding="utf-8"))
    if len(ids) < length:
        raise SystemExit(f"{str(file)!r} has {len(ids)} tokens, and {length} are asked for; name a longer text")
    return [ids[first : first + length] for first in np.linspace(0, len(ids) - length, limit, dtype=int).tolist()]


def measured(
    engine: Engine, asked: Mapping[str, list[list[int]]], params: SamplingParams, *, alone: bool = False
) -> dict[str, Any]:
    """By set, and the mean over sets; what an engine warned of is told."""
    every = [ids for prompts in asked.values() for ids in prompts]
    answers = [engine.generate(ids, params) for ids in every] if alone else engine.generate(every, params)
    each_one = [(each.stats.emitted_tokens + each.stats.stop_tokens, each.stats.target_calls) for each in answers]
    over_all = asdict(ratio_over_prompts(*zip(*each_one, strict=True)))
    answers, sets = iter(answers), {}
    for name, prompts in asked.items():
        counted, seconds = Counters(), 0.0
        for _ in prompts:
            answer = next(answers)
            counted += answer.stats
            seconds += answer.timing.decode_s
            print(*answer.warnings, sep="\n", end="", file=sys.stderr)
        counts = asdict(counted)
        kept = ("target_calls", "emitted_tokens", "draft_tokens", "accepted_tokens")
        sets[name] = {"tokens_per_call": counted.mean_acceptance_length} | {each: counts[each] for each in kept}
        sets[name] |= {"decode_s": round(seconds, 3)} if alone else {}
    mean = statistics.fmean(each["tokens_per_call"] for each in sets.values())
    return {"sets": sets, "tokens_per_call": mean, "over_all": over_all}


if __name__ == "__main__":
    main()
