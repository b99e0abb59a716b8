"""The embedded pair: an ordinary Hugging Face folder each, and a draft that agrees with its target."""

from __future__ import annotations

import json

import pytest
import torch

from support.codes import logits
from support.embedded_models import embedded
from truedraft import Engine, SamplingParams
from truedraft.core.probs import overlap
from truedraft.errors import UnknownOptionError
from truedraft.models.embedded import EMBEDDED, embedded_folder, heldout_prompts_file


def test_names() -> None:
    assert EMBEDDED == ("target", "draft")
    with pytest.raises(UnknownOptionError, match="did you mean 'target'"):
        embedded_folder("targt")


def test_sizes_and_cards() -> None:
    for name, low, high in (("target", 15e6, 17e6), ("draft", 1e6, 2e6)):
        model = embedded(name, dtype="float32", device="cpu")
        assert low <= model.parameters <= high
        assert model.context_length == 2048
        card = (embedded_folder(name) / "README.md").read_text()
        assert "icen" in card and "bits per byte" in card


def test_the_draft_agrees_with_the_target_on_held_out_text() -> None:
    """alpha = E[sum min(p, q)] of at least 0.6, on the shipped held-out prompts (the cards hold the whole split)."""
    target, draft = (embedded(name, dtype="float32", device="cpu") for name in ("target", "draft"))
    assert target.tokenizer is not None
    overlaps = []
    for line in heldout_prompts_file().read_text().splitlines():
        ids = target.tokenizer.encode(json.loads(line)["text"])
        overlaps.append(overlap(*(logits(model, ids).softmax(dim=-1) for model in (target, draft))))
    assert torch.cat(overlaps).mean() >= 0.6


def test_auto_has_this_draft_and_speculation_shortens_the_work() -> None:
    target = embedded(device="cpu")
    engine = Engine(target, "auto", controller="fixed")
    stats = engine.generate("def quicksort(items):", SamplingParams(max_tokens=64)).stats
    assert next(iter(engine.drafter.members)) == "draft"
    assert stats.mean_acceptance_length > 1.5
