"""Structured output by llguidance: JSON schemas, regular expressions, grammars and choices.

A state of the form belongs to a text. At a node of a token tree this is the answer so far and the tokens on the node's
path, so masks are functions of paths like everything else that shapes logits.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from truedraft.core.params import Structured
from truedraft.core.shaping import Path
from truedraft.errors import FormMemoryError, MissingExtraError, OptionError
from truedraft.text.schemas import JSON_LAYOUT, gist_of, map_schemas, problem_of, simplified
from truedraft.text.tokenizer import Tokenizer
from truedraft.text.trial import Trial

MOST_CHARACTERS = 1 << 16
# Parser items for one mask, about a tenth of a second in which other requests wait. Schemas of 60 fields of three
# possible types each take 2,000.
_MOST_ITEMS = 10_000
# To prepare a form (a choice of 4,000 words takes 50,000), to compute a mask (30 ms), and what answers add (15 MB).
_LIMITS: dict[str, Any] = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 100_000, "max_lexer_states": 20_000}
_EXCEEDED = {
    "Too many items": "the items that one token may take (step_max_items)",
    "Current row": "the items of one place (max_items_in_row)",
    "too many expressions": "the work on expressions that one token may take (step_lexer_fuel)",
    "too many states": "the states that its expressions may come to (max_lexer_states)",
    "fuel exhausted": "the work on expressions that preparing it may take (initial_lexer_fuel)",
    "lexer configuration": "the work on expressions that preparing it may take (initial_lexer_fuel)",
    "grammar size": "the symbols of a grammar (max_grammar_size)",
    "schema too large": "the size of a schema with all its combinations",
}
"""Parts of the library's error messages about limits, and the limit that each means."""
_MOST_BYTES = 256 << 20  # of all forms: those of open requests, and those cached for later requests
_MOST_OF_ONE = 128 << 20  # bytes of one owner's forms
_BYTES_A_CHARACTER = 400  # of a grammar; up to 300 were measured, with schemas of 1,500 properties
_BYTES_A_MULTIPLE = 1_000  # per remainder that a form distinguishes; 700 were measured
_QUICK_CHARACTERS, _QUICK_MULTIPLES, _QUICK_RULES = 1 << 15, 10_000, 300
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*-?([0-9.]+)')
_MEETING = ('"allOf"', '"anyOf"', '"oneOf"', "$ref", "patternProperties")
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_MADE_IN_A_STEP_S = 0.3  # CPU seconds that making a form again may take while other requests wait
_AHEAD = 256  # bytes of forced text that are looked ahead
_KNOWN_BY = 4  # bytes of the prefix by which forced text seen before is recognized
_MOST_MASKS = 256  # of one request, cached until its text grows

