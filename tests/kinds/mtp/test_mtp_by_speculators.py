"""MTP layers that `speculators` took from a checkpoint: its own forward gives what the layer gives here.

`make test-speculators` installs it beside the tests; without it they are skipped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from support.mtp_checkpoints import SHAPES, WEIGHTS, MtpReference
from support.speculators import module_of
from support.tiny_models import VOCAB
from truedraft import load_model
from truedraft.core.tree import chain_shape
from truedraft.kinds.mtp.module import MtpHead, write_mtp_folder
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
    write_mtp_folder(tmp_path / "ours", str(folder), tokens=2, family=type(target.module).__name__)
    ours, own = (load_file(tmp_path / name / WEIGHTS) for name in ("ours", "theirs"))
    assert ours.keys() == own.keys() and all(tensor.equal(own[each]) for each, tensor in ours.items())
    written, saved = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs"))
    for each in ("architectures", "num_nextn_predict_layers", "speculators_config", "transformer_layer_config"):
        assert written[each] == saved[each], each
    again = theirs.MTPDraftModel.from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(again(input_ids=tokens, hidden_states=vectors)[0][0][0], first, rtol=0, atol=0)
    for place in (None, str(tmp_path / "theirs"), str(tmp_path / "ours")):
        layer = MtpHead.for_target(place, target).layer
        pairs = tokens[0, 1 : 1 + len(first)]
        segment = Segment(layer.pool.acquire(), pairs, chain_shape(len(pairs)), range(len(pairs)))
        _, behind = layer.forward([segment], target.embed(pairs), vectors[0, : len(pairs)])
        torch.testing.assert_close(target.unembed(behind), first, rtol=0, atol=2e-5)
