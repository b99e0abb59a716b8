"""How model families write function calls and reasoning, recognized by their chat templates: one row each."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from truedraft.core.params import Structured
from truedraft.errors import OptionError
from truedraft.text.calls import CallText, NamedText, ParametersText, RecordText, Schemas, new_call_id, words_of
from truedraft.text.forms import MOST_CHARACTERS
from truedraft.text.schemas import moved, options_of, parts_of, referred_in, self_contained, types_of, values_of

_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
_EXAMPLE: Mapping[str, Any] = {"ARGUMENT": "VALUE"}


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The marks around a model's reasoning."""

    opening: str
    closing: str

    def opens(self, prompt: str) -> bool:
        """Whether a prompt ends inside reasoning, so that the answer begins there."""
        return prompt.rstrip().endswith(self.opening)


@dataclass(frozen=True, slots=True)
class Record:
    """A JSON object with the name and the arguments; `arguments` is the key of these."""

    arguments: str = "arguments"

    def reader(self, notation: Notation, tools: Schemas) -> CallText:
        return RecordText(("arguments", "parameters"))

    def rules(self, notation: Notation, name: str, schema: Mapping[str, Any], rule: str) -> Iterator[str]:
        """Rules of a Lark grammar; the one called `rule` matches a call with its marks."""
        place = f"#/properties/{self.arguments}"
        top, arguments, layout = parts_of(moved(schema, place))
        properties: dict[str, Any] = {"name": {"const": name}, self.arguments: arguments}
        if notation.id_pattern:
            properties["id"] = {"type": "string", "pattern": f"^{notation.id_pattern}$"}
        record = {**top, "x-guidance": layout, "type": "object", "properties": properties}
        record |= {"required": list(properties), "additionalProperties": False}
        yield f"{rule}: {notation.literal(notation.opening)} {rule}_record {notation.literal(notation.closing)}"
        yield f"{_about(name)} {place}"
        yield f"{rule}_record: %json {json.dumps(record, ensure_ascii=False)}"

    def call(self, notation: Notation, name: str, arguments: Mapping[str, Any]) -> str:
        record = json.dumps({"name": name, self.arguments: arguments}, ensure_ascii=False)
        return f"{notation.opening}{record}{notation.closing}"


@dataclass(frozen=True, slots=True)
class Named:
    """A name, followed by a JSON object of the arguments."""

    def reader(self, notation: Notation, tools: Schemas) -> CallText:
        return NamedText(notation, lambda name: RecordText(()))

    def rules(self, notation: Notation, name: str, schema: Mapping[str, Any], rule: str) -> Iterator[str]:
        top, arguments, layout = parts_of(schema)
        shown = json.dumps({"type": "object", **top, **arguments, "x-guidance": layout}, ensure_ascii=False)
        heads = [notation.head(name, *each) for each in ((notation.opening, notation.between), *notation.also)]
        yield f"{rule}: ({' | '.join(heads)}) {rule}_arguments {notation.literal(notation.closing)}"
        yield _about(name)
        yield f"{rule}_arguments: %json {shown}"

    def call(self, notation: Notation, name: str, arguments: Mapping[str, Any]) -> str:
        shown = json.dumps(arguments, ensure_ascii=False)
        known = next((each for each in ("0", "0" * 9) if re.fullmatch(notation.id_pattern, each)), "")
        return f"{notation.opening}{name}{notation.between.replace('{id}', known)}{shown}{notation.closing}"


