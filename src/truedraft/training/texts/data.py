"""Texts for training whole models: files, chats in them, streams of ids on disk, blocks of these, and the tokenizer."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from truedraft.errors import DataError, MissingExtraError, ModelError, PromptError, TrainingError, first_line
from truedraft.files import json_in, text_of, written_whole
from truedraft.models.loading import load_config, quiet_transformers, resolve_source
from truedraft.text.histories import HistoryForm
from truedraft.text.notations import notation_of
from truedraft.text.tokenizer import Tokenizer
from truedraft.training.loop import Phase
from truedraft.training.optimizer import WarmupStableDecay

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "tool": "tool",
}  # fmt: skip
"""Maps the role names of OpenAI's and ShareGPT's messages."""
FIELDS = ("messages", "conversations")
_Written = TypeVar("_Written")


def ids_by_frequency(tokens: NDArray[Any], least: int) -> list[int]:
    """Token ids from the most frequent of a text down, equal ones by id; at least so many, with ids not in the text.

    >>> ids_by_frequency(np.array([4, 1, 4]), 3)
    [4, 1, 0, 2, 3]
    """
    counts = np.bincount(tokens, minlength=least)
    return [int(each) for each in np.argsort(-counts, kind="stable")]


class ChatTexts:
    """Formats chats with the chat template of a tokenizer from transformers; None refuses all chats."""

    def __init__(self, backend: Any | None) -> None:
        name = getattr(backend, "name_or_path", "") or "the model"
        self._tokenizer = None if backend is None else Tokenizer(backend, name)

    @cached_property
    def _form(self) -> HistoryForm:
        assert self._tokenizer is not None
        return HistoryForm.of(self._tokenizer.conversation_text)

    def text(self, record: Sequence[Any] | Mapping[str, Any], place: str) -> str:
        """The text of a chat at `place`: messages, or an object with them as "messages" or "conversations".

        The object may have "system" and "tools". DataError if it is no chat, or without a template that takes it.
        """
        return self._written(record, place, Tokenizer.conversation_text)

    def prompt(self, record: object, place: str) -> list[int] | None:
        """Ids of a prompt: an object with "prompt", or a chat that ends with a question; None for a document.

        "prompt" is a user's message where there is a chat template, otherwise a text to continue; or token ids.
        DataError as in `text`, or for an empty or other prompt.
        """
        if isinstance(record, Mapping) and "prompt" in record and "text" not in record:
            content = record["prompt"]
            if content and isinstance(content, list) and all(type(token) is int for token in content):
                return content
            if not isinstance(content, str) or not content.strip():
                raise DataError(f'{place}: "prompt" must be a text that is not empty, or a list of token ids')
            if self._tokenizer is not None and not self._tokenizer.chat_template:
                return self._tokenizer.encode(content)
            record = [{"role": "user", "content": content}]
        messages = _messages_of(record)
        last = messages[-1] if isinstance(messages, list) and messages else None
        role = last.get("role", last.get("from")) if isinstance(last, Mapping) else None
        if not isinstance(role, str) or ROLES.get(role, "assistant") == "assistant":
            return None
        return self._written(record, place, Tokenizer.chat)

    def _written(self, record: Any, place: str, write: Callable[..., _Written]) -> _Written:
        if self._tokenizer is None or not self._tokenizer.chat_template:
            raise DataError(
                f"{place}: a chat, and there is no chat template to write it by; give texts, or train for a model that "
                "has one"
            )
        more: Mapping[str, Any] = record if isinstance(record, Mapping) else {}
        given = _messages_of(record)
        if not isinstance(given, list) or not given:
            raise DataError(f"{place}: the messages of a chat are a list of at least one, got {_shown(given)}")
        try:
            messages = [_message(turn, f"{place}, message {number}") for number, turn in enumerate(given, start=1)]
            if isinstance(more.get("system"), str) and more["system"] and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": more["system"]})
            tools = self._form.tools(_read(more.get("tools")) or ())
            fitted = self._form.fitted(messages, notation_of(self._tokenizer.chat_template))
            return write(self._tokenizer, fitted, tools=tools or None)
        except DataError:
            raise
        except PromptError as error:
            raise DataError(f"{place}: {error}") from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f'{place}: its tools or "tool_calls" are not in OpenAI\'s form ({error!r})') from error


def _messages_of(record: Any) -> Any:
    return next((record[name] for name in FIELDS if name in record), record) if isinstance(record, Mapping) else record


def _message(turn: object, place: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise DataError(f'{place}: an object with "role" and "content", or "from" and "value", got {_shown(turn)}')
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(f"{place}: the role {_shown(role)} is unknown; known: {', '.join(ROLES)}")
    content = _content_of(turn.get("content", turn.get("value")), place)
    if content is None and not turn.get("tool_calls"):
        raise DataError(f'{place}: there is no "content" or "value" that is a text; add it')
    kept = {name: value for name, value in turn.items() if name not in ("from", "value") and value is not None}
    if kept.get("tool_calls"):
        kept["tool_calls"] = [_call(call) for call in kept["tool_calls"]]
    return {**kept, "role": ROLES[role], "content": content or ""}


def _content_of(content: object, place: str) -> str | None:
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"{place}: training reads text alone, and a part of the content is none; leave the chat out")
    return "".join(map(str, texts))


def _call(call: Any) -> Any:
    function = call["function"] if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": _read(function.get("arguments"))}}


def _read(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


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

    Raises DataError, which names it, if a file cannot be read or an entry is neither.
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
        splits = ", ".join(found)
        raise DataError(f"the dataset {name!r} has no split {split!r}; name one behind #: {splits}") from error
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
        random = np.random.default_rng((self.seed, epoch))
        offset = int(random.integers(self.sequence_length))
        start = offset + int(random.permutation(self.blocks_per_epoch)[position]) * self.sequence_length
        return self.stream[start : start + self.sequence_length + 1]


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
        found, of_pass = [], min(self.tokens_per_pass, self.tokens_per_step)
        parts = (schedule.stable_steps, self.stable_length), (schedule.decay_steps, self.decay_length)
        for number, (steps, length) in enumerate(parts):
            if steps:
                sampler = BlockSampler(stream, length, 2 * seed + number)
                found.append(Phase(steps, sampler, self.tokens_per_step // length, max(1, of_pass // length)))
        return found


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of an embedded name, a folder or a hub name; no remote code is run.

    Where it has no end-of-text token, it gets the configuration's. Raises ModelNotFoundError for an unknown name,
    ModelError without a tokenizer that can be used for training.
    """
    source, found = _load(folder)
    if found.backend.eos_token_id is None:
        found.backend.eos_token = _eos_of_config(source, found)
    if found.backend.eos_token_id is None:
        raise ModelError(
            f"neither the tokenizer nor the configuration of {str(folder)!r} names an end-of-text token, which "
            'separates the texts in training: add "eos_token" to its tokenizer_config.json'
        )
    return cast("PreTrainedTokenizerBase", found.backend)


def copy_tokenizer(source: str | Path, folder: Path) -> None:
    """Write a model's tokenizer into a folder, without what training added; ModelError if there is none."""
    save_tokenizer(cast("PreTrainedTokenizerBase", _load(source)[1].backend), folder)


def _load(folder: str | Path) -> tuple[str, Tokenizer]:
    name = str(folder)
    source = name if Path(name).is_dir() else resolve_source(name)
    found = Tokenizer.load(source)
    if found is None:
        raise ModelError(f"the model {name!r} has no tokenizer, and training on text needs one")
    return source, found


def _eos_of_config(source: str, tokenizer: Tokenizer) -> str | None:
    """The end-of-text token in the model's configuration, the first where there are several; or None."""
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        return None
    given = load_config(source, source, None).get_text_config().eos_token_id
    first = given[0] if isinstance(given, list) and given else given
    if not isinstance(first, int) or not 0 <= first < tokenizer.vocab_size:
        return None
    return cast("str | None", tokenizer.backend.convert_ids_to_tokens(first))


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that every release and runtime supports
        config.write_text(json.dumps(settings, indent=2) + "\n")
