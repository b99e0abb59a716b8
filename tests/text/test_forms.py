"""What forms may take: the library's limits, a trial in another process, room by bytes, and use by many answers."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from truedraft.core.params import Structured
from truedraft.errors import FormMemoryError, OptionError
from truedraft.models.embedded import embedded_folder
from truedraft.text.forms import Forms, FormState
from truedraft.text.tokenizer import Tokenizer
from truedraft.text.trial import CancelledError, Trial

pytest.importorskip("llguidance")

BOTH = Structured("grammar", "start: A\nA: /a{1,9}/ & /[a-z]+/")
"""An intersection, which the library does not bound."""


def multiples(*numbers: float) -> Structured:
    properties = {f"p{place}": {"type": "integer", "multipleOf": number} for place, number in enumerate(numbers)}
    return Structured("json_schema", {"type": "object", "properties": properties, "required": list(properties)})


def chain(rules: int) -> Structured:
    links = [f"r{number}: r{number + 1}" for number in range(rules)]
    return Structured("grammar", "\n".join(["start: r0", *links, f'r{rules}: "x"']))


@pytest.fixture
def forms() -> Forms:
    tokenizer = Tokenizer.load(str(embedded_folder("target")))
    assert tokenizer is not None
    return Forms(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The grammars that were tried; each holds three MiB."""
    tried: list[str] = []

    def run(_: Trial, tokenizer: str, grammar: str, *rest: Any) -> int:
        tried.append(grammar)
        return 3 << 20

    monkeypatch.setattr(Trial, "run", run)
    yield tried


def walk(state: FormState, tokens: list[int], steps: int, seed: int) -> int:
    """Write an answer at random; returns how many tokens came."""
    draw = np.random.default_rng(seed)
    for step in range(steps):
        allowed = np.flatnonzero(state.masks([()])[0])
        if not len(allowed):
            return step
        tokens.append(int(draw.choice(allowed)))
    return steps


def test_ordinary_forms_are_not_tried_and_others_are(forms: Forms, trials: list[str]) -> None:
    ordinary = (
        Structured("json_object"),
        Structured("regex", "[a-z]+&x"),
        Structured("choice", ["a & b", "~"]),
        multiples(0.01, 5, 60, 1000, 7),
        Structured("json_schema", {"type": "array", "items": {"enum": ["&", "~"]}, "description": "& " * 99}),
        Structured("grammar", 'start: "(" call ")"\ncall: %json {"title": "a & b", "type": "integer"}'),
        chain(100),
    )
    for each in ordinary:
        forms.prepare(each)
    assert not trials
    hidden = Structured("grammar", 'start: %json {"type": "integer", "multiple\\u004ff": 10007}')
    both = Structured("json_schema", {"allOf": [{"type": "integer", "multipleOf": each} for each in (97, 101, 103)]})
    for number, each in enumerate((BOTH, multiples(10007), multiples(4999, 4999, 4993), hidden, chain(400)), start=1):
        forms.make(each, *forms.grammar(each), Trial())
        assert len(trials) == number
    assert not forms.grammar(both)[1], "the least common multiple of these is large"
    forms.start(BOTH, [0], 1)
    forms.make(BOTH, *forms.grammar(BOTH), Trial())
    assert len(trials) == 5, "what is there is not prepared again"


