"""The recipe of SmolLM2's drafters: the questions it takes, what the model writes, and the file it packs."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from recipes.smollm2 import build
from recipes.smollm2.pack import read_draft, write_gguf
from recipes.smollm2.prompts import written_prompts

from cli.tiny import save_tiny_llama
from support import gguf_files
from truedraft import load_model
from truedraft.core.tree import chain_shape
from truedraft.models.architecture import LlamaShape, new_llama
from truedraft.models.base import Segment

SHAPE = LlamaShape(
    vocab_size=len(gguf_files.vocabulary()), width=64, layers=2, heads=4, kv_heads=2, intermediate=96, head_size=16
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
def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    model = new_llama(SHAPE, seed=1).eval()
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.data.mul_(6.0)  # far from uniform, so that a wrong row would show
    return model


def test_the_model_asks_itself_and_answers_all_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_tiny_llama(tmp_path / "target", seed=3, layers=1, chat=True)
    run = tmp_path / "run"
    run.mkdir()
    own = "".join(json.dumps({"prompt": f"What is {number} times seven?"}) + "\n" for number in range(6))
    (run / build.PROMPTS).write_text(own)
    monkeypatch.setattr(build, "TREE_PROMPTS", 2)
    monkeypatch.setattr(build, "TEST_PROMPTS", 1)
    sizes = ("--questions", "8", "--answers", "20", "--tokens", "6", "--rows", "8", "--device", "cpu")
    words = ["write", "--target", target, "--run", str(run), *sizes]
    assert build.main(words) == 0
    records = [json.loads(line) for line in (run / "train.jsonl").read_text().splitlines()]
    assert len(records) == 20 and len((run / "tree.jsonl").read_text().splitlines()) == 4
    seen: dict[tuple[int, ...], list[float]] = {}
    for record in records:
        seen.setdefault(tuple(record["prompt"]), []).append(record["temperature"])
    assert all(len(heats) == len({heat == 0.0 for heat in heats}) for heats in seen.values() if len(heats) == 2)
    texts = [json.loads(line)["text"] for line in (run / "answers.jsonl").read_text().splitlines()]
    assert len(texts) == 20 and all(text.startswith("<user>") and "<assistant>" in text for text in texts)
    written = (run / "train.jsonl").read_text()
    (run / "train.jsonl").write_text("".join(written.splitlines(keepends=True)[:5]))
    assert build.main(words) == 0 and (run / "train.jsonl").read_text() == written


def test_a_packed_draft_is_read_as_it_was_trained(
    llama: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = gguf_files.write(tmp_path / "target.gguf", "llama", {"": "Q8_0"})
    kind = gguf.GGMLQuantizationType.Q8_0
    write_gguf(llama, target, tmp_path / "draft.gguf", kind)  # type: ignore[arg-type]
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
    unpacked = read_draft(tmp_path / "first")
    assert torch.allclose(unpacked(ids[None]).logits[0], expected, rtol=1e-4, atol=1e-4)