_Key: TypeAlias = tuple[Hashable, Structured]
"""The owner of a form, and the form."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Prepared:
    """A form at the beginning of any answer; copies of `matcher` share what it computed, `held` estimates its bytes."""

    matcher: Any
    held: int
    grammar: str
    made_s: float


class Forms:
    """Makes forms for the requests of one model; thread-safe. The first of `eos_ids` ends a complete form."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._kept: OrderedDict[_Key, Prepared] = OrderedDict()  # least recently requested first
        self._alive: weakref.WeakValueDictionary[_Key, Prepared] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()  # of `_alive` and `_kept`
        self._one_trial = threading.Lock()

    @cached_property
    def _guide(self) -> Any:
        """The vocabulary in llguidance's format; made once, which takes about a second for large ones."""
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise MissingExtraError(
                "structured answers need the package llguidance; install it by: pip install 'truedraft[structured]'"
            ) from error
        if not self._eos_ids:
            message = "needs a model that can end its answer, and this one has no end-of-text token"
            raise OptionError(message, field="structured")
        try:
            return from_tokenizer(self._tokenizer.backend, n_vocab=self._vocab, eos_token=self._eos_ids[0])
        except Exception as error:  # such as a slow tokenizer
            raise OptionError(f"cannot be had with this model's tokenizer ({error})", field="structured") from error

    def start(
        self, structured: Structured, tokens: Sequence[int], prompt_tokens: int, owner: Hashable = None
    ) -> FormState:
        """Return the form of one answer, at its beginning; an `OptionError` if it cannot be had.

        `tokens` are prompt and answer so far; the caller appends to this list. Forms are shared only within one owner,
        because the time until a form is ready reveals earlier requests.
        """
        prepared = self.found(structured, owner) or self.prepare(structured, owner)
        anew = partial(self._anew, (owner, structured))
        return FormState(prepared, self._guide, self._eos_ids[0], tokens, prompt_tokens, anew)

    def found(self, structured: Structured, owner: Hashable = None) -> Prepared | None:
        with self._lock:
            prepared = self._alive.get((owner, structured))
            if prepared is not None:
                self._keep((owner, structured), prepared)
            return prepared

    def prepare(self, structured: Structured, owner: Hashable = None) -> Prepared:
        """Make a form that does not exist yet, which may take seconds; raises as `make`."""
        return self.make(structured, *self.grammar(structured), Trial(), owner)

    def grammar(self, structured: Structured) -> tuple[str, bool]:
        """Return the form's grammar for llguidance, and whether compiling it is known to be fast; raises as `start`."""
        _ = self._guide  # raises if forms are impossible
        from llguidance import LLMatcher

        size = sum(map(len, structured.value)) if structured.kind == "choice" else len(str(structured.value))
        if size > MOST_CHARACTERS:
            raise OptionError(f"has {size} characters, of at most {MOST_CHARACTERS}", field="structured")
        try:
            grammar = _grammar_of(structured, LLMatcher)
            return grammar, _is_quick(grammar, structured.kind)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"cannot be read ({error})", field="structured") from error

    def make(
        self, structured: Structured, grammar: str, is_quick: bool, trial: Trial, owner: Hashable = None
    ) -> Prepared:
        """Compile a form. One that may exceed the library's limits is first tried in another process, by `trial`.

        An `OptionError` if the library rejects it, a `FormMemoryError` if the forms of open requests leave no room, a
        `CancelledError` if another thread cancelled the trial.
        """
        held = (1 << 20) + _BYTES_A_CHARACTER * len(grammar) + _BYTES_A_MULTIPLE * _multiples(grammar)
        if not is_quick:
            with self._one_trial:
                if there := self.found(structured, owner):  # another thread was first
                    return there
                backend = copy(self._tokenizer.backend.backend_tokenizer)  # for the other process, as `llguidance.hf`
                backend.no_padding()
                backend.no_truncation()
                found = trial.run(str(backend.to_str()), grammar, self._limits, self._vocab, self._eos_ids[0])
            if isinstance(found, str):
                raise _refusal(found, grammar)
            held = found or held  # not every system reports it
        self._make_room(held, owner)
        return self._prepared((owner, structured), grammar, held)

    def _prepared(self, key: _Key, grammar: str, held: int) -> Prepared:
        began = time.thread_time()
        matcher = self._matcher(grammar)
        prepared = Prepared(matcher, held, grammar, time.thread_time() - began)
        with self._lock:
            self._alive[key] = prepared
            self._keep(key, prepared)
        return prepared

    def _matcher(self, grammar: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self._guide, grammar, log_level=0, limits=LLParserLimits(**self._limits))
        if not matcher.is_error():
            matcher.compute_bitmask()  # so that copies need not compute it again
        if matcher.is_error():
            raise _refusal(matcher.get_error(), grammar)
        return matcher

    def _anew(self, key: _Key, spent: Prepared) -> Prepared | None:
        with self._lock:
            if self._alive.get(key) is spent:
                del self._alive[key]
                self._kept.pop(key, None)
        return self._prepared(key, spent.grammar, spent.held) if spent.made_s < _MADE_IN_A_STEP_S else None

    def _keep(self, key: _Key, prepared: Prepared) -> None:
        """Cache a form for the next request, and as many others as fit; the lock is held."""
        self._kept[key] = prepared
        self._kept.move_to_end(key)
        for counts, most in _bounds(key[0]):
            others = [other for other in self._kept if counts(other) and other != key]
            held = prepared.held + sum(self._kept[other].held for other in others)
            for other in others:
                if held > most:
                    held -= self._kept.pop(other).held

    def _make_room(self, held: int, owner: Hashable) -> None:
        """Evict cached forms until a new one fits together with those of open requests."""
        with self._lock:
            for counts, most in _bounds(owner):
                kept = [key for key in reversed(self._kept) if counts(key)]
                while kept and self._taken(counts) + held > most:
                    del self._kept[kept.pop()]
                taken = self._taken(counts)
                if taken and taken + held > most:
                    there = f"the forms of open requests hold {taken >> 20} of {most >> 20} MiB already"
                    message = f"needs {held >> 20} MiB, and {there}; ask again in a moment"
                    raise FormMemoryError(message, field="structured")

    def _taken(self, counts: Callable[[_Key], bool]) -> int:
        return sum(each.held for each in {form for key, form in self._alive.items() if counts(key)})

    @property
    def _limits(self) -> dict[str, Any]:
        return _LIMITS | {"step_max_items": _MOST_ITEMS, "verbose_errors": False}


