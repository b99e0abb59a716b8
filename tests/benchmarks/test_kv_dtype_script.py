"""`benchmarks/kv_dtype.py`: the usual cache is compared with itself and with one of codes, and both are timed."""

from __future__ import annotations

import torch

import kv_dtype
from truedraft import load_model
from truedraft.models.base import LanguageModel


def test_both_caches_are_compared_and_timed() -> None:
    models: dict[str, LanguageModel] = {
        name: load_model("embedded:target", dtype="float32", kv_dtype=name) for name in ("auto", "int8")
    }
    ids = torch.arange(1, 100) * 37 % models["auto"].vocab_size
    apart = kv_dtype.distances(models, [ids], pieces=2, tokens=40)
    assert apart["pieces"] == 2 and apart["kv auto"]["mean_kl"] == 0.0 < apart["kv int8"]["mean_kl"] < 0.01
    times = kv_dtype.times(models, ids, context=90, rows=(1, 3), turns=2)
    assert times["context"] == 90 and times["forward_ms"].keys() == {"1", "3"}
    assert min(*times["forward_ms"]["1"].values(), *times["forward_ms"]["3"].values()) > 0.0
    assert times["bytes_of_a_token"]["int8"] < 0.3 * times["bytes_of_a_token"]["auto"]
