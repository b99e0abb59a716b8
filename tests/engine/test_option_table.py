"""The table of docs/options.md: every option beside every drafter and rule, proven here or refused with its reason.

The world is a Markov table over four tokens, small enough that the distribution of an answer can be written down.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.test_form_law import NoTwins, table_forms
from support.head_models import MarkovWithEmbedding, fitted_heads, fitted_redrafter
from support.laws import law_of, p_value_of_answers
from truedraft import Engine, SamplingParams
from truedraft.core.params import Structured
from truedraft.core.probs import probs_from_logits
from truedraft.core.shaping import Shaping
from truedraft.drafters import Drafter, DraftModel, Medusa, NoDrafter, Portfolio, PromptLookup, Redrafter
from truedraft.drafters.prediction import PredictionDrafter
from truedraft.errors import IncompatibleRuleError
from truedraft.kinds.medusa.module import MedusaHeads
from truedraft.kinds.redrafter.module import RedrafterHead
from truedraft.verification.specs import rule_from_spec

VOCAB, PROMPT, LENGTH, ANSWERS = 4, [1, 2, 3, 1, 2], 2, 1536
WAYS = ("greedy", "seeded", "sampled")
RULES = ("speculative", "block")
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "logit_bias": {"logit_bias": {1: 1.0}},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": (0,)},
    "stop_token_ids": {"stop_token_ids": (0,)},
    "bad_words": {"bad_words": ((2, 3), (1, 1))},
    "allowed_token_ids": {"allowed_token_ids": (0, 1, 3)},
    "structured": {"structured": Structured("json_object")},
    "prediction": {"prediction": (3, 1, 2, 0, 3, 1)},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "n": {"n": 2},
}
LIKE_TRANSFORMERS = frozenset(
    ("top_k", "top_p", "min_p", "repetition_penalty", "logit_bias", "min_tokens", "bad_words")
)
"""Options whose effect on logits tests/core holds to transformers' own processors."""
TEXTS = [[1, 2, 3, 1, 2, 0, 3, 1, 2, 3, 0] * 3]


def world() -> MarkovWithEmbedding:
    made = MarkovWithEmbedding.random(VOCAB, seed=4, context_length=256)
    assert isinstance(made, MarkovWithEmbedding)
    return made


@functools.cache
def medusa() -> MedusaHeads:
    return fitted_heads(world(), TEXTS)


@functools.cache
def redrafter() -> RedrafterHead:
    return fitted_redrafter(world(), TEXTS, steps=20)


def drafters() -> dict[str, Callable[[MarkovWithEmbedding], Drafter]]:
    def draft(**options: Any) -> Drafter:
        return DraftModel(MarkovWithEmbedding.random(VOCAB, seed=9, context_length=256), **options)

    def recurrent(**options: Any) -> Drafter:
        return Redrafter(redrafter(), beams=3, length=3, nodes=6, **options)

    return {
        "none": lambda target: NoDrafter(),
        "prompt-lookup": lambda target: PromptLookup(min_ngram=1),
        "prediction": lambda target: PredictionDrafter(4),
        "draft, chain": lambda target: draft(num_speculative_tokens=3),
        "draft, tree": lambda target: draft(branching=(2, 2)),
        "medusa": lambda target: Medusa(medusa(), nodes=6),
        "redrafter": lambda target: recurrent(),
        "redrafter, sampled": lambda target: recurrent(sampled=True),
        "merged": lambda target: Portfolio([draft(num_speculative_tokens=2), PromptLookup(min_ngram=1)]),
    }


def engine_of(drafter: str, rule: str) -> Engine:
    """An engine of a column.

    Raises:
        IncompatibleRuleError: the rule cannot judge the drafter's draws.
    """
    target = world()
    controller = "in-turn" if drafter == "merged" else "fixed"
    return Engine(target, drafters()[drafter](target), rule_from_spec(rule), controller, max_batch=64, entropy=0)


def params_of(option: str, way: str, seed: int, length: int) -> SamplingParams:
    temperature = 0.0 if way == "greedy" else 1.2
    return SamplingParams(length, temperature, seed=seed if way == "seeded" else None, **OPTIONS[option])


def tokens_of(engine: Engine, option: str, way: str) -> list[Any]:
    """All that an engine answers to some requests: tokens, and the logarithms that were asked for."""
    each = [params_of(option, way, seed, 14) for seed in range(3)]
    found = []
    for answer in engine.generate([PROMPT, [3, 0, 2], [2, 2]], each):
        assert answer.error is None and not answer.warnings, (answer.error, answer.warnings)
        numbers = [entry.logprob for entry in (*(answer.logprobs or ()), *(answer.prompt_logprobs or ()))]
        others = [other.token_ids for other in answer.others]
        found.append((answer.token_ids, answer.finish_reason, np.round(numbers, 9).tolist(), others))
    return found


