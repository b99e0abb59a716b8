"""Drafting ahead: the part that runs in the other process, and the messages between the two processes.

The likeliest outcome of verification is that the whole chain is accepted, and that the bonus token is the draft's own
next token. The other process drafts the next chain for this outcome, with the noise and budget of the next step. It is
used if the next step requests exactly it (a *hit*); otherwise the chain is drafted again. So drafting ahead changes
when a token is drafted, never which token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from truedraft.core.budget import NO_DRAFT, Budget
from truedraft.core.noise import KeyedNoise, NoiseKey, Purpose
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import Proposal
from truedraft.core.token_view import TokenView
from truedraft.core.tree import TokenTree
from truedraft.drafters.base import DraftRequest
from truedraft.drafters.draft_model import DraftModel
from truedraft.models.base import LanguageModel


@dataclass(frozen=True, slots=True)
class Call:
    """A request for one chain.

    Attributes:
        params: sampling options; they do not change the logits of single tokens.
        tokens: of the text since the last call; in the first call the whole text.
        limit: of the request's cache, in tokens.
    """

    id: int
    params: SamplingParams
    tokens: tuple[int, ...]
    budget: Budget
    noise: NoiseKey
    limit: int


@dataclass(frozen=True, slots=True)
class Reply:
    """The chains, one per call, of which `hits` were drafted ahead; totals of tokens drafted ahead, and of caches."""

    chains: list[Proposal]
    hits: int
    ahead_tokens: int
    cache_bytes: int


@dataclass(slots=True, eq=False)
class _Text:
    """A request: its `received` tokens, then those assumed to follow, and the last chain sent.

    `budget` is assumed for the next chain; `ahead` is the chain after the assumed tokens.
    """

    request: DraftRequest
    tokens: list[int]
    received: int = 0
    chain: list[int] = field(default_factory=list)
    noise: NoiseKey = (0, 0, 0, 0, 0)
    budget: Budget = NO_DRAFT
    ahead: Proposal | None = None

    def follow(self, new: Sequence[int]) -> int:
        """Replace the assumed tokens by the real ones; returns the length of the unchanged prefix."""
        pairs = enumerate(zip(self.tokens[self.received :], new, strict=False))
        known = min(len(self.tokens) - self.received, len(new))
        same = self.received + next((place for place, (one, other) in pairs if one != other), known)
        self.tokens[self.received :] = new
        self.received = len(self.tokens)
        return same

    def key(self, further: int, step: int = 0) -> NoiseKey:
        root, position, steps, member, shared = self.noise
        return root, position + further, steps + step, member, shared


class _Verdicts(KeyedNoise):
    """The noise of verification, to draw the token after a chain as the bonus token is drawn."""

    def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
        return super().uniform(Purpose.BONUS, depth, index)


class AheadDrafter:
    """Drafts chains, and those that the next step most likely needs; its model must not carry recurrent state."""

    def __init__(self, drafter: DraftModel) -> None:
        self.drafter = drafter
        self._texts: dict[int, _Text] = {}
        self._open: list[_Text] = []  # answered, and not yet drafted ahead
        self._ahead_tokens = 0

    def end(self, request: int) -> None:
        text = self._texts.pop(request, None)
        if text is not None:
            self._open = [each for each in self._open if each is not text]
            self.drafter.end(text.request)

    def propose(self, calls: Sequence[Call]) -> Reply:
        chains = {place: chain for place, call in enumerate(calls) if (chain := self._take(call)) is not None}
        hits = len(chains)
        missed = [place for place in range(len(calls)) if place not in chains]
        self._open = [self._texts[call.id] for call in calls]
        if missed:
            drafted = self.drafter.propose(
                [self._open[place].request for place in missed],
                [calls[place].budget for place in missed],
                [KeyedNoise.of_key(calls[place].noise) for place in missed],
            )
            chains |= zip(missed, drafted, strict=True)
        for place, text in enumerate(self._open):
            text.noise, text.chain = calls[place].noise, chains[place].tree.host_ids
        replied = [chains[place] for place in range(len(calls))]
        return Reply(replied, hits, self._ahead_tokens, self.drafter.held.n_bytes)

    def _take(self, call: Call) -> Proposal | None:
        """Update a request to its current text; returns the chain drafted ahead for it, or None."""
        text = self._texts.get(call.id)
        if text is None:
            tokens: list[int] = []
            text = self._texts[call.id] = _Text(
                DraftRequest(call.id, call.params, TokenView(tokens), scope=call.id), tokens
            )
            self.drafter.begin(text.request)
        cache, assumed = self.drafter.caches[call.id], len(text.tokens)
        if cache.limit != call.limit:
            cache.limit_to(call.limit)
        followed = call.noise == text.key(assumed - text.received, step=1)
        same = text.follow(call.tokens)
        if same < assumed:
            cache.rollback(min(cache.length, same))
        budget, text.budget = text.budget, self.drafter.within(call.budget, text.request)
        ahead, text.ahead = text.ahead, None
        if ahead is None or not followed or not same == assumed == text.received:
            return None
        return ahead if text.budget == budget else _shortened(ahead, budget, text.budget)

    def draft_ahead(self) -> None:
        texts, self._open = [text for text in self._open if text.chain], []
        for text in texts:
            cache = self.drafter.caches[text.request.id]
            cache.commit(range(min(cache.uncommitted, len(text.chain))))
            text.tokens += text.chain
        ends = self._draft(texts, [Budget(1)] * len(texts), [_verdict(text) for text in texts])
        for text, end in zip(texts, ends, strict=True):
            text.tokens += end.tree.host_ids
        texts = [text for text, end in zip(texts, ends, strict=True) if len(end.tree)]
        noises = [KeyedNoise.of_key(text.key(len(text.chain) + 1, step=1)) for text in texts]
        for text, proposal in zip(texts, self._draft(texts, [text.budget for text in texts], noises), strict=True):
            text.ahead = proposal
            self._ahead_tokens += len(proposal.tree)

    def _draft(self, texts: Sequence[_Text], budgets: Sequence[Budget], noises: Sequence[KeyedNoise]) -> list[Proposal]:
        return self.drafter.propose([text.request for text in texts], budgets, noises) if texts else []


def ahead_drafter(
    load: Callable[[], LanguageModel], num_speculative_tokens: int, min_probability: float, context: int | None = None
) -> AheadDrafter:
    """The drafter of the other process; `load` loads its model."""
    drafter = DraftModel(load(), num_speculative_tokens, min_probability=min_probability, context=context)
    return AheadDrafter(drafter)


def _verdict(text: _Text) -> KeyedNoise:
    root, position, step, _, shared = text.key(len(text.chain))
    return _Verdicts.of_key((root, position, step, 0, shared))


def _shortened(chain: Proposal, given: Budget, target: Budget) -> Proposal | None:
    """The chain as with budget `target` instead of `given`; None if it is longer, or depends on probabilities."""
    length = min(target.depth, target.nodes)
    if given.looks or target.looks or length > len(chain.tree):
        return None
    probs = None if chain.probs is None else chain.probs[:length]
    return Proposal(TokenTree.chain(chain.tree.host_ids[:length]), (*chain.draws[:length], ()), probs)
