"""What loading a file takes, over what imports took and over the file's size."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from support.gguf_files import write

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "loading_files.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return runpy.run_path(str(SCRIPT))


def test_memory_is_told_over_imports_and_the_file(script: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(bytes(100))
    model = {"seconds": 2.0, "cpu_s": 1.5, "imports_bytes": 40, "resident_bytes": 150, "peak_bytes": 340}
    tokenizer = model | {"resident_bytes": 30, "cpu_s": 0.5}
    slow = model | {"seconds": 9.0, "resident_bytes": 900}
    found = script["summary"](file, {"model": [model, slow, model], "tokenizer": [tokenizer]})
    assert (found["resident / file"], found["without the tokenizer, resident / file"]) == (1.5, 1.2)
    assert (found["peak / file"], found["seconds to the first token"]) == (3.0, 2.0)
    assert (found["of a processor"], found["tokenizer, of a processor"]) == (1.5, 0.5)


def test_a_file_is_loaded_in_a_process_of_its_own(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(each for each in sys.path if each))
    file = write(tmp_path / "model.gguf", "llama", {"": "Q8_0"})
    found = script["apart"](file, "model")
    assert found["cpu_s"] > 0 and 0 < found["resident_bytes"] < found["peak_bytes"] and found["weight_bytes"] > 0
