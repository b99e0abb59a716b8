"""Which files of the standard library make the corpus, and the manifest that pins them."""

from __future__ import annotations

import hashlib
import json
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from truedraft.errors import DataError

PYTHON_VERSION = "3.11.7"
MANIFEST = Path(__file__).parent / "manifest.json"

# Not code that somebody wrote: generated tables, deliberately broken files, and what the build of the
# interpreter writes (which differs between machines).
_SKIPPED_PREFIXES = (
    "site-packages/",
    "dist-packages/",
    "ensurepip/_bundled/",
    "config-",
    "_sysconfigdata_",
    "encodings/cp",
    "encodings/iso8859",
    "encodings/mac_",
    "encodings/koi8",
    "encodings/kz1048",
    "encodings/ptcp154",
    "encodings/palmos",
    "encodings/hp_roman8",
    "encodings/tis_620",
    "encodings/aliases",
    "pydoc_data/topics",
    "html/entities",
    "lib2to3/tests/data/",
    "test/bad_coding",
    "test/badsyntax_",
    "test/encoded_modules/",
    "test/test_lib2to3/data/",
    "test/tokenize_tests",
    "test/test_source_encoding",
    "test/cjkencodings",
    "test/mime.types",
    "test/test_importlib/data",
    "lib-dynload/",
)


@dataclass(frozen=True)
class Source:
    path: str
    text: str
    sha256: str
    held_out: bool


def read_library(folder: Path | None = None) -> dict[str, bytes]:
    """The bytes of every `.py` file of the corpus, by its path relative to the library's folder."""
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, bytes] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(_SKIPPED_PREFIXES) or "__pycache__" in name:
            continue
        content = path.read_bytes()
        if content.strip() and _is_utf8(content):
            found[name] = content
    return found


def load_sources(manifest: Path = MANIFEST, folder: Path | None = None) -> list[Source]:
    """The corpus, after checking the interpreter's version and every file against the manifest."""
    pinned = json.loads(manifest.read_text())
    if folder is None and platform.python_version() != pinned["python"]:
        raise DataError(
            f"this recipe is pinned to the standard library of Python {pinned['python']}, "
            f"but this is Python {platform.python_version()}: run it with that version"
        )
    files = read_library(folder)
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    expected = pinned["sha256"]
    differing = sorted(n for n in expected.keys() | hashes.keys() if expected.get(n) != hashes.get(n))
    if differing:
        raise DataError(
            f"{len(differing)} files of the standard library differ from the manifest "
            f"(first: {differing[0]}): use an unmodified Python {pinned['python']}"
        )
    held_out = set(pinned["held_out"])
    return [Source(name, content.decode(), hashes[name], name in held_out) for name, content in sorted(files.items())]


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\x00" not in content
