"""Controllers by their words."""

from __future__ import annotations

import pytest

from truedraft.engine.policy import AssistedHeuristic, ConfidenceStop, FixedBudget, Goodput, Schedule
from truedraft.engine.policy.specs import KINDS, controller_from_spec, controller_help
from truedraft.errors import OptionError, UnknownOptionError


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("goodput", Goodput),
        ("goodput,probing=0.02", Goodput),
        ("fixed", FixedBudget),
        ("heuristic,start=3", AssistedHeuristic),
        ("confidence,threshold=0.3", ConfidenceStop),
        ("schedule,1=4,4=2,16=0", Schedule),
    ],
)
def test_words_make_controllers(words: str, kind: type) -> None:
    assert type(controller_from_spec(words)) is kind


def test_every_kind_can_be_made_from_its_own_options() -> None:
    for word, kind in KINDS.items():
        options = "".join(f",{name}={value.split('|')[0]}" for name, value in kind.options.items())
        controller_from_spec(word + options)
        assert word in controller_help() and kind.meaning in controller_help()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("godput", "goodput"),
        ("", "controller"),
        ("goodput,probin=0.1", "probing"),
        ("goodput,explore=thompson", "it is gone, take probing alone"),
        ("goodput,probing=2", "0.5"),
        ("goodput,probing=much", "number"),
        ("goodput,probing=nan", "nan"),
        ("fixed,length=3", "length"),
        ("fixed:4", "4"),
        ("fixed(a;b)", "fixed"),
        ("heuristic,start=0", "1 or more"),
        ("heuristic,start=x", "'x'"),
        ("confidence,threshold=2", "2"),
        ("schedule", "at least one"),
        ("schedule,1=x", "'x'"),
        ("schedule,a=1", "'a'"),
        ("schedule,0=1", "0"),
        ("schedule:folder,1=2", "folder"),
        ("schedule(a;b),1=2", "schedule"),
        ("goodput,probing=0.1,probing=0.2", "twice"),
    ],
)
def test_bad_words_are_refused_in_one_sentence(words: str, says: str) -> None:
    with pytest.raises((OptionError, UnknownOptionError)) as caught:
        controller_from_spec(words)
    message = str(caught.value)
    assert says in message
    assert "\n" not in message and len(message) < 250
