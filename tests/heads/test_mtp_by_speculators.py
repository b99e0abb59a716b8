"""MTP layers that `speculators` took from a checkpoint: its own forward gives what the layer gives here.

`make test-speculators` installs it beside the tests; without it they are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from support.mtp_checkpoints import SHAPES, MtpReference
from support.speculators import module_of
from support.tiny_models import VOCAB
from truedraft import load_model
from truedraft.core.tree import chain_shape
from truedraft.heads.mtp import MtpHead
from truedraft.models.base import Segment


@pytest.fixture(scope="module")
def theirs() -> Any:
    return module_of("mtp")


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next", "qwen3_5"])
@torch.no_grad()
def test_the_first_step_is_that_of_their_forward(theirs: Any, name: str, tmp_path: Path) -> None:
    """Of their own conversion of a checkpoint, and of the checkpoint itself."""
    folder = MtpReference(SHAPES[name]).write(tmp_path / "model")
    model = theirs.MTPDraftModel.from_training_args(
        AutoConfig.from_pretrained(folder), num_speculative_steps=2, verifier_name_or_path=str(folder)
    ).eval()
    model.save_pretrained(tmp_path / "theirs")
    target, generator, length = load_model(folder, dtype="float32"), torch.Generator().manual_seed(2), 20
    vectors = torch.randn(1, length, 48, generator=generator)
    tokens = torch.randint(VOCAB, (1, length), generator=generator)
    first = model(input_ids=tokens, hidden_states=vectors)[0][0][0]
    for place in (None, str(tmp_path / "theirs")):
        layer = MtpHead.of(target, place).layer
        pairs = tokens[0, 1 : 1 + len(first)]
        segment = Segment(layer.pool.acquire(), pairs, chain_shape(len(pairs)), range(len(pairs)))
        _, behind = layer.forward([segment], target.embed(pairs), vectors[0, : len(pairs)])
        torch.testing.assert_close(target.unembed(behind), first, rtol=0, atol=2e-5)
