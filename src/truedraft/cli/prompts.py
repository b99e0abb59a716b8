"""Where prompts come from: the command line, standard input, or a file."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from truedraft.embedded import heldout_prompts_file
from truedraft.errors import DataError, OptionError, PromptError

HELDOUT = "heldout"


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A prompt and what reports call it.

    Attributes:
        name: the object's id in a file, else its number from 1.
        prompt: text, or token ids.
    """

    name: str
    prompt: str | list[int]


def read_prompts(argument: str | None, file: str | None) -> list[NamedPrompt]:
    """The prompts of a command: its argument, `-` for standard input, or a file; piped input needs no `-`.

    Raises:
        OptionError: both an argument and a file, or neither and nobody to read from.
        PromptError: an empty prompt.
        DataError: a file that cannot be read or used; says which line.
    """
    if argument is not None and file is not None:
        raise OptionError("give either a PROMPT or --prompts FILE, not both")
    if file is not None:
        return _read_file(file)
    if argument is None and sys.stdin.isatty():
        raise OptionError("give a PROMPT, - to read it from standard input, or --prompts FILE")
    source, text = ("the prompt", argument) if argument not in (None, "-") else ("standard input", _read_stdin())
    if not text:
        raise PromptError(f"{source} is empty; give at least one character")
    _check_text(text, source)
    return [NamedPrompt("1", text)]


def _read_stdin() -> str:
    """Standard input without its last line break, so that `echo TEXT |` means TEXT."""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not {error.encoding} text (byte {error.start})") from error


def _read_file(name: str) -> list[NamedPrompt]:
    path = heldout_prompts_file() if name == HELDOUT else Path(name).expanduser()
    if name == HELDOUT and not path.is_file():
        raise DataError("the held-out prompts are not part of this installation; name a file of your own")
    readers = {".jsonl": _json_lines, ".txt": _text_lines}
    if path.suffix not in readers:
        raise DataError(f"the prompts file {name!r} must be .jsonl (an object a line) or .txt (a prompt a line)")
    prompts = readers[path.suffix](_content(path), name)
    if not prompts:
        raise DataError(f"the prompts file {name!r} holds no prompt; give at least one line that is not empty")
    return prompts


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(f"there is no prompts file {str(path)!r}; check the path") from error
    except UnicodeDecodeError as error:
        raise DataError(f"the prompts file {str(path)!r} is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise DataError(f"cannot read the prompts file {str(path)!r}: {error.strerror or error}") from error


def _text_lines(content: str, _: str) -> list[NamedPrompt]:
    lines = [line for line in content.split("\n") if line.strip()]
    return [NamedPrompt(str(number), line) for number, line in enumerate(lines, start=1)]


def _json_lines(content: str, file: str) -> list[NamedPrompt]:
    prompts: list[NamedPrompt] = []
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            prompts.append(_from_json(line, f"{file}, line {number}", len(prompts) + 1))
    return prompts


def _from_json(line: str, place: str, number: int) -> NamedPrompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: a {type(record).__name__}, not an object with a prompt in it")
    prompt = record.get("prompt", record.get("text"))
    is_ids = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise DataError(f'{place}: the object needs "prompt" or "text", which is a string (or a list of token ids)')
    if not prompt:
        raise DataError(f"{place}: the prompt is empty; give at least one character")
    if isinstance(prompt, str):
        _check_text(prompt, place)
    return NamedPrompt(str(record.get("id", number)), prompt)


def _check_text(text: str, source: str) -> None:
    """Half characters cannot be tokenized; a shell passes bytes that are not UTF-8 as such."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{source} is not UTF-8 text (character {error.start})") from error
