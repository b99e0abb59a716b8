"""What rounding is measured to be: nothing where rows are invariant, its size where they are not, never a fault's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from certify.planted_faults import markov, row_noise, with_logits, wrong_mask, wrong_positions
from support.faulty_parts import keeps_rejected
from support.tiny_models import PROMPTS, packed
from truedraft import SamplingParams
from truedraft.certify.rounding import (
    ALONE,
    Feeding,
    Rounding,
    drafted_feedings,
    fed_logits,
    measure_rounding,
    plain_feedings,
)
from truedraft.core.budget import NO_DRAFT, Budget
from truedraft.models.base import LanguageModel, Segment

TREE = Budget(depth=3, width=2, nodes=6)
PARAMS = SamplingParams(temperature=1.0)
TEXTS = [[1, 5, 2, 7, 0, 3, 3, 6, 1, 4, 4, 2, 0, 1], [6, 2, 5, 5, 1, 7, 7, 0, 2, 3]]


def measured(target: LanguageModel, limits: Budget = TREE) -> Rounding:
    return measure_rounding(target, TEXTS, 3, PARAMS, limits)


def test_every_shape_gives_the_rows_of_the_text() -> None:
    target, text = markov(0), TEXTS[0]
    expected = torch.stack([target.probs_after(text[:end]).log() for end in range(4, len(text))])
    for feeding in (ALONE, *plain_feedings(TREE, 3), *drafted_feedings(TREE, 3), Feeding("deep", 5, 3, (2, 9))):
        assert torch.equal(fed_logits(target, text, 4, feeding), expected), feeding


def test_invariant_rows_have_no_rounding() -> None:
    found = measured(markov(0))
    assert found.bitwise and found.is_rounding and found.positions == len(TEXTS[0]) + len(TEXTS[1]) - 2
    assert found.largest_difference == found.mean_total_variation == found.largest_total_variation == 0.0


def test_a_llama_in_bfloat16_is_invariant_and_in_float32_moves_by_its_last_places() -> None:
    texts = [[*PROMPTS[0], *PROMPTS[3]]]
    found = {
        dtype: measure_rounding(packed("llama", dtype=dtype), texts, 3, PARAMS, TREE, positions=12)
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert found[torch.bfloat16].bitwise
    assert found[torch.float32].is_rounding
    assert found[torch.float32].largest_difference < 1e-4
    assert found[torch.float32].mean_total_variation < 1e-5


def test_noise_that_depends_on_rows_is_measured() -> None:
    """Uniform noise of 1e-3 moves a difference of two shapes by up to 2e-3, and a distribution by about half of that at
    most."""
    found = measured(row_noise(markov(0), 1e-3))
    assert not found.bitwise and found.is_rounding
    assert 1e-3 < found.largest_difference <= 2.001e-3
    assert 1e-5 < found.mean_total_variation <= found.largest_total_variation <= 2e-3


def test_noise_beyond_what_rounding_does_is_not_blamed_on_rounding() -> None:
    found = measured(row_noise(markov(0), 0.1))
    assert not found.is_rounding and found.largest_difference == found.mean_total_variation == 0.0
    assert "more than rounding in float32 does" in found.describe()


@pytest.mark.parametrize("noise", [0.0, 1e-3])
@pytest.mark.parametrize("fault", [wrong_mask, keeps_rejected])
def test_a_fault_of_drafted_rows_does_not_pass_for_rounding(
    fault: Callable[[LanguageModel], LanguageModel], noise: float
) -> None:
    found = measured(row_noise(fault(markov(0)), noise))
    assert not found.is_rounding and found.drafted_difference > 0.5
    assert found.largest_difference <= 2.001 * noise, "what may be blamed on rounding is what plain decoding shows"


def test_wrong_positions_do_not_pass_for_rounding() -> None:
    texts = [[*PROMPTS[0], *PROMPTS[3]]]
    found = measure_rounding(wrong_positions(packed("llama")), texts, 2, PARAMS, TREE, positions=12)
    assert not found.is_rounding and found.drafted_difference > 0.01 > 100 * found.plain_difference


def test_nothing_is_drafted_within_a_zero_budget() -> None:
    assert measured(markov(0), NO_DRAFT).drafted == ()


def test_texts_of_one_token_say_nothing() -> None:
    with pytest.raises(ValueError, match="2 tokens"):
        measure_rounding(markov(0), [[3]], 2, PARAMS, TREE)


def test_what_a_rejected_draft_moves_is_measured() -> None:
    """Where experts are chosen for a whole forward, a row may move by what stands behind it, also when all of that is
    rejected: a shape whose drafts are all of the text does not show how far."""

    def moved(segments: Sequence[Segment], logits: Tensor) -> Tensor:
        behind = [int(each.tokens[1]) if 1 < len(each.tokens) <= 4 else 0 for each in segments]
        rows = [1e-5 * token * (row == 0) for token, each in zip(behind, segments, strict=True) for row in each.rows]
        return logits + torch.tensor(rows)[:, None] * torch.arange(logits.shape[1])

    found = measured(with_logits(markov(0), moved), Budget(depth=3, width=1, nodes=3))
    assert found.plain_difference == 0.0
    spreads = {spread.shape: spread for spread in found.drafted}
    assert spreads["chains of 3, all rejected"].different_rows > 0
    assert spreads["chains of 3, all rejected"].largest_logit_difference > 1e-5
