"""Request forms and answer forms of servers: one `Dialect` for each kind, made of data and two functions.

Options that an engine would set by default are sent with neutral values, so that only the question's have an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from truedraft.core.params import SamplingParams
from truedraft.measure.peers.asking import PeerFacts

_TOKEN_ID = "token_id:"
_QUOTED = 40
"""Characters of a server's message that are shown."""
_PLAIN = ("max_tokens", "temperature", "top_p", "seed", "stop", "logprobs")
_PENALTIES = ("presence_penalty", "frequency_penalty", "logit_bias")
_SENT_AS_THEY_ARE = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "top_k", "min_p", "min_tokens", "ignore_eos",
)  # fmt: skip
_OPEN_MODELS = (
    "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "allowed_token_ids",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReceivedAnswer:
    """A server's answer, as received; None is what it does not give.

    Attributes:
        finish_reason: in OpenAI's words, or one of the server's own.
        token_ids: of the answer, including the one that ended it.
        names: of its tokens, as in logprobs: their text, or their id as a number.
        top: the likeliest tokens by name, for each of `names`.
    """

    text: str | None
    finish_reason: str
    token_ids: tuple[int, ...] | None = None
    names: tuple[str | int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    top: tuple[Mapping[str | int, float], ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    prompt_count: int | None = None
    count: int | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """A kind of server.

    Attributes:
        facts: with their default for logprobs.
        fields: maps parameters to the fields of a request.
        read: reads an answer; raises a built-in exception if that has another form, ValueError with a sentence.
        takes_ids: whether a prompt may be ids.
        least_temperature: the lowest above 0; the server raises lower ones to it.
    """

    facts: PeerFacts
    path: str
    fields: Callable[[SamplingParams], dict[str, Any]]
    read: Callable[[Mapping[str, Any]], ReceivedAnswer]
    takes_ids: bool = True
    most_seed: int = (1 << 63) - 1
    least_temperature: float = 0.0


def _openai_fields(params: SamplingParams) -> dict[str, Any]:
    """Fields of OpenAI's own server; optional ones are sent only where they have an effect."""
    # Servers that return no ids return token names with logprobs, and ids are looked up by name.
    found: dict[str, Any] = {
        "max_tokens": params.max_tokens, "temperature": params.temperature, "top_p": params.top_p,
        "logprobs": params.logprobs or 1,
    }  # fmt: skip
    if params.seed is not None:
        found["seed"] = params.seed
    if params.stop:
        found["stop"] = list(params.stop)
    for name in ("presence_penalty", "frequency_penalty"):
        if value := getattr(params, name):
            found[name] = value
    if params.logit_bias:
        found["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    return found


def _open_model_fields(params: SamplingParams) -> dict[str, Any]:
    """Fields of servers of open models; all are sent, so that the generation configuration has no effect."""
    found = _openai_fields(params) | {name: getattr(params, name) for name in _SENT_AS_THEY_ARE}
    found |= {"return_token_ids": True, "logprobs": params.logprobs}
    if params.logprobs is None:
        del found["logprobs"]
    for name in ("stop_token_ids", "allowed_token_ids"):
        if value := getattr(params, name):
            found[name] = list(value)
    return found


def _llama_cpp_fields(params: SamplingParams) -> dict[str, Any]:
    found: dict[str, Any] = {
        "n_predict": params.max_tokens, "temperature": params.temperature, "top_k": params.top_k,
        "top_p": params.top_p, "min_p": params.min_p, "stop": list(params.stop), "return_tokens": True,
        # Without a seed the server would use the one of its command line for every request.
        "seed": -1 if params.seed is None else params.seed,
        "repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "typical_p": 1.0,
        "top_n_sigma": -1.0, "dry_multiplier": 0.0, "xtc_probability": 0.0, "mirostat": 0, "dynatemp_range": 0.0,
    }  # fmt: skip
    if params.logit_bias:
        found["logit_bias"] = [[token, bias] for token, bias in params.logit_bias]
    if params.logprobs is not None:
        found["n_probs"] = max(params.logprobs, 1)
    return found


def _read_openai(content: Mapping[str, Any]) -> ReceivedAnswer:
    choices = content["choices"]
    if not isinstance(choices, list) or not choices:
        raise ValueError("no choices")
    choice = choices[0]
    usage = content.get("usage") or {}
    names, logprobs, top = _read_logprobs(choice.get("logprobs"))
    return ReceivedAnswer(
        text=_text(choice.get("text")),
        finish_reason=str(choice.get("finish_reason") or "none"),
        token_ids=_ids(choice.get("token_ids")),
        names=names,
        logprobs=logprobs,
        top=top,
        prompt_ids=_ids(choice.get("prompt_token_ids", content.get("prompt_token_ids"))),
        prompt_count=usage.get("prompt_tokens"),
        count=usage.get("completion_tokens"),
        model=_text(content.get("model")),
    )


def _read_llama_cpp(content: Mapping[str, Any]) -> ReceivedAnswer:
    reasons = {"eos": "stop", "word": "stop", "limit": "length"}
    reason = str(content["stop_type"])
    names, logprobs, top = _read_entries(content.get("completion_probabilities"))
    if top is not None and not all(top):  # empty for drafted and accepted tokens
        logprobs = top = None
    return ReceivedAnswer(
        text=_text(content["content"]),
        finish_reason=reasons.get(reason, reason),
        token_ids=_ids(content.get("tokens")) or (None if content["content"] else ()),
        names=names,
        logprobs=logprobs,
        top=top,
        prompt_count=content.get("tokens_evaluated"),
        model=_text(content.get("model")),
    )


_Logprobs = tuple[tuple[str | int, ...] | None, tuple[float, ...] | None, tuple[Mapping[str | int, float], ...] | None]


def _read_logprobs(found: Mapping[str, Any] | None) -> _Logprobs:
    if not found:
        return None, None, None
    if "content" in found:
        return _read_entries(found["content"])
    names = tuple(map(_name, found["tokens"]))
    values = found.get("token_logprobs")
    logprobs = None if values is None or None in values else tuple(map(float, values))
    rivals = found.get("top_logprobs")
    if rivals is None:
        return names, logprobs, None
    return names, logprobs, tuple({_name(name): float(p) for name, p in (each or {}).items()} for each in rivals)


def _read_entries(found: Sequence[Mapping[str, Any]] | None) -> _Logprobs:
    if found is None:
        return None, None, None
    names = tuple(map(_entry_name, found))
    values = [each.get("logprob") for each in found]
    top = tuple({_entry_name(one): float(one["logprob"]) for one in each.get("top_logprobs") or ()} for each in found)
    return names, None if None in values else tuple(float(value) for value in values if value is not None), top


def _entry_name(entry: Mapping[str, Any]) -> str | int:
    return _id(entry["id"]) if "id" in entry else _name(entry["token"])


def _name(name: str) -> str | int:
    number = name.removeprefix(_TOKEN_ID)
    return int(number) if number != name and number.isdecimal() else name


def _text(found: object) -> str | None:
    if found is None or isinstance(found, str):
        return found
    raise ValueError(f"a text is a {type(found).__name__}")


def _id(found: object) -> int:
    if type(found) is not int:  # refuses bool, too
        raise ValueError(f"a token id is {str(found)[:_QUOTED]!r}, and no whole number")
    return found


def _ids(found: Sequence[Any] | None) -> tuple[int, ...] | None:
    return None if found is None else tuple(map(_id, found))


_OURS = (*_PLAIN, *_PENALTIES, *_OPEN_MODELS)
TRUEDRAFT = Dialect(
    PeerFacts("truedraft", takes=(*_OURS, "logprobs_mode"), gives_ids=True, logprobs="raw"),
    "/v1/completions", lambda params: _open_model_fields(params) | {"logprobs_mode": params.logprobs_mode},
    _read_openai, most_seed=(1 << 64) - 1,
)  # fmt: skip

# Its sampler: temperature, then min_p, then top_k and top_p at once, top_p on what top_k left.
VLLM = Dialect(
    PeerFacts("vllm", "", ("temperature", "min_p", "top_k", "top_p"), _OURS, gives_ids=True, logprobs="raw"),
    "/v1/completions", lambda params: _open_model_fields(params) | {"return_tokens_as_token_ids": True},
    _read_openai, least_temperature=0.01,
)  # fmt: skip

# Its ignore_eos forbids the end of text, and its penalties look at the prompt, unlike ours.
LLAMA_CPP = Dialect(
    PeerFacts(
        "llama.cpp", "", ("top_k", "top_p", "min_p", "temperature"), (*_PLAIN, "top_k", "min_p", "logit_bias"),
        gives_ids=True, logprobs="raw",
    ),
    "/completion", _llama_cpp_fields, _read_llama_cpp, most_seed=(1 << 32) - 2,
)  # fmt: skip

_TAKEN = (*_PLAIN, *_PENALTIES)
OPENAI = Dialect(
    PeerFacts("openai", "", ("temperature", "top_p"), _TAKEN), "/v1/completions", _openai_fields, _read_openai
)

_SILENT = replace(
    OPENAI,
    facts=replace(OPENAI.facts, takes=tuple(name for name in _TAKEN if name != "logprobs")),
    fields=lambda params: {name: value for name, value in _openai_fields(params).items() if name != "logprobs"},
)
OPENAI_FORMS = tuple(replace(each, takes_ids=ids) for each in (OPENAI, _SILENT) for ids in (True, False))
"""Request forms for an unknown server, the best first: with and without logprobs, by ids and by text."""

BY_OWNER = {"truedraft": TRUEDRAFT, "vllm": VLLM, "llamacpp": LLAMA_CPP}
"""By the owner of its model, as the server reports it."""
