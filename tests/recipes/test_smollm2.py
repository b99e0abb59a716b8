"""The recipes of SmolLM2's drafters: questions, a draft's first weights and packed file, and heads on equal terms."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from recipes.smollm2 import build
from recipes.smollm2.build import write_gguf, written_prompts
from recipes.smollm2.heads import TEXTS, PaddedTarget, _Job, packed, read_texts
from recipes.smollm2.writer import Writer
from transformers import LlamaForCausalLM

from cli.tiny import save_tiny_llama
from support import gguf_files
from truedraft import load_model
from truedraft.core.tree import chain_shape
from truedraft.kinds.dflash2.module import DFlash2Head
from truedraft.kinds.dflash2.training import DFlash2TrainingConfig
from truedraft.models.architecture import LlamaShape, load_causal_lm, new_llama, save_llama
from truedraft.models.base import Segment
from truedraft.models.lm_head import LmHead
from truedraft.training import chains
from truedraft.training.texts.self_distillation import SelfDistillationData, WrittenAnswer

SHAPE = LlamaShape(
    vocab_size=len(gguf_files.vocabulary()), width=64, layers=3, heads=4, kv_heads=2, intermediate=96, head_size=16
)
FUNCTION = '''def area(width: int, height: int) -> int:
    """
    The area of a rectangle, which is its width times its height, in whole units.
    """
'''


def test_prompts_come_from_all_kinds_and_share_nothing_with_those_that_are_held_out(tmp_path: Path) -> None:
    questions = ["How many eggs do twelve hens lay in nine days if each lays one?", "What are three times seven?"]
    (tmp_path / "gsm8k").write_text("\n".join(json.dumps({"question": each}) for each in questions))
    sources = [FUNCTION + "    return width * height\n", "def broken(:\n", "def bare():\n    return 1\n"]
    (tmp_path / "code").write_text("\n".join(json.dumps({"text": each}) for each in sources))
    (tmp_path / "prose").write_text(" ".join(f"word{number}" for number in range(2000)))
    made = written_prompts(tmp_path / "gsm8k", tmp_path / "code", [tmp_path / "prose"], [questions[0].upper()], 3)
    assert questions[0] not in made and questions[1] in made
    assert [each for each in made if each.startswith("def ")] == [FUNCTION]
    passages = [each for each in made if "word" in each]
    assert len(made) == len(passages) + 2
    assert 0.4 < np.mean([each.startswith("Summarize: ") for each in passages]) < 0.6
    assert all("?" in each or "What does the text say of" in each or "Summarize: " in each for each in passages)


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    model = new_llama(SHAPE, seed=1).eval()
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.data.mul_(6.0)  # far from uniform, so that a wrong row would show
    return model


def test_a_draft_starts_near_the_targets_embedding_and_is_packed_with_its_ids(
    llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_tiny_llama(tmp_path / "target", seed=3, layers=1, chat=True)
    sizes = {"width": 8, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 8}
    monkeypatch.setattr(build, "SHAPE", sizes)
    assert build.main(["start", "--target", target, "--run", str(tmp_path)]) == 0
    table = load_causal_lm(target).get_input_embeddings().weight.double()
    near = load_causal_lm(tmp_path / "start").get_input_embeddings().weight.double()
    assert near.std().item() == pytest.approx(build.START_SPREAD, rel=1e-3)
    scores = torch.linalg.svdvals(table)[:8] / torch.linalg.svdvals(near)
    assert scores.std() < 0.01 * scores.mean(), "the best one of its rank"

    save_llama(llama, tmp_path / "draft", dtype=torch.float32)
    (tmp_path / "draft" / "drafter.json").write_text('{"target": "x"}')
    (tmp_path / "draft" / "draft_ids.json").write_text("[1, 2]")
    file = gguf_files.write(tmp_path / "target.gguf", "llama", {"": "Q8_0"})
    assert build.main(["pack", "--target", target, "--gguf", str(file), "--run", str(tmp_path)]) == 0
    packed = tmp_path / "packed" / "draft"
    assert sorted(each.name for each in packed.iterdir()) == ["draft-Q4_0.gguf", "draft_ids.json", "drafter.json"]
    assert json.loads((packed / "drafter.json").read_text()) == {"target": "x", "vocab_size": SHAPE.vocab_size}


def test_a_packed_draft_is_read_as_it_was_trained(
    llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = gguf_files.write(tmp_path / "target.gguf", "llama", {"": "Q8_0"})
    kind = gguf.GGMLQuantizationType.Q8_0
    write_gguf(llama, target, tmp_path / "draft.gguf", kind)
    rounded = copy.deepcopy(llama)
    for weight in rounded.parameters():
        if weight.ndim == 2:
            weight.data = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.detach().numpy(), kind), kind))
    draft = load_model(tmp_path / "draft.gguf", dtype="float32", fast_paths=False)
    ids = torch.tensor([5, 9, 200, 31, 77, 3, 120, 8])
    with torch.inference_mode():
        cache = draft.new_cache()
        found = draft.forward([Segment(cache, ids, chain_shape(len(ids)), range(len(ids)))]).logits
        expected = rounded(ids[None]).logits[0]
    assert draft.tokenizer is not None and draft.tokenizer.decode([*b"hi"]) == "hi"
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)

    (tmp_path / "packed").mkdir()
    (tmp_path / "draft.gguf").rename(tmp_path / "packed" / "draft.gguf")
    monkeypatch.setattr(build, "PACKED", tmp_path / "packed")
    tokenizer = save_tiny_llama(tmp_path / "folder", seed=3, layers=1, chat=True)
    assert build.main(["unpack", "--target", tokenizer, "--run", str(tmp_path)]) == 0
    unpacked = load_causal_lm(tmp_path / "first")
    assert torch.allclose(unpacked(ids[None]).logits[0], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_padded_forward_shows_what_transformers_computes(llama: LlamaForCausalLM) -> None:
    target, texts = PaddedTarget(llama), [torch.arange(1, 6), torch.arange(9, 2, -1)]
    segments = [Segment(target.new_cache(), each, chain_shape(len(each)), ()) for each in texts]  # type: ignore[arg-type, func-returns-value]
    found = target.forward_showing(segments, (1, 0))
    alone = [llama(each[None], output_hidden_states=True) for each in texts]
    logits = torch.cat([each.logits[0] for each in alone])
    torch.testing.assert_close(found.logits, logits, rtol=1e-4, atol=1e-4)
    for shown, number in zip(found.layers, (1, 0), strict=True):
        expected = torch.cat([each.hidden_states[number + 1][0] for each in alone])
        torch.testing.assert_close(shown, expected, rtol=1e-4, atol=1e-4)


def test_answers_written_together_are_greedy_ones_with_the_vectors_that_gave_them(llama: LlamaForCausalLM) -> None:
    """Prompts of several lengths, one of whose answers is ended early by a token that it has."""
    prompts, writer = [[5], [9, 3, 77, 12], [31, 8]], Writer(llama, [])
    written = list(writer.write(prompts, [0.0] * 3, 8, torch.Generator()))
    for prompt, answer in zip(prompts, written, strict=True):
        ids = torch.tensor([*prompt, *answer.tokens.tolist()])[None]
        with torch.no_grad():
            output = llama(ids, output_hidden_states=True)
        rows = slice(len(prompt) - 1, -1)
        assert answer.tokens.tolist() == output.logits[0, rows].argmax(-1).tolist()
        torch.testing.assert_close(answer.hidden, output.hidden_states[-1][0, rows].bfloat16(), rtol=0.02, atol=0.02)
    end = int(written[1].tokens[2])
    first = written[1].tokens.tolist().index(end)
    stopped = list(Writer(llama, [end]).write(prompts, [0.0] * 3, 8, torch.Generator()))[1]
    assert stopped.stopped and stopped.tokens.tolist() == written[1].tokens[: first + 1].tolist()


def test_answers_are_kept_as_they_are(tmp_path: Path) -> None:
    train = [WrittenAnswer([1, 40_000], [7], 0.0, False), WrittenAnswer([3], [5, 6, 2], 1.0, True)]
    held = [WrittenAnswer([4, 4, 4], [9, 9], 0.8, False)]
    np.savez_compressed(tmp_path / TEXTS, train=packed(train), held=packed(held))
    assert read_texts(tmp_path / TEXTS) == (train, held)


def test_a_kind_of_heads_is_trained_by_the_padded_forward(
    llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chains, "load_model", lambda *_, **__: PaddedTarget(llama))
    config = DFlash2TrainingConfig(layers=(0, 1), length=3, anchors=4, rank=4, positions_per_step=24, steps=2)
    records = [WrittenAnswer([7, first], list(range(first, first + 12)), 0.0, False) for first in (5, 30, 60)]
    text = SelfDistillationData(records, np.zeros((36, 64), np.uint16))
    job = _Job("dflash2", config, LmHead.of(llama), (text, text), "print")
    job.train(60, tmp_path, "name")
    head = DFlash2Head.load(tmp_path)
    assert head.record.fingerprint == "print" and head.config.layers == (0, 1) and head.reach == 3
    assert float(head.candidate_selector.successor_codebook.abs().max()) > 0.0
