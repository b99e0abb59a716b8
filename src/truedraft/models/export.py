"""A padded model as an ordinary Hugging Face folder, for any other runtime."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from truedraft.errors import ModelError, OptionError
from truedraft.machine import dtype_name, pick_dtype
from truedraft.models.checkpoint import fingerprint_of
from truedraft.models.loading import quiet_transformers, read_model, resolve_source
from truedraft.models.padding import (
    count_parameters,
    pad_model,
    padded_config,
    padded_size,
    padding_note_of,
    record_fingerprint,
)
from truedraft.text.tokenizer import Tokenizer

_CARD = """# A padded model

For measuring speed only: {}. It gives the logits of the model it was made from; added layers and widths hold random \
weights that meet zeros. Written by truedraft.
"""


@dataclass(frozen=True, slots=True)
class Exported:
    """A written model: its number of weights, the bytes of their files, and the `padding_note_of` it."""

    folder: Path
    parameters: int
    bytes: int
    dtype: str
    note: str | None


def export_model(
    name: str,
    folder: Path,
    *,
    pad_to: str | None = None,
    dtype: str = "auto",
    on_stage: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Write a model, padded if requested, with its tokenizer into a folder that does not exist, or is empty.

    Args:
        pad_to: "110M", "500M" or "7B"; None does not pad.
        dtype: see `load_model`; "auto" is what is fast on this machine's CPU.
        on_stage: called with the name of each stage.

    Raises OptionError: an unusable folder, dtype or size, or too little room; ModelError: the model cannot be loaded or
    padded, or the files cannot be written.
    """
    if pad_to is not None:
        padded_size(pad_to)
    kind = pick_dtype(dtype, torch.device("cpu"))
    with new_folder(folder):
        on_stage(f"loading {name}")
        source = resolve_source(name)
        model, tokenizer = read_model(source, name, kind), Tokenizer.load(source)
        if pad_to is not None:
            needed = count_parameters(padded_config(model, pad_to)) * kind.itemsize
            free = shutil.disk_usage(folder).free
            if needed > free:
                raise OptionError(
                    f"the weights take {needed / 1e9:.1f} GB, and the disk of {str(folder)!r} has {free / 1e9:.1f} GB "
                    "free; make room, or name a folder on another disk"
                )
            fingerprint, stage = fingerprint_of(model), f"padding to {pad_to}"  # heads for the model fit the padded one
            on_stage(stage)
            model = pad_model(model, pad_to, on_layer=lambda done, all_: on_stage(f"{stage}: {done} of {all_} layers"))
            record_fingerprint(model, fingerprint)
        on_stage(f"writing {folder}")
        save_padded(model, tokenizer, folder)
        return Exported(
            folder,
            parameters=sum(weight.numel() for weight in model.parameters()),
            bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
            dtype=dtype_name(kind),
            note=padding_note_of(model),
        )


def save_padded(
    model: PreTrainedModel, tokenizer: Tokenizer | None, folder: Path, *, max_shard_size: str = "2GB"
) -> None:
    """Write config.json, safetensors shards, the tokenizer's files and a README; ModelError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with quiet_transformers():
            model.save_pretrained(folder, max_shard_size=max_shard_size)
            if tokenizer is not None:
                tokenizer.backend.save_pretrained(folder)
        for shard in folder.glob("*.safetensors"):
            shard.chmod(0o644)  # safetensors writes files that only their owner can read
        note = padding_note_of(model)
        if note is not None:
            (folder / "README.md").write_text(_CARD.format(note), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot write the model into {str(folder)!r} ({error}); name another folder") from error


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Make the folder before its content; failure leaves nothing in it. OptionError if it cannot be, or holds files."""
    existed = folder.is_dir()
    try:
        if folder.exists() and not existed:
            raise OptionError(f"{str(folder)!r} is a file; name a new folder")
        if existed and any(folder.iterdir()):
            raise OptionError(f"the folder {str(folder)!r} is not empty; name a new one")
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OptionError(f"cannot write to the folder {str(folder)!r} ({error.strerror}); name another one") from error
    try:
        yield
    except BaseException:
        shutil.rmtree(folder)
        if existed:
            folder.mkdir()
        raise
