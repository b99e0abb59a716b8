"""Heads as they run: the ids that the modules' own logits rank highest, in every body, each row for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig

from support.backends import fused_backend, graph_backend, native_backend
from support.head_models import MarkovWithHead, hidden_of, random_heads
from support.pairwise import pairwise
from support.tiny_models import build
from truedraft.core.top_k import stable_topk
from truedraft.kinds.medusa.module import MedusaRunner
from truedraft.models.backends.base import BackendMaker
from truedraft.models.backends.native.build import built
from truedraft.models.backends.stock import StockBackend
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.loading import fastest_backend
from truedraft.models.packed_linear import can_pack
from truedraft.models.padding import PaddedSize, pad_model

NATIVE = built(torch.bfloat16).library is not None
PACKS = can_pack(torch.device("cpu"), torch.bfloat16)
BODIES: list[Any] = [
    pytest.param(StockBackend, id="stock"),
    pytest.param(graph_backend, id="graph"),
    pytest.param(fused_backend, id="fused", marks=pytest.mark.skipif(not PACKS, reason="this machine cannot pack")),
    pytest.param(native_backend, id="native", marks=pytest.mark.skipif(not NATIVE, reason="it cannot be compiled")),
]
SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 80,  # no whole unit of the native forward
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TOKENS = [5, 9, 11, 3, 60, 2, 11]


def small(body: BackendMaker, dtype: torch.dtype = torch.float32) -> HuggingFaceModel:
    return HuggingFaceModel(build(LlamaConfig(**SIZES), seed=1, dtype=dtype), None, "small", body)


@pytest.mark.parametrize(
    ("tied", "reads_token", "layers", "body"),
    pairwise([pytest.param(True, False), pytest.param(False, True), pytest.param(True, True)], [1, 2, 3], BODIES),
)
def test_it_ranks_what_the_modules_rank(body: BackendMaker, layers: int, tied: bool, reads_token: bool) -> None:
    model = small(body)
    heads = random_heads(model, heads=4, layers=layers, tied=tied, reads_token=reads_token, spread=0.2)
    hidden = hidden_of(model, TOKENS)
    drawn = torch.tensor([*TOKENS[1:], 8])
    logits = heads.logits(hidden, model.unembed, model.finish_logits, model.embed(drawn).clone())
    for used in (4, 2):
        runner = MedusaRunner(heads, model, used)
        for depth, ranks in ((used, 7), (1, 1), (used, 211)):
            expected = stable_topk(logits[:depth].flatten(0, 1), ranks).view(depth, len(TOKENS), ranks)
            # Orders may differ where two logits are within rounding of each other.
            made = runner.likeliest(hidden, depth, ranks, drawn)
            assert (made.ids == expected).float().mean() > 0.98
            log_probs = logits[:depth].float().log_softmax(dim=-1).gather(-1, made.ids)
            torch.testing.assert_close(made.log_probs, log_probs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("body", BODIES)
def test_a_row_does_not_depend_on_its_neighbours(body: BackendMaker, tied: bool) -> None:
    """In bfloat16 near ties are everywhere, so a kernel that differs with the number of rows would show."""
    if body is graph_backend:
        pytest.skip("rows of different numbers may run through different kernels there, as it says")
    model = small(body, torch.bfloat16)
    runner = MedusaRunner(random_heads(model, heads=3, layers=2, tied=tied, reads_token=True, spread=0.2), model, 3)
    hidden = hidden_of(model, [i * 7 % 211 for i in range(20)]).bfloat16()
    drawn = torch.arange(20)
    together = runner.likeliest(hidden, 3, 10, drawn)
    for row in range(20):
        alone = slice(row, row + 1)
        made = runner.likeliest(hidden[alone], 3, 10, drawn[alone])
        assert made.ids.equal(together.ids[:, alone])
        assert made.log_probs.equal(together.log_probs[:, alone])
    fewer = runner.likeliest(hidden[:5], 2, 4, drawn[:5])
    assert fewer.ids.equal(together.ids[:2, :5, :4])
    assert fewer.log_probs.equal(together.log_probs[:2, :5, :4])


def test_two_threads_guess_what_one_does() -> None:
    model = small(fastest_backend, torch.bfloat16)
    runner = MedusaRunner(random_heads(model, heads=4, layers=3, spread=0.2), model, 4)
    hidden = hidden_of(model, [i * 7 % 211 for i in range(30)]).bfloat16()
    one = runner.likeliest(hidden, 4, 10)
    torch.set_num_threads(2)
    try:
        again = [runner.likeliest(hidden, 4, 10) for _ in range(20)]
        assert all(each.ids.equal(one.ids) and each.log_probs.equal(one.log_probs) for each in again)
    finally:
        torch.set_num_threads(1)


def test_soft_caps_and_scales_apply_to_free_heads_too() -> None:
    config = Gemma2Config(**SIZES | {"head_dim": 40}, final_logit_softcapping=2.0, tie_word_embeddings=False)
    model = HuggingFaceModel(build(config, seed=1), None, "capped", fastest_backend)
    hidden = hidden_of(model, TOKENS)
    for tied in (True, False):
        heads = random_heads(model, heads=2, tied=tied, spread=0.1)
        logits = heads.logits(hidden, model.unembed, model.finish_logits)
        assert float(logits.abs().max()) <= 2.0
        made = MedusaRunner(heads, model, 2).likeliest(hidden, 2, 1)
        assert made.ids.flatten().tolist() == logits.argmax(dim=-1).flatten().tolist()
        torch.testing.assert_close(made.log_probs[..., 0], logits.log_softmax(dim=-1).amax(dim=-1))


@pytest.mark.parametrize("body", BODIES)
def test_heads_of_the_model_before_padding_guess_alike(body: BackendMaker) -> None:
    own = small(StockBackend)
    size = PaddedSize("0.3M", layers=2, width=320, inner=384)
    padded = HuggingFaceModel(pad_model(build(LlamaConfig(**SIZES), seed=1), size), None, "padded", body)
    heads = random_heads(own, heads=3, reads_token=True, spread=0.2)
    drawn = torch.tensor(TOKENS)
    runs = [MedusaRunner(heads, model, 3).likeliest(hidden_of(model, TOKENS), 3, 5, drawn) for model in (own, padded)]
    assert (runs[0].ids == runs[1].ids).float().mean() > 0.98
    torch.testing.assert_close(runs[0].log_probs, runs[1].log_probs, rtol=1e-4, atol=1e-4)


def test_any_model_with_an_lm_head_will_do() -> None:
    model = MarkovWithHead.random(5, seed=1)
    heads = random_heads(model, heads=2)
    hidden = torch.eye(25, dtype=torch.float64)
    expected = heads.logits(hidden, model.unembed, model.finish_logits).argsort(dim=-1, descending=True)
    assert MedusaRunner(heads, model, 2).likeliest(hidden, 2, 5).ids.equal(expected)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("body", BODIES)
def test_logits_are_those_of_the_modules_and_of_the_guesses(body: BackendMaker, tied: bool) -> None:
    model = small(body)
    heads = random_heads(model, heads=3, layers=2, tied=tied, reads_token=True, spread=0.2)
    hidden, drawn = hidden_of(model, TOKENS), torch.tensor([*TOKENS[1:], 8])
    expected = heads.logits(hidden, model.unembed, model.finish_logits, model.embed(drawn).clone())
    runner = MedusaRunner(heads, model, 3)
    made = runner.logits(hidden, 2, drawn)
    torch.testing.assert_close(made, expected[:2], rtol=1e-4, atol=1e-4)
    guesses = runner.likeliest(hidden, 2, 1, drawn)
    assert (guesses.ids[..., 0] == made.argmax(dim=-1)).float().mean() > 0.98  # beside ties up to rounding


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("body", BODIES)
def test_a_row_of_logits_does_not_depend_on_its_neighbours(body: BackendMaker, tied: bool) -> None:
    if body is graph_backend:
        pytest.skip("rows of different numbers may run through different kernels there, as it says")
    model = small(body, torch.bfloat16)
    runner = MedusaRunner(random_heads(model, heads=3, layers=2, tied=tied, reads_token=True, spread=0.2), model, 3)
    hidden, drawn = hidden_of(model, [i * 7 % 211 for i in range(9)]).bfloat16(), torch.arange(9)
    together = runner.logits(hidden, 3, drawn)
    for row in range(9):
        assert runner.logits(hidden[row : row + 1], 2, drawn[row : row + 1]).equal(together[:2, row : row + 1])
