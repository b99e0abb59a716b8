"""In bfloat16 a row's logits do not depend, to the last bit, on what shares its forward (docs/lossless.md).

Without it, "the same tokens with and without speculation" would fail at every near tie. It holds for the model's own
modules and for the fast paths alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from support.backends import fused_backend, native_backend
from support.tiny_models import build, llama
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.machine import has_bfloat16
from truedraft.models import HuggingFaceModel, Segment
from truedraft.models.backends.base import BackendMaker
from truedraft.models.backends.native.build import built
from truedraft.models.backends.stock import StockBackend
from truedraft.models.cache import Buffers, RequestCache

VOCAB = 2048
PATH = 8
CONTEXTS = (5, 40, 130, 301, 511)
# Where products over keys change their length (`cache.key_span`): with 8 tokens behind them, these lie on both sides.
BORDERS = (505, 512, 520, 1020, 1085)
BACKENDS: dict[str, BackendMaker] = {"stock": StockBackend, "fused": fused_backend, "native": native_backend}
IN_CODES = ", keys and values in codes"


def random_llama(kv_heads: int, backend: BackendMaker) -> HuggingFaceModel:
    """4 layers of width 384."""
    config = llama(
        vocab_size=VOCAB, hidden_size=384, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=kv_heads, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    return HuggingFaceModel(build(config, kv_heads, 0.06, torch.bfloat16), None, "random", backend)


@dataclass
class World:
    """A context in a model's cache, 8 tokens behind it, and their logits when they come all at once."""

    model: HuggingFaceModel
    context: Tensor
    path: Tensor
    cache: RequestCache
    logits: Tensor
    generator: torch.Generator
    trees: int = 6

    def tokens(self, count: int) -> Tensor:
        return torch.randint(VOCAB, (count,), generator=self.generator)

    def prefilled(self, ids: Tensor, *cuts: int) -> RequestCache:
        cache = self.model.new_cache()
        for part in ids.tensor_split(cuts):
            self.model.forward([Segment(cache, part, chain_shape(len(part)), ())])
            cache.commit(range(len(part)))
        return cache

    def at_once(self, cache: RequestCache) -> Tensor:
        return self.model.forward([Segment(cache, self.path, chain_shape(PATH), range(PATH))]).logits

    def random_tree(self, siblings: int) -> tuple[Tensor, TreeShape, list[int]]:
        """A tree that holds the path; on each level up to `siblings` others, before the path's node and behind it."""
        tokens, parents = [int(self.path[0])], [-1]
        nodes, level = [0], [0]
        for token in self.path[1:].tolist():
            others = int(torch.randint(siblings + 1, (), generator=self.generator))
            place = int(torch.randint(others + 1, (), generator=self.generator))
            first = len(tokens)
            for number in range(others + 1):
                drawn = int(self.tokens(1))
                tokens.append(token if number == place else drawn)
                parents.append(nodes[-1] if number == place else level[drawn % len(level)])
            nodes.append(first + place)
            level = list(range(first, first + others + 1))
        return torch.tensor(tokens), TreeShape(tuple(parents)), nodes


