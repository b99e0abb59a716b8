"""A tokenizer for Markov tables, so that their answers have texts and stop texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby


class Letters:
    """Token i is the i-th of the given texts; "a", "b", ... where none are given.

    Args:
        vocab_size: token ids that exist.
        texts: of the tokens: "" of a special token, one byte of a token of a byte; a run of such is decoded together,
            and one bad byte makes U+FFFD of all of them.
    """

    def __init__(self, vocab_size: int, texts: Sequence[str | bytes] | None = None) -> None:
        self.vocab_size = vocab_size
        self.texts = texts if texts is not None else [chr(ord("a") + token) for token in range(vocab_size)]
        self.skipped_ids = frozenset(token for token, text in enumerate(self.texts) if not text)
        self.byte_values: Mapping[int, int] = {
            token: text[0] for token, text in enumerate(self.texts) if isinstance(text, bytes)
        }

    def decode(self, ids: Sequence[int]) -> str:
        whole = ""
        for are_bytes, run in groupby((token for token in ids if self.texts[token]), self.byte_values.__contains__):
            if not are_bytes:
                whole += "".join(str(self.texts[token]) for token in run)
                continue
            read = bytes(self.byte_values[token] for token in run)
            try:
                whole += read.decode()
            except UnicodeDecodeError:
                whole += "\ufffd" * len(read)
        return whole