@dataclass(frozen=True, slots=True)
class Parameters:
    """A name, followed by the arguments one by one: strings verbatim, everything else as JSON.

    `opening` is before an argument's name, `middle` before its value and `closing` after the value.
    """

    opening: str
    middle: str
    closing: str

    def reader(self, notation: Notation, tools: Schemas) -> CallText:
        marks, closing = (self.opening, self.middle, self.closing), words_of(notation.closing)
        opening = words_of(notation.opening), notation.between.strip()[:1] or "<"
        return NamedText(notation, lambda name: ParametersText(marks, closing, opening, tools.get(name)))

    def rules(self, notation: Notation, name: str, schema: Mapping[str, Any], rule: str) -> Iterator[str]:
        schema = self_contained(schema)
        _, arguments, layout = parts_of(schema)
        required = arguments.get("required")
        known = arguments.get("properties")
        parts: list[str] = []
        for number, (key, each) in enumerate(known.items() if isinstance(known, Mapping) else ()):
            parts.append(f"{rule}_{number}" + ("" if isinstance(required, list) and key in required else "?"))
            before = notation.literal(self.opening + key + self.middle)
            yield f"{rule}_{number}: {before} {rule}_{number}_value"
            yield _about(name, key)
            yield from self._value(notation, f"{rule}_{number}_value", each, schema, layout)
        if not parts and arguments.get("additionalProperties") is not False:
            parts.append(f"{rule}_any*")
            yield f"{rule}_any: {notation.literal(self.opening)} /[\\w.-]+/ {notation.literal(self.middle)} {rule}_text"
            yield from self._value(notation, f"{rule}_text", {"type": "string"}, schema, layout)
        head = notation.head(name, notation.opening, notation.between)
        yield f"{rule}: {head} {' '.join(parts)} {notation.literal(notation.closing)}"

    def _value(
        self, notation: Notation, rule: str, schema: Any, root: Mapping[str, Any], layout: Mapping[str, Any]
    ) -> Iterator[str]:
        closing, types = notation.literal(self.closing), types_of(schema, root)
        options = [(each, "string" in types_of(each, root)) for each in options_of(schema, root)]
        texts = [values_of(each) for each, is_text in options if is_text]
        if types == {"boolean"}:  # in JSON, or in Python's notation, which some templates show
            yield f'{rule}: ("true" | "false" | "True" | "False") {closing}'
        elif "string" not in types:
            yield _json_rule(rule, schema, root, layout)
            yield f"{rule}: {rule}_json {closing}"
        elif None not in texts:
            values = [value for each in texts for value in each or ()]
            shown = [notation.literal(each if isinstance(each, str) else json.dumps(each)) for each in values]
            if others := [each for each, is_text in options if not is_text]:
                yield _json_rule(rule, {"anyOf": others}, root, layout)
                shown.append(f"{rule}_json")
            yield f"{rule}: ({' | '.join(shown)}) {closing}"
        elif closing.startswith('"') and "<[" not in closing:
            yield f"{rule}[suffix={closing}]: /(?s:.*)/"
        else:  # a special token, which no text contains
            yield f"{rule}: /(?s:.*)/ {closing}"

    def call(self, notation: Notation, name: str, arguments: Mapping[str, Any]) -> str:
        shown = [
            self.opening + key + self.middle + (value if isinstance(value, str) else json.dumps(value)) + self.closing
            for key, value in arguments.items()
        ]
        return f"{notation.opening}{name}{notation.between}{''.join(shown)}{notation.closing}"


Body: TypeAlias = Record | Named | Parameters
"""The text between the marks around a call."""


def _about(name: str, key: str | None = None) -> str:
    """A comment before a schema, which error messages about the schema quote."""
    return f"// function {json.dumps(name)}" + ("" if key is None else f", argument {json.dumps(key)}")


def _json_rule(rule: str, schema: Any, root: Mapping[str, Any], layout: Mapping[str, Any]) -> str:
    value = {**referred_in(schema, root), **schema, "x-guidance": layout} if isinstance(schema, Mapping) else schema
    return f"{rule}_json: %json {json.dumps(value, ensure_ascii=False)}"


