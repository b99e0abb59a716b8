"""Which tokens heads read while they are trained: those of the text, or now and then their own guesses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from truedraft.training.trainee import place_logits

if TYPE_CHECKING:
    from truedraft.training.redrafter_trainee import RedrafterTrainee
    from truedraft.training.windows import Pack

_CHUNK = 256  # positions whose logits are held at once


class Feed(Protocol):
    """Chooses the tokens that heads read."""

    def tokens(self, pack: Pack, hidden: Tensor) -> Tensor:
        """The tokens to read, `[positions, reach]`, at the places of a pack, whose vectors `[positions, width]` are."""


class TextFeed:
    """The text's tokens at all places: teacher forcing.

    Args:
        reach: of the heads.
    """

    def __init__(self, reach: int) -> None:
        self._ahead = torch.arange(reach)

    def tokens(self, pack: Pack, hidden: Tensor) -> Tensor:
        """See `Feed`."""
        del hidden
        return pack.tokens[pack.places[:, None] + self._ahead.to(pack.places.device)]


class SelfFeed:
    """At a share of the positions the recurrence reads the head's own greedy guesses, from the second token on.

    The first token is the one that the target gave, which is known in decoding too. Which positions these are is a
    function of the seed and the batch alone, so a resumed training draws the same.

    Args:
        trainee: that guesses.
        share: in [0, 1], the probability of each position.
        seed: of the choice.
    """

    def __init__(self, trainee: RedrafterTrainee, share: float, seed: int) -> None:
        self._trainee = trainee
        self._share = share
        self._seed = seed
        self._text = TextFeed(trainee.reach)

    def tokens(self, pack: Pack, hidden: Tensor) -> Tensor:
        """See `Feed`."""
        tokens = self._text.tokens(pack, hidden)
        key = (self._seed, len(pack.rows), int(pack.rows[0]), int(pack.rows[-1]))
        drawn = np.random.default_rng(key).random(len(tokens))
        chosen = torch.from_numpy(np.flatnonzero(drawn < self._share)).to(tokens.device)
        for some in chosen.split(_CHUNK):
            tokens[some, 1:] = self._guesses(hidden[some], tokens[some, 0])
        return tokens

    @torch.no_grad()
    def _guesses(self, hidden: Tensor, token: Tensor) -> Tensor:
        """Greedy guesses `[positions, reach - 1]` behind a token `[positions]`."""
        head, embed = self._trainee.module, self._trainee.lm_head.embed
        state, found = head.new_state(len(hidden)), []
        for place in range(self._trainee.reach - 1):
            state = head.advance(state, embed(token))
            token = place_logits(self._trainee, place, head.leaving(hidden, state)).argmax(dim=-1)
            found.append(token)
        return torch.stack(found, dim=1) if found else hidden.new_zeros(len(hidden), 0, dtype=torch.int64)
