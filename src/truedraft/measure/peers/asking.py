"""The interface of a peer engine: questions with token ids and options, and its answers.

`Recorded` writes them to a file of JSON lines, so that an interrupted run resumes: the first line describes the engine
and the options, each further one holds a question, the number of its repetition, and the answer. Only other questions
are sent to the engine.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from truedraft.core.params import SamplingParams
from truedraft.errors import ChangedOptionsError, DataError, PeerError

FILTERS = ("temperature", "top_k", "top_p", "min_p")
"""The steps from logits to a distribution, in Hugging Face's order; other engines use other orders."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request, in token ids; with seed None no seed is sent."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer."""

    token_ids: tuple[int, ...]  # without the token that ended the answer
    text: str | None = None
    finish_reason: str = "length"  # "stop" or "length", or another word of the engine's own
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[Mapping[int, float], ...] | None = None
    unsure: str = ""  # why the ids may not be the drawn ones; "" where the engine returned them itself

    def as_dict(self) -> dict[str, Any]:
        top = self.top_logprobs
        return asdict(self) | {"top_logprobs": None if top is None else [[*each.items()] for each in top]}

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Reply:
        """The inverse of `as_dict`; KeyError, TypeError or ValueError if that is invalid."""
        top = kept["top_logprobs"]
        return cls(
            tuple(int(token) for token in kept["token_ids"]),
            kept["text"],
            str(kept["finish_reason"]),
            None if kept["logprobs"] is None else tuple(float(value) for value in kept["logprobs"]),
            None if top is None else tuple({int(i): float(p) for i, p in each} for each in top),
            str(kept["unsure"]),
        )


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """Properties of an engine."""

    name: str
    version: str = ""
    filters: tuple[str, ...] = FILTERS  # those of `FILTERS` that it supports, in its order
    takes: Collection[str] = ("max_tokens", "temperature", "top_p", "seed", "stop")  # of `SamplingParams`, no others
    gives_ids: bool = False
    logprobs: str = ""  # "raw" for the model's own, "processed" after temperature and filters, "" for none
    more: Mapping[str, Any] = field(default_factory=dict)  # further values for reports, such as its command


class Peer(ABC):
    """An engine that answers questions; `with` closes what it holds open."""

    facts: PeerFacts

    def close(self) -> None: ...  # noqa: B027 - most hold nothing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def answers(self, questions: Sequence[Question]) -> Iterator[tuple[int, Reply | PeerError]]:
        """Answer questions together; yields the number of each with its answer or error, as it arrives."""

    def ask(self, questions: Sequence[Question]) -> list[Reply | PeerError]:
        found = dict(self.answers(questions))
        return [found[number] for number in range(len(questions))]

    def refuses(self, params: SamplingParams) -> str:
        """Unsupported options of a question, joined by commas; "" for none."""
        plain = SamplingParams()
        refused = (name for name in SamplingParams.__dataclass_fields__ if name not in self.facts.takes)
        return ", ".join(name for name in refused if getattr(params, name) != getattr(plain, name))


_VERSION = 1
_HEAD = "truedraft_transcript"


class Recorded(Peer):
    """A peer that records its answers. Only one process may write to the file at a time.

    Errors are not recorded, so the next run sends these questions again. Raises ChangedOptionsError for a file of
    another engine, model or options, DataError if it is none or cannot be used.
    """

    def __init__(self, peer: Peer, file: Path, about: Mapping[str, Any] | None = None) -> None:
        self.facts = peer.facts
        self._peer = peer
        self._file = file
        self._seen: Counter[str] = Counter()
        head = _head(peer.facts, about or {})
        try:
            lines, whole = _lines(file)
            self._replies = self._read(lines, head)
            self._out = file.open("ab")
            self._out.truncate(whole)  # removes a line that an earlier run did not finish
            if not lines:
                self._write(head)
        except OSError as error:
            raise DataError(f"the transcript {str(file)!r} cannot be used ({error.strerror or error})") from error
        self.kept = len(self._replies)  # answers in the file when it was opened
        self.asked = 0  # questions sent to the peer since

    def close(self) -> None:
        self._out.close()

    def answers(self, questions: Sequence[Question]) -> Iterator[tuple[int, Reply | PeerError]]:
        left: list[tuple[int, tuple[str, int]]] = []
        plain = asdict(SamplingParams())
        for number, question in enumerate(questions):
            given = asdict(question.params).items()  # only what differs from the defaults is written
            words = _words(question.prompt, {name: value for name, value in given if value != plain[name]})
            place = words, self._seen[words]
            self._seen[words] += 1
            if place in self._replies:
                yield number, self._replies[place]
            else:
                left.append((number, place))
        self.asked += len(left)
        if not left:
            return
        for which, reply in self._peer.answers([questions[number] for number, _ in left]):
            number, (words, occurrence) = left[which]
            if isinstance(reply, Reply):
                self._write(json.loads(words) | {"occurrence": occurrence, "reply": reply.as_dict()})
            yield number, reply

    def _write(self, record: Mapping[str, Any]) -> None:
        try:
            self._out.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
            self._out.flush()
        except OSError as error:
            raise DataError(
                f"the transcript {str(self._file)!r} cannot be written ({error.strerror or error})"
            ) from error

    def _read(self, lines: Sequence[bytes], head: Mapping[str, Any]) -> dict[tuple[str, int], Reply]:
        replies: dict[tuple[str, int], Reply] = {}
        for number, line in enumerate(lines):
            try:
                record = json.loads(line)
                if number:
                    words = _words(record["prompt"], record["params"])
                    replies[words, int(record["occurrence"])] = Reply.from_dict(record["reply"])
                elif record[_HEAD] != _VERSION:
                    raise ValueError(f"version {record[_HEAD]!r}")
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
                raise DataError(
                    f"line {number + 1} of {str(self._file)!r} is no part of a transcript "
                    f"({type(error).__name__}: {error}); name another file"
                ) from error
            if not number:
                self._check(record, head)
        return replies

    def _check(self, kept: Mapping[str, Any], head: Mapping[str, Any]) -> None:
        now = json.loads(json.dumps(head))
        changes = {name: (kept.get(name), now.get(name)) for name in {**kept, **now} if kept.get(name) != now.get(name)}
        if changes:
            raise ChangedOptionsError(f"the transcript {str(self._file)!r}", changes, "file")


def _lines(file: Path) -> tuple[list[bytes], int]:
    if not file.exists():
        return [], 0
    whole, newline, cut = file.read_bytes().rpartition(b"\n")
    if newline:
        return whole.split(b"\n"), len(whole) + len(newline)
    begins = f'{{"{_HEAD}":'.encode()
    if cut[: len(begins)] != begins[: len(cut)]:
        raise DataError(f"line 1 of {str(file)!r} is no part of a transcript; name another file")
    return [], 0


def _head(facts: PeerFacts, about: Mapping[str, Any]) -> dict[str, Any]:
    record = asdict(facts) | {"takes": sorted(facts.takes)}
    more = record.pop("more")
    return {_HEAD: _VERSION} | record | dict(more) | dict(about)


def _words(prompt: Sequence[int], params: Mapping[str, Any]) -> str:
    return json.dumps({"prompt": prompt, "params": params}, sort_keys=True)
