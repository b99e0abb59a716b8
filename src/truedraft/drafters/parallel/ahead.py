"""A draft model that drafts ahead: what lives in the other process, and what the two processes tell each other.

Behind a chain that is being judged lies a tree of outcomes: for each one guessed its recovered or bonus token hangs
below the last drafted token that it accepts, and below that the chain which the next step would be asked for:

    text - d1 - d2 - d3 - d4 - b      all accepted, then the bonus token b
               |               - c1 - c2 - c3 - c4
               - r                    d1 accepted, then r in place of d2
                 - e1 - e2 - e3 - e4

Each of these chains is drawn with the noise of the next step at its own position, by the same code as any other: it
is, number for number, the chain that would be drafted if it were asked for then. So whether it is used, a *hit*, or
drafted anew changes when a token is drafted, and never which one. How much is drafted ahead is settled before the
round: the number of outcomes and the budget that was asked for last.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from truedraft.cache import RequestCache
from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise, NoiseKey
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import Draw, Proposal
from truedraft.core.tree import TokenTree, shape_of
from truedraft.drafters.base import DraftRequest, TokenView
from truedraft.drafters.draft_model import DraftModel
from truedraft.drafters.parallel.outcomes import likeliest_outcomes
from truedraft.drafters.tree_builder import TreeBuilder, draw_level
from truedraft.errors import DrafterError
from truedraft.models.base import LanguageModel, Segment


@dataclass(frozen=True, slots=True)
class Begun:
    """A request that starts.

    Attributes:
        id: of the request.
        params: its options; they change no logits of single tokens.
        tokens: its text.
    """

    id: int
    params: SamplingParams
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A request that a chain is asked for.

    Attributes:
        id: of the request.
        tokens: that its text gained since it was told of last.
        budget: of the chain; not zero.
        noise: its key, see `KeyedNoise.key`.
        limit: of its cache, in tokens.
    """

    id: int
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
        return self._first(length, budget) if ends and length <= len(self.tokens) else None

    def _first(self, length: int, budget: Budget) -> Chain:
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

    def begin(self, begun: Begun) -> None:
        """A request starts."""

    def propose(self, calls: Sequence[Call]) -> Reply:
        """A chain for each of some requests; raises DrafterError where there is none."""

    def end(self, request: int) -> None:
        """A request is over."""


@dataclass(slots=True, eq=False)
class _Branch:
    """An outcome, and the chain drafted behind it.

    Attributes:
        emitted: tokens that the step emits in this outcome.
        builder: draws the chain.
        noise: with which.
        node: of the tree: the last one that was fed.
    """

    emitted: tuple[int, ...]
    builder: TreeBuilder
    noise: NoiseKey
    node: int


@dataclass(slots=True, eq=False)
class _Text:
    """A request.

    Attributes:
        request: as the draft model sees it.
        tokens: that it looks at.
        call: that it was asked for last.
        chain: that it was answered with; empty once it was drafted ahead of, or could not be.
        outcomes: what is drafted ahead of it.
    """

    request: DraftRequest
    tokens: list[int]
    call: Call | None = None
    chain: list[int] = field(default_factory=list)
    outcomes: OutcomeTree | None = None


