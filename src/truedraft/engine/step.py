"""One speculative step for a batch: propose, one target forward, verify, commit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.laws import laws_from_logits
from truedraft.core.proposals import Proposal
from truedraft.core.sampling import SamplingParams
from truedraft.core.trees import TreeShape, chain_shape
from truedraft.core.verdicts import Verdict
from truedraft.drafters.base import StepOutcome
from truedraft.engine.drafting import Drafting
from truedraft.engine.judging import Judging, LookingAsItGoes, Part, ReadingOnce
from truedraft.engine.request import Request
from truedraft.errors import InvalidLogitsError
from truedraft.models.base import ForwardOutput, LanguageModel, Segment
from truedraft.verification import Rule

_AT_TEMPERATURE_ONE = SamplingParams(temperature=1.0)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What one step did, and how long its parts took in seconds of the host.

    On a device drafting and the forward are only queued, so what they cost there is part of `verify_s`, in which the
    host waits.

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


class Step:
    """Runs steps of a target with a rule and a drafter. On a device the host waits once in a step.

    Args:
        target: the model that decides.
        rule: judges proposals of requests that are neither greedy nor coupled, or all if it is lossy.
        drafting: asks the drafter.
        keeps_hidden: whether the drafter wants the vectors that enter the LM head.
        coupled: judges coupled requests, and greedy ones under a lossless rule, by comparison.
    """

    def __init__(
        self, target: LanguageModel, rule: Rule, drafting: Drafting, keeps_hidden: bool, coupled: Rule
    ) -> None:
        self._target = target
        self._rule = rule
        self._coupled = coupled
        self._drafting = drafting
        self._keeps_hidden = keeps_hidden
        self._judging: Judging = (ReadingOnce if transfers.waits(target.device) else LookingAsItGoes)(drafting)

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
        judges = [self.rule_for(request).judges for request in batch]
        proposals = self._drafting.propose(batch, noise, judges, unseen=transfers.waits(self._target.device))
        drafted = time.perf_counter()
        segments = self._segments(batch, chunks, proposals)
        parts = [Part(*each) for each in zip(batch, proposals, noise, segments, chunks, strict=True)]
        contexts = tuple(part.segment.cache.length for part in parts)
        prefill = any(request.emitted == 0 for request in batch)
        output = self._target.forward(segments)
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
        """Greedy is the coupled rule without noise: the same verdict as any lossless rule's, by comparison alone.

        A coupled request keeps its promise, the same tokens whatever drafts and judges, under a lossy rule too.
        """
        if request.params.coupled or (request.params.greedy and self._rule.lossless):
            return self._coupled
        return self._rule.greedy_form if request.params.greedy else self._rule

    def _law_params(self, request: Request) -> SamplingParams:
        """The options that make a request's laws: at temperature 0 a lossy rule looks at p at temperature 1."""
        lossy = request.params.greedy and self.rule_for(request) is not self._coupled
        return _AT_TEMPERATURE_ONE if lossy else request.params

    def _segments(
        self, batch: Sequence[Request], chunks: Sequence[int], proposals: Sequence[Proposal]
    ) -> list[Segment]:
        """For each request the last token and the tree below it, or a part of the prompt."""
        unseen = iter(self._unseen_tokens(batch, proposals))
        segments = []
        for request, chunk, proposal in zip(batch, chunks, proposals, strict=True):
            assert request.cache is not None
            start, tree = request.cache.length, proposal.tree
            ids = request.tokens[start : start + chunk]
            if chunk > 1 or request.uncached > chunk:
                rows: Sequence[int] = (chunk - 1,) if request.uncached == chunk else ()
                segments.append(Segment(request.cache, torch.tensor(ids), chain_shape(chunk), rows))
                continue
            tokens = next(unseen) if self._is_unseen(proposal) else torch.tensor([*ids, *tree.token_list])
            segments.append(Segment(request.cache, tokens, tree.shape.rooted, range(len(tokens))))
        return segments

    def _is_unseen(self, proposal: Proposal) -> bool:
        """Whether drafted tokens go to the target without coming to the host."""
        return not proposal.tree.is_known and transfers.waits(self._target.device)

    def _unseen_tokens(self, batch: Sequence[Request], proposals: Sequence[Proposal]) -> list[Tensor]:
        """The last token and the drafted ones, on the device, for each request with unseen ones."""
        unseen = [each for each in zip(batch, proposals, strict=True) if self._is_unseen(each[1])]
        if not unseen:
            return []
        device, last_id = self._target.device, self._target.vocab_size - 1
        last = transfers.upload([request.tokens[-1] for request, _ in unseen], device).split(1)
        # A token that does not exist would break the forward; that there was one shows when the tokens are read.
        trees = [proposal.tree.tokens.to(device).clamp(0, last_id) for _, proposal in unseen]
        return [torch.cat(each) for each in zip(last, trees, strict=True)]

    def _read(self, parts: Sequence[Part], output: ForwardOutput) -> None:
        """Give each part the laws of its slots."""
        judged = [part for part in parts if len(part.segment.rows)]
        if not judged:
            return
        counts = [len(part.segment.rows) for part in judged]
        for part in judged:
            part.argmax = self._takes_argmax(part)
        lawful = self._judging.before_laws(judged, output.logits)
        first = 0
        for argmax, run in itertools.groupby(zip(judged, counts, strict=True), lambda one: one[0].argmax):
            group, sizes = zip(*run, strict=True)
            logits = (output.logits if argmax else lawful)[first : first + sum(sizes)]
            first += sum(sizes)
            rows = [(self._law_params(part.request), size) for part, size in zip(group, sizes, strict=True)]
            for part, law in zip(group, logits.split(sizes) if argmax else laws_from_logits(logits, rows), strict=True):
                part.laws = law
            self._judging.after_laws(group, logits)
        if self._keeps_hidden:
            for part, vectors in zip(judged, output.hidden.split(counts), strict=True):
                part.hidden = vectors

    def _takes_argmax(self, part: Part) -> bool:
        """Whether the rule only looks at the largest entry of a row: then logits do, and no law need be made."""
        return part.request.params.greedy and self.rule_for(part.request) is self._coupled

    def _verify(self, parts: Sequence[Part]) -> None:
        """Judge all proposals, those of one rule together."""
        by_rule: dict[Rule, list[Part]] = {}
        for part in parts:
            by_rule.setdefault(self.rule_for(part.request), []).append(part)
        if by_rule:
            self._judging.judge(by_rule)

    def _commit(self, part: Part) -> StepOutcome:
        """Keep what was accepted in the cache, emit, and say what became of the proposal."""
        request = part.request
        verdict, broke = _before_broken_slot(part)
        assert request.cache is not None
        if verdict is None:
            request.cache.commit(range(len(part.segment.shape)))
            request.counters.prefill_calls += 1
            return StepOutcome(Proposal.empty(), (), (), None)
        before = len(request.tokens)
        shape: TreeShape = part.proposal.tree.shape
        accepted = request.emit(verdict, len(shape), shape.depth)
        request.counters.listed_tokens += shape.listed
        path = verdict.path[:accepted]
        request.cache.commit([*range(part.fed), *(part.fed + node for node in path)])
        if broke and request.finish_reason is None:
            request.fail(
                InvalidLogitsError(
                    f"the target {self._target.name!r} gave NaN or infinite logits after {len(request.tokens)} tokens; "
                    "check its weights, or load it in float32"
                )
            )
        return StepOutcome(part.proposal, path, tuple(request.tokens[before:]), part.hidden)


def _before_broken_slot(part: Part) -> tuple[Verdict | None, bool]:
    """The verdict up to the first slot without a law, and whether there was one: what plain decoding would emit."""
    verdict = part.verdict
    if verdict is None or not part.broken:
        return verdict, False
    slots = (0, *(node + 1 for node in verdict.path))
    place = next((i for i, slot in enumerate(slots) if slot in part.broken), None)
    if place is None:
        return verdict, False
    return verdict.cut(place), True
