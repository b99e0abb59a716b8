"""What a model is: the same however it was loaded, another for other weights."""

from __future__ import annotations

import copy
import os
import secrets
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from support.backends import fused_backend, graph_backend
from support.tiny_models import build, llama, stock
from truedraft import load_model
from truedraft.errors import ModelError
from truedraft.models import HuggingFaceModel, checkpoint, export_model, huggingface, pad_model
from truedraft.models.backends.fused import FusedBackend
from truedraft.models.checkpoint import fingerprint_of, sample_of
from truedraft.models.export import save_padded
from truedraft.models.loading import fastest_backend
from truedraft.models.padding import PaddedSize


@pytest.fixture(autouse=True)
def nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or loads would agree by what the first of them left."""
    monkeypatch.setattr(checkpoint, "cache_folder", lambda: tmp_path / "of nobody" / secrets.token_hex())


SIZE = PaddedSize("0.2M", layers=3, width=192, inner=384)


def test_it_is_of_names_shapes_and_values() -> None:
    model = stock("llama")
    first = fingerprint_of(model)
    assert len(first) == 32
    assert int(first, 16) >= 0
    assert fingerprint_of(stock("llama")) == first
    assert fingerprint_of(stock("qwen3")) != first
    changed = copy.deepcopy(model)
    next(changed.parameters()).data[0, 0] += 0.5
    assert fingerprint_of(changed) != first
    assert fingerprint_of(stock("llama", dtype=torch.bfloat16)) == first, "it is of bfloat16 values"
    tied = build(llama(tie_word_embeddings=True), seed=1)
    once = fingerprint_of(tied)
    tied.lm_head.weight = torch.nn.Parameter(tied.lm_head.weight.detach().clone())
    assert fingerprint_of(tied) != once


def short(seed: int) -> PreTrainedModel:
    return build(llama(max_position_embeddings=64), seed=seed, dtype=torch.bfloat16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    where = tmp_path / "own"
    save_padded(short(2), None, where)
    return where


def test_every_way_to_load_a_checkpoint_agrees(folder: Path) -> None:
    """Of float16, whose values were rounded once more, the checkpoint is read again."""
    loads = [
        load_model(folder, dtype=dtype, fast_paths=fast)
        for dtype, fast in product(("float32", "bfloat16", "float16"), (True, False))
    ]
    padded = load_model(folder, pad_to="110M", fast_paths=False)
    assert {each.fingerprint for each in loads} == {padded.fingerprint}
    own = sample_of(short(2))
    assert {each.sample for each in loads} == {padded.sample} == {own}


def test_an_exported_padded_folder_records_it(folder: Path, tmp_path: Path) -> None:
    export_model(str(folder), tmp_path / "padded", pad_to="110M", dtype="bfloat16")
    exported = load_model(tmp_path / "padded", dtype="bfloat16", fast_paths=False)
    assert exported.fingerprint == load_model(folder).fingerprint
    assert exported.head_width == 48 and exported.sample is None


def test_loading_does_not_compute_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PreTrainedModel] = []
    real = huggingface.fingerprint_of

    def watched(model: PreTrainedModel) -> str:
        asked.append(model)
        return real(model)

    monkeypatch.setattr(huggingface, "fingerprint_of", watched)
    model = load_model(folder)
    assert not asked
    assert model.fingerprint == model.fingerprint
    assert len(asked) == 1


def test_it_is_kept_as_long_as_the_files_are_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[PreTrainedModel] = []
    real = checkpoint.weights_hash
    monkeypatch.setattr(checkpoint, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(checkpoint, "weights_hash", lambda model, dtype: asked.append(model) or real(model, dtype))
    first = load_model(folder).fingerprint
    assert [load_model(folder, dtype=dtype).fingerprint for dtype in ("float32", "float16")] == [first, first]
    assert len(asked) == 1
    copied = shutil.copytree(folder, tmp_path / "copied")  # of the same sizes and times
    assert load_model(copied).fingerprint == first and len(asked) == 2
    weights = folder / "model.safetensors"
    before = weights.stat()
    save_padded(short(3), None, folder)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    changed = load_model(folder).fingerprint
    assert changed not in (first, None) and len(asked) == 3, "another file has its name"
    kept = next((tmp_path / "cache" / "fingerprints").iterdir())
    for broken in ("", "[]", '{"state": 1}', kept.read_text().replace('"fingerprint": "', '"fingerprint": 0, "a": "')):
        for each in kept.parent.iterdir():
            each.write_text(broken)
        assert load_model(folder).fingerprint == changed


def test_what_cannot_be_kept_is_found_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "cache"
    in_the_way.write_text("no folder")
    monkeypatch.setattr(checkpoint, "cache_folder", lambda: in_the_way)
    assert load_model(folder).fingerprint == load_model(folder).fingerprint
    assert "set TRUEDRAFT_CACHE to a folder that can be written" in caplog.text


def test_a_sample_tells_weights_apart_and_reads_two_rows_of_each() -> None:
    model = stock("llama")
    first = sample_of(model)
    assert first is not None and len(first) == 32
    assert sample_of(stock("llama", dtype=torch.bfloat16)) == first != sample_of(stock("qwen3"))
    for name, weight in model.named_parameters():
        before = weight.data.clone()
        weight.data[-1] += 0.5
        assert sample_of(model) != first, name
        weight.data = before
    model.get_input_embeddings().weight.data[3] += 0.5
    assert sample_of(model) == first


@pytest.mark.parametrize("backend", [fused_backend, graph_backend, fastest_backend])
def test_models_in_memory_keep_theirs_when_they_are_packed(backend: type[FusedBackend]) -> None:
    model, expected = stock("llama"), fingerprint_of(stock("llama"))
    assert HuggingFaceModel(model, None, "here", backend).fingerprint == expected
    assert HuggingFaceModel(stock("llama"), None, "here").fingerprint == expected
    if backend is fused_backend:
        with pytest.raises(ModelError, match="packed for inference"):
            fingerprint_of(model)


def test_a_model_padded_in_memory_does_not_know_what_it_was() -> None:
    padded = pad_model(stock("llama"), SIZE)
    with pytest.raises(ModelError, match="was padded, and does not record"):
        fingerprint_of(padded)
    twice = pad_model(padded, PaddedSize("1M", layers=4, width=384, inner=768))
    assert HuggingFaceModel(twice, None, "twice").head_width == 48
    for backend in (fused_backend, graph_backend):
        model = HuggingFaceModel(pad_model(stock("llama"), SIZE), None, "padded", backend)
        with pytest.raises(ModelError, match="was padded, and does not record"):
            _ = model.fingerprint
