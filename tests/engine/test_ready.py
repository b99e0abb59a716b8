"""What steps will run is recorded beforehand; a fake recorder stands for CUDA graphs."""

from __future__ import annotations

import doctest
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kinds.eagle.test_eagle import Replayed, head
from support.answers import fixed
from support.backends import HostRecorder, graph_backend
from support.layer_heads import target
from support.records import watched
from support.tiny_models import VOCAB, noisy_stock, packed, stock
from truedraft import Engine, SamplingParams
from truedraft.core import transfers
from truedraft.core.budget import Budget
from truedraft.core.tree import chain_shape
from truedraft.drafters import DraftModel, PromptLookup
from truedraft.engine import ready
from truedraft.errors import CacheError, OptionError, TruedraftError
from truedraft.models.backends.graphs.replay import MOST_RECORDINGS
from truedraft.models.base import Segment
from truedraft.models.huggingface import HuggingFaceModel

LONG = [[place * step % VOCAB for place in range(90)] for step in (3, 5, 7)]
"""Prompts of more than the 64 tokens up to which forwards are recorded."""


def recorded(module: Any) -> HuggingFaceModel:
    return HuggingFaceModel(module, None, "graphs", lambda model: graph_backend(model, HostRecorder()))


def drafting(prefix_cache_bytes: int | None = None, **options: Any) -> Engine:
    drafter = DraftModel(recorded(noisy_stock("llama", 0.1)), **options)
    return fixed(recorded(stock("llama")), drafter, max_batch=2, entropy=3, prefix_cache_bytes=prefix_cache_bytes)


def test_the_examples_of_its_docstrings() -> None:
    assert doctest.testmod(ready).failed == 0


@pytest.mark.parametrize("options", [{"num_speculative_tokens": 3}, {"branching": (2, 2, 1)}], ids=["chain", "tree"])
def test_no_answer_waits_for_a_recording_once_all_is_ready(options: dict[str, Any]) -> None:
    engine = drafting(**options)
    engine.make_ready(256)
    records = watched(engine)
    for temperature in (0.0, 1.0):
        engine.generate(LONG, SamplingParams(max_tokens=40, temperature=temperature))
    assert any(len(record.requests) == 2 and record.rows > 2 for record in records)
    # Requests that bring different numbers of rows, as at the end of an answer, are as many kinds as they please.
    assert not [each for each in records if not each.settled and len({one.rows for one in each.requests}) == 1]


def test_a_head_that_reads_pairs_is_made_ready_as_its_target_is() -> None:
    drafter = Replayed(head())
    engine = fixed(target("graphs"), drafter, max_batch=1)
    engine.make_ready(256)
    before = engine.target.warmups, drafter.warmups
    for temperature in (0.0, 1.0):
        engine.generate(LONG, SamplingParams(max_tokens=40, temperature=temperature))
    assert (engine.target.warmups, drafter.warmups) == before
    assert drafter._running[0].pool.in_use == 0


def test_nothing_of_it_is_noticed_by_requests() -> None:
    """Noise, counters, listeners, caches and what is kept of prompts are as in an engine that was not made ready."""
    params = SamplingParams(max_tokens=24, temperature=1.0)
    expected = drafting(prefix_cache_bytes=1 << 20).generate(LONG, params)
    engine = drafting(prefix_cache_bytes=1 << 20)
    records, told = watched(engine), list[tuple[float, str]]()
    engine.make_ready(512, lambda *each: told.append(each))
    draft = engine.drafter.model
    assert draft is not None
    assert not records
    assert engine.target.pool.in_use == draft.pool.in_use == 0
    assert [store.n_bytes for store in engine._sharing.stores] == [0, 0]
    assert engine.check_idle() == []
    assert [each for each, _ in told] == sorted(each for each, _ in told)
    assert 0.0 < told[0][0] < told[-1][0] == 1.0
    assert {label for _, label in told} == {"graphs", "draft"}
    answers = engine.generate(LONG, params)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert engine.shared_tokens == 0


def test_what_is_ready_is_not_made_ready_again() -> None:
    engine = drafting()
    engine.make_ready(256)
    assert engine.drafter.model is not None
    before = engine.target.warmups, engine.drafter.model.warmups
    engine.make_ready(256)
    assert (engine.target.warmups, engine.drafter.model.warmups) == before


def test_where_nothing_is_recorded_nothing_is_run_but_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafter = packed("llama"), PromptLookup()
    rows: list[int] = []
    forward = model.forward

    def counted(segments: Sequence[Any]) -> Any:
        rows.append(sum(len(each.tokens) for each in segments))
        return forward(segments)

    monkeypatch.setattr(model, "forward", counted)
    monkeypatch.setattr(drafter, "begin", lambda request: pytest.fail("it is asked to draft"))
    fixed(model, drafter).make_ready()
    assert rows == [1]


def test_a_drafter_that_fails_is_told_of_and_does_not_stop_it(caplog: pytest.LogCaptureFixture) -> None:
    engine = drafting()

    def fail(*_: Any) -> Any:
        raise ValueError("broken")

    engine.drafter.propose = fail  # type: ignore[method-assign]
    engine.make_ready(256)
    assert "was not made ready: broken" in caplog.text
    assert engine.target.pool.in_use == engine.drafter.model.pool.in_use == 0  # type: ignore[union-attr]


