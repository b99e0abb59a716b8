"""Files that are written atomically, users' files that may be broken, and the cache folder."""

from __future__ import annotations

import contextlib
import difflib
import gzip
import json
import math
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from truedraft.errors import DataError, ModelNotFoundError, OptionError, TruedraftError

SMOLLM2 = "smollm2"
"""The word for SmolLM2-135M-Instruct, see `truedraft.models.embedded`."""
_CLOSE = 0.8  # similarity to a word from which the hub is not queried


@contextlib.contextmanager
def written_whole(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """Write a new file that replaces `path` once it is complete: a reader finds the old one or the new one.

    A process that has the old one open or mapped keeps it. Any interruption leaves the old one and no other file; after
    a crash of the machine there is the old one or the whole new one. The permissions of an existing file are kept; a
    new `private` one is readable only by its owner. Raises OSError if it cannot be written.
    """
    mode = path.stat().st_mode & 0o777 if path.exists() else (0o600 if private else 0o644)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp", delete=False) as partial:
        try:
            yield partial  # type: ignore[misc]
            partial.close()
            Path(partial.name).chmod(mode)
            take_place(Path(partial.name), path)
        except BaseException:
            partial.close()
            Path(partial.name).unlink(missing_ok=True)
            raise


def take_place(partial: Path, path: Path) -> None:
    """Rename a complete file on the same disk to `path`, replacing what is there, once its content is on the disk.

    A file system may store names before contents: after a crash the new name would have an empty file. Raises OSError
    if that cannot be done; what had the name keeps it.
    """
    _sync(partial)
    partial.replace(path)
    with contextlib.suppress(OSError):  # the content is safe; some systems open no folders
        _sync(path.parent)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@contextlib.contextmanager
def write_errors(path: Path, doing: str = "cannot write") -> Iterator[None]:
    """Raise a `DataError` for what cannot be written in the block; `doing` is said before the path."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ without a home folder
        raise DataError(f"{doing} {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error


def user_path(path: str | Path, kind: type[TruedraftError] = DataError, said: str = "") -> Path:
    """A path as a user types it, with ~ expanded; an error of this kind if it names the home folder of nobody."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise kind(f"{said}{str(path)!r} names the home folder of nobody here; give the whole path") from error


def refuse_lost_model(name: str) -> None:
    """Refuse a model's name that can only be a path and does not exist, or is a folder without a model, by a
    `ModelNotFoundError`.
    """
    path = user_path(name, ModelNotFoundError)
    if path.is_dir() and not (path / "config.json").is_file() and not any(path.glob("*.gguf")):
        raise ModelNotFoundError(f"{name!r} is a folder without config.json, so it is not a model; name its folder")
    if path.exists():
        return
    if path.suffix == ".gguf":
        raise ModelNotFoundError(f"there is no file {name!r}; name a GGUF file that exists")
    if name != SMOLLM2 and difflib.get_close_matches(name, [SMOLLM2], cutoff=_CLOSE):
        raise ModelNotFoundError(f"there is no model {name!r}; did you mean {SMOLLM2!r}?")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(f"there is no folder {name!r}; check the path")


def refuse_no_adapter(folder: str | Path) -> None:
    """Refuse a folder without an adapter, by a `ModelNotFoundError`."""
    if not (user_path(folder, ModelNotFoundError) / "adapter_config.json").is_file():
        raise ModelNotFoundError(f"{str(folder)!r} holds no adapter: there is no adapter_config.json; check the path")


def named_adapter(typed: str) -> tuple[str, Path]:
    """The name and the folder of an adapter typed as NAME=DIR; OptionError if it is not of that form,
    ModelNotFoundError if the folder holds none.
    """
    name, equals, folder = typed.partition("=")
    if not (name and equals and folder):
        raise OptionError(f"must be of the form NAME=DIR, got {typed!r}", field="adapters")
    refuse_no_adapter(folder)
    return name, user_path(folder, ModelNotFoundError)


def text_of(path: Path, what: str) -> str:
    """The UTF-8 text of a file with line feeds as line ends; a file with a name in .gz is unpacked.

    `what` is a noun for messages, as "prompts file". Raises DataError if it cannot be read.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.name.endswith(".gz") else raw).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(f"there is no {what} {str(path)!r}; check the path") from error
    except UnicodeDecodeError as error:
        raise DataError(f"the {what} {str(path)!r} is not UTF-8 text (byte {error.start}); convert it") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"cannot unpack the {what} {str(path)!r}: {error}; fetch it again") from error
    except OSError as error:
        raise DataError(f"cannot read the {what} {str(path)!r}: {error.strerror or error}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def json_in(text: str, place: str, hint: str = "") -> Any:
    """Read JSON, or raise a `DataError`; `hint` is what to do then."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        message = f"{place}: not JSON ({error.msg} at {where})"
        raise DataError(f"{message}; {hint}" if hint else message) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists without end
        raise DataError(f"{place}: JSON that nobody can read ({str(error).partition(';')[0]})") from error


def object_in(line: str, place: str, holding: str) -> dict[str, Any]:
    """Read the JSON object of a line, or raise a `DataError`."""
    record = json_in(line, place)
    if not isinstance(record, dict):
        raise DataError(f"{place}: a {type(record).__name__}, not an object with {holding} in it")
    return record


def object_of(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def parameters_in(path: Path) -> int:
    """Number of parameters in a safetensors file, by its header: eight bytes with its length, then JSON."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def cache_folder() -> Path:
    """TRUEDRAFT_CACHE if it is set, else truedraft's part of the user's cache folder on this system.

    A user without a home folder gets a folder among the temporary files. Raises OptionError if a variable names the
    home of somebody who has none.
    """
    for variable, inside in (("TRUEDRAFT_CACHE", ""), ("XDG_CACHE_HOME", "truedraft")):
        if given := os.environ.get(variable):
            return user_path(given, OptionError, f"{variable}: ") / inside
    local = os.environ.get("LOCALAPPDATA")
    if sys.platform == "win32" and local:
        return Path(local) / "truedraft" / "Cache"
    parts = ("Library", "Caches") if sys.platform == "darwin" else (".cache",)
    try:
        return Path("~").expanduser().joinpath(*parts, "truedraft")
    except RuntimeError:  # neither HOME nor an entry among the system's users
        return Path(tempfile.gettempdir()) / f"truedraft-{os.getuid()}"


def could_not_be_kept(folder: Path, reason: str) -> str:
    """A warning for a file that could not be written to the cache; always the same sentence, so it is shown once."""
    root = cache_folder() if folder.is_relative_to(cache_folder()) else folder
    return (
        f"what is compiled and measured could not be kept in {root} ({reason}) and will be made again next time; "
        "free some space, or set TRUEDRAFT_CACHE to a folder that can be written"
    )
