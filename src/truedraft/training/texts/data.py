"""Texts for training whole models: files, streams of ids on disk, and blocks of these."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from truedraft.errors import DataError, MissingExtraError, TrainingError, first_line
from truedraft.files import json_in, text_of, written_whole
from truedraft.models.loading import quiet_transformers
from truedraft.training.loop import Phase
from truedraft.training.optimizer import WarmupStableDecay
from truedraft.training.texts.chats import FIELDS, ChatTexts

_HUB = "hf:"
_SAVED = ("dataset_info.json", "dataset_dict.json")  # in folders saved by `datasets`
_AS_TEXT = "rename it to .txt to train on it as it stands"


def read_texts(paths: Iterable[Path], tokenizer: Any | None = None) -> list[str]:
    """The documents of all files, in order.

    Args:
        paths: a `.jsonl` file has one document on each line, a `.json` file is an array of them, any other file is one.
            Documents are objects with "text", or chats: objects with "messages" (OpenAI's) or "conversations"
            (ShareGPT's), or lists of messages. Rows of a dataset of the `datasets` library are such objects: a folder
            that it saved or can read, or `hf:NAME` on the hub; after `#` its split, else "train".
        tokenizer: from transformers; its chat template formats chats. None refuses them.

    Raises:
        DataError: a file cannot be read, or an entry is neither; names it.
    """
    chats = ChatTexts(tokenizer)
    return _some([_text_of(*each, chats) for path in paths for each in _entries_of(path)])


def read_data(paths: Iterable[Path], tokenizer: Any, *, empty: bool = False) -> tuple[list[str], list[list[int]]]:
    """Texts, and prompts for the target to answer, of all files, in order.

    Prompts are objects with "prompt", as a user's message where the tokenizer has a chat template, and chats with a
    last message that is not the assistant's. Raises DataError as `read_texts`, or for another prompt.
    """
    chats, texts, prompts = ChatTexts(tokenizer), [], []
    for entry, place in (each for path in paths for each in _entries_of(path)):
        prompt = chats.prompt(entry, place)
        if prompt is None:
            texts.append(_text_of(entry, place, chats))
        else:
            prompts.append(prompt)
    return texts if prompts or empty else _some(texts), prompts


def _some(texts: list[str]) -> list[str]:
    if not any(text.strip("\0").strip() for text in texts):
        raise DataError("the training data holds no text: give at least one file that is not empty")
    return texts


def _entries_of(path: Path) -> Iterator[tuple[object, str]]:
    """Each document or prompt of a file, plain text as a string, with its place for errors."""
    name, _, split = str(path).partition("#")
    if name.startswith(_HUB) or Path(name).is_dir():
        for number, row in enumerate(_rows(name.removeprefix(_HUB), split or "train"), start=1):
            yield dict(row), f"{path}, row {number}"
        return
    content = _content(path)
    if path.suffix == ".jsonl":
        for number, line in enumerate(content.split("\n"), start=1):
            if line.strip():
                place = f"{path}, line {number}"
                yield json_in(line, place, "a .jsonl file has an object a line"), place
    elif path.suffix == ".json":
        for number, entry in enumerate(_entries(content, path), start=1):
            yield entry, f"{path}, entry {number}"
    else:
        yield content, str(path)


def _rows(name: str, split: str) -> Iterable[Any]:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(
            f"the dataset {name!r} needs the library datasets: pip install 'truedraft[train]'; or give .jsonl files"
        ) from error
    try:
        saved = any((Path(name) / mark).is_file() for mark in _SAVED)
        if not saved:
            return datasets.load_dataset(name, split=split)
        found = datasets.load_from_disk(name)
        return found[split] if isinstance(found, datasets.DatasetDict) else found
    except KeyError as error:
        raise DataError(
            f"the dataset {name!r} has no split {split!r}; name one behind #: {', '.join(found)}"
        ) from error
    except Exception as error:  # any error of the library's file readers
        raise DataError(f"cannot read the dataset {name!r} ({first_line(error)}); check name and split") from error


def _content(path: Path) -> str:
    content = text_of(path, "data file")
    if "\0" in content:
        place = content.index("\0")
        raise DataError(
            f"the data file {path} holds a NUL character (the first at place {place + 1}), so it is no plain text: "
            "convert it, or leave it out"
        )
    return content


def _entries(content: str, path: Path) -> list[Any]:
    """The entries of a `.json` file; one chat that is the whole file is one entry."""
    found = json_in(content, str(path), _AS_TEXT) if content.strip() else []
    if not isinstance(found, list):
        raise DataError(f"{path}: a .json file of training data is an array of texts or chats; {_AS_TEXT}")
    is_one_chat = found and all(isinstance(each, dict) and ("role" in each or "from" in each) for each in found)
    return [found] if is_one_chat else found


def _text_of(entry: object, place: str, chats: ChatTexts) -> str:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        return str(entry["text"])
    if isinstance(entry, list) or (isinstance(entry, dict) and any(name in entry for name in FIELDS)):
        return chats.text(entry, place)
    raise DataError(
        f'{place}: the object has no "text" field that is a string, nor the "messages" or "conversations" of a chat; '
        "add one"
    )


class Encoder(Protocol):
    """The part of a tokenizer that packing needs."""

    eos_token_id: int

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


def as_stream(texts: Iterable[str], tokenizer: Encoder, answers: Iterable[Sequence[int]] = ()) -> NDArray[np.uint32]:
    """All tokens of texts, and of answers in ids: `<eos> text <eos> text ...`."""
    pieces = [np.zeros(0, dtype=np.uint32)]
    with quiet_transformers():  # it warns of long texts, which are cut into blocks
        encoded = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
        for ids in itertools.chain(encoded, answers):
            pieces += [np.array([tokenizer.eos_token_id, *ids], dtype=np.uint32)]
    return np.concatenate(pieces)


def write_stream(texts: Iterable[str], tokenizer: Encoder, path: Path, answers: Iterable[Sequence[int]] = ()) -> int:
    """Write `<eos> text <eos> text ... <eos>` as uint32 ids; returns the number of tokens."""
    stream = np.append(as_stream(texts, tokenizer, answers), np.uint32(tokenizer.eos_token_id))
    if len(stream) == 1:
        raise DataError("the training data holds no text: give at least one file that is not empty")
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as file:
        file.write(stream.data)
    return len(stream)


def read_stream(path: Path) -> NDArray[np.uint32]:
    """The ids of `write_stream`, mapped from disk rather than read."""
    return np.memmap(path, dtype=np.uint32, mode="r")


def stream_hash(stream: NDArray[np.uint32]) -> str:
    """The sha256 of the ids, which identifies the data of a run."""
    return hashlib.sha256(np.ascontiguousarray(stream).tobytes()).hexdigest()


@dataclass(frozen=True)
class BlockSampler:
    """Blocks of one length from a stream: a pure function of an index, so that resuming needs no state.

    In each epoch the stream is cut at a new random offset and the blocks are in a new random order. Inputs are
    `block[:-1]`, labels `block[1:]`.
    """

    stream: NDArray[np.uint32]
    sequence_length: int
    seed: int

    def __post_init__(self) -> None:
        if self.blocks_per_epoch < 1:
            raise DataError(
                f"the data has {len(self.stream)} tokens, fewer than the {2 * self.sequence_length + 1} "
                f"that blocks of {self.sequence_length} need: give more text or a shorter sequence length"
            )

    @property
    def blocks_per_epoch(self) -> int:
        """Whole blocks that fit after the largest offset."""
        return max(0, (len(self.stream) - self.sequence_length - 1) // self.sequence_length)

    def batch(self, first: int, count: int) -> torch.Tensor:
        """Int64 `[count, sequence_length + 1]`."""
        rows = [self._block(index) for index in range(first, first + count)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _block(self, index: int) -> NDArray[np.uint32]:
        epoch, position = divmod(index, self.blocks_per_epoch)
        offset, order = self._epoch(epoch)
        start = offset + int(order[position]) * self.sequence_length
        return self.stream[start : start + self.sequence_length + 1]

    def _epoch(self, epoch: int) -> tuple[int, NDArray[np.int64]]:
        random = np.random.default_rng((self.seed, epoch))
        offset = int(random.integers(self.sequence_length))
        return offset, random.permutation(self.blocks_per_epoch)


@dataclass(frozen=True)
class Curriculum:
    """Lengths of sequences (short ones in the stable phase, long ones in the decay) and sizes of batches, in tokens."""

    stable_length: int = 512
    decay_length: int = 2048
    tokens_per_step: int = 4096
    tokens_per_pass: int = 4096  # of one forward pass; the rest is accumulated

    def __post_init__(self) -> None:
        for length in (self.stable_length, self.decay_length):
            if length < 1 or self.tokens_per_step % length:
                raise TrainingError(
                    f"tokens_per_step ({self.tokens_per_step}) must be a multiple of the sequence length ({length})"
                )

    def fitting(self, context: int) -> Curriculum:
        """The same with sequences no longer than a model's context; they still divide a step and a pass."""
        unit = math.gcd(self.tokens_per_step, min(self.tokens_per_pass, self.tokens_per_step))
        longest = next(length for length in range(min(context, unit), 0, -1) if unit % length == 0)
        return replace(
            self,
            stable_length=self.stable_length if self.stable_length <= context else longest,
            decay_length=self.decay_length if self.decay_length <= context else longest,
        )

    def phases(self, stream: NDArray[np.uint32], schedule: WarmupStableDecay, *, seed: int) -> list[Phase]:
        parts = [
            (schedule.stable_steps, self.stable_length, 2 * seed),
            (schedule.decay_steps, self.decay_length, 2 * seed + 1),
        ]
        return [self._phase(stream, steps, length, seed=seed) for steps, length, seed in parts if steps]

    def _phase(self, stream: NDArray[np.uint32], steps: int, length: int, *, seed: int) -> Phase:
        return Phase(
            steps=steps,
            sampler=BlockSampler(stream, length, seed),
            sequences_per_step=self.tokens_per_step // length,
            sequences_per_pass=max(1, min(self.tokens_per_pass, self.tokens_per_step) // length),
        )
