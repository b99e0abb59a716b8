"""The batch of a step: one item for each request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.budget import Budget, Decision
from truedraft.core.logprobs import TokenLogprobs
from truedraft.core.noise import KeyedNoise
from truedraft.core.probs import RowProbs
from truedraft.core.proposal import Proposal
from truedraft.core.shaping import Form
from truedraft.core.tree import chain_shape, shape_of
from truedraft.core.verdict import Verdict
from truedraft.drafters.base import Features, StepOutcome
from truedraft.drafters.portfolio import MergedProposal
from truedraft.engine.request import Request
from truedraft.models.base import ForwardOutput, LanguageModel, Segment

NOTHING_DRAFTED = MergedProposal.of({})


@dataclass(slots=True, eq=False)
class StepItem:
    """One request's part of a step. Nodes that violate the form of a structured answer, and their descendants, are
    verified but not computed; if one is accepted, the verdict ends with it.
    """

    request: Request
    fed: int  # own tokens, not yet in the cache, that the target computes; the rest is the proposal
    noise: KeyedNoise = field(init=False)
    context: int = field(init=False)  # tokens in the cache before the step
    prefill: bool = field(init=False)  # whether the fed tokens are from the prompt, or from before a preemption
    judged: bool = field(init=False)  # whether a token is drawn after them; False for a part but the last of a prompt
    drafted: MergedProposal = NOTHING_DRAFTED  # all drafts with their drafters
    proposal: Proposal = NOTHING_DRAFTED.proposal  # the drafts to verify, without draws that prove invalid
    kept: list[int] | None = None  # nodes of the proposal that the forward computes; None is all of them
    rows: slice = field(init=False)  # of the forward's output
    decision: Decision | None = None  # what to draft; None during the prompt, and if its drafters failed
    logits: Tensor = field(init=False)  # [tree rows, vocab], the target's own, while the proposal is verified
    shaped: Tensor = field(init=False)  # [tree rows, vocab], after the request's options
    probs: Tensor | RowProbs = field(init=False)  # [tree rows, vocab]: distributions for its rule, or logits if they do
    broken_rows: frozenset[int] = frozenset()  # tree rows with NaN or infinite logits
    verdict: Verdict | None = None  # cut before the first row without a distribution; None if nothing is verified
    broken: bool = False  # whether there was such a row on its path
    banned: bool = False  # whether the request's options left no token there
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each token of the verdict, if enabled
    outcome: StepOutcome | None = None  # set after the step, without features of the forward
    shown: ForwardOutput | None = None  # of the step's forward, while drafters may still read features of it

    def __post_init__(self) -> None:
        assert self.request.cache is not None
        self.noise = self.request.noise()
        self.context = self.request.cache.length
        self.prefill = not self.request.decodes
        self.judged = self.context + self.fed == len(self.request.tokens)
        self.rows = slice(0, 0)

    def hold(self, drafted: MergedProposal) -> None:
        self.drafted, self.proposal = drafted, drafted.proposal
        shaping = self.request.shaping
        if shaping is not None and shaping.form is not None and len(self.proposal.tree):
            self._keep_legal(shaping.form)

    def budget(self, drafter: str) -> Budget:
        assert self.decision is not None
        return next(part.budget for part in self.decision.parts if part.drafter == drafter)

    @property
    def judged_rows(self) -> slice:
        """Rows of the forward's output to verify: that of the last token, and those of the tree's nodes."""
        return slice(self.rows.stop - len(self.proposal.tree) - 1, self.rows.stop)

    def fed_nodes(self, path: Sequence[int]) -> list[int]:
        """Positions of accepted nodes among the computed uncommitted tokens.

        Worked example: of nodes 0, 1, 2, 3 the forward saw 0, 2 and 3, so the path (0, 3) has the positions 0 and 2.
        """
        places = list(path) if self.kept is None else [self.kept.index(node) for node in path]
        return [self.fed + place for place in places]

    def _keep_legal(self, form: Form) -> None:
        tree = self.proposal.tree
        legal: set[int] = set()
        illegal: set[int] = set()
        for node in reversed(range(len(tree))):
            if node in legal or node in illegal:
                continue
            path = tree.shape.path(node)
            count = form.legal(tree.path_tokens(node))
            legal.update(path[:count])
            illegal.update(path[count:])
        if illegal - legal:
            self.kept = sorted(legal)


class Batch:
    """The items of one step, in the order of their requests."""

    def __init__(self, items: Sequence[StepItem]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[StepItem]:
        return iter(self.items)

    @property
    def prompt_tokens(self) -> int:
        return sum(item.fed for item in self.items if item.prefill)

    def halves(self) -> list[Batch]:
        """The unfinished requests in two new batches; for one request one batch, for none an empty list."""
        left = [item for item in self.items if item.request.finish_reason is None]
        items = [StepItem(item.request, min(item.fed, item.request.uncomputed)) for item in left]
        middle = len(items) // 2
        return [Batch(half) for half in (items[:middle], items[middle:]) if half]

    def segments(self, target: LanguageModel, features: Features | None) -> list[Segment]:
        waits = transfers.waits(target.device)
        on_device = [item for item in self.items if waits and item.proposal.tree.on_device]
        drafted = iter(_tokens_on_device(on_device, target))
        segments: list[Segment] = []
        first = 0
        for item in self.items:
            request, fed, tree = item.request, item.fed, item.proposal.tree
            assert request.cache is not None
            ids = request.tokens[item.context : item.context + fed]
            if fed > 1 or not item.judged:
                all_rows = request.params.prompt_logprobs is not None or (features and features.of_prompts)
                required = fed if all_rows else int(features is not None)
                computed = max(required, int(item.judged))
                prompt = max(0, min(fed, request.prompt_tokens - 1 - item.context))
                inputs, rows = None if item.context else request.inputs, range(fed - computed, fed)
                own = Segment(
                    request.cache, torch.tensor(ids), chain_shape(fed), rows, 0, prompt, request.params.adapter, inputs
                )
            else:
                own = _tree_segment(item, ids, next(drafted) if waits and tree.on_device else None)
            segments.append(own)
            item.rows = slice(first, first + len(own.rows))
            first = item.rows.stop
        return segments

    def whole_rows(self, output: ForwardOutput) -> ForwardOutput:
        """The output with a row for every node; one below target probability 0 gets the last token's."""
        if all(item.kept is None for item in self.items):
            return output
        places: list[int] = []
        for item in self.items:
            first, rows = len(places), list(range(item.rows.start, item.rows.stop))
            if item.kept is not None:
                row_of = dict(zip(item.kept, rows[1:], strict=True))
                rows = [rows[0], *(row_of.get(node, rows[0]) for node in range(len(item.proposal.tree)))]
            places += rows
            item.rows = slice(first, len(places))
        index = torch.tensor(places, device=output.logits.device)
        layers = tuple(layer[index] for layer in output.layers)
        return ForwardOutput(output.logits[index], output.hidden[index], layers)


