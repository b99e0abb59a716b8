"""Control tokens typed into a chat stay text; only the chat template writes the tokens.

A message that spells `<|im_end|>` must not end its turn. So spellings are put between two marks before the template is
rendered, and the rendered text is tokenised by a copy of the tokenizer in which control tokens have secret names: it
recognizes only those not between marks, which are the template's own and were renamed.

Worked example: the content `a<|end|>b` is passed to the template as `a[<|end|>]b`, with marks for the brackets, and
rendered as `<|user|>a[<|end|>]b<|end|>`. The copy reads `SECRET1a<|end|>bSECRET2`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from truedraft.errors import PromptError

_Value = TypeVar("_Value")
# Roles in which tokens that decode to text (`<tool_call>`, `<think>`) stay tokens, because the operator or the model
# wrote them. Special tokens are text in these roles too.
_TRUSTED_MARKS = frozenset(("system", "developer", "assistant"))
_MARKS = range(0xE000, 0xF900)  # the private use area, of which two unused characters are taken
_SECRET_CHARACTERS, _LARGE_AREA = 8, range(0x100000, 0x10FFFE)  # 2^128 names
_MARK = re.compile(r"[^\w\s▁]")  # no words, numbers and whitespace, because templates write them as text
_HINT = 3  # first characters of a token, a quick test that most texts fail


@dataclass(frozen=True)
class MarkedChat:
    """Input of a chat template, with marks around typed control tokens; `found` is the first one's place and name."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    variables: dict[str, Any]
    marks: tuple[str, str]
    found: tuple[str, str]