def sampled_p_value(engine: Engine, option: str) -> float:
    """How likely counts as far from the law are, of answers of at most two tokens by the options' definition."""
    target, params = world(), params_of(option, "sampled", 0, LENGTH)

    def probs_after(answer: tuple[int, ...]) -> list[float]:
        text = [*PROMPT, *answer]
        logits = target.probs_after(text).log()[None]
        if params.shapes_logits:
            form = NoTwins(text, len(PROMPT)) if params.structured is not None else None
            shaping = Shaping(params, text, len(PROMPT), params.stop_token_ids, params.bad_words, VOCAB, form)
            logits = shaping.of_paths(logits, [()])
        found: list[float] = probs_from_logits(logits, params)[0].tolist()
        return found

    law = law_of(probs_after, LENGTH, params.stop_token_ids)
    return p_value_of_answers(engine, PROMPT, params, law, ANSWERS)


def refusal(drafter: str, rule: str) -> str | None:
    """Why a drafter and a rule cannot be composed; None where they can."""
    try:
        engine_of(drafter, rule)
    except IncompatibleRuleError as error:
        return str(error)
    return None


def columns() -> Iterator[tuple[str, str]]:
    """Every drafter with every rule."""
    return itertools.product(drafters(), RULES)


ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "options.json"
PAGE = ROOT / "docs" / "options.md"
COMPOSED = [column for column in columns() if refusal(*column) is None]
REFUSED = {column: why for column in columns() if (why := refusal(*column)) is not None}
FALSE_ALARM = 1e-6


@pytest.fixture(autouse=True)
def _forms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with table_forms(monkeypatch):
        yield


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("way", ["greedy", "seeded"])
def test_tokens_are_those_of_plain_decoding(option: str, way: str) -> None:
    plain = tokens_of(engine_of("none", "speculative"), option, way)
    for drafter, rule in COMPOSED:
        assert tokens_of(engine_of(drafter, rule), option, way) == plain, (drafter, rule)


def test_what_does_not_go_together_is_refused_with_its_reason() -> None:
    assert {drafter for drafter, _ in REFUSED} == {"draft, tree", "redrafter, sampled"}
    assert all(rule == "block" and "block" in why for (_, rule), why in REFUSED.items())


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, dict[str, float]]]:
    """P-values by option and column; where all options ran (`make results-options`), results and page are written."""
    values: dict[str, dict[str, float]] = {}
    yield values
    if set(values) == set(OPTIONS):
        refused = {f"{drafter} / {rule}": why for (drafter, rule), why in REFUSED.items()}
        record = {"answers": ANSWERS, "false_alarm": FALSE_ALARM, "p_values": values, "refused": refused}
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")
        PAGE.write_text(page(record))


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_sampled_answers_follow_their_law(option: str, found: dict[str, dict[str, float]]) -> None:
    """All columns. False alarms: once in a million runs of each cell."""
    cells = {f"{drafter} / {rule}": sampled_p_value(engine_of(drafter, rule), option) for drafter, rule in COMPOSED}
    assert min(cells.values()) > FALSE_ALARM, cells
    found[option] = cells


def test_the_page_is_what_was_found() -> None:
    record = json.loads(RESULTS.read_text())
    assert set(record["p_values"]) == set(OPTIONS)
    assert all(min(cells.values()) > FALSE_ALARM for cells in record["p_values"].values())
    assert set(record["refused"]) == {f"{drafter} / {rule}" for drafter, rule in REFUSED}
    assert PAGE.read_text() == page(record)


def page(record: dict[str, object]) -> str:
    """docs/options.md."""
    names = list(drafters())
    refused = record["refused"]
    assert isinstance(refused, dict)
    head = "| option | as transformers' | " + " | ".join(names) + " |"
    lines = [head, "|" + "---|" * (len(names) + 2)]
    for option in OPTIONS:
        cells = []
        for name in names:
            rules = [rule for rule in ("speculative", "block") if f"{name} / {rule}" not in refused]
            cells.append("= ~" if len(rules) == 2 else "= ~ ¹")
        same = "yes" if option in LIKE_TRANSFORMERS else "-"
        lines.append(f"| `{option}` | {same} | " + " | ".join(cells) + " |")
    reasons = "\n".join(f"- {column}: {why}." for column, why in refused.items())
    return TEXT.format(table="\n".join(lines), reasons=reasons, answers=record["answers"])


TEXT = """# Options, drafters and rules

This page says which sampling options stay exact with which drafters, under the rules `speculative` and `block`. Tests
make it (`make results-options`): each cell is proven on a language model of four tokens whose distributions can be
written down, and drafters that are right at times and wrong at others.

- **=** At temperature 0, and with a seed at temperature 1.2, the tokens, finish reasons and logprobs are those of plain
  decoding by the same engine, bit for bit.
- **~** Sampled at temperature 1.2, {answers} answers of two tokens follow the exact distribution that the option
  defines: a chi-square test whose false alarms come once in a million runs of a cell.
- **as transformers'**: what the option does to logits is held, number by number, to transformers' own processor.
- **¹** Under `speculative`; with `block` this drafter is refused when it is composed:

{reasons}

{table}

Lossy rules (`typical`, `speculative,lenience=L`) obey the same bans, biases and penalties, because they judge by the
same changed distributions; [Lossless](lossless.md#lossy-rules) says what they give up. Refused whatever drafts: a
`seed` with a lossy rule above temperature 0, `structured` with `ignore_eos`, `n` above 1 in `Engine.stream` (ask for
each sample by `submit`), and options about ids that the model does not have.
"""
