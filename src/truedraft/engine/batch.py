"""A step's batch: one item for each request that takes part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.noise import KeyedNoise
from truedraft.core.tree import chain_shape
from truedraft.drafters.base import Features
from truedraft.drafters.portfolio import MergedProposal
from truedraft.engine.request import Request
from truedraft.models.base import LanguageModel, Segment

NOTHING_DRAFTED = MergedProposal.of({})


class StepItem:
    """One request's share of a step.

    Args:
        request: whose share it is; it has a cache.
        fed: how many of its own tokens, not yet in its cache, the target is fed; the others are the proposal's.

    Attributes:
        noise: of this step.
        context: tokens in its cache before the step.
        prefill: whether it is fed a part of its prompt.
        judged: whether a token is drawn behind what it is fed: not behind a part of a prompt that is not its last.
        drafted: what was drafted for it, and by whom.
        proposal: what is judged of that. What turns out not to have been drawn as it says is taken out.
        rows: which rows of the forward's output are its own.
    """

    __slots__ = ("context", "drafted", "fed", "judged", "noise", "prefill", "proposal", "request", "rows")

    def __init__(self, request: Request, fed: int) -> None:
        assert request.cache is not None
        self.request = request
        self.fed = fed
        self.noise: KeyedNoise = request.noise()
        self.context = request.cache.length
        self.prefill = request.emitted == 0
        self.judged = self.context + fed == len(request.tokens)
        self.drafted = NOTHING_DRAFTED
        self.proposal = NOTHING_DRAFTED.proposal
        self.rows = slice(0, 0)

    @property
    def judged_rows(self) -> slice:
        """Which rows of the forward's output are judged: that of the last token, and those of the nodes below it."""
        return slice(self.rows.stop - len(self.proposal.tree) - 1, self.rows.stop)


class Batch:
    """The items of one step, in the order of their requests."""

    def __init__(self, items: Sequence[StepItem]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[StepItem]:
        return iter(self.items)

    def alone(self) -> list[Batch]:
        """Each request that is not over in a batch of its own, from the start."""
        left = [item for item in self.items if item.request.finish_reason is None]
        return [Batch([StepItem(item.request, item.fed)]) for item in left]

    def segments(
        self, proposals: Sequence[MergedProposal], target: LanguageModel, features: Features | None
    ) -> list[Segment]:
        """What the target is fed: for each request its last token and the tree below it, or a part of its prompt.

        Args:
            proposals: one for each item, which it then holds.
            target: that is fed.
            features: at which rows of a part of a prompt they are wanted; without any, only where a token is drawn.
        """
        for item, merged in zip(self.items, proposals, strict=True):
            item.drafted, item.proposal = merged, merged.proposal
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
                all_wanted = request.params.prompt_logprobs is not None or (features and features.rows == "all")
                wanted = fed if all_wanted else int(features is not None)
                asked = max(wanted, int(item.judged))
                own = Segment(request.cache, torch.tensor(ids), chain_shape(fed), range(fed - asked, fed))
            else:
                tokens = next(drafted) if waits and tree.on_device else torch.tensor([*ids, *tree.host_ids])
                own = Segment(request.cache, tokens, tree.shape.rooted, range(len(tokens)))
            segments.append(own)
            item.rows = slice(first, first + len(own.rows))
            first = item.rows.stop
        return segments


def _tokens_on_device(items: Sequence[StepItem], target: LanguageModel) -> list[Tensor]:
    """The last token and the drafted ones, on the device, of items whose drafted ids are there alone."""
    if not items:
        return []
    last = transfers.upload([item.request.tokens[-1] for item in items], target.device).split(1)
    # A token that does not exist would break the forward; that there was one shows when the tokens are read.
    trees = [item.proposal.tree.tokens.to(target.device).clamp(0, target.vocab_size - 1) for item in items]
    return [torch.cat(each) for each in zip(last, trees, strict=True)]