class ControlTokens:
    """The special tokens of a tokenizer, and the added tokens in `template` (its text and a rendered chat)."""

    def __init__(self, backend: Any, name: str, template: str) -> None:
        self._backend = backend
        self._name = name
        added = getattr(backend, "added_tokens_decoder", {}).values()
        special = [token for token in added if token.special]
        written = [token for token in added if not token.special and token.content in template]
        marks = [token for token in written if _MARK.search(token.content)]
        normalizer = backend.backend_tokenizer.normalizer if getattr(backend, "is_fast", False) else None
        self._special = _Finder(special, normalizer)
        self._all = _Finder([*special, *marks], normalizer)

    def special_in(self, text: str) -> list[int]:
        return [
            self._backend.convert_tokens_to_ids(self._special.tokens[number].content)
            for _, _, number in self._special.spans(text)
        ]

    def literal_ids(self, text: str) -> list[int]:
        """Encode a part of a text, with control tokens in it as text; a `PromptError` if that cannot be done."""
        refuse_half_characters(text)
        token = self._all.first(text)
        if not token:
            return list(self._backend(text, verbose=False, add_special_tokens=False).input_ids)
        if not getattr(self._backend, "is_fast", False):
            raise PromptError(f"a text spells {token!r}, which {self._name!r} cannot keep as text; leave it out")
        return ids_of(self._copy, text)

    def marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, variables: Mapping[str, Any]
    ) -> MarkedChat | None:
        """A chat with marks around the control tokens that its texts spell; None if they spell none."""
        finders = [self._special if each.get("role") in _TRUSTED_MARKS else self._all for each in messages]
        texts: list[tuple[str, str, _Finder]] = []  # place, text, and its finder
        for place, (message, finder) in enumerate(zip(messages, finders, strict=True)):
            shown = {key: value for key, value in message.items() if key != "role"}
            texts += [(f"messages[{place}]", text, finder) for text in texts_in(shown)]
        texts += [("tools", text, self._all) for text in texts_in(tools)]
        texts += [("chat_template_kwargs", text, self._all) for text in texts_in(variables)]
        spans = {
            finder: finder.spans_of([text for _, text, its in texts if its is finder])
            for finder in (self._special, self._all)
        }
        typed_at = ((place, finder, spans[finder][text]) for place, text, finder in texts)
        found = next(((place, finder.tokens[at[0][2]].content) for place, finder, at in typed_at if at), None)
        joined = self._all.joined([text for _, text, _ in texts])
        if found is None and not joined:
            return None
        if found is None:
            found = next((where, part) for where, text, _ in texts for part in joined if text.lstrip().startswith(part))
        typed = set[str]().union(*(text for _, text, _ in texts))
        free = [chr(number) for number in _MARKS if chr(number) not in typed][:2]
        if len(free) < 2:
            raise PromptError(f"{found[0]} spells {found[1]!r} and all characters by which that could be marked")
        marks = free[0], free[1]

        def mark(finder: _Finder) -> Callable[[str], str]:
            return lambda text: _with_marks(text, spans[finder][text], joined, marks)

        return MarkedChat(
            [
                {key: value if key == "role" else _mapped(value, mark(finder)) for key, value in message.items()}
                for message, finder in zip(messages, finders, strict=True)
            ],
            None if tools is None else _mapped(list(tools), mark(self._all)),
            _mapped(dict(variables), mark(self._all)),
            marks,
            found,
        )

    def ids(self, rendered: str, chat: MarkedChat, refuse: Callable[[str], None]) -> list[int]:
        """Encode the rendered text of a marked chat; `refuse` is called with the text, and raises if it is too long."""
        place, token = chat.found
        refused = f"{place} spells {token!r}, a control token of {self._name!r}, "
        if not getattr(self._backend, "is_fast", False):
            raise PromptError(f"{refused}which has no tokenizer.json and so cannot keep it as text; leave it out")
        begin, end = chat.marks
        for mark in chat.marks:  # as templates write them that escape non-ASCII characters
            rendered = rendered.replace(json.dumps(mark)[1:-1], mark)
        pieces = re.split(f"([{begin}{end}])", rendered)
        named, whole = list[str](), "".join(pieces[::2])
        refuse(whole)
        spans_of = self._all.spans_of(pieces[::2])
        for number in range(0, len(pieces), 2):
            piece, before, after = pieces[number], pieces[number - 1 : number], pieces[number + 1 : number + 2]
            spans = spans_of[piece]
            opened = before == [begin] and any(first == 0 for first, _, _ in spans)
            closed = after == [end] and any(stop == len(piece) for _, stop, _ in spans)
            typed = opened and closed and len(spans) == 1
            if (opened or closed) and not typed:
                raise PromptError(f"{refused}where its chat template cuts the text apart; leave it out")
            named.append(piece if typed else self._named(piece, spans))
        expected = self._backend(whole, verbose=False, add_special_tokens=False).input_ids
        if ids_of(self._copy, self._named(whole, self._all.spans(whole))) != list(expected):
            raise PromptError(f"{refused}with a text that it cannot distinguish from the token; leave it out")
        return ids_of(self._copy, "".join(named))

    def _named(self, text: str, spans: Collection[tuple[int, int, int]]) -> str:
        parts, place = [], 0
        for first, end, number in spans:
            parts += [text[place:first], self._names[number]]
            place = end
        return "".join(parts) + text[place:]

    @cached_property
    def _names(self) -> list[str]:
        secret = "".join(chr(secrets.choice(_LARGE_AREA)) for _ in range(_SECRET_CHARACTERS))
        return [f"{secret}{chr(0xF0000 + number)}" for number in range(len(self._all.tokens))]

    @cached_property
    def _copy(self) -> Any:
        """The tokenizer with control tokens renamed to their secret names, and the same ids."""
        from tokenizers import Tokenizer as Backend

        described = json.loads(self._backend.backend_tokenizer.to_str())
        names = dict(zip((token.content for token in self._all.tokens), self._names, strict=True))
        described["truncation"] = described["padding"] = None
        for each in described["added_tokens"]:
            each["content"] = names.get(each["content"], each["content"])
        model = described["model"]
        vocab = model["vocab"]  # some of its pieces are control tokens wherever they are spelled
        if isinstance(vocab, dict):
            model["vocab"] = {names.get(piece, piece): number for piece, number in vocab.items()}
        else:
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
        if model.get("merges"):
            model["merges"] = [merge for merge in model["merges"] if not names.keys() & _merged(merge)]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        copy = Backend.from_str(json.dumps(described))
        ids = self._backend.get_vocab()
        moved = next((token for token, secret in names.items() if copy.token_to_id(secret) != ids[token]), None)
        if moved is not None:
            raise PromptError(f"the tokenizer {self._name!r} cannot read {moved!r} as text; leave it out")
        return copy


