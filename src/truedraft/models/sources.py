"""Texts of encoder-decoders: the encoder's text followed by the decoder's, as one list of tokens.

A request is the source, then the decoder's start token, then the answer. So a drafter sees the source before the
answer, and prompt lookup copies from it. The tokens mark the end of the source: the first decoder start token; if that
is also the end token, as in BART, the first place where it follows another. An audio source is one placeholder for each
vector of the encoder, and ends at the first other id. The layout of the feature extractor's output, its required
length, and how far the convolutions shorten it are determined from the encoder itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from truedraft.errors import PromptError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # imported lazily, because it takes seconds

_LENGTH = 4  # of a synthetic source, in tokens or, if its length is free, in vectors of audio
_ENDLESS = 2**20


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    """The input of an audio encoder, and the number of vectors that it makes of it."""

    name: str  # its keyword: `input_features` or `input_values`
    bands: int  # entries for each moment: bands of a spectrum, or 1 for the waveform
    limit: int  # most vectors that the encoder makes
    moments: int | None  # required number of moments; None if it is free
    example: Tensor
    vectors_of: Callable[[int], int]  # the number of vectors of a number of moments

    @classmethod
    def of(cls, model: PreTrainedModel) -> Sound:
        """From a loaded encoder-decoder; UnsupportedModelError if vectors are unknown, or its form of audio is."""
        encoder = model.get_encoder()
        convolutions = [module for module in encoder.modules() if isinstance(module, nn.Conv1d)]
        vectors_of = getattr(encoder, "_get_feat_extract_output_lengths", None)
        if vectors_of is None or not convolutions:
            raise UnsupportedModelError(
                f"{type(model).__name__} reads something else than text, and does not say how many vectors its encoder "
                "makes of it; use a model with an encoder like Whisper's"
            )
        name, bands = model.main_input_name, convolutions[0].in_channels
        limit = int(getattr(model.config, "max_source_positions", None) or _ENDLESS)

        def noise(*shape: int) -> Tensor:
            made = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
            return made.to(model.device, model.dtype)

        short = next(count for count in range(1, _ENDLESS) if vectors_of(count) >= _LENGTH)
        for shape in [(bands, short), (short, bands)] if bands > 1 else [(short,)]:
            example = noise(*shape)
            with suppress(RuntimeError, ValueError), torch.inference_mode():
                encoder(**{name: example})
                return cls(name, bands, limit, None, example, vectors_of)
        # Such as Whisper's, which reads 30 seconds of any audio.
        whole = limit * prod(each.stride[0] for each in convolutions)
        return cls(name, bands, limit, whole, noise(bands, whole), vectors_of)

    def vectors(self, inputs: Mapping[str, Tensor]) -> int:
        """Vectors that the encoder makes of a prompt's audio; PromptError for another form, or too short or long."""
        shape = tuple(inputs[self.name].shape)
        axis = list(self.example.shape[1:]).index(self.bands) + 1 if self.bands > 1 else 0
        if shape[:1] != (1,) or len(shape) != self.example.dim() or (axis and shape[axis] != self.bands):
            axes = "1 x moments" if self.bands == 1 else f"1 x {self.bands} bands x moments"
            raise PromptError(
                f"{self.name} has the shape {shape}, and the encoder reads one sound of {axes}; use the model's own "
                "feature extractor"
            )
        moments = prod(shape) // self.bands
        if self.moments not in (None, moments):
            raise PromptError(
                f"{self.name} has {moments} moments, and the encoder always reads {self.moments}; let its feature "
                "extractor pad or cut the sound"
            )
        count = int(self.vectors_of(moments))
        if not 1 <= count <= self.limit:
            how, other = ("short", "longer") if count < 1 else ("long", "shorter")
            raise PromptError(
                f"{self.name} has {moments} moments, which is too {how} for an encoder that makes 1 to {self.limit} "
                f"vectors of a sound; give a {other} one"
            )
        return count


