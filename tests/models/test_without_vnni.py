"""Products with quantised weights by the code for processors without VNNI, and without AVX2: the same numbers."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from models.test_gguf import kept
from support.backends import as_function
from support.gguf_files import TYPES, random_blocks, write
from support.pairwise import some_of
from truedraft import load_model
from truedraft.models.backends.native import build as building
from truedraft.models.backends.native.build import built
from truedraft.models.backends.native.memory import Weights
from truedraft.models.gguf import quantized_of

pytestmark = [
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="of other processors there is one path"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc's options"),
]
PATHS = {
    "by vectors, for want of AMX": "",
    "in pairs, for want of VNNI": "-mno-avx512vnni -mno-avxvnni",
    "in pairs, on vectors of 8": "-mno-avx512f",
    "one by one, for want of AVX2": "-mno-avx",
}


@pytest.fixture(scope="module", params=some_of(PATHS, [*PATHS][:1] + [*PATHS][2:]))
def slower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """A library compiled without some instructions."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("CC", f"gcc {PATHS[request.param]}")
        monkeypatch.setattr("truedraft.machine.may_use_tiles", lambda: False)
        monkeypatch.setenv("TRUEDRAFT_CACHE", str(tmp_path_factory.mktemp("native")))
        made = built.__wrapped__(torch.float32)
    assert made.library is not None, made.reason
    yield request.param, made.library


@pytest.mark.parametrize("kind", TYPES)
def test_products_are_those_of_the_fastest_path(slower: tuple[str, Any], kind: str) -> None:
    named, library = slower
    weight = quantized_of(kind, random_blocks(kind, 130, 512, 0))
    x = torch.randn(9, 512, generator=torch.Generator().manual_seed(0))
    found = []
    for each in (built(torch.float32).library, library):
        weights = Weights(each)
        found.append(as_function(each, weights, weights._coded([kept(weight)], None, False), torch.float32).logits(x))
    if "one by one" in named:  # such processors add and multiply in two steps
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    else:
        assert found[1].equal(found[0])


def test_the_path_is_named(slower: tuple[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, library = slower
    file = write(tmp_path / "model.gguf", "llama", {"": "Q4_1"})
    monkeypatch.setattr("truedraft.models.gguf.cache_folder", lambda: tmp_path)
    monkeypatch.setattr("truedraft.models.backends.native.backend.built", lambda dtype: building.Built(library))
    said = {"in": ", multiplied in pairs, for want of VNNI", "by": ""}.get(named.split()[0], f", multiplied {named}")
    assert load_model(file, dtype="float32").fast_paths == ("native forward", f"weights of 4 bits{said}")
