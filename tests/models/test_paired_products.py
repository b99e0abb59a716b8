"""Products of bfloat16 one by one and in pairs: the machine's own way is what most tests run, here are both."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.test_row_invariance import VOCAB, random_llama
from support.backends import native_backend
from truedraft.core.tree import chain_shape
from truedraft.machine import has_avx512_bfloat16
from truedraft.models.backends.native import build as building
from truedraft.models.backends.native.build import built
from truedraft.models.backends.stock import StockBackend
from truedraft.models.base import Segment
from truedraft.models.huggingface import HuggingFaceModel

pytestmark = [
    pytest.mark.skipif(not has_avx512_bfloat16(), reason="this processor has no AVX-512 instructions for bfloat16"),
    pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason),
]
IDS = torch.arange(40) * 37 % VOCAB


@pytest.fixture(scope="module", params=["AuthenticAMD", "GenuineIntel"])
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HuggingFaceModel]:
    """A model by a library as it is compiled for a maker's processors."""
    told = f"vendor_id\t: {request.param}"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(building, "_processor", lambda: told)
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
