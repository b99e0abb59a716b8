"""The native forward's threads: one that comes late is not waited for, whoever calls, forks or ends meanwhile."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support import codes
from support.backends import native_backend
from support.tiny_models import build, llama
from truedraft.models.backends.native import build as building
from truedraft.models.backends.native.build import built
from truedraft.models.huggingface import HuggingFaceModel

needs_library = pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason)
WIDE = llama(vocab_size=700, hidden_size=64, intermediate_size=192, num_attention_heads=2)
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def native(seed: int = 0) -> HuggingFaceModel:
    return HuggingFaceModel(build(WIDE, seed=seed, spread=0.15), None, "native", native_backend)


def logits(model: HuggingFaceModel, count: int) -> Tensor:
    return codes.logits(model, torch.arange(count) * 37 % 700)


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


LAYERS = ("plain", "sandwich", "experts", "blocks")


def run_late_threads(folder: Path, *options: str, layers: Sequence[str] = LAYERS) -> list[str]:
    """Compiles late_threads.c, which says what it does and of which layers, and runs it of each of these."""
    assert COMPILER is not None
    program, source = folder / "late_threads", Path(__file__).with_name("late_threads.c")
    command = [COMPILER, "-std=gnu11", "-O1", "-pthread", "-w", *options, "-DBF16=0"]
    command += [f'-DDECODER="{building.SOURCE}"', str(source), "-o", str(program), "-lm"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode and options:
        pytest.skip(f"this compiler has no {options}")
    assert made.returncode == 0, made.stderr
    said = []
    for each in layers:
        done = subprocess.run([str(program), each], capture_output=True, text=True, check=False, timeout=300)
        said.append(done.stdout + done.stderr)
    return said


@pytest.mark.skipif(COMPILER is None or sys.platform == "win32", reason="there is no C compiler")
def test_a_thread_that_stands_in_the_middle_of_a_unit_is_not_waited_for(tmp_path: Path) -> None:
    assert run_late_threads(tmp_path) == ["as alone\n"] * len(LAYERS)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None or sys.platform == "win32", reason="there is no C compiler")
@pytest.mark.parametrize("checked", ["thread", "undefined"])
def test_late_threads_touch_nothing_that_others_use(tmp_path: Path, checked: str) -> None:
    found = run_late_threads(tmp_path, f"-fsanitize={checked}", "-g", layers=("plain", "experts", "blocks"))
    assert found == ["as alone\n"] * 3


@needs_library
def test_callers_at_once_get_the_bits_of_one_thread(four_threads: None) -> None:
    """Each has a team of its own; models come and go meanwhile."""
    torch.set_num_threads(1)
    expected = [[logits(native(seed), count) for count in (1, 5, 100)] for seed in range(3)]
    loading = threading.Lock()

    def call(seed: int) -> bool:
        alike = True
        for _ in range(3):
            torch.set_num_threads(4)  # of this thread of Python's
            with loading:
                model = native(seed)
            for _ in range(10):
                found = [logits(model, count) for count in (1, 5, 100)]
                alike &= all(map(torch.equal, found, expected[seed]))
        return alike

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(call, range(3)))


@needs_library
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_child_of_fork_computes_on_threads_of_its_own(four_threads: None) -> None:
    model = native()
    expected = logits(model, 40)
    child = os.fork()
    if child == 0:
        same = all(logits(model, 40).equal(expected) for _ in range(5))
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert logits(model, 40).equal(expected)


@needs_library
def test_memory_is_given_back_only_when_no_thread_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, and numbers on the way when they grow."""
    settled: list[tuple[int, int]] = []
    model = native()
    backend: Any = model._backend
    logits(model, 3)
    scratch = backend._scratch
    ask = scratch._settle
    scratch._settle = lambda *span: settled.append(tuple(each.value for each in span)) or ask(*span)
    first = scratch._inputs
    logits(model, 100)
    assert settled == [first]
    second = scratch._inputs
    heads = model.shared_heads([[torch.nn.Linear(64, 64)]])
    assert heads is not None
    del heads
    gc.collect()
    assert settled == [first, second]
    del model, backend
    gc.collect()
    assert settled == [first, second, second]
