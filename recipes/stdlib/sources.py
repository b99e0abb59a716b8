"""Which files of the standard library make the corpus, the manifest that pins them, and the held-out prompts.

These are 32 pieces of 96 tokens, each from another held-out file.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from truedraft.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedTokenizerBase

PYTHON_VERSION = "3.11.7"
MANIFEST = Path(__file__).parent / "manifest.json"

COUNT = 32
TOKENS = 96
_FOLLOWING_TOKENS = 64  # the file goes on for at least this long after the prompt, so it ends inside code
_START = re.compile(r"^(?:class|def|    def|async def|    async def|@|    @)", re.MULTILINE)


@dataclass(frozen=True)
class Source:
    path: str
    text: str
    sha256: str
    held_out: bool


def load_sources(manifest: Path = MANIFEST, folder: Path | None = None) -> list[Source]:
    """The corpus, after checking the interpreter's version and every file against the manifest."""
    pinned = json.loads(manifest.read_text())
    if folder is None and platform.python_version() != pinned["python"]:
        raise DataError(
            f"this recipe is pinned to the standard library of Python {pinned['python']}, "
            f"but this is Python {platform.python_version()}: run it with that version"
        )
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    files = {name: path.read_bytes() for name in pinned["sha256"] if (path := root / name).is_file()}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    expected = pinned["sha256"]
    differing = sorted(name for name in expected if expected[name] != hashes.get(name))
    if differing:
        raise DataError(
            f"{len(differing)} files of the standard library differ from the manifest "
            f"(first: {differing[0]}): use an unmodified Python {pinned['python']}"
        )
    held_out = set(pinned["held_out"])
    return [Source(name, content.decode(), hashes[name], name in held_out) for name, content in sorted(files.items())]


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
