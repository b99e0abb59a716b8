"""Prompts cut from texts for the target to continue, so that drafters learn from its own answers.

For the embedded target they come from the standard library of the running interpreter, except from the files of the
shipped held-out prompts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from truedraft.errors import DataError
from truedraft.models.embedded import heldout_prompts_file
from truedraft.models.loading import quiet_transformers
from truedraft.training.texts.data import Encoder, as_stream

_SKIPPED = ("site-packages/", "dist-packages/", "ensurepip/_bundled/", "lib2to3/tests/data/", "test/bad", "encodings/")
_CHARACTERS_PER_TOKEN = 16  # encoded to get one token of a prompt; only unusual texts need more
_MOST_HELD_OUT = 0.2  # of texts and prompts
_FEW = 16  # held-out prompts: with fewer answers the figures are noise


@dataclass(frozen=True)
class PromptSets:
    """Prompts as token ids, in three parts that share no text; DataError if a part is empty."""

    train: Sequence[Sequence[int]]
    tree: Sequence[Sequence[int]]  # for choosing trees and for measuring accuracy during training
    test: Sequence[Sequence[int]]
    text: NDArray[np.uint32]  # held-out text in the target's ids: stage 2 reports the target's own loss on it
    apart: int | None = None  # approximate number of `train` that share no text; None is all of them
    source: str = ""  # a description of what the held-out prompts were cut from; empty where unknown

    @property
    def promised_on(self) -> str:
        source = f" from {self.source}" if self.source else ""
        return f"the target's answers to {len(self.tree)} held-out prompts{source}"

    def __post_init__(self) -> None:
        uses = {"train": "train on", "tree": "choose the tree on", "test": "measure the acceptance on"}
        for name, use in uses.items():
            if not any(len(prompt) for prompt in getattr(self, name)):
                raise DataError(f"there are no prompts to {use}: give more text")


@dataclass(frozen=True)
class PromptCounts:
    """The number of prompts of each part."""

    train: int
    tree: int
    test: int

    @property
    def held_out(self) -> int:
        return self.tree + self.test


def split_prompts(
    texts: Sequence[str],
    held_out: Sequence[str],
    tokenizer: Encoder,
    counts: PromptCounts,
    length: int,
    *,
    prompts: Sequence[Sequence[int]] = (),
    held_out_prompts: Sequence[Sequence[int]] = (),
) -> PromptSets:
    """Cut all three parts from texts, or take them from prompts; half of each where there are both.

    Args:
        held_out: for tree and test, half each; if empty, the last of `texts` are held out.
        length: tokens of a prompt, where its text is long enough.
        prompts: token ids, for training as they are.
        held_out_prompts: token ids, for tree and test; without any held-out data, the first of `prompts`.

    Raises DataError for too little text.
    """
    if not held_out and not held_out_prompts:
        share = min(_MOST_HELD_OUT, counts.held_out / (counts.train + counts.held_out))
        texts, held_out = keep_back(texts, share)
        few = min(_FEW, counts.held_out, _MOST_HELD_OUT * len(prompts))
        kept = math.ceil(max(few, share * len(prompts)))
        prompts, held_out_prompts = prompts[kept:], prompts[:kept]
    tree_texts, test_texts = _divide(held_out, sum(map(len, held_out)) * counts.tree // counts.held_out)
    middle = len(held_out_prompts) * counts.tree // counts.held_out
    sides = (texts, prompts, counts.train), (tree_texts, held_out_prompts, counts.tree)
    train, tree, test = (
        cut_prompts(side, tokenizer, count // 2 if own else count, length)
        for side, own, count in (*sides, (test_texts, held_out_prompts, counts.test))
    )
    whole = [*train, *prompts[: counts.train - len(train)]]
    return PromptSets(
        whole,
        [*tree, *held_out_prompts[:middle][: counts.tree - len(tree)]],
        [*test, *held_out_prompts[middle:][: counts.test - len(test)]],
        np.concatenate([as_stream(held_out, tokenizer), *(np.array(ids, np.uint32) for ids in held_out_prompts)]),
        _separate(train, texts, tokenizer) + len(whole) - len(train),
    )


def cut_prompts(texts: Sequence[str], tokenizer: Encoder, count: int, length: int) -> list[list[int]]:
    """Up to `count` pieces of up to `length` tokens, evenly over the texts, each from the start of a line.

    A piece at the end of its text may be shorter; equal pieces are taken once.
    """
    ends = list(itertools.accumulate(len(text) for text in texts))
    found: dict[tuple[int, ...], None] = {}
    with quiet_transformers():
        for number in range(count):
            place = number * ends[-1] // count if ends else 0
            which = int(np.searchsorted(ends, place, side="right"))
            if which == len(texts):
                break
            text = texts[which]
            start = text.rfind("\n", 0, place - (ends[which] - len(text))) + 1
            ids = tokenizer.encode(text[start : start + _CHARACTERS_PER_TOKEN * length], add_special_tokens=False)
            if ids:
                found[tuple(ids[:length])] = None
    return [list(ids) for ids in found]


def shuffled(prompts: Sequence[Sequence[int]], seed: int) -> list[Sequence[int]]:
    """The prompts in random order, so that the first of them come from all over the texts."""
    return [prompts[place] for place in np.random.default_rng(seed).permutation(len(prompts))]


def prompts_hash(prompts: Sequence[Sequence[int]]) -> str:
    """The sha256 of prompts, which identifies the data of a run."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(np.array([len(prompt), *prompt], dtype=np.uint32).tobytes())
    return digest.hexdigest()


