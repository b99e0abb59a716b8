"""One speculative step for a batch: propose, one target forward, verify, commit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.core.laws import finite_rows, laws_from_logits
from truedraft.core.noise import KeyedNoise
from truedraft.core.proposals import Proposal
from truedraft.core.trees import TreeShape, chain_shape
from truedraft.core.verdicts import Verdict
from truedraft.drafters.base import StepOutcome
from truedraft.engine.drafting import Drafting
from truedraft.engine.request import Request
from truedraft.errors import InvalidLogitsError
from truedraft.models.base import ForwardOutput, LanguageModel, Segment
from truedraft.verification import CoupledSampling, Rule

_COUPLED = CoupledSampling()


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What one step did, and how long its parts took in seconds.

    Attributes:
        requests: how many took part.
        rows: tokens that the target's forward was fed.
        contexts: cached tokens of each request before the step.
        nodes: drafted nodes.
        prefill: whether a part of a prompt was among them.
        draft_s: asking the drafter, catch-up included.
        target_s: the target's forward.
        verify_s: laws and verdicts.
        total_s: the whole step.
    """

    requests: int
    rows: int
    contexts: tuple[int, ...]
    nodes: int
    prefill: bool
    draft_s: float
    target_s: float
    verify_s: float
    total_s: float


@dataclass(slots=True)
class _Part:
    """One request's share of a step."""

    request: Request
    proposal: Proposal
    noise: KeyedNoise
    segment: Segment
    laws: Tensor | None = None  # [slots, vocab], or logits for a request that takes the argmax; None during the prompt
    hidden: Tensor | None = None
    broken: frozenset[int] = frozenset()  # slots whose logits were NaN or infinite
    verdict: Verdict | None = None


