"""`--rule block` by name, and what it refuses before anything runs."""

from __future__ import annotations

import pytest

from truedraft.core.proposal import DrawKind
from truedraft.errors import IncompatibleRuleError, OptionError, UnknownOptionError
from truedraft.verification import BlockVerification
from truedraft.verification.specs import rule_from_spec


def test_block_by_name() -> None:
    rule = rule_from_spec("block")
    assert isinstance(rule, BlockVerification)
    assert rule.lossless
    assert rule.spec == "block"
    assert rule_from_spec(rule.spec).name == "block"
    assert rule.greedy_form is rule


@pytest.mark.parametrize("spec", ["block,lenience=0.5", "block,lenience=1"])
def test_a_lenient_block_is_refused_with_the_rule_to_take(spec: str) -> None:
    with pytest.raises(OptionError, match=r"has no lenience; take speculative,lenience=(0\.5|1)$"):
        rule_from_spec(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("blok", "did you mean 'block'"),
        ("block,epsilon=0.1", "unknown option of rule 'block' 'epsilon'"),
        ("block,lenience", "not of the form option=value"),
        ("block,lenience=much", "must be a number"),
    ],
)
def test_other_words_are_refused(spec: str, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        rule_from_spec(spec)
    assert isinstance(caught.value, UnknownOptionError) == ("unknown" in message or "mean" in message)


def test_chains_and_candidates_are_judged() -> None:
    BlockVerification().check({DrawKind.INDEPENDENT, DrawKind.DETERMINISTIC}, "a drafter")
    BlockVerification().check((), "none")


@pytest.mark.parametrize("kind", [DrawKind.WITHOUT_REPLACEMENT, DrawKind.COUPLED])
def test_other_draws_are_refused_with_the_rule_to_take(kind: DrawKind) -> None:
    with pytest.raises(IncompatibleRuleError, match=f"'bushy' makes {kind.value} draws; take the rule 'speculative'"):
        BlockVerification().check({DrawKind.INDEPENDENT, kind}, "bushy")
