"""The meaning of a tokenizer's ids, in a form that can be compared with another tokenizer's."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True)
class Vocabulary:
    """The ids of one tokenizer.

    Properties that do not change the meaning of ids are left out: which token begins, ends or pads a text (a base model
    and its chat-tuned sibling differ there), templates, truncation, and how text is split before merging.

    Attributes:
        tokens: by id, added tokens included.
        kind: the algorithm (BPE, Unigram, ...).
        rules: in order: merges, or the scores of the pieces.
        added: ids of the tokens that are matched as a whole before merging, special ones included.
        special: ids that decoding drops.
        byte_fallback: whether tokens such as `<0x0A>` are decoded as bytes.
    """

    tokens: dict[int, str]
    kind: str
    rules: tuple[str, ...]
    added: frozenset[int]
    special: frozenset[int]
    byte_fallback: bool

    @classmethod
    def of(cls, backend: Any) -> Vocabulary:
        ids = cls.without_rules(backend)
        if not backend.is_fast:  # its rules have another format; only its ids are compared
            return ids
        kind, rules = _rules(json.loads(backend.backend_tokenizer.to_str())["model"])
        return replace(ids, kind=kind, rules=rules)

    @classmethod
    def without_rules(cls, backend: Any) -> Vocabulary:
        """The vocabulary without kind and rules, which are slow to read."""
        tokens = {number: token for token, number in backend.get_vocab().items()}
        added = {number: token for number, token in backend.added_tokens_decoder.items() if number >= 0}
        tokens.update({number: token.content for number, token in added.items()})
        special = {number for number, token in added.items() if token.special}
        if not backend.is_fast:
            special |= set(backend.all_special_ids)
            fallback = any(_BYTE_TOKEN.fullmatch(token) for token in tokens.values())
            return cls(tokens, "slow", (), frozenset(added), frozenset(special), fallback)
        decoder = backend.backend_tokenizer.decoder
        fallback = decoder is not None and holds_type(json.loads(decoder.__getstate__()), "ByteFallback")
        return cls(tokens, "", (), frozenset(added), frozenset(special), fallback)

    def __len__(self) -> int:
        return max(self.tokens, default=-1) + 1

    @property
    def holes(self) -> frozenset[int]:
        return frozenset() if len(self.tokens) == len(self) else frozenset(range(len(self))) - self.tokens.keys()

    @property
    def byte_values(self) -> dict[int, int]:
        """By id the byte of each token that decodes to one raw byte."""
        if not self.byte_fallback:
            return {}
        return {number: int(token[3:5], 16) for number, token in self.tokens.items() if _BYTE_TOKEN.fullmatch(token)}

    @property
    def fingerprint(self) -> str:
        """A hash over tokens, kind, rules and added tokens, as hexadecimal digits."""
        digest = hashlib.sha256(f"truedraft vocabulary 1\n{self.kind}\n".encode())
        for part in (sorted(self.tokens.items()), self.rules, sorted(self.added)):
            digest.update(json.dumps(part).encode() + b"\n")
        return digest.hexdigest()

    def difference(self, other: Vocabulary, name: str, other_name: str) -> str:
        """One sentence on where the two first differ; empty if they do not."""
        for number in sorted(self.tokens.keys() | other.tokens.keys()):
            mine, theirs = self.tokens.get(number), other.tokens.get(number)
            if mine != theirs:
                return f"id {number} is {_shown(mine)} in {name!r} and {_shown(theirs)} in {other_name!r}"
        if self.kind != other.kind:
            return f"all ids agree, but {name!r} is a {self.kind} tokenizer and {other_name!r} a {other.kind} one"
        for number in sorted(self.added ^ other.added):
            whole, cut = (name, other_name) if number in self.added else (other_name, name)
            return f"id {number} ({self.tokens[number]!r}) is always one token in {whole!r} and may be cut in {cut!r}"
        for place, (mine, theirs) in enumerate(zip(self.rules, other.rules, strict=False)):
            if mine != theirs:
                return f"all ids agree, but rule {place} is {mine!r} in {name!r} and {theirs!r} in {other_name!r}"
        if len(self.rules) != len(other.rules):
            return f"all ids agree, but {name!r} has {len(self.rules)} rules and {other_name!r} has {len(other.rules)}"
        return ""


def _shown(token: str | None) -> str:
    return "absent" if token is None else repr(token)


def _rules(model: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The kind and the rules of a model, in one format for all versions of the file format."""
    kind = str(model.get("type") or ("BPE" if "merges" in model else "WordLevel"))
    if kind == "BPE":  # a merge is "a b" in old files and ["a", "b"] in new ones
        merges = model.get("merges") or []
        return kind, tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in merges)
    if kind == "Unigram":
        return kind, tuple(f"{piece} {score!r}" for piece, score in model["vocab"])
    return kind, ()


def holds_type(described: object, wanted: str) -> bool:
    """Whether a part of a tokenizer, or a part inside it, has the type."""
    if isinstance(described, dict):
        return described.get("type") == wanted or any(holds_type(part, wanted) for part in described.values())
    return isinstance(described, list) and any(holds_type(part, wanted) for part in described)
