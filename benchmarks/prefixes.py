"""What heads cost conversations whose beginnings are kept: tokens that are not read again, and time to first tokens.

A system prompt of real text and turns behind it, for SmolLM2 alone and beside each kind of head with a cache of its
own. Heads have random weights of a trained one's sizes: what they read and keep takes the same time, and their drafts
are no matter here.
Every turn is asked of all engines one after another; ratios are of the same turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from common import Lines, heldout_texts
from truedraft import Engine, SamplingParams, load_model
from truedraft.drafters import DFlash, DSpark, Eagle3, PEagle
from truedraft.kinds.block.module import BlockConfig, DFlashHead, DSparkHead
from truedraft.kinds.eagle.module import Eagle3Config, Eagle3Head, PEagleConfig, PEagleHead
from truedraft.models.base import LanguageModel

_SYSTEM, _NEW, _ANSWER = 1500, 40, 24  # tokens


def head_drafters(target: LanguageModel, layers: tuple[int, ...]) -> dict[str, Any]:
    """Drafters with heads of the target's own sizes."""
    width = target.head_width
    sizes: dict[str, Any] = {
        "heads": 9,
        "kv_heads": 3,
        "head": 64,
        "inner": 1536,
        "most_positions": target.context_length,
    }
    eagle = Eagle3Config(width, target.vocab_size, layers, **sizes, reach=4, draft_vocab=8192, own_output=True)
    p_eagle = PEagleConfig(
        width,
        target.vocab_size,
        layers,
        **sizes,
        reach=4,
        draft_vocab=8192,
        own_output=True,
        more_layers=1,
        mask_token=0,
    )
    block = BlockConfig(width, target.vocab_size, layers, **sizes, block=4, mask_id=0, depth=2)
    made: dict[str, Any] = {
        "EAGLE-3": (Eagle3, Eagle3Head(eagle)),
        "P-EAGLE": (PEagle, PEagleHead(p_eagle)),
        "DFlash": (DFlash, DFlashHead(block)),
        "DSpark": (DSpark, DSparkHead(block)),
    }
    generator = torch.Generator().manual_seed(0)
    for _, head in made.values():
        for weight in head.parameters():
            weight.data.normal_(1.0 if weight.dim() == 1 else 0.0, 0.02, generator=generator)
    return {name: kind(head.requires_grad_(False).eval()) for name, (kind, head) in made.items()}


def first_token(engine: Engine, ids: list[int]) -> tuple[float, int, list[int]]:
    """Seconds to the first token of an answer, tokens that were copied, and the answer."""
    began = time.perf_counter()
    request = engine.submit(ids, SamplingParams(max_tokens=_ANSWER, ignore_eos=True))
    while not request.emitted:
        engine.step()
    seconds = time.perf_counter() - began
    while not request.closed:
        engine.step()
    return seconds, request.copied_tokens, list(request.tokens[request.prompt_tokens :])


def main() -> None:
    """Ask turn by turn, and write what came."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    target = load_model(options.model)
    assert target.tokenizer is not None
    layers = tuple(target.shown_layers * part // 4 for part in (1, 2, 3))
    drafters: dict[str, Any] = {"none": None} | head_drafters(target, layers)
    engines = {
        name: Engine(target, drafter, controller="fixed", prefix_cache_bytes=1 << 30)
        for name, drafter in drafters.items()
    }
    words = [token for text in heldout_texts() for token in target.tokenizer.plain_ids(text)]
    text, rest = words[:_SYSTEM], words[_SYSTEM:]
    log = Lines(options.out, model=options.model, system_tokens=_SYSTEM, new_tokens=_NEW)
    ratios: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(options.turns):
        text, rest = [*text, *rest[:_NEW]], rest[_NEW:]
        found = {name: first_token(engine, text) for name, engine in engines.items()}
        plain = found["none"]
        for name, (seconds, copied, answer) in found.items():
            assert answer == plain[2], f"{name} answered otherwise"
            log.add({"turn": turn, "drafter": name, "tokens": len(text), "copied": copied, "first_token_s": seconds})
            if turn:
                ratios[name].append(seconds / plain[0])
        text += plain[2]
    medians = {name: statistics.median(each) for name, each in ratios.items() if each}
    log.add({"first_token_ratio_of_later_turns": medians})


if __name__ == "__main__":
    main()
