"""Forms that answers must have: JSON by a schema, a regular expression, a grammar or a choice, by llguidance.

A state of the form belongs to a text. At a node of a token tree that is the answer so far and the tokens on the node's
own path, so masks are functions of paths like all else that shapes logits.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truedraft.core.params import Structured
from truedraft.core.shaping import Path
from truedraft.errors import MissingExtraError, OptionError
from truedraft.text.tokenizer import Tokenizer

_MOST_CHARACTERS = 1 << 16
JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is laid out where its schema does not say: on one line, as Python's json.dumps does.

Where spaces might stand anywhere small models write them for ever, and little of an answer is known beforehand.
"""
_MOST_ITEMS = 10_000
"""Parser items that working out one mask may take, which is about a tenth of a second.

Ambiguous grammars take more with each token, and other requests wait meanwhile. Schemas of 60 fields that may each be
one of three kinds take 2,000.
"""
_MOST_FORMS = 64
"""Forms that are kept compiled: clients ask for the same ones again and again."""
_AHEAD = 256
"""Bytes that are looked ahead where the form leaves no choice."""
_KNOWN_BY = 4
"""Bytes by which a text is known again that was spelled before, whatever follows them."""
_MOST_MASKS = 256
"""Masks of one request that are kept until its text grows."""


class Forms:
    """Makes forms for the requests of one model.

    Args:
        tokenizer: of the model.
        vocab_size: ids that its logits are of.
        eos_ids: ids that end an answer; the first ends one whose form is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._begun: OrderedDict[Structured, Any] = OrderedDict()  # matchers at the beginning, by when last asked for
        self._lock = threading.Lock()  # requests come from several threads

    @cached_property
    def _guide(self) -> Any:
        """The vocabulary as the library wants it; made once, which takes about a second for large ones."""
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise MissingExtraError(
                "structured answers need the package llguidance; install it by: pip install 'truedraft[structured]'"
            ) from error
        if not self._eos_ids:
            raise OptionError(
                "needs a model that can end its answer, and this one has no end-of-text token", field="structured"
            )
        try:
            return from_tokenizer(self._tokenizer.backend, n_vocab=self._vocab, eos_token=self._eos_ids[0])
        except Exception as error:  # a slow tokenizer, for one
            raise OptionError(f"cannot be had with this model's tokenizer ({error})", field="structured") from error

    def start(self, structured: Structured, tokens: Sequence[int], prompt_tokens: int) -> FormState:
        """The form of one answer, at its beginning.

        Args:
            structured: what is asked for.
            tokens: prompt and answer so far, which somebody else owns and grows.
            prompt_tokens: how many of these, the first, are the prompt.

        Raises:
            OptionError: it is no schema, expression or grammar, or too large.
            MissingExtraError: llguidance is not installed.
        """
        with self._lock:
            begun = self._begun.get(structured)
        if begun is None:  # a large one takes long, and others need not wait for it
            begun = self._compiled(structured)
        with self._lock:
            self._begun[structured] = begun
            self._begun.move_to_end(structured)
            if len(self._begun) > _MOST_FORMS:
                self._begun.popitem(last=False)
            return FormState(begun.deep_copy(), self._guide, self._eos_ids[0], tokens, prompt_tokens)

    def _compiled(self, structured: Structured) -> Any:
        """What llguidance makes of a form, at the beginning of an answer."""
        guide = self._guide
        from llguidance import LLMatcher, LLParserLimits

        size = sum(map(len, structured.value)) if structured.kind == "choice" else len(str(structured.value))
        if size > _MOST_CHARACTERS:
            raise OptionError(f"has {size} characters, of at most {_MOST_CHARACTERS}", field="structured")
        try:
            grammar = _grammar_of(structured, LLMatcher)
        except ValueError as error:
            raise OptionError(f"cannot be read ({error})", field="structured") from error
        matcher = LLMatcher(guide, grammar, log_level=0, limits=LLParserLimits(step_max_items=_MOST_ITEMS))
        if not matcher.is_error():
            matcher.compute_bitmask()  # which copies need not work out again
        if matcher.is_error():
            raise OptionError(f"cannot be read ({_first_line(matcher.get_error())})", field="structured")
        return matcher


class FormState:
    """How far one answer has come in its form; see `truedraft.core.shaping.Form`.

    Behind a path where the grammar is too ambiguous to be followed no token is allowed, so that a request that gets
    there fails, whoever drafts.

    Args:
        matcher: of llguidance, at the beginning.
        guide: of llguidance, the vocabulary that masks are of.
        eos_id: ends an answer whose form is complete.
        tokens: prompt and answer so far, which somebody else owns and grows.
        prompt_tokens: how many of these, the first, are the prompt.
    """

    def __init__(self, matcher: Any, guide: Any, eos_id: int, tokens: Sequence[int], prompt_tokens: int) -> None:
        self._matcher = matcher
        self._guide = guide
        self._eos_id = eos_id
        self._vocab = guide.vocab_size
        self._mask_bytes = -(-self._vocab // 8)
        self._tokens = tokens
        self._read = prompt_tokens  # so many of `tokens` the matcher has seen
        self._masks: dict[tuple[int, ...], bytes] = {}  # a bit for each id
        self._last: tuple[tuple[int, ...], Any] = (), None  # the path looked at last, and a copy of the matcher there
        self._forced: list[int] | None = None
        self._text = b""  # what it spells
        self._spelling: dict[bytes, int] = {}  # where such a text had to come, the token that the answer began it with
        self._recalls = False

    def masks(self, paths: Sequence[Path]) -> NDArray[np.bool_]:
        self._go_on()
        bits = np.frombuffer(b"".join(map(self._mask, paths)), dtype=np.uint8).reshape(len(paths), -1)
        return np.unpackbits(bits, axis=1, count=self._vocab, bitorder="little").view(np.bool_)

    def allows(self, path: Path, token: int) -> bool:
        self._go_on()
        key = tuple(path)
        matcher = None if key in self._masks else self._behind(key)
        if matcher is None or matcher.is_error() or matcher.is_stopped():
            return bool(self._mask(key)[token >> 3] >> (token & 7) & 1)
        trial = matcher.deep_copy()  # a token too ambiguous to be read would leave the state broken
        return bool(trial.validate_tokens([token]) == 1) and not trial.is_error()

    def legal(self, path: Path) -> int:
        self._go_on()
        if self._matcher.is_error():
            return 0
        # Consumed and not validated, which would pass over limits of tokens that a grammar may set.
        count = int(self._matcher.deep_copy().try_consume_tokens(list(path)))
        ends = count < len(path) and self.allows(path[:count], path[count])  # a whole form consumes no end of text
        return count + ends

    def forced(self) -> Sequence[int]:
        self._go_on()
        if self._forced is None:
            matcher = self._matcher.deep_copy()  # what is only drafted cannot fail the answer
            self._text = matcher.compute_ff_bytes()[:_AHEAD]
            known, rest = self._spelled_before(self._text)
            self._forced = [*known, *self._spelled(matcher, known, rest)]
            self._recalls = bool(known)
        return self._forced

    def recalls(self) -> bool:
        self.forced()
        return self._recalls

    def _spelled_before(self, text: bytes) -> tuple[list[int], bytes]:
        """What must come next as the answer spelled it where it had to come before, and what is left to be spelled."""
        known: list[int] = []
        while (key := text[:_KNOWN_BY]) in self._spelling:
            part = self._guide.decode_bytes([self._spelling[key]])
            if not text.startswith(part):
                break
            known.append(self._spelling[key])
            text = text[len(part) :]
        return known, text

    def _spelled(self, matcher: Any, known: list[int], text: bytes) -> list[int]:
        """What must come next behind some tokens, as the tokenizer writes it.

        Its last tokens are left out where they might become one with what follows, and the end of text is added where
        nothing may follow.
        """
        sure, open_end = self._guide.tokenize_partial(text) if text else ([], b"")
        whole = [*sure, *(self._guide.tokenize_bytes(open_end) if open_end else ())]
        ids = [*known, *whole]
        if ids and matcher.try_consume_tokens(ids) == len(ids) and matcher.is_stopped():
            return [*whole, self._eos_id]
        return list(sure)

    def _learn(self, tokens: Sequence[int]) -> None:
        """How the answer spelled what had to come."""
        text = self._text
        for token in tokens:
            part = self._guide.decode_bytes([token])
            if not part or not text.startswith(part):
                return
            self._spelling[text[:_KNOWN_BY]] = token
            text = text[len(part) :]

    def _go_on(self) -> None:
        """Read what was committed since."""
        new = list(self._tokens[self._read :])
        if new:
            self._read += len(new)
            self._matcher.consume_tokens(new)
            self._masks.clear()
            self._last = (), None
            if self._forced is not None:
                self._learn(new)
                self._forced = None

    def _behind(self, path: tuple[int, ...]) -> Any:
        """The matcher behind a path, to be looked at and not to be changed; None behind one that leaves the form."""
        if not path:
            return self._matcher
        # A copy takes a microsecond, and rolling back goes astray behind an end of text. A chain goes on with one copy.
        before, matcher = self._last
        if matcher is None or path[: len(before)] != before:
            before, matcher = (), self._matcher.deep_copy()
        added = list(path[len(before) :])
        if matcher.try_consume_tokens(added) < len(added) and not matcher.is_error():
            self._last = (), None
            return None
        self._last = path, matcher
        return matcher

    def _mask(self, path: Path) -> bytes:
        """What may follow behind a path, a bit for each id."""
        key = tuple(path)
        if key not in self._masks:
            if len(self._masks) >= _MOST_MASKS:
                self._masks.clear()
            self._masks[key] = self._made(self._behind(key))
        return self._masks[key]

    def _made(self, matcher: Any) -> bytes:
        if matcher is None:
            return b"\xff" * self._mask_bytes
        mask = bytes(matcher.compute_bitmask()[: self._mask_bytes])
        return bytes(len(mask)) if matcher.is_error() else mask  # else the end of text would be allowed


def _grammar_of(structured: Structured, matcher: Any) -> str:
    """What llguidance reads: a Lark grammar that allows all tokens that spell its text.

    Left alone the library allows but one tokenisation of what the form leaves no choice in, and a model that likes
    another, by which the rest of its answer may be another too, never gets it.
    """
    kind, value = structured.kind, structured.value
    if kind == "grammar":
        grammar = str(value)
    elif kind == "choice":
        grammar = "start: " + " | ".join(map(json.dumps, value))
    elif kind == "regex":
        grammar = json.loads(matcher.grammar_from_regex(value))["grammars"][0]["lark_grammar"]
    else:
        schema = value if kind == "json_schema" else '{"type": "object"}'
        read = json.loads(matcher.grammar_from_json_schema(schema, defaults=JSON_LAYOUT))
        grammar = "start: %json " + json.dumps(read["grammars"][0]["json_schema"])
    return str(matcher.grammar_from_lark(grammar + '\n%llguidance {"no_forcing": true}\n'))


def _first_line(message: str) -> str:
    return next((line.strip() for line in message.splitlines() if line.strip()), "it is not understood")
