"""The heads of EAGLE-3 (Li et al., arXiv 2503.01840), EAGLE-3.1 (arXiv 2605.09992) and P-EAGLE (arXiv 2602.01469)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from truedraft.drafters.heads.head import MOST_MODULES
from truedraft.drafters.heads.layers import Attend, DecoderLayer, LayerConfig, LayerHead, is_whole
from truedraft.errors import OptionError
from truedraft.models.llama import Rotation


@dataclass(frozen=True, slots=True)
class Eagle3Config(LayerConfig):
    """Sizes of an EAGLE-3 head; layer -1 is the embedding. Raises `OptionError` for invalid sizes.

    Attributes:
        reach: number of tokens after the next in training; it can draft further.
        norm_before_residual: whether the residual stream begins with the normalized hidden state.
        norm_before_fc: whether all layers' hidden states are normalized together before they are merged.
        fc_norm: whether each layer's are normalized separately (EAGLE-3.1).
        norm_output: whether the input of the next step is normalized (EAGLE-3.1).
        query_norms: whether each head's queries and keys are normalized before rotation, as in Qwen 3.
        rope_start: position of the first pair; 1 in heads of `speculators`.
        more_layers: number of ordinary decoder layers after the first.
        layers_unsettled: whether `layers` may count inputs of layers, see `at_usual_layers`.
    """

    noun = "an EAGLE-3 head"
    counts = ("reach",)
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "query_norms", "layers_unsettled")
    first_layer = -1
    usual_layers = 3

    own_output: bool = True
    reach: int = 5
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    query_norms: bool = False
    rope_start: int = 0
    more_layers: int = 0
    layers_unsettled: bool = False

    def __post_init__(self) -> None:
        LayerConfig.__post_init__(self)
        for name in ("more_layers", "rope_start"):
            if not is_whole(value := getattr(self, name), 0) or value > MOST_MODULES:
                raise OptionError(f"{name} of an EAGLE-3 head must be 0 or more, at most {MOST_MODULES}, got {value!r}")
        if self.fc_norm and self.norm_before_fc:
            raise OptionError("layers are normed together or each for itself, not both")

    @property
    def decoders(self) -> int:
        return 1 + self.more_layers

    def usual_of(self, count: int) -> tuple[int, ...]:
        """The inputs of layers 2, the middle one and the third last."""
        return (1, count // 2 - 1, count - 4) if count > 6 else ()

    def at_usual_layers(self, count: int) -> Self:
        """As in `LayerConfig`; also determines what layer numbers count, or raises `OptionError` if that is ambiguous.

        Worked example: of 36 layers, 24, 30 and 36 can only count inputs of layers, so they are 23, 29 and 35 here.
        """
        if not self.layers_unsettled:
            return LayerConfig.at_usual_layers(self, count)
        entered = tuple(number - 1 for number in self.layers)
        if max(self.layers) == count or entered == self.usual_of(count):
            return replace(self, layers=entered, layers_unsettled=False)
        if self.layers[0] == 1:
            return replace(self, layers_unsettled=False)
        raise OptionError(
            f"its eagle_config names the layers {list(self.layers)}, and folders differ in what such numbers count; "
            f"write eagle_aux_hidden_state_layer_ids next to eagle_config: {list(self.layers)} where they count what "
            f"enters layers, {[number + 1 for number in self.layers]} where they count what layers give",
            field="layers",
        )


class _First(DecoderLayer):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, 2 * config.width, norms=config.query_norms)
        self.hidden_norm = nn.RMSNorm(config.width, config.eps)


class Eagle3Head(LayerHead):
    """A pair of a hidden state at position i and the token at i + 1 gives the distribution of the token at i + 2.

    `fc` merges the layers' hidden states (`fuse`). The layer reads the normalized embedding of the token and the
    normalized hidden state; its output is normalized and enters the LM head. For a drafted token, this output replaces
    the target's hidden state (2503.01840, section 3.1).
    """

    kind = "eagle"
    noun = "an EAGLE-3 head"
    plural = "EAGLE-3 heads"
    place_word = "step"
    sizes: ClassVar[type[Any]] = Eagle3Config
    speculators = "eagle3", "Eagle3Speculator"
    architectures: ClassVar[tuple[str, ...]] = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        width, many = config.width, config.merged
        self.fc = nn.Linear(many * width, width, bias=False)
        self.fc_norm = nn.ModuleList(nn.RMSNorm(width, config.eps) for _ in range(many if config.fc_norm else 0))
        self.input_norm = nn.RMSNorm(many * width, config.eps) if config.norm_before_fc else None
        self.midlayer = _First(config)
        numbers = range(1, 1 + config.more_layers)
        self.layers = nn.ModuleDict(
            {str(number): DecoderLayer(config, width, norms=config.query_norms) for number in numbers}
        )
        self._add_ends()

    def fuse(self, vectors: Sequence[Tensor]) -> Tensor:
        """Merge the hidden states of the layers, `[rows, width]` each."""
        chunks = [norm(each) for norm, each in zip(self.fc_norm, vectors, strict=True)] if self.fc_norm else vectors
        together = torch.cat(list(chunks), dim=-1)
        merged: Tensor = self.fc(together if self.input_norm is None else self.input_norm(together))
        return merged

    def step(self, vectors: Tensor, embedded: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """The replacement of the target's hidden state at the tokens, `[rows, width]`.

        `vectors`, `[rows, width]`, are of the position before each token: the target's merged ones, or this output.
        """
        layer, normed = self.midlayer, self.midlayer.hidden_norm(vectors)
        both = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        x = layer.run(normed if self.config.norm_before_residual else vectors, both, rotation, attend)
        for later in self.layers.values():
            x = later.run(x, later.input_layernorm(x), rotation, attend)  # type: ignore[operator]
        return self.norm(x) if self.config.norm_output else x

    def leaving(self, x: Tensor) -> Tensor:
        """Input of the LM head, `[rows, width]`, from the output of `step`."""
        return x if self.config.norm_output else self.norm(x)


@dataclass(frozen=True, slots=True)
class PEagleConfig(Eagle3Config):
    """Sizes of a P-EAGLE head; `mask_token` is the id of unknown tokens. Raises `OptionError` for invalid sizes."""

    mask_token: int = 0

    @property
    def mask(self) -> int:
        return self.mask_token


class PEagleHead(Eagle3Head):
    """Pairs of hidden states and tokens as in EAGLE-3, followed by unknown pairs: masks.

    The last known pair gives the distribution of the next but one token, and the k-th mask after it that of the token k
    positions further. A mask is the embedding of the mask token, with a learned vector for the hidden state.
    """

    kind = "p-eagle"
    noun = "a P-EAGLE head"
    plural = "P-EAGLE heads"
    sizes = PEagleConfig
    speculators = "peagle", "PEagleSpeculator"
    architectures = ()
    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, config.merged * config.width))
