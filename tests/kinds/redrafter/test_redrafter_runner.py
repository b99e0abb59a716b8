"""The recurrent head as it runs beside a target gives what the module gives, row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from support.head_models import hidden_of, random_redrafter
from support.tiny_models import build
from truedraft.kinds.redrafter.module import RedrafterConfig, RedrafterHead, RedrafterRunner
from truedraft.models.backends.base import BackendMaker
from truedraft.models.backends.stock import StockBackend
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.loading import fastest_backend
from truedraft.models.padding import PaddedSize, pad_model

SIZES = {
    "vocab_size": 211, "hidden_size": 160, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
TOKENS = [3, 1, 4, 1, 5, 92, 65]
KINDS: dict[str, dict[str, int | bool]] = {
    "tied": {},
    "own output": {"tied": False, "exit_width": 96},
    "no linear layer": {"tied": False, "exit_width": 160 + 48},
    "sum": {"rnn": False, "state": 160, "scaled": False},
}


def small(body: BackendMaker = fastest_backend, dtype: torch.dtype = torch.float32) -> HuggingFaceModel:
    return HuggingFaceModel(build(LlamaConfig(**SIZES), seed=1, dtype=dtype), None, "small", body)


def unrolled(runner: RedrafterRunner, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
    """Logits at each place along tokens `[length, rows]`."""
    context, state, found = runner.context(hidden), None, []
    for each in tokens:
        state = runner.advance(state, each)
        found.append(runner.logits(context, state))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", [StockBackend, fastest_backend])
def test_it_gives_what_the_module_gives(body: BackendMaker, kind: str) -> None:
    model = small(body)
    head = random_redrafter(model, **{"state": 48, "spread": 1.0} | KINDS[kind])  # type: ignore[arg-type]
    hidden = hidden_of(model, TOKENS)
    tokens = torch.arange(3 * len(TOKENS)).view(3, -1) * 7 % 211
    leaving = head.unroll(hidden, torch.stack([model.embed(each).clone() for each in tokens]))
    runner = RedrafterRunner(head, model)
    for made, entering in zip(unrolled(runner, hidden, tokens), leaving, strict=True):
        expected = model.unembed(entering) if head.output is None else model.finish_logits(head.output(entering))
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
    context, state = runner.context(hidden), runner.advance(None, tokens[0])
    logits, likeliest = runner.logits(context, state), runner.likeliest(context, state, 9)
    expected = logits.float().log_softmax(dim=-1).gather(-1, likeliest.ids)
    torch.testing.assert_close(likeliest.log_probs, expected, rtol=1e-4, atol=1e-4)
    assert (likeliest.ids[:, 0] == logits.argmax(dim=-1)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_neighbours(kind: str) -> None:
    """In bfloat16 near ties are everywhere, so a kernel that differs with the number of rows would show."""
    model = small(dtype=torch.bfloat16)
    head = random_redrafter(model, **{"state": 48, "spread": 1.0} | KINDS[kind])  # type: ignore[arg-type]
    runner = RedrafterRunner(head, model)
    hidden = hidden_of(model, [i * 7 % 211 for i in range(20)]).bfloat16()
    tokens = torch.arange(60).view(3, 20)
    together = unrolled(runner, hidden, tokens)
    for row in range(20):
        here = slice(row, row + 1)
        for made, expected in zip(unrolled(runner, hidden[here], tokens[:, here]), together, strict=True):
            assert made[0].equal(expected[row])


def test_a_head_reads_the_vector_of_a_padded_target() -> None:
    own = small(StockBackend)
    size = PaddedSize("0.3M", layers=2, width=320, inner=384)
    padded = HuggingFaceModel(pad_model(build(LlamaConfig(**SIZES), seed=1), size), None, "padded", fastest_backend)
    head = random_redrafter(own, state=48, spread=1.0)
    tokens = torch.tensor([TOKENS])
    found = [unrolled(RedrafterRunner(head, model), hidden_of(model, TOKENS), tokens)[0] for model in (own, padded)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-3)


def test_before_training_it_says_what_the_lm_head_says() -> None:
    model = small(StockBackend)
    head = RedrafterHead(RedrafterConfig(160, 211, state=48, exit_width=160)).requires_grad_(False)
    hidden = hidden_of(model, TOKENS)
    for made in unrolled(RedrafterRunner(head, model), hidden, torch.tensor([TOKENS, TOKENS[::-1]])):
        torch.testing.assert_close(made, model.unembed(hidden), rtol=1e-5, atol=1e-5)
