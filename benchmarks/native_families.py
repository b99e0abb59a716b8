"""Plain decoding beside transformers at 500 M parameters: families that the native forward knows, and slower ways.

    python benchmarks/native_families.py [--families NAME ...] [--turns 3] [--out FILE]

Each family is built with about 500 million random weights in bfloat16, saved, and loaded by both as a user loads it. In
each turn both answer the same prompt greedily, one behind the other, so that a slow moment meets both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from truedraft import Engine, SamplingParams, load_model
from truedraft.machine import describe_machine

OUT = Path(__file__).parent / "results" / "native_families.json"
NEW = 48
PROMPT = [(7919 * place) % 30_000 + 10 for place in range(64)]
SHAPE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1280,
    "intermediate_size": 3584,
    "num_hidden_layers": 22,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}
_EXPERTS: dict[str, Any] = {"num_hidden_layers": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral, a window": ("MistralConfig", {"sliding_window": 512}),
    "qwen2, biases": ("Qwen2Config", {}),
    "qwen3, norms of q and k": ("Qwen3Config", {}),
    "phi3": ("Phi3Config", {}),
    "glm": ("GlmConfig", _HALF | {"attention_bias": True}),
    "glm4": ("Glm4Config", _HALF),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 512}),
    "mixtral": ("MixtralConfig", _EXPERTS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        _EXPERTS | {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 448, "norm_topk_prob": True},
    ),
    "gpt-oss": (
        "GptOssConfig",
        _EXPERTS | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 1792},
    ),
    "olmoe, packed by its own modules": (
        "OlmoeConfig",
        _EXPERTS | {"num_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 448},
    ),
    "gpt-j, one text at a time": ("GPTJConfig", {"n_inner": 3584, "rotary_dim": 64}),
    "bloom, one text at a time": ("BloomConfig", {}),
}


def build(name: str, folder: str) -> int:
    """Save the family's model with random weights; how many."""
    kind, own = FAMILIES[name]
    config = getattr(transformers, kind)(**SHAPE | own, dtype=torch.bfloat16)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = AutoModelForCausalLM.from_config(config)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


@torch.inference_mode()
def by_transformers(model: PreTrainedModel) -> float:
    """Seconds of an answer."""
    ids = torch.tensor([PROMPT])
    began = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return time.perf_counter() - began


def by_truedraft(engine: Engine) -> float:
    """The same."""
    began = time.perf_counter()
    engine.generate(PROMPT, SamplingParams(max_tokens=NEW))
    return time.perf_counter() - began


def measure(name: str, turns: int) -> dict[str, Any]:
    """One family."""
    with tempfile.TemporaryDirectory() as folder:
        parameters = build(name, folder)
        ours = load_model(folder, dtype="bfloat16")
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    engine = Engine(ours)
    by_transformers(theirs)
    by_truedraft(engine)
    times = [(by_transformers(theirs), by_truedraft(engine)) for _ in range(turns)]
    ratios = [before / after for before, after in times]
    return {
        "family": name,
        "parameters": parameters,
        "fast_paths": list(ours.fast_paths),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "tokens_per_s": NEW / statistics.median(after for _, after in times),
        "tokens_per_s, transformers": NEW / statistics.median(before for before, _ in times),
    }


def main() -> int:
    """Measure the families that are asked for; others that the file has stay there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    found = {each["family"]: each for each in _kept(asked.out)}
    for name in asked.families:
        found[name] = measure(name, asked.turns)
        told = found[name]
        print(f"{name}: {told['ratio']:.2f} times transformers ({', '.join(told['fast_paths'])})", flush=True)
        whole = {"machine": describe_machine("cpu"), "families": [found[each] for each in FAMILIES if each in found]}
        asked.out.write_text(json.dumps(whole) + "\n")
    return 0


def _kept(path: Path) -> list[dict[str, Any]]:
    families: list[dict[str, Any]] = json.loads(path.read_text())["families"] if path.exists() else []
    return families


if __name__ == "__main__":
    raise SystemExit(main())
