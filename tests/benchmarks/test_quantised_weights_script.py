"""`benchmarks/quantised_weights.py`: what a file holds, and how far each way to run it lies from its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import peers_engines
import quantised_weights
from support.gguf_files import write
from truedraft.models.backends.native.build import built


@pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason)
def test_ways_are_compared_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truedraft.models.gguf.cache_folder", lambda: tmp_path)
    monkeypatch.setattr(peers_engines, "LLAMA_CPP", tmp_path / "nowhere")
    file = write(tmp_path / "model.gguf", "llama", {"token_embd": "Q8_0", "": "Q4_K"})
    (tmp_path / "text").write_text("some text that is long enough")
    found = quantised_weights.measure(file, [tmp_path / "text"], pieces=1, tokens=16)
    assert found["types"].keys() == {"Q8_0", "Q4_K"} and sum(found["types"].values()) == pytest.approx(1)
    assert found["llama.cpp"] is None and found["pieces"] == 1
    ways = found["ways"]
    assert ways[quantised_weights.REFERENCE]["mean_kl"] == 0.0 < ways["codes, float32"]["mean_kl"] < 0.1
    assert ways["codes, float32"]["weight_bytes"] < ways[quantised_weights.REFERENCE]["weight_bytes"] / 3
