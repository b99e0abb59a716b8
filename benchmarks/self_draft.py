"""Drafts made of the target itself: what fewer bits cost and bring: `python benchmarks/self_draft.py`.

    python benchmarks/self_draft.py [--pad-to 500M] [--prompts 6] [--rounds 30] [--out FILE]

`forward`: one token behind 128, by 8 and 4 bits, beside the target's own, in turns, and what making the copies takes.
`sizes`: the same for small models. `other`: the same for a model of random weights that runs by its own modules.
`acceptance`: of the target at its own size, four drafted tokens at every step, held-out code. `speedup`: over plain
decoding at the cost of a larger model, by the default controller, decoding and prompt together; both answer each prompt
in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, OPTConfig

from truedraft import Engine, SamplingParams, load_model
from truedraft.core.tree import chain_shape
from truedraft.drafters import from_spec
from truedraft.embedded import heldout_prompts_file
from truedraft.machine import describe_machine
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.loading import fastest_backend

OUT = Path(__file__).parent / "results" / "self_draft.json"
BITS = (8, 4)
WORDS = ("self:int8", "self:int4")
TEMPERATURES = (0.0, 0.8)


def forward_s(model: LanguageModel, cache: Any) -> float:
    """Seconds of a forward of one token."""
    began = time.perf_counter()
    model.forward([Segment(cache, torch.tensor([7]), chain_shape(1), (0,))])
    seconds = time.perf_counter() - began
    cache.rollback(cache.length)
    return seconds


def forwards(target: LanguageModel, rounds: int) -> dict[str, Any]:
    """Ratios to the target's own, medians of turns; seconds until the copies were first run."""
    cache = target.new_cache()
    target.forward([Segment(cache, torch.arange(128) + 5, chain_shape(128), ())])
    cache.commit(range(128))
    copies = {bits: target.quantized(bits) for bits in BITS}
    makes = {f"int{bits}_made_s": forward_s(copy, cache) for bits, copy in copies.items()}
    turns = [
        (forward_s(target, cache), {bits: forward_s(copy, cache) for bits, copy in copies.items()})
        for _ in range(rounds)
    ]
    target.release_cache(cache)
    return {
        f"int{bits}": statistics.median(each[bits] / own for own, each in turns) for bits in BITS
    } | makes | {
        "target_ms": 1e3 * statistics.median(own for own, _ in turns), "weight_bytes": target.weight_bytes,
    }  # fmt: skip


def other_model() -> LanguageModel:
    """Of a family without a native forward, 337 million random weights."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "ffn_dim": 4096, "num_attention_heads": 16}
    config = OPTConfig(**sizes, vocab_size=32_000, word_embed_proj_dim=1024, bos_token_id=None, eos_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return HuggingFaceModel(model.eval(), None, "OPT of random weights", fastest_backend)


def acceptance(prompts: list[str]) -> dict[str, Any]:
    """Share of drafted tokens, and tokens per call, with four drafted at every step."""
    target, found = load_model("embedded:target"), {}
    for word in WORDS:
        for temperature in TEMPERATURES:
            engine = Engine(target, from_spec(f"{word},num_speculative_tokens=4", target), controller="fixed")
            params = SamplingParams(max_tokens=64, temperature=temperature)
            stats = [engine.generate(prompt, params).stats for prompt in prompts]
            drafted, accepted = (sum(getattr(s, name) for s in stats) for name in ("draft_tokens", "accepted_tokens"))
            calls, emitted = (sum(getattr(s, name) for s in stats) for name in ("target_calls", "emitted_tokens"))
            found[f"{word}, temperature {temperature:g}"] = {
                "draft_acceptance_rate": accepted / drafted, "mean_acceptance_length": emitted / calls,
            }  # fmt: skip
    return found


def speedups(target: LanguageModel, prompts: list[str]) -> dict[str, Any]:
    """Of whole answers, geometric means over prompts."""
    found = {}
    plain = Engine(target)
    for word in WORDS:
        engine = Engine(target, from_spec(f"{word},num_speculative_tokens=8", target))
        for temperature in TEMPERATURES:
            params = SamplingParams(max_tokens=64, temperature=temperature)
            engine.generate(prompts[0], params)
            ratios = []
            for prompt in prompts:
                seconds = []
                for each in (plain, engine):
                    began = time.perf_counter()
                    each.generate(prompt, params)
                    seconds.append(time.perf_counter() - began)
                ratios.append(seconds[0] / seconds[1])
            found[f"{word}, temperature {temperature:g}"] = {
                "speedup": statistics.geometric_mean(ratios), "least": min(ratios), "most": max(ratios),
            }  # fmt: skip
    return found


def main() -> int:
    """Measure all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pad-to", default="500M")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    lines = heldout_prompts_file().read_text(encoding="utf-8").splitlines()
    prompts = [str(json.loads(line)["text"]) for line in lines[: asked.prompts]]
    target = load_model("embedded:target", pad_to=asked.pad_to)
    found = {
        "machine": describe_machine("cpu"),
        "padded_to": asked.pad_to,
        "temperatures": TEMPERATURES,
        "forward": forwards(target, asked.rounds),
        "sizes": {name: forwards(load_model(name), asked.rounds) for name in ("embedded:draft", "embedded:target")},
        "other": forwards(other_model(), asked.rounds),
        "acceptance": acceptance(prompts),
        "speedup": speedups(target, prompts),
    }
    asked.out.write_text(json.dumps(found) + "\n")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
