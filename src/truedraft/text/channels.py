"""Answers in channels, as gpt-oss writes them: messages with a header each that names the recipient."""

from __future__ import annotations

import re

from truedraft.text.calls import Call, CallDelta, Reasoning, Schemas, new_call_id, overlap, parsed

_BODY = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"\bto=([^\s<]+)")
_HEADS = ("<|start|>", "<|channel|>", _BODY, "to=")


class ChannelReader:
    """Splits messages of several channels into text, reasoning and calls.

    A message to a function is a call, the channels "final" and "commentary" are text, and everything else is reasoning.
    Other output in place of a header is text, and so is a call with arguments that are not a JSON object.

    Args:
        tools: functions that may be called; if empty, or if no further call is allowed, a call is reasoning.
        formed: whether a grammar constrains the calls. If so, they are streamed as they arrive, truncated ones too;
            otherwise each is returned when complete.

    Attributes:
        reasoned: number of characters of the reasoning at the beginning of the answer, marks included.
    """

    def __init__(self, tools: Schemas, parallel: bool, calls: list[Call], formed: bool) -> None:
        self._tools = tools
        self._parallel = parallel
        self._calls = calls
        self._formed = formed
        self._raw: list[str] = []  # of a call, with its header
        self.reasoned = 0
        self._pushed = 0
        self._held = ""
        self._kind: type[str] | type[Reasoning] | None = None  # of the message; None in a header, and in a call
        self._call: Call | None = None
        self._told: set[type[str] | type[Reasoning]] = set()  # kinds already returned

    def push(self, text: str, *, last: bool = False) -> list[str | Reasoning | CallDelta]:
        self._held += text
        self._pushed += len(text)
        found: list[str | Reasoning | CallDelta] = []
        while self._read_message(found, last) if self._in_message else self._read_header(last, found):
            pass
        return found

    @property
    def _in_message(self) -> bool:
        return self._kind is not None or self._call is not None

    def _read_header(self, last: bool, found: list[str | Reasoning | CallDelta]) -> bool:
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
            if self._kind in self._told:
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
            self._told.add(self._kind)
            found.append(self._part(text))
        if self._kind is Reasoning and str not in self._told:
            self.reasoned = self._pushed - len(self._held)
        if end >= 0 or last:
            self._kind = self._call = None
        return end >= 0

    def _end_call(self, call: Call, found: list[str | Reasoning | CallDelta]) -> None:
        if not self._formed and not isinstance(parsed(call.arguments), dict):
            self._told.add(str)
            found.append("".join(self._raw))
            return
        if not self._formed:
            number = len(self._calls)
            found += [CallDelta(number, call, True, ""), CallDelta(number, call, False, call.arguments)]
        self._calls.append(call)
