"""A Python function as an engine: `prompt -> tokens`, given on the command line as `module:function`."""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from truedraft.errors import OptionError, PeerError
from truedraft.measure.peers.asking import FILTERS, Peer, PeerFacts, Question, Reply
from truedraft.measure.peers.recovery import Recovery
from truedraft.options import imported_module

_GIVEN = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
"""Keyword arguments that such a function may have."""


def load_function(field: str, words: str) -> Callable[..., Any]:
    """The function `module:function`; the working directory is searched, too, and names after the colon may have dots.

    Raises OptionError for `field`: no such module or function, it cannot be called, or importing the module failed.
    """
    module, colon, name = words.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise OptionError(f"must be module:function, got {words!r}", field=field)
    found: Any = imported_module(module, f"of {field} {words!r}")
    if found is None:
        raise OptionError(
            f"names no module that there is, {module!r}; it must be installed or lie in the working directory",
            field=field,
        )
    for part in name.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, dir(found), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise OptionError(f"{words!r}: module {module!r} has no {name}{hint}", field=field)
        found = getattr(found, part)
    if not callable(found):
        raise OptionError(f"{words!r} is a {type(found).__name__}, which cannot be called", field=field)
    return found


class ProcessPeer(Peer):
    """A Python function as a peer.

    It is called with the token ids of a prompt, a list, and with those of `max_tokens`, `temperature`, `top_p`,
    `top_k`, `min_p`, `seed` and `stop` that its signature names; it returns the new token ids, without padding. Without
    a parameter `max_tokens`, its result is cut there, and the id that ended an answer is left out. An exception that it
    raises is the error of that question, as are ids of `vocab_size` and above.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        vocab_size: int | None = None,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self._function = function
        self._given = _named(function)
        takes = ("max_tokens", *(each for each in self._given if each != "max_tokens"))
        self.facts = PeerFacts(
            name=name or str(getattr(function, "__qualname__", type(function).__name__)),
            filters=tuple(each for each in FILTERS if each in takes),
            takes=takes,
            gives_ids=True,
        )
        self._recovery = Recovery(None, vocab_size, eos_token_ids)

    def answers(self, questions: Sequence[Question]) -> Iterator[tuple[int, Reply | PeerError]]:
        for number, question in enumerate(questions):
            try:
                yield number, self._answer(question)
            except PeerError as error:
                yield number, error

    def _answer(self, question: Question) -> Reply:
        name = self.facts.name
        if refused := self.refuses(question.params):
            raise PeerError(f"{name} has no argument {refused}; leave that out, or name it in the function's signature")
        given = {each: getattr(question.params, each) for each in self._given}
        if "stop" in given:
            given["stop"] = list(given["stop"])
        try:
            found = self._function(list(question.prompt), **given)
        except (Exception, SystemExit) as error:
            raise PeerError(f"{name} raised {type(error).__name__}: {error}") from error
        ids = _ids(name, found)
        self._recovery.check_ids(ids)
        if "max_tokens" not in given:
            ids = ids[: question.params.max_tokens]
        reason = "length" if len(ids) >= question.params.max_tokens else "stop"
        ended = self._recovery.without_end(ids, "stop", question)
        return Reply(ids[:ended], finish_reason="stop" if ended < len(ids) else reason)


def _named(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some C functions have no signature
        return ()
    kinds = inspect.Parameter
    if any(each.kind is kinds.VAR_KEYWORD for each in parameters):
        return _GIVEN
    keywords = {each.name for each in parameters if each.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    return tuple(name for name in _GIVEN if name in keywords)


def _ids(name: str, found: Any) -> tuple[int, ...]:
    values = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(values, list | tuple):
        raise PeerError(f"{name} must return a list of token ids, got {repr(found)[:80]}")
    ids = []
    for each in values:
        try:
            if isinstance(each, bool) or "bool" in str(getattr(each, "dtype", "")):
                raise TypeError("a truth value is no id")
            ids.append(operator.index(each))  # a tensor of several numbers raises various errors
        except (TypeError, ValueError, RuntimeError):
            wanted = "must return a list of token ids, which are whole numbers"
            raise PeerError(f"{name} {wanted}, got {repr(each)[:80]} in it") from None
    return tuple(ids)
