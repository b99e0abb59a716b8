"""What several scripts need: files of results, processes that answer, requests over HTTP, and the embedded models."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from truedraft.models.base import LanguageModel

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).with_name("results")


class Lines:
    """A file of JSON objects, one a line, each written at once; a line that a kill has torn is left out.

    `own` are fields, as a version, of the lines that are read; new lines get them, and others are left alone.
    """

    def __init__(self, path: Path, **own: Any) -> None:
        self.path, self._own = path, own
        self.records: list[dict[str, Any]] = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if all(record.get(name) == value for name, value in own.items()):
                    self.records.append(record)

    @property
    def cells(self) -> dict[str, dict[str, Any]]:
        """The last record of each cell, by its name."""
        return {record["cell"]: record for record in self.records if "cell" in record}

    def add(self, record: Mapping[str, Any]) -> None:
        line = {**self._own, **record}
        self.records.append(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")


def commit() -> str:
    """Of this checkout; a plus behind it says that sources differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        found = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True).stdout.strip()
        differ = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "src", "benchmarks/*.py"]).returncode
    except OSError:
        return "unknown"
    return found + "+" * bool(differ) if found else "unknown"


def note(words: str) -> None:
    """A line on standard error at once: what is waited for, or what came."""
    print(words, file=sys.stderr, flush=True)


class ChildEndedError(SystemExit):
    """A process that is measured ended early; its own message stands above."""


class Child:
    """A process that answers a line of JSON with a line of JSON."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str] | None = None, python: Path | None = None
    ) -> None:
        command = [str(python or sys.executable), *words]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def read(self) -> Any:
        """The next line that it prints.

        Raises:
            ChildEndedError: it ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildEndedError("a process that is measured ended early; its message is above")
        return json.loads(line)

    def ask(self, what: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self.read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def asked_once(
    words: Sequence[str],
    what: Mapping[str, Any],
    python: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Any:
    child = Child(words, environment, python)
    try:
        child.read()
        return child.ask(what)
    finally:
        child.close()


def be_asked(make: Callable[[], Callable[[Any], Any]]) -> None:
    """The other end of a `Child`: makes what answers, says that it is ready, and answers lines until input ends.

    Whatever libraries print goes to standard error, so that it is not taken for an answer.
    """
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        answer = make()
        found: Any = "ready"
        while True:
            out.write(json.dumps(found) + "\n")
            out.flush()
            if not (line := sys.stdin.readline()):
                return
            found = answer(json.loads(line))


@contextlib.asynccontextmanager
async def posted(port: int, body: bytes, path: str = "/v1/completions") -> AsyncIterator[asyncio.StreamReader]:
    """The answer to a request, over a plain socket so that the client costs little itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = ("Host: 127.0.0.1", "Connection: close", "Content-Type: application/json")
        lines = (f"POST {path} HTTP/1.1", *head, f"Content-Length: {len(body)}", "", "")
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()
        yield reader
    finally:
        writer.close()


def exported(folder: Path, name: str, pad_to: str | None = None) -> Path:
    """An embedded model, in bfloat16, as a folder inside another, for engines that know nothing of truedraft.

    It is made where it is not there.
    """
    made = folder / f"{name}-{pad_to or 'own'}"
    if not (made / "config.json").exists():
        padded = [] if pad_to is None else ["--pad-to", pad_to]
        command = [sys.executable, "-m", "truedraft", "export", "--model", f"embedded:{name}", "--dtype", "bfloat16"]
        subprocess.run([*command, "--out", str(made), *padded], check=True)
    return made


def heldout_texts() -> list[str]:
    """Texts of the held-out prompts that ship with the embedded models."""
    from truedraft.models.embedded import heldout_prompts_file

    lines = heldout_prompts_file().read_text(encoding="utf-8").splitlines()
    return [str(json.loads(line)["text"]) for line in lines if line.strip()]


def ids_of(target: LanguageModel, texts: Iterable[str]) -> list[list[int]]:
    """Texts as messages of a user where the model has a chat template, else as they are."""
    tokenizer = target.tokenizer
    assert tokenizer is not None
    if tokenizer.chat_template:
        return [tokenizer.chat([{"role": "user", "content": text}]) for text in texts]
    return [tokenizer.encode(text) for text in texts]


def heldout_ids(target: LanguageModel, most: int) -> list[list[int]]:
    from truedraft.engine.prompts import encode_prompt

    return [list(encode_prompt(target, text)[:most]) for text in heldout_texts()]