@dataclass(frozen=True, slots=True)
class Sources:
    """The layout of one encoder-decoder's texts."""

    start: int  # the decoder's start token
    end: int  # the token that ends texts
    forced: tuple[int, ...]  # tokens that the decoder must write first (a language, in many translators)
    limit: int  # most tokens of a text source, and most after any source
    sound: Sound | None = None  # the encoder's audio input; None for one that reads text

    @classmethod
    def of(cls, model: PreTrainedModel, limit: int) -> Sources:
        """The layout of a loaded encoder-decoder; UnsupportedModelError without a start or an end token."""

        def known(*names: str) -> int | None:
            given = (getattr(at, name, None) for name in names for at in (model.generation_config, model.config))
            firsts = (each[0] if isinstance(each, list) and each else each for each in given)
            return next((each for each in firsts if isinstance(each, int)), None)

        start, end = known("decoder_start_token_id", "bos_token_id"), known("eos_token_id")
        if start is None or end is None:
            missing = "decoder_start_token_id" if start is None else "eos_token_id"
            raise UnsupportedModelError(
                f"{type(model).__name__} is an encoder-decoder, and neither its config.json nor its "
                f"generation_config.json has a {missing}; add it"
            )
        forced = known("forced_bos_token_id")
        sound = None if model.main_input_name == "input_ids" else Sound.of(model)
        return cls(start, end, () if forced is None else (forced,), limit, sound)

    @property
    def source_limit(self) -> int:
        return self.limit if self.sound is None else self.sound.limit

    @property
    def placeholder(self) -> int:
        """The id that represents one vector of audio; never the decoder's start token."""
        return self.end if self.end != self.start else int(not self.start)

    @property
    def opening(self) -> tuple[int, ...]:
        if self.sound is not None:
            return tuple(self.heard(self.opening_inputs))
        ids = (token for token in range(3, 1 << 30) if token not in (self.start, self.end))
        return (*(next(ids) for _ in range(_LENGTH - 1)), self.end, self.start, *self.forced)

    @property
    def opening_inputs(self) -> dict[str, Tensor]:
        return {} if self.sound is None else {self.sound.name: self.sound.example}

    def length(self, tokens: Sequence[int]) -> int | None:
        """How many of the first tokens are the source; None if it does not end in these.

        Worked example: with the start 0, of 5 6 1 0 8 the first three; with the start 2, which ends texts, too, of
        5 2 2 8 the first two. Of audio, with the placeholder 2, of 2 2 2 3 8 the first three.
        """
        if self.sound is not None:
            count = sum(1 for _ in takewhile(self.placeholder.__eq__, tokens))
            return count if count < len(tokens) else None
        place = -1
        with suppress(ValueError):  # there is none
            while True:
                place = tokens.index(self.start, place + 1)
                if self.start != self.end or (place and tokens[place - 1] == self.end):
                    return place
        return None

    def text(self, source: Sequence[int], *, continues: bool = False) -> list[int]:
        """The first tokens of a request with a text source: the encoder's tokens, with the end token of its tokenizer.

        If it `continues`, they may already be followed by the decoder's first tokens. Raises PromptError: there is no
        source, it is too long, or its end is ambiguous.
        """
        ids = list(source)
        length = self.length(ids)
        if length is None:
            ids = [*ids, self.start, *self.forced]
            length = self.length(ids)
        elif not continues:
            raise PromptError(f"the prompt holds token id {self.start}, which begins the decoder's text; take it out")
        if length is None:
            last = ids[-2 - len(self.forced)]
            raise PromptError(f"the prompt ends in token id {last}; end it with {self.end}, as the tokenizer does")
        if not length:
            raise PromptError("the prompt has no tokens for the encoder; give at least one")
        if length > self.limit:
            raise PromptError(f"the prompt has {length} tokens, and the encoder reads at most {self.limit}; shorten it")
        return ids

    def heard(self, inputs: Mapping[str, Tensor], begun: Sequence[int] = ()) -> list[int]:
        """The first tokens of a request with an audio source; `begun` are the decoder's, empty for its default ones.

        Raises PromptError where there is no audio that the encoder could read, or its end is ambiguous.
        """
        assert self.sound is not None
        if begun and begun[0] == self.placeholder:
            raise PromptError(
                f"the decoder's text begins with token id {begun[0]}, the placeholder of sound; begin it with "
                f"{self.start}, as the model does"
            )
        placeholders = [self.placeholder] * self.sound.vectors(inputs)
        return [*placeholders, *(begun or (self.start, *self.forced))]
