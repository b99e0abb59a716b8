"""What every verification rule offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from truedraft.core.noise import Noise
from truedraft.core.proposals import DrawKind, Proposal
from truedraft.core.verdicts import Verdict
from truedraft.errors import IncompatibleRuleError


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """A draw at one node, as the one-node kernel sees it.

    Attributes:
        token: the drawn token.
        law: row of the law it was drawn from; draws with one row share removals. -1 for a one-hot law.
        q: `[vocab]`: that law before any removal.
        kind: how it was drawn.
    """

    token: int
    law: int
    q: Tensor
    kind: DrawKind


@dataclass(frozen=True, slots=True)
class NodeOutcome:
    """One way in which a node can end: with this probability this token is emitted, accepted or not."""

    probability: float
    token: int
    accepted: bool


class Rule(ABC):
    """Decides which nodes of a proposal stay; a pure function of laws and noise.

    Attributes:
        lossless: whether the emitted tokens follow the target's law exactly. A rule for which they do not measures in
            its verdicts how far they are from it.
        judges: the kinds of draws that the rule can judge.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    judges: ClassVar[frozenset[DrawKind]]

    @property
    def spec(self) -> str:
        """The words that make this rule, options included; see `truedraft.verification.specs`."""
        return self.name

    @property
    def greedy_form(self) -> Rule:
        """The rule that judges requests at temperature 0 where this one is lossy; the same object at every call.

        It is given laws at temperature 1, without top-k, top-p or min-p: at temperature 0 p is one-hot, and a lossy
        rule would have nothing to be lenient about. Under a lossless rule such requests take the argmax.
        """
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

    @abstractmethod
    def verify(self, proposals: Sequence[Proposal], laws: Sequence[Tensor], noise: Sequence[Noise]) -> list[Verdict]:
        """Judge a batch of proposals.

        Args:
            proposals: one for each request.
            laws: for each request the target's laws `[slots, vocab]`: row 0 after the context, row i + 1 after node i.
            noise: for each request the noise of this step.

        Returns:
            For each request the accepted path and one more token; from a lossy rule also each token's divergence.
        """

    @abstractmethod
    def outcomes(self, p: Tensor, draws: Sequence[DrawnToken]) -> list[NodeOutcome]:
        """The one-node kernel: how a node with law `p` `[vocab]` ends, given the tokens drawn there, in order.

        The probabilities are over the rule's own noise and sum to 1. The exact law of an answer follows from
        this by recursion (`truedraft.verification.exact`).
        """