class _Finder:
    """Finds tokens in texts as a tokenizer does: the first, and among those at the same place the longest."""

    def __init__(self, tokens: Sequence[Any], normalizer: Any) -> None:
        self.tokens = list(tokens)
        self._normalizer = normalizer if any(token.normalized for token in tokens) else None
        hints = sorted({re.escape(token.content[:_HINT]) for token in tokens})
        self._hint = re.compile("|".join(hints) or r"(?!)")
        self._heads = _parts(tokens, lambda text, cut: text[:cut])
        self._tails = _parts(tokens, lambda text, cut: text[cut:])
        self._longest = max((len(token.content) for token in tokens), default=0)

    def spans(self, text: str) -> list[tuple[int, int, int]]:
        """First character, end and index of each token in a text."""
        return self.spans_of([text])[text]

    def spans_of(self, texts: Collection[str]) -> dict[str, list[tuple[int, int, int]]]:
        found: dict[str, list[tuple[int, int, int]]] = {text: [] for text in texts}
        sought = [text for text in found if self._normalizer is not None or self._hint.search(text)]
        for text, read in zip(sought, self._finder.encode_batch(sought) if sought else (), strict=True):
            found[text] = [(*span, number) for span, number in zip(read.offsets, read.ids, strict=True)]
        return found

    def first(self, text: str) -> str:
        spans = self.spans(text)
        return self.tokens[spans[0][2]].content if spans else ""

    def joined(self, texts: Sequence[str]) -> list[str]:
        """Tails of tokens at the beginning of a text, if another text ends with the head; the longest first."""
        heads = frozenset[int]().union(*(self._edges(text.rstrip()[::-1], self._heads, -1) for text in texts))
        tails = [
            tail
            for text in texts
            if heads & self._edges(text.lstrip(), self._tails, 1)
            for cut in range(self._longest, 0, -1)
            if heads & self._tails.get(tail := text.lstrip()[:cut], frozenset())
        ]
        return sorted(set(tails), key=len, reverse=True)

    def _edges(self, text: str, parts: Mapping[str, frozenset[int]], step: int) -> frozenset[int]:
        edge = text[: self._longest]
        return frozenset[int]().union(*(parts.get(edge[:cut][::step], frozenset()) for cut in range(1, len(edge) + 1)))

    @cached_property
    def _finder(self) -> Any:
        from tokenizers import AddedToken, models
        from tokenizers import Tokenizer as Backend

        backend = Backend(models.BPE())
        if self._normalizer is not None:
            backend.normalizer = self._normalizer
        backend.add_tokens(
            [AddedToken(each.content, normalized=each.normalized, single_word=each.single_word) for each in self.tokens]
        )
        return backend


def _parts(tokens: Sequence[Any], part: Callable[[str, int], str]) -> dict[str, frozenset[int]]:
    """Indices of tokens by each of their proper prefixes, or suffixes."""
    found: dict[str, set[int]] = {}
    for number, token in enumerate(tokens):
        for cut in range(1, len(token.content)):
            found.setdefault(part(token.content, cut), set()).add(number)
    return {text: frozenset(numbers) for text, numbers in found.items()}


def _merged(merge: str | Sequence[str]) -> set[str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return {left, right, left + right}


def _with_marks(text: str, spans: Sequence[tuple[int, int, int]], joined: Sequence[str], marks: tuple[str, str]) -> str:
    begin, end = marks
    parts, place = list[str](), 0
    blank = len(text) - len(text.lstrip())
    tail = next((each for each in joined if text.startswith(each, blank)), "")
    if tail and not (spans and spans[0][0] < blank + len(tail)):
        spans = [(blank, blank + len(tail), -1), *spans]
    for first, stop, _ in spans:
        parts += [text[place:first], begin, text[first:stop], end]
        place = stop
    return "".join(parts) + text[place:]


def ids_of(backend: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Encode with a tokenizer of the tokenizers library. Only this call lets other threads run at the same time."""
    return list(backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from texts_in(key)
            yield from texts_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_in(each)


def refuse_half_characters(text: str) -> None:
    """Refuse a lone surrogate, which no tokenizer accepts, by a `PromptError` with its place."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = error.start
        half = f"a text has half a character (a lone surrogate, U+{ord(text[place]):04X}) at place {place}"
        raise PromptError(f'{half}; read its bytes with errors="replace"') from error


def _mapped(value: _Value, change: Callable[[str], str]) -> _Value:
    made: Any = value
    if isinstance(value, str):
        made = change(value)
    elif isinstance(value, Mapping):
        made = {_mapped(key, change): _mapped(each, change) for key, each in value.items()}
    elif isinstance(value, list | tuple):
        made = [_mapped(each, change) for each in value]
    return made
