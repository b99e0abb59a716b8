"""A server at an address: ours, vLLM's, llama.cpp's, or any with OpenAI's `/v1/completions`.

Each kind has a `Dialect`, data and two functions for its requests and answers. Options that an engine would set by
default are sent with neutral values, so that only the question's have an effect.
"""

from __future__ import annotations

import contextlib
import math
import queue
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from truedraft.core.params import SamplingParams
from truedraft.errors import PeerError, TruedraftError
from truedraft.measure.peers.asking import Peer, PeerFacts, Question, Reply
from truedraft.measure.peers.calling import Caller, Patience
from truedraft.measure.peers.recovery import ReceivedAnswer, Recovery
from truedraft.text import Tokenizer

if TYPE_CHECKING:
    import httpx2


_TOKEN_ID = "token_id:"
_QUOTED = 40  # characters of a server's message that are shown
_PLAIN = ("max_tokens", "temperature", "top_p", "seed", "stop", "logprobs")
_PENALTIES = ("presence_penalty", "frequency_penalty", "logit_bias")
_SENT_AS_THEY_ARE = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "top_k", "min_p", "min_tokens", "ignore_eos",
)  # fmt: skip
_OPEN_MODELS = (
    "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "allowed_token_ids",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dialect:
    """A kind of server."""

    facts: PeerFacts  # with their default for logprobs
    path: str
    fields: Callable[[SamplingParams], dict[str, Any]]  # maps parameters to the fields of a request
    read: Callable[[Mapping[str, Any]], ReceivedAnswer]  # a built-in exception refuses another form of answer
    takes_ids: bool = True  # whether a prompt may be ids
    most_seed: int = (1 << 63) - 1
    least_temperature: float = 0.0  # the lowest above 0; the server raises lower ones to it


def _openai_fields(params: SamplingParams) -> dict[str, Any]:
    """Fields of OpenAI's own server; optional ones are sent only where they have an effect."""
    # Servers that return no ids return token names with logprobs, and ids are looked up by name.
    found: dict[str, Any] = {
        "max_tokens": params.max_tokens, "temperature": params.temperature, "top_p": params.top_p,
        "logprobs": params.logprobs or 1,
    }  # fmt: skip
    penalties = {"presence_penalty": params.presence_penalty, "frequency_penalty": params.frequency_penalty}
    biases = {str(token): bias for token, bias in params.logit_bias}
    found |= {} if params.seed is None else {"seed": params.seed}
    return found | {name: n for name, n in {"stop": list(params.stop), **penalties, "logit_bias": biases}.items() if n}


def _open_model_fields(params: SamplingParams) -> dict[str, Any]:
    """Fields of servers of open models; all are sent, so that the generation configuration has no effect."""
    found = _openai_fields(params) | {name: getattr(params, name) for name in _SENT_AS_THEY_ARE}
    found |= {"return_token_ids": True, "logprobs": params.logprobs}
    found |= {name: list(ids) for name in ("stop_token_ids", "allowed_token_ids") if (ids := getattr(params, name))}
    return {name: value for name, value in found.items() if value is not None}


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

    def name(entry: Mapping[str, Any]) -> str | int:
        return _id(entry["id"]) if "id" in entry else _name(entry["token"])

    names = tuple(map(name, found))
    values = [each.get("logprob") for each in found]
    top = tuple({name(one): float(one["logprob"]) for one in each.get("top_logprobs") or ()} for each in found)
    return names, None if None in values else tuple(float(value) for value in values if value is not None), top


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


_ANY, _ANY_IDS = "The", (1,)  # the prompt of test requests, which find out what a server takes
_REFUSALS = (400, 422)
_CERTAIN = -0.05  # log probability of a first token above which the effect of temperature is too small to see
_NOISE = 0.1  # share of a log probability that rounding may change from one answer to the next


class Endpoint(Peer):
    """An engine over HTTP; `names` are further model names that its answers may have."""

    def __init__(
        self,
        caller: Caller,
        dialect: Dialect,
        model: str | None,
        recovery: Recovery,
        *,
        names: Collection[str] = (),
        version: str = "",
    ) -> None:
        self.model = model
        self._caller = caller
        self._dialect = dialect
        self._recovery = recovery
        self._names = {*names} if model is None else {*names, model}
        more = {"endpoint": caller.url, "model": model, "prompts": "ids" if dialect.takes_ids else "text"}
        self.facts = replace(dialect.facts, version=version, more=more)

    @classmethod
    def open(
        cls,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        tokenizer: Tokenizer | None = None,
        vocab_size: int | None = None,
        eos_token_ids: Collection[int] | None = None,
        timeout_s: float = 120.0,
        patience: Patience | None = None,
        tell: Callable[[str], None] = lambda _: None,
        transport: httpx2.BaseTransport | None = None,
    ) -> Endpoint:
        """Connect to a server and find out what kind it is.

        `model` is its name on the server, by default the first that it serves; `vocab_size` is of a padded model, by
        default the tokenizer's, as are `eos_token_ids`. `tell` is called with sentences about what was found. Raises
        OptionError if address or key cannot be used, PeerError if no such server answers, or none with the model.
        """
        caller = Caller(url, api_key=api_key, timeout_s=timeout_s, patience=patience, tell=tell, transport=transport)
        try:
            recovery = Recovery(tokenizer, vocab_size, eos_token_ids)
            entry = _entry(caller, model, tell)
            dialect, version = _recognised(caller, entry)
            names = {field: name for field in ("id", "root") if isinstance(name := entry.get(field), str) and name}
            named = model if model is not None else names.get("id")
            if dialect is OPENAI:
                dialect = _tried(caller, named, recovery, _ANY_IDS if tokenizer is None else tokenizer.encode(_ANY))
            return cls(caller, dialect, named, recovery, names=names.values(), version=version)
        except BaseException:
            caller.close()
            raise

    def close(self) -> None:
        self._caller.close()

    def answers(self, questions: Sequence[Question]) -> Iterator[tuple[int, Reply | PeerError]]:
        """Send questions concurrently, each in its own thread; on Ctrl-C yields the answers that have arrived."""
        come: queue.Queue[tuple[int, Reply | PeerError | BaseException]] = queue.Queue()
        over = threading.Event()

        def work(number: int) -> None:
            try:
                come.put((number, self._answer(questions[number], over)))
            except TruedraftError as error:
                come.put((number, error if isinstance(error, PeerError) else PeerError(str(error))))
            except BaseException as error:  # our own bugs are raised in the caller's thread
                come.put((number, error))

        for number in range(len(questions)):
            threading.Thread(target=work, args=(number,), name=f"truedraft-ask-{number}", daemon=True).start()
        try:
            for _ in questions:
                yield _found(come.get())
        except KeyboardInterrupt:
            with contextlib.suppress(queue.Empty):
                while True:
                    yield _found(come.get_nowait())
            raise
        finally:
            over.set()

    def _answer(self, question: Question, over: threading.Event) -> Reply:
        self._check(question.params)
        prompt = list(question.prompt) if self._dialect.takes_ids else self._recovery.prompt_text(question.prompt)
        body: dict[str, Any] = {"prompt": prompt} | self._dialect.fields(question.params)
        if self.model is not None:
            body["model"] = self.model
        answer = _read(self._caller, self._dialect, body, over)
        dated = (re.escape(name) + r"(-[\d-]+)?" for name in self._names)  # some servers append a version date
        if answer.model is not None and self._names and not any(re.fullmatch(each, answer.model) for each in dated):
            raise PeerError(f"{self._caller.url} was asked for model {self.model!r}, and {answer.model!r} answered")
        return self._recovery.reply(answer, question)

    def _check(self, params: SamplingParams) -> None:
        name, dialect = self.facts.name, self._dialect
        if refused := self.refuses(params):
            raise PeerError(f"{name} does not take {refused} as they are meant here; leave them out")
        if params.seed is not None and params.seed > dialect.most_seed:
            raise PeerError(f"{name} takes seeds up to {dialect.most_seed}, got {params.seed}")
        least = dialect.least_temperature
        if 0.0 < params.temperature < least:
            raise PeerError(f"{name} samples at temperature {least} or above, or at 0, got {params.temperature}")


def _found(come: tuple[int, Reply | PeerError | BaseException]) -> tuple[int, Reply | PeerError]:
    number, found = come
    if isinstance(found, Reply | PeerError):
        return number, found
    raise found


def _entry(caller: Caller, model: str | None, tell: Callable[[str], None]) -> Mapping[str, Any]:
    try:
        data = caller.get("/v1/models").get("data")
    except PeerError as error:
        if error.status != 404:
            raise
        data = None
    served = [each for each in data if isinstance(each, Mapping)] if isinstance(data, list) else []
    if model is None and len(served) > 1:
        tell(f"{caller.url} serves {len(served)} models, and the first is asked: {served[0].get('id')!r}")
    for entry in served:
        if model is None or model in (entry.get("id"), entry.get("root")):
            return entry
    if served:
        names = ", ".join(repr(each.get("id")) for each in served[:8])
        raise PeerError(f"{caller.url} does not serve model {model!r}, but {names}")
    return {}


def _recognised(caller: Caller, entry: Mapping[str, Any]) -> tuple[Dialect, str]:
    def at(path: str) -> Mapping[str, Any]:
        with contextlib.suppress(PeerError):
            return caller.get(path)
        return {}

    dialect = BY_OWNER.get(str(entry.get("owned_by")))
    if dialect is TRUEDRAFT:
        info = at("/openapi.json").get("info")
        return TRUEDRAFT, str(info.get("version", "")) if isinstance(info, Mapping) else ""
    props = {} if dialect is VLLM else at("/props")
    if dialect is LLAMA_CPP or "default_generation_settings" in props:
        return LLAMA_CPP, str(props.get("build_info", ""))
    return dialect or OPENAI, str(at("/version").get("version", ""))


def _tried(caller: Caller, model: str | None, recovery: Recovery, prompt: Sequence[int]) -> Dialect:
    refused: PeerError | None = None
    named = {} if model is None else {"model": model}
    for dialect in OPENAI_FORMS:
        try:
            given = list(prompt) if dialect.takes_ids else recovery.prompt_text(prompt)
        except PeerError:
            continue
        try:
            answers = [
                _read(caller, dialect, named | {"prompt": given} | dialect.fields(params), None)
                for params in (SamplingParams(1, 1.0), SamplingParams(1, 0.5))
            ]
        except PeerError as error:
            if error.status not in _REFUSALS:
                raise
            refused = error
            continue
        counted = answers[0].prompt_count
        if dialect.takes_ids and counted and counted != len(prompt):
            continue  # it does not read numbers as token ids
        returns_ids = answers[0].token_ids is not None
        return replace(dialect, facts=replace(dialect.facts, gives_ids=returns_ids, logprobs=_logprobs_mode(*answers)))
    raise refused or PeerError(f"{caller.url} takes no token ids, and no text that encodes to them")


def _logprobs_mode(plain: ReceivedAnswer, halved: ReceivedAnswer) -> str:
    tops = [max(answer.top[0].values()) for answer in (plain, halved) if answer.top and answer.top[0]]
    if len(tops) < 2 or tops[0] > _CERTAIN:
        return ""
    return "raw" if abs(tops[0] - tops[1]) <= _NOISE * abs(tops[0]) else "processed"


def _read(caller: Caller, dialect: Dialect, body: Mapping[str, Any], over: threading.Event | None) -> ReceivedAnswer:
    content = caller.post(dialect.path, body, over)
    try:
        return dialect.read(content)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        why = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise PeerError(f"{caller.url} answered JSON that is no completion ({why})") from error


_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? +(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SIGMAS = 1.96


@dataclass(frozen=True)
class ServedAcceptance:
    """Acceptance of all drafts since the server was started; `reported` is the server's own tokens per target call."""

    drafts: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    by_position: tuple[float, ...] = ()
    by_drafter: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    reported: float | None = None

    @property
    def tokens_per_call(self) -> tuple[float, float, float]:
        """Mean tokens of a call with a draft, and its 95 % confidence interval.

        With s_k the share of drafts with k or more accepted tokens, E[a] = sum s_k and E[a^2] = sum (2k - 1) s_k, for
        independent drafts.
        """
        if not self.drafts:
            return (self.reported or math.nan,) * 3
        mean = self.accepted / self.drafts
        shares = [each / self.drafts for each in self.by_position]
        second = sum((2 * place + 1) * share for place, share in enumerate(shares)) if shares else mean * (1 + 2 * mean)
        error = _SIGMAS * math.sqrt(max(second - mean**2, 0.0) / self.drafts)
        return 1.0 + mean, 1.0 + mean - error, 1.0 + mean + error


def served_acceptance(caller: Caller) -> ServedAcceptance:
    """Read the metrics of a server; PeerError if it has none, or they count no drafts."""
    sums, positions = defaultdict[str, float](float), defaultdict[int, float](float)
    drafters: dict[str, list[float]] = {}
    text = caller.text("/metrics")
    twice = "truedraft:spec_decode" in text  # whose counters also have vLLM's prefix
    for name, labels, value in _samples(text):
        prefix, _, kind = name.removesuffix("_total").partition(":")
        if twice and prefix == "vllm":
            continue
        if kind == "spec_decode_num_accepted_tokens_per_pos" and labels.get("position", "").isdecimal():
            positions[int(labels["position"])] += value
        elif kind in ("drafter_draft_tokens", "drafter_accepted_tokens"):
            drafters.setdefault(labels.get("drafter", ""), [0.0, 0.0])[kind == "drafter_accepted_tokens"] += value
        else:
            sums[kind] = value if kind == "spec_accept_length" else sums[kind] + value
    drafts, reported = sums.get("spec_decode_num_drafts", 0.0), sums.get("spec_accept_length")
    if not drafts and not reported:
        raise PeerError(
            f"the metrics of {caller.url} count no drafts; let it answer something with a drafter first, and see that "
            "its metrics are on"
        )
    return ServedAcceptance(
        drafts,
        sums.get("spec_decode_num_draft_tokens", 0.0),
        sums.get("spec_decode_num_accepted_tokens", 0.0),
        tuple(count for _, count in sorted(positions.items())),
        {name: (drafted, accepted) for name, (drafted, accepted) in drafters.items()},
        reported,
    )


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for name, labels, value in _LINE.findall(text):
        try:
            yield name, dict(_LABEL.findall(labels)), float(value)
        except ValueError:
            continue
