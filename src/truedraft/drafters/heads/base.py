"""The shared part of drafters with heads: the hidden state that a head reads of each request, and target checks."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.params import SamplingParams
from truedraft.core.rank_tree import RankTree
from truedraft.core.theory import AcceptanceCurve
from truedraft.core.tree import TokenTree, shape_of
from truedraft.drafters.base import Drafter, DraftRequest, Features, StepOutcome
from truedraft.drafters.heads.head import Head
from truedraft.drafters.held import Held
from truedraft.errors import CompositionError, DrafterError
from truedraft.models.backends.graphs.replay import CudaGraphs, Recorder
from truedraft.models.base import LanguageModel

HeadT = TypeVar("HeadT", bound=Head)
RunnerT = TypeVar("RunnerT")


@dataclass(frozen=True, slots=True)
class SizePlan:
    """One choice of a drafter's sizes, except its number of nodes: an option for planning.

    `curve` is the expected tokens by number of nodes, `timed` a drafter with proposals of the same cost.
    """

    name: str
    curve: AcceptanceCurve
    timed: Drafter
    with_nodes: Callable[[int], Drafter]


@dataclass(frozen=True, slots=True)
class TreeFacts:
    """Measurements of the token trees of a drafter with ranked candidates, for reports.

    Attributes:
        tree: the drafted nodes of the counted tree.
        fixed: whether that tree is drafted; otherwise each step chooses one.
        accuracy: `[heads][ranks]`: how often the true token had which rank for each head; None if not counted.
    """

    tree: RankTree
    fixed: bool
    nodes: int
    curve: AcceptanceCurve | None = None
    accuracy: Sequence[Sequence[float]] | None = None


class HeadDrafter(Drafter, Generic[HeadT, RunnerT]):
    """Drafts with heads on the target's last hidden state; subclasses turn their guesses into proposals.

    Heads may use the target's LM head and embeddings, so the drafter runs with the target that it was last checked
    against. `sizes` are the head's; a proposal's cost depends on them.
    """

    features: Features | None = Features()
    observes_lazily = True

    def __init__(self, head: HeadT) -> None:
        self.head = head
        self.sizes = astuple(head.config)  # type: ignore[call-overload]
        self.note = head.record.note
        self.facts: dict[str, Any] = dict(head.record.facts)
        self._vectors: dict[int, Tensor | None] = {}  # by request: the one that gave its last token, [width]
        self.held = Held(noted=[self._vectors])
        self._runner: RunnerT | None = None
        self._runs_with: LanguageModel | None = None

    @property
    def trees(self) -> Self:  # type: ignore[override]
        return self

    @property
    def warmups(self) -> int:
        return getattr(self._runner, "warmups", 0)

    def acceptance_curve(self, params: SamplingParams) -> AcceptanceCurve | None:
        """Expected tokens by number of nodes, as measured."""
        return None

    def size_plans(self, params: SamplingParams) -> Sequence[SizePlan]:
        """Sizes to choose from by measuring; empty if they were chosen already, or not measured in training."""
        return ()

    def tree_facts(self, params: SamplingParams) -> TreeFacts | None:
        """Measurements of the trees; None if it makes no ranked trees."""
        return None

    @abstractmethod
    def _runner_for(self, target: LanguageModel) -> RunnerT:
        """Raises `CompositionError` if the drafter does not fit, `ModelError` without an LM head to share."""

    def _recorder(self, target: LanguageModel) -> Recorder | None:
        """None if the target's forwards are not recorded: its LM head may then run code on the host."""
        return CudaGraphs(target.device) if target.records_chains and target.device.type == "cuda" else None

    def check(self, target: LanguageModel) -> None:
        """Refuse another target than that of the head; from now on drafts with this one.

        Raises:
            CompositionError: names both targets, or the mismatch.
            ModelError: the target has no LM head or embedding to share, or its weights cannot be read.
        """
        if target is self._runs_with:
            return
        refuse_other_target(self.head, target)
        if self.head.reads_tokens:
            target.embed(torch.zeros(1, dtype=torch.int64, device=target.device))  # raises if it has none
        self._runner = self._runner_for(target)
        self._runs_with = target
        self.held.request_bytes = self.head.config.width * target.dtype.itemsize

    def take(self, head: HeadT) -> None:
        """Draft with other weights from now on; old state must be dropped. `CompositionError` for other sizes."""
        if type(head) is not type(self.head) or head.config != self.head.config:
            raise CompositionError(
                f"{head.config} is no head of the sizes {self.head.config}, which this one drafts with"
            )
        before, self.head = self.head, head
        try:
            self._runner = None if self._runs_with is None else self._runner_for(self._runs_with)
        except BaseException:
            self.head = before
            raise

    def with_head(self, head: HeadT) -> Self:
        """The same drafter with other weights, without requests; raises `CompositionError` if the sizes differ."""
        other = copy.copy(self)
        other._vectors = {}
        other.held = Held(noted=[other._vectors], request_bytes=self.held.request_bytes)
        other.take(head)
        return other

    @property
    def _running(self) -> tuple[RunnerT, LanguageModel]:
        if self._runner is None or self._runs_with is None:
            raise DrafterError(
                f"{self.head.plural} need the target's LM head: call check(target) first, as an engine does"
            )
        return self._runner, self._runs_with

    def _last_vectors(self, batch: Sequence[DraftRequest]) -> tuple[Tensor, Tensor]:
        """The hidden states `[requests, width]`, and the tokens drawn from them."""
        vectors = [vector for each in batch if (vector := self._vectors[each.id]) is not None]
        hidden = torch.stack(vectors)
        return hidden, transfers.upload([each.tokens[-1] for each in batch], hidden.device)

    def begin(self, request: DraftRequest) -> None:
        self._vectors[request.id] = None  # set at the end of the prompt

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        for request, outcome in zip(batch, outcomes, strict=True):
            if outcome.hidden is None:
                self._vectors[request.id] = None
                continue
            # A copy: the next forward may overwrite the rows. A padded target has zeros after the heads' entries.
            self._vectors[request.id] = outcome.hidden[-1, : self.head.config.width].clone()

    def end(self, request: DraftRequest) -> None:
        self._vectors.pop(request.id, None)


