"""Answers that reason first: the budget, and the form behind it, whatever drafts.

The world is that of the option table: four tokens, written as letters, so that a mark may be several tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from engine.test_form_law import NoTwins
from engine.test_option_table import PROMPT, VOCAB, columns, drafters, refusal, world
from support.answers import fixed
from support.embedded_models import embedded
from support.laws import law_of, p_value_of_answers
from truedraft import Engine, SamplingParams
from truedraft.core.params import ReasoningSpan, Structured
from truedraft.core.probs import probs_from_logits
from truedraft.drafters.prediction import with_own_drafts
from truedraft.drafters.specs import from_spec
from truedraft.errors import OptionError
from truedraft.models.base import LanguageModel
from truedraft.text.forms import Forms
from truedraft.text.reasoning import ReasonedForm
from truedraft.text.tokenizer import Tokenizer
from truedraft.verification.specs import rule_from_spec

LENGTH, ANSWERS, FALSE_ALARM = 4, 1536, 1e-6
LETTERS = "abcd"
FORM = Structured("json_object")
SPANS = {
    "a budget and a form": (ReasoningSpan("d", "cb", inside=True, budget=2), FORM),
    "a form": (ReasoningSpan("d", "c", inside=True), FORM),
    "a budget": (ReasoningSpan("d", "cb", inside=True, budget=1), None),
    "none at all": (ReasoningSpan("d", "c", inside=True, budget=0), FORM),
    "reasoning or none": (ReasoningSpan("da", "c", budget=1), FORM),
}
COLUMNS = [column for column in columns() if refusal(*column) is None]


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tokenizer]:
    backend = Backend(models.WordLevel({letter: number for number, letter in enumerate(LETTERS)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    monkeypatch.setattr(Forms, "start", lambda own, structured, tokens, prompt_tokens, owner=None: NoTwins(tokens, 0))
    yield Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False))


def engine_of(drafter: str, rule: str, tokenizer: Tokenizer) -> Engine:
    target = world()
    target.tokenizer = tokenizer
    controller = "in-turn" if drafter == "merged" else "fixed"
    return Engine(target, drafters()[drafter](target), rule_from_spec(rule), controller, max_batch=64, entropy=0)


def allowed(answer: Sequence[int], span: ReasoningSpan, form: Structured | None) -> list[int]:
    """What may follow an answer so far, by the definition of a span and the form of this world."""
    text = "".join(LETTERS[token] for token in answer)
    opened = span.inside or text.startswith(span.opening)
    inside = text if span.inside else text.removeprefix(span.opening)
    if opened and span.closing not in inside:
        late = -1 if span.budget is None else len(inside) - span.budget
        return [LETTERS.index(span.closing[late])] if late >= 0 else list(range(VOCAB))
    behind = inside.partition(span.closing)[2] if opened else text
    legal = all(one != other for one, other in itertools.pairwise("a" + behind)) or form is None
    last = LETTERS.index(("a" + behind)[-1])
    found = {token for token in range(VOCAB) if legal and (form is None or token != last)}
    if not opened and span.opening.startswith(text):
        found.add(LETTERS.index(span.opening[len(text)]))
    return sorted(found)


def asked(name: str, length: int, *, temperature: float = 1.2, seed: int | None = None) -> SamplingParams:
    span, form = SPANS[name]
    return SamplingParams(length, temperature, seed=seed, reasoning=span, structured=form)


@pytest.mark.parametrize("name", SPANS)
def test_tokens_are_those_of_plain_decoding(name: str, letters: Tokenizer) -> None:
    """Of three prompts, greedy and seeded in one batch."""
    each = [asked(name, 14, temperature=temperature, seed=seed) for temperature in (0.0, 1.2) for seed in range(3)]
    prompts = [PROMPT, [3, 0, 2], [2, 2]] * 2
    plain = engine_of("none", "speculative", letters).generate(prompts, each)
    for answer in plain:
        assert not answer.warnings and answer.error is None
        for place, token in enumerate(answer.token_ids):
            assert token in allowed(answer.token_ids[:place], *SPANS[name])
    for column in COLUMNS:
        found = engine_of(*column, letters).generate(prompts, each)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain], column
        assert not any(answer.warnings for answer in found)


@pytest.mark.parametrize(
    ("name", "column"),
    [("a budget and a form", ("draft, tree", "speculative")), ("reasoning or none", ("medusa", "block"))],
)
def test_sampled_answers_follow_their_law(name: str, column: tuple[str, str], letters: Tokenizer) -> None:
    """False alarms: once in a million runs of each."""
    assert sampled_p_value(name, column, letters) > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("name", SPANS)
def test_sampled_answers_follow_their_law_whatever_drafts(name: str, letters: Tokenizer) -> None:
    for column in COLUMNS:
        assert sampled_p_value(name, column, letters) > FALSE_ALARM, column


def sampled_p_value(name: str, column: tuple[str, str], letters: Tokenizer) -> float:
    target, params = world(), asked(name, LENGTH)

    def probs_after(answer: tuple[int, ...]) -> list[float]:
        logits = target.probs_after([*PROMPT, *answer]).log()[None]
        kept = allowed(answer, *SPANS[name])
        logits[:, [token for token in range(VOCAB) if token not in kept]] = -np.inf
        found: list[float] = probs_from_logits(logits, params)[0].tolist()
        return found

    return p_value_of_answers(engine_of(*column, letters), PROMPT, params, law_of(probs_after, LENGTH), ANSWERS)


# --- with a real tokenizer and real forms -----------------------------------------------------------------------

THINK = ReasoningSpan("<think>", "</think>", inside=True, budget=12)
CHOICE = Structured("choice", ["yes", "no"])


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    pytest.importorskip("llguidance")
    return embedded()


def form_of(target: LanguageModel, span: ReasoningSpan, tokens: list[int], form: Structured | None) -> ReasonedForm:
    tokenizer = target.tokenizer
    assert tokenizer is not None
    forms = Forms(tokenizer, target.vocab_size, target.eos_token_ids)
    start = None if form is None else (lambda behind: forms.start(form, behind, 0))
    return ReasonedForm(span, start, tokenizer, target.vocab_size, target.eos_token_ids, tokens, len(tokens))


@pytest.mark.parametrize("inside", [True, False])
def test_masks_are_functions_of_paths(target: LanguageModel, inside: bool) -> None:
    """Behind a path they are what plain decoding would see there, and one answer of all that ask for a token."""
    tokenizer = target.tokenizer
    assert tokenizer is not None
    span = ReasoningSpan("<think>", "</think>", inside, budget=6)
    texts = ["a<b", "</think>yes", "def f():</think>no", "one two three four five six seven eight</think>yes", "yes"]
    looked = 0
    for text in texts if inside else ["yes", "<think>a</think>no", "<thing", "<think></think>yes"]:
        path = tokenizer.plain_ids(text)
        at_once = form_of(target, span, [1], CHOICE)
        step_by_step = form_of(target, span, tokens := [1], CHOICE)
        rows = at_once.masks([path[:count] for count in range(len(path) + 1)])
        legal = at_once.legal(path)
        for count in range(legal + 1):
            mask = step_by_step.masks([()])[0]
            assert np.array_equal(mask, rows[count]), (text, count)
            ids = {*np.flatnonzero(mask)[:40].tolist(), *range(60), *target.eos_token_ids, *path}
            assert all(at_once.allows(path[:count], token) == mask[token] for token in ids)
            if count < len(path):
                assert (legal > count) == mask[path[count]]
                tokens.append(path[count])
            looked += 1
    assert looked > 10


def test_no_end_inside_and_no_token_over_the_mark(target: LanguageModel) -> None:
    tokenizer = target.tokenizer
    assert tokenizer is not None
    over = [token for token, text in tokenizer.texts_holding(">").items() if text != ">" and text.startswith(">")]
    assert over, "or this tests nothing"
    path = tokenizer.plain_ids("a</think")
    free, formed = (form_of(target, THINK, [1], form).masks([(), path]) for form in (None, CHOICE))
    assert free.all(), "nothing is behind it that must begin at a token"
    assert not formed[:, list(target.eos_token_ids)].any()
    assert not formed[1, over].any() and formed[0, over].all() and formed[1, tokenizer.plain_ids(">")[-1]]


@pytest.mark.parametrize("way", ["greedy", "sampled", "seeded"])
def test_answers(target: LanguageModel, way: str) -> None:
    """What a user gets: reasoning of at most so many tokens, then the form."""
    params = SamplingParams(
        60, 0.0 if way == "greedy" else 1.0, seed=3 if way == "seeded" else None, reasoning=THINK, structured=CHOICE
    )
    found = []
    for drafter in ("none", "prompt-lookup,min_ngram=1", "draft", with_own_drafts(from_spec("draft", target))):
        answer = fixed(target, drafter, entropy=3).generate("def push(self):\n<think>", params)
        assert answer.error is None and not answer.warnings and answer.finish_reason == "stop"
        reasoning, mark, rest = (answer.text or "").partition("</think>")
        assert mark and rest in ("yes", "no")
        assert len(target.tokenizer.plain_ids(reasoning)) <= 12 + 2 if target.tokenizer is not None else False
        found.append(answer.token_ids)
    assert way == "sampled" or all(each == found[0] for each in found)


def test_a_mark_that_is_forced_is_drafted(target: LanguageModel) -> None:
    params = SamplingParams(40, reasoning=ReasoningSpan("<think>", "</think>", True, 3), structured=CHOICE)
    drafted = Engine(target, with_own_drafts(from_spec("prompt-lookup", target)), controller="in-turn")
    answer = drafted.generate("x", params)
    assert answer.stats.by_drafter["forced"].accepted_tokens >= 2
    assert (answer.text or "").count("</think>") == 1


def test_what_cannot_be() -> None:
    with pytest.raises(OptionError, match="empty"):
        ReasoningSpan("", "</think>")
    with pytest.raises(OptionError, match="reasoning_budget"):
        ReasoningSpan("<think>", "</think>", budget=-1)
    with pytest.raises(OptionError, match="ReasoningSpan"):
        SamplingParams(reasoning="think")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="needs a tokenizer"):
        Engine(world()).generate(PROMPT, SamplingParams(reasoning=THINK))
    assert Engine(world()).generate(PROMPT, SamplingParams(4, reasoning=ReasoningSpan("a", "b"))).token_ids
