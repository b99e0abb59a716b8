"""A server at an address: ours, vLLM's, llama.cpp's, or any with OpenAI's `/v1/completions`."""

from __future__ import annotations

import contextlib
import queue
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from truedraft.core.params import SamplingParams
from truedraft.errors import PeerError, TruedraftError
from truedraft.measure.peers.asking import Peer, Question, Reply
from truedraft.measure.peers.calling import Caller, Patience
from truedraft.measure.peers.dialects import (
    BY_OWNER,
    LLAMA_CPP,
    OPENAI,
    OPENAI_FORMS,
    TRUEDRAFT,
    VLLM,
    Dialect,
    ReceivedAnswer,
)
from truedraft.measure.peers.recovery import Recovery
from truedraft.text import Tokenizer

if TYPE_CHECKING:
    import httpx2

_ANY, _ANY_IDS = "The", (1,)
"""The prompt of test requests, which find out what a server takes."""
_REFUSALS = (400, 422)
_CERTAIN = -0.05
"""Log probability of a first token above which the effect of temperature is too small to see."""
_NOISE = 0.1
"""Share of a log probability that rounding may change from one answer to the next."""


class Endpoint(Peer):
    """An engine over HTTP; `names` are further model names that its answers may have, `version` is "" if unknown."""

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

        Args:
            model: its name on the server; None is the first model that it serves.
            vocab_size: of the model, where that is padded; None is the tokenizer's.
            eos_token_ids: None is the tokenizer's.
            tell: called with sentences about what was found.

        Raises:
            OptionError: the address or the key cannot be used.
            PeerError: nothing answers there, it is no such server, or it does not serve the model.
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

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

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
