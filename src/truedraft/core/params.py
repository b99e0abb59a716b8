"""Sampling options of a request. Needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, TypeAlias

from truedraft.errors import OptionError, UnknownOptionError
from truedraft.options import Takes, check_whole, flag, option, untyped

_Ids: TypeAlias = Sequence[int] | Set[int]
_Texts: TypeAlias = str | Sequence[str]
_Pairs: TypeAlias = tuple[tuple[int, float], ...]
_Words: TypeAlias = tuple[str | tuple[int, ...], ...]

TEXT_OPTIONS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "allowed_token_ids")
"""Options that depend on the text, which replay, peers and certificates do not support yet."""


STRUCTURED = ("json_schema", "json_object", "regex", "choice", "grammar")
"""Kinds of structured output."""


@dataclass(frozen=True, slots=True)
class Structured:
    """A form that constrains an answer.

    Attributes:
        kind: one of `STRUCTURED`.
        value: for "json_schema" the schema, as JSON or as an object; the answer is on one line, with one space after
            commas and colons, unless the schema's "x-guidance" overrides this. For "regex" a regular expression that
            the whole answer matches; for "choice" a list of texts; for "grammar" a grammar in Lark's notation; for
            "json_object" nothing.

    Raises:
        OptionError: there is no such kind, or the value is not of that form.
    """

    kind: str
    value: Any = True

    def __post_init__(self) -> None:
        if self.kind not in STRUCTURED:
            raise UnknownOptionError.nearest("structured", self.kind, STRUCTURED)
        value = self.value
        if self.kind == "json_schema":
            try:
                schema = json.loads(value) if isinstance(value, str) else value
                text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise OptionError(f"cannot be read: it is no JSON schema ({error})", field="structured") from error
            if schema is not True and not isinstance(schema, dict):
                raise OptionError("cannot be read: a JSON schema is an object", field="structured")
            value = "{}" if schema is True else text
        if self.kind == "choice":
            if not isinstance(value, tuple | list) or not value or not all(isinstance(each, str) for each in value):
                raise OptionError(f"needs a list of texts to choose from, got {value!r}", field="structured")
            value = tuple(value)
        elif self.kind != "json_object" and not isinstance(value, str):
            raise OptionError(f"of kind {self.kind!r} is a text, got {value!r}", field="structured")
        object.__setattr__(self, "value", value)


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """The place of a model's reasoning in an answer, and its maximum length.

    Attributes:
        opening: the mark before it; an answer that does not begin with it has no reasoning.
        closing: the mark after it.
        inside: whether the prompt ends with the opening mark, so that the answer begins with reasoning.
        budget: most tokens between the marks, after which the closing mark is forced; None is no limit.

    Raises:
        OptionError: a mark is empty, or the budget is not a whole number.
    """

    opening: str
    closing: str
    inside: bool = False
    budget: int | None = None

    def __post_init__(self) -> None:
        if not self.opening or not self.closing:
            raise OptionError("needs an opening and a closing mark, got an empty one", field="reasoning")
        if self.budget is not None:
            object.__setattr__(self, "budget", check_whole("reasoning_budget", self.budget, 0))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping options of one request.

    Attributes:
        max_tokens: most new tokens to emit, at least 1.
        temperature: divides the logits; 0 is greedy (the argmax, ties to the lowest id).
        top_k: keep the k likeliest tokens, ties with the k-th included; 0 keeps all.
        top_p: of the tokens that top-k keeps, keep the likeliest until their mass reaches top_p, the crossing token
            included, and renormalise; in (0, 1]. Greedy requests ignore it, and top_k and min_p.
        min_p: drop tokens less likely than min_p times the likeliest; in [0, 1].
        seed: makes tokens reproducible: each is drawn by Gumbel noise keyed by (seed, position, token), shared with
            drafters, so tokens depend only on model, prompt, options and seed, never on drafter, batch or controller
            (coupled sampling, arXiv 2408.07978). None draws by fresh noise that no other request shares.
        stop: texts that end the answer; the answer ends before them.
        stop_token_ids: ids that end the answer; the answer ends before them, even inside a structured form.
        ignore_eos: continue after the end-of-text token.
        presence_penalty: subtracted from the logit of every token in the answer; in [-2, 2].
        frequency_penalty: subtracted once for each occurrence in the answer; in [-2, 2].
        repetition_penalty: positive logits of tokens in prompt or answer are divided by it, negative ones multiplied
            (arXiv 1909.05858); above 0, 1 changes nothing.
        logit_bias: added to the logits of these tokens, in [-100, 100]: a mapping from ids, or pairs.
        min_tokens: no end-of-text or stop token before this many tokens, and stop texts are ignored until then.
        bad_words: texts, or lists of ids, that prompt and answer together never end with.
        allowed_token_ids: the only tokens allowed; empty allows all.
        logprobs: return the log probability of each token of the answer, and of this many likeliest tokens; None
            returns none.
        prompt_logprobs: the same for each token of the prompt except the first.
        logprobs_mode: "raw" is the model's own distribution; "processed" is the distribution that the token was drawn
            from, or at temperature 0 that of the logits before the argmax.
        n: independent answers to the same prompt.
        structured: a form of the answer; a `Structured`, or a JSON schema as an object. The answer ends at the end of
            the form, and is complete whenever the finish reason is "stop" and no stop text cut it.
        reasoning: marks of the model's reasoning before the answer, and most tokens between them; `structured` applies
            after them.
        prediction: text or token ids that the answer is expected to repeat in large parts. Drafters that support it
            copy from it; it never changes the answer.
        adapter: name of one of the target's adapters; None is the target itself.

    `reasoning`, `structured` and all from `presence_penalty` to `allowed_token_ids` change logits before temperature,
    top-k, top-p and min-p, in this order: allowed_token_ids, bad_words, min_tokens, structured, logit_bias, repetition,
    frequency and presence penalty. In a token tree the text is that of a node's own path.

    Numbers of numpy are accepted and converted to Python's.

    Raises:
        OptionError: a value is out of its range, or of another type.
    """

    max_tokens: int = option(128, "The most new tokens to write.", "N")
    temperature: float = option(0.0, "0 always takes the likeliest token (greedy).", "T")
    top_k: int = option(0, "Keep the K likeliest tokens; 0 keeps all.", "K")
    top_p: float = option(1.0, "Keep the likeliest tokens until their mass reaches P.", "P")
    min_p: float = option(0.0, "Drop tokens less likely than P times the likeliest.", "P")
    seed: int | None = option(
        None,
        "The same seed, the same answer, with every drafter and with none, at the cost of some accepted drafts.",
        "S",
        shown_default="fresh noise",
    )
    stop: Takes[_Texts, tuple[str, ...]] = option(
        (), r"End before this text, which may hold \n, \t, \\ and \uXXXX; may be repeated.", "TEXT"
    )
    stop_token_ids: Takes[_Ids, tuple[int, ...]] = option(
        (), "End before this token; may be repeated.", "N", name="--stop-token-id"
    )
    ignore_eos: bool = flag("Go on past the end of text.")
    presence_penalty: float = option(0.0, "Take this off the logits of tokens that the answer holds.", "X")
    frequency_penalty: float = option(0.0, "Take this off as often as the answer holds a token.", "X")
    repetition_penalty: float = option(1.0, "Divide the logits of tokens in prompt or answer by this.", "X")
    logit_bias: Takes[Mapping[int, float] | Sequence[tuple[int, float]], _Pairs] = untyped(())
    min_tokens: int = option(0, "Write at least so many new tokens.", "N")
    bad_words: Takes[str | Sequence[str | Sequence[int]], _Words] = untyped(())
    allowed_token_ids: Takes[_Ids, tuple[int, ...]] = option(
        (), "Write no token but this; may be repeated.", "N", name="--allowed-token-id"
    )
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    n: int = 1
    structured: Takes[Structured | Mapping[str, Any] | None, Structured | None] = untyped(None)
    reasoning: ReasoningSpan | None = None
    prediction: Takes[str | Sequence[int] | None, str | tuple[int, ...] | None] = untyped(None)
    adapter: str | None = option(None, "Answer with this adapter.", "NAME")

    def __post_init__(self) -> None:
        checked = {
            "stop": _texts(self.stop),
            "stop_token_ids": _ids("stop_token_ids", self.stop_token_ids),
            "n": check_whole("n", self.n, 1),
            "max_tokens": check_whole("max_tokens", self.max_tokens, 1),
            "top_k": check_whole("top_k", self.top_k, 0),
            "temperature": _number("temperature", self.temperature, lambda value: 0.0 <= value < math.inf, "0 or more"),
            "top_p": _number("top_p", self.top_p, lambda value: 0.0 < value <= 1.0, "in (0, 1]"),
            "min_p": _number("min_p", self.min_p, lambda value: 0.0 <= value <= 1.0, "in [0, 1]"),
            "ignore_eos": _truth("ignore_eos", self.ignore_eos),
            "seed": None if self.seed is None else check_whole("seed", self.seed, 0),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, _is_penalty, "in [-2, 2]"),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, _is_penalty, "in [-2, 2]"),
            "repetition_penalty": _number(
                "repetition_penalty", self.repetition_penalty, lambda value: 0.0 < value < math.inf, "above 0"
            ),
            "logit_bias": _biases(self.logit_bias),
            "min_tokens": check_whole("min_tokens", self.min_tokens, 0),
            "bad_words": _words(self.bad_words),
            "allowed_token_ids": _ids("allowed_token_ids", self.allowed_token_ids),
            "logprobs": _count("logprobs", self.logprobs),
            "prompt_logprobs": _count("prompt_logprobs", self.prompt_logprobs),
            "structured": _form(self.structured),
            "prediction": _text_or_ids("prediction", self.prediction),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.seed is not None and self.seed >= 1 << 64:
            raise OptionError(f"must lie below 2^64, got {self.seed}", field="seed")
        if self.min_tokens > self.max_tokens:
            raise OptionError(
                f"must be at most max_tokens, {self.max_tokens}, got {self.min_tokens}", field="min_tokens"
            )
        if self.logprobs_mode not in ("raw", "processed"):
            raise OptionError(f'must be "raw" or "processed", got {self.logprobs_mode!r}', field="logprobs_mode")
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise OptionError(f"must be the name of an adapter, got {self.adapter!r}", field="adapter")
        if self.reasoning is not None and not isinstance(self.reasoning, ReasoningSpan):
            raise OptionError(f"must be a ReasoningSpan, got {self.reasoning!r}", field="reasoning")
        if self.structured is not None and self.ignore_eos:
            raise OptionError("goes on past the end of a structured answer; leave one of them out", field="ignore_eos")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def seeded(self) -> bool:
        """Whether a seed determines its tokens; at temperature 0 it has no effect."""
        return self.seed is not None and not self.greedy

    @property
    def probs_key(self) -> tuple[float, int, float, float]:
        """The options of a node's distribution; equal keys share one computation."""
        return self.temperature, self.top_k, self.top_p, self.min_p

    @property
    def shapes_logits(self) -> bool:
        penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        form = self.structured or (self.reasoning is not None and self.reasoning.budget is not None)
        banned = self.min_tokens or self.bad_words or self.allowed_token_ids or form
        return bool(penalised or self.logit_bias or banned)


