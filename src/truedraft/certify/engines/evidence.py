"""All evidence of tokens against an engine, in one number that is valid at any stopping time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from truedraft.certify.e_process import ALARM, CERTAIN, EProcess, EventTests, TokenTests
from truedraft.certify.engines.alternatives import alternatives_for
from truedraft.certify.engines.answer_probs import AnswerProbs
from truedraft.certify.engines.bets import Bet, Bets, Repeated
from truedraft.certify.sampling import Decision, Scored
from truedraft.core.params import SamplingParams

_OUTSIDE = 1e-6
"""Share of tokens outside the options' support that a correct engine may emit."""
_FIRM = math.log(20.0)


class Evidence:
    """Tests of a stream of answers: bets on faults, events as in stack certificates, counts of repeated beginnings.

    Args:
        filters: the engine's order.
        drafts: names of the drafts with distributions for each answer.
        slack: the allowance at the request's temperature.

    Attributes:
        process: all evidence combined; known faults have the largest weight, because they are assumed to be more
            likely.
        dropped: number of dropped answers. They may have been dropped for their content, so the rest is a selection.
            Bets pay for each as if they had lost on all of its tokens; after the first one the evidence of events and
            counts is frozen, and events only measure what would have been detected.
    """

    def __init__(
        self, vocab: int, params: SamplingParams, filters: Sequence[str], drafts: Sequence[str], slack: float
    ) -> None:  # fmt: skip
        self._bets = Bets(alternatives_for(params, filters, drafts))
        self._events = TokenTests(vocab, log_ratio=slack)
        self._outside = EventTests(["tokens that the options forbid"])
        self._repeated = Repeated()
        self.process = EProcess(bets=6.0, events=2.0, counts=1.0, outside=1.0)
        self._slack = slack
        self._events_were: float | None = None
        self._answers = 0
        self.dropped = 0
        self.tokens = 0
        self.sure = 0
        self.outside = 0

    def add(self, answer: AnswerProbs, drafts: Mapping[str, Tensor], *, repeated: bool) -> None:
        """Test the tokens of one answer; `repeated` is whether its prompt is sent many times."""
        self._answers += 1
        self._bets.add(answer, drafts)
        if repeated and not self.dropped:
            self._repeated.add(answer)
        self._outside.add(torch.full((len(answer.tokens), 1), _OUTSIDE, dtype=torch.float64), answer.outside[:, None])
        # No draft is known, which `coupled` means to the events.
        nothing = [Decision(place, None, ()) for place in range(len(answer.tokens))]
        scored = Scored(answer.probs, answer.tokens, answer.question.prompt, nothing, 0, coupled=True)
        self._events.add(scored, answer.sure, self.dropped / (self._answers + self.dropped))
        self.tokens += len(answer.tokens)
        self.sure += int(answer.sure.sum())
        self.outside += int(answer.outside.sum())
        # Only after whole answers, because whether one is dropped depends on its end.
        self.process.see(self.log_parts(), self.tokens)

    def lose(self, answers: int, tokens: int) -> None:
        """Account for dropped answers of at most `tokens` tokens each."""
        if answers and self._events_were is None:
            self._events_were = self.log_parts()["events"]
        self.dropped += answers
        self._bets.lose(answers * tokens, self._slack)

    def log_parts(self) -> dict[str, float]:
        """The logarithm of each part's evidence so far; each is an e-process, and so is their mean."""
        parts = {"events": self._events.log_evidence()}
        if self._events_were is not None:
            parts["events"] = self._events_were
        parts["outside"] = float(self._outside.log_evidence()[0])
        return parts | {"bets": self._bets.log_evidence, "counts": self._repeated.log_evidence}

    def bets(self) -> list[Bet]:
        return self._bets.results()

    @property
    def fault(self) -> str:
        """The class of fault that the evidence names; "" if nothing is firm.

        The alternative nearest to the engine's distribution gains most; answers that are alike name shared noise first.
        """
        best, shared = self.bets()[0], self._repeated.log_shared
        parts = self.log_parts()
        if shared > max(best.log_evidence, _FIRM):
            return "answers share their noise"
        if best.log_evidence > _FIRM:
            return best.fault
        return "no known one" if max(parts.values()) > math.log(ALARM) else ""

    def smallest_detectable(self) -> float:
        """Total variation that some test over all tokens finds with probability 0.99, on its event."""
        return self._events.smallest_detectable(self.process.share("events") / ALARM)

    def facts(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "tokens_away_from_edges": self.sure,
            "tokens_outside": self.outside,
            "answers_dropped": self.dropped,
            "log10_evidence": self.process.log10,
            "log10_of_parts": {name: value / math.log(10.0) for name, value in self.log_parts().items()},
            "tokens_until": {f"{level:g}": self.process.reached.get(level) for level in (ALARM, CERTAIN)},
            "fault": self.fault,
            "smallest_detectable_tv": self.smallest_detectable(),
            "bets": [
                {"alternative": bet.name, "fault": bet.fault, "log10_evidence": bet.log_evidence / math.log(10.0),
                 "weight": bet.weight, "mean_tv": bet.mean_tv}
                for bet in self.bets()[:5]
            ],
            "answers_alike_log10": self._repeated.log_shared / math.log(10.0),
        }  # fmt: skip
