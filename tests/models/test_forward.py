"""The contract of a packed forward: rows, hidden vectors, padded vocabularies, several models at once."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from support.tiny_models import FAMILIES, VOCAB, noisy, packed, stock, stock_logits
from truedraft import Engine, SamplingParams
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.drafters import DraftModel
from truedraft.errors import ModelError
from truedraft.models.base import ForwardOutput, Segment
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.text.tokenizer import Tokenizer

TREE = TreeShape((-1, 0, 0, 1, 2))
IDS = torch.tensor([5, 9, 11, 3, 60])


def run(model: HuggingFaceModel, ids: Tensor, shape: TreeShape, rows: list[int]) -> ForwardOutput:
    cache = model.new_cache()
    output = model.forward([Segment(cache, ids, shape, rows)])
    model.release_cache(cache)
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [4], [0, 3], []])
def test_only_the_asked_rows_come_back(rows: list[int], dtype: torch.dtype) -> None:
    """Also where the forward is padded to more rows, as in bfloat16."""
    model = packed("llama", dtype=dtype)
    every = run(model, IDS, TREE, [0, 1, 2, 3, 4])
    some = run(model, IDS, TREE, rows)
    assert some.logits.shape == (len(rows), VOCAB)
    assert some.hidden.shape == (len(rows), model.module.config.hidden_size)
    torch.testing.assert_close(some.logits, every.logits[rows])
    torch.testing.assert_close(some.hidden, every.hidden[rows])


def test_rows_of_several_segments_come_one_behind_another() -> None:
    model = packed("llama")
    first, second, third = model.new_cache(), model.new_cache(), model.new_cache()
    output = model.forward(
        [
            Segment(first, IDS, chain_shape(5), (1, 4)),
            Segment(second, IDS[:2], chain_shape(2), ()),
            Segment(third, IDS[:3], chain_shape(3), (0, 2)),
        ]
    )
    expected = stock_logits(stock("llama"), IDS.tolist())[[1, 4, 0, 2]]
    torch.testing.assert_close(output.logits, expected, rtol=0, atol=2e-5)


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


def test_a_failed_forward_leaves_the_model_usable() -> None:
    model = packed("llama")
    expected = run(model, IDS, TREE, [4])
    cache = model.new_cache()
    with pytest.raises(IndexError):
        model.forward([Segment(cache, torch.tensor([VOCAB + 5]), chain_shape(1), (0,))])
    with pytest.raises(ModelError, match="outside truedraft"):
        model.module(input_ids=IDS[None])
    again = model.forward([Segment(cache, IDS, TREE, (4,))])
    assert again.logits.equal(expected.logits)


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


def test_a_tokenizer_may_have_more_ids_than_the_model() -> None:
    assert HuggingFaceModel(stock("llama"), _Words(VOCAB + 7), "short").vocab_size == VOCAB


def test_what_a_model_says_of_itself() -> None:
    model = packed("gpt2", dtype=torch.bfloat16)
    assert (model.name, model.vocab_size, model.context_length) == ("gpt2", VOCAB, 256)
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.bfloat16)
    assert model.eos_token_ids == ()
    assert not any(weight.requires_grad for weight in model.module.parameters())


@pytest.mark.parametrize(("given", "ids"), [(7, (7,)), ([7, 9], (7, 9)), (None, ())])
def test_ids_that_end_an_answer(given: int | list[int] | None, ids: tuple[int, ...]) -> None:
    module = stock("llama")
    module.generation_config.eos_token_id = given
    assert HuggingFaceModel(module, None, "ends").eos_token_ids == ids


def test_eos_of_the_configuration() -> None:
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, eos_token_id=11)
    module = AutoModelForCausalLM.from_config(config)
    module.generation_config.eos_token_id = None
    assert HuggingFaceModel(module, None, "ends").eos_token_ids == (11,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_forward_gives_the_same_bits(dtype: torch.dtype) -> None:
    model = packed("gemma3", dtype=dtype)
    first, second = (run(model, IDS, TREE, [0, 1, 2, 3, 4]) for _ in range(2))
    assert first.logits.equal(second.logits)
    assert first.logits.isfinite().all()
    other = packed("gemma3", dtype=dtype)
    assert run(other, IDS, TREE, [0, 1, 2, 3, 4]).logits.equal(first.logits)


def take_turns(engines: Sequence[Engine]) -> None:
    """One step of each in turn, until all are idle."""
    running = [True]
    while any(running):
        running = [engine.step() for engine in engines]


def test_models_loaded_together_do_not_mix() -> None:
    """Each has its own attention function, patterns and caches, though transformers' registry is one for all."""
    names = ["llama", "gemma3", "gpt2"]
    together = {name: packed(name) for name in names}
    prompt, params = [5, 9, 11, 3, 60], SamplingParams(max_tokens=24)
    expected = {name: Engine(packed(name)).generate(prompt, params).token_ids for name in names}
    engines = {name: Engine(model) for name, model in together.items()}
    requests = {name: engine.submit(prompt, params) for name, engine in engines.items()}
    take_turns(list(engines.values()))
    assert {name: request.tokens[len(prompt) :] for name, request in requests.items()} == expected


def test_one_model_drafts_for_two_targets() -> None:
    draft = noisy("llama", 0.03)
    prompt, params = [5, 9, 11, 3, 60], SamplingParams(max_tokens=24)
    expected = Engine(packed("llama")).generate(prompt, params).token_ids
    engines = [Engine(packed("llama"), DraftModel(draft), controller="fixed") for _ in range(2)]
    requests = [engine.submit(prompt, params) for engine in engines]
    take_turns(engines)
    assert [request.tokens[len(prompt) :] for request in requests] == [expected, expected]


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