def _form(given: object) -> Structured | None:
    if given is None or isinstance(given, Structured):
        return given
    if not isinstance(given, Mapping):
        raise OptionError(f"must be a Structured or a JSON schema, got {type(given).__name__}", field="structured")
    return Structured("json_schema", dict(given))


def _text_or_ids(name: str, given: object) -> str | tuple[int, ...] | None:
    return given if given is None or isinstance(given, str) else _ids(name, given)


def _number(name: str, value: object, valid: Callable[[float], bool], expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not valid(float(value)):
        raise OptionError(f"must be a number, {expected}, got {value!r}", field=name)
    return float(value)


def _truth(name: str, value: object) -> bool:
    if not isinstance(value, bool) and str(getattr(value, "dtype", "")) != "bool":  # numpy's bool
        raise OptionError(f"must be True or False, got {value!r}", field=name)
    return bool(value)


def _texts(given: object) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else given
    if not isinstance(texts, tuple | list) or not all(isinstance(text, str) for text in texts):
        raise OptionError(f"must be a text or a list of texts, got {given!r}", field="stop")
    if "" in texts:
        raise OptionError("holds an empty text, which would end every answer at once; remove it", field="stop")
    return tuple(texts)


def _ids(name: str, given: object) -> tuple[int, ...]:
    if not isinstance(given, tuple | list | set | frozenset):
        raise OptionError(f"must be a list of token ids, got {given!r}", field=name)
    return tuple(check_whole(name, token, 0) for token in given)


def _is_penalty(value: float) -> bool:
    return -2.0 <= value <= 2.0


def _count(name: str, given: object) -> int | None:
    return None if given is None else check_whole(name, given, 0)


def _biases(given: object) -> tuple[tuple[int, float], ...]:
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        found = {check_whole("logit_bias", int(token), 0): value for token, value in pairs}  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise OptionError(f"must be a mapping from token ids to numbers, got {given!r}", field="logit_bias") from error
    check = partial(_number, "logit_bias", valid=lambda value: -100.0 <= value <= 100.0, expected="in [-100, 100]")
    return tuple((token, check(value)) for token, value in sorted(found.items()))


def _words(given: object) -> tuple[str | tuple[int, ...], ...]:
    words = (given,) if isinstance(given, str) else given
    if not isinstance(words, tuple | list):
        raise OptionError(f"must be a list of texts or of lists of token ids, got {given!r}", field="bad_words")
    found = tuple(word if isinstance(word, str) else _ids("bad_words", word) for word in words)
    if "" in found or () in found:
        raise OptionError("holds an empty text, which every answer ends with; remove it", field="bad_words")
    return found
