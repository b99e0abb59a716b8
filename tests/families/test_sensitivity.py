"""The comparison with transformers would notice one wrong position, one lost key or one wrong mask bit.

Each fault is planted once, in the first forward of the answer: if the answer stayed the same, the tests of greedy
equality could not see a broken cache. A wrong position or a lost key changes the answer wherever it is tried; one
mask bit of one row matters only where that row looks, so a few places are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from support.pairwise import by_turns
from support.tiny_models import FAMILIES, PROMPTS, WINDOW, packed, reference
from truedraft import Engine, SamplingParams
from truedraft.core.tree import TreeShape
from truedraft.models import attention
from truedraft.models.attention import Blocked, ChainLayout, ForwardPlan, SegmentLayout, layout_of
from truedraft.models.base import Segment
from truedraft.models.cache import RequestCache

PROMPT, ANSWER = 0, 64
# From the end of the prompt: within every window, and none of them the last token, whose key all rows see anyway.
PLACES = range(2, WINDOW)

target = cache(packed)


def shift_position(monkeypatch: pytest.MonkeyPatch, back: int) -> None:
    """The token `back` from the end of the prompt stands one position too far."""
    make = ForwardPlan.of

    def shifted(segments: Sequence[Segment], device: torch.device, least_rows: int) -> ForwardPlan:
        plan = make(segments, device, least_rows)
        if segments[0].cache.length == 0:
            plan.positions[0, -back] += 1
        return plan

    monkeypatch.setattr(ForwardPlan, "of", shifted)


def drop_key(monkeypatch: pytest.MonkeyPatch, back: int) -> None:
    """The key of that token is never written."""
    write = RequestCache.write

    def forgetful(self: RequestCache, call: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.length == 0:
            keys = keys.clone()
            keys[:, -back] = 0.0
        return write(self, call, keys, values)

    monkeypatch.setattr(RequestCache, "write", forgetful)


def hide_key(monkeypatch: pytest.MonkeyPatch, back: int) -> None:
    """The last token of the prompt does not see that one."""

    def flip(mask: Tensor) -> None:
        assert not mask[-1, -back]
        mask[-1, -back] = True

    flip_in_prompts(monkeypatch, flip)


def reveal_later_key(monkeypatch: pytest.MonkeyPatch, back: int) -> None:
    """That token sees the one after it."""

    def flip(mask: Tensor) -> None:
        assert mask[-back, -back + 1]
        mask[-back, -back + 1] = False

    flip_in_prompts(monkeypatch, flip)


def flip_in_prompts(monkeypatch: pytest.MonkeyPatch, flip: Callable[[Tensor], None]) -> None:
    """Change the mask of hidden keys `[new, keys]` wherever a prompt is read."""

    def flipped(shape: TreeShape, written: int, length: int, *rest: Any) -> SegmentLayout:
        made = layout_of(shape, written, length, *rest)
        if length == 0:
            assert isinstance(made, ChainLayout)
            assert made.blocked is not None
            mask = made.blocked.mask.clone()  # it is shared by all chains of this length
            flip(mask[:, : len(shape)])  # behind the prompt lie key/value positions that nobody sees
            return ChainLayout(Blocked(made.blocked.first, mask))
        return made

    monkeypatch.setattr(attention, "layout_of", flipped)


Fault = Callable[[pytest.MonkeyPatch, int], None]


@pytest.mark.parametrize(("family", "fault"), by_turns(FAMILIES, [shift_position, drop_key]))
def test_a_shifted_position_or_a_lost_key_changes_the_answer(
    family: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert changes(family, fault, 2, monkeypatch)


@pytest.mark.parametrize(("family", "fault"), by_turns(FAMILIES, [hide_key, reveal_later_key]))
def test_a_flipped_mask_bit_changes_the_answer(family: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(changes(family, fault, back, monkeypatch) for back in PLACES)


def changes(family: str, fault: Fault, back: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    with monkeypatch.context() as patch:
        fault(patch, back)
        answer = Engine(target(family)).generate(list(PROMPTS[PROMPT]), SamplingParams(max_tokens=ANSWER))
    return answer.token_ids != list(reference(family)[PROMPT][:ANSWER])
