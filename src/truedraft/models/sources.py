"""Texts of encoder-decoders: the encoder's text followed by the decoder's, as one list of tokens.

A request of such a model is the source, then the decoder's start token, then the answer. So it is a list of tokens as
with any other model: a drafter sees the source before the answer, prompt lookup copies from it, and a draft model that
is an encoder-decoder, too, reads it with its own encoder. The tokens themselves mark the end of the source: the first
decoder start token; if that is also the end token, as in BART, the first place where it follows another.

An audio source has no tokens. It is represented by one placeholder for each vector of the encoder, all of one id, and
ends at the first other id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from torch import Tensor

from truedraft.errors import PromptError, UnsupportedModelError
from truedraft.models.sound import Sound

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # imported lazily, because it takes seconds

_LENGTH = 4  # of a synthetic source


@dataclass(frozen=True, slots=True)
class Sources:
    """The layout of one encoder-decoder's texts.

    Attributes:
        start: the decoder's start token.
        end: the token that ends texts.
        forced: tokens that the decoder must write first (a language, in many translators).
        limit: most tokens of a text source, and most after any source.
        sound: the encoder's audio input; None for one that reads text.
    """

    start: int
    end: int
    forced: tuple[int, ...]
    limit: int
    sound: Sound | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, limit: int) -> Sources:
        """The layout of a loaded encoder-decoder.

        Raises:
            UnsupportedModelError: it has no decoder start token or no end token.
        """

        def known(name: str) -> int | None:
            for place in (model.generation_config, model.config):
                found = getattr(place, name, None)
                found = found[0] if isinstance(found, list) and found else found
                if isinstance(found, int):
                    return found
            return None

        start, end = known("decoder_start_token_id"), known("eos_token_id")
        start = known("bos_token_id") if start is None else start
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
        """Most tokens of a source, placeholders of audio included."""
        return self.limit if self.sound is None else self.sound.limit

    @property
    def placeholder(self) -> int:
        """The id that represents one vector of audio; never the decoder's start token."""
        return self.end if self.end != self.start else int(not self.start)

    @property
    def opening(self) -> tuple[int, ...]:
        """A short text without an answer, for measurements and checks."""
        if self.sound is not None:
            return tuple(self.heard(self.opening_inputs))
        ids = (token for token in range(3, 1 << 30) if token not in (self.start, self.end))
        return (*(next(ids) for _ in range(_LENGTH - 1)), self.end, self.start, *self.forced)

    @property
    def opening_inputs(self) -> dict[str, Tensor]:
        """Non-text inputs of `opening`; empty for an encoder of text."""
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
        try:
            while True:
                place = tokens.index(self.start, place + 1)
                if self.start != self.end or (place and tokens[place - 1] == self.end):
                    return place
        except ValueError:
            return None

    def text(self, source: Sequence[int], *, continues: bool = False) -> list[int]:
        """The first tokens of a request with a text source.

        Args:
            source: the encoder's tokens, with the end token of its tokenizer.
            continues: whether the source may already be followed by the decoder's first tokens.

        Raises:
            PromptError: there is none, it is too long, or its end is ambiguous.
        """
        ids = list(source)
        length = self.length(ids)
        if length is None:
            ids = [*ids, self.start, *self.forced]
            length = self.length(ids)
        elif not continues:
            raise PromptError(
                f"the prompt holds token id {self.start}, with which the decoder's text begins, so that one cannot "
                "tell where the encoder's ends; take it out"
            )
        if length is None:
            raise PromptError(
                f"the prompt ends in token id {ids[-2 - len(self.forced)]}; end it with {self.end}, as the model's "
                "tokenizer does, for one could not tell where the encoder's text ends"
            )
        if not length:
            raise PromptError("the prompt has no tokens for the encoder; give at least one")
        if length > self.limit:
            raise PromptError(f"the prompt has {length} tokens, and the encoder reads at most {self.limit}; shorten it")
        return ids

    def heard(self, inputs: Mapping[str, Tensor], begun: Sequence[int] = ()) -> list[int]:
        """The first tokens of a request with an audio source; `begun` are the decoder's, empty for its default ones.

        Raises:
            PromptError: there is no audio that the encoder could read, or its end is ambiguous.
        """
        assert self.sound is not None
        if begun and begun[0] == self.placeholder:
            raise PromptError(
                f"the decoder's text begins with token id {begun[0]}, which stands for the sound here; begin it with "
                f"{self.start}, as the model does"
            )
        placeholders = [self.placeholder] * self.sound.vectors(inputs)
        return [*placeholders, *(begun or (self.start, *self.forced))]
