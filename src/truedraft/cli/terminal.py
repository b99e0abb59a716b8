"""Output: answers to standard output, all else to standard error; the streams in any state and encoding.

A terminal interprets control characters, so they are written as escapes; typed text may have escapes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.color import ColorSystem
from rich.console import Console
from rich.measure import Measurement
from rich.rule import Rule
from rich.style import Style
from rich.table import Table

from truedraft.core.verdict import Origin
from truedraft.errors import OptionError
from truedraft.progress import Progress
from truedraft.text.detokenizer import StreamDetokenizer

if TYPE_CHECKING:
    from truedraft.core.intervals import Interval
    from truedraft.engine import Answer, Piece
    from truedraft.text.tokenizer import Tokenizer


_BREAKS = "\t\n"
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0)]  # C0, delete and C1
_SHOWN = {code: f"\\x{code:02x}" for code in _CONTROLS if chr(code) not in _BREAKS}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.?)", re.DOTALL)
_IN_JSON = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}
_PATIENCE_S = 2.0


class Terminal:
    """The two output streams of a command."""

    def __init__(self) -> None:
        self.out = Console(highlight=False, markup=False, emoji=False)
        self.err = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self.patience_s = _PATIENCE_S  # before a bar is shown
        self._at_line_start = True

    @property
    def colour(self) -> bool:
        return self.out.is_terminal and self.out.color_system is not None and not self.out.no_color

    def write(self, text: str) -> None:
        """Write a part of an answer at once; control characters in it are not escaped."""
        if text:
            self._at_line_start = False  # first, because Ctrl-C may interrupt the write
            sys.stdout.write(text)
            sys.stdout.flush()
            self._at_line_start = text.endswith("\n")

    def dim(self, text: str) -> None:
        """Write text that is not part of the answer."""
        text = visible(text)
        self.write(Style(dim=True).render(text, color_system=ColorSystem.STANDARD) if self.colour else text)

    def end_line(self) -> None:
        """End the current line of standard output, if it is not empty."""
        if not self._at_line_start:
            self.write("\n")

    def heading(self, text: str) -> None:
        """Print a line with a rule, before an answer of several."""
        self.end_line()
        self.out.print(Rule(visible(text), align="left", style="dim"))

    def note(self, text: str) -> None:
        """Print a line about the answer on standard error."""
        self.err.print(visible(text), style="dim", soft_wrap=True)

    def json(self, record: dict[str, Any]) -> None:
        self.end_line()
        self.write(json_line(record))

    @contextlib.contextmanager
    def progress(self, what: str, total: int, during_output: bool = False) -> Iterator[Progress]:
        """A bar on standard error, if that is a terminal and the work takes over `patience_s`.

        With `during_output` answers are written at the same time; then there is no bar if they go to a terminal.
        """
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[remark]}", style="dim"),
            console=self.err,
            transient=True,
            redirect_stdout=False,  # else answers would go to standard error while the bar is shown
            redirect_stderr=False,
        )
        task = bar.add_task(what, total=total, remark="")
        visible_from = time.perf_counter() + self.patience_s
        is_shown = self.err.is_terminal and not (during_output and self.out.is_terminal)

        def show(done: float, remark: str) -> None:
            bar.update(task, completed=done, remark=remark)
            if is_shown and not bar.live.is_started and time.perf_counter() >= visible_from:
                bar.start()

        try:
            yield show
        finally:
            if bar.live.is_started:
                bar.stop()

    def print(self, text: str, style: str | None = None) -> None:
        """Print a line on standard output; the terminal wraps it."""
        self.out.print(visible(text), style=style, soft_wrap=True)

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        print_table(headings, rows, self.out)


def interval_text(found: Interval | Mapping[str, float | None] | None) -> str:
    """A number with its interval, if it has one: "1.52 [1.40, 1.66]"."""
    if found is None:
        return ""
    values = found if isinstance(found, Mapping) else dataclasses.asdict(found)
    value, low, high = values["value"], values["low"], values["high"]
    return f"{value:.2f}" if low is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], to: Console) -> None:
    """Print a table without truncating cells: a narrow terminal wraps the lines instead."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    endless = Console(width=10_000)
    width = max(to.width, Measurement.get(endless, endless.options, table).maximum)
    Console(file=to.file, highlight=False, markup=False, emoji=False, width=width).print(table)


def visible(text: str) -> str:
    r"""The text with its control characters as escapes, except line breaks and tabs.

    >>> visible("a\x1b[31mb\r\n")
    'a\\x1b[31mb\\x0d\n'
    """
    return text.translate(_SHOWN)


def from_escapes(typed: str, option: str) -> str:
    r"""The text of a typed string with backslash escapes.

    >>> from_escapes(r"\n\u20ac\\", "--stop")
    '\n€\\'

    It may hold \n, \r, \t, \\ and \uXXXX, where two of these may make one character.

    Raises OptionError for another escape, or a lone surrogate.
    """

    def meant(found: re.Match[str]) -> str:
        code = found[1]
        if code[:1] == "u" and len(code) == 5:
            return chr(int(code[1:], 16))
        if code not in _ESCAPES:
            raise OptionError(
                f"{option} {typed!r} holds the escape \\{code}, which means nothing here; "
                r"valid: \n, \r, \t, \\ (a backslash) and \uXXXX"
            )
        return _ESCAPES[code]

    text = _ESCAPE.sub(meant, typed)
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeError as error:
        raise OptionError(f"{option} {typed!r} holds half a character; give both its halves") from error


