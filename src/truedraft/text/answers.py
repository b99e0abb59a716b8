"""Answers split into text, reasoning and calls: by marks, or by channels (messages with headers) as of gpt-oss."""

from __future__ import annotations

import re

from truedraft.text.calls import Call, CallDelta, CallsReader, Reasoning, Schemas, new_call_id, overlap, parsed
from truedraft.text.notations import Notation

_BODY = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"\bto=([^\s<]+)")
_HEADS = ("<|start|>", "<|channel|>", _BODY, "to=")


class ChannelReader:
    """Splits messages of several channels into text, reasoning and calls.

    A message to a function is a call, the channels "final" and "commentary" are text, and everything else is reasoning.
    Other output in place of a header is text, and so is a call with arguments that are not a JSON object. If `tools` is
    empty, or no further call is allowed, a call is reasoning. Calls that a grammar has `formed` are streamed as they
    arrive, truncated ones too; others are returned when complete.
    """

    def __init__(self, tools: Schemas, parallel: bool, calls: list[Call], formed: bool) -> None:
        self._tools, self._parallel, self._calls, self._formed = tools, parallel, calls, formed
        self._raw: list[str] = []  # of a call, with its header
        self.reasoned = 0  # characters of the reasoning at the beginning of the answer, marks included
        self._pushed = 0
        self._held = ""
        self._kind: type[str] | type[Reasoning] | None = None  # of the message; None in a header, and in a call
        self._call: Call | None = None
        self._seen: set[type[str] | type[Reasoning]] = set()  # kinds already returned

    def push(self, text: str, *, last: bool = False) -> list[str | Reasoning | CallDelta]:
        self._held += text
        self._pushed += len(text)
        found: list[str | Reasoning | CallDelta] = []
        reading = True
        while reading:
            in_header = self._kind is None and self._call is None
            reading = self._read_header(found, last) if in_header else self._read_message(found, last)
        return found

    def _read_header(self, found: list[str | Reasoning | CallDelta], last: bool) -> bool:
        head, mark, rest = self._held.partition(_BODY)
        start = head.lstrip()
        begins = any(each.startswith(start[: len(each)]) for each in _HEADS)
        if start and (not begins or (last and not any(map(start.startswith, _HEADS)))):
            self._kind = str
            return True
        if not mark:
            return False
        channel, to = _CHANNEL.search(head), _TO.search(head)
        self._held = rest
        name = to[1] if to is not None else ""
        allowed = bool(self._tools) and (self._parallel or not self._calls)
        if allowed and (name.startswith("functions.") or name in self._tools):
            self._call = Call(new_call_id(), name.removeprefix("functions."))
            self._raw = [head + mark]
            if self._formed:
                found.append(CallDelta(len(self._calls), self._call, True, ""))
        else:
            is_text = not name and (channel is None or channel[1] in ("final", "commentary"))
            self._kind = str if is_text else Reasoning
            if self._kind in self._seen:
                found.append(self._part("\n\n"))
        return True

    def _part(self, text: str) -> str | Reasoning:
        return text if self._kind is str else Reasoning(text)

    def _read_message(self, found: list[str | Reasoning | CallDelta], last: bool) -> bool:
        held = self._held
        end, mark = min(((place, mark) for mark in _ENDS if (place := held.find(mark)) >= 0), default=(-1, ""))
        kept = 0 if last or end >= 0 else max(overlap(held, mark) for mark in _ENDS)
        text = held[:end] if end >= 0 else held[: len(held) - kept]
        self._held = held[end:].removeprefix("" if mark in _HEADS else mark) if end >= 0 else held[len(text) :]
        if self._call is not None:
            self._call.arguments += text
            self._raw.append(text)
            if text and self._formed:
                found.append(CallDelta(len(self._calls), self._call, False, text))
            if end >= 0 or last:
                self._end_call(self._call, found)
        elif self._kind is not None and text:
            self._seen.add(self._kind)
            found.append(self._part(text))
        if self._kind is Reasoning and str not in self._seen:
            self.reasoned = self._pushed - len(self._held)
        if end >= 0 or last:
            self._kind = self._call = None
        return end >= 0

    def _end_call(self, call: Call, found: list[str | Reasoning | CallDelta]) -> None:
        if not self._formed:
            if not isinstance(parsed(call.arguments), dict):
                self._seen.add(str)
                found.append("".join(self._raw))
                return
            number = len(self._calls)
            found += [CallDelta(number, call, True, ""), CallDelta(number, call, False, call.arguments)]
        self._calls.append(call)


