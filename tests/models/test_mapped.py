"""Pages of a file of weights: let go of where they are a file's, and of nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from truedraft.models.mapped import forget_pages

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
