"""Heads written into a folder that other projects read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from truedraft.errors import ModelNotFoundError, OptionError, UnknownOptionError
from truedraft.heads import block_folders, eagle_folders
from truedraft.heads.base import Head
from truedraft.heads.block import BlockHead, DFlashHead, DSparkHead
from truedraft.heads.eagle import Eagle3Head
from truedraft.heads.layers import LayerHead
from truedraft.heads.medusa import MedusaHeads
from truedraft.heads.medusa_folders import write_vllm_medusa
from truedraft.heads.peagle import PEagleHead
from truedraft.heads.published import kind_in
from truedraft.models.export import new_folder
from truedraft.models.loading import load_config, read_model, resolve_source


def _eagle(head: Any, folder: Path, target: str, config: Any) -> None:
    eagle_folders.write_eagle_folder(head, folder, target=target)


def _speculators(head: Any, folder: Path, target: str, config: Any) -> None:
    family, *_ = getattr(config, "architectures", None) or [""]
    module = block_folders if isinstance(head, BlockHead) else eagle_folders
    module.write_speculators_folder(head, folder, target=target, family=family)


def _flat_block(write: Callable[..., None]) -> Callable[[Any, Path, str, Any], None]:
    def written(head: Any, folder: Path, target: str, config: Any) -> None:
        if config is None:
            raise OptionError("this format counts the target's layers; name the target", field="model")
        write(head, folder, target_layers=config.get_text_config().num_hidden_layers)

    return written


def _vllm_medusa(heads: Any, folder: Path, target: str, config: Any) -> None:
    weight = None
    if config is not None and heads.config.tied and not heads.config.reads_token:
        weight = (
            read_model(resolve_source(target), target, next(heads.parameters()).dtype).get_output_embeddings().weight
        )
    write_vllm_medusa(heads, folder, lm_head=weight)


_FORMATS: Mapping[str, tuple[Sequence[type[Head]], Callable[[Any, Path, str, Any], None]]] = {
    "eagle": ((Eagle3Head,), _eagle),
    "speculators": ((Eagle3Head, PEagleHead, DFlashHead, DSparkHead), _speculators),
    "dflash": ((DFlashHead,), _flat_block(block_folders.write_dflash_folder)),
    "dspark": ((DSparkHead,), _flat_block(block_folders.write_dspark_folder)),
    "vllm-medusa": ((MedusaHeads,), _vllm_medusa),
}
FORMATS = tuple(_FORMATS)
"""What heads can be written for."""


def export_head(head: str | Path, form: str, folder: Path, model: str | None = None) -> Head:
    """Write a head, trained here or read from another project's folder, for another project.

    Args:
        head: its folder.
        form: one of `FORMATS`.
        folder: one that does not exist, or is empty.
        model: the target, as `load_model` takes it; None is the one that the head names, if it names one.

    Returns:
        The head as it was read.

    Raises:
        UnknownOptionError: there is no such format.
        OptionError: an unusable folder, or a target that does not fit.
        ModelError: the head or the target cannot be read, or the format has no place for something that it has.
    """
    if form not in _FORMATS:
        raise UnknownOptionError.nearest("format", form, FORMATS)
    kinds, write = _FORMATS[form]
    own = kind_in(Path(head))
    read: Any = next((each for each in kinds if each.kind == own), kinds[0]).load(head)
    target, config = read.record.target_name if model is None else model, None
    if target:
        with contextlib.nullcontext() if model else contextlib.suppress(ModelNotFoundError):  # it may lie elsewhere now
            config = load_config(resolve_source(target), target, None)
    if isinstance(read, LayerHead) and not read.config.layers:
        if config is None:
            raise OptionError("this head does not name the layers that it reads; name its target", field="model")
        read.config = read.config.at_usual_layers(config.get_text_config().num_hidden_layers)
    with new_folder(folder):
        write(read, folder, target, config)
    return read
