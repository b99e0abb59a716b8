"""Forwards and functions are recorded once for each shape that comes back, and replayed at addresses that stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from support.backends import HostRecorder, graph_backend
from support.recorded_heads import Recordable
from support.tiny_models import VOCAB, stock
from truedraft.core import transfers
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.models import HuggingFaceModel, Segment
from truedraft.models.backends.graphs import GraphBackend
from truedraft.models.backends.graphs.batch import Bucket, Inputs, PagedBatch, PagedSegment, load_in_a_row
from truedraft.models.backends.graphs.replay import Layers, Outputs, RecordedFunction, Recordings
from truedraft.models.cache import PageTable, RequestCache

CPU = torch.device("cpu")
TREE = TreeShape((-1, 0, 0, 1, 2, 2, 4))


class Fixture:
    """A small model whose forwards are recorded by a `HostRecorder`."""

    def __init__(self, family: str = "llama") -> None:
        self.recorder = HostRecorder()
        self.backends: list[GraphBackend] = []

        def made(module: object) -> GraphBackend:
            self.backends.append(graph_backend(module, self.recorder))  # type: ignore[arg-type]
            return self.backends[-1]

        self.model = HuggingFaceModel(stock(family), None, family, made)
        self._generator = torch.Generator().manual_seed(3)

    @property
    def recordings(self) -> Recordings[Any]:
        return self.backends[0]._paged.recordings

    @property
    def buckets(self) -> list[Bucket]:
        return [bucket for bucket, _ in self.recordings.shapes]  # type: ignore[misc]

    def drawn(self, count: int) -> Tensor:
        return torch.randint(VOCAB, (count,), generator=self._generator)

    def chain(self, cache: object, count: int) -> Segment:
        return Segment(cache, self.drawn(count), chain_shape(count), range(count))  # type: ignore[arg-type]

    def filled(self, count: int) -> RequestCache:
        """A cache with `count` committed tokens, fed one by one (so that nothing is recorded for its sake)."""
        cache = self.model.new_cache()
        self.model.forward([self.chain(cache, count)])
        cache.commit(range(count))
        return cache


def test_a_bucket_is_recorded_when_it_comes_back_and_replayed_from_then_on() -> None:
    fixture = Fixture()
    cache = fixture.filled(9)
    for steps, recordings in ((1, 0), (2, 1), (3, 1), (4, 1)):
        fixture.model.forward([fixture.chain(cache, 1)])
        cache.commit((0,))
        assert len(fixture.recorder.made) == recordings, steps
    assert fixture.recorder.made[0].replays == 3
    assert fixture.buckets == [Bucket(1, 1, 1, 256, 0, 1)]


def test_a_forward_that_shows_layers_is_recorded_apart() -> None:
    fixture = Fixture()
    cache = fixture.filled(9)
    for layers, recordings in (((), 0), ((0,), 0), ((0,), 1), ((), 2), ((1, 0), 2), ((0,), 2), ((1, 0), 3)):
        output = fixture.model.forward_showing([fixture.chain(cache, 1)], layers)
        cache.commit((0,))
        assert (len(output.layers), len(fixture.recorder.made)) == (len(layers), recordings)
    assert fixture.buckets == 3 * [Bucket(1, 1, 1, 256, 0, 1)]


def test_recordings_share_memory_for_outputs_of_one_shape() -> None:
    """Each would keep its own for good otherwise."""
    fixture = Fixture()
    first, second = fixture.filled(9), fixture.filled(300)
    for _ in range(2):
        for cache in (first, second):
            fixture.model.forward([fixture.chain(cache, 2)])
    assert fixture.buckets == [Bucket(1, 2, 2, 256, 0, 2), Bucket(1, 2, 2, 512, 0, 2)]
    one, other = (recording.outputs for recording in fixture.recorder.made)
    assert [each.data_ptr() for each in one] == [each.data_ptr() for each in other]


def test_shapes_share_recordings_as_far_as_they_are_padded_alike() -> None:
    """3 and 4 tokens do, a tree does not, and two requests do not."""
    fixture = Fixture()
    first, second = fixture.filled(9), fixture.filled(5)
    model = fixture.model

    def tree(cache: RequestCache) -> Segment:
        return Segment(cache, fixture.drawn(7), TREE, range(7))

    for _ in range(2):
        for count in (3, 4):
            model.forward([fixture.chain(first, count)])
        model.forward([tree(first)])
        model.forward([fixture.chain(first, 2), tree(second)])
        model.forward([tree(first), fixture.chain(second, 5)])
    assert set(fixture.buckets) == {
        Bucket(1, 4, 4, 256, 0, 4),
        Bucket(1, 8, 8, 256, 1, 8),
        Bucket(2, 8, 16, 256, 1, 16),
    }
    assert [recording.replays for recording in fixture.recorder.made] == [3, 3, 1]


def test_replays_compute_from_new_numbers() -> None:
    """Recorded and plain forwards answer alike at every step; what was returned is not overwritten."""
    recorded, plain = Fixture(), Fixture()
    plain.recordings._recorder = None
    kept: list[tuple[Tensor, Tensor]] = []
    caches = {fixture: fixture.filled(6) for fixture in (recorded, plain)}
    for step in range(12):
        outputs = []
        for fixture, cache in caches.items():
            shape = TREE if step % 3 == 0 else chain_shape(7)
            outputs.append(fixture.model.forward([Segment(cache, fixture.drawn(7), shape, (0, 2, 6))]))
            cache.commit((0, 2, 5) if step % 3 == 0 else (0, 1))
        assert outputs[0].logits.shape == (3, VOCAB)
        assert outputs[0].logits.equal(outputs[1].logits)
        assert outputs[0].hidden.equal(outputs[1].hidden)
        kept.append((outputs[0].logits, outputs[1].logits))
    assert all(ours.equal(theirs) for ours, theirs in kept)
    assert len(recorded.recorder.made) == 2


def test_addresses_stay_between_replays() -> None:
    fixture = Fixture("mistral")
    backend, cache = fixture.backends[0], fixture.filled(9)
    seen: list[set[int]] = []
    forward = backend._paged._forward

    def watched(inputs: Inputs, layers: Layers) -> Outputs:
        pointers = {each.data_ptr() for each in numbers_of(inputs)}
        pointers |= {rows.data_ptr() for call in range(2) for rows in backend.pages.rows(call)}
        pointers.add(backend._rotary.table.data_ptr())
        pointers |= {layer.qkv.weight.data_ptr() for layer in backend._layers}
        seen.append(pointers)
        return forward(inputs, layers)

    backend._paged._forward = watched  # type: ignore[method-assign]
    fixture.model.forward([fixture.chain(cache, 4)])
    seen.clear()  # the first of a bucket runs from inputs of its own
    outputs = set()
    for count in (4, 3, 4, 3, 3):
        fixture.model.forward([fixture.chain(cache, count)])
        cache.commit(range(count - 1))
        outputs.add(tuple(each.data_ptr() for each in fixture.recorder.made[0].outputs))
    assert len(seen) == 6
    assert all(pointers == seen[0] for pointers in seen)
    assert len(outputs) == 1


def numbers_of(inputs: Inputs) -> Iterator[Tensor]:
    for field in fields(inputs.numbers):
        yield getattr(inputs.numbers, field.name)


def test_when_the_pages_move_all_recordings_are_void() -> None:
    fixture = Fixture()
    cache = fixture.filled(9)
    for _ in range(2):
        fixture.model.forward([fixture.chain(cache, 1)])
    assert len(fixture.buckets) == 1
    kept = [fixture.filled(64) for _ in range(15)]
    assert fixture.recorder.forgotten == 0
    kept.append(fixture.filled(64))
    assert fixture.recorder.forgotten == 1
    assert fixture.buckets == []
    made = len(fixture.recorder.made)
    for _ in range(2):
        fixture.model.forward([fixture.chain(cache, 1)])
    assert len(fixture.recorder.made) == made + 1
    assert len(fixture.buckets) == 1


class Watch(Recordable):
    """Also refuses numbers of another type, which may be copies."""

    refused = Recordable.refused | {"_to_copy"}


def placed(*segments: Segment) -> list[PagedSegment]:
    parts = []
    for segment in segments:
        segment.cache.reserve(len(segment.shape), segment.written)
        assert isinstance(segment.cache.storage, PageTable)
        parts.append(PagedSegment(segment, segment.cache.storage))
    return parts


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("shape", [chain_shape(7), TREE], ids=["chain", "tree"])
@torch.inference_mode()
def test_a_forward_waits_for_nothing_and_depends_on_its_bucket_alone(family: str, shape: TreeShape) -> None:
    """The same operations, whatever the numbers; none of them brings a number to the host."""
    fixture = Fixture(family)
    backend = fixture.backends[0]
    short, long = fixture.filled(2), fixture.filled(60)
    operations = []
    for first, second in ((short, long), (long, short)):
        parts = placed(Segment(first, fixture.drawn(7), shape, (3,)), fixture.chain(second, 3 + len(operations)))
        batch = PagedBatch.recorded(parts, backend._patterns)
        (inputs,) = Inputs.in_a_row([batch.bucket], len(backend._patterns), CPU)
        load_in_a_row([inputs], [batch])
        with Watch() as watch:
            backend._paged._forward(inputs, ())
        operations.append(watch.operations)
    assert len(operations[0]) > 20
    assert operations[0] == operations[1]


@pytest.mark.parametrize("known", [True, False])
@torch.inference_mode()
def test_loading_copies_the_numbers_and_tokens_that_the_host_does_not_know(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are where they belong in either case."""
    monkeypatch.setattr(transfers, "waits", lambda device: not known)
    fixture = Fixture("mistral")
    backend = fixture.backends[0]
    caches = [fixture.filled(count) for count in (2, 12)]
    texts = [fixture.drawn(7) for _ in caches]
    batch = PagedBatch.recorded(
        placed(*(Segment(cache, text, TREE, range(7)) for cache, text in zip(caches, texts, strict=True))),
        backend._patterns,
    )
    (inputs,) = Inputs.in_a_row([batch.bucket], len(backend._patterns), CPU)
    with Watch() as watch:
        load_in_a_row([inputs], [batch])
    moving = [name for name, _ in watch.operations if name in ("copy_", "cat", "index_copy_", "index_put_", "fill_")]
    assert moving == (["cat", "copy_"] if known else ["cat", "copy_", "copy_"])
    assert inputs.numbers.tokens[:14].equal(torch.cat(texts))


