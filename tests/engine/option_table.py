"""Every option beside every drafter and rule: what is proven of each, or why it is refused; docs/options.md tells.

The world is a Markov table over four tokens, small enough that the distribution of an answer can be written down.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from engine.test_form_law import NoTwins
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
