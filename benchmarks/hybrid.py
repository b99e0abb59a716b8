"""Speculation on a hybrid of gated delta nets and attention: `python benchmarks/hybrid.py`.

    python benchmarks/hybrid.py [--run runs/hybrid] [--turns 3] [--out FILE]

Wants what `python -m recipes.hybrid.build` and `python -m recipes.hybrid.pad` leave. Two questions:

- How much faster are answers, at the model's own size and padded, with the draft and with a scripted drafter whose
  every guess is right with probability 0.8? Plain and drafted answers come in turns, prompt by prompt.
- What does it cost to keep a state for each of 8 drafted tokens and to go back to one of them, beside the forward that
  verifies them? On random weights of Qwen 3-Next's shape, with few layers and experts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from truedraft import Answer, Engine, SamplingParams, load_model
from truedraft.core.tree import chain_shape
from truedraft.drafters import DraftModel
from truedraft.drafters.base import Drafter
from truedraft.machine import describe_machine
from truedraft.models import HuggingFaceModel, LanguageModel, Segment, recurrence
from truedraft.testing.scripted import ScriptedDrafter

HERE = Path(__file__).parent
OUT = HERE / "results" / "hybrid.json"
NEW, PROMPTS, DRAFTED = 64, 6, 8
RIGHT = 0.8


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=HERE.parent / "runs" / "hybrid")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    lines = (asked.run / "heldout_prompts.jsonl").read_text().splitlines()[:PROMPTS]
    found: dict[str, Any] = {"machine": describe_machine("cpu"), "states": states(), "speed": []}
    print(json.dumps(found["states"]), flush=True)
    for name in ("target", "target-padded"):
        target = load_model(asked.run / name, dtype="bfloat16")
        draft = load_model(asked.run / "draft", dtype="bfloat16")
        for row in speed(target, draft, [json.loads(line)["text"] for line in lines], asked.turns):
            found["speed"].append({"target": name, "parameters": target.parameters} | row)
            print(json.dumps(found["speed"][-1]), flush=True)
            asked.out.write_text(json.dumps(found) + "\n")
    return 0


def speed(target: LanguageModel, draft: LanguageModel, prompts: Sequence[str], turns: int) -> list[dict[str, Any]]:
    """Rows for the draft, greedy and sampled, and for the scripted drafter."""
    plain = Engine(target)
    greedy = SamplingParams(max_tokens=NEW, ignore_eos=True)
    sampled = SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=0.8)
    assert target.tokenizer is not None
    ids = [target.tokenizer.encode(prompt) for prompt in prompts]
    known = [each + plain.generate(each, greedy).token_ids for each in ids]
    systems: list[tuple[str, Drafter, SamplingParams]] = [
        ("draft, greedy", DraftModel(draft), greedy),
        ("draft, temperature 0.8", DraftModel(draft), sampled),
        (f"scripted, {RIGHT} right", scripted(known, target.vocab_size), greedy),
    ]
    return [_row(name, plain, Engine(target, drafter), ids, params, turns) for name, drafter, params in systems]


def scripted(known: Sequence[Sequence[int]], vocab: int) -> ScriptedDrafter:
    """Guesses on from texts that are known; each guess is right with probability RIGHT, by its place."""

    def script(tokens: Sequence[int]) -> list[list[int]]:
        done = list(tokens)
        number = next((number for number, each in enumerate(known) if list(each[: len(done)]) == done), None)
        if number is None:
            return []
        text = known[number]
        places = range(len(done), min(len(done) + DRAFTED, len(text)))
        draws = {at: random.Random(f"{number} {at}").random() for at in places}
        return [[text[at] if draws[at] < RIGHT else (text[at] + 1) % vocab for at in places]]

    return ScriptedDrafter(script, depth=DRAFTED, nodes=DRAFTED)


def _row(
    name: str, plain: Engine, drafted: Engine, ids: Sequence[list[int]], params: SamplingParams, turns: int
) -> dict[str, Any]:
    for engine in (plain, drafted):
        _timed(engine, ids[0], params)
    ratios: list[float] = []
    answers: list[Answer] = []
    for _ in range(turns):
        times = [(_timed(plain, each, params), _timed(drafted, each, params)) for each in ids]
        ratios.append(sum(before for (before, _), _ in times) / sum(after for _, (after, _) in times))
        answers = [answer for _, (_, answer) in times]
    tried = sum(sum(answer.stats.tried_per_position) for answer in answers)
    accepted = sum(answer.stats.accepted_tokens for answer in answers)
    return {
        "drafter": name,
        "times_plain": statistics.median(ratios),
        "turns": ratios,
        "alpha": accepted / max(tried, 1),
        "tokens_per_forward": sum(len(a.token_ids) for a in answers) / sum(a.stats.target_calls for a in answers),
    }


def _timed(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[float, Answer]:
    began = time.perf_counter()
    answer = engine.generate(prompt, params)
    return time.perf_counter() - began, answer


def states(repeats: int = 15) -> dict[str, Any]:
    """What keeping states costs beside the forward that verifies DRAFTED tokens, in Qwen 3-Next's shape."""
    config = Qwen3NextConfig(
        vocab_size=4096, hidden_size=2048, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=2,
        head_dim=256, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_key_head_dim=128, linear_value_head_dim=128, max_position_embeddings=2048,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = HuggingFaceModel(Qwen3NextForCausalLM(config).to(torch.bfloat16), None, "qwen3-next shape")
    cache = model.new_cache()
    prompt = torch.arange(64) * 61 % 4096
    model.forward([Segment(cache, prompt, chain_shape(64), (), prompt=64)])
    cache.commit(range(64))
    copied: list[float] = []
    gathered = recurrence._gathered

    def timed(rows: Any) -> Any:
        began = time.perf_counter()
        result = gathered(rows)
        copied.append(time.perf_counter() - began)
        return result

    tokens, shape = torch.arange(DRAFTED + 1), chain_shape(DRAFTED + 1)
    forwards, copies, backs = [], [], []
    with mock.patch.object(recurrence, "_gathered", timed):
        for _ in range(repeats):
            copied.clear()
            forwards.append(_seconds(lambda: model.forward([Segment(cache, tokens, shape, range(DRAFTED + 1))])))
            copies.append(sum(copied))
            backs.append(_seconds(lambda: cache.commit(range(4))))
    forward, copy, back = (1e3 * statistics.median(each) for each in (forwards, copies, backs))
    return {
        "forward of 9 tokens, ms": forward,
        "copies of states, ms": copy,
        "going back, ms": back,
        "share": (copy + back) / (forward - copy),
    }


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
