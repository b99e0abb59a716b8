"""The native forward's kernels on other processors than this one, by a driver in C over equal inputs."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from truedraft.models.backends.native.build import SOURCE

DRIVER = Path(__file__).with_name("native_driver.c")
COMPILE = ("-O3", "-std=gnu11", "-w", "-pthread", f"-I{SOURCE.parent}")
ARM = "aarch64-linux-gnu-gcc", "qemu-aarch64"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="what is compared with is x86's"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc's options"),
]
PROCESSORS = {"x86 without AVX-512": ("gcc", "-march=native", "-mno-avx512f"), "aarch64": (ARM[0], "-static")}


def found(compiler: Sequence[str], bfloat16: bool, folder: Path) -> list[tuple[str, NDArray[np.float64]]]:
    """What the driver prints where it was compiled so: names with numbers."""
    program = folder / "driver"
    command = [*compiler, *COMPILE, f"-DBF16={int(bfloat16)}", str(DRIVER), "-lm", "-o", str(program)]
    subprocess.run(command, check=True, timeout=300)
    runs = [ARM[1], "-cpu", "max", str(program)] if compiler[0] == ARM[0] else [str(program)]
    printed = subprocess.run(runs, check=True, timeout=300, capture_output=True, text=True).stdout
    lines = [line.partition(":") for line in printed.splitlines()]
    return [(line, np.array(numbers.split(), np.float64)) for line, _, numbers in lines]


@pytest.fixture(scope="module", params=[False, True], ids=["float32", "bfloat16"])
def here(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bool, list[tuple[str, NDArray[np.float64]]]]:
    """On this processor, with all that it can do but AMX."""
    return request.param, found(("gcc", "-march=native"), request.param, tmp_path_factory.mktemp("here"))


@pytest.mark.parametrize("name", PROCESSORS)
def test_kernels_give_what_they_give_here(
    here: tuple[bool, list[tuple[str, NDArray[np.float64]]]], name: str, tmp_path: Path
) -> None:
    """Whole numbers are equal, others up to the order of sums: by what is lost of the largest of their line."""
    compiler = PROCESSORS[name]
    if shutil.which(compiler[0]) is None or (compiler[0] == ARM[0] and shutil.which(ARM[1]) is None):
        pytest.skip(f"needs {' and '.join(ARM)}: apt-get install gcc-aarch64-linux-gnu qemu-user")
    bfloat16, expected = here
    given = found(compiler, bfloat16, tmp_path)
    assert [line for line, _ in given] == [line for line, _ in expected] and len(given) > 250
    for (line, ours), (_, theirs) in zip(given, expected, strict=True):
        assert len(ours) == len(theirs) > 0, line
        if line.startswith("codes"):
            np.testing.assert_array_equal(ours, theirs, line)
        else:
            rounded = 2e-2 if bfloat16 and re.match("logits|vectors|keys|values|log", line) else 1e-5
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=rounded * np.abs(theirs).max(), err_msg=line)


def test_threads_change_no_bit(here: tuple[bool, list[tuple[str, NDArray[np.float64]]]]) -> None:
    """The driver runs three of its models with one thread and with three."""
    lines = [(line, numbers.tobytes()) for line, numbers in here[1]]
    twice = [line for line in lines if line[0].startswith("logits of") and "gelu" not in line[0]]
    assert len(twice) == 6 * 11 and len(set(twice)) == 3 * 11