class OutcomeTree:
    """The tree below the last token of a text, in a draft's cache: the judged chain, its outcomes and what follows.

    Node 0 is that last token itself, node i the i-th drafted one. All of them are uncommitted.

    Args:
        cache: of the draft; what it holds behind the text's last token but one is dropped.
        text: its last token.
        drafted: the chain that is being judged.
    """

    def __init__(self, cache: RequestCache, text: int, drafted: Sequence[int]) -> None:
        self.cache = cache
        self.drafted = tuple(drafted)
        self.branches: list[_Branch] = []
        self._first = [text, *drafted]
        self._tokens: list[int] = []
        self._parents: list[int] = []

    def chain(self) -> Segment:
        """The judged chain and what it hangs on, with logits at each."""
        return self._feed(self._first, range(-1, len(self.drafted)))

    def grow(self, branches: Sequence[_Branch], tokens: Sequence[int]) -> Segment:
        """One more token for each of some branches, with logits at it."""
        segment = self._feed(tokens, [branch.node for branch in branches])
        for branch, node in zip(branches, range(len(self._tokens) - len(tokens), len(self._tokens)), strict=True):
            branch.node = node
        return segment

    def _feed(self, tokens: Sequence[int], parents: Sequence[int]) -> Segment:
        written = len(self._tokens)
        self._tokens += tokens
        self._parents += parents[: len(tokens)]
        shape = shape_of(tuple(self._parents))
        return Segment(self.cache, torch.tensor(list(tokens)), shape, range(len(tokens)), written)

    def settle(self, emitted: Sequence[int]) -> None:
        """Commit what the text became, as far as it was fed, and drop the rest."""
        node, path = 0, [0]
        for token in emitted:
            children = (each for each in range(node + 1, len(self._tokens)) if self._parents[each] == node)
            found = next((each for each in children if self._tokens[each] == token), None)
            if found is None:
                break
            path.append(node := found)
        self.cache.commit(path if self.cache.uncommitted == len(self._tokens) else ())

    def hit(self, call: Call, within: Budget) -> Chain | None:
        """The chain that was drafted for just this call; None where none was.

        Args:
            call: the tokens emitted, and the noise.
            within: its budget, cut to what the draft may do.
        """
        for branch in self.branches:
            if branch.emitted == call.tokens and branch.noise == call.noise:
                return Chain.of(branch.builder.proposal()).within(within)
        return None


