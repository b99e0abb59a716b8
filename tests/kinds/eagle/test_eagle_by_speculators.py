"""Heads that `speculators` itself made and saved: loaded here they draft what its own forward does.

`make test-speculators` installs it beside the tests; without it they are skipped.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from support.eagle_reference import random_eagle
from support.speculators import module_of, with_random_weights
from truedraft.drafters.exporting import ExportTarget
from truedraft.kinds.eagle.folders import write_speculators_folder
from truedraft.kinds.eagle.module import Eagle3Config, Eagle3Head, PEagleConfig, PEagleHead

_WIDTH, _HEADS, _KV_HEADS, _HEAD, _VOCAB, _IDS = 48, 4, 2, 16, 97, 40
VARIANTS: dict[str, tuple[Any, dict[str, bool]]] = {
    "as they train them": (LlamaConfig, {}),
    "normed residual": (LlamaConfig, {"norm_before_residual": True}),
    "norm before fc": (LlamaConfig, {"norm_before_fc": True}),
    "EAGLE-3.1": (LlamaConfig, {"fc_norm": True, "norm_output": True}),
    "a layer of Qwen 3": (Qwen3Config, {}),
}


@pytest.fixture(scope="module")
def theirs() -> Any:
    return module_of("eagle3")


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each row to those before it."""
    key, value = (each.repeat_interleave(_HEADS // _KV_HEADS, 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(_HEAD)
    hidden = torch.ones(len(query), len(key), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value).flatten(1)


def made_by(theirs: Any, name: str) -> Any:
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig

    kind, flags = VARIANTS[name]
    layer = kind(
        vocab_size=_VOCAB, hidden_size=_WIDTH, intermediate_size=64, num_hidden_layers=1, num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS, head_dim=_HEAD, max_position_embeddings=256,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=_IDS, eagle_aux_hidden_state_layer_ids=[1, 2, 3], **flags
    )
    return with_random_weights(theirs.Eagle3DraftModel(config))


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_it_drafts_what_their_own_forward_drafts(theirs: Any, name: str, tmp_path: Path) -> None:
    """The first step at all positions of a text, and the second at each of them."""
    model = made_by(theirs, name)
    model.save_pretrained(tmp_path)
    head, generator, length = Eagle3Head.load(tmp_path), torch.Generator().manual_seed(2), 20
    assert head.config.layers == (0, 1, 2) and head.embed_tokens is not None and head.lm_head is not None
    vectors = torch.randn(1, length, 3 * _WIDTH, generator=generator)
    tokens = torch.randint(_VOCAB, (1, length), generator=generator)
    documents = torch.zeros(1, length, dtype=torch.int64)
    first, second = model(hidden_states=vectors, input_ids=tokens, document_ids=documents, ttt_steps=2)

    drafts_alike(head, vectors, tokens, first, second)


def drafts_alike(head: Eagle3Head, vectors: Tensor, tokens: Tensor, first: Tensor, second: Tensor) -> None:
    """Whether steps of a head give the tokens that they drafted, at all positions and behind each."""
    length, table = tokens.shape[1], head.rotary(vectors)
    positions = torch.arange(length) + head.config.rope_start
    assert head.lm_head is not None and head.embed_tokens is not None
    fused, embedded = head.fuse(vectors[0].split(_WIDTH, dim=-1)), head.embed_tokens(tokens[0])
    x = head.step(fused, embedded, table.at(positions), attend)
    assert head.lm_head(head.leaving(x)).argmax(-1).equal(first[0])
    for place in range(3, length - 1):
        pairs = torch.cat([fused[: place + 1], x[place : place + 1]]), embedded[: place + 2]
        y = head.step(*pairs, table.at(positions[: place + 2]), attend)
        assert int(head.lm_head(head.leaving(y[-1:])).argmax()) == int(second[0, place])


@pytest.mark.parametrize(
    "changes",
    [{}, {"norm_before_residual": True, "norm_before_fc": True}, {"fc_norm": True, "norm_output": True},
     {"query_norms": True, "rope_start": 1}],
    ids=["plain", "norms before", "EAGLE-3.1", "a layer of Qwen 3"],
)  # fmt: skip
@torch.no_grad()
def test_they_load_what_is_written_here_and_draft_the_same(
    theirs: Any, changes: dict[str, Any], tmp_path: Path
) -> None:
    """With an embedding of its own, and with that of the target whose folder is named."""
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig

    sizes = Eagle3Config(
        _WIDTH, _VOCAB, (0, 1, 2), _HEADS, _KV_HEADS, _HEAD, 64, draft_vocab=_IDS, own_embedding=True, **changes
    )
    made, generator, length = random_eagle(sizes), torch.Generator().manual_seed(2), 20
    target = target_in(tmp_path / "target")
    for own in (True, False):
        head = made
        if not own:
            head = random_eagle(replace(sizes, own_embedding=False))
            made.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
            made.load_state_dict(head.state_dict(), strict=False)
        write_speculators_folder(head, tmp_path / "head", ExportTarget(str(tmp_path / "target"), target.config))
        config = Eagle3SpeculatorConfig.from_pretrained(tmp_path / "head")
        config.transformer_layer_config._attn_implementation = "eager"
        model = theirs.Eagle3DraftModel.from_pretrained(tmp_path / "head", config=config).eval()
        if not own:  # they look for the target's where there are NaNs, which memory that nobody has written need not be
            model.embed_tokens.weight.fill_(torch.nan)
            model.load_verifier_weights()
        vectors = torch.randn(1, length, 3 * _WIDTH, generator=generator)
        tokens = torch.randint(_VOCAB, (1, length), generator=generator)
        documents = torch.zeros(1, length, dtype=torch.int64)
        drafts_alike(
            made, vectors, tokens, *model(hidden_states=vectors, input_ids=tokens, document_ids=documents, ttt_steps=2)
        )


def target_in(folder: Path) -> Any:
    config = LlamaConfig(
        vocab_size=_VOCAB, hidden_size=_WIDTH, intermediate_size=64, num_hidden_layers=7, num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def test_masks_give_what_their_own_forward_gives(theirs: Any, tmp_path: Path) -> None:
    """P-EAGLE: each row of their training, an anchor with masks behind it, by what is read for drafting here."""
    core = pytest.importorskip("speculators.models.peagle.core")
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle.config import PEagleSpeculatorConfig
    from speculators.models.peagle.data import generate_cod_sample_indices

    sizes = PEagleConfig(
        _WIDTH, _VOCAB, (0, 1, 2), _HEADS, _KV_HEADS, _HEAD, 64, draft_vocab=_IDS, own_embedding=True, more_layers=2,
        mask_token=9,
    )  # fmt: skip
    head, generator, length = random_eagle(sizes, PEagleHead), torch.Generator().manual_seed(2), 16
    assert isinstance(head, PEagleHead)
    target = target_in(tmp_path / "target")
    write_speculators_folder(head, tmp_path / "head", ExportTarget(str(tmp_path / "target"), target.config))
    config = PEagleSpeculatorConfig.from_pretrained(tmp_path / "head")
    config.transformer_layer_config._attn_implementation = "eager"
    model = core.PEagleDraftModel.from_pretrained(tmp_path / "head", config=config).eval()
    vectors = torch.randn(1, length, 3 * _WIDTH, generator=generator)
    tokens = torch.randint(_VOCAB, (1, length), generator=generator)
    seen: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _, inputs, output: seen.append(output[0]))
    torch.manual_seed(4)
    anchors, depths = generate_cod_sample_indices(length, torch.ones(1, length), num_depths=4)
    torch.manual_seed(4)
    model(
        hidden_states=vectors, input_ids=tokens, document_ids=torch.zeros(1, length, dtype=torch.int64), num_depths=4,
        verifier_last_hidden_states=torch.randn(1, length, _WIDTH, generator=generator),
        loss_config=resolve_loss_config("kl_div", "eager"),
    )  # fmt: skip
    table, embed, lm_head = head.rotary(vectors), head.embed_tokens, head.lm_head
    assert embed is not None and lm_head is not None and int(depths.max()) == 3
    masked = head.mask_hidden[0].expand(3, -1)
    for row, (anchor, depth) in enumerate(zip(anchors.tolist(), depths.tolist(), strict=True)):
        taken = torch.cat([vectors[0, : anchor + 1], masked[:depth]])
        ids = torch.cat([tokens[0, : anchor + 1], torch.full((depth,), sizes.mask_token)])
        x = head.step(head.fuse(taken.split(_WIDTH, -1)), embed(ids), table.at(torch.arange(len(ids))), attend)
        torch.testing.assert_close(lm_head(head.leaving(x[-1:]))[0], seen[0][row], rtol=0, atol=2e-4)