def _tree_segment(item: StepItem, ids: Sequence[int], drafted: Tensor | None) -> Segment:
    """The last token and its tree without nodes that the forward skips; `drafted` has ids only on the device."""
    tree, cache, adapter = item.proposal.tree, item.request.cache, item.request.params.adapter
    assert cache is not None
    if item.kept is None:
        tokens = drafted if drafted is not None else torch.tensor([*ids, *tree.host_ids])
        shape = tree.shape.rooted
        return Segment(cache, tokens, shape, range(len(shape)), adapter=adapter)
    place_of = {-1: -1} | {node: place for place, node in enumerate(item.kept)}
    shape = shape_of(tuple(place_of[tree.shape.parents[node]] for node in item.kept))
    tokens = torch.tensor([*ids, *(tree.host_ids[node] for node in item.kept)])
    return Segment(cache, tokens, shape.rooted, range(len(tokens)), adapter=adapter)


def _tokens_on_device(items: Sequence[StepItem], target: LanguageModel) -> list[Tensor]:
    """Last token and drafted tokens of items with ids only on the device: views of one tensor, to run few kernels."""
    if not items:
        return []
    last = transfers.upload([item.request.tokens[-1] for item in items], target.device)
    trees = [item.proposal.tree.tokens.to(target.device) for item in items]
    # An invalid id would break the forward; it is detected when the tokens are read by the host.
    drafted = torch.cat(trees).clamp(0, target.vocab_size - 1)
    sizes = [len(item.proposal.tree) for item in items]
    pairs = zip(last.split(1), drafted.split_with_sizes(sizes), strict=True)
    return list(torch.cat([part for pair in pairs for part in pair]).split_with_sizes([1 + size for size in sizes]))
