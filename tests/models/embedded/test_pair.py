"""The embedded pair: an ordinary Hugging Face folder each, and a draft that agrees with its target."""

from __future__ import annotations

import json

import pytest
import torch

from support.embedded_models import embedded
from truedraft import Engine, SamplingParams
from truedraft.core.probs import overlap
from truedraft.core.tree import chain_shape
from truedraft.drafters import from_spec
from truedraft.errors import UnknownOptionError
from truedraft.models.base import LanguageModel, Segment
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


def probs_along(model: LanguageModel, ids: list[int]) -> torch.Tensor:
    cache = model.new_cache()
    segment = Segment(cache, torch.tensor(ids), chain_shape(len(ids)), range(len(ids)))
    logits = model.forward([segment]).logits.float()
    model.release_cache(cache)
    return torch.softmax(logits, dim=-1)


def test_the_draft_agrees_with_the_target_on_held_out_text() -> None:
    """alpha = E[sum min(p, q)] of at least 0.6, on the shipped held-out prompts (the cards hold the whole split)."""
    target, draft = (embedded(name, dtype="float32", device="cpu") for name in ("target", "draft"))
    assert target.tokenizer is not None
    overlaps = []
    for line in heldout_prompts_file().read_text().splitlines():
        ids = target.tokenizer.encode(json.loads(line)["text"])
        overlaps.append(overlap(probs_along(target, ids), probs_along(draft, ids)))
    assert torch.cat(overlaps).mean() >= 0.6


def test_auto_has_this_draft_and_speculation_shortens_the_work() -> None:
    target = embedded(device="cpu")
    engine = Engine(target, "auto", controller="fixed")
    stats = engine.generate("def quicksort(items):", SamplingParams(max_tokens=64)).stats
    assert next(iter(engine.drafter.members)) == "draft"
    assert stats.mean_acceptance_length > 1.5


@pytest.mark.parametrize("spec", ["none", "prompt-lookup", "draft", "draft,branching=3-2-1"])
def test_a_stop_text_ends_the_answer_wherever_it_falls(spec: str) -> None:
    target = embedded(device="cpu")
    assert target.tokenizer is not None
    whole = Engine(target).generate("import os\nimport sys\n", SamplingParams(max_tokens=80)).text
    assert whole is not None
    # Texts of one to several tokens, some beginning in the middle of one.
    for place, length in ((9, 1), (17, 3), (30, 6), (41, 12)):
        stop = whole[place : place + length]
        if not stop.strip():
            continue
        engine = Engine(target, from_spec(spec, target), controller="fixed")
        params = SamplingParams(max_tokens=80, stop=(stop, "never to be seen"))
        pieces = list(engine.stream("import os\nimport sys\n", params))
        answer = pieces[-1].answer
        assert answer is not None
        assert answer.text == whole[: whole.find(stop)] == "".join(piece.text for piece in pieces)
        assert answer.finish_reason == "stop"
        assert len(answer.token_ids) == len(answer.origins)
        assert answer.stats.emitted_tokens + answer.stats.prefill_tokens == len(answer.token_ids)
        assert target.tokenizer.decode(answer.token_ids).startswith(answer.text)
