"""Names of the tensors of multi-token prediction (MTP) layers in checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_NUMBERED = re.compile(r"((?:\w+\.)*layers\.(\d+)\.)eh_proj\.weight")


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Names of the tensors of one MTP layer in a checkpoint.

    Attributes:
        prefix: of all tensors of the layer; the following names come after it.
        fusion: the matrix that merges embedding and vector; the next two names are of their norms.
        layer: prefix of the decoder layer itself.
        zeroes_first: whether the embedding at the first position is zeroed, as engines do with this format.
    """

    prefix: str
    fusion: str
    of_embedding: str
    of_vector: str
    final: str
    layer: str = ""
    zeroes_first: bool = False

    @property
    def parts(self) -> tuple[str, str, str, str]:
        """All tensors outside the decoder layer: fusion, the norms of embedding and vector, and the last norm."""
        return self.fusion, self.of_embedding, self.of_vector, self.final

    def is_further(self, name: str) -> bool:
        """Whether a tensor belongs to a later layer, which predicts a further token."""
        return bool(self.layer) and name.startswith(f"{self.prefix}layers.") and self.of_layer(name) is None

    def of_layer(self, name: str) -> str | None:
        """The name of a decoder layer's tensor within the layer; None for another tensor."""
        start = self.prefix + self.layer
        return name.removeprefix(start) if name.startswith(start) else None


_QWEN = MtpNames(
    "mtp.", "fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight", "layers.0."
)
SPECULATORS = MtpNames(
    "mtp_layers.0.", "input_proj.weight", "token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight"
)
"""Names in folders of `speculators`."""


def mtp_layers(names: Iterable[str]) -> list[MtpNames]:
    """The MTP layers of a checkpoint, in order of the tokens that they predict. Qwen 3-Next and 3.5 write `mtp.*`;
    DeepSeek, GLM and others number them after the model's own layers; `speculators` writes separate folders."""
    numbered: list[tuple[int, str]] = []
    found: dict[MtpNames, None] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            numbered.append((int(match[2]), match[1]))
        found |= {each: None for each in (_QWEN, SPECULATORS) if name in {each.prefix + part for part in each.parts}}
    ends = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    return [*found] + [MtpNames(prefix, *ends, zeroes_first=True) for _, prefix in sorted(numbered)]


def without_mtp(names: Iterable[str]) -> list[str]:
    """The names except those of MTP layers."""
    names = list(names)
    prefixes = tuple(each.prefix for each in mtp_layers(names))
    return [name for name in names if not name.startswith(prefixes)] if prefixes else names
