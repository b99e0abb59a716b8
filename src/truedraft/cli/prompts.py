"""Reads prompts from the command line, standard input, or a file."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from truedraft.cli.terminal import typed_text
from truedraft.core.params import SamplingParams
from truedraft.errors import DataError, OptionError, PromptError, errors_about
from truedraft.files import json_in, object_in, text_of, user_path
from truedraft.models.embedded import heldout_prompts_file
from truedraft.options import flag, option

if TYPE_CHECKING:
    from truedraft.models.multimodal import MultimodalPrompt

HELDOUT = "heldout"
PROMPTS_HELP = "heldout: those that ship; or a .jsonl, .json or .txt file."

_OPTIONS = frozenset(each.name for each in dataclasses.fields(SamplingParams))
# Keys that a line cannot set: options of the command, and options of other programs.
_OF_THE_COMMAND = (
    "model pad_to weights tensor_parallel merge_adapter adapters drafter rule chat compare show_drafts dtype kv_dtype "
    "device threads no_fast_paths"
)
_OF_OTHERS = (
    "messages system n best_of tools max_new_tokens max_completion_tokens do_sample num_beams stop_sequences "
    "response_format"
)
_COUNTS = ("n_tokens", "num_tokens")  # counts in data files, which are not misspelt options
_REFUSED = frozenset(f"{_OF_THE_COMMAND} {_OF_OTHERS}".split())


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A prompt and its name in reports."""

    name: str  # the object's id in a file, else its number from 1
    prompt: str | list[int]
    options: Mapping[str, Any] = field(default_factory=dict)  # of its line, which override those of the command
    images: tuple[str, ...] = ()
    processed: MultimodalPrompt | None = None  # the output of the model's processor for text and pictures
    message: str | None = None  # the user's own, if the prompt is a chat

    @property
    def whole(self) -> str | list[int] | MultimodalPrompt:
        return self.prompt if self.processed is None else self.processed


@dataclass(frozen=True)
class PromptOptions:
    """The prompts."""

    prompt: str | None = option(None, "The prompt; - reads it from standard input.", "PROMPT", name="PROMPT")
    prompts: str | None = option(
        None,
        'Many prompts: .jsonl with "prompt" or "text" (for generate also "max_tokens", "seed", "images" and so on), '
        ".json with a list of these or of texts, .txt with one a line, or heldout: those that ship.",
        "FILE",
    )
    image: tuple[str, ...] = option((), "A picture that the prompt is about; may be repeated.", "FILE")
    chat: bool = flag("Give the prompt as a user's message, by the model's chat template.")
    trust_control_tokens: bool = flag("With --chat, read control tokens that it spells, as <|im_end|>, as the tokens.")


PromptRequest: TypeAlias = tuple[NamedPrompt, SamplingParams]  # a prompt and its sampling options


def read_prompts(
    argument: str | None, file: str | None, *, own_options: bool = False, images: Sequence[str] = ()
) -> list[NamedPrompt]:
    """The prompts of a command: its argument, `-` for standard input, or a file; piped input needs no `-`.

    With `own_options` an object of a file may have its own sampling options, as "max_tokens" and "seed", and pictures.
    Raises OptionError if both an argument and a file are given, or neither where standard input is a terminal,
    PromptError for an empty prompt, DataError, with the line, if a file cannot be read or used.
    """
    if argument is not None and file is not None:
        raise OptionError("give either a PROMPT or --prompts FILE, not both")
    if file is not None and images:
        raise OptionError('is for one PROMPT; lines of a file name theirs as "images"', field="image")
    if file is not None:
        with errors_about("prompts"):
            return _read_file(file, own_options)
    with errors_about("prompt"):
        return [NamedPrompt("1", _read_argument(argument), images=tuple(images))]


def _read_argument(argument: str | None) -> str:
    if argument is None and (sys.stdin is None or sys.stdin.isatty()):
        raise OptionError("give a PROMPT, - to read it from standard input, or --prompts FILE")
    if argument is None or argument == "-":
        source, text = "standard input", _read_stdin()
    else:
        source, text = "the prompt", typed_text(argument)
    if not text:
        raise PromptError(f"{source} is empty; give at least one character")
    _check_text(text, source)
    return text


