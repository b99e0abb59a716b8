"""The recipe of SmolLM2's draft: questions, the first weights, and the packed file."""

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
from transformers import LlamaForCausalLM

from cli.tiny import save_tiny_llama
from support import gguf_files
from truedraft import load_model
from truedraft.core.tree import chain_shape
from truedraft.models.architecture import LlamaShape, load_causal_lm, new_llama, save_llama
from truedraft.models.base import Segment

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
