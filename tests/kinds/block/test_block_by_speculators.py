"""Block drafters that `speculators` itself made and saved: loaded here they draft what its own forward does.

`make test-speculators` installs it beside the tests; without it they are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from support.speculators import module_of, with_random_weights
from truedraft.drafters.exporting import ExportTarget
from truedraft.kinds.block.folders import write_speculators_folder
from truedraft.kinds.block.module import BlockHead, DFlashHead, DSparkHead

_WIDTH, _HEADS, _KV_HEADS, _HEAD, _VOCAB, _IDS, _BLOCK, _LENGTH = 48, 4, 2, 16, 97, 40, 4, 20
VARIANTS: dict[str, tuple[type[BlockHead], dict[str, Any]]] = {
    "DFlash": (DFlashHead, {}),
    "DFlash over all ids": (DFlashHead, {"draft_vocab_size": _VOCAB}),
    "DFlash from the anchor": (DFlashHead, {"sample_from_anchor": True}),
    "DSpark": (DSparkHead, {"markov_rank": 8}),
    "gated": (DSparkHead, {"markov_rank": 8, "markov_head_type": "gated", "confidence_head_with_markov": False}),
    "recurrent": (DSparkHead, {"markov_rank": 8, "markov_head_type": "rnn"}),
    "no Markov head, not from the anchor": (
        DSparkHead, {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def theirs() -> Any:
    return module_of("dspark")


def made_by(theirs: Any, name: str) -> Any:
    from speculators.models.dflash.config import DFlashSpeculatorConfig
    from speculators.models.dspark.config import DSparkSpeculatorConfig

    kind, options = VARIANTS[name]
    layer = Qwen3Config(
        vocab_size=_VOCAB, hidden_size=_WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS, head_dim=_HEAD,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    made = (DSparkSpeculatorConfig, theirs.DSparkDraftModel)
    if kind is DFlashHead:
        made = (DFlashSpeculatorConfig, theirs.DFlashDraftModel)
    sizes: dict[str, Any] = {"draft_vocab_size": _IDS, "aux_hidden_state_layer_ids": [1, 2, 3]}
    sizes |= {"block_size": _BLOCK, "mask_token_id": 96}
    return with_random_weights(made[1](made[0](transformer_layer_config=layer, **sizes | options)))


def by_their_forward(model: Any, vectors: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None, int]:
    """Logits `[anchors, block, ids]` of blocks behind all anchors that a text has, and of their acceptance."""
    anchors = _LENGTH - _BLOCK
    hidden, logits, _, _, rows = model._backbone_forward(
        vectors, tokens, torch.ones(1, _LENGTH), torch.zeros(1, _LENGTH, _WIDTH),
        torch.zeros(1, _LENGTH, dtype=torch.int64), max_anchors=anchors,
    )  # fmt: skip
    logits, hidden = logits.view(anchors, _BLOCK, -1), hidden.view(anchors, _BLOCK, -1)
    before = tokens[0, rows].view(anchors, _BLOCK)
    if not model.config.sample_from_anchor:
        before = torch.cat([before[:, :1], before[:, :-1]], 1)
    said = None
    if getattr(model, "markov_head", None) is not None:
        logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
    if getattr(model, "confidence_head", None) is not None:
        parts = [hidden]
        if model.config.confidence_head_with_markov:
            parts.append(model.markov_head.prev_embeddings(before))
        said = model.confidence_head(torch.cat(parts, -1))
    return logits, said, anchors


def by_ours(head: BlockHead, embed: Any, output: Any, vectors: Tensor, tokens: Tensor, anchor: int) -> tuple[Any, Any]:
    """The same of one block, `[reach, ids]`, where the tokens before are the text's."""
    table, config = head.rotary(vectors), head.config
    context = head.context(vectors[0, :anchor].split(_WIDTH, -1))
    known = list(head.context_keys(context, table.at(torch.arange(anchor))))

    def attend(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = (
            torch.cat(each).repeat_interleave(2, 1) for each in zip(known[number], (key, value), strict=True)
        )
        weights = (torch.einsum("qhd,khd->hqk", query, keys) / _HEAD**0.5).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)

    rotation = table.at(torch.arange(anchor, anchor + _BLOCK))
    x = head.vectors(head.inputs(tokens[0, anchor : anchor + 1], embed), rotation, attend)[0]
    logits, said, state = [], [], None
    for slot in range(head.reach):
        leaving = head.leaving_after(x[slot : slot + 1], tokens[0, anchor + slot : anchor + slot + 1], state)
        state = leaving.state
        logits.append(head.logits(leaving, output)[0])
        said += [] if not config.confidence else [head.acceptance(leaving)[0]]
    return torch.stack(logits), torch.stack(said) if said else None


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_it_drafts_what_their_own_forward_drafts(
    theirs: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks of a text: logits with the Markov head's, acceptance, greedy drafts; and once more written here."""
    model = made_by(theirs, name)
    model.save_pretrained(tmp_path / "theirs")
    kind = VARIANTS[name][0]
    head, generator = kind.load(tmp_path / "theirs"), torch.Generator().manual_seed(2)
    assert head.config.layers == (0, 1, 2) and head.config.from_anchor == model.config.sample_from_anchor
    vectors = torch.randn(1, _LENGTH, 3 * _WIDTH, generator=generator)
    tokens = torch.randint(_VOCAB, (1, _LENGTH), generator=generator)
    expected, said, anchors = by_their_forward(model, vectors, tokens)
    first = 0 if head.config.from_anchor else 1
    for anchor in range(1, anchors):
        logits, accepted = by_ours(head, model.embed_tokens, model.lm_head, vectors, tokens, anchor)
        torch.testing.assert_close(logits, expected[anchor, first:], rtol=1e-4, atol=1e-4)
        assert logits.argmax(-1).equal(expected[anchor, first:].argmax(-1))
        if accepted is not None:
            torch.testing.assert_close(accepted, said[anchor, first:], rtol=1e-4, atol=1e-4)  # type: ignore[index]
    write_speculators_folder(head, tmp_path / "ours", ExportTarget("org/target", None))
    monkeypatch.setattr(type(model), "load_verifier_weights", lambda self: None)  # there is no target to fetch
    again = type(model).from_pretrained(str(tmp_path / "ours"))
    own, known = again.state_dict(), model.state_dict()
    assert all(own[key].equal(known[key]) for key in head.state_dict() if key != "draft_ids")
    for key in ("block_size", "mask_token_id", "aux_hidden_state_layer_ids", "sample_from_anchor", "draft_vocab_size"):
        assert getattr(again.config, key) == getattr(model.config, key)
