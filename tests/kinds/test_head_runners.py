"""Heads on one vector as they run with a target give what their modules give, in every backend, each row for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, LlamaConfig

from support.backends import fused_backend, graph_backend, native_backend
from support.head_models import MarkovWithHead, hidden_of, random_heads, random_redrafter
from support.pairwise import pairwise
from support.tiny_models import build
from truedraft.core.top_k import TopK, stable_topk
from truedraft.kinds.medusa.module import MedusaHeads, MedusaRunner
from truedraft.kinds.redrafter.module import RedrafterConfig, RedrafterHead, RedrafterRunner
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
    "vocab_size": 211, "hidden_size": 80, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
"""80 entries are no whole unit of the native forward."""
TEXT = [5, 9, 11, 3, 60, 2, 11]
PLACES, RANKS = 3, 7
MEDUSA: dict[str, dict[str, Any]] = {
    "medusa": {},
    "medusa, blocks": {"layers": 3},
    "medusa, free": {"tied": False, "layers": 2},
    "medusa, token": {"reads_token": True, "layers": 2},
    "medusa, free, token": {"tied": False, "reads_token": True},
}
REDRAFTER: dict[str, dict[str, Any]] = {
    "redrafter": {},
    "redrafter, own output": {"tied": False, "exit_width": 96},
    "redrafter, no linear layer": {"tied": False, "exit_width": 80 + 48},
    "redrafter, sum": {"rnn": False, "state": 80, "scaled": False},
}


def small(body: BackendMaker, dtype: torch.dtype = torch.float32) -> HuggingFaceModel:
    return HuggingFaceModel(build(LlamaConfig(**SIZES), seed=1, dtype=dtype), None, "small", body)


def head_of(name: str, model: HuggingFaceModel) -> Any:
    if name in MEDUSA:
        return random_heads(model, heads=PLACES, spread=0.2, **MEDUSA[name])
    return random_redrafter(model, **{"state": 48, "spread": 1.0, "length": PLACES} | REDRAFTER[name])


Run = Callable[[Tensor, Tensor], tuple[Tensor, TopK]]
"""Vectors `[rows, width]` and tokens `[places, rows]` to logits `[places, rows, vocab]` and the likeliest guesses."""


def run_of(head: Any, model: Any) -> Run:
    if isinstance(head, MedusaHeads):
        heads = MedusaRunner(head, model, PLACES)
        return lambda hidden, tokens: (
            heads.logits(hidden, PLACES, tokens[0]), heads.likeliest(hidden, PLACES, RANKS, tokens[0]),
        )  # fmt: skip
    runner = RedrafterRunner(head, model)

    def run(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, TopK]:
        context, state, logits, found = runner.context(hidden), None, [], []
        for each in tokens:
            state = runner.advance(state, each)
            logits.append(runner.logits(context, state))
            found.append(runner.likeliest(context, state, RANKS))
        guesses = TopK(torch.stack([each.ids for each in found]), torch.stack([each.log_probs for each in found]))
        return torch.stack(logits), guesses

    return run


def by_modules(head: Any, model: Any, hidden: Tensor, tokens: Tensor) -> Tensor:
    leaving = head.unroll(hidden, torch.stack([model.embed(each).clone() for each in tokens]))
    outputs = zip(head.outputs, leaving, strict=True)
    return torch.stack([model.unembed(x) if own is None else model.finish_logits(own(x)) for own, x in outputs])


@pytest.mark.parametrize(("name", "body"), pairwise([*MEDUSA, *REDRAFTER], BODIES))
def test_it_gives_what_the_modules_give(body: BackendMaker, name: str) -> None:
    model = small(body)
    head, hidden = head_of(name, model), hidden_of(model, TEXT)
    tokens = torch.arange(PLACES * len(TEXT)).view(PLACES, -1) * 7 % 211
    logits, guesses = run_of(head, model)(hidden, tokens)
    expected = by_modules(head, model, hidden, tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    ranked = stable_topk(expected.flatten(0, 1), RANKS).view(PLACES, len(TEXT), RANKS)
    assert (guesses.ids == ranked).float().mean() > 0.98  # two logits may be within rounding of each other
    log_probs = expected.float().log_softmax(dim=-1).gather(-1, guesses.ids)
    torch.testing.assert_close(guesses.log_probs, log_probs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("body", BODIES)
def test_fewer_medusa_heads_and_all_ids(body: BackendMaker) -> None:
    model = small(body)
    heads, hidden = head_of("medusa", model), hidden_of(model, TEXT)
    expected = heads.logits(hidden, model.unembed, model.finish_logits)
    runner = MedusaRunner(heads, model, 2)
    for depth, ranks in ((2, 211), (1, 1)):
        ranked = stable_topk(expected[:depth].flatten(0, 1), ranks).view(depth, len(TEXT), ranks)
        assert (runner.likeliest(hidden, depth, ranks).ids == ranked).float().mean() > 0.98


@pytest.mark.parametrize(
    ("name", "body"), pairwise(["medusa, free, token", "medusa, token", *REDRAFTER], [BODIES[0], *BODIES[2:]])
)
def test_a_row_does_not_depend_on_its_neighbours(body: BackendMaker, name: str) -> None:
    """In bfloat16 near ties are everywhere, so a kernel that differs with the number of rows would show.

    With graphs rows of different numbers may run through different kernels, as the backend says.
    """
    model = small(body, torch.bfloat16)
    run = run_of(head_of(name, model), model)
    hidden = hidden_of(model, [i * 7 % 211 for i in range(20)]).bfloat16()
    tokens = torch.arange(PLACES * 20).view(PLACES, 20)
    logits, guesses = run(hidden, tokens)
    for some in (*(slice(row, row + 1) for row in range(20)), slice(5)):
        own, found = run(hidden[some], tokens[:, some])
        assert own.equal(logits[:, some])
        assert found.ids.equal(guesses.ids[:, some]) and found.log_probs.equal(guesses.log_probs[:, some])


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
    hidden, tokens = hidden_of(model, TEXT), torch.tensor([TEXT] * PLACES)
    for name in ("medusa", "medusa, free", "redrafter, own output"):
        head = head_of(name, model)
        logits, guesses = run_of(head, model)(hidden, tokens)
        assert float(logits.abs().max()) <= 2.0
        assert guesses.ids[..., 0].equal(by_modules(head, model, hidden, tokens).argmax(dim=-1))
        torch.testing.assert_close(guesses.log_probs[..., 0], logits.log_softmax(dim=-1).amax(dim=-1))


@pytest.mark.parametrize(("name", "body"), pairwise(["medusa, token", "redrafter"], BODIES))
def test_heads_of_the_model_before_padding_guess_alike(name: str, body: BackendMaker) -> None:
    own, size = small(StockBackend), PaddedSize("0.3M", layers=2, width=320, inner=384)
    padded = HuggingFaceModel(pad_model(build(LlamaConfig(**SIZES), seed=1), size), None, "padded", body)
    head, tokens = head_of(name, own), torch.tensor([TEXT] * PLACES)
    runs = [run_of(head, model)(hidden_of(model, TEXT), tokens) for model in (own, padded)]
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=1e-4, atol=1e-3)
    assert (runs[0][1].ids == runs[1][1].ids).float().mean() > 0.98


def test_any_model_with_an_lm_head_will_do() -> None:
    model = MarkovWithHead.random(5, seed=1)
    heads = random_heads(model, heads=2)
    hidden = torch.eye(25, dtype=torch.float64)
    expected = heads.logits(hidden, model.unembed, model.finish_logits).argsort(dim=-1, descending=True)
    assert MedusaRunner(heads, model, 2).likeliest(hidden, 2, 5).ids.equal(expected)


def test_before_training_a_recurrent_head_says_what_the_lm_head_says() -> None:
    model = small(StockBackend)
    head = RedrafterHead(RedrafterConfig(80, 211, state=48, exit_width=80)).requires_grad_(False)
    hidden = hidden_of(model, TEXT)
    logits, _ = run_of(head, model)(hidden, torch.tensor([TEXT, TEXT[::-1]]))
    torch.testing.assert_close(logits, model.unembed(hidden).expand(2, -1, -1), rtol=1e-5, atol=1e-5)
