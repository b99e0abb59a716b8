"""What holds of every answer, whatever drafted and judged it; tests/engine/conftest.py checks it of each request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest

from truedraft import Engine
from truedraft.core.verdict import Origin
from truedraft.drafters import Drafter
from truedraft.engine.answer import Answer, Piece
from truedraft.engine.request import Request
from truedraft.models.base import LanguageModel
from truedraft.models.cache.request import RequestCache
from truedraft.verification import Rule


def assert_consistent(answer: Answer, pieces: Sequence[Piece], resumed: int = 0) -> None:
    """An answer, its counts and its pieces say the same; `resumed` is how often its request gave its room back."""
    stats, origins = answer.stats, answer.origins
    assert list(chain.from_iterable(piece.token_ids for piece in pieces)) == answer.token_ids
    assert list(chain.from_iterable(piece.origins for piece in pieces)) == origins
    assert "".join(piece.text for piece in pieces) == (answer.text or "")
    assert [piece.answer for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].answer is answer
    assert len(origins) == len(answer.token_ids) == stats.prefill_tokens + stats.emitted_tokens
    assert bool(origins) <= stats.prefill_tokens <= (1 + resumed if origins else 0)  # the first token comes from one
    accepted, rejected = accepted_in_steps(origins[1:])
    assert len(accepted) <= stats.target_calls + max(stats.prefill_tokens - 1, 0)
    if answer.error is None:  # each call gave a token at least, if only one that ended the answer
        assert stats.target_calls <= stats.emitted_tokens + stats.stop_tokens
    assert stats.accepted_tokens == sum(accepted) == origins.count(Origin.ACCEPTED) <= stats.draft_tokens
    depth = len(stats.tried_per_position)
    assert len(stats.accepted_per_position) == depth >= max(accepted, default=0)
    passed = [sum(length > place for length in accepted) for place in range(depth)]
    assert stats.accepted_per_position == passed
    drafters = stats.by_drafter.values()
    assert max((each.accepted_tokens for each in drafters), default=0) <= stats.accepted_tokens
    assert sum(each.accepted_tokens for each in drafters) >= stats.accepted_tokens
    assert all(0 <= each.accepted_tokens <= each.draft_tokens <= stats.draft_tokens for each in drafters)
    assert stats.tried_per_position == [passed[place] + rejected.count(place) for place in range(depth)]


def accepted_in_steps(origins: Sequence[Origin]) -> tuple[list[int], list[int]]:
    """How many drafted tokens each step accepted, and after how many a draw was rejected in the steps that had one.

    `origins` are those of all tokens behind the prefill's; a step ends with its first token that was not accepted.
    """
    accepted, rejected, length = [], [], 0
    for origin in origins:
        if origin is Origin.ACCEPTED:
            length += 1
            continue
        accepted.append(length)
        if origin is Origin.RECOVERED:
            rejected.append(length)
        length = 0
    return [*accepted, *([length] if length else [])], rejected


class _Noted(list[Piece]):
    """Pieces, of which those stay known that a stream takes, whenever its thread does."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Piece] = []

    def append(self, piece: Piece) -> None:
        self.noted.append(piece)
        super().append(piece)


@contextmanager
def every_answer_checked(patch: pytest.MonkeyPatch, *, warned: bool) -> Iterator[None]:
    """Within, each request that ends is held to `assert_consistent`, and to its tokenizer.

    With `warned`, answers may carry warnings, because something was planted that brings them.
    """
    init, finish = Request.__init__, Request.finish

    def noting_init(request: Request, *given: Any) -> None:
        init(request, *given)
        request.pieces = _Noted()

    def checking_finish(request: Request) -> Answer:
        answer = finish(request)
        assert isinstance(request.pieces, _Noted)
        assert_consistent(answer, request.pieces.noted, request.preemptions)
        assert warned or answer.warnings == ()
        assert not request._stop_ids & set(answer.token_ids)
        if request._text._tokenizer is not None:
            assert answer.text is not None
            whole = request._text._tokenizer.decode(answer.token_ids)
            # A stop text may begin inside the last token.
            assert whole.startswith(answer.text) if request._text.stopped else whole == answer.text
            assert not any(stop in answer.text for stop in request.params.stop)
        return answer

    patch.setattr(Request, "__init__", noting_init)
    patch.setattr(Request, "finish", checking_finish)
    yield


def fixed(target: LanguageModel, drafter: Drafter | str | None = None, rule: Rule | None = None, **more: Any) -> Engine:
    """An engine that always drafts as much as its drafter allows."""
    return Engine(target, drafter, rule, "fixed", **more)


def finished(engine: Engine, requests: Iterable[Request]) -> list[Answer]:
    """Answers of requests, after steps until all are over."""
    waiting = list(requests)
    while not all(request.closed for request in waiting):
        engine.step()
    return [answer for request in waiting if (answer := request.pieces[-1].answer) is not None]


def count_moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Collects the paths whose commit moves entries of a cache."""
    moved: list[tuple[int, ...]] = []
    commit = RequestCache.commit

    def watched(self: RequestCache, path: Sequence[int]) -> None:
        if list(path) != list(range(len(path))):
            moved.append(tuple(path))
        commit(self, path)

    monkeypatch.setattr(RequestCache, "commit", watched)
    return moved
