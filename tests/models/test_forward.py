"""The contract of a packed forward: rows, hidden vectors, padded vocabularies, several models at once."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor

from support.tiny_models import FAMILIES, VOCAB, noisy, packed, stock
from truedraft import Engine, SamplingParams
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.drafters import DraftModel
from truedraft.errors import ModelError
from truedraft.models import ForwardOutput, HuggingFaceModel, Segment
from truedraft.text.tokenizer import Tokenizer

TREE = TreeShape((-1, 0, 0, 1, 2))
IDS = torch.tensor([5, 9, 11, 3, 60])


def run(model: HuggingFaceModel, ids: Tensor, shape: TreeShape, rows: list[int]) -> ForwardOutput:
    cache = model.new_cache()
    output = model.forward([Segment(cache, ids, shape, rows)])
    model.release_cache(cache)
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_is_what_enters_the_lm_head(family: str, dtype: torch.dtype) -> None:
    """The vector after the final norm, as the stock model has it, and the head makes the logits of it."""
    model, alone = packed(family, dtype=dtype), stock(family, dtype=dtype)
    output = run(model, IDS, chain_shape(5), [0, 2, 4])
    with torch.inference_mode():
        expected = alone.base_model(input_ids=IDS[None], use_cache=False).last_hidden_state[0, [0, 2, 4]]
        logits = alone.get_output_embeddings()(output.hidden)
    spread = float(expected.float().std())
    loose = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(output.hidden.float(), expected.float(), rtol=0, atol=loose * max(spread, 1.0))
    torch.testing.assert_close(output.logits, logits, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 0.05)
    assert output.hidden.dtype == output.logits.dtype == dtype


def test_a_model_is_run_through_its_forward_only() -> None:
    model = packed("llama")
    with pytest.raises(ModelError, match="outside truedraft; use LanguageModel"):
        model.module(input_ids=IDS[None])
    run(model, IDS, TREE, [0])
    with pytest.raises(ModelError, match="outside truedraft"):
        model.module(input_ids=IDS[None])
    with pytest.raises(IndexError):
        run(model, torch.tensor([VOCAB + 5]), chain_shape(1), [0])
    with pytest.raises(ModelError, match="outside truedraft"):
        model.module(input_ids=IDS[None])


class _Words(Tokenizer):
    """A tokenizer with fewer ids than the model has rows."""

    def __init__(self, size: int) -> None:
        super().__init__(None)
        self.__dict__["_about_ids"] = (size, frozenset(), {})

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return (2,)


def test_padded_ids_are_cut_off() -> None:
    full = packed("llama")
    cut = HuggingFaceModel(stock("llama"), _Words(VOCAB - 7), "padded")
    assert cut.vocab_size == VOCAB - 7
    assert cut.eos_token_ids == (2,)
    expected = run(full, IDS, TREE, [0, 4]).logits[:, : VOCAB - 7]
    assert run(cut, IDS, TREE, [0, 4]).logits.equal(expected)
    assert HuggingFaceModel(stock("llama"), _Words(VOCAB + 7), "short").vocab_size == VOCAB


def test_ids_that_end_an_answer() -> None:
    """Of the configuration for generation, or else of the model's own."""
    assert not any(weight.requires_grad for weight in packed("gpt2").module.parameters())
    for given, configured, ids in ((7, 11, (7,)), ([7, 9], None, (7, 9)), (None, 11, (11,)), (None, None, ())):
        module = stock("llama")
        module.generation_config.eos_token_id, module.config.eos_token_id = given, configured
        assert HuggingFaceModel(module, None, "ends").eos_token_ids == ids


def test_models_loaded_together_do_not_mix() -> None:
    """Each has its own attention function, patterns and caches, though transformers' registry is one for all.

    Two of the targets have one draft model.
    """
    prompt, params = IDS.tolist(), SamplingParams(max_tokens=24)
    names, draft = ("llama", "gemma3", "gpt2", "llama"), noisy("llama", 0.03)
    expected = {name: Engine(packed(name)).generate(prompt, params).token_ids for name in set(names)}
    drafters = [DraftModel(draft) if name == "llama" else None for name in names]
    engines = [Engine(packed(name), each, controller="fixed") for name, each in zip(names, drafters, strict=True)]
    requests, running = [engine.submit(prompt, params) for engine in engines], [True]
    while any(running):
        running = [engine.step() for engine in engines]
    assert [request.tokens[len(prompt) :] for request in requests] == [expected[name] for name in names]


def test_threads_take_turns() -> None:
    model = packed("llama")
    expected = run(model, IDS, TREE, [0, 1, 2, 3, 4]).logits
    found: list[bool] = []

    def work() -> None:
        found.extend(run(model, IDS, TREE, [0, 1, 2, 3, 4]).logits.equal(expected) for _ in range(10))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 30


def test_a_model_that_is_no_longer_used_is_freed() -> None:
    """The registry of attention functions offers no way to unregister, and must not keep weights alive."""
    model = packed("llama")
    run(model, IDS, TREE, [0])
    weights = weakref.ref(model.module.get_input_embeddings().weight)
    del model
    gc.collect()
    assert weights() is None
