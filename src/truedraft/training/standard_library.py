"""Prompts for the embedded target, which continues Python: from the standard library of the running interpreter.

The files from which the shipped held-out prompts were cut are not trained on. The tree is chosen on other places of
those files, and acceptance is measured on the shipped prompts themselves.
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from truedraft.embedded import heldout_prompts_file
from truedraft.errors import DataError
from truedraft.training.prompts import PromptCounts, PromptSets, as_stream, cut_prompts, split_prompts

if TYPE_CHECKING:
    from truedraft.training.blocks import Encoder

_SKIPPED = ("site-packages/", "dist-packages/", "ensurepip/_bundled/", "lib2to3/tests/data/", "test/bad", "encodings/")


def standard_library_prompts(tokenizer: Encoder, counts: PromptCounts, length: int) -> PromptSets:
    """Prompts for training, tree and test of drafters of the embedded target.

    Args:
        tokenizer: of the embedded target.
        counts: how many prompts of each side.
        length: tokens of a prompt of the first two sides.

    Raises:
        DataError: this interpreter comes without the sources of its standard library.
    """
    shipped = shipped_prompts()
    names = {str(record["file"]) for record in shipped}
    library = _library()
    texts = [text for name, text in library.items() if name not in names]
    if not texts:
        raise DataError(
            "this Python comes without the sources of its standard library, which the prompts for the embedded target "
            "are cut from; name text of your own with --data FILE"
        )
    pieces = [str(record["text"]) for record in shipped]
    held_out = [part for name in sorted(names) if name in library for part in without_pieces(library[name], pieces)]
    if not held_out:  # another Python, which lacks those files
        return split_prompts(texts, (), tokenizer, counts, length)
    test = [tokenizer.encode(piece, add_special_tokens=False) for piece in pieces[: counts.test]]
    return PromptSets(
        cut_prompts(texts, tokenizer, counts.train, length),
        cut_prompts(held_out, tokenizer, counts.tree, length),
        test,
        as_stream(held_out, tokenizer),
        source="Python's standard library",
    )


def shipped_prompts() -> list[dict[str, object]]:
    """The shipped held-out prompts, with the files they come from."""
    path = heldout_prompts_file()
    if not path.is_file():
        raise DataError(
            "the held-out prompts are not part of this installation; name text of your own with --data FILE"
        )
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _library() -> dict[str, str]:
    """The sources of the running interpreter's standard library by their path in it; generated ones left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(_SKIPPED):
            try:
                found[name] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # the library tests how such files are refused
    return found


def without_pieces(text: str, pieces: list[str]) -> list[str]:
    """What is left of a text when the pieces are taken out."""
    parts = [text]
    for piece in pieces:
        parts = [part for whole in parts for part in whole.split(piece)]
    return [part for part in parts if part.strip()]
