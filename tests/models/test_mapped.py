"""Weights of mapped files are copied, and their pages let go; other memory stays as it is."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from support.tiny_models import build, llama
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.loading import fastest_backend
from truedraft.models.mapped import in_memory, return_freed_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mappings are read from /proc")


def resident(path: Path) -> int:
    """KiB of a file that this process holds."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def test_a_mapped_weight_is_copied_and_its_pages_let_go(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    written = torch.randn(512, 1024)
    save_file({"first": written, "second": written + 1.0}, path)
    with safe_open(path, framework="pt") as file:
        first, second = file.get_tensor("first"), file.get_tensor("second")
    assert first.equal(written)
    assert second.equal(written + 1.0)
    before = resident(path)
    if before < 4000:
        pytest.skip("this safetensors reads its files and does not map them")
    copy = in_memory(first)
    assert resident(path) <= before - 2000
    assert copy.data_ptr() != first.data_ptr()
    assert copy.equal(written)
    assert first.equal(written)
    assert second.equal(written + 1.0)


def test_a_model_that_transformers_mapped_is_in_memory_once(tmp_path: Path) -> None:
    build(llama(hidden_size=256, intermediate_size=1024), seed=3).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    if resident(file) < 1000:
        pytest.skip("this transformers reads its files and does not map them")
    model = HuggingFaceModel(read, None, "tiny", fastest_backend)
    assert resident(file) < 100
    assert model.fingerprint


def test_memory_that_is_no_files_stays_as_it_is() -> None:
    weight = torch.randn(512, 1024)
    assert in_memory(weight) is weight
    assert in_memory(empty := torch.empty(0)) is empty


def test_freed_memory_goes_back_to_the_system() -> None:
    """Small pieces lie in the heap, which shrinks at its end alone unless it is told."""

    def kibibytes() -> int:
        return next(
            int(line.split()[1])
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("RssAnon")
        )

    sizes = ctypes.CDLL(None)
    sizes.malloc.restype, sizes.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    sizes.free.argtypes = [ctypes.c_void_p]
    pieces = [sizes.malloc(8000) for _ in range(8000)]  # 64 MB
    for piece in pieces:
        ctypes.memset(piece, 1, 8000)
    last = sizes.malloc(8000)  # keeps the heap's end
    for piece in pieces:
        sizes.free(piece)
    held = kibibytes()
    return_freed_memory()
    assert kibibytes() < held - 40_000
    sizes.free(last)


@pytest.mark.slow
@pytest.mark.parametrize("spoil", ["cut short", "overwritten"])
def test_a_file_that_changes_while_a_model_serves_changes_no_answer(tmp_path: Path, spoil: str) -> None:
    """In a process of its own, which a mapped file that is cut short would end."""
    code = f"""
import os, torch
from pathlib import Path
from support.tiny_models import build, llama
from truedraft import Engine, SamplingParams, load_model
from truedraft.drafters.heads.head import tensors_in
folder = Path({str(tmp_path)!r})
build(llama(), seed=3, spread=0.3).save_pretrained(folder)
file = folder / "model.safetensors"
model, head = load_model(str(folder), dtype="float32", fast_paths=False), tensors_in(file, "")
whole = {{name: each.sum().item() for name, each in head.items()}}
params = SamplingParams(max_tokens=8, ignore_eos=True)
before = Engine(model).generate([1, 2, 3], params).token_ids
if {spoil!r} == "cut short":
    os.truncate(file, 0)
else:
    with file.open("r+b") as opened:
        opened.write(b"\\x3c" * file.stat().st_size)
assert Engine(model).generate([1, 2, 3], params).token_ids == before
assert {{name: each.sum().item() for name, each in head.items()}} == whole
"""
    made = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
