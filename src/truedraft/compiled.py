"""Compiles C on this machine, once, and caches it in the user's cache folder.

A cached library has the checksum of its bytes in its name, because loading a truncated library would crash the process.
It is loaded only from where nobody but its user (or root) could write. One process compiles, and others wait for it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from truedraft.files import cache_folder, could_not_be_kept, take_place
from truedraft.progress import log_stage

_log = logging.getLogger(__name__)

_COMPILERS = ("cc", "gcc", "clang")
_PLAIN = ("-O3", "-std=gnu11", "-fPIC", "-pthread", "-w")
_TRIES = ("-march=native", "-mcpu=native")
_TIMEOUT_S = 120.0
_ROOM = 1 << 24  # free bytes that the compiler needs in a folder
_OWNER_ONLY = 0o700
_WRITABLE_BY_OTHERS = 0o022


class CompilerError(OSError):
    """A compiler failed; holds its message."""


def load_compiled(source: Path, compiler: Sequence[str], defines: Sequence[str], load: Callable[[str], object]) -> None:
    """Load a library from the cache by `load`, called with its path, or compile and cache it.

    `source` includes headers of its own folder alone; `compiler` is the result of `find_compiler`. Raises
    CompilerError: the compiler fails; OSError: it cannot be run; subprocess.SubprocessError: it takes too long.
    """
    key, folder = f"{source.stem}-{_key(source, compiler, defines)}", _folder()
    if _load_kept(folder, key, load):
        return
    log_stage("loading: compiling for this processor, once on this machine")
    with _one_compiles(folder):
        if not _load_kept(folder, key, load):
            _compile_into(folder, key, [*compiler, *_PLAIN], [*defines, "-shared", str(source)], load)


def find_compiler() -> tuple[str, ...]:
    """The compile command: of the variable CC, which may have options, as in "ccache gcc", else one that is found.

    Raises CompilerError: there is none.
    """
    given = os.environ.get("CC", "").strip()
    for command in (given, *given.split()[:1]) if given else _COMPILERS:
        found = shutil.which(command)
        if found:
            return (found,) if command == given or not given else (found, *given.split()[1:])
    missing = f"CC names {given!r}, which is not" if given else "there is no C compiler (cc, gcc or clang)"
    raise CompilerError(f"{missing} on this machine")


def _folder() -> Path | None:
    folder = cache_folder() / "native"
    try:
        folder.mkdir(mode=_OWNER_ONLY, parents=True, exist_ok=True)
        if folder.stat().st_mode & _WRITABLE_BY_OTHERS:
            folder.chmod(_OWNER_ONLY)
        return folder if _is_ours(folder) else None
    except OSError:
        return None


@contextlib.contextmanager
def _one_compiles(folder: Path | None) -> Iterator[None]:
    """Wait until no other process compiles into the folder; without file locks several may."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(ImportError, OSError):  # missing on Windows and in some shared folders
            import fcntl

            opened = os.open("" if folder is None else folder, os.O_RDONLY)
            held.callback(os.close, opened)  # which releases it, as the end of this process does
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def _is_ours(path: Path) -> bool:
    if not hasattr(os, "getuid"):  # on Windows, where only the user can write to the user's folders
        return True
    status = path.stat()
    return status.st_uid in (0, os.getuid()) and not status.st_mode & _WRITABLE_BY_OTHERS


def _load_kept(folder: Path | None, key: str, load: Callable[[str], object]) -> bool:
    for path in sorted(folder.glob(f"{key}-*.so")) if folder else ():
        with contextlib.suppress(OSError):  # built against other libraries, or removed since
            if _is_ours(path) and path.stem.endswith(f"-{_checksum(path)}"):
                load(str(path))
                return True
    return False


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:24]


def _key(source: Path, compiler: Sequence[str], defines: Sequence[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=False)
    settings = (*compiler[1:], *defines, str(_PLAIN), str(_TRIES), platform.machine(), processor())
    read = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    return hashlib.sha256(b"\0".join((*read, version.stdout, *map(str.encode, settings)))).hexdigest()[:24]


def processor() -> str:
    """Model and features of the processor, as the system reports them, because machines may share a cache."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return f"{platform.processor()} of {platform.node()}"
    lines = cpuinfo.read_text(errors="replace").splitlines()
    fields = ("vendor_id", "model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(next((line for line in lines if line.startswith(name)), "") for name in fields)


def _compile_into(
    folder: Path | None, key: str, command: Sequence[str], rest: Sequence[str], load: Callable[[str], object]
) -> None:
    keeping = folder is not None and os.access(folder, os.W_OK)
    if folder is not None and keeping and shutil.disk_usage(folder).free < _ROOM:
        _log.warning(could_not_be_kept(folder, os.strerror(errno.ENOSPC)))
        keeping = False
    with tempfile.TemporaryDirectory(
        prefix="compiling-", dir=folder if keeping else None, ignore_cleanup_errors=True
    ) as work:
        path = Path(work) / "compiled.so"
        _compile(command, [*rest, "-o", str(path)])
        if folder is not None and keeping:
            path.chmod(_OWNER_ONLY)
            # Atomically, because another process may be doing the same.
            kept = folder / f"{key}-{_checksum(path)}.so"
            take_place(path, kept)
            path = kept
        load(str(path))  # stays loaded when its file is removed


def _compile(command: Sequence[str], rest: Sequence[str]) -> None:
    """Run a compiler with the first option for this machine that it accepts; raises its first CompilerError."""
    failures = []
    for option in _TRIES:
        failure = _failure_of([*command, option, *rest])
        if not failure:
            return
        failures.append(failure)
    raise CompilerError(f"{command[0]} failed ({failures[0]})")


def _failure_of(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return type(error).__name__
    message = done.stderr.decode(errors="replace").strip()
    return (message.splitlines() or ["no message"])[0] if done.returncode else ""
