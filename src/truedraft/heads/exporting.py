"""Heads written into a folder that other projects read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from truedraft.errors import OptionError, UnknownOptionError
from truedraft.files import object_of
from truedraft.heads.base import Head
from truedraft.heads.eagle import Eagle3Head
from truedraft.heads.eagle_folders import write_eagle_folder, write_speculators_folder
from truedraft.heads.medusa import MedusaHeads
from truedraft.heads.medusa_folders import write_vllm_medusa
from truedraft.heads.peagle import PEagleHead
from truedraft.models.export import new_folder
from truedraft.models.loading import load_config, read_model, resolve_source


@dataclass(frozen=True, slots=True)
class _Target:
    """What a folder says of the target, read when it is asked for.

    Attributes:
        name: as the user named it.
    """

    name: str

    @property
    def family(self) -> str:
        """The target's class; "" where nobody says."""
        return (self._config.architectures or [""])[0] if self.name else ""

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return int(self._config.get_text_config().num_hidden_layers)

    @property
    def _config(self) -> Any:
        return load_config(resolve_source(self.name), self.name, None)

    def lm_head(self, like: Tensor) -> Tensor:
        """Its LM head, `[vocab, width]`, in the dtype of another weight."""
        weight: Tensor = read_model(resolve_source(self.name), self.name, like.dtype).get_output_embeddings().weight
        return weight.detach()


def _eagle(head: Any, folder: Path, target: _Target) -> None:
    write_eagle_folder(head, folder, target=target.name)


def _speculators(head: Any, folder: Path, target: _Target) -> None:
    write_speculators_folder(head, folder, target=target.name, family=target.family)


def _vllm_medusa(heads: Any, folder: Path, target: _Target) -> None:
    tied = heads.config.tied and not heads.config.reads_token and target.name
    write_vllm_medusa(heads, folder, lm_head=target.lm_head(next(heads.parameters())) if tied else None)


_FORMATS: Mapping[str, tuple[Sequence[type[Head]], Callable[[Any, Path, _Target], None]]] = {
    "eagle": ((Eagle3Head,), _eagle),
    "speculators": ((Eagle3Head, PEagleHead), _speculators),
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
    own = object_of(Path(head) / "config.json").get("kind")
    read: Any = next((each for each in kinds if each.kind == own), kinds[0]).load(head)
    target = _Target(read.record.target_name if model is None else model)
    if isinstance(read, Eagle3Head) and not read.config.layers:
        if not target.name:
            raise OptionError("this head does not name the layers that it reads; name its target", field="model")
        read.config = read.config.at_usual_layers(target.layers)
    with new_folder(folder):
        write(read, folder, target)
    return read
