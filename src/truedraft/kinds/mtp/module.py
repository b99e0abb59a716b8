"""The layer in a checkpoint that predicts one token further (MTP), as a head of its own model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torch import Tensor, nn

from truedraft.drafters.exporting import ExportedDrafter, Exports, Way, chain_of, exported, target_of
from truedraft.drafters.heads.head import MOST_MODULES, Head, HeadRecord, write_published
from truedraft.drafters.heads.layer_folders import CONFIG, SPECULATORS, speculators_record
from truedraft.drafters.heads.layers import is_whole
from truedraft.errors import ModelError
from truedraft.files import object_of, user_path
from truedraft.models.base import LanguageModel
from truedraft.models.export import new_folder
from truedraft.models.mtp import MtpLayer, published_mtp, read_mtp

_REACH = 3
_WORD = "mtp"


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """Sizes of an MTP layer; `reach` is the default number of drafted tokens: it was trained for one."""

    width: int
    vocab_size: int
    reach: int = _REACH


class MtpHead(Head):
    """A pair of a hidden state at position i and the token at i + 1 gives the distribution of the token at i + 2.

    It is part of the target's own files, or fine-tuned from it, and is not trained here.
    """

    kind = _WORD
    noun = "an MTP layer"
    plural = "MTP layers"
    place_word = "step"
    sizes = MtpConfig
    config: MtpConfig

    def __init__(self, config: MtpConfig, layer: MtpLayer) -> None:
        super().__init__(config)
        self.layer = layer

    @classmethod
    def for_target(cls, path: str | None, target: LanguageModel) -> Self:
        """The first layer of a target's files, or of a `speculators` folder; errors as of `read_mtp`."""
        made = cls(MtpConfig(target.head_width, target.vocab_size, reach_of(path)), read_mtp(target, path))
        made.record = HeadRecord(target.name)
        return made

    @property
    def reach(self) -> int:
        return self.config.reach

    @property
    def reads_tokens(self) -> bool:
        return True

    @property
    def outputs(self) -> Sequence[nn.Linear | None]:
        return [None] * self.reach

    def start_from(self, weight: Tensor) -> None: ...


def kind_in(path: Path) -> str | None:
    """Of a folder with an MTP layer of `speculators`."""
    return _WORD if object_of(path / CONFIG).get(SPECULATORS) == _WORD else None


def reach_of(folder: str | None) -> int:
    """Number of drafted tokens of a `speculators` folder, or the target's own layer."""
    record = {} if folder is None else object_of(user_path(folder) / CONFIG)
    try:
        found = record["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (LookupError, TypeError):
        return _REACH
    if not is_whole(found, 1) or found > MOST_MODULES:
        raise ModelError(f"{folder!r} drafts {found!r} tokens by its {CONFIG}, not 1 to {MOST_MODULES}; fetch it again")
    return found


def write_mtp_folder(
    folder: Path, target: str, source: str | None = None, *, tokens: int | None = None, family: str = ""
) -> None:
    """Write the layer of a checkpoint or a folder as `speculators` reads and trains it.

    Args:
        source: a folder as `MtpHead.for_target` takes it.
        tokens: number of drafted tokens; None is `reach_of` the source.
        family: the target's class, such as "Qwen3NextForCausalLM".

    Raises `TruedraftError` as `truedraft.models.mtp.published_mtp`, or if the files cannot be written.
    """
    layers, tensors = published_mtp(target, source)
    about = speculators_record(_WORD, reach_of(source) if tokens is None else tokens, target, family) | {
        "architectures": ["MTPDraftModel"],
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": layers,
    }
    write_published(folder, tensors, about)


_OWN = " from folders, but the layer in the model's own files: {}; --for speculators writes one"


def _export(
    source: str | None, engine: str, way: Way, folder: Path, model: str | None, tokens: int | None
) -> ExportedDrafter:
    target = target_of(model, "", engine)
    count = chain_of(tokens, reach_of(source), None)
    with new_folder(folder):
        write_mtp_folder(folder, target.name, source, tokens=count, family=target.family)
    return exported(folder, MtpHead.kind, engine, target, count, way)


EXPORTS = Exports(
    {"speculators": Way("")},
    {
        "vllm": _OWN.format("""--speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'"""),
        "sglang": _OWN.format("--speculative-algorithm NEXTN"),
        "llamacpp": _OWN.format("--spec-type draft-mtp"),
    },
    _export,
)
