"""Pages of a file of weights: let go of where they are a file's, and of nothing else."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from truedraft.models.mapped import forget_pages, return_freed_memory

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


def test_a_mapped_weight_is_let_go_of_and_stays_readable(tmp_path: Path) -> None:
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
    forget_pages(first)
    assert resident(path) <= before - 2000
    assert first.equal(written)
    assert second.equal(written + 1.0)


def test_memory_that_is_no_files_stays_as_it_is() -> None:
    weight = torch.randn(512, 1024)
    kept = weight.clone()
    forget_pages(weight)
    forget_pages(weight.t())
    forget_pages(torch.empty(0))
    assert weight.equal(kept)


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
