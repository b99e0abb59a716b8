"""Checks of option values before slow imports and before a model is loaded.

The code that uses a value parses it again, and refuses what depends on a model or a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from truedraft.drafters.registry import ENGINES, refuse_no_folder
from truedraft.drafters.specs import check_drafter_words
from truedraft.engine.policy.specs import controller_from_spec
from truedraft.errors import DataError, OptionError, UnknownOptionError
from truedraft.files import named_adapter, refuse_lost_model, refuse_no_adapter, user_path
from truedraft.models.embedded import embedded_folder
from truedraft.options import BITS, DTYPE_NAMES, PADDED_NAMES, read_bytes
from truedraft.verification.specs import rule_words

_LAST_PORT = 65_535


def check(name: str, value: Any) -> None:
    """Refuse a value that is invalid in any command.

    Args:
        name: of the option on the command line, followed by a space and its metavar.
        value: as on the command line; None if it is not given.

    Raises:
        TruedraftError: it is unknown, or its file does not exist.
    """
    found = _CHECKS.get(name) or _CHECKS.get(name.partition(" ")[0])
    if found is not None and value is not None:
        found(value)


def _one_of(what: str, *valid: str) -> Callable[[str], None]:
    def look(value: str) -> None:
        if value not in valid:
            raise UnknownOptionError.nearest(what, value, valid)

    return look


def _device(value: str) -> None:
    _one_of("device", "auto", "cpu", "cuda")(value.partition(":")[0])


def _model(value: str) -> None:
    if value.startswith("embedded:"):
        embedded_folder(value.removeprefix("embedded:"))
    else:
        refuse_lost_model(value)


def _plan(file: Path) -> None:
    if not user_path(file).exists():
        raise DataError(f"cannot read the plan {str(file)!r}: No such file or directory")


def _data(value: Path) -> None:
    said = str(value)
    if said != "self" and not said.startswith("hf:") and not user_path(value).exists():
        raise DataError(f"there is no data file {said!r}; check the path")


def _prompts(value: str | Path) -> None:
    file = user_path(value)
    if {*file.suffixes} & {".json", ".jsonl", ".txt"} and not file.exists():
        raise DataError(f"there is no prompts file {str(value)!r}; check the path")


def _readable(field: str) -> Callable[[Path], None]:
    def look(file: Path) -> None:
        try:
            file.open("rb").close()
        except OSError as error:
            raise OptionError(f"cannot be read ({error.strerror or error}): {str(file)!r}", field=field) from error

    return look


def _port(value: int) -> None:
    if value > _LAST_PORT:
        raise OptionError(f"must be at most {_LAST_PORT}, got {value}", field="port")


_CHECKS: Mapping[str, Callable[[Any], object]] = {
    "--adapters": named_adapter,
    "--allow-rule": rule_words,
    "--api-key-file": _readable("api_key_file"),
    "--chat-template": _readable("chat_template"),
    "--controller": controller_from_spec,
    "--data": _data,
    "--device": _device,
    "--drafter D": check_drafter_words,  # in other commands it is a path
    "--drafters-dir": refuse_no_folder,
    "--dtype": lambda value: _one_of("dtype", "auto", *DTYPE_NAMES)(value.removeprefix("torch.")),
    "--for": _one_of("engine", *ENGINES),
    "--held-out": _data,
    "--max-body-bytes": lambda value: read_bytes("max_body_bytes", value),
    "--max-cache-bytes": lambda value: read_bytes("max_cache_bytes", value),
    "--merge-adapter": refuse_no_adapter,
    "--model": _model,
    "MODEL": _model,
    "--pad-to": _one_of("padding size", *PADDED_NAMES),
    "--plan": _plan,
    "--port": _port,
    "--prefix-cache-bytes": lambda value: read_bytes("prefix_cache_bytes", value),
    "--prompts": _prompts,
    "--rule": rule_words,
    "--simulate": _plan,
    "--start-from": lambda folder: refuse_lost_model(str(folder)),
    "--tls-certificate": _readable("tls_certificate"),
    "--tls-key": _readable("tls_key"),
    "--weights": _one_of("weights", *BITS),
}
