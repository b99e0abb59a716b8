"""Medusa heads as modules: how they start, and that nothing is shared by mistake."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.head_models import hidden_of
from support.pairwise import pairwise
from support.tiny_models import FAMILIES, stock
from truedraft.errors import OptionError
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.lm_head import LmHead


@pytest.mark.parametrize(
    ("layers", "reads_token", "tied", "family"),
    pairwise([pytest.param(1, False), pytest.param(3, True)], [True, False], FAMILIES),
)
def test_before_training_every_head_says_what_the_lm_head_says(
    family: str, tied: bool, layers: int, reads_token: bool
) -> None:
    module = stock(family)
    lm_head = LmHead.of(module)
    model = HuggingFaceModel(module, None, family)
    heads = MedusaHeads(MedusaConfig(model.head_width, model.vocab_size, 3, layers, tied, reads_token))
    heads.start_from(lm_head.weight)
    embedded = lm_head.embed(torch.tensor([9, 11, 3, 2]))
    hidden = hidden_of(model, [5, 9, 11, 3])
    expected = model.unembed(hidden)
    for logits in heads.logits(hidden, lm_head, lm_head.finish, embedded):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_every_block_and_output_owns_its_weights(tied: bool) -> None:
    heads = MedusaHeads(MedusaConfig(8, 11, heads=4, layers=2, tied=tied))
    addresses = [weight.data_ptr() for weight in heads.parameters()]
    assert len(set(addresses)) == len(addresses) == 4 * (2 * 2 + (not tied))
    hidden = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    before = heads.vectors(hidden)
    heads.heads[2].linears[1].weight.data.normal_(generator=torch.Generator().manual_seed(1))
    changed = (heads.vectors(hidden) != before).flatten(1).any(dim=1)
    assert changed.tolist() == [False, False, True, False]


def test_a_head_by_the_formula() -> None:
    """h + SiLU(W h + b), then the LM head."""
    heads = MedusaHeads(MedusaConfig(4, 5, heads=1))
    linear = heads.heads[0].linears[0]
    generator = torch.Generator().manual_seed(2)
    linear.weight.data.normal_(generator=generator)
    linear.bias.data.normal_(generator=generator)
    h, table = torch.randn(2, 4, generator=generator), torch.randn(5, 4, generator=generator)

    def unembed(vectors: Tensor) -> Tensor:
        return vectors @ table.T

    inner = h @ linear.weight.T + linear.bias
    expected = (h + inner * torch.sigmoid(inner)) @ table.T
    torch.testing.assert_close(heads.logits(h, unembed, lambda logits: logits)[0], expected)


def test_the_token_by_the_formula() -> None:
    """The blocks read h + Wt e / rms(e), the same for all heads."""
    heads = MedusaHeads(MedusaConfig(4, 5, heads=2, reads_token=True))
    generator = torch.Generator().manual_seed(3)
    assert heads.token is not None
    heads.token.weight.data.normal_(generator=generator)
    h, e = torch.randn(3, 4, generator=generator), 1e-2 * torch.randn(3, 4, generator=generator)
    expected = h + (e / e.pow(2).mean(-1, keepdim=True).sqrt()) @ heads.token.weight.T
    torch.testing.assert_close(heads.vectors(h, e), expected.expand(2, -1, -1))
    with pytest.raises(ValueError, match="embedding of the token"):
        heads.vectors(h)


@pytest.mark.parametrize("size", ["width", "vocab_size", "heads", "layers"])
def test_sizes_below_one_are_refused(size: str) -> None:
    with pytest.raises(OptionError, match=size):
        MedusaConfig(**{"width": 4, "vocab_size": 5, size: 0})
