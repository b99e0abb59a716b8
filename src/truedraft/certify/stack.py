"""What is certified: a target, a drafter and a rule, and the engines that run them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from truedraft.control import Controller
from truedraft.drafters.base import Drafter
from truedraft.engine import Engine
from truedraft.models.base import LanguageModel
from truedraft.verification import Rule, SpeculativeSampling


@dataclass(frozen=True, slots=True)
class Stack:
    """Parts that answer together.

    Attributes:
        target: the model that decides.
        drafter: guesses; engines made here share it, one after the other.
        rule: judges requests at a temperature.
        coupled_rule: judges greedy and coupled requests; None compares, as engines do.
    """

    target: LanguageModel
    drafter: Drafter
    rule: Rule
    coupled_rule: Rule | None = None

    def engine(self, batch: int, controller: Controller | None = None) -> Engine:
        """An engine with speculation, of at most `batch` requests in a step."""
        return Engine(
            self.target,
            self.drafter,
            self.rule,
            controller,
            max_batch=batch,
            coupled_rule=self.coupled_rule,
        )

    def plain(self, batch: int) -> Engine:
        """An engine without a drafter: the answers that speculation must not change."""
        return Engine(self.target, rule=SpeculativeSampling(), max_batch=batch)

    def but(self, **parts: LanguageModel | Drafter | Rule) -> Stack:
        """The same with other parts."""
        return replace(self, **parts)  # type: ignore[arg-type]