class Step:
    """Runs steps of a target with a rule and a drafter.

    Args:
        target: the model that decides.
        rule: judges proposals of requests that are neither greedy nor coupled, or all if it is lossy.
        drafting: asks the drafter.
        keeps_hidden: whether the drafter wants the vectors that enter the LM head.
    """

    def __init__(self, target: LanguageModel, rule: Rule, drafting: Drafting, keeps_hidden: bool) -> None:
        self._target = target
        self._rule = rule
        self._drafting = drafting
        self._keeps_hidden = keeps_hidden

    def run(self, batch: Sequence[Request], chunks: Sequence[int]) -> StepTimes:
        """One step; each request gains tokens, a part of its prompt, or an error.

        Args:
            batch: requests, each with a cache.
            chunks: for each, how many tokens not yet in its cache are fed.

        Returns:
            How long its parts took.
        """
        started = time.perf_counter()
        noise = [request.noise() for request in batch]
        proposals = self._drafting.propose(batch, noise, [self.rule_for(request).judges for request in batch])
        drafted = time.perf_counter()
        parts = [
            _Part(request, proposal, each, self._segment(request, chunk, proposal))
            for request, chunk, proposal, each in zip(batch, chunks, proposals, noise, strict=True)
        ]
        contexts = tuple(part.segment.cache.length for part in parts)
        prefill = any(request.emitted == 0 for request in batch)
        output = self._target.forward([part.segment for part in parts])
        forwarded = time.perf_counter()
        self._read(parts, output)
        self._verify([part for part in parts if part.laws is not None])
        verified = time.perf_counter()
        outcomes = [self._commit(part) for part in parts]
        self._drafting.observe(batch, outcomes, drafted - started, forwarded - drafted)
        return StepTimes(
            requests=len(parts),
            rows=sum(len(part.segment.shape) for part in parts),
            contexts=contexts,
            nodes=sum(len(part.proposal.tree) for part in parts),
            prefill=prefill,
            draft_s=drafted - started,
            target_s=forwarded - drafted,
            verify_s=verified - forwarded,
            total_s=time.perf_counter() - started,
        )

    def rule_for(self, request: Request) -> Rule:
        """Greedy is the coupled rule without noise: the same verdict as any lossless rule's, by comparison alone."""
        if request.params.coupled or (request.params.greedy and self._rule.lossless):
            return _COUPLED
        return self._rule

    def _segment(self, request: Request, chunk: int, proposal: Proposal) -> Segment:
        """The last token and the tree below it, or a part of the prompt."""
        assert request.cache is not None
        start = request.cache.length
        ids = torch.tensor(request.tokens[start : start + chunk], device=self._target.device)
        if chunk > 1 or request.uncached > chunk:
            rows = (chunk - 1,) if request.uncached == chunk else ()
            return Segment(request.cache, ids, chain_shape(chunk), rows)
        if len(proposal.tree):
            ids = torch.cat([ids, proposal.tree.tokens.to(ids.device)])
        return Segment(request.cache, ids, proposal.tree.shape.rooted, range(len(ids)))

    def _read(self, parts: Sequence[_Part], output: ForwardOutput) -> None:
        """Give each part the laws of its slots."""
        judged = [part for part in parts if len(part.segment.rows)]
        if not judged:
            return
        counts = [len(part.segment.rows) for part in judged]
        first = 0
        for argmax, run in itertools.groupby(zip(judged, counts, strict=True), lambda one: self._takes_argmax(one[0])):
            group, sizes = zip(*run, strict=True)
            logits = output.logits[first : first + sum(sizes)]
            first += sum(sizes)
            rows = [(part.request.params, size) for part, size in zip(group, sizes, strict=True)]
            for part, law in zip(group, logits.split(sizes) if argmax else laws_from_logits(logits, rows), strict=True):
                part.laws = law
            # -inf is a legal logit, so an infinite sum only means that rows must be looked at.
            if not argmax and not bool(logits.sum(dtype=torch.float32).isfinite()):
                for part in group:
                    _isolate_broken_rows(part)
        if self._keeps_hidden:
            for part, vectors in zip(judged, output.hidden.split(counts), strict=True):
                part.hidden = vectors

    def _takes_argmax(self, part: _Part) -> bool:
        """Whether the rule only looks at the largest entry of a row: then logits do, and no law need be made."""
        return part.request.params.greedy and self.rule_for(part.request) is _COUPLED

    def _verify(self, parts: Sequence[_Part]) -> None:
        """Judge all proposals, those of one rule together."""
        by_rule: dict[Rule, list[_Part]] = {}
        for part in parts:
            by_rule.setdefault(self.rule_for(part.request), []).append(part)
        for rule, group in by_rule.items():
            laws = [part.laws for part in group if part.laws is not None]
            verdicts = rule.verify([part.proposal for part in group], laws, [part.noise for part in group])
            for part, verdict in zip(group, verdicts, strict=True):
                part.verdict = verdict

    def _commit(self, part: _Part) -> StepOutcome:
        """Keep what was accepted in the cache, emit, and say what became of the proposal."""
        request = part.request
        if part.verdict is not None and self._takes_argmax(part):
            part.broken = _broken_choices(part.laws, part.verdict)
        verdict, broke = _before_broken_slot(part)
        assert request.cache is not None
        if verdict is None:
            request.cache.commit(range(len(part.segment.shape)))
            request.counters.prefill_calls += 1
            return StepOutcome(Proposal.empty(), (), (), None)
        before = len(request.tokens)
        shape: TreeShape = part.proposal.tree.shape
        accepted = request.emit(verdict, len(shape), shape.depth)
        path = verdict.path[:accepted]
        fed = len(part.segment.shape) - len(shape)
        request.cache.commit([*range(fed), *(fed + node for node in path)])
        if broke and request.finish_reason is None:
            request.fail(
                InvalidLogitsError(
                    f"the target {self._target.name!r} gave NaN or infinite logits after {len(request.tokens)} tokens; "
                    "check its weights, or load it in float32"
                )
            )
        return StepOutcome(part.proposal, path, tuple(request.tokens[before:]), part.hidden)


def _isolate_broken_rows(part: _Part) -> None:
    """Note slots without a law, and put one in its place so that the others can be judged.

    A broken slot matters only if the verdict's path comes by it.
    """
    assert part.laws is not None
    sound = finite_rows(part.laws)
    part.broken = frozenset((~sound).nonzero().flatten().tolist())
    stand_in = torch.zeros_like(part.laws[0])
    stand_in[0] = 1.0
    part.laws = torch.where(sound[:, None], part.laws, stand_in)


def _broken_choices(logits: Tensor | None, verdict: Verdict) -> frozenset[int]:
    """Slots on a verdict's path whose largest logit is NaN or infinite; the argmax of a row with NaN is a NaN."""
    assert logits is not None
    slots = [0, *(node + 1 for node in verdict.path)]
    sound = logits[slots, list(verdict.tokens)].isfinite().tolist()
    return frozenset(slot for slot, finite in zip(slots, sound, strict=True) if not finite)


def _before_broken_slot(part: _Part) -> tuple[Verdict | None, bool]:
    """The verdict up to the first slot without a law, and whether there was one: what plain decoding would emit."""
    verdict = part.verdict
    if verdict is None or not part.broken:
        return verdict, False
    slots = (0, *(node + 1 for node in verdict.path))
    place = next((i for i, slot in enumerate(slots) if slot in part.broken), None)
    if place is None:
        return verdict, False
    return Verdict(verdict.path[:place], verdict.tokens[:place], verdict.final), True
