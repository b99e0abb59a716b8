"""The recipe of SmolLM2's drafters: the questions it takes, its writer, a plain decoder, and the file it packs."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from recipes.smollm2.pack import write_gguf
from recipes.smollm2.prompts import written_prompts
from recipes.smollm2.writer import Writer
from scipy import stats

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


def test_the_writer_decodes_as_transformers_does_with_its_vectors(llama: torch.nn.Module) -> None:
    prompts = [[5, 9, 200, 31], [7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9], [40]]
    expected = [
        llama.generate(  # type: ignore[operator]
            torch.tensor([prompt]), max_new_tokens=30, do_sample=False, pad_token_id=0, eos_token_id=[]
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    stop = expected[1][12]  # ends some rows early, which are then taken out of the batch
    ended = 0
    for answer in Writer(llama, [stop]).write(prompts, [0.0] * 4, 30, torch.Generator()):  # type: ignore[arg-type]
        tokens = expected[answer.number]
        tokens = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        assert answer.tokens.tolist() == tokens
        assert answer.stopped is (stop in tokens)
        ended += answer.stopped
        text = torch.tensor([[*prompts[answer.number], *tokens[:-1]]])
        vectors = llama.model(text).last_hidden_state[0, len(prompts[answer.number]) - 1 :]  # type: ignore[operator]
        assert torch.allclose(answer.hidden.float(), vectors, rtol=0.01, atol=0.02)
    assert 0 < ended < 4


def test_the_writer_samples_the_model(llama: torch.nn.Module) -> None:
    """A chi-square of 8,192 draws at temperature 2, by groups of ids of at least 20 expected draws."""
    prompt, rows = [5, 9, 200], 8192
    generator = torch.Generator().manual_seed(5)
    writer = Writer(llama, [])  # type: ignore[arg-type]
    drawn = [int(answer.tokens[0]) for answer in writer.write([prompt] * rows, [2.0] * rows, 1, generator)]
    with torch.no_grad():
        probs = (llama(torch.tensor([prompt])).logits[0, -1].double() / 2).softmax(-1).numpy()
    likely = probs * rows >= 20
    seen = np.bincount(drawn, minlength=len(probs))
    counts = np.append(seen[likely], seen[~likely].sum())
    wanted = np.append(probs[likely], probs[~likely].sum()) * rows
    assert likely.sum() > 5
    assert stats.chisquare(counts, wanted).pvalue > 1e-6


def test_a_packed_draft_is_read_as_it_was_trained(llama: torch.nn.Module, tmp_path: Path) -> None:
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
