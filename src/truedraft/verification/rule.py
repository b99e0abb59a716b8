"""What every verification rule offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from truedraft.core import transfers
from truedraft.core.noise import Noise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.transfers import Array
from truedraft.core.verdict import Origin, TokenDivergence, Verdict
from truedraft.errors import IncompatibleRuleError


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """A draw at one node, as the one-node kernel sees it.

    Attributes:
        token: the drawn token.
        dist: row of the distribution it was drawn from; draws with one row share removals. -1 for a one-hot
            distribution.
        q: `[vocab]`: that distribution before any removal.
        kind: how it was drawn.
    """

    token: int
    dist: int
    q: Tensor
    kind: DrawKind


@dataclass(frozen=True, slots=True)
class JudgedSlot:
    """A slot of a group, as the kernel of the group sees it.

    Attributes:
        p: `[vocab]`: the target's distribution there.
        draws: the tokens drawn there, in order.
    """

    p: Tensor
    draws: tuple[DrawnToken, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way in which a group of slots can end.

    Attributes:
        probability: over the rule's own noise.
        tokens: what the group emits.
        accepted: how many of `tokens`, the first ones, were drafted; the other one, if there is one, is not.
    """

    probability: float
    tokens: tuple[int, ...]
    accepted: int

    @property
    def goes_on(self) -> bool:
        """Whether the walk goes on below the group: all its tokens were drafted."""
        return self.accepted == len(self.tokens)


@dataclass(frozen=True, slots=True)
class DeviceVerdicts:
    """What a rule decided about a batch, where its distributions lie: the host need not have seen any of it.

    Attributes:
        ends: `[requests]`, int64: the slot where the walk ends; its node and those above it are accepted.
        finals: `[requests]`, int64: the token that ends the walk.
        first_slots: of each request the number of its root, where slots are numbered through the batch.
        divergence: `[requests, tokens, 3]`, float64, of a lossy rule: total variation, KL (nats) and max p of each
            emitted token; what stands behind the last one is not looked at.
    """

    ends: Array
    finals: Array
    first_slots: Sequence[int]
    divergence: Array | None = None

    @staticmethod
    def of(verdicts: Sequence[Verdict]) -> HostVerdicts:
        """Verdicts that were made on the host."""
        return HostVerdicts(list(verdicts))

    @property
    def wanted(self) -> tuple[Array, ...]:
        """The tensors that the host must read to say the verdicts."""
        return (self.ends, self.finals) if self.divergence is None else (self.ends, self.finals, self.divergence)

    def verdicts(self, proposals: Sequence[Proposal], numbers: Sequence[Sequence[float]]) -> list[Verdict]:
        """The verdicts, once `wanted` was read.

        Args:
            proposals: those decided about; the host knows their tokens.
            numbers: in each tensor of `wanted`, flat.
        """
        measured: list[float] = list(numbers[2]) if self.divergence is not None else []
        width = len(measured) // max(1, len(proposals))
        verdicts = []
        ended = zip(proposals, self.first_slots, numbers[0], numbers[1], strict=True)
        for request, (proposal, root, end, final) in enumerate(ended):
            slot, ids = int(end) - root, proposal.tree.token_list
            path = proposal.tree.shape.path(slot - 1)
            tokens = (*(ids[node] for node in path), int(final))
            divergence = None
            if self.divergence is not None:
                first = request * width
                own = [measured[i : i + 3] for i in range(first, first + 3 * len(tokens), 3)]
                divergence = tuple(TokenDivergence.of(*each) for each in own)
            origin = Origin.RECOVERED if proposal.draws[slot] else Origin.BONUS
            verdicts.append(Verdict(path, tokens, origin, divergence))
        return verdicts


@dataclass(frozen=True, slots=True)
class HostVerdicts:
    """Verdicts that were made on the host: nothing is left to read."""

    made: list[Verdict]

    @property
    def wanted(self) -> tuple[Array, ...]:
        """See `DeviceVerdicts.wanted`."""
        return ()

    def verdicts(self, proposals: Sequence[Proposal], numbers: Sequence[Sequence[float]]) -> list[Verdict]:
        """See `DeviceVerdicts.verdicts`."""
        return self.made


@dataclass(frozen=True, slots=True)
class SlotTokens:
    """What a rule decided that fixes the token at every slot, however a walk came there.

    Attributes:
        tokens: `[slots]`, int64, of all requests, one behind another.
    """

    tokens: Array

    @property
    def wanted(self) -> tuple[Array, ...]:
        """See `DeviceVerdicts.wanted`."""
        return (self.tokens,)

    def verdicts(self, proposals: Sequence[Proposal], numbers: Sequence[Sequence[float]]) -> list[Verdict]:
        """Walk down along the children that carry the slots' tokens; see `DeviceVerdicts.verdicts`."""
        verdicts = []
        root = 0
        for proposal in proposals:
            children, ids = proposal.tree.shape.children, proposal.tree.token_list
            path: list[int] = []
            tokens: list[int] = []
            slot = 0
            while slot >= 0:
                tokens.append(int(numbers[0][root + slot]))
                end, slot = slot, -1
                for node in children[end]:
                    if ids[node] == tokens[-1]:
                        path.append(node)
                        slot = node + 1
                        break
            origin = Origin.RECOVERED if proposal.draws[end] else Origin.BONUS
            verdicts.append(Verdict(tuple(path), tuple(tokens), origin))
            root += len(children)
        return verdicts