class AnswerReader:
    """Splits a streamed answer into text, reasoning and calls. The result does not depend on how the text is chunked.

    Reasoning is the text between its marks at the beginning of an answer. Whitespace around it is dropped. Without
    `tools` no calls are parsed; `calls` has those parsed to their end or to the end of the answer.

    Args:
        reasoning_open: whether the prompt ends inside reasoning.
        calls_only: whether a form allows no text, so that what looks like text is a truncated call.
    """

    def __init__(
        self,
        notation: Notation,
        tools: Schemas | None = None,
        *,
        parallel: bool = True,
        reasoning_open: bool = False,
        calls_only: bool = False,
    ) -> None:
        self._calls_only = calls_only
        self.calls: list[Call] = []
        self._channels = ChannelReader(tools or {}, parallel, self.calls, calls_only) if notation.channels else None
        self._reader = CallsReader(notation, tools, parallel, self.calls, calls_only) if tools else None
        self._marks = notation.reasoning
        self._before = self._marks is not None and not reasoning_open  # whether reasoning may still begin
        self._inside = self._marks is not None and reasoning_open
        self._begun = False  # whether any reasoning but whitespace was read
        self._trims = False  # whether whitespace after reasoning is dropped
        self._held = ""
        self._pushed = self._reasoned = 0

    @property
    def reasoned(self) -> int:
        """Number of characters of the reasoning at the beginning of the answer, marks included."""
        if self._channels is not None:
            return self._channels.reasoned
        return self._pushed if self._inside else self._reasoned

    def push(self, text: str, *, last: bool = False) -> list[str | Reasoning | CallDelta]:
        """Parse the next text; returns plain text, reasoning and call deltas, in order."""
        found = self._read(text, last)
        return [part for part in found if not isinstance(part, str)] if self._calls_only else found

    def _read(self, text: str, last: bool) -> list[str | Reasoning | CallDelta]:
        if self._channels is not None:
            return self._channels.push(text, last=last)
        self._pushed += len(text)
        found: list[str | Reasoning | CallDelta] = []
        if self._before or self._inside or self._trims:
            text = self._reason(self._held + text, found, last)
        if self._reader is not None:
            found += self._reader.push(text, last=last)
        elif text:
            found.append(text)
        return found

    def _reason(self, text: str, found: list[str | Reasoning | CallDelta], last: bool) -> str:
        assert self._marks is not None
        opening, closing = self._marks.opening, self._marks.closing
        self._held = ""
        if self._before or (self._inside and not self._begun):  # some models repeat the mark that ends the prompt
            start = text.lstrip()
            if opening.startswith(start) and start != opening and not last:
                self._held = text
                return ""
            if start.startswith(opening):
                text, self._inside = start.removeprefix(opening), True
            self._before = False
        if self._inside:
            end = text.find(closing)
            inside = text if end < 0 else text[:end]
            kept = overlap(inside, closing) if end < 0 and not last else 0
            inside = inside[: len(inside) - kept]
            shown = inside.rstrip() if self._begun else inside.strip()
            if end < 0:
                self._held = text[len(inside.rstrip()) :]
            if shown:
                self._begun = True
                found.append(Reasoning(shown))
            if end < 0:
                return ""
            self._inside, self._trims = False, True
            text = text[end + len(closing) :]
            self._reasoned = self._pushed - len(text)
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text
