"""truedraft and transformers in processes of their own, for `peers_real.py`, asked line by line or once.

python benchmarks/peers_ours.py truedraft THREADS MODEL ["all" or "plain"]
python benchmarks/peers_ours.py transformers THREADS FOLDER DRAFT
python benchmarks/peers_ours.py perplexity THREADS FILE
python benchmarks/peers_ours.py memory THREADS FILE PROMPT_TOKENS ANSWER_TOKENS
"""

from __future__ import annotations

import itertools
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.nn import functional

from common import be_asked
from real_prompts import TEMPERATURES
from truedraft import Engine, SamplingParams, load_model
from truedraft.core.tree import chain_shape
from truedraft.machine import dtype_name
from truedraft.models.base import LanguageModel, Segment

ASSISTED = {"assisted, 4 tokens": (4, "constant", 0.0), "assisted, its defaults": (20, "constant", 0.4)}


def main() -> None:
    kind, threads, *words = sys.argv[1:]
    torch.set_num_threads(int(threads))
    made: dict[str, Callable[..., Callable[[dict[str, Any]], Any]]] = {
        "truedraft": ours, "transformers": theirs, "perplexity": perplexity, "memory": memory
    }  # fmt: skip
    be_asked(lambda: made[kind](*words))


def params_of(asked: dict[str, Any]) -> SamplingParams:
    return SamplingParams(asked["max_tokens"], asked["temperature"], ignore_eos=asked["ignore_eos"])


def ours(model: str, which: str) -> Callable[[dict[str, Any]], Any]:
    """Plain decoding and the default drafters over one target; nothing of an earlier prompt is kept."""
    target = load_model(model)
    drafters = {"plain": None, "auto": "auto"} if which == "all" else {"plain": None}
    engines = {name: Engine(target, drafter, prefix_cache_bytes=0) for name, drafter in drafters.items()}
    for engine, heat in itertools.product(engines.values(), TEMPERATURES):
        engine.measure(SamplingParams(temperature=heat))

    def answer(asked: dict[str, Any]) -> Any:
        if "texts" in asked:
            return facts(target, engines, asked["texts"], chat=asked["chat"])
        answers = engines[asked["way"]].generate(asked["prompts"], params_of(asked))
        return sum(len(each.token_ids) for each in answers)

    return answer


def facts(target: LanguageModel, engines: dict[str, Engine], texts: list[str], *, chat: bool) -> dict[str, Any]:
    tokenizer = target.tokenizer
    assert tokenizer is not None
    as_message = [tokenizer.chat([{"role": "user", "content": text}]) for text in texts] if chat else None
    return {
        "ids": as_message or [tokenizer.encode(text) for text in texts],
        "eos": list(target.eos_token_ids),
        "vocab_size": target.vocab_size,
        "dtype": dtype_name(target.dtype),
        "fast_paths": list(target.fast_paths),
        "drafters": {name: list(engine.drafter.members) for name, engine in engines.items()},
    }


def theirs(folder: str, draft: str) -> Callable[[dict[str, Any]], int]:
    from peers_engines import loaded
    from truedraft.measure.peers.transformers import AssistedSetting, Generate, Way, assisted_way, lookup_way

    model, assistant = loaded(Path(folder)), loaded(Path(draft))
    ways = {"plain": Way(), "lookup": lookup_way()}
    ways |= {name: assisted_way(assistant, AssistedSetting(name, *setting)) for name, setting in ASSISTED.items()}

    @torch.inference_mode()
    def answer(asked: dict[str, Any]) -> int:
        engine = Generate(model, asked["eos"], ways[asked["way"]], together=8)
        return sum(len(reply.token_ids) for reply in engine.call(asked["prompts"], params_of(asked)))

    return answer


def perplexity(file: str) -> Callable[[dict[str, Any]], Any]:
    """Of pieces of texts, each read from an empty cache; gives the pieces, too."""
    model = load_model(file)
    assert model.tokenizer is not None

    def answer(asked: dict[str, Any]) -> Any:
        pieces = []
        for text in asked["texts"]:
            ids = torch.tensor(model.tokenizer.encode(text))
            pieces += [ids[at * asked["tokens"] :][: asked["tokens"]] for at in range(asked["pieces"])]
        surprise = torch.cat([surprises(model, piece) for piece in pieces]).mean()
        return {"surprise": surprise.item(), "pieces": [piece.tolist() for piece in pieces]}

    return answer


@torch.inference_mode()
def surprises(model: LanguageModel, ids: Tensor) -> Tensor:
    """Minus the log-probability of each token behind the first."""
    cache = model.new_cache()
    logits = model.forward([Segment(cache, ids, chain_shape(len(ids)), range(len(ids)))]).logits
    model.release_cache(cache)
    return functional.cross_entropy(logits[:-1].float(), ids[1:], reduction="none")


def memory(file: str, prompt: str, tokens: str) -> Callable[[dict[str, Any]], Any]:
    """Bytes that this process holds at most while it loads a model and answers one prompt, and seconds until tokens."""
    process = psutil.Process()
    imported, began = process.memory_info().rss, time.perf_counter()
    engine = Engine(load_model(file))
    loaded_s = time.perf_counter() - began
    answer = engine.generate(list(range(100, 100 + int(prompt))), SamplingParams(int(tokens), ignore_eos=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {
        "file_bytes": Path(file).stat().st_size, "imported_bytes": imported, "peak_bytes": peak * 1024,
        "cache_bytes": engine.cache_bytes, "loaded_s": loaded_s, "first_token_s": answer.timing.first_token_s,
        "load_to_first_token_s": loaded_s + (answer.timing.first_token_s or 0.0), "tokens": len(answer.token_ids),
    }  # fmt: skip
    return lambda asked: found


if __name__ == "__main__":
    main()
