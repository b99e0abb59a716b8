"""MTP layers of checkpoints as drafters, held to drafts that are made slowly by the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from support.layer_heads import Records, answers_of
from support.mtp_checkpoints import SHAPES, SPECULATORS, WEIGHTS, MtpReference
from support.tiny_models import PROMPTS, VOCAB
from truedraft import Engine, SamplingParams, load_model
from truedraft.core.proposal import Proposal
from truedraft.core.tree import chain_shape
from truedraft.drafters import DraftRequest, Mtp, Portfolio, PromptLookup, from_spec
from truedraft.errors import ModelError, ModelNotFoundError
from truedraft.kinds.mtp.module import MtpHead
from truedraft.models.base import Segment
from truedraft.models.huggingface import HuggingFaceModel

GREEDY = SamplingParams(max_tokens=16)
SEEDED = SamplingParams(max_tokens=16, temperature=1.0, seed=5)


class Recorded(Records, Mtp):
    pass


@cache
def reference(name: str) -> MtpReference:
    return MtpReference(SHAPES[name])


def loaded(folder: Path) -> HuggingFaceModel:
    return load_model(folder, dtype="float32")


def answers(model: HuggingFaceModel, drafter: Any, params: SamplingParams) -> list[Any]:
    return answers_of(Engine(model, drafter, controller="fixed"), params)


@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_drafts_are_those_of_the_page(name: str, tmp_path: Path) -> None:
    slow, model = reference(name), loaded(reference(name).write(tmp_path))
    drafter = Recorded(MtpHead.for_target(None, model))
    assert answers(model, drafter, GREEDY) == answers(model, None, GREEDY)
    chosen = drafter.facts["reads"], drafter.facts["returns"]
    for text, proposal in drafter.drafted[::6]:
        path: list[int] = []
        for token in proposal.tree.host_ids:
            assert token == int(slow.logits(text, path, *chosen).argmax()), f"behind {text} {path}"
            path.append(token)
    assert len(drafter.drafted) > 20
    assert answers(model, Mtp(drafter.head, branching=(2, 1)), SEEDED) == answers(model, None, SEEDED)


class Compared(Mtp):
    """Holds each request's cache to one that reads its text anew, with the target's vectors by transformers."""

    compared = 0

    def propose(self, batch: Sequence[DraftRequest], budgets: Any, noise: Any) -> list[Proposal]:
        proposals = super().propose(batch, budgets, noise)
        slow, runner = reference("qwen3"), self._running[0]
        for request in batch:
            cache, pairs = self._texts[request.id].cache, len(request.tokens) - 1
            if cache.length != pairs:
                continue
            vectors = slow.shown(slow.model, input_ids=torch.tensor([list(request.tokens[:-1])]))[runner.reads]
            fresh = runner.pool.acquire()
            runner.forward([Segment(fresh, torch.tensor(request.tokens[1:]), chain_shape(pairs), ())], vectors, True)
            fresh.commit(range(pairs))
            for kept, made in zip(cache.entries(), fresh.entries(), strict=True):
                torch.testing.assert_close(kept, made, rtol=0, atol=2e-4)
            self.compared += 1
        return proposals


@torch.inference_mode()
def test_caches_hold_what_a_fresh_computation_would(tmp_path: Path) -> None:
    """Beside prompt lookup, whose tokens it did not draft, and behind rejected drafts."""
    model = loaded(reference("qwen3").write(tmp_path))
    drafter = Compared(MtpHead.for_target(None, model), branching=(2, 1))
    engine = Engine(model, Portfolio({"mtp": drafter, "prompt-lookup": PromptLookup()}), controller="in-turn")
    prompts = [list(PROMPTS[0]) * 3, list(PROMPTS[1])]
    for params in (GREEDY, SEEDED):
        assert answers_of(engine, params, prompts) == answers_of(Engine(model), params, prompts)
    assert drafter.compared > 8


@torch.inference_mode()
def test_what_it_reads_is_measured_on_the_targets_own_tokens(tmp_path: Path) -> None:
    """Without a tokenizer behind 8 ids, on 32 tokens of its own."""
    slow, model = reference("deepseek_v3"), loaded(reference("deepseek_v3").write(tmp_path))
    drafter = Mtp(MtpHead.for_target(None, model))
    drafter.check(model)
    text = [7919 * place % VOCAB for place in range(1, 9)]
    text += Engine(model).generate(text, SamplingParams(max_tokens=32)).token_ids
    for reads, found in drafter.facts["log_probs"]["reads"].items():
        logs = [slow.logits(text[:end], (), reads, reads).log_softmax(-1)[text[end]] for end in range(8, 40)]
        assert found == pytest.approx(float(torch.stack(logs).mean()), abs=1e-4)
    reads = drafter.facts["reads"]
    for returns, found in drafter.facts["log_probs"]["returns"].items():
        texts = [(text[: end - 1], text[end - 1 : end], text[end]) for end in range(8, 40)]
        logs = [slow.logits(known, path, reads, returns).log_softmax(-1)[token] for known, path, token in texts]
        assert found == pytest.approx(float(torch.stack(logs).mean()), abs=1e-4)
    best = {key: max(found, key=found.__getitem__) for key, found in drafter.facts["log_probs"].items()}
    assert best == {"reads": drafter.facts["reads"], "returns": drafter.facts["returns"]}
    assert f"reads vectors {reads} the final norm" in (drafter.note or "")


@pytest.mark.parametrize("name", ["qwen3", "glm4_moe"])
def test_auto_finds_it_and_a_folder_of_speculators_drafts_the_same(name: str, tmp_path: Path) -> None:
    slow = reference(name)
    model, folder = loaded(slow.write(tmp_path / "model")), tmp_path / "speculators"
    found = slow.tensors(tmp_path / "one", "mtp_layers.0.", SPECULATORS)
    folder.mkdir()
    save_file({each: tensor.contiguous() for each, tensor in found.items()}, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps({"speculators_model_type": "mtp"}))
    assert "mtp" in from_spec("auto", model).members
    own, other = (from_spec(word, model) for word in ("mtp", f"mtp:{folder}"))
    if not slow.shape.zeroes_first:  # their layer reads every embedding
        assert own.facts == other.facts
    assert answers(model, other, GREEDY) == answers(model, None, GREEDY)


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("qwen3", {"mtp.norm.weight": None}, r"lack mtp\.norm\.weight,"),
        ("qwen3", {"mtp.layers.0.self_attn.k_proj.weight": None}, r"lack mtp\.layers\.0\.self_attn\.k_proj\.weight,"),
        ("qwen3", {"mtp.gate.weight": torch.zeros(2)}, r"hold mtp\.gate\.weight,"),
        ("qwen3", {"mtp.layers.0.mlp.extra": torch.zeros(2)}, r"hold mtp\.layers\.0\.mlp\.extra,"),
        ("qwen3", {"mtp.fc.weight": torch.zeros(48, 48)}, r"another shape mtp\.fc\.weight"),
        ("qwen3", {"mtp.layers.0.mlp.up_proj.weight": torch.zeros(9, 48)}, r"shape mtp\.layers\.0\.mlp\.up_proj"),
        ("glm4_moe", {"model.layers.2.hnorm.weight": None}, r"lack model\.layers\.2\.hnorm\.weight,"),
        ("glm4_moe", {"model.layers.2.mlp.experts.3.up_proj.weight": None}, r"experts\.3\.up_proj\.weight,"),
    ],
)  # fmt: skip
def test_tensors_that_are_missing_or_too_many_are_named(
    name: str, more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = loaded(reference(name).write(tmp_path, more))
    with pytest.raises(ModelError, match=message):
        from_spec("mtp", model)


def test_a_model_without_such_a_layer_says_so(tmp_path: Path) -> None:
    slow = reference("qwen3")
    slow.model.save_pretrained(tmp_path)
    model = loaded(tmp_path)
    assert "mtp" not in from_spec("auto", model).members
    with pytest.raises(ModelNotFoundError, match="hold no MTP layer"):
        from_spec("mtp", model)
    with pytest.raises(ModelNotFoundError, match="there is no folder"):
        from_spec(f"mtp:{tmp_path / 'none'}", model)
