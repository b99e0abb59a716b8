"""Rules that can say beforehand which numbers they need, so that a step on a device reads them all at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from truedraft.core import transfers
from truedraft.core.noise import Noise
from truedraft.core.proposals import Proposal
from truedraft.core.verdicts import Verdict
from truedraft.verification.rule import DeviceVerdicts, Rule

Numbers = Sequence[Sequence[float]]
"""What was read, for each wanted tensor the numbers in it."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A judgement that is worked out on the device, up to the numbers that decide.

    Attributes:
        wanted: tensors to read, on one device.
        conclude: from the numbers in them to the verdicts. The proposals' tokens must be known to the host by then.
    """

    wanted: Sequence[Tensor]
    conclude: Callable[[Numbers], list[Verdict]]


class DeferredRule(Rule):
    """A rule with two ways to the same verdicts, chosen by where the laws lie.

    On the CPU it looks at numbers as it needs them (`verify_here`). On a device, where each look waits, it works out
    all that any walk could need (`prepare`) and reads it in one transfer; the engine reads the wants of all rules of a
    step together.
    """

    @property
    def defers(self) -> bool:
        """Whether `prepare` says all that `verify` does: not in a subclass with a `verify` of its own."""
        return type(self).verify is DeferredRule.verify

    def verify(self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]) -> list[Verdict]:
        """Judge a batch of proposals; see `Rule.verify`. On a device it waits once."""
        if not laws or not transfers.waits(laws[0].device):
            return self.verify_here(proposals, laws, noise)
        prepared = self.prepare(proposals, laws, noise)
        unknown = [proposal.tree for proposal in proposals if not proposal.tree.is_known]
        numbers = transfers.fetch([*prepared.wanted, *(tree.tokens for tree in unknown)])
        for tree, ids in zip(unknown, numbers[len(prepared.wanted) :], strict=True):
            tree.learn([int(token) for token in ids])
        return prepared.conclude(numbers[: len(prepared.wanted)])

    def decide(self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]) -> DeviceVerdicts:
        return DeviceVerdicts.of(self.verify(proposals, laws, noise))

    @abstractmethod
    def verify_here(
        self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]
    ) -> list[Verdict]:
        """Judge a batch whose laws the host can look at; see `Rule.verify`."""

    @abstractmethod
    def prepare(self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]) -> Prepared:
        """Begin to judge a batch, without waiting for the device that its laws lie on; arguments as in `verify`.

        At least one request; the host need not know the proposals' tokens yet. An id outside the vocabulary gives
        some verdict: the caller discards it.
        """
