"""An answer behind its own prompt is its trace, and behind another one the target shows what it shows there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.tiny_models import PROMPTS, packed
from truedraft import SamplingParams
from truedraft.drafters.base import Features, NoDrafter
from truedraft.measure.traces import AnswerTrace, trace_after, trace_answers

LAYERS = (0, 1)


def rows_of(trace: AnswerTrace) -> list[torch.Tensor]:
    """All vectors in their order: what entered the LM head, then each layer's."""
    parts = [torch.cat([each.hidden for each in trace.seen if each.hidden is not None])]
    return parts + [torch.cat([each.layers[place] for each in trace.seen]) for place in range(len(trace.layers))]


@pytest.mark.parametrize("rows", ["kept", "last"])
def test_behind_its_own_prompt_it_is_the_trace(rows) -> None:  # type: ignore[no-untyped-def]
    target, watcher = packed("llama"), NoDrafter()
    watcher.features = Features(rows, layers=LAYERS)
    asked = [(str(number), list(each), SamplingParams(max_tokens=9)) for number, each in enumerate(PROMPTS[:2])]
    first, second = trace_answers(target, asked, [watcher])
    for trace in (first, second):
        found = trace_after(target, trace.prompt, trace, watcher.features, LAYERS)
        assert [each.tokens for each in found.seen] == [each.tokens for each in trace.seen]
        for own, expected in zip(rows_of(found), rows_of(trace), strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=2e-4)
        assert replace(found, seen=trace.seen) == trace
    moved = trace_after(target, second.prompt, first, watcher.features, LAYERS)
    assert moved.tokens == first.tokens and moved.prompt == second.prompt
    assert moved.remaining(0) == first.remaining(0)
    assert not torch.allclose(rows_of(moved)[0][-1], rows_of(first)[0][-1], atol=1e-2)


def test_a_drafter_that_sees_tokens_alone_needs_no_forward() -> None:
    trace = AnswerTrace("x", (5, 6), (7, 8, 9), SamplingParams(), 0, 20, False, ())
    found = trace_after(None, (1, 2, 3), trace, None)  # type: ignore[arg-type]
    assert [each.tokens for each in found.seen] == [(7,), (8,), (9,)] and found.limit == 21