def typed_text(word: str) -> str:
    """A text of the command line, as UTF-8 even if an ASCII locale has decoded it."""
    try:
        return os.fsencode(word).decode("utf-8") if any("\udc80" <= char <= "\udcff" for char in word) else word
    except UnicodeError:
        return word


def json_line(record: Mapping[str, Any]) -> str:
    """A JSON object as one line, including the break, without raw control characters."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False).translate(_IN_JSON) + "\n"


def say(message: str) -> None:
    """Print one line on standard error, with line breaks and control characters as escapes."""
    sys.stderr.write(f"truedraft: {visible(' '.join(message.split()))}\n")
    sys.stderr.flush()


def prepare_streams() -> None:
    """Use UTF-8 under any locale, and replace closed descriptors by the null device.

    Otherwise the next opened file would get the descriptor's number, and output to standard error would go there. Lone
    surrogates are written as \\udcff, which is also their form in JSON.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - open as long as the process
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def output_is_open() -> bool:
    """Whether standard output is open; prints on standard error if not."""
    if sys.stdout is None:
        say("error: standard output is closed; send it to a file, or to /dev/null")
    return sys.stdout is not None


def output_was_taken() -> bool:
    """Whether standard output could be flushed; prints on standard error if not, unless its reader closed it.

    The rest is discarded, because otherwise the interpreter would try again at exit and print its own error.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:
            say(f"error: standard output cannot be written ({error.strerror or error})")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return False
    return True


_MARKS = {
    Origin.ACCEPTED: (Style(color="green"), "", "", "drafted and accepted"),
    Origin.RECOVERED: (Style(color="red", bold=True), "⟦", "⟧", "recovered (drawn after a rejection)"),
    Origin.BONUS: (Style(color="blue", bold=True), "⟨", "⟩", "bonus (nothing was rejected)"),
}
"""The colour, the brackets without colours, and the meaning of each token's mark."""


class TokenPainter:
    """Converts the pieces of one answer to marked text, or to ids without a tokenizer.

    A character of several tokens gets the mark of the token that completes it.
    """

    def __init__(self, tokenizer: Tokenizer | None, colour: bool) -> None:
        self._detokenizer = None if tokenizer is None else StreamDetokenizer(tokenizer)
        self._colour = colour
        self._parts: deque[tuple[str, Origin]] = deque()  # tokens with text that no piece has so far
        self._text = ""  # of pieces, without its tokens so far
        self._last = Origin.BONUS

    def paint(self, piece: Piece) -> str:
        tokens = zip(piece.token_ids, piece.origins, strict=True)
        if self._detokenizer is None:
            return "".join(_marked(str(token), origin, self._colour) + " " for token, origin in tokens)
        for token, origin in tokens:
            self._parts.append((self._detokenizer.push([token]), origin))
            self._last = origin
        if piece.answer is not None:
            self._parts.append((self._detokenizer.finish(), self._last))
        self._text += piece.text
        rest = self._take()
        if piece.answer is not None:
            rest, self._text = rest + visible(self._text), ""
        return rest

    def _take(self) -> str:
        """Mark text with known tokens; around a possible stop text, tokens and text arrive at different times."""
        marked: list[str] = []
        while self._text and self._parts:
            part, origin = self._parts.popleft()
            taken = part[: len(self._text)]
            if len(part) > len(taken):
                self._parts.appendleft((part[len(taken) :], origin))
            if taken:
                marked.append(_marked(taken, origin, self._colour))
            self._text = self._text[len(taken) :]
        return "".join(marked)


def _marked(text: str, origin: Origin, colour: bool) -> str:
    style, opening, closing, _ = _MARKS[origin]
    text = visible(text)
    return style.render(text, color_system=ColorSystem.STANDARD) if colour else f"{opening}{text}{closing}"


def legend(colour: bool) -> str:
    """The meaning of the marks in one line, itself marked."""
    return " · ".join(_marked(text, origin, colour) for origin, (*_, text) in _MARKS.items())


def writer(tokenizer: Tokenizer | None, terminal: Terminal, show_drafts: bool) -> Callable[[Piece], None]:
    """A function that writes the pieces of one answer to standard output; without a tokenizer it writes ids."""
    if show_drafts:
        painter = TokenPainter(tokenizer, terminal.colour)
        return lambda piece: terminal.write(painter.paint(piece))
    if tokenizer is None:
        return lambda piece: terminal.write("".join(f"{token} " for token in piece.token_ids))
    return lambda piece: terminal.write(visible(piece.text))


def written(answer: Answer, tokenizer: Tokenizer | None, terminal: Terminal, show_drafts: bool) -> str:
    """A whole answer as `writer` would have written it."""
    if show_drafts:
        from truedraft.engine import Piece

        whole = Piece(answer.text or "", answer.token_ids, answer.origins, answer)
        return TokenPainter(tokenizer, terminal.colour).paint(whole)
    return " ".join(map(str, answer.token_ids)) if answer.text is None else visible(answer.text)
