"""The interface of verification rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias

from torch import Tensor

from truedraft.core import transfers
from truedraft.core.noise import Noise
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.verdict import Origin, Verdict
from truedraft.errors import IncompatibleRuleError, OptionError

Sees: TypeAlias = Literal["probs", "argmax"]


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """A draw at one node, as input of the kernel."""

    token: int
    dist: int  # draws from one distribution share removals; -1 for a one-hot distribution
    q: Tensor  # [vocab], before any removal
    kind: DrawKind


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """A tree row as input of its group's kernel: the target's distribution `[vocab]`, and its draws."""

    p: Tensor
    draws: tuple[DrawnToken, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One outcome of a group; the first `accepted` of `tokens` were drafted, and at most one more follows."""

    probability: float
    tokens: tuple[int, ...]
    accepted: int

    @property
    def continues(self) -> bool:
        return self.accepted == len(self.tokens)


@dataclass(frozen=True, slots=True)
class BatchVerdicts:
    """Verdicts on a batch, decided on the device, possibly before the host reads anything.

    `verdicts` makes them from the proposals, with tokens on the host by then, and the numbers in each tensor, flat.
    """

    wanted: Sequence[Tensor]  # tensors that the host must read
    verdicts: Callable[[Sequence[Proposal], Sequence[Sequence[float]]], list[Verdict]]

    @classmethod
    def made(cls, verdicts: list[Verdict]) -> BatchVerdicts:
        return cls((), lambda proposals, numbers: verdicts)


def read_verdicts(
    decided: Sequence[tuple[BatchVerdicts, Sequence[Proposal]]], also: Sequence[Tensor] = ()
) -> tuple[list[list[Verdict]], list[list[float]]]:
    """Read the verdicts on batches, their ids that are still on a device, and the numbers in `also`; waits once."""
    trees = [proposal.tree for _, proposals in decided for proposal in proposals if proposal.tree.on_device]
    of_batches = [each for batch, _ in decided for each in batch.wanted]
    numbers = iter(transfers.fetch([*also, *(tree.tokens for tree in trees), *of_batches]))
    others = [next(numbers) for _ in also]
    for tree in trees:
        tree.keep_host_ids([int(token) for token in next(numbers)])
    return [batch.verdicts(drafts, [next(numbers) for _ in batch.wanted]) for batch, drafts in decided], others


def verdict_at(proposal: Proposal, path: Sequence[int], token: int) -> Verdict:
    """The verdict of a walk that accepts the nodes of `path` and ends with `token`."""
    ids = proposal.tree.host_ids
    final = Origin.RECOVERED if proposal.draws[path[-1] + 1 if path else 0] else Origin.BONUS
    return Verdict(tuple(path), (*(ids[node] for node in path), token), final)


class HasKind(Protocol):
    """A draw, made or planned."""

    @property
    def kind(self) -> DrawKind: ...


class Rule(ABC):
    """Decides which nodes of a proposal are accepted; a pure function of distributions and noise.

    Attributes:
        lossless: whether the emitted tokens follow the target's distribution exactly. A lossy rule measures the
            divergence in its verdicts.
        coupled: whether it decides by Gumbel noise, which a drafter may share, instead of uniform numbers.
        sees: what it reads of a target's row: "probs" the whole distribution, "argmax" only its largest entry, for
            which logits suffice.
        by_groups: whether the kernels of groups define it completely; False where a rule chooses among whole paths.
        judges: the kinds of draws that the rule can verify.
        prefers: the kinds with the highest acceptance, for drafters that support several.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    coupled: ClassVar[bool] = False
    sees: ClassVar[Sees] = "probs"
    by_groups: ClassVar[bool] = True
    judges: ClassVar[frozenset[DrawKind]]

    @property
    def reads_rows(self) -> bool:
        """Whether `accept` takes `RowProbs` too, of which it reads the rows that it needs."""
        return False

    @property
    def prefers(self) -> frozenset[DrawKind]:
        return self.judges

    @property
    def spec(self) -> str:
        return self.name

    @property
    def greedy_form(self) -> Rule:
        """The rule for requests at temperature 0; the same object at every call."""
        return self

    def options(self, params: SamplingParams) -> SamplingParams:
        """The sampling options of the distributions that it needs for a request with `params`."""
        return params

    def check(self, kinds: Iterable[DrawKind], drafter: str) -> None:
        """Refuse a drafter with kinds of draws that this rule cannot verify.

        Raises:
            IncompatibleRuleError: names rule, drafter and the kinds in question.
        """
        foreign = sorted(kind.value for kind in kinds if kind not in self.judges)
        if foreign:
            known = ", ".join(sorted(kind.value for kind in self.judges))
            raise IncompatibleRuleError(
                f"rule {self.name!r} cannot judge {', '.join(foreign)} draws of drafter {drafter!r}: "
                f"it judges {known} draws; choose another rule or draw differently"
            )

    def check_seed(self, field: str = "seed") -> None:
        """Refuse requests with a seed if this rule is lossy; `field` is the option named in the error.

        Raises:
            OptionError: this rule is lossy.
        """
        if not self.lossless:
            raise OptionError(
                f"promises the same answer whatever drafts, and rule {self.spec!r} is lossy: its answers depend on the "
                "drafts; leave one of them out",
                field=field,
            )

    def verify(self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> list[Verdict]:
        """Verify a batch of proposals: `accept`, and read the verdicts; on a device the host waits once.

        Args:
            probs: for each request the target's distributions `[rows, vocab]`: row 0 after the context, row i + 1 after
                node i.
            noise: for each request the noise of this step.

        Returns:
            For each request the accepted path and one more token; from a lossy rule also each token's divergence.
        """
        (verdicts,), _ = read_verdicts([(self.accept(proposals, probs, noise), proposals)])
        return self.measured(verdicts, proposals, probs, noise)

    @abstractmethod
    def accept(self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> BatchVerdicts:
        """Verify a batch on the device of its distributions, without waiting for it; arguments as in `verify`.

        The proposals' tokens may still be on the device. An id outside the vocabulary gives an arbitrary decision.
        """

    def measured(
        self,
        verdicts: list[Verdict],
        proposals: Sequence[Proposal],
        probs: Sequence[Tensor],
        noise: Sequence[Noise],
    ) -> list[Verdict]:
        return verdicts

    # The kernel: tree rows that are judged together form a group. The distribution of an answer follows by recursion
    # over the outcomes of groups (`truedraft.verification.exact`).

    def joins(self, draws: Sequence[HasKind]) -> bool:
        """Whether a tree row with these draws is judged together with that of its only child, if that joins, too."""
        return False

    def group(self, proposal: Proposal, row: int) -> tuple[int, ...]:
        rows = [row]
        if self.joins(proposal.draws[row]):
            while self.joins(proposal.draws[below := proposal.draws[rows[-1]][0].child + 1]):
                rows.append(below)
        return tuple(rows)

    @abstractmethod
    def outcomes(self, group: Sequence[JudgedRow]) -> list[Outcome]:
        """The kernel of a group: its outcomes, given the tokens drawn at its tree rows, from the top down.

        The probabilities are over the rule's own noise and sum to 1. For a single tree row, acceptances are in the
        order of the draws; those of draws that are never reached may be missing.
        """
