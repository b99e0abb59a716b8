"""A draft model that drafts ahead: what lives in the other process, and what the two processes tell each other.

Behind a chain that is being judged the likeliest outcome is that all of it stays, and that the token behind it is the
one which the draft would take there. So that is taken to be the text, and the chain that the next step would be asked
for is drafted behind it, with the noise of that step, by the same code as any other: it is, number for number, what
would be drafted if it were asked for then. Whether it is used, a *hit*, or drafted anew changes when a token is
drafted, and never which one. How much is drafted ahead is settled before the round, by the budget asked for last.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise, NoiseKey, Purpose
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import Draw, Proposal
from truedraft.core.token_view import TokenView
from truedraft.core.tree import TokenTree
from truedraft.drafters.base import DraftRequest
from truedraft.drafters.draft_model import DraftModel
from truedraft.models.base import LanguageModel


@dataclass(frozen=True, slots=True)
class Call:
    """A request that a chain is asked for.

    Attributes:
        id: of the request.
        params: its options; they change no logits of single tokens.
        tokens: that its text gained since it was told of last; all of it at the first call.
        budget: of the chain; not zero.
        noise: its key, see `KeyedNoise.key`.
        limit: of its cache, in tokens.
    """

    id: int
    params: SamplingParams
    tokens: tuple[int, ...]
    budget: Budget
    noise: NoiseKey
    limit: int


@dataclass(frozen=True, slots=True)
class Chain:
    """A proposal that is a chain, as it goes from one process to another.

    Attributes:
        tokens: of the nodes.
        draws: of each tree row.
        probs: `[nodes, vocab]` that they were drawn from; None where they are deterministic.
        confidence: the draft's own probabilities of the tokens, where they were worked out.
    """

    tokens: list[int]
    draws: tuple[tuple[Draw, ...], ...]
    probs: NDArray[Any] | None
    confidence: tuple[float, ...]

    @classmethod
    def of(cls, proposal: Proposal) -> Chain:
        """A drafted chain."""
        probs = None if proposal.probs is None else proposal.probs.numpy()
        return cls(proposal.tree.host_ids, proposal.draws, probs, proposal.confidence)

    def proposal(self) -> Proposal:
        """The same, to be judged."""
        probs = None if self.probs is None else torch.from_numpy(self.probs)
        return Proposal(TokenTree.chain(self.tokens), self.draws, probs, self.confidence)

    def within(self, budget: Budget) -> Chain | None:
        """What a budget would have drafted of it, which is its beginning; None where that is longer, or unknown.

        Args:
            budget: of the same draft with the same noise.
        """
        length, survival, ends = min(budget.depth, budget.nodes), 1.0, not budget.looks
        if budget.looks:
            for number, probability in enumerate(self.confidence[:length], 1):
                survival *= budget.chance(probability)
                if number == length or not budget.goes_on(probability, survival):
                    length, ends = number, True
                    break
        if not ends or length > len(self.tokens):
            return None
        probs = None if self.probs is None else self.probs[:length]
        confidence = self.confidence[:length] if budget.looks else ()
        return Chain(self.tokens[:length], (*self.draws[:length], ()), probs, confidence)


@dataclass(frozen=True, slots=True)
class Reply:
    """What was drafted.

    Attributes:
        chains: one for each call.
        hits: how many of them had been drafted ahead.
        ahead_tokens: drafted ahead so far, used or not.
        cpu_s: processor time of all that was drafted so far, ahead or not.
        ahead_cpu_s: of what was drafted ahead.
        cache_bytes: that are held for requests.
        failure: why nothing could be drafted ahead the last time; None where it could.
    """

    chains: list[Chain]
    hits: int
    ahead_tokens: int
    cpu_s: float
    ahead_cpu_s: float
    cache_bytes: int
    failure: str | None


class AheadWorker(Protocol):
    """Where chains are drafted, and drafted ahead once they were handed out.

    Attributes:
        alive: whether it can be asked.
    """

    @property
    def alive(self) -> bool: ...

    def propose(self, calls: Sequence[Call]) -> Reply:
        """A chain for each of some requests; raises DrafterError where there is none."""

    def end(self, request: int) -> None:
        """A request is over."""


@dataclass(slots=True, eq=False)
class _Text:
    """A request.

    Attributes:
        request: as the draft model sees it.
        call: that it was asked for last.
        tokens: its text as far as it was told, and behind that what is taken to follow.
        told: how many it was told.
        chain: that it was answered with.
        ahead: the chain behind what is taken to follow; None where there is none.
    """

    request: DraftRequest
    call: Call
    tokens: list[int]
    told: int = 0
    chain: list[int] = field(default_factory=list)
    ahead: Chain | None = None

    def key(self, further: int, step: int = 0, member: int | None = None) -> NoiseKey:
        """Of the noise so many tokens and steps behind that of the call, or of another member there."""
        root, position, steps, own, shared = self.call.noise
        return root, position + further, steps + step, own if member is None else member, shared


class _Verdicts(KeyedNoise):
    """The noise of verdicts, with which the draft draws the token behind a chain just as the bonus token is drawn.

    That decides nothing: which token the target draws with that number depends on the target's distribution alone.
    """

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        return super().uniform(Purpose.BONUS, depth, index)


class AheadDrafter:
    """Drafts chains, and, asked to, what the next step will likeliest ask for.

    Args:
        drafter: drafts chains; its model carries no states from token to token.
        clock: seconds of processor time.
    """

    alive = True

    def __init__(self, drafter: DraftModel, clock: Callable[[], float] = time.process_time) -> None:
        self.drafter = drafter
        self._clock = clock
        self._began_s = clock()
        self._texts: dict[int, _Text] = {}
        self._open: list[_Text] = []  # that were answered and not drafted ahead of
        self._ahead_tokens = 0
        self._ahead_s = 0.0
        self._failure: str | None = None

    def _text(self, call: Call) -> _Text:
        """A request, begun at its first call. It shares what it begins with with nobody: nobody knows who may."""
        if call.id not in self._texts:
            tokens: list[int] = []
            request = DraftRequest(call.id, call.params, TokenView(tokens), scope=call.id)
            self.drafter.begin(request)
            self._texts[call.id] = _Text(request, call, tokens)
        return self._texts[call.id]

    def end(self, request: int) -> None:
        """A request is over."""
        text = self._texts.pop(request, None)
        if text is not None:
            self._open = [each for each in self._open if each is not text]
            del text.tokens[text.told :]
            self.drafter.rewind(text.request)
            self.drafter.end(text.request)

    def propose(self, calls: Sequence[Call]) -> Reply:
        """A chain for each call: what was drafted ahead for it, or drafted now."""
        texts = [self._text(call) for call in calls]
        self._open = []
        chains = [self._take(text, call) for text, call in zip(texts, calls, strict=True)]
        missed = [place for place, chain in enumerate(chains) if chain is None]
        if missed:
            drafted = self.drafter.propose(
                [texts[place].request for place in missed],
                [calls[place].budget for place in missed],
                [KeyedNoise.of_key(calls[place].noise) for place in missed],
            )
            for place, proposal in zip(missed, drafted, strict=True):
                chains[place] = Chain.of(proposal)
        found = [chain for chain in chains if chain is not None]
        for text, call, chain in zip(texts, calls, found, strict=True):
            text.call, text.chain = call, chain.tokens
        self._open = [text for text in texts if text.chain]
        hits, spent_s = len(calls) - len(missed), self._clock() - self._began_s
        held, failure = self.drafter.cache_bytes, self._failure
        return Reply(found, hits, self._ahead_tokens, spent_s, self._ahead_s, held, failure)

    def _take(self, text: _Text, call: Call) -> Chain | None:
        """Read on to where a request is now; the chain that was drafted ahead for it, if one was."""
        assumed, ahead, text.ahead = tuple(text.tokens[text.told :]), text.ahead, None
        if assumed != call.tokens:
            pairs = enumerate(zip(assumed, call.tokens, strict=False))
            same = next((place for place, (one, other) in pairs if one != other), min(len(assumed), len(call.tokens)))
            del text.tokens[text.told + same :]
            self.drafter.rewind(text.request)
            text.tokens += call.tokens[same:]
        text.told = len(text.tokens)
        cache = self.drafter.caches[call.id]
        if cache.limit != call.limit:
            cache.limit_to(call.limit)
        followed = call.noise == text.key(len(assumed), step=1)
        if ahead is None or assumed != call.tokens or not followed:
            return None
        return ahead.within(self.drafter.within(call.budget, text.request))

    def draft_ahead(self) -> None:
        """Draft for the likeliest outcome of the step that judges what was handed out last.

        A failure loses no answer: then it is drafted when it is asked for.
        """
        texts, self._open = self._open, []
        began_s = self._clock()
        try:
            if texts:
                self._draft_behind(texts)
            self._failure = None
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
        self._ahead_s += self._clock() - began_s

    def _draft_behind(self, texts: Sequence[_Text]) -> None:
        """Take each chain and the draft's own token behind it to be the text, and draft on, all requests together."""
        for text in texts:
            cache = self.drafter.caches[text.request.id]
            cache.commit(range(min(cache.uncommitted, len(text.chain))))
            text.tokens += text.chain
        noises = [_Verdicts.of_key(text.key(len(text.chain), member=0)) for text in texts]
        ends = self.drafter.propose([text.request for text in texts], [Budget(1)] * len(texts), noises)
        for text, end in zip(texts, ends, strict=True):
            text.tokens += end.tree.host_ids
        texts = [text for text, end in zip(texts, ends, strict=True) if len(end.tree)]
        drafted = self.drafter.propose(
            [text.request for text in texts],
            [_ahead(self.drafter.within(text.call.budget, text.request), len(text.chain)) for text in texts],
            [KeyedNoise.of_key(text.key(len(text.chain) + 1, step=1)) for text in texts],
        )
        for text, proposal in zip(texts, drafted, strict=True):
            text.ahead = Chain.of(proposal)
            self._ahead_tokens += len(proposal.tree)


def ahead_drafter(
    load: Callable[[], LanguageModel], num_speculative_tokens: int, min_probability: float
) -> AheadDrafter:
    """What drafts in the other process.

    Args:
        load: the model; each call loads it anew.
        num_speculative_tokens: length of a chain.
        min_probability: draft no further below a token that the draft itself gave less than this.
    """
    return AheadDrafter(DraftModel(load(), num_speculative_tokens, min_probability=min_probability))


def _ahead(budget: Budget, drafted: int) -> Budget:
    """What is drafted ahead, known before it begins: as much as a budget allows, whatever its tokens turn out to be.

    Where probabilities say how far to go, nobody knows how far that will be; then it is one token more than the last
    time.

    Args:
        budget: of the last proposal, cut to what the draft may do.
        drafted: tokens of that proposal.
    """
    if not budget.looks:
        return budget
    return replace(budget.cut(drafted + 1), min_probability=sys.float_info.min, floor=0.0)  # looks, and never stops