def test_what_was_merged_is_no_second_copy() -> None:
    """The layers' own weights are views of the merged ones, and still right."""
    module = stock("qwen3")
    before = {name: weight.clone() for name, weight in module.named_parameters()}
    backend = graph_backend(module)
    for name, weight in module.named_parameters():
        assert weight.equal(before[name])
    merged = {layer.qkv.weight.untyped_storage().data_ptr() for layer in backend._layers}
    merged |= {layer.gate_up.weight.untyped_storage().data_ptr() for layer in backend._layers}
    blocks = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in module.parameters()}
    assert merged <= set(blocks)
    assert sum(blocks.values()) == sum(weight.nbytes for weight in before.values())


class Recorded:
    """x * factor + y, recorded; notes what the function was given."""

    def __init__(self, most: int = 64, *, recorded: bool = True) -> None:
        self.recorder = HostRecorder()
        self.given: list[tuple[Tensor, Tensor]] = []
        self.function = RecordedFunction(self._sum, self.recorder if recorded else None, most)

    def _sum(self, x: Tensor, y: Tensor, factor: int) -> tuple[Tensor, ...]:
        self.given.append((x, y))
        return x * factor + y[:, None], y

    def call(self, rows: int, factor: int = 2, width: int = 3) -> tuple[Tensor, ...]:
        x, y = torch.randn(rows, width), torch.randn(rows)
        found = self.function((x, y), factor)
        assert found[0].equal(x * factor + y[:, None])
        assert found[1].equal(y)
        return found


