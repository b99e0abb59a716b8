"""Texts of encoder-decoders: what the encoder reads, and behind it what the decoder writes, as one list of tokens.

A request of such a model is the source, then the token that the decoder begins with, then the answer. So a request is a
list of tokens as with any other model: whoever drafts sees the source before the answer, prompt lookup copies from it,
and a draft that is an encoder-decoder, too, reads it with its own encoder. Where the source ends is told by the tokens
themselves: by the first token that decoders begin with, and where that is the one that ends texts, as in BART, by the
first place where it follows another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from truedraft.errors import PromptError, UnsupportedModelError

_LENGTH = 4  # of a source that is made up


@dataclass(frozen=True, slots=True)
class Sources:
    """How the texts of one encoder-decoder are laid out.

    Attributes:
        start: the token that the decoder begins with.
        end: the token that ends texts.
        forced: what the decoder has to write first (a language, in many translators).
        limit: most tokens of a source, and most behind it.
    """

    start: int
    end: int
    forced: tuple[int, ...]
    limit: int

    @classmethod
    def of(cls, model: PreTrainedModel, limit: int) -> Sources:
        """Those of a loaded model.

        Args:
            model: an encoder-decoder.
            limit: as the attribute.

        Raises:
            UnsupportedModelError: it does not say how the decoder begins, or what ends a text.
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
        return cls(start, end, () if forced is None else (forced,), limit)

    @property
    def opening(self) -> tuple[int, ...]:
        """A short text of which nothing is answered yet, for measurements and checks."""
        ids = (token for token in range(3, 1 << 30) if token not in (self.start, self.end))
        return (*(next(ids) for _ in range(_LENGTH - 1)), self.end, self.start, *self.forced)

    def length(self, tokens: Sequence[int]) -> int | None:
        """How many of the first tokens are the source; None where it does not end in these.

        Worked example: with the start 0, of 5 6 1 0 8 the first three; with the start 2, which ends texts, too, of
        5 2 2 8 the first two.
        """
        place = -1
        try:
            while True:
                place = tokens.index(self.start, place + 1)
                if self.start != self.end or (place and tokens[place - 1] == self.end):
                    return place
        except ValueError:
            return None

    def text(self, source: Sequence[int], *, goes_on: bool = False) -> list[int]:
        """A request's first tokens.

        Args:
            source: what the encoder reads, as its tokenizer ends it.
            goes_on: whether the source may already be followed by the decoder's first tokens.

        Raises:
            PromptError: there is none, it is too long, or one cannot tell where it ends.
        """
        ids = list(source)
        length = self.length(ids)
        if length is None:
            ids = [*ids, self.start, *self.forced]
            length = self.length(ids)
        elif not goes_on:
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