@pytest.fixture(scope="module", params=[*BACKENDS, f"fused{IN_CODES}", f"native{IN_CODES}"])
def named(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def backend(named: str) -> BackendMaker:
    name = named.removesuffix(IN_CODES)
    if name == "native" and built(torch.bfloat16).library is None:
        pytest.skip(f"no native forward: {built(torch.bfloat16).reason}")
    if name != "native" and not has_bfloat16(torch.device("cpu")):
        pytest.skip("this CPU has no instructions for bfloat16 products")
    return BACKENDS[name]


@pytest.fixture(scope="module", params=[2, 6], ids=["grouped", "ungrouped"])
def worlds(request: pytest.FixtureRequest, named: str, backend: BackendMaker) -> Sequence[World]:
    model = random_llama(request.param, backend)
    if named.endswith(IN_CODES):
        model.quantize_cache()
    generator = torch.Generator().manual_seed(11)
    made = []
    for length in (*CONTEXTS, *BORDERS):
        ids = torch.randint(VOCAB, (length + PATH,), generator=generator)
        world = World(model, ids[:length], ids[length:], model.new_cache(), torch.empty(0), generator)
        world.trees = 6 if length in CONTEXTS else 2
        world.cache = world.prefilled(world.context)
        world.logits = world.at_once(world.cache).clone()
        world.cache.rollback(length)
        made.append(world)
    return made


def assert_same_bits(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Compares rows, and says how many differ before it fails."""
    different = sum(int((ours != theirs).any(dim=-1).sum()) for ours, theirs in pairs)
    rows = sum(len(ours) for ours, _ in pairs)
    largest = max(float((ours.float() - theirs.float()).abs().max()) for ours, theirs in pairs)
    assert different == 0, f"{different} of {rows} rows differ, by up to {largest:.2g}"


Pairs = Iterator[tuple[Tensor, Tensor]]


def one_at_a_time(world: World) -> Pairs:
    for i in range(PATH):
        segment = Segment(world.cache, world.path[i : i + 1], chain_shape(1), (0,))
        yield world.model.forward([segment]).logits, world.logits[i : i + 1]
        world.cache.commit([0])


def in_a_longer_chain(world: World) -> Pairs:
    """16 and 17 tokens at once, of which the first 8 are those of the path, and the last 9 one at a time."""
    ids = torch.cat([world.path, world.tokens(9)])
    longer, shorter = (
        world.model.forward([Segment(world.cache, ids[:count], chain_shape(count), range(count))]).logits.clone()
        for count in (17, 16)
    )
    yield from [(longer[:PATH], world.logits), (shorter, longer[:16])]
    world.model.forward([Segment(world.cache, world.path, chain_shape(PATH), ())])
    world.cache.commit(range(PATH))
    for i in range(PATH, 17):
        segment = Segment(world.cache, ids[i : i + 1], chain_shape(1), (0,))
        yield world.model.forward([segment]).logits, longer[i : i + 1]
        world.cache.commit([0])


def as_a_path_in_a_tree(world: World) -> Pairs:
    for siblings in (1, 2, 4):
        for _ in range(world.trees):
            tokens, shape, nodes = world.random_tree(siblings)
            yield world.model.forward([Segment(world.cache, tokens, shape, nodes)]).logits, world.logits
            world.cache.rollback(len(world.context))


def next_to_neighbours(world: World) -> Pairs:
    """Three others, of other lengths: a chain, one token, and a tree, before it and behind it."""
    length = len(world.context)
    caches = [world.prefilled(world.tokens(count)) for count in (3, length // 2 + 1, length + 37)]
    tokens = world.tokens(5)
    output = world.model.forward(
        [
            Segment(caches[0], tokens, chain_shape(5), range(5)),
            Segment(caches[1], tokens[:1], chain_shape(1), (0,)),
            Segment(world.cache, world.path, chain_shape(PATH), range(PATH)),
            Segment(caches[2], tokens, TreeShape((-1, 0, 0, 1, 1)), range(5)),
        ]
    )
    yield output.logits[6 : 6 + PATH], world.logits
    for cache in caches:
        world.model.release_cache(cache)


def fewer_rows_of_logits(world: World) -> Pairs:
    output = world.model.forward([Segment(world.cache, world.path, chain_shape(PATH), (PATH - 1,))])
    yield output.logits, world.logits[-1:]


def prefill_in_one_chunk_or_two(world: World) -> Pairs:
    length = len(world.context)
    for cut in {1, length // 2, length - 1} if length in CONTEXTS else {length // 2}:
        cache = world.prefilled(world.context, cut)
        yield world.at_once(cache), world.logits
        world.model.release_cache(cache)


WAYS = (
    one_at_a_time, in_a_longer_chain, as_a_path_in_a_tree, next_to_neighbours, fewer_rows_of_logits,
    prefill_in_one_chunk_or_two,
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_those_of_the_path_at_once(worlds: Sequence[World], way: Callable[[World], Pairs]) -> None:
    pairs = []
    for world in worlds:
        pairs += list(way(world))
        world.cache.rollback(len(world.context))
    assert_same_bits(pairs)


def test_a_row_that_does_depend_on_others_is_noticed(
    worlds: Sequence[World], backend: BackendMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison is sensitive: the smallest change of one weight of attention shows."""
    if backend is native_backend:
        pytest.skip("the native forward does not call torch's softmax; the next test is for it too")
    softmax = torch.softmax
    monkeypatch.setattr(
        torch, "softmax", lambda scores, **options: softmax(scores.float() * (1 + 1e-3), **options).to(scores.dtype)
    )
    with pytest.raises(AssertionError, match="rows differ"):
        assert_same_bits([(world.at_once(world.cache), world.logits) for world in worlds])
    for world in worlds:
        world.cache.rollback(len(world.context))


@torch.inference_mode()
def test_one_other_bit_in_a_context_is_noticed(worlds: Sequence[World]) -> None:
    """Other lowest bits of a token's values in the last layer, or of their codes, show in some row of some world."""
    pairs = []
    for world in worlds:
        storage = world.cache.storage
        values = Buffers.entry(storage, storage.calls - 1, world.cache.length)[1]
        values = values if storage.coded else values.view(torch.int16)
        before = values[:, -1].clone()
        values[:, -1] ^= 1
        pairs.append((world.at_once(world.cache), world.logits))
        values[:, -1] = before
        world.cache.rollback(len(world.context))
    with pytest.raises(AssertionError, match="rows differ"):
        assert_same_bits(pairs)
    assert_same_bits([(world.at_once(world.cache), world.logits) for world in worlds])
    for world in worlds:
        world.cache.rollback(len(world.context))