def test_numbers_of_rows_share_recordings_up_to_a_power_of_two() -> None:
    fixture = Recorded()
    for rows in (1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 7, 8):
        fixture.call(rows)
    assert [each.outputs[0].shape[0] for each in fixture.recorder.made] == [4, 1, 2, 8]
    assert fixture.function.warmups == 8


def test_other_numbers_and_widths_are_recorded_apart() -> None:
    fixture = Recorded()
    for factor, width in ((2, 3), (5, 3), (2, 4), (2, 3), (5, 3), (2, 4), (5, 3)):
        fixture.call(2, factor, width)
    assert [each.replays for each in fixture.recorder.made] == [1, 2, 1]


def test_addresses_stay_and_what_was_returned_is_not_overwritten() -> None:
    fixture = Recorded()
    for rows in (4, 4, 3, 4, 3):
        fixture.call(rows)
    first = {tuple(each.data_ptr() for each in given) for given in fixture.given[1:]}  # the first has its own
    assert len(first) == 1
    kept = [fixture.call(4) for _ in range(3)]
    copies = [tuple(each.clone() for each in found) for found in kept]
    fixture.call(4)
    assert all(a.equal(b) for found, copy in zip(kept, copies, strict=True) for a, b in zip(found, copy, strict=True))


def test_of_too_many_recordings_the_one_unused_longest_goes() -> None:
    fixture = Recorded(most=2)
    for rows in (1, 1, 2, 2, 1, 4, 4, 1):
        fixture.call(rows)
    assert len(fixture.recorder.made) == 3
    fixture.call(2)
    assert len(fixture.recorder.made) == 4
    assert fixture.function.warmups == 7


def test_without_a_recorder_the_function_gets_the_very_arguments() -> None:
    fixture = Recorded(recorded=False)
    x, y = torch.randn(3, 2), torch.randn(3)
    found = fixture.function((x, y), 4)
    assert fixture.given[0][0] is x
    assert found[1] is y
    assert (fixture.function.warmups, fixture.recorder.made) == (0, [])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("not permitted")])
def test_what_cannot_be_recorded_is_called_as_it_is(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = Recorded()
    fixture.call(2)
    tried = []

    def broken(given: object) -> None:
        tried.append(given)
        raise error

    monkeypatch.setattr(fixture.recorder, "record", broken)
    for _ in range(2):
        fixture.call(2)
    assert len(tried) == 1 and fixture.recorder.made == []