def refuse_other_target(head: Head, target: LanguageModel) -> None:
    """Refuse a target that a head was not trained for, as far as that is known.

    Raises:
        CompositionError: names both targets, or the mismatch.
        ModelError: the target's weights cannot be read again.
    """
    config, record, what = head.config, head.record, head.plural
    if target.head_width == 0:
        raise CompositionError(f"the target {target.name} has no vectors that heads could read")
    # It may have more ids than the target, as rows of a padded embedding.
    if config.width != target.head_width or config.vocab_size < target.vocab_size:
        trained_for = f" for {record.target_name}" if record.target_name else ""
        raise CompositionError(
            f"these {what}{trained_for} read {config.width} numbers and know {config.vocab_size} ids, but "
            f"{target.name} has {target.head_width} numbers and {target.vocab_size} ids; take heads that were "
            "trained for it"
        )
    ids: Tensor | None = getattr(head, "draft_ids", None)
    if ids is not None and int(ids.max()) >= target.vocab_size:
        raise CompositionError(
            f"this head guesses the id {int(ids.max())}, and {target.name} has {target.vocab_size} ids; take a head "
            "that was trained for it"
        )
    mask: int | None = getattr(config, "mask", None)
    if mask is not None and head.reads_tokens and mask >= target.vocab_size:
        raise CompositionError(
            f"this head reads the target's embedding of the id {mask} as its mask, and {target.name} has "
            f"{target.vocab_size} ids; take a head that was trained for it"
        )
    if not record.names(target):
        raise CompositionError(
            f"these {what} were trained for {record.target_name} (fingerprint {record.fingerprint}), and the target is "
            f"{target.name} (fingerprint {target.fingerprint}); take heads that were trained for it"
        )


def trees_of(tokens: Tensor, parents: Tensor, counts: Tensor) -> list[TokenTree]:
    """The tree of each request, from nodes `[requests, nodes]`, int64, a parent before its children; -1 is the root.

    Shapes are copied to the host in one transfer; tokens stay on the device. `counts` are the numbers of valid entries.
    """
    numbers, width = transfers.fetch([counts, parents]), parents.shape[1]
    above = list(map(int, numbers[1]))
    trees = []
    for first, count, own in zip(range(0, len(above), width), map(int, numbers[0]), tokens.unbind(), strict=True):
        trees.append(TokenTree(own[:count], shape_of(tuple(above[first : first + count]))))
    return trees