def _separate(prompts: Sequence[Sequence[int]], texts: Sequence[str], tokenizer: Encoder) -> int:
    """The approximate number of prompts that share no text; fewer than all where the texts are short."""
    together = sum(map(len, prompts))
    if sum(map(len, texts)) >= _CHARACTERS_PER_TOKEN * together:
        return len(prompts)
    return min(len(prompts), len(prompts) * (len(as_stream(texts, tokenizer)) - len(texts)) // max(1, together))


def keep_back(texts: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """Split texts: the first for training, and the last, a fraction `share`, held out."""
    return _divide(texts, int(sum(map(len, texts)) * (1 - share)))


def _divide(texts: Sequence[str], place: int) -> tuple[list[str], list[str]]:
    """Texts before and after a character of all of them, cut at the start of a line."""
    before: list[str] = []
    after: list[str] = []
    for text in texts:
        if place >= len(text):
            before.append(text)
        elif place <= 0:
            after.append(text)
        else:
            cut = text.rfind("\n", 0, place) + 1 or place
            before.append(text[:cut])
            after.append(text[cut:])
        place -= len(text)
    return before, after


def standard_library_prompts(tokenizer: Encoder, counts: PromptCounts, length: int) -> PromptSets:
    """All prompts of the embedded target; DataError without the sources of the standard library."""
    library = _library()
    texts, pieces = standard_library_texts(library)
    names = {str(record["file"]) for record in shipped_prompts()}
    held_out = [part for name in sorted(names) if name in library for part in without_pieces(library[name], pieces)]
    if not held_out:  # another Python version, without those files
        return split_prompts(texts, (), tokenizer, counts, length)
    test = [tokenizer.encode(piece, add_special_tokens=False) for piece in pieces[: counts.test]]
    return PromptSets(
        cut_prompts(texts, tokenizer, counts.train, length),
        cut_prompts(held_out, tokenizer, counts.tree, length),
        test,
        as_stream(held_out, tokenizer),
        source="Python's standard library",
    )


def standard_library_texts(library: Mapping[str, str] | None = None) -> tuple[list[str], list[str]]:
    """Training texts of the embedded target, and the shipped prompts; DataError without sources."""
    shipped = shipped_prompts()
    names = {str(record["file"]) for record in shipped}
    texts = [text for name, text in (_library() if library is None else library).items() if name not in names]
    if not texts:
        raise DataError(
            "this Python comes without the sources of its standard library, which drafters of the embedded target "
            "learn from; name text of your own with --data FILE"
        )
    return texts, [str(record["text"]) for record in shipped]


def shipped_prompts() -> list[dict[str, object]]:
    """The shipped held-out prompts, with the files they come from."""
    return [json.loads(line) for line in heldout_prompts_file().read_text(encoding="utf-8").splitlines()]


def _library() -> dict[str, str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(_SKIPPED):
            try:
                found[name] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a test file of the library that must not decode
    return found


def without_pieces(text: str, pieces: list[str]) -> list[str]:
    """A text without the pieces."""
    parts = [text]
    for piece in pieces:
        parts = [part for whole in parts for part in whole.split(piece)]
    return [part for part in parts if part.strip()]
