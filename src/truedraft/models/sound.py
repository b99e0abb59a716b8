"""Input of an audio encoder, and the number of vectors that it makes of it.

Families differ in the layout of their feature extractors' output, in its required length, and in how far their
convolutions shorten it. All of that is determined from the encoder itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from truedraft.errors import PromptError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VECTORS = 4  # of synthetic audio, if its length is free
_ENDLESS = 2**20


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    """The input of an audio encoder.

    Attributes:
        name: its keyword: `input_features` or `input_values`.
        bands: entries for each moment: bands of a spectrum, or 1 for the waveform.
        limit: most vectors that the encoder makes.
        moments: required number of moments; None if it is free.
        example: synthetic audio for measurements and checks.
        vectors_of: the number of vectors that the encoder makes of a number of moments.
    """

    name: str
    bands: int
    limit: int
    moments: int | None
    example: Tensor
    vectors_of: Callable[[int], int]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Sound:
        """From a loaded encoder-decoder with an audio encoder.

        Raises:
            UnsupportedModelError: it does not say how many vectors its encoder makes, or takes another form of audio.
        """
        encoder = model.get_encoder()
        convolutions = [module for module in encoder.modules() if isinstance(module, nn.Conv1d)]
        vectors_of = getattr(encoder, "_get_feat_extract_output_lengths", None)
        if vectors_of is None or not convolutions:
            raise UnsupportedModelError(
                f"{type(model).__name__} reads something else than text, and does not say how many vectors its encoder "
                "makes of it; use a model that hears as Whisper does"
            )
        bands = convolutions[0].in_channels
        limit = int(getattr(model.config, "max_source_positions", None) or _ENDLESS)
        short = next(count for count in range(1, _ENDLESS) if vectors_of(count) >= _VECTORS)
        for shape in [(bands, short), (short, bands)] if bands > 1 else [(short,)]:
            example = _noise(shape, model)
            if _can_read(encoder, model.main_input_name, example):
                return cls(model.main_input_name, bands, limit, None, example, vectors_of)
        # Such as Whisper's, which reads 30 seconds of any audio.
        whole = limit * prod(each.stride[0] for each in convolutions)
        return cls(model.main_input_name, bands, limit, whole, _noise((bands, whole), model), vectors_of)

    def vectors(self, inputs: Mapping[str, Tensor]) -> int:
        """The number of vectors that the encoder makes of a prompt's audio.

        Raises:
            PromptError: it is not of the encoder's form, of several prompts, too short or too long.
        """
        shape = tuple(inputs[self.name].shape)
        axis = list(self.example.shape[1:]).index(self.bands) + 1 if self.bands > 1 else 0
        if shape[:1] != (1,) or len(shape) != self.example.dim() or (axis and shape[axis] != self.bands):
            axes = ["1", *(["moments"] if self.bands == 1 else [f"{self.bands} bands", "moments"])]
            raise PromptError(
                f"{self.name} has the shape {shape}, and the encoder reads one sound of {' x '.join(axes)}; use the "
                "model's own feature extractor"
            )
        moments = prod(shape) // self.bands
        if self.moments not in (None, moments):
            raise PromptError(
                f"{self.name} has {moments} moments, and the encoder reads {self.moments} whatever is said in them; "
                "let its feature extractor pad or cut the sound"
            )
        count = int(self.vectors_of(moments))
        if not 1 <= count <= self.limit:
            how = "short" if count < 1 else "long"
            raise PromptError(
                f"{self.name} has {moments} moments, which is too {how} for an encoder that makes 1 to {self.limit} "
                f"vectors of a sound; give a {'longer' if count < 1 else 'shorter'} one"
            )
        return count


def _noise(shape: tuple[int, ...], model: PreTrainedModel) -> Tensor:
    made = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    return made.to(model.device, model.dtype)


@torch.inference_mode()
def _can_read(encoder: nn.Module, name: str, sound: Tensor) -> bool:
    try:
        encoder(**{name: sound})
    except (RuntimeError, ValueError):
        return False
    return True
