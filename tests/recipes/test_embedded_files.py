"""What is committed as the embedded pair: sizes, cards, prompts, and that both load as ordinary models."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from recipes.stdlib.settings import DRAFT_SHAPE, TARGET_SHAPE, Settings
from recipes.stdlib.sources import COUNT, MANIFEST, TOKENS

from truedraft.models.architecture import load_causal_lm, new_llama
from truedraft.training.texts.data import load_tokenizer

EMBEDDED = Path(__file__).parents[2] / "packages" / "truedraft-embedded" / "src" / "truedraft_embedded"
MIB = 2**20

needs_models = pytest.mark.skipif(
    not (EMBEDDED / "draft" / "README.md").exists(), reason="the embedded models have not been made yet"
)


@pytest.mark.parametrize(("shape", "low", "high"), [(TARGET_SHAPE, 15e6, 17e6), (DRAFT_SHAPE, 1e6, 2e6)])
def test_sizes_of_the_shapes(shape, low, high):
    assert low <= new_llama(shape, seed=0).num_parameters() <= high
    assert (shape.vocab_size, shape.head_size, shape.context) == (8192, 64, 2048)


def test_the_settings_are_complete():
    assert min(vars(Settings.load()).values()) > 0


@needs_models
def test_file_sizes():
    shards = list(EMBEDDED.rglob("*.safetensors"))
    assert all(shard.stat().st_size < 16 * MIB for shard in shards)
    assert sum(shard.stat().st_size for shard in shards) < 48e6


@needs_models
@pytest.mark.parametrize("name", ["target", "draft"])
def test_cards_state_what_they_must(name):
    card = (EMBEDDED / name / "README.md").read_text()
    for row in ("parameters", "data", "steps", "training time", "machine", "validation loss", "bits per byte"):
        assert re.search(rf"^\| {row}", card, re.MULTILINE), row
    assert "license: apache-2.0" in card
    assert "PSF License" in card
    if name == "draft":
        assert "alpha" in card
        assert "greedy agreement" in card


@needs_models
@pytest.mark.parametrize(("name", "shape"), [("target", TARGET_SHAPE), ("draft", DRAFT_SHAPE)])
def test_both_load_as_ordinary_models(name, shape):
    model = load_causal_lm(EMBEDDED / name, dtype=torch.bfloat16)
    assert model.config.model_type == "llama"
    assert model.config.vocab_size == shape.vocab_size
    assert model.config.max_position_embeddings == 2048
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    tokenizer = load_tokenizer(EMBEDDED / name)
    assert len(tokenizer) == 8192
    assert tokenizer.eos_token_id == model.config.eos_token_id == 0


@needs_models
def test_one_tokenizer_for_both():
    files = [(EMBEDDED / name / "tokenizer.json").read_bytes() for name in ("target", "draft")]
    assert files[0] == files[1]


@needs_models
def test_prompts_come_from_held_out_files_and_have_96_tokens():
    prompts = [json.loads(line) for line in (EMBEDDED / "heldout_prompts.jsonl").read_text().splitlines()]
    held_out = set(json.loads(MANIFEST.read_text())["held_out"])
    tokenizer = load_tokenizer(EMBEDDED / "target")
    assert len(prompts) == len({prompt["file"] for prompt in prompts}) == COUNT
    assert [prompt["id"] for prompt in prompts] == list(range(COUNT))
    for prompt in prompts:
        assert prompt["file"] in held_out
        ids = tokenizer.encode(prompt["text"], add_special_tokens=False)
        assert len(ids) == prompt["n_tokens"] == TOKENS
        assert tokenizer.decode(ids) == prompt["text"]