@dataclass(frozen=True, slots=True)
class Notation:
    """How calls are written: `begin opening NAME between ARGUMENTS closing separator opening ... end`."""

    name: str
    shown: tuple[str, ...]  # texts that a chat template of this notation contains, all of them
    body: Body
    begin: str = ""
    opening: str = ""
    between: str = ""  # between name and arguments, if the name comes first; `{id}` is the id of the call
    closing: str = ""
    separator: str = ""
    end: str = ""
    also: tuple[tuple[str, str], ...] = ()  # further pairs of opening and between that models write
    ends: tuple[str, ...] = ()  # special tokens that end a turn, in addition to those in the model's settings
    id_pattern: str = ""  # regular expression of the id in a call; "" for notations without ids
    call_id: str = "{id}"  # format of the id returned with a result, from the call's `name` and `id`
    new_id: Callable[[], str] = new_call_id  # makes an id if the model wrote none
    channels: bool = False
    leads: tuple[str, ...] = ()  # alternative texts that a model writes before plain text
    reasoning: ReasoningMarks | None = None
    special: Mapping[str, int] = field(default_factory=dict)  # ids of tokens in the marks that are matched as a whole

    @property
    def bare(self) -> bool:
        """Whether a call has no marks and is at the beginning of an answer."""
        return not self.opening and not self.end

    @property
    def end_ids(self) -> tuple[int, ...]:
        return tuple(self.special[each] for each in self.ends if each in self.special)

    @property
    def described(self) -> str:
        calls = "come as text: the chat template shows no known notation" if not self.shown else f"by {self.name!r}"
        marks = self.reasoning
        thoughts = "not marked" if marks is None else f"between {marks.opening} and {marks.closing}"
        return f"calls of functions {calls}; reasoning {thoughts}"

    def tools_text(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The system text that describes the tools, for templates that do not."""
        lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
        form = self.written([("NAME", _EXAMPLE)])
        return "\n".join(["You may call these functions:", *lines, f"To call one, write:\n{form}"])

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        begin = "" if self.bare else self.begin
        return begin + self.separator.join(self.body.call(self, *call) for call in calls) + self.end

    def grammar(self, tools: Schemas, *, parallel: bool) -> Structured:
        """A Lark grammar of one or more calls of these functions; an `OptionError` if it is too long for a form."""
        rules, size = list[str](), 0
        for number, (name, schema) in enumerate(tools.items()):
            for line in self.body.rules(self, name, schema or _ANY_ARGUMENTS, f"call_{number}"):
                rules.append(line)
                size += len(line)
                if size > MOST_CHARACTERS:  # before the rest is made, which may repeat the common part many times
                    message = f"make a form of more than {MOST_CHARACTERS} characters; give fewer, or simpler schemas"
                    raise OptionError(message, field="tools")
        more = f" ({self.literal(self.separator)} any_call)*" if parallel and not self.channels else ""
        start = f"start: {'' if self.bare else self.literal(self.begin)} any_call{more} {self.literal(self.end)}"
        any_call = " | ".join(f"call_{number}" for number in range(len(tools)))
        return Structured("grammar", "\n".join([start, f"any_call: {any_call}", *rules]))

    def answered(self, form: Structured) -> Structured:
        """The form of an answer with plain text that has a form."""
        if not self.leads:
            return form
        kind, value = form.kind, form.value
        if kind == "choice":
            rule = " | ".join(json.dumps(each, ensure_ascii=False) for each in value)
        elif kind == "regex":
            rule = "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", value) + "/"
        elif kind == "grammar":
            rule = f"%lark {{\n{value}\n}}"
        else:
            top, schema, layout = parts_of(json.loads(value) if kind == "json_schema" else _ANY_ARGUMENTS)
            rule = f"%json {json.dumps({**top, **schema, 'x-guidance': layout}, ensure_ascii=False)}"
        leads = " | ".join(map(self.literal, self.leads))
        return Structured("grammar", f"start: ({leads}) answer\nanswer: {rule}")

    def literal(self, text: str) -> str:
        if not text:
            return ""
        if not self.special:
            return json.dumps(text, ensure_ascii=False)
        parts = re.split("(" + "|".join(map(re.escape, sorted(self.special, key=len, reverse=True))) + ")", text)
        return " ".join(
            f"<[{self.special[part]}]>" if part in self.special else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    def head(self, name: str, opening: str, between: str) -> str:
        """A call up to its arguments, in Lark's notation."""
        before, written, after = between.rpartition("{id}")
        if not written:
            return self.literal(opening + name + between)
        parts = (self.literal(opening + name + before), f"/{self.id_pattern}/", self.literal(after))
        return " ".join(filter(None, parts))

    @property
    def marks(self) -> str:
        reasoning = (self.reasoning.opening, self.reasoning.closing) if self.reasoning is not None else ()
        spelled = [text for pair in self.also for text in pair]
        named = (self.begin, self.opening, self.between, self.closing, self.end, self.body.call(self, "NAME", _EXAMPLE))
        return "\n".join([*named, *spelled, *self.ends, *reasoning, *(_HARMONY if self.channels else ())])


def _short_id() -> str:
    return secrets.token_hex(5)[:9]


_HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>")
_HERMES = Notation(
    "hermes", ("<tool_call>", '"arguments'), Record(), opening="<tool_call>\n", closing="\n</tool_call>", separator="\n"
)
_DEEPSEEK: dict[str, Any] = {"begin": "<｜tool▁calls▁begin｜>", "end": "<｜tool▁calls▁end｜>"}
_MISTRAL: dict[str, Any] = {"id_pattern": "[a-zA-Z0-9]{9}", "new_id": _short_id}

NOTATIONS: tuple[Notation, ...] = (
    Notation(
        "gpt-oss", ("<|channel|>", "to=", "functions."), Named(), opening="<|channel|>commentary to=functions.",
        between=" <|constrain|>json<|message|>",
        also=(
            (" to=functions.", "<|channel|>commentary json<|message|>"),
            ("<|start|>assistant<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
            ("<|start|>assistant to=functions.", "<|channel|>commentary json<|message|>"),
        ),
        ends=("<|call|>", "<|return|>"), channels=True,
        leads=("<|channel|>final<|message|>", "<|start|>assistant<|channel|>final<|message|>"),
        reasoning=ReasoningMarks("<|channel|>analysis<|message|>", "<|end|>"),
    ),
    Notation(
        "kimi-k2", ("<|tool_call_argument_begin|>",), Named(), begin="<|tool_calls_section_begin|>",
        opening="<|tool_call_begin|>functions.", between=":{id}<|tool_call_argument_begin|>",
        closing="<|tool_call_end|>", end="<|tool_calls_section_end|>", id_pattern="[0-9]{1,3}",
        call_id="functions.{name}:{id}",
    ),
    Notation(
        "deepseek-v3", ("<｜tool▁call▁begin｜>", "```json"), Named(),
        opening="<｜tool▁call▁begin｜>function<｜tool▁sep｜>", between="\n```json\n",
        closing="\n```<｜tool▁call▁end｜>", separator="\n", **_DEEPSEEK,
    ),
    Notation(
        "deepseek-v3.1", ("<｜tool▁call▁begin｜>",), Named(), opening="<｜tool▁call▁begin｜>", between="<｜tool▁sep｜>",
        closing="<｜tool▁call▁end｜>", **_DEEPSEEK,
    ),
    Notation(
        "mistral-call-id", ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), Named(), opening="[TOOL_CALLS]",
        between="[CALL_ID]{id}[ARGS]", **_MISTRAL,
    ),
    Notation(
        "mistral-args", ("[TOOL_CALLS]", "[ARGS]"), Named(), opening="[TOOL_CALLS]", between="[ARGS]",
        new_id=_short_id,
    ),
    Notation("mistral", ("[TOOL_CALLS]",), Record(), begin="[TOOL_CALLS][", separator=", ", end="]", **_MISTRAL),
    Notation(
        "glm-4.5", ("<tool_call>", "<arg_key>", "\n<arg_value>"),
        Parameters("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"), opening="<tool_call>", between="\n",
        closing="</tool_call>", separator="\n",
    ),
    Notation(
        "glm-4.7", ("<tool_call>", "<arg_key>"), Parameters("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
        opening="<tool_call>", closing="</tool_call>",
    ),
    Notation(
        "qwen3-coder", ("<tool_call>", "<function=", "<parameter="),
        Parameters("<parameter=", ">\n", "\n</parameter>\n"), opening="<tool_call>\n<function=", between=">\n",
        closing="</function>\n</tool_call>", separator="\n",
    ),
    Notation(
        "seed-oss", ("<seed:tool_call>", "<function=", "<parameter="),
        Parameters("<parameter=", ">", "</parameter>\n"), opening="<seed:tool_call>\n<function=", between=">\n",
        closing="</function>\n</seed:tool_call>", separator="\n",
    ),
    _HERMES,
    Notation("llama", ('"parameters": dictionary',), Record("parameters"), begin="<|python_tag|>", separator="; "),
)  # fmt: skip
"""A template has the first notation of which it contains all `shown` texts."""

UNKNOWN = replace(_HERMES, name="text", shown=())
"""For templates without a known notation. The prompt describes the format of calls; calls in other formats are text."""

REASONING: tuple[ReasoningMarks, ...] = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
)


def notation_of(template: str, tokens: Mapping[str, int] | None = None) -> Notation:
    """The notation of a chat template (several templates: their joined texts), with its reasoning marks.

    `tokens` has the ids of those that the tokenizer matches as a whole, which marks may contain.
    """
    found = next((each for each in NOTATIONS if all(text in template for text in each.shown)), UNKNOWN)
    marks = next((each for each in REASONING if each.opening in template or each.closing in template), None)
    found = replace(found, reasoning=found.reasoning or marks)
    text = found.marks
    return replace(found, special={token: number for token, number in (tokens or {}).items() if token in text})