def _read_stdin() -> str:
    """Standard input without byte order mark and last line break, so that `echo TEXT |` means TEXT."""
    if sys.stdin is None:
        raise PromptError("standard input is closed; give the PROMPT itself, or a file to read it from")
    try:
        return sys.stdin.read().removeprefix("\ufeff").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not {error.encoding} text (byte {error.start})") from error
    except OSError as error:
        raise PromptError(f"standard input cannot be read: {error.strerror or error}") from error


def _read_file(name: str, own_options: bool) -> list[NamedPrompt]:
    path = heldout_prompts_file() if name == HELDOUT else user_path(name)
    if path.suffix not in (".jsonl", ".json", ".txt"):
        raise DataError(
            f"the prompts file {name!r} must be .jsonl (an object a line), .json (a list) or .txt (a prompt a line)"
        )
    content = text_of(path, "prompts file")
    if path.suffix == ".txt":
        lines = [line for line in content.split("\n") if line.strip()]
        prompts = [NamedPrompt(str(number), line) for number, line in enumerate(lines, start=1)]
    else:
        records = (_json_list if path.suffix == ".json" else _json_lines)(content, name)
        prompts = [_from_record(*record, number, own_options) for number, record in enumerate(records, start=1)]
    if not prompts:
        raise DataError(f"the prompts file {name!r} holds no prompt; give at least one that is not empty")
    return prompts


def _json_lines(content: str, file: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            place = f"{file}, line {number}"
            yield object_in(line, place, "a prompt"), place


def _json_list(content: str, file: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The entries of a list with their places; an entry that is a text or a list of token ids is a prompt itself."""
    entries = json_in(content, f"the prompts file {file!r}", "for an object a line name it .jsonl")
    if not isinstance(entries, list):
        raise DataError(f'the prompts file {file!r} must hold a list, as ["a prompt", {{"prompt": "another"}}]')
    for number, entry in enumerate(entries, start=1):
        place = f"{file}, entry {number}"
        if not isinstance(entry, str | list | dict):
            raise DataError(f"{place}: a prompt is a text, a list of token ids or an object, got {json.dumps(entry)}")
        yield (entry if isinstance(entry, dict) else {"prompt": entry}), place


def _from_record(record: Mapping[str, Any], place: str, number: int, own_options: bool) -> NamedPrompt:
    prompt = record.get("prompt", record.get("text"))
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise DataError(f'{place}: the object needs "prompt" or "text", which is a string (or a list of token ids)')
    if not prompt:
        raise DataError(f"{place}: the prompt is empty; give at least one character")
    if isinstance(prompt, str):
        _check_text(prompt, place)
    name, images = record.get("id"), record.get("images")
    options, images = _options(record, place, own_options), [] if images is None else images
    if not isinstance(images, list) or not all(isinstance(each, str) and each for each in images):
        raise DataError(f'{place}: "images" must be a list of files')
    if images and not own_options:
        raise DataError(f"{place}: this command takes only text, and the line has images; remove them")
    if images and not isinstance(prompt, str):
        raise DataError(f"{place}: pictures go with a text, and the prompt is a list of token ids")
    for each in images:
        if not user_path(each).is_file():
            raise DataError(f"{place}: there is no file {each!r}; check the path")
    return NamedPrompt(str(number if name is None else name), prompt, options, tuple(images))


def _options(record: Mapping[str, Any], place: str, allowed: bool) -> dict[str, Any]:
    """The sampling options of an object; null is the command's value."""
    for name in record:
        near = [] if name in _COUNTS else difflib.get_close_matches(name, _OPTIONS, n=1, cutoff=0.8)
        if name in _REFUSED or (near and name not in _OPTIONS):
            hint = f"did you mean {near[0]!r}? " if near and name not in _REFUSED else ""
            raise DataError(f"{place}: {name!r} is no option of a line; {hint}valid: {', '.join(sorted(_OPTIONS))}")
    options = {name: value for name, value in record.items() if name in _OPTIONS and value is not None}
    if options and not allowed:
        name = next(iter(options))
        raise DataError(f"{place}: this command takes no options from lines, and {name!r} is one; remove it")
    try:
        SamplingParams(**options)
    except OptionError as error:
        raise DataError(f"{place}: {error}") from error
    return options


def _check_text(text: str, source: str) -> None:
    """Refuse lone surrogates, which cannot be tokenized; the shell's bytes that are not UTF-8 become such."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{source} is not UTF-8 text (character {error.start})") from error
