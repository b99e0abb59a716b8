"""Guesses under coupled noise: the depth and weight of each head's noise, and their worth against blind guesses."""

from __future__ import annotations

import pytest
import torch

from support.coupled_choice import coupled_choice
from truedraft.core import probs, transfers
from truedraft.core.noise import KeyedNoise, gumbel_of, signed
from truedraft.core.top_k import TopK
from truedraft.kinds.medusa import guess_trees
from truedraft.kinds.medusa.guess_trees import coupled_guesses, keyed_guesses, noise_weight

VOCAB = 50


def logits_of(depth: int, rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(depth, rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def noises(rows: int) -> list[KeyedNoise]:
    return [KeyedNoise(seed, 7, 3) for seed in range(rows)]


def test_the_first_guesses_are_the_targets_choices_where_heads_know_its_distribution() -> None:
    """At temperature 1, head k has the noise of the token at depth k of the step: then no guess is wrong."""
    logits = logits_of(3, 40)
    made = coupled_guesses(logits, [1.0] * 40, noises(40), 1).ids[..., 0]
    for row, noise in enumerate(noises(40)):
        for head in range(3):
            gumbel = noise.gumbel(head, VOCAB, logits.device)
            assert made[head, row] == coupled_choice(logits[head, row].double().softmax(-1)[None], gumbel)[0]


def test_a_row_depends_on_itself_alone_and_the_logits_stay() -> None:
    logits = logits_of(2, 5).bfloat16()  # ties and near ties
    before = logits.clone()
    temperatures = [0.3, 1.0, 0.7, 2.0, 1.0]
    together = coupled_guesses(logits, temperatures, noises(5), 9)
    for row in range(5):
        alone = coupled_guesses(logits[:, row : row + 1], temperatures[row : row + 1], noises(5)[row : row + 1], 9)
        assert alone.ids[:, 0].equal(together.ids[:, row])
        assert alone.log_probs[:, 0].equal(together.log_probs[:, row])
    assert logits.equal(before)


def test_nothing_is_read_from_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "waits", lambda device: True)
    monkeypatch.setattr(transfers, "fetch", lambda tensors: pytest.fail("the host waited"))
    coupled_guesses(logits_of(2, 3), [1.0] * 3, noises(3), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_by_keys_the_guesses_are_the_same(dtype: torch.dtype) -> None:
    """To the bit: so what is recorded, which takes keys as an input, guesses as what is not."""
    logits, temperatures = logits_of(3, 5).to(dtype), [0.3, 1.0, 0.7, 2.0, 1.0]
    expected = coupled_guesses(logits, temperatures, noises(5), 9)
    keys = torch.tensor([[signed(own.gumbel_key(head)) for head in range(3)] for own in noises(5)])
    weights = torch.tensor([noise_weight(each) for each in temperatures], dtype=torch.float64)
    made = keyed_guesses(logits, weights, keys, 9)
    assert made.ids.equal(expected.ids)
    assert made.log_probs.equal(expected.log_probs)


def test_the_noise_of_few_rows_is_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 requests and a vocabulary of 150,000 that of all would be gigabytes."""
    rows: list[int] = []
    logits, keys = logits_of(3, 8), torch.arange(24).view(8, 3)
    expected = keyed_guesses(logits, torch.ones(8, dtype=torch.float64), keys, 4)
    monkeypatch.setattr(probs, "_AT_ONCE", 5 * VOCAB)
    monkeypatch.setattr(
        guess_trees, "gumbel_of", lambda key, tokens: (rows.append(len(key)), gumbel_of(key, tokens))[1]
    )
    made = keyed_guesses(logits, torch.ones(8, dtype=torch.float64), keys, 4)
    assert rows == [5, 5, 5, 5, 4]
    assert made.ids.equal(expected.ids) and made.log_probs.equal(expected.log_probs)


def test_the_weight_is_that_of_the_target_at_temperature_one_and_vanishes_with_it() -> None:
    assert [noise_weight(t) for t in (1.0, 2.0, 0.5, 0.0)] == [1.0, 2.0, 0.25, 0.0]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_they_are_right_more_often_than_guesses_that_do_not_hear_the_noise(temperature: float) -> None:
    """Target's distributions are the heads' with errors; keys and seeds are fixed, so the counts are too."""
    rows, heads = 400, logits_of(1, 400)
    target = heads[0].double() + torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1))
    probs = (target / temperature).softmax(dim=-1)
    shared = [noise.gumbel(0, VOCAB, probs.device) for noise in noises(rows)]
    chosen = coupled_choice(probs, torch.stack(shared))
    hearing = coupled_guesses(heads, [temperature] * rows, noises(rows), 4).ids[0]
    blind = TopK.of(heads[0], 4).ids
    hits = [(guess == chosen[:, None]).any(dim=-1).sum().item() for guess in (hearing, blind)]
    assert hits[0] > 1.1 * hits[1]
