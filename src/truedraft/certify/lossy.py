"""Distance of a lossy rule's answers from the target's distribution: by its own verdicts, and by tests of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from truedraft.certify.checks import Check, Context, Finding, Part, Status
from truedraft.certify.e_process import TokenTests
from truedraft.certify.sampling import Decision, scored_answers
from truedraft.core.intervals import Interval, ratio_of_totals
from truedraft.core.verdict import Divergence

_SIGMAS = 4.5  # holds for all of some hundred tests, except in one run in a thousand
_UNKNOWN = Decision(0, None, ())


class LossyDivergence(Check):
    """Measures a lossy rule by its verdicts' divergence, and by the tests of sampled answers; at least two batches."""

    part = Part.DIVERGENCE
    share = 0.7

    def run(self, context: Context) -> list[Finding]:
        stack, params, batch = context.stack, context.params, context.batch
        found: list[Divergence] = []
        tests = TokenTests(stack.target.vocab_size)
        deadline = context.deadline()
        for answers in scored_answers(stack, context.prompts, params, batch):
            found += [scored.divergence for scored in answers if scored.divergence is not None]
            for scored in () if params.greedy else answers:
                tests.add(replace(scored, decisions=[_UNKNOWN] * len(scored.tokens)))
            context.tell(deadline.fraction)
            if deadline.over and (len(found) > batch or not found):
                break
        if not found:
            return [_unmeasured()]
        return [_measured(found), *([] if params.greedy else [_outside(tests)])]


def _measured(found: Sequence[Divergence]) -> Finding:
    tokens = [each.tokens for each in found]
    distance = ratio_of_totals([each.total_variation for each in found], tokens)
    kl = ratio_of_totals([each.kl for each in found], tokens)
    greedy = ratio_of_totals([each.total_variation_greedy for each in found], tokens)
    summary = (
        f"lossy: a token's distribution is off by a total variation of {_with_margin(distance)} (95 %), "
        f"KL {_with_margin(kl)} nats, over {sum(tokens):,} tokens of {len(found)} answers; greedy decoding there would "
        f"be off by {greedy.value:.4f}"
    )
    facts = {
        "tokens": sum(tokens),
        "answers": len(found),
        "total_variation": distance.value,
        "total_variation_ci95": [max(0.0, distance.low), distance.high],
        "kl_nats": kl.value,
        "kl_nats_ci95": [max(0.0, kl.low), kl.high],
        "total_variation_greedy": greedy.value,
    }
    return Finding(Part.DIVERGENCE, "divergence of a token's distribution", Status.MEASURED, summary, facts)


def _with_margin(found: Interval) -> str:
    return f"{found.value:.4f} ± {(found.high - found.low) / 2:.4f}"


def _unmeasured() -> Finding:
    summary = "the rule is lossy and says nothing of its divergence"
    return Finding(Part.DIVERGENCE, "divergence of a token's distribution", Status.FAILS, summary)


def _outside(tests: TokenTests) -> Finding:
    """Result of the tests of sampled answers, independent of the rule's own divergence."""
    widest = max(tests.results(), key=lambda test: test.least_excess(_SIGMAS))
    least = widest.least_excess(_SIGMAS)
    summary = (
        f"seen from outside: on average a token's distribution is off by at least {least:.4f} ({widest.name}: "
        f"{widest.excess:+.4f} over {widest.tokens:,} tokens)"
    )
    facts = {"least_total_variation": least, "test": widest.name, "excess": widest.excess, "tokens": widest.tokens}
    return Finding(Part.DIVERGENCE, "divergence seen from outside", Status.MEASURED, summary, facts)