class AheadDrafter:
    """Drafts chains, and, asked to, what the next step will likeliest ask for.

    Args:
        drafter: drafts chains; its model carries no states from token to token.
        outcomes: most outcomes of a step that are drafted for.
        clock: seconds of processor time.
    """

    alive = True

    def __init__(self, drafter: DraftModel, outcomes: int, clock: Callable[[], float] = time.process_time) -> None:
        self.drafter = drafter
        self._outcomes = outcomes
        self._clock = clock
        self._began_s = clock()
        self._texts: dict[int, _Text] = {}
        self._open: list[_Text] = []  # that were answered and not drafted ahead of
        self._ahead_tokens = 0
        self._ahead_s = 0.0
        self._failure: str | None = None

    def begin(self, begun: Begun) -> None:
        """A request starts. It shares what it begins with with nobody, for it is not known who may."""
        tokens = list(begun.tokens)
        request = DraftRequest(begun.id, begun.params, TokenView(tokens), scope=begun.id)
        self._texts[begun.id] = _Text(request, tokens)
        self.drafter.begin(request)

    def end(self, request: int) -> None:
        """A request is over."""
        text = self._texts.pop(request, None)
        if text is not None:
            self._open = [each for each in self._open if each is not text]
            self.drafter.end(text.request)

    def propose(self, calls: Sequence[Call]) -> Reply:
        """A chain for each call: what was drafted ahead for it, or drafted now."""
        texts = [self._texts[call.id] for call in calls]
        self._open = []
        chains = [self._take(text, call) for text, call in zip(texts, calls, strict=True)]
        missed = [place for place, chain in enumerate(chains) if chain is None]
        if missed:
            drafted = self.drafter.propose(
                [texts[place].request for place in missed],
                [calls[place].budget for place in missed],
                [_noise(calls[place].noise, texts[place].request) for place in missed],
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
        ahead, text.outcomes = text.outcomes, None
        text.tokens += call.tokens
        cache = self.drafter.caches[call.id]
        if cache.limit != call.limit:
            (cache.allow if cache.length else cache.limit_to)(call.limit)
        if ahead is None:
            return None
        ahead.settle(call.tokens)
        return ahead.hit(call, self.drafter.within(call.budget, text.request))

    def draft_ahead(self) -> None:
        """Draft for the likeliest outcomes of the step that judges what was handed out last.

        A failure loses no answer: then it is drafted when it is asked for.
        """
        texts, self._open = self._open, []
        began_s = self._clock()
        try:
            self._draft_behind(texts)
            self._failure = None
        except Exception as error:
            self._failure = f"{type(error).__name__}: {error}"
            for text in texts:
                text.outcomes = None
        self._ahead_s += self._clock() - began_s

    def _draft_behind(self, texts: Sequence[_Text]) -> None:
        """Feed the judged chains, guess outcomes, and draft a chain behind each, all requests together."""
        trees = [self._tree(text) for text in texts]
        if not trees:
            return
        model = self.drafter.model
        logits = model.forward([tree.chain() for tree in trees]).logits
        parts = logits.split([1 + len(tree.drafted) for tree in trees])
        for text, tree, own in zip(texts, trees, parts, strict=True):
            tree.branches = self._branches(text, tree, own)
        growing = [(tree, branch) for tree in trees for branch in tree.branches]
        tokens = [branch.emitted[-1] for _, branch in growing]
        while growing:
            segments = []
            for tree in trees:
                own = [place for place, (each, _) in enumerate(growing) if each is tree]
                if own:
                    segments.append(tree.grow([growing[place][1] for place in own], [tokens[place] for place in own]))
            draw_level([branch.builder for _, branch in growing], model.forward(segments).logits)
            growing = [each for each in growing if each[1].builder.grows]
            tokens = [branch.builder.last_token for _, branch in growing]
        for text, tree in zip(texts, trees, strict=True):
            text.outcomes = tree
            self._ahead_tokens += sum(len(branch.builder.proposal().tree) for branch in tree.branches)

    def _tree(self, text: _Text) -> OutcomeTree:
        cache = self.drafter.caches[text.request.id]
        if cache.length < len(text.tokens) - 1:
            raise DrafterError(f"the draft has read {cache.length} of {len(text.tokens)} tokens")
        cache.rollback(len(text.tokens) - 1)
        return OutcomeTree(cache, text.tokens[-1], text.chain)

    def _branches(self, text: _Text, tree: OutcomeTree, logits: Tensor) -> list[_Branch]:
        """The outcomes to draft for, from the draft's logits `[drafted + 1, vocab]` along the judged chain."""
        request, call = text.request, text.call
        assert call is not None
        root, position, step, member, shared = call.noise
        judges = _noise((root, position, step, 0, shared), request)
        branches = []
        for accepted, token in likeliest_outcomes(logits, tree.drafted, request.params, judges, self._outcomes):
            emitted = (*tree.drafted[:accepted], token)
            budget = _ahead(self.drafter.within(call.budget, request, len(emitted)), len(tree.drafted))
            if not budget.is_zero:
                noise = (root, position + len(emitted), step + 1, member, shared)
                builder = TreeBuilder(
                    tree.cache, request, budget, _noise(noise, request), self.drafter.branching, logits.device
                )
                branches.append(_Branch(emitted, builder, noise, accepted))
        return branches


def ahead_drafter(
    load: Callable[[], LanguageModel], num_speculative_tokens: int, min_probability: float, outcomes: int
) -> AheadDrafter:
    """What drafts in the other process.

    Args:
        load: the model; each call loads it anew.
        num_speculative_tokens: length of a chain.
        min_probability: draft no further below a token that the draft itself gave less than this.
        outcomes: of a step for which it drafts ahead.
    """
    draft = DraftModel(load(), num_speculative_tokens, min_probability=min_probability)
    return AheadDrafter(draft, outcomes)


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


def _noise(key: NoiseKey, request: DraftRequest) -> KeyedNoise:
    return KeyedNoise.of_key(key, greedy=request.params.greedy)