Decided = DeviceVerdicts | SlotTokens | HostVerdicts
"""What a rule decided about a batch."""


class HasKind(Protocol):
    """A draw, made or planned."""

    @property
    def kind(self) -> DrawKind: ...


class Rule(ABC):
    """Decides which nodes of a proposal stay; a pure function of distributions and noise.

    Attributes:
        lossless: whether the emitted tokens follow the target's distribution exactly. A rule for which they do not
            measures in its verdicts how far they are from it.
        coupled: whether Gumbel noise decides, which a drafter may share, and not uniform numbers.
        by_groups: whether a walk is settled group by group, so that the kernels of groups say all about it. Not where
            a rule chooses among whole paths.
        judges: the kinds of draws that the rule can judge.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    coupled: ClassVar[bool] = False
    by_groups: ClassVar[bool] = True
    judges: ClassVar[frozenset[DrawKind]]

    @property
    def spec(self) -> str:
        """The words that make this rule, options included; see `truedraft.verification.specs`."""
        return self.name

    @property
    def greedy_form(self) -> Rule:
        """The rule that judges requests at temperature 0 where this one is lossy; the same object at every call.

        It is given distributions at temperature 1, without top-k, top-p or min-p: at temperature 0 p is one-hot, and a
        lossy rule would have nothing to be lenient about. Under a lossless rule such requests take the argmax."""
        return self

    def check(self, kinds: Iterable[DrawKind], drafter: str) -> None:
        """Refuse a drafter whose kinds of draws this rule cannot judge.

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

    def verify(self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> list[Verdict]:
        """Judge a batch of proposals: `decide`, and read the verdicts; on a device the host waits once.

        Args:
            proposals: one for each request.
            probs: for each request the target's distributions `[slots, vocab]`: row 0 after the context, row i + 1
                after node i.
            noise: for each request the noise of this step.

        Returns:
            For each request the accepted path and one more token; from a lossy rule also each token's divergence.
        """
        decision = self.decide(proposals, probs, noise)
        unknown = [proposal.tree for proposal in proposals if not proposal.tree.is_known]
        numbers = transfers.fetch([*decision.wanted, *(tree.tokens for tree in unknown)])
        for tree, ids in zip(unknown, numbers[len(decision.wanted) :], strict=True):
            tree.learn([int(token) for token in ids])
        verdicts = decision.verdicts(proposals, numbers[: len(decision.wanted)])
        return self.measured(verdicts, proposals, probs, noise)

    @abstractmethod
    def decide(self, proposals: Sequence[Proposal], probs: Sequence[Tensor], noise: Sequence[Noise]) -> Decided:
        """Judge a batch on the device where its distributions lie, without waiting for it; arguments as in `verify`.

        The host need not know the proposals' tokens yet. An id outside the vocabulary gives some decision: the caller
        discards it.
        """

    def measured(
        self,
        verdicts: list[Verdict],
        proposals: Sequence[Proposal],
        probs: Sequence[Tensor],
        noise: Sequence[Noise],
    ) -> list[Verdict]:
        """The verdicts with each token's divergence, of a lossy rule that did not decide about it; arguments alike."""
        return verdicts

    # The kernel: slots that are judged together are a group, and the distribution of an answer follows from the
    # outcomes of groups by recursion (`truedraft.verification.exact`).

    def joins(self, draws: Sequence[HasKind]) -> bool:
        """Whether a slot with these draws is judged together with the slot below its only child, if that joins, too."""
        return False

    def group(self, proposal: Proposal, slot: int) -> tuple[int, ...]:
        """The slots that are judged together where a walk comes to `slot`, from the top down; `slot` is the first."""
        slots = [slot]
        if self.joins(proposal.draws[slot]):
            while self.joins(proposal.draws[below := proposal.draws[slots[-1]][0].child + 1]):
                slots.append(below)
        return tuple(slots)

    @abstractmethod
    def outcomes(self, group: Sequence[JudgedSlot]) -> list[Outcome]:
        """The kernel of a group: how it ends, given the tokens drawn at its slots, from the top down.

        The probabilities are over the rule's own noise and sum to 1. Of a single slot, acceptances come in the order
        of the draws; those of draws that are never reached may be missing.
        """