def test_a_trial_tells_what_a_form_holds_or_why_there_is_none(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    assert forms.prepare(BOTH).held < 64 << 20
    assert forms.start(BOTH, [0], 1).legal(forms._tokenizer.plain_ids("aaa")) > 0
    broken = Structured("grammar", "start: A\nA: /a/ & missing")
    for structured, message in ((chain(5000), "lead to each other too deeply"), (broken, "structured cannot be read")):
        with pytest.raises(OptionError, match=message):
            forms.prepare(structured)
    monkeypatch.setattr("truedraft.text.trial.MOST_BYTES", 1 << 20)
    with pytest.raises(OptionError, match="structured would hold more than 1 MiB"):
        forms.prepare(multiples(29989))
    assert forms.found(multiples(29989)) is None


@pytest.mark.skipif(os.name != "posix", reason="limits of a process are POSIX's")
def test_what_takes_too_long_is_ended(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truedraft.text.trial.MOST_SECONDS", 0)
    hostile = [99991, 99989, 99971, 99961, 99929, 99923, 99907, 99901, 99881, 99877]
    with pytest.raises(OptionError, match="structured takes more than 0 s to prepare"):
        forms.prepare(multiples(*hostile))


def test_a_trial_that_is_cancelled_ends_at_once(forms: Forms) -> None:
    trial, hostile = Trial(), multiples(*[99991, 99989, 99971, 99961, 99929, 99923, 99907, 99901])
    grammar = forms.grammar(hostile)
    found: list[BaseException] = []

    def make() -> None:
        try:
            forms.make(hostile, *grammar, trial)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    while trial._process is None:
        time.sleep(0.001)
    trial.cancel()
    thread.join(20)
    assert isinstance(found[0], CancelledError) and trial._process.returncode is not None
    with pytest.raises(CancelledError):
        forms.make(hostile, *grammar, trial)
    assert not forms._one_trial.locked()


SEVERAL = [Structured("grammar", f"start: A\nA: /a{{1,{number}}}/ & /[a-z]+/") for number in range(2, 8)]


def test_forms_of_one_owner_are_its_own_and_bounded(
    forms: Forms, trials: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truedraft.text.forms._MOST_BYTES", 10 << 20)
    monkeypatch.setattr("truedraft.text.forms._MOST_OF_ONE", 7 << 20)
    several = SEVERAL[:4]
    other = forms.prepare(several[0], "b")
    for each in several:
        forms.prepare(each, "a")
    gc.collect()
    assert [forms.found(each, "a") is not None for each in several] == [False, False, True, True]
    assert [forms.found(several[0], owner) for owner in ("b", None)] == [other, None]
    states = [forms.start(each, [0], 1, "a") for each in several[2:]]
    with pytest.raises(FormMemoryError, match="needs 3 MiB, and the forms of open requests hold 6 of 7 MiB"):
        forms.start(several[0], [0], 1, "a")
    assert forms.start(several[0], [0], 1, "b") and states


def test_kept_forms_are_bounded_by_bytes_and_open_ones_too(
    forms: Forms, trials: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truedraft.text.forms._MOST_BYTES", 10 << 20)
    for each in SEVERAL:
        forms.prepare(each)
    gc.collect()
    assert [forms.found(each) is not None for each in SEVERAL] == [False] * 3 + [True] * 3
    states = [forms.start(each, [0], 1) for each in SEVERAL[:3]]
    with pytest.raises(FormMemoryError, match="needs 3 MiB, and the forms of open requests hold 9 of 10 MiB"):
        forms.start(SEVERAL[3], [0], 1)
    assert [forms.start(each, [0], 1) is not None for each in SEVERAL[:3]] == [True] * 3, "these are there"
    del states
    gc.collect()
    forms.start(SEVERAL[3], [0], 1)


def test_answers_do_not_suffer_from_the_states_that_others_came_to(
    forms: Forms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a form share the states of its expressions, of which there is a limit."""
    monkeypatch.setattr("truedraft.text.forms._LIMITS", {"max_lexer_states": 200})
    structured = Structured("regex", "([a-z]{1,30}[0-9]|[A-Z]{1,30}-){1,60}")
    alone = []
    for seed in range(6):
        forms._kept.clear()
        alone.append(walk(forms.start(structured, tokens := [0], 1), tokens, 30, seed))
    begun = forms.prepare(structured)
    together = [walk(forms.start(structured, tokens := [0], 1), tokens, 30, seed) for seed in range(6)]
    assert together == alone == [30] * 6
    assert forms.found(structured) is not begun, "or the limit was never met"


def test_a_spent_form_that_is_dear_to_make_fails_one_answer_and_is_made_for_the_next(
    forms: Forms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truedraft.text.forms._LIMITS", {"max_lexer_states": 200})
    monkeypatch.setattr("truedraft.text.forms._MADE_IN_A_STEP_S", -1.0)
    structured = Structured("regex", "([a-z]{1,30}[0-9]|[A-Z]{1,30}-){1,60}")
    for seed in range(6):
        state = forms.start(structured, tokens := [0], 1)
        if walk(state, tokens, 30, seed) < 30:
            break
    assert state.problem().endswith("some of which other answers had used; ask once more")
    assert forms.found(structured) is None
    tokens = [0]
    assert walk(forms.start(structured, tokens, 1), tokens, 30, seed) == 30


def test_an_answer_that_needs_too_many_states_says_so(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truedraft.text.forms._LIMITS", {"max_lexer_states": 400})
    structured = Structured("regex", "([a-z]*[aeiou][a-z]{20}|[a-z]*[xyz][a-z]{21})+")
    state = forms.start(structured, tokens := [0], 1)
    assert walk(state, tokens, 200, 0) < 200
    assert state.problem() == "it exceeds the states that its expressions may come to (max_lexer_states)"


def test_a_multiple_with_more_digits_than_are_read_is_refused(forms: Forms) -> None:
    with pytest.raises(OptionError, match="structured cannot be read"):
        forms.grammar(Structured("grammar", 'start: %json {"multipleOf": ' + "1" * 5000 + "}"))


def test_a_schema_is_an_object_or_true() -> None:
    assert Structured("json_schema", True) == Structured("json_schema", "true") == Structured("json_schema", {})
    for schema in (False, None, [], [["a", 1]], 7, "[]", "null", "{", "[" * 100_000):
        with pytest.raises(OptionError, match="structured cannot be read"):
            Structured("json_schema", schema)