def _bounds(owner: Hashable) -> tuple[tuple[Callable[[_Key], bool], int], ...]:
    """For one owner and for all: which forms count, and their limit of bytes."""
    return (lambda key: key[0] == owner, _MOST_BYTES if owner is None else _MOST_OF_ONE), (lambda _: True, _MOST_BYTES)


class FormState:
    """The state of one answer in its form; see `truedraft.core.shaping.Form`.

    After a path where the grammar is too ambiguous to be followed no token is allowed, so that the request fails there
    whichever drafter drafts.

    `tokens` and `prompt_tokens` are those of `Forms.start`. `anew` compiles the form again if earlier answers used it
    up, and returns None if that takes too long.
    """

    def __init__(
        self,
        prepared: Prepared,
        guide: Any,
        eos_id: int,
        tokens: Sequence[int],
        prompt_tokens: int,
        anew: Callable[[Prepared], Prepared | None],
    ) -> None:
        self._prepared = prepared  # a reference, because the form's memory counts while a state of it exists
        self._matcher = prepared.matcher.deep_copy()
        self._anew, self._is_anew = anew, False
        self._guide, self._eos_id, self._vocab = guide, eos_id, guide.vocab_size
        self._mask_bytes = -(-self._vocab // 8)
        self._tokens, self._prompt_tokens = tokens, prompt_tokens
        self._read = prompt_tokens  # number of `tokens` that the matcher has consumed
        self._masks: dict[tuple[int, ...], bytes] = {}  # one bit per id
        self._last: tuple[tuple[int, ...], Any] = (), None  # the last path, and a copy of the matcher there
        self._forced: list[int] | None = None
        self._ahead = b""  # forced text, as far as it was computed
        self._text = b""  # the prefix of `_ahead` that `_forced` encodes
        self._spelling: dict[bytes, int] = {}  # by prefix of forced text, the token that the answer began it with
        self._recalls = False
        self._error = ""  # of the last mask

    def masks(self, paths: Sequence[Path]) -> NDArray[np.bool_]:
        self._go_on()
        bits = np.frombuffer(b"".join(map(self._mask, paths)), dtype=np.uint8).reshape(len(paths), -1)
        return np.unpackbits(bits, axis=1, count=self._vocab, bitorder="little").view(np.bool_)

    def allows(self, path: Path, token: int) -> bool:
        self._go_on()
        key = tuple(path)
        matcher = None if key in self._masks else self._matcher_after(key)
        if matcher is None or matcher.is_error() or matcher.is_stopped():
            return bool(self._mask(key)[token >> 3] >> (token & 7) & 1)
        trial = matcher.deep_copy()  # a token that is too ambiguous would break the state
        return bool(trial.validate_tokens([token]) == 1) and not trial.is_error()

    def legal(self, path: Path) -> int:
        self._go_on()
        if self._matcher.is_error():
            return 0
        # Consumed, because validation would ignore token limits that a grammar may set.
        count = int(self._matcher.deep_copy().try_consume_tokens(list(path)))
        ends = count < len(path) and self.allows(path[:count], path[count])  # a complete form consumes no end of text
        return count + ends

    def forced(self) -> Sequence[int]:
        self._go_on()
        if self._is_anew:  # looking ahead uses up states that the answer needs
            return ()
        if self._forced is None:
            matcher = self._matcher.deep_copy()  # so that drafting cannot fail the answer
            self._ahead = self._ahead or matcher.compute_ff_bytes()
            self._text = self._ahead[:_AHEAD]
            known, rest = self._spelled_before(self._text)
            self._forced = [*known, *self._spelled(matcher, known, rest)]
            self._recalls = bool(known)
        return self._forced

    def recalls(self) -> bool:
        self.forced()
        return self._recalls

    def _spelled_before(self, text: bytes) -> tuple[list[int], bytes]:
        """Forced tokens as the answer encoded the same text before, and the text left to encode."""
        known: list[int] = []
        while (key := text[:_KNOWN_BY]) in self._spelling:
            part = self._guide.decode_bytes([self._spelling[key]])
            if not text.startswith(part):
                break
            known.append(self._spelling[key])
            text = text[len(part) :]
        return known, text

    def _spelled(self, matcher: Any, known: list[int], text: bytes) -> list[int]:
        sure, open_end = self._guide.tokenize_partial(text) if text else ([], b"")
        whole = [*sure, *(self._guide.tokenize_bytes(open_end) if open_end else ())]
        ids = [*known, *whole]
        if ids and matcher.try_consume_tokens(ids) == len(ids) and matcher.is_stopped():
            return [*whole, self._eos_id]
        return list(sure)

    def _learn(self, tokens: Sequence[int]) -> None:
        text = self._text
        for token in tokens:
            part = self._guide.decode_bytes([token])
            if not part or not text.startswith(part):
                return
            self._spelling[text[:_KNOWN_BY]] = token
            text = text[len(part) :]

    def _go_on(self) -> None:
        new = list(self._tokens[self._read :])
        if new:
            self._read += len(new)
            self._matcher.consume_tokens(new)
            written = self._guide.decode_bytes(new)
            self._ahead = self._ahead[len(written) :] if self._ahead.startswith(written) else b""
            self._masks.clear()
            self._last = (), None
            if self._forced is not None:
                self._learn(new)
                self._forced = None

    def _matcher_after(self, path: tuple[int, ...]) -> Any:
        """The matcher after a path, read-only; None after a path that leaves the form."""
        if not path:
            return self._matcher
        # A copy takes a microsecond, and rolling back fails after an end of text. A chain continues with one copy.
        before, matcher = self._last
        if matcher is None or path[: len(before)] != before:
            before, matcher = (), self._matcher.deep_copy()
        added = list(path[len(before) :])
        count = matcher.try_consume_tokens(added)
        if count < len(added) and not matcher.is_error():
            matcher.consume_tokens(added[count:])  # distinguishes a forbidden token from a limit
            if not _exceeded(matcher.get_error()):
                self._last = (), None
                return None
        self._last = path, matcher
        return matcher

    def _mask(self, path: Path) -> bytes:
        key = tuple(path)
        if key not in self._masks:
            if len(self._masks) >= _MOST_MASKS:
                self._masks.clear()
            mask = self._made(self._matcher_after(key))
            if mask is None and self._began_anew():
                mask = self._made(self._matcher_after(key))
            self._masks[key] = mask if mask is not None else bytes(self._mask_bytes)
        return self._masks[key]

    def _made(self, matcher: Any) -> bytes | None:
        """A mask; None if the library gives up, in which case it would allow the end of text."""
        if matcher is None:
            return b"\xff" * self._mask_bytes
        mask = bytes(matcher.compute_bitmask()[: self._mask_bytes])
        self._error = matcher.get_error() if matcher.is_error() else ""
        return None if self._error else mask

    def _began_anew(self) -> bool:
        """Consume the answer again with a newly compiled form, after other answers used up the states."""
        if self._is_anew or "too many states" not in self._error:
            return False
        fresh = self._anew(self._prepared)
        if fresh is None:
            return False
        self._prepared, self._is_anew = fresh, True
        self._matcher, self._last = self._prepared.matcher.deep_copy(), ((), None)
        self._matcher.consume_tokens(list(self._tokens[self._prompt_tokens : self._read]))
        return True

    def problem(self) -> str:
        self._go_on()
        self._masks.pop((), None)
        self._mask(())
        if not self._error:
            return ""
        shared = not self._is_anew and "too many states" in self._error
        again = ", some of which other answers had used; ask once more" if shared else ""
        return f"it exceeds {_exceeded(self._error) or gist_of(self._error) or 'it is not understood'}{again}"


def _grammar_of(structured: Structured, matcher: Any) -> str:
    """A Lark grammar for llguidance that allows all tokenisations of its text."""
    kind, value = structured.kind, structured.value
    if kind == "grammar":
        grammar = map_schemas(str(value), lambda schema, _: simplified(schema))
    elif kind == "choice":
        grammar = "start: " + " | ".join(map(json.dumps, value))
    elif kind == "regex":
        grammar = json.loads(matcher.grammar_from_regex(value))["grammars"][0]["lark_grammar"]
    else:
        schema = simplified(json.loads(value) if kind == "json_schema" else {"type": "object"})
        read = json.loads(matcher.grammar_from_json_schema(json.dumps(schema), defaults=JSON_LAYOUT))
        grammar = "start: %json " + json.dumps(read["grammars"][0]["json_schema"])
    # With forcing, the library allows only one tokenisation of forced text, which a model may never write.
    return str(matcher.grammar_from_lark(grammar + '\n%llguidance {"no_forcing": true}\n'))


def _is_quick(grammar: str, kind: str) -> bool:
    """Whether the limits or the size of a grammar bound the time to prepare it to some tenths of seconds."""
    # They bound neither intersections of expressions, nor multiples, nor the depth of rules that refer to each other.
    return (
        len(grammar) <= _QUICK_CHARACTERS
        and _multiples(grammar) <= _QUICK_MULTIPLES
        and grammar.count("$ref") <= _QUICK_RULES
        and (kind != "grammar" or (not {"&", "~"} & set(grammar) and grammar.count("\n") <= _QUICK_RULES))
    )


def _multiples(grammar: str) -> int:
    """Upper bound of the remainders that a grammar's numbers have, with intersections at the least common multiple."""
    plain = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), grammar)  # a key may contain these escapes
    found = [max(int(each.replace(".", "") or 0), 1) for each in _MULTIPLE.findall(plain)]
    return max(sum(found), math.lcm(*found) if any(word in plain for word in _MEETING) else 0)


def _refusal(message: str, grammar: str) -> OptionError:
    if exceeded := _exceeded(message):
        return OptionError(f"is too large or too ambiguous: it exceeds {exceeded}; make it simpler", field="structured")
    problems: list[str] = []

    def look(schema: Any, comment: str) -> Any:
        if not problems and (problem := problem_of(schema)):
            about, mark, place = comment.rpartition(" #/")  # followed by the position of the schema
            for sign in "#'" if mark else "":
                problem = problem.replace(f"{sign}/{place}", sign)
            problems.append(f"{about if mark else comment} {problem}".strip())
        return schema

    map_schemas(grammar, look)
    problem = problems[0] if problems else gist_of(message) or "it is not understood"
    return OptionError(f"cannot be read ({problem})", field="structured")


def _exceeded(message: str) -> str:
    return next((what for sign, what in _EXCEEDED.items() if sign in message), "")
