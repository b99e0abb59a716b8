"""Structured answers: they have the form, they follow the masked distribution, and drafts change nothing of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from support.answers import fixed
from support.embedded_models import embedded
from support.pairwise import pairwise
from truedraft import Engine, SamplingParams
from truedraft.core.params import Structured
from truedraft.core.shaping import Shaping
from truedraft.drafters import Drafter, PromptLookup
from truedraft.drafters.prediction import with_own_drafts
from truedraft.drafters.specs import from_spec
from truedraft.engine import Answer
from truedraft.errors import OptionError
from truedraft.models.base import LanguageModel
from truedraft.text.forms import Forms
from truedraft.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["list", "dict", "set"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "kind", "size", "tags"],
    "additionalProperties": False,
}
GRAMMAR = 'start: "(" expr ")"\nexpr: NUMBER (("+" | "-") NUMBER)*\nNUMBER: /[0-9]{1,3}/'
FORMS = {
    "schema": Structured("json_schema", SCHEMA),
    "object": Structured("json_object"),
    "regex": Structured("regex", r"[A-Z][a-z]{2,5}(-[0-9]{2}){1,3}"),
    "choice": Structured("choice", ["class Stack", "class Queue", "def pop"]),
    "grammar": Structured("grammar", GRAMMAR),
}
PROMPT = "class Stack:\n    def push(self, item):\n"


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return embedded()


@pytest.fixture
def forms(target: LanguageModel) -> Forms:
    return Forms(tokenizer_of(target), target.vocab_size, target.eos_token_ids)


def tokenizer_of(target: LanguageModel) -> Tokenizer:
    assert target.tokenizer is not None
    return target.tokenizer


def assert_has_form(name: str, text: str) -> None:
    if name == "schema":
        found = json.loads(text)
        assert list(found) == ["name", "kind", "size", "tags"]
        assert len(found["name"]) <= 12 and found["kind"] in ("list", "dict", "set") and 0 <= found["size"] <= 99
        assert len(found["tags"]) <= 3 and all(isinstance(tag, bool) for tag in found["tags"])
    elif name == "object":
        assert isinstance(json.loads(text), dict)
    elif name == "choice":
        assert text in FORMS["choice"].value
    else:
        pattern = FORMS["regex"].value if name == "regex" else r"\([0-9]{1,3}([+-][0-9]{1,3})*\)"
        assert re.fullmatch(pattern, text)


DRAFTERS: dict[str, Callable[[LanguageModel], Drafter]] = {
    "lookup": lambda target: PromptLookup(min_ngram=1),
    "draft": lambda target: from_spec("draft", target),
    "tree": lambda target: from_spec("draft,branching=3-2-1", target),
    "medusa": lambda target: from_spec("medusa,nodes=8", target),
    "redrafter": lambda target: from_spec("redrafter,beams=4,length=4,nodes=8", target),
    "own": lambda target: with_own_drafts(from_spec("portfolio(draft;prompt-lookup)", target)),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 11},
    "sampled": {"temperature": 1.0},
}


@cache
def plain(name: str, way: str) -> Answer:
    return Engine(embedded()).generate(PROMPT, SamplingParams(100, structured=FORMS[name], **WAYS[way]))


@pytest.mark.parametrize(("name", "way", "drafter"), pairwise(FORMS, WAYS, DRAFTERS))
def test_answers_have_the_form_and_are_those_of_plain_decoding(
    target: LanguageModel, name: str, way: str, drafter: str
) -> None:
    engine = fixed(target, DRAFTERS[drafter](target), entropy=0)
    answer = engine.generate(PROMPT, SamplingParams(100, structured=FORMS[name], **WAYS[way]))
    assert answer.error is None and not answer.warnings
    if way != "sampled":
        expected = plain(name, way)
        assert (answer.token_ids, answer.finish_reason) == (expected.token_ids, expected.finish_reason)
    assert answer.finish_reason == "stop" or name in ("schema", "object"), "or nothing is looked at"
    if answer.finish_reason == "stop":
        assert_has_form(name, answer.text or "")


def test_masks_are_functions_of_paths(target: LanguageModel, forms: Forms) -> None:
    """A mask behind a path is the one that plain decoding would see there, in whatever order they are asked for."""
    text = tokenizer_of(target).plain_ids('{"name": "stack", "kind": "list", "size": 7, "tags": []}')
    at_once = forms.start(FORMS["schema"], [1, *text[:2]], 1)
    for count in (9, 2, 5, 0, 9):
        step_by_step = forms.start(FORMS["schema"], tokens := [1, *text[:2]], 1)
        step_by_step.masks([()])
        for token in text[2 : 2 + count]:
            tokens.append(token)
            step_by_step.masks([()])
        assert np.array_equal(at_once.masks([text[2 : 2 + count]])[0], step_by_step.masks([()])[0])
    illegal = (text[2], 0, 0, 0)
    assert at_once.legal(illegal) < 4 and at_once.masks([illegal]).all()
    assert at_once.legal(text[2:]) == len(text) - 2


def test_masks_of_a_tree_are_those_of_its_paths_one_by_one(target: LanguageModel, forms: Forms) -> None:
    """A chain goes on with one state of the form; branches, ends and what is illegal must not lead it astray."""
    text = tokenizer_of(target).plain_ids('{"name": "stack", "kind": "list", "size": 7, "tags": []}')
    chain = [tuple(text[:count]) for count in range(len(text) + 1)]
    ends = [(*text, target.eos_token_ids[0]), (*text, target.eos_token_ids[0], text[0])]
    branches = [(*path, token) for path in chain[:6] for token in (0, text[3], text[0])]
    longer = [(*path, text[4]) for path in branches]
    for paths in (chain + ends, ends + chain, branches + longer, [*longer, *branches[::-1], *chain]):
        masks = forms.start(FORMS["schema"], [1], 1).masks(paths)
        alone = [forms.start(FORMS["schema"], [1], 1).masks([path])[0] for path in paths]
        assert np.array_equal(masks, np.stack(alone))
    assert not masks[-1].all() and masks[0].any()


@pytest.mark.parametrize("name", [*FORMS, "counted"])
def test_what_is_allowed_without_a_mask_is_what_the_mask_allows(target: LanguageModel, forms: Forms, name: str) -> None:
    """Greedy answers are checked token by token, and must be the likeliest of what sampled ones are drawn from."""
    counted = Structured("grammar", 'start: body "Y"\nbody[max_tokens=3]: /[a-z ]+/')
    structured = FORMS.get(name, counted)
    text = Engine(target).generate(PROMPT, SamplingParams(40, 1.0, seed=1, structured=structured)).token_ids
    looked = 0
    for count in range(0, min(len(text), 14) + 1, 2):
        path = tuple(text[:count])
        mask = forms.start(structured, [1], 1).masks([path])[0]
        asked = forms.start(structured, [1], 1)
        tokens = {*np.flatnonzero(mask)[:60].tolist(), *range(40, 140), *range(3000, 3100), *target.eos_token_ids}
        for token in tokens:
            assert asked.allows(path, token) == mask[token], (path, token)
            looked += 1
        assert asked.legal((*path, int(np.flatnonzero(mask)[0]))) == count + 1
    assert looked > 400


def test_processed_logprobs_are_of_what_the_form_allows(target: LanguageModel, forms: Forms) -> None:
    params = SamplingParams(24, structured=FORMS["schema"], logprobs=5, logprobs_mode="processed")
    answer = fixed(target, "prompt-lookup,min_ngram=1").generate(PROMPT, params)
    state = forms.start(FORMS["schema"], tokens := [1], 1)
    for token, entry in zip(answer.token_ids, answer.logprobs or (), strict=True):
        allowed = state.masks([()])[0]
        assert all(allowed[each] or not math.isfinite(value) for each, value in entry.top)
        tokens.append(token)


def test_a_whole_form_may_only_end(target: LanguageModel, forms: Forms) -> None:
    state = forms.start(Structured("choice", ["ab"]), tokens := [1], 1)
    tokens += tokenizer_of(target).plain_ids("ab")
    assert set(np.flatnonzero(state.masks([()])[0])) == set(target.eos_token_ids[:1])


def test_masked_rows_are_the_softmax_over_what_is_allowed(target: LanguageModel, forms: Forms) -> None:
    params = SamplingParams(structured=FORMS["choice"])
    form = forms.start(FORMS["choice"], [1], 1)
    shaping = Shaping(params, [1], 1, [], [], target.vocab_size, form)
    logits = torch.randn(1, target.vocab_size)
    probs = torch.softmax(shaping.of_paths(logits, [()]), -1)[0]
    mask = torch.from_numpy(form.masks([()])[0])
    expected = torch.where(mask, logits[0].exp(), 0.0)
    torch.testing.assert_close(probs, expected / expected.sum())


@pytest.mark.parametrize("name", FORMS)
def test_every_spelling_of_a_form_is_allowed(target: LanguageModel, forms: Forms, name: str) -> None:
    """Where the form leaves no choice of text the model still has its choice of tokens; the draft is one of them."""
    plain = Engine(target).generate(PROMPT, SamplingParams(60, structured=FORMS[name]))
    spelled = {token: tokenizer_of(target).token_text(token) for token in range(target.vocab_size)}
    state = forms.start(FORMS[name], tokens := [1], 1)
    drafted = 0
    for count, token in enumerate(plain.token_ids):
        forced = list(state.forced())
        text = "".join(spelled[each] for each in forced if each not in target.eos_token_ids)
        allowed = state.masks([()])[0]
        expected = {each for each, text_of in spelled.items() if text_of and text.startswith(text_of)}
        assert allowed[sorted(expected)].all()
        assert state.legal(forced) == len(forced)
        if forced:
            drafted += len(forced) > 1
            rest = "".join(spelled[each] for each in plain.token_ids[count:] if each not in target.eos_token_ids)
            assert rest.startswith(text) or plain.finish_reason == "length"
        tokens.append(token)
    assert drafted or name in ("regex", "grammar", "object")


def test_what_had_to_come_is_drafted_as_the_answer_spelled_it_before(target: LanguageModel, forms: Forms) -> None:
    state = forms.start(Structured("regex", "x(abcd:[0-9]abcd:z)"), tokens := [1], 1)
    spell = tokenizer_of(target).plain_ids
    tokens += spell("x")
    own = list(spell("abcd:"))
    assert list(state.forced())[:1] == own[:1] and not state.recalls()
    odd = [*spell("a"), *spell("b"), *spell("cd")]
    for token in odd:
        tokens.append(token)
        state.forced()
    tokens += spell(":")
    state.forced()
    tokens += spell("7")
    assert list(state.forced())[: len(odd)] == odd and state.recalls()
    assert state.legal(state.forced()) == len(state.forced())
    assert list(state.forced())[-1] == target.eos_token_ids[0], "behind it nothing may follow"


def test_forced_text_is_drafted_and_judged_like_any_other(target: LanguageModel) -> None:
    schema = {
        "type": "object",
        "properties": {"a_rather_long_name_of_a_field": {"const": "and_a_long_constant_value"}},
        "required": ["a_rather_long_name_of_a_field"],
        "additionalProperties": False,
    }
    params = SamplingParams(max_tokens=100, structured=schema)  # type: ignore[arg-type]
    plain = Engine(target).generate(PROMPT, params)
    engine = Engine(target, with_own_drafts(from_spec("prompt-lookup", target)), controller="in-turn")
    answers = [engine.generate(PROMPT, params) for _ in range(4)]
    assert all(answer.token_ids == plain.token_ids for answer in answers)
    counts = [answer.stats.by_drafter["forced"] for answer in answers]
    assert sum(each.accepted_tokens for each in counts) > 0
    assert any(each.accepted_tokens < each.draft_tokens for each in counts), "or the model had no choice"


def test_a_grammar_too_ambiguous_to_be_followed_fails_its_request_alone(
    target: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truedraft.text.forms._MOST_ITEMS", 2000)
    form = Structured("grammar", 'start: s\ns: "a" | s s | s s s')
    params = SamplingParams(60, 1.0, seed=3, min_tokens=60, structured=form)
    other = SamplingParams(max_tokens=40)
    expected = Engine(target).generate("import os\n", other).token_ids
    found = []
    for drafter in (None, with_own_drafts(from_spec("portfolio(draft;prompt-lookup)", target))):
        engine = fixed(target, drafter)
        failed, answer = engine.generate([PROMPT, "import os\n"], [params, other])
        assert failed.finish_reason == "error" and "less ambiguous" in str(failed.error)
        assert set(failed.text or "") == {"a"}
        assert answer.token_ids == expected
        assert engine.check_idle() == []
        found.append(failed.token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize("way", WAYS)
def test_a_form_with_more_text_than_it_may_have_states_is_answered(target: LanguageModel, way: str) -> None:
    """Looking ahead in it comes to the limit of states, which answers share; nobody's answer may feel it."""
    form = Structured("choice", ["é" * 10_000])
    params, other = SamplingParams(16, structured=form, **WAYS[way]), SamplingParams(max_tokens=24)
    alone = [Engine(target, entropy=0).generate(*each) for each in ((PROMPT, params), ("import os\n", other))]
    engine = Engine(target, with_own_drafts(from_spec("prompt-lookup", target)), controller="in-turn", entropy=0)
    for _ in range(2):  # the second finds the form as the first left it
        answers = engine.generate([PROMPT, "import os\n"], [params, other])
        assert [answer.error for answer in answers] == [None, None]
        assert set((answers[0].text or "").removesuffix("\ufffd")) == {"é"}
        assert answers[1].token_ids == alone[1].token_ids
        assert way == "sampled" or answers[0].token_ids == alone[0].token_ids
        assert [answer.stats.recoveries for answer in answers] == [0, 0]


