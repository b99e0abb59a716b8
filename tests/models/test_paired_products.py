"""Products of bfloat16 one by one, in pairs and by tiles: most tests run the machine's own way, here are all."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, PreTrainedModel

from models.test_row_invariance import VOCAB, random_llama
from support.backends import llama_of, native_backend
from support.tiny_models import VECTORS, build
from truedraft.core.tree import chain_shape, shape_of
from truedraft.machine import has_avx512_bfloat16, may_use_tiles
from truedraft.models import HuggingFaceModel, Segment
from truedraft.models.backends.native import NativeBackend
from truedraft.models.backends.native import build as building
from truedraft.models.backends.native.build import built
from truedraft.models.backends.stock import StockBackend

pytestmark = [
    pytest.mark.skipif(not has_avx512_bfloat16(), reason="this processor has no AVX-512 instructions for bfloat16"),
    pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason),
]
IDS = torch.arange(40) * 37 % VOCAB


_TILES = pytest.param(
    ("GenuineIntel", True),
    id="tiles",
    marks=pytest.mark.skipif(
        not may_use_tiles(), reason="this processor has no AMX, or the system does not let it be used"
    ),
)


@pytest.fixture(
    scope="module",
    params=[pytest.param(("AuthenticAMD", False), id="pairs"), pytest.param(("GenuineIntel", False), id="one"), _TILES],
)
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HuggingFaceModel]:
    """A model by a library as it is compiled for a maker's processors."""
    maker, tiles = request.param
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(building, "processor", lambda: f"vendor_id\t: {maker}\nflags\t: avx512_bf16")
        monkeypatch.setattr("truedraft.machine.may_use_tiles", lambda: tiles)
        monkeypatch.setenv("TRUEDRAFT_CACHE", str(tmp_path_factory.mktemp("native")))
        made = built.__wrapped__(torch.bfloat16)
        assert made.library is not None, made.reason
        monkeypatch.setattr("truedraft.models.backends.native.backend.built", lambda dtype: made)
        yield random_llama(2, native_backend)


def logits(model: HuggingFaceModel, *pieces: Tensor) -> Tensor:
    """Of one text, which is read piece by piece."""
    cache, found = model.new_cache(), []
    for piece in pieces:
        count = len(piece)
        found.append(model.forward([Segment(cache, piece, chain_shape(count), range(count))]).logits)
        cache.commit(range(count))
    model.release_cache(cache)
    return torch.cat(found).float()


def test_logits_are_as_exact_as_those_of_the_models_own_modules(native: HuggingFaceModel) -> None:
    exact: list[HuggingFaceModel] = []

    def stock(model: PreTrainedModel) -> StockBackend:
        exact.append(HuggingFaceModel(copy.deepcopy(model).float(), None, "exact", StockBackend))
        return StockBackend(model)

    rounded = logits(random_llama(2, stock), IDS)
    expected = logits(exact[0], IDS)
    assert (logits(native, IDS) - expected).abs().mean() <= 1.1 * (rounded - expected).abs().mean()


def test_rows_do_not_depend_on_their_number(native: HuggingFaceModel) -> None:
    whole = logits(native, IDS)
    assert logits(native, *IDS.split(1)).equal(whole)
    assert logits(native, *IDS.split([13, 2, 25])).equal(whole)


def with_a_broken_token(model: PreTrainedModel) -> NativeBackend:
    """The last token of the vocabulary becomes no numbers."""
    llama = llama_of(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[VOCAB - 1] = torch.nan  # type: ignore[index,operator]
    return NativeBackend(llama)


def test_what_is_no_number_reaches_only_rows_that_see_it(native: HuggingFaceModel) -> None:
    model, bad = random_llama(2, with_a_broken_token), torch.tensor([VOCAB - 1])
    whole, others = logits(model, IDS)[:, :-1], slice(0, VOCAB - 1)
    assert whole.isfinite().all()
    chain = logits(model, torch.cat([IDS[:20], bad, IDS[20:]]))
    assert chain[:20, others].equal(whole[:20])
    assert chain[20:].isnan().all()

    cache = model.new_cache()
    model.forward([Segment(cache, IDS[:10], chain_shape(10), ())])
    cache.commit(range(10))
    tokens = torch.cat([bad, IDS[10:11], bad, IDS[11:12], IDS[12:13]])
    tree = model.forward([Segment(cache, tokens, shape_of((-1, -1, 0, 1, 3)), range(5))]).logits.float()
    model.release_cache(cache)
    assert tree[[1, 3, 4], others].equal(whole[10:13])
    assert tree[[0, 2]].isnan().all()


def test_a_trees_rows_are_those_of_plain_decoding_where_windows_begin_in_different_pieces(
    native: HuggingFaceModel,
) -> None:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 2,
        "head_dim": 64,
    }
    config = MistralConfig(**VECTORS | sizes, sliding_window=40)
    mistral = build(config, seed=0, spread=0.1, dtype=torch.bfloat16)
    model = HuggingFaceModel(mistral, None, "windows", native_backend)
    ids = torch.arange(90) * 37 % VOCAB
    whole = logits(model, *ids.split(1))
    for context in (60, 65, 70):
        cache = model.new_cache()
        model.forward([Segment(cache, ids[:context], chain_shape(context), ())])
        cache.commit(range(context))
        path = ids[context : context + 12]
        tokens = torch.stack([path.flip(0), path], dim=1).flatten()  # a wrong token beside each of the path
        parents = tuple(parent for depth in range(12) for parent in (2 * depth - 1, 2 * depth - 1))
        tree = model.forward([Segment(cache, tokens, shape_of(parents), range(1, 24, 2))]).logits.float()
        model.release_cache(cache)
        assert tree.equal(whole[context : context + 12])