def test_shapes_that_have_no_room_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(recorded(stock("llama")), max_batch=2)
    forward = engine.target.forward

    def short(segments: Sequence[Any]) -> Any:
        if len(segments) > 1:
            raise CacheError("no pages are left")
        return forward(segments)

    monkeypatch.setattr(engine.target, "forward", short)
    engine.make_ready(256)
    assert "2 requests of 1 rows have no room: no pages are left" in caplog.text
    assert engine.target.pool.in_use == 0
    assert [bucket.tokens for bucket, _ in engine.target._backend._paged.recordings.shapes] == [64, 32, 16, 8, 4, 2, 1]  # type: ignore[attr-defined]


def test_it_is_refused_within_a_step_and_for_no_tokens() -> None:
    engine = drafting()
    with pytest.raises(OptionError, match="tokens"):
        engine.make_ready(0)
    engine.listeners.append(lambda record: engine.make_ready(256))
    with pytest.raises(TruedraftError, match="inside a step"):
        engine.generate(LONG[0], SamplingParams(max_tokens=2))


def test_few_requests_with_long_drafts_and_many_with_short_ones_are_ready() -> None:
    steps = ready.step_shapes([Budget(8), Budget(3, 4, 20)], 32)
    alike = [step for step in steps if len(set(step)) == 1]
    assert {len(step) for step in alike if len(step[0]) == 1} == {1, 2, 4, 8, 16, 32}
    assert {len(step[0]) for step in alike if not step[0].is_chain and len(step) == 1} == {4, 8, 16, 21}
    assert {len(step[0]) for step in alike if step[0].is_chain and len(step) == 32} == {1, 2, 4}
    sizes = [sum(map(len, step)) for step in steps]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(map(len, alike[0])) == 128


def test_parts_of_prompts_stand_beside_trees_so_that_each_kind_of_kernel_is_there() -> None:
    """By tiles of rows and by words of nodes; the last ones are not recorded."""
    mixed = [step for step in ready.step_shapes([Budget(3, 4, 99)], 8) if len(set(step)) > 1]
    found = {(ready._bucket(step, 512).tile, ready._bucket(step, 512).words, len(step[1])) for step in mixed}
    assert found == {(4, 1, 4), (16, 1, 16), (64, 1, 64), (64, 1, 65), (64, 2, 65)}
    assert all(step[1].is_chain and not step[0].is_chain for step in mixed)
    assert all(len(set(step)) == 1 for limits in ([], [Budget(8)]) for step in ready.step_shapes(limits, 8))
    assert all(len(step) == 1 for step in ready.step_shapes([Budget(3, 4, 99)], 1))


def test_no_more_is_run_than_is_kept_and_short_texts_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, contexts = ready.step_shapes([Budget(8), Budget(3, 4, 20)], 64), [256, 4096, 1024]
    every = ready.recorded_steps(steps, contexts)
    buckets = {ready._bucket(step, context) for context in contexts for step in steps}
    assert len(every) == len(buckets) == len({ready._bucket(step, context) for context, step in every})
    monkeypatch.setattr(ready, "MOST_KEPT", 50)
    assert ready.recorded_steps(steps, contexts) == every[:50]
    assert (4096, (chain_shape(1),)) in every[:50] and (4096, (chain_shape(1),) * 64) not in every[:50]
    monkeypatch.undo()
    assert MOST_RECORDINGS == ready.MOST_KEPT


def test_recordings_that_were_rehearsed_do_not_push_each_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deep draft is more of them than are kept: all that were made are there once more is asked for."""
    monkeypatch.setattr(transfers, "waits", lambda device: True)
    monkeypatch.setattr(ready, "MOST_KEPT", 26)
    target, draft = packed("llama"), recorded(noisy_stock("llama", 0.1))
    assert draft.pool is not None
    draft.pool.reserve(1 << 22, 0)  # where pages move, recordings are made again
    draft._backend._paged.recordings._most = 26  # type: ignore[attr-defined]
    drafter, counts = DraftModel(draft, 3), list[int]()
    draft.forward([Segment(cache := draft.new_cache(), torch.zeros(1, dtype=torch.int64), chain_shape(1), (0,))])
    draft.release_cache(cache)
    for _ in range(2):
        ready.make_ready(target, [drafter], None, 8, 256, lambda share, label: None)
        counts.append(draft.warmups)
    assert counts[0] == counts[1] > 26


def test_after_a_mixed_step_was_rehearsed_no_kind_of_forward_is_new() -> None:
    """Where attention takes segments of any lengths together, as its kernel does."""
    engine = drafting(branching=(2, 2, 1))
    shapes: list[tuple[int, int]] = []
    forward = engine.target.forward

    def watched(segments: Sequence[Any]) -> Any:
        bucket = ready._bucket([each.shape for each in segments], 256)  # type: ignore[arg-type]
        shapes.append((bucket.tile, bucket.words))
        return forward(segments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.target, "forward", watched)
        engine.make_ready(256)
        known = set(shapes)
        shapes.clear()
        first = engine.submit(LONG[1][:3], SamplingParams(max_tokens=60, ignore_eos=True))
        for prompt in (LONG[0], LONG[2][:12]):
            engine.step()
            second = engine.submit(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
            while not second.closed:
                engine.step()
        engine.cancel(first)
    assert {(64, 1), (16, 1)} <= set(shapes) <= known