@pytest.mark.parametrize("way", WAYS)
def test_drafts_that_a_form_left_out_wrongly_end_a_verdict(
    target: LanguageModel, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the forward did not see and is accepted all the same is emitted, and nothing behind it is read."""
    monkeypatch.setattr("truedraft.text.forms.FormState.legal", lambda self, path: min(len(path), 1))
    params = SamplingParams(100, structured=Structured("choice", ["é" * 20]), **WAYS[way])
    engine = fixed(target, from_spec("draft", target), entropy=0)
    answer = engine.generate(PROMPT, params)
    assert answer.error is None and answer.stats.recoveries == 0 and answer.text == "é" * 20
    assert way == "sampled" or answer.token_ids == Engine(target).generate(PROMPT, params).token_ids
    assert answer.stats.draft_tokens > answer.stats.accepted_tokens > 0


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        (Structured("json_schema", '{"type": 7}'), "structured cannot be read"),
        (Structured("regex", "(a"), "structured cannot be read"),
        (Structured("grammar", "start: missing"), "structured cannot be read"),
        (Structured("regex", "a" * 70_000), "structured has 70000 characters, of at most 65536"),
    ],
)
def test_what_is_no_form_is_refused_in_a_sentence(target: LanguageModel, structured: Structured, message: str) -> None:
    with pytest.raises(OptionError) as refused:
        Engine(target).generate(PROMPT, SamplingParams(structured=structured))
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


def test_values_of_another_type() -> None:
    schemas = [("json_schema", value) for value in ("{", "[]", False, {1, 2})]
    for kind, value in (("regex", 7), ("choice", []), ("choice", [1]), *schemas, ("nonsense", "x")):
        with pytest.raises(OptionError, match="structured"):
            Structured(kind, value)
    assert SamplingParams(structured={"type": "object"}).structured == Structured("json_schema", '{"type": "object"}')  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="ignore_eos goes on past the end of a structured answer"):
        SamplingParams(structured=Structured("json_object"), ignore_eos=True)
