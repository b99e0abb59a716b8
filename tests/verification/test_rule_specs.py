"""Rules by name, the draws that they judge, and what is refused before anything runs."""

from __future__ import annotations

import pytest

from truedraft.core.proposal import DrawKind
from truedraft.errors import IncompatibleRuleError, OptionError, UnknownOptionError
from truedraft.verification import BlockVerification, LenientSampling, SpeculativeSampling, TypicalAcceptance
from truedraft.verification.specs import rule_from_spec

ALL, DRAWN = frozenset(DrawKind), frozenset(DrawKind) - {DrawKind.COUPLED}


@pytest.mark.parametrize(
    ("spec", "kind", "judged"),
    [
        ("speculative", SpeculativeSampling, DRAWN),
        ("speculative,lenience=0.5", LenientSampling, DRAWN),
        ("block", BlockVerification, {DrawKind.INDEPENDENT, DrawKind.DETERMINISTIC}),
        ("typical,epsilon=0.09,delta=0.3", TypicalAcceptance, ALL),
    ],
)
def test_rules_by_name_and_the_draws_that_they_judge(spec: str, kind: type, judged: frozenset[DrawKind]) -> None:
    rule = rule_from_spec(spec)
    assert type(rule) is kind and rule.spec == spec and rule.judges == judged
    assert rule.lossless == (kind in (SpeculativeSampling, BlockVerification))
    assert (rule.greedy_form is rule) != (kind is LenientSampling)
    rule.check(judged, "a drafter")
    rule.check((), "none")
    for foreign in ALL - judged:
        with pytest.raises(IncompatibleRuleError, match=f"'{rule.name}'.*{foreign.value} draws") as caught:
            rule.check([DrawKind.INDEPENDENT, foreign], "bushy")
        assert "'bushy'" in str(caught.value)
        assert ("take the rule 'speculative'" in str(caught.value)) == (kind is BlockVerification)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("blok", "did you mean 'block'"),
        ("block,epsilon=0.1", "unknown option of rule 'block' 'epsilon'"),
        ("block,lenience", "not of the form option=value"),
        ("block,lenience=much", "must be a number"),
        ("block,lenience=0.5", r"has no lenience; take speculative,lenience=0\.5$"),
        ("block,lenience=1", "has no lenience; take speculative,lenience=1$"),
    ],
)
def test_other_words_are_refused(spec: str, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        rule_from_spec(spec)
    assert isinstance(caught.value, UnknownOptionError) == ("unknown" in message or "mean" in message)
