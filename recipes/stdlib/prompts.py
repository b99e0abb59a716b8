"""Cut the held-out prompts: 32 pieces of 96 tokens, each from another held-out file."""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING

from truedraft.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from recipes.stdlib.sources import Source

COUNT = 32
TOKENS = 96
_FOLLOWING_TOKENS = 64  # the file goes on for at least this long after the prompt, so it ends inside code
_START = re.compile(r"^(?:class|def|    def|async def|    async def|@|    @)", re.MULTILINE)


def write_prompts(sources: Iterable[Source], tokenizer: PreTrainedTokenizerBase, path: Path) -> int:
    found: list[dict[str, object]] = []
    for source in sorted(sources, key=lambda source: source.sha256):
        text = _piece(source, tokenizer)
        if text is not None and len(found) < COUNT:
            found.append({"id": len(found), "file": source.path, "text": text, "n_tokens": TOKENS})
    if len(found) < COUNT:
        raise DataError(f"only {len(found)} held-out files are long enough for a prompt; {COUNT} are needed")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in found))
    return len(found)


def _piece(source: Source, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The first 96 tokens from the start of a definition, chosen among all of the file by its hash.

    The cut text must encode to just those tokens again, or the next start is tried. A file without a
    definition is cut at its beginning.
    """
    starts = [match.start() for match in _START.finditer(source.text)] or [0]
    turn = int(hashlib.sha256(source.path.encode()).hexdigest(), 16) % len(starts)
    for start in [*starts[turn:], *starts[:turn], 0]:
        window = source.text[start : start + 16 * (TOKENS + _FOLLOWING_TOKENS)]
        ids = tokenizer.encode(window, add_special_tokens=False)
        if len(ids) < TOKENS + _FOLLOWING_TOKENS:
            continue
        text = tokenizer.decode(ids[:TOKENS])
        if tokenizer.encode(text, add_special_tokens=False) == ids[:TOKENS] and window.startswith(text):
            return text
    return None
