"""What a model is: the same however it was loaded, another for other weights."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from support.backends import fused_backend, graph_backend
from support.tiny_models import build, llama, stock
from truedraft import load_model
from truedraft.errors import ModelError
from truedraft.models import huggingface
from truedraft.models.backends.fused import FusedBackend
from truedraft.models.export import export_model, save_padded
from truedraft.models.huggingface import HuggingFaceModel, fingerprint_of
from truedraft.models.loading import fastest_backend
from truedraft.models.padding import PaddedSize, pad_model

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


def test_dtypes_that_hold_its_bfloat16_values_agree() -> None:
    model = stock("llama", dtype=torch.bfloat16)
    assert fingerprint_of(model.float()) == fingerprint_of(stock("llama", dtype=torch.bfloat16))
    assert fingerprint_of(stock("llama")) == fingerprint_of(stock("llama", dtype=torch.bfloat16))


def test_tied_weights_count_once() -> None:
    config = llama()
    config.tie_word_embeddings = True
    model = build(config, seed=1)
    tied = fingerprint_of(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert fingerprint_of(model) != tied


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    where = tmp_path / "own"
    save_padded(build(LlamaConfig(**_sizes()), seed=2, dtype=torch.bfloat16), None, where)
    return where


def _sizes() -> dict[str, int | None]:
    given = llama().to_dict()
    return {
        name: given[name] for name in given if name.startswith(("vocab", "hidden_size", "num_", "intermediate"))
    } | {
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def test_every_way_to_load_a_checkpoint_agrees(folder: Path) -> None:
    fingerprints = {
        load_model(folder, dtype=dtype, fast_paths=fast).fingerprint
        for dtype in ("float32", "bfloat16")
        for fast in (True, False)
    }
    assert fingerprints == {load_model(folder, pad_to="110M", fast_paths=False).fingerprint}


def test_float16_is_read_again(folder: Path) -> None:
    """Its values were rounded once more, so the checkpoint is asked."""
    assert load_model(folder, dtype="float16").fingerprint == load_model(folder).fingerprint


def test_an_exported_padded_folder_records_it(folder: Path, tmp_path: Path) -> None:
    export_model(str(folder), tmp_path / "padded", pad_to="110M", dtype="bfloat16")
    exported = load_model(tmp_path / "padded", dtype="bfloat16", fast_paths=False)
    assert exported.fingerprint == load_model(folder).fingerprint
    assert exported.head_width == 48


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


@pytest.mark.parametrize("backend", [fused_backend, graph_backend, fastest_backend])
def test_models_in_memory_keep_theirs_when_they_are_packed(backend: type[FusedBackend]) -> None:
    expected = fingerprint_of(stock("llama"))
    assert HuggingFaceModel(stock("llama"), None, "here", backend).fingerprint == expected
    assert HuggingFaceModel(stock("llama"), None, "here").fingerprint == expected


def test_packed_weights_have_none() -> None:
    model = stock("llama")
    HuggingFaceModel(model, None, "here", fused_backend)
    with pytest.raises(ModelError, match="packed for inference"):
        fingerprint_of(model)


def test_a_model_padded_in_memory_does_not_know_what_it_was() -> None:
    padded = pad_model(stock("llama"), SIZE)
    with pytest.raises(ModelError, match="does not record what it was padded from"):
        fingerprint_of(padded)
    for backend in (fused_backend, graph_backend):
        model = HuggingFaceModel(pad_model(stock("llama"), SIZE), None, "padded", backend)
        with pytest.raises(ModelError, match="is not known, for it was padded in memory"):
            _ = model.fingerprint


def test_a_model_padded_twice_is_what_it_was_at_first() -> None:
    once = pad_model(stock("llama"), SIZE)
    twice = pad_model(once, PaddedSize("1M", layers=4, width=384, inner=768))
    assert HuggingFaceModel(twice, None, "twice").head_width == 48
