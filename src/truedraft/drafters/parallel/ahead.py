"""A draft model that drafts ahead: what lives in the other process, and what the two processes tell each other.

The likeliest outcome of a chain that is being judged is that all of it stays, with the draft's own next token behind
it. That is taken to be the text, and the next chain is drafted behind it, by the same code as any other, with the noise
and the budget of the next step. It is used if the next step asks for just that, a *hit*; otherwise the chain is drafted
anew. So drafting ahead changes when a token is drafted, and never which one.
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
    """A request that a chain is asked for.

    Attributes:
        id: of the request.
        params: its options; they change no logits of single tokens.
        tokens: that its text gained since the last call; all of it at the first one.
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
class Reply:
    """What was drafted.

    Attributes:
        chains: one for each call.
        hits: how many of them had been drafted ahead.
        ahead_tokens: drafted ahead so far, used or not.
        cache_bytes: that are held for requests.
    """

    chains: list[Proposal]
    hits: int
    ahead_tokens: int
    cache_bytes: int


@dataclass(slots=True, eq=False)
class _Text:
    """A request.

    Attributes:
        request: as the draft model sees it.
        tokens: its text as far as it was told, and behind that what is taken to follow.
        told: how many it was told.
        chain: that it was answered with.
        noise: key of that chain's noise.
        budget: that the next chain is taken to have, cut to what the draft may do.
        ahead: the chain behind what is taken to follow; None where there is none.
    """

    request: DraftRequest
    tokens: list[int]
    told: int = 0
    chain: list[int] = field(default_factory=list)
    noise: NoiseKey = (0, 0, 0, 0, 0)
    budget: Budget = NO_DRAFT
    ahead: Proposal | None = None

    def follow(self, new: Sequence[int]) -> int:
        """Take in the tokens that really follow; with how many of its tokens the text still begins."""
        pairs = enumerate(zip(self.tokens[self.told :], new, strict=False))
        known = min(len(self.tokens) - self.told, len(new))
        same = self.told + next((place for place, (one, other) in pairs if one != other), known)
        self.tokens[self.told :] = new
        self.told = len(self.tokens)
        return same

    def key(self, further: int, step: int = 0) -> NoiseKey:
        """Of the noise so many tokens and steps behind that of the chain."""
        root, position, steps, member, shared = self.noise
        return root, position + further, steps + step, member, shared


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
    """

    def __init__(self, drafter: DraftModel) -> None:
        self.drafter = drafter
        self._texts: dict[int, _Text] = {}
        self._open: list[_Text] = []  # that were answered and not drafted ahead of
        self._ahead_tokens = 0

    def end(self, request: int) -> None:
        """A request is over."""
        text = self._texts.pop(request, None)
        if text is not None:
            self._open = [each for each in self._open if each is not text]
            self.drafter.end(text.request)

    def propose(self, calls: Sequence[Call]) -> Reply:
        """A chain for each call: what was drafted ahead for it, or drafted now."""
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
        """Read on to where a request is now; the chain that was drafted ahead for it, if one was.

        It shares what it begins with with nobody: nobody here knows who may.
        """
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
        followed = call.noise == text.key(assumed - text.told, step=1)
        same = text.follow(call.tokens)
        if same < assumed:
            cache.rollback(min(cache.length, same))
        budget, text.budget = text.budget, self.drafter.within(call.budget, text.request)
        ahead, text.ahead = text.ahead, None
        if ahead is None or not followed or not same == assumed == text.told:
            return None
        return ahead if text.budget == budget else _shortened(ahead, budget, text.budget)

    def draft_ahead(self) -> None:
        """Draft for the likeliest outcome of the step that judges what was handed out last, all requests together."""
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
    load: Callable[[], LanguageModel], num_speculative_tokens: int, min_probability: float
) -> AheadDrafter:
    """What drafts in the other process.

    Args:
        load: the model; each call loads it anew.
        num_speculative_tokens: length of a chain.
        min_probability: draft no further below a token that the draft itself gave less than this.
    """
    return AheadDrafter(DraftModel(load(), num_speculative_tokens, min_probability=min_probability))


def _verdict(text: _Text) -> KeyedNoise:
    root, position, step, _, shared = text.key(len(text.chain))
    return _Verdicts.of_key((root, position, step, 0, shared))


def _shortened(chain: Proposal, given: Budget, wanted: Budget) -> Proposal | None:
    """What a budget would have drafted of a chain; None where that is more, or a matter of probabilities.

    Args:
        chain: that was drafted.
        given: its budget.
        wanted: of the same draft with the same noise.
    """
    length = min(wanted.depth, wanted.nodes)
    if given.looks or wanted.looks or length > len(chain.tree):
        return None
    probs = None if chain.probs is None else chain.probs[:length]
    return Proposal(TokenTree.chain(chain.tree.host_ids[:length]), (*chain.draws[:length], ()), probs)
