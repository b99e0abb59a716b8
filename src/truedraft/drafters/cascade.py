"""Cascades: a middle model verifies a faster drafter's guesses, and the target verifies the middle model's tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.budget import Budget, Hint, check_nodes
from truedraft.core.noise import Noise
from truedraft.core.params import SamplingParams
from truedraft.core.probs import batch_probs, sound_rows, usable_rows
from truedraft.core.proposal import DrawCheck, DrawKind, Proposal, check_ids, check_proposal
from truedraft.core.shaping import Shaping
from truedraft.core.token_view import TokenView
from truedraft.core.tree import TokenTree, TreeShape, shape_of
from truedraft.core.verdict import Verdict
from truedraft.drafters.base import CutShortError, Drafter, DraftRequest, LostDrawsError, StepOutcome
from truedraft.drafters.held import Held
from truedraft.errors import CompositionError, DrafterError
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.cache import RequestCache
from truedraft.verification import ArgmaxRule, CoupledSampling, Rule, SpeculativeSampling

_LIKELY, _LIKELY_WEIGHT = 0.35, 8.0  # prior share of tokens from guesses, and its weight in tokens
_MEMORY, _OWN_MEMORY = 2000.0, 64.0  # in tokens: for all requests, and for one


class _Guessed:
    """The share of the middle model's tokens that are accepted guesses, except each chain's first.

    The prior is a third, so that the first chains are long enough to measure. After `memory` tokens a weight is 1 / e.
    """

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._given = self._tokens = 0.0

    def learn(self, given: int, tokens: int) -> None:
        keep = math.exp(-tokens / self._memory)
        self._given, self._tokens = keep * self._given + given, keep * self._tokens + tokens

    def share(self, expected: float = _LIKELY) -> float:
        return (_LIKELY_WEIGHT * expected + self._given) / (_LIKELY_WEIGHT + self._tokens)


@dataclass(slots=True, eq=False)
class _Text:
    tokens: list[int]
    request: DraftRequest
    committed: int
    guessed: _Guessed = field(default_factory=lambda: _Guessed(_OWN_MEMORY))


@dataclass(slots=True, eq=False)
class _Chain:
    """A chain while it is drafted; `probs` has each round's distributions of its tokens, `[tokens, vocab]`."""

    text: _Text
    cache: RequestCache
    first: int
    length: int
    noise: Noise
    shaping: Shaping | None
    probs: list[Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.text.tokens[self.text.committed :]

    @property
    def left(self) -> int:
        return self.length - (len(self.text.tokens) - self.text.committed)

    @property
    def params(self) -> SamplingParams:
        return self.text.request.params

    def proposal(self) -> Proposal:
        if self.params.greedy:
            return Proposal.deterministic(TokenTree.chain(self.tokens))
        kind = DrawKind.COUPLED if self.params.seeded else DrawKind.INDEPENDENT
        return Proposal.chain(torch.tensor(self.tokens), torch.cat(self.probs), kind)


class Cascade(Drafter):
    """Drafts with a model for which another drafter drafts (hierarchical speculation, Spector and Re 2308.04623; Chen
    et al. 2312.11462; TriForce, 2404.11912).

    In each step the middle model writes a chain in rounds: the inner drafter guesses, one forward of the middle model
    verifies, and a lossless rule preserves the middle model's distribution, so the target verifies the chain like any
    draft. The chain's length is fixed before the first round. Each round draws with its own noise.

    The share of tokens from guesses is counted per request, and for all requests with `kept`; a controller estimates
    the cost of chains from it (`Hint.guessed`), because measured times depend on the lengths of the measured chains.

    Args:
        middle: a draft model, or the target with fewer bits; `caught_up` returns caches that hold all but the last few
            tokens of each text, at least one.

    Raises:
        OptionError: a length out of range.
        CompositionError: the drafters are incompatible.
    """

    name = "cascade"
    observes_lazily = True
    levels = 0
    kinds: frozenset[DrawKind] = frozenset({DrawKind.INDEPENDENT})

    def __init__(self, drafter: Drafter, middle: Drafter, num_speculative_tokens: int = 8) -> None:
        check_nodes("num_speculative_tokens", num_speculative_tokens)
        caught_up = getattr(middle, "caught_up", None)
        if middle.model is None or caught_up is None:
            raise CompositionError(
                f"{middle.name!r} has no model that could verify; the last member of a cascade is a draft model or "
                "self:int8, as in cascade(prompt-lookup;draft)"
            )
        if drafter.features is not None or list(drafter.members.values()) != [drafter]:
            raise CompositionError(
                f"{drafter.name!r} cannot draft inside a cascade: it is a portfolio, or looks at the target's own "
                "vectors; use a drafter that reads only tokens"
            )
        if drafter.held.in_target and not middle.held.in_target:
            raise CompositionError(
                f"{drafter.name!r} reads what the target read, and {middle.name!r} keeps a text of its own; put "
                "another drafter first, or self last"
            )
        self.limits = Budget(num_speculative_tokens, 1, num_speculative_tokens)
        self.model: LanguageModel = middle.model
        self.drafter = drafter
        self.middle = middle
        self._caught_up: Callable[[Sequence[DraftRequest]], list[RequestCache]] = caught_up
        self._sampling, self._coupled, self._argmax = SpeculativeSampling(), CoupledSampling(), ArgmaxRule()
        self._sampling.check(drafter.kinds, drafter.name)
        self._reads_inputs = middle.model.opening_inputs is not None
        self._texts: dict[int, _Text] = {}
        ahead = self.limits.depth + drafter.limits.nodes
        self.held = Held(
            [each.ahead(ahead) for member in (middle, drafter) for each in member.held.models],
            [self._texts, *middle.held.noted, *drafter.held.noted],
            drafter.held.request_bytes + middle.held.request_bytes,
            in_target=middle.held.in_target,
        )
        self._guessed = _Guessed(_MEMORY)

    @property
    def warmups(self) -> int:
        return self.middle.warmups + self.drafter.warmups

    def check(self, target: LanguageModel) -> None:
        self.middle.check(target)
        self.drafter.check(self.model)

    def serves(self, request: DraftRequest) -> bool:
        return self.middle.serves(request) and self.drafter.serves(request)

    def hint(self, request: DraftRequest) -> Hint:
        own = self._texts[request.id].guessed
        return Hint(behind=self.middle.hint(request).behind, guessed=own.share(self._guessed.share()))

    def begin(self, request: DraftRequest) -> None:
        tokens = list(request.tokens)
        # The options depend on committed tokens, so the inner drafter ignores them; the middle model does not.
        inside = replace(request, tokens=TokenView(tokens), shaping=None)
        self._texts[request.id] = _Text(tokens, inside, len(tokens))
        self.middle.begin(inside)
        self.drafter.begin(inside)

    def end(self, request: DraftRequest) -> None:
        text = self._texts.pop(request.id, None)
        if text is None:
            return
        try:
            self._bring_up(text, request)
        finally:
            try:
                self.drafter.end(text.request)
            finally:
                self.middle.end(text.request)

    def rewind(self, request: DraftRequest) -> None:
        text = self._texts[request.id]
        self._cut(text, min(text.committed, len(request.tokens)))

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        proposals, self.levels = [Proposal.empty()] * len(batch), 0
        lengths = [self._length(request, budget) for request, budget in zip(batch, budgets, strict=True)]
        drafting = [place for place, length in enumerate(lengths) if length]
        if not drafting:
            return proposals
        texts = [self._texts[batch[place].id] for place in drafting]
        for place, text in zip(drafting, texts, strict=True):
            self._bring_up(text, batch[place])
        caches = self._caught_up([text.request for text in texts])
        chains = [
            _Chain(text, cache, cache.length, lengths[place], noise[place], batch[place].shaping)
            for place, text, cache in zip(drafting, texts, caches, strict=True)
        ]
        try:
            self._write(chains)
        except LostDrawsError:
            raise
        except Exception as error:
            # What was written so far has the middle model's distribution, so it is verified.
            if len(chains) == 1 == len(batch) and chains[0].probs:
                raise CutShortError(chains[0].proposal()) from error
            raise
        finally:
            if self.held.in_target:  # the target computes these positions again, in full
                for chain in chains:
                    chain.cache.rollback(chain.first)
        for place, chain in zip(drafting, chains, strict=True):
            proposals[place] = chain.proposal()
            self._learn(chain)
        return proposals

    def _learn(self, chain: _Chain) -> None:
        rounds, request = len(chain.probs), chain.text.request
        chain.text.guessed.learn(chain.length - rounds, chain.length - 1)
        if request.kept:
            self._guessed.learn(chain.length - rounds, chain.length - 1)

    def _length(self, request: DraftRequest, budget: Budget) -> int:
        within = budget.within(self.limits).cut(self.model.most_drafted(request.tokens))
        return 0 if within.is_zero else min(within.depth, within.nodes)

    def _bring_up(self, text: _Text, request: DraftRequest) -> None:
        self._cut(text, text.committed)
        if text.request.cache is not request.cache:
            text.request = replace(text.request, cache=request.cache)
        new = tuple(request.tokens[text.committed :])
        if new:
            text.tokens += new
            text.committed = len(text.tokens)
            self.drafter.observe([text.request], [StepOutcome(Proposal.empty(), (), new)])

    def _write(self, chains: Sequence[_Chain]) -> None:
        turn = 0
        while growing := [chain for chain in chains if chain.left > 0]:
            noise = [chain.noise.inside(turn, chain.length - chain.left) for chain in growing]
            budgets = [self._budget(chain) for chain in growing]
            requests = [chain.text.request for chain in growing]
            failure: BaseException | None = None
            try:
                guesses = self._checked(growing, budgets, self.drafter.propose(requests, budgets, noise))
            except CutShortError as cut:
                failure, guesses = cut.__cause__ or cut, self._checked(growing, budgets, [cut.proposal])
            except Exception as error:
                if len(growing) == 1:
                    LostDrawsError.raise_if_lost(self.drafter.name, error, growing[0].params, noise[0])
                raise
            missed = [chain.text.tokens[chain.cache.length :] for chain in growing]
            try:
                probs = self._forward(growing, missed, guesses)
            except Exception:
                if len(growing) == 1 and len(guesses[0].tree):
                    self._write_one(growing[0], missed[0], guesses[0], noise[0])
                raise
            verdicts = self._verdicts(growing, guesses, probs, noise)
            outcomes = []
            for chain, fed, guess, own, verdict in zip(growing, missed, guesses, probs, verdicts, strict=True):
                chain.cache.commit([*range(len(fed)), *(len(fed) + node for node in verdict.path)])
                chain.probs.append(own[[0, *(node + 1 for node in verdict.path)]])
                chain.text.tokens += verdict.tokens
                outcomes.append(StepOutcome(guess, verdict.path, verdict.tokens))
            if failure is not None:
                raise failure
            self.drafter.observe(requests, outcomes)
            turn += 1
        self.levels = turn

    def _write_one(self, chain: _Chain, missed: Sequence[int], guess: Proposal, noise: Noise) -> None:
        """Write the next token in a separate forward, because the middle model failed, maybe because of the guesses."""
        chain.cache.rollback(chain.cache.length)
        (own,) = self._forward([chain], [missed], [Proposal.empty()])
        first = guess.without_draws(range(1, len(guess.tree) + 1))
        (verdict,) = self._verdicts([chain], [first], [own.expand(len(guess.tree) + 1, -1)], [noise])
        chain.cache.commit(range(len(missed)))
        chain.probs.append(own)
        chain.text.tokens.append(verdict.tokens[0])

    def _budget(self, chain: _Chain) -> Budget:
        """Of a round, which adds one token of the middle model; no rows beyond the target's cache."""
        most = self.drafter.limits.cut(chain.left - 1)
        return replace(most, nodes=min(most.nodes, chain.left - 1)) if self.held.in_target else most

    def _checked(
        self, chains: Sequence[_Chain], budgets: Sequence[Budget], guesses: Sequence[Proposal]
    ) -> list[Proposal]:
        """The guesses without invalid draws, which would bias the middle model's tokens."""
        if len(guesses) != len(chains):
            raise DrafterError(
                f"drafter {self.drafter.name!r} made {len(guesses)} proposals for {len(chains)} requests"
            )
        for chain, budget, guess in zip(chains, budgets, guesses, strict=True):
            check_proposal(self.drafter.name, guess, budget, self._rule_of(chain).judges, self.model.vocab_size)
            check_ids(self.drafter.name, guess.tree, self.model.vocab_size)
        check = DrawCheck(guesses, self.model.device)
        unsound = check.unsound(transfers.fetch(check.wanted))
        return [
            guess.without_draws(unsound[number]) if number in unsound else guess for number, guess in enumerate(guesses)
        ]

    def _forward(
        self, chains: Sequence[_Chain], missed: Sequence[Sequence[int]], guesses: Sequence[Proposal]
    ) -> list[Tensor]:
        """One forward over the tokens that the middle model has not read (`missed`), and the guesses below them.

        Returns distributions `[rows, vocab]` per chain, row 0 after the text and row i + 1 after node i; or logits.
        """
        segments = [
            Segment(
                chain.cache,
                torch.tensor([*fed, *guess.tree.host_ids]),
                _below(len(fed), guess.tree.shape),
                range(len(fed) - 1, len(fed) + len(guess.tree)),
                inputs=chain.text.request.inputs if self._reads_inputs and not chain.cache.length else None,
            )
            for chain, fed, guess in zip(chains, missed, guesses, strict=True)
        ]
        parts = list(self.model.forward(segments).logits.split([len(segment.rows) for segment in segments]))
        for place, (chain, guess) in enumerate(zip(chains, guesses, strict=True)):
            if chain.shaping is not None:
                paths = ((), *map(guess.tree.path_tokens, range(len(guess.tree))))
                parts[place] = chain.shaping.of_paths(parts[place], [(*chain.tokens, *path) for path in paths])
        # If logits are not finite, or options exclude every token, the distribution is one-hot at token 0.
        parts = [part if (sound := sound_rows(part)) is None else usable_rows(part, sound) for part in parts]
        drawn = [place for place, chain in enumerate(chains) if not chain.params.greedy]
        if drawn:
            made_by = [(chains[place].params, len(parts[place])) for place in drawn]
            probs = batch_probs(torch.cat([parts[place] for place in drawn]), made_by)
            for place, own in zip(drawn, probs, strict=True):
                parts[place] = own
        return parts

    def _verdicts(
        self, chains: Sequence[_Chain], guesses: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]
    ) -> list[Verdict]:
        """The accepted guesses, and one more token of the middle model."""
        by_rule: dict[Rule, list[int]] = {}
        for place, chain in enumerate(chains):
            by_rule.setdefault(self._rule_of(chain), []).append(place)
        verdicts: dict[int, Verdict] = {}
        for rule, places in by_rule.items():
            selected = [[each[place] for place in places] for each in (guesses, probs, noise)]
            verdicts.update(zip(places, rule.verify(*selected), strict=True))  # type: ignore[arg-type]
        return [verdicts[place] for place in range(len(chains))]

    def _rule_of(self, chain: _Chain) -> Rule:
        if chain.params.greedy:
            return self._argmax
        return self._coupled if chain.params.seeded else self._sampling

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        for request, outcome in zip(batch, outcomes, strict=True):
            text = self._texts[request.id]
            if len(text.tokens) > text.committed:
                self._cut(text, text.committed + len(outcome.path))

    def _cut(self, text: _Text, length: int) -> None:
        text.committed = length
        if len(text.tokens) > length:
            del text.tokens[length:]
            self.middle.rewind(text.request)
            self.drafter.rewind(text.request)


def _below(count: int, shape: TreeShape) -> TreeShape:
    """A chain of `count` tokens, and a tree below its last: (-1, 0, 0) below 2 tokens makes (-1, 0, 1, 2, 2)."""
    return shape_of((*range(-1, count - 1), *(count + parent for parent in shape.parents)))
