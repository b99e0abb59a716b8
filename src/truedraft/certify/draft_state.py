"""Draft state after many steps, compared with that of a fresh drafter on the same text.

A stale draft state (a cache that was not rolled back, a token that was forgotten) only lowers acceptance, because the
target verifies whatever is proposed. So it is measured and does not fail a certificate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from truedraft.certify.checks import Check, Context, Deadline, Finding, OutOfTimeError, Part, Status, share_of
from truedraft.certify.equality import as_greedy
from truedraft.certify.rounding import relative_limit
from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import Proposal
from truedraft.core.tree import TokenTree, chain_shape
from truedraft.drafters.base import Drafter, DraftRequest, StepOutcome
from truedraft.drafters.portfolio import with_members
from truedraft.engine import Engine
from truedraft.engine.policy import RoundRobin
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.cache import FEW, RequestCache
from truedraft.testing import altered
from truedraft.verification import SpeculativeSampling

_PLACES = 12  # positions of one answer at which a fresh drafter is called


@dataclass(frozen=True, slots=True)
class Guess:
    """One proposal after `text`; `called` is whether the drafter was called for it, which a controller may skip."""

    text: tuple[int, ...]
    tree: TokenTree
    called: bool


class Guesses:
    """Records what a drafter proposes. Engines get `drafter`, by itself or as a member of a portfolio.

    Attributes:
        of: the proposals of each request, by id, in order.
        caches: after each step with a draft, the largest difference of a draft model's cache from a fresh forward, and
            whether it is more than rounding.
    """

    def __init__(self, drafter: Drafter, *, checks_caches: bool = False) -> None:
        self.of: dict[int, list[Guess]] = {}
        self.caches: list[tuple[float, bool]] = []
        self._called: set[int] = set()
        self._models = drafter.held.models[:1] if checks_caches else ()

        def begin(request: DraftRequest) -> None:
            self.of[request.id] = []
            drafter.begin(request)

        def propose(batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]) -> list[Proposal]:
            self._called.update(request.id for request in batch)
            return drafter.propose(batch, budgets, noise)

        def observe(batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
            drafter.observe(batch, outcomes)
            for request, outcome in zip(batch, outcomes, strict=True):
                if outcome.tokens:  # otherwise a part of a prompt, or an answer that ended at once
                    self._note(request, outcome)
            self._called.clear()

        # The given drafter's own `check` needs the target that it is checked against.
        self.drafter = altered(
            drafter, check=drafter.check, begin=begin, propose=propose, observe=observe, observes_lazily=False
        )

    def _note(self, request: DraftRequest, outcome: StepOutcome) -> None:
        before = len(request.tokens) - len(outcome.tokens)
        requested = request.id in self._called
        guess = Guess(tuple(request.tokens[:before]), outcome.proposal.tree, requested)
        self.of[request.id].append(guess)
        # A draft made of the target has none of its own; a draft in another process has it there.
        for own in self._models:
            if (cache := own.caches[request.id]).length and len(outcome.proposal.tree):
                self.caches.append(_cache_difference(own.model, cache, own.prefixes.text(request.id)))


class DraftState(Check):
    """Compares proposals of a drafter after many steps with those of a fresh drafter on the same text.

    Greedy answers are generated in batches. Then, at some positions of each, a new request with the text so far as its
    prompt must get the same tree, and a draft model's cache must be that of a forward over the same tokens. Members of
    a portfolio draft in turn with their full budget; each is compared with a fresh one that drafts by itself.
    """

    part = Part.DRAFT_STATE
    share = 0.05

    def run(self, context: Context) -> list[Finding]:
        exact = context.stack.but(rule=SpeculativeSampling(), coupled_rule=None)
        names = list(context.stack.drafter.members)
        findings = []
        for number, name in enumerate(names):
            report = share_of(context.tell, number, len(names))
            coming_s = context.end_s * (1.0 - 1.0 / (len(names) - number))  # for the members after this one
            own = replace(context, stack=exact, tell=report, ends=context.ends - coming_s)
            findings.append(self._of_member(own, name))
        return findings

    def _of_member(self, context: Context, name: str) -> Finding:
        batch, found, whole = context.batch, _Comparison(), context.deadline()
        prompts = [list(prompt) for prompt in context.prompts]

        def compare(group: Sequence[Sequence[int]], deadline: Deadline) -> None:
            try:
                _compare(replace(context, prompts=group), name, found, deadline, whole)
            except OutOfTimeError:
                found.out_of_time = not found.compared
                raise

        groups = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
        context.one_by_one(groups, compare)
        context.tell(1.0)
        return found.finding(name)


def _compare(context: Context, name: str, found: _Comparison, deadline: Deadline, whole: Deadline) -> None:
    stack, group, options = context.stack, context.prompts, as_greedy(context.params)
    members = stack.drafter.members
    original = Guesses(members[name], checks_caches=True)
    together = with_members(stack.drafter, {**members, name: original.drafter})
    engine = stack.but(drafter=together, controller=RoundRobin(whole=True)).engine(context.batch)
    answers = deadline.answers(engine, group, [options] * len(group))
    found.caches += original.caches
    fresh = Guesses(members[name])
    engine = stack.but(drafter=fresh.drafter, controller=None).engine(1)
    for prompt, (request, answer) in zip(group, answers, strict=True):
        text = [*prompt, *answer.token_ids]
        limit = len(prompt) + options.max_tokens
        own = original.of.get(request.id, [])
        for guess in _some([each for each in own if each.called and len(each.text) > len(prompt)]):
            found.add(guess, _fresh_guess(engine, fresh, guess.text, limit, options, deadline), text)
        if whole.over:
            return


def _some(guesses: Sequence[Guess]) -> list[Guess]:
    count = min(_PLACES, len(guesses))
    return [guesses[len(guesses) - 1 - (i * len(guesses)) // count] for i in range(count)]


def _fresh_guess(
    engine: Engine, fresh: Guesses, text: Sequence[int], limit: int, options: SamplingParams, deadline: Deadline
) -> Guess | None:
    """What a new request of the same `limit` (total length) proposes for a text; None if it did not reach the text."""
    prompt = list(text[:-1])
    request = engine.submit(prompt, replace(options, max_tokens=limit - len(prompt)))
    try:
        while request.finish_reason is None and len(fresh.of.get(request.id, [])) < 2:
            deadline.step(engine)
    finally:
        engine.cancel(request)
    guesses = fresh.of.pop(request.id)
    # The first is the prefill's, which proposes nothing.
    return guesses[1] if len(guesses) > 1 and guesses[1].text == tuple(text) else None


@dataclass
class _Comparison:
    """Counts of compared proposals, of the (original, fresh) drafters."""

    compared: int = 0
    different: int = 0
    skipped: int = 0  # positions where the new request did not reach the same text
    nodes: list[int] = field(default_factory=lambda: [0, 0])
    accepted: list[int] = field(default_factory=lambda: [0, 0])  # nodes on the path of the answer
    examples: list[dict[str, Any]] = field(default_factory=list)  # the first few unequal pairs
    caches: list[tuple[float, bool]] = field(default_factory=list)
    out_of_time: bool = False  # before anything was compared

    def add(self, original: Guess, fresh: Guess | None, text: Sequence[int]) -> None:
        """Compare two proposals for one text; `text` is the whole answer with its prompt."""
        if fresh is None:
            self.skipped += 1
            return
        trees = original.tree, fresh.tree
        self.compared += 1
        for number, tree in enumerate(trees):
            self.nodes[number] += len(tree)
            self.accepted[number] += len(tree.along(text[len(original.text) :]))
        if trees[0].host_ids != trees[1].host_ids or trees[0].shape != trees[1].shape:
            self.different += 1
            if len(self.examples) < 3:
                kinds = {"lived": trees[0].host_ids, "fresh": trees[1].host_ids}
                self.examples.append({"position": len(original.text), **kinds})

    @property
    def rates(self) -> tuple[float, float]:
        original, fresh = (a / max(n, 1) for a, n in zip(self.accepted, self.nodes, strict=True))
        return original, fresh

    @property
    def broken_caches(self) -> int:
        return sum(beyond_rounding for _, beyond_rounding in self.caches)

    def finding(self, drafter: str) -> Finding:
        original, fresh = self.rates
        rounding = bool(self.caches) and not self.broken_caches  # then differing proposals were near ties of the draft
        stale = self.broken_caches > 0 or (self.different > 0 and not rounding)
        facts: dict[str, Any] = {
            "stale": stale,
            "compared": self.compared,
            "different": self.different,
            "skipped": self.skipped,
            "draft_acceptance_rate": original,
            "draft_acceptance_rate_fresh": fresh,
            "caches_compared": len(self.caches),
            "caches_different": self.broken_caches,
            "largest_cache_difference": max((largest for largest, _ in self.caches), default=None),
            "examples": self.examples,
        }
        return Finding(Part.DRAFT_STATE, f"drafter {drafter!r} after many steps", *self._verdict(stale), facts)

    def _verdict(self, stale: bool) -> tuple[Status, str]:
        if self.out_of_time:
            return Status.NOT_ENOUGH, "No proposal could be compared in the time there was; give more minutes."
        if not any(self.nodes):
            return Status.DOES_NOT_APPLY, "Nothing was proposed."
        original, fresh = self.rates
        summary = f"{self.different} of {self.compared} proposals differ from a fresh drafter's"
        costs = f"acceptance {'falls' if fresh > original else 'changes'} from {fresh:.3f} to {original:.3f}"
        if stale:
            caches = f", and {self.broken_caches} of {len(self.caches)} caches from a fresh forward's"
            summary = f"Stale: {summary}{caches if self.caches else ''}; answers stay exact, {costs}."
            return Status.MEASURED, summary
        agree = f", and {len(self.caches)} caches agree with fresh forwards" if self.caches else ""
        if self.different:
            ties = f"{summary}{agree} up to rounding, so the draft's own near ties fell otherwise; {costs}."
            return Status.MEASURED, ties
        summary = f"{self.compared} proposals equal a fresh drafter's{agree}; draft acceptance rate {original:.3f}."
        return Status.HOLDS, summary


@torch.inference_mode()
def _cache_difference(model: LanguageModel, cache: RequestCache, tokens: Sequence[int]) -> tuple[float, bool]:
    """Compare a cache with a forward over its tokens, except for entries that the next proposal cuts."""
    length = min(cache.length, len(tokens) - 1)
    other = model.new_cache()
    other.bound(cache.bounds)
    try:
        while count := other.make_room(min(256, length - other.length)):
            ids = torch.tensor(tokens[other.length :][:count])
            prompt = len(ids) if len(ids) > FEW else 0  # as a draft reads it
            model.forward([Segment(other, ids, chain_shape(len(ids)), (), prompt=prompt)])
            other.commit(range(len(ids)))
        if cache.dropped > other.dropped:
            other.make_room(1)
        pairs = [
            (a[:, : other.stored], b)
            for ours, theirs in zip(cache.entries(), other.entries(), strict=True)
            for a, b in zip(ours, theirs, strict=True)
        ]
        if cache.length == length:
            carried = zip(cache.family.carried.entries(), other.family.carried.entries(), strict=True)
            pairs += [(ours[name], theirs[name]) for ours, theirs in carried for name in theirs]
        largest = size = 0.0
        for a, b in pairs if length else ():
            difference = (a.double() - b.double()).abs().nan_to_num(nan=math.inf)
            largest = max(largest, float(difference.max()))
            size = max(size, float(b.double().abs().max()))
        dtype = next((a.dtype for a, _ in pairs if a.is_floating_point()), model.dtype)
        return largest, largest > relative_limit(dtype) * size
    finally:
        model.release_cache(other)
