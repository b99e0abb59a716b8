"""From a conversation and its tools, in the format of any endpoint, to a prompt and its answers.

The chat template describes functions and the format of calls; calls are parsed from the text. A required call
(`tool_choice` "required", or a function by name) is forced by a grammar, arguments included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Request as HttpRequest
from pydantic import AfterValidator, Field

from truedraft.core.params import SamplingParams, Structured
from truedraft.errors import PromptError, PromptLengthError
from truedraft.models.multimodal import MultimodalPrompt
from truedraft.server.errors import invalid, quoted
from truedraft.server.fields import Fields, SamplingFields, Thinking
from truedraft.server.front import Front
from truedraft.server.service import ResponseHandle
from truedraft.text.answers import AnswerReader
from truedraft.text.calls import Call, parsed
from truedraft.text.histories import first_taken
from truedraft.text.notations import Notation
from truedraft.text.schemas import misfit, unheld
from truedraft.text.tokenizer import ChatOptions

MOST_TOOLS = 1024
"""Limit of functions per request, including those in namespaces and in the conversation."""


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    kind = schema.get("type", "object")
    if "object" not in (kind if isinstance(kind, list) else [kind]):
        raise ValueError(f"must be the schema of an object, got one of type {quoted(kind)}")
    return schema


FunctionName = Annotated[str, Field(min_length=1)]
Parameters = Annotated[dict[str, Any], AfterValidator(_of_an_object)]
"""The schema of a function's arguments, which are an object."""


class FunctionFields(Fields):
    """A function that may be called."""

    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class ToolFields(Fields):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionFields


class NamedFunction(Fields):
    """A function by its name."""

    name: str


class NamedTool(Fields):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The requested use of tools; `tools` is empty if no call is possible.

    Attributes:
        forced: grammar of required calls; None leaves calls to the model.
        unheld: required functions with free arguments, because no grammar supports their schema; the reasons by name.
    """

    notation: Notation
    tools: Sequence[FunctionFields] = ()
    forced: Structured | None = None
    parallel: bool = True
    unheld: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        tools: Sequence[FunctionFields],
        choice: str | NamedFunction | None,
        parallel: bool | None,
        notation: Notation,
        fields: tuple[str, str] = ("tools", "tool_choice"),
    ) -> ToolUse:
        """From the fields of a request; `fields` are the client's names of those for tools and tool choice."""
        listed, chosen = fields
        if not tools and choice not in (None, "none", "auto"):
            raise invalid(chosen, f"{chosen} requires a call and {listed} is empty; list tools there")
        if len(tools) > MOST_TOOLS:
            raise invalid(listed, f"{listed} holds {len(tools)} functions, of at most {MOST_TOOLS}")
        names = Counter(tool.name for tool in tools)
        if twice := next((name for name, count in names.items() if count > 1), None):
            raise invalid(listed, f"{listed} has two functions called {quoted(twice)}; rename or leave out one")
        if not tools or choice == "none":
            return cls(notation)
        several, schemas, free = parallel is not False, schemas_of(tools), dict[str, str]()
        if choice in (None, "auto"):
            return cls(notation, tools, None, several)
        if isinstance(choice, NamedFunction):
            if choice.name not in names:
                message = f"{chosen} names {quoted(choice.name)}; {listed} has {', '.join(map(quoted, names))}"
                raise invalid(chosen, message)
            several, schemas = False, {choice.name: schemas[choice.name]}
        elif len(tools) > 1:
            free = {name: why for name, schema in schemas.items() if schema and (why := unheld(schema))}
        form = notation.grammar(schemas | dict.fromkeys(free), parallel=several)
        return cls(notation, tools, form, several, free)

    @property
    def warnings(self) -> list[str]:
        return [
            f"{name} is called with free arguments, which are checked: its schema, {why}"
            for name, why in self.unheld.items()
        ]

    def misfits(self, calls: Iterable[Call]) -> list[str]:
        """What is wrong with the arguments of calls that no grammar enforced."""
        found, schemas = [], schemas_of(self.tools)
        for call in (each for each in calls if self.forced is None or each.name in self.unheld):
            schema, value = schemas.get(call.name), parsed(call.arguments)
            if not schema or value is None:
                continue
            try:
                if wrong := misfit(schema, value):
                    found.append(f"{call.id} calls {call.name} with arguments that do not match its schema: {wrong}")
            except ValueError as error:
                found.append(f"the arguments of {call.id}, which calls {call.name}, were not checked: {error}")
        return found

    def fitted(self, params: SamplingParams) -> SamplingParams:
        """Options with the grammar of an answer's text, if there is one, embedded in the notation."""
        if self.forced is not None or params.structured is None:
            return params
        return replace(params, structured=self.notation.answered(params.structured))


def schemas_of(tools: Iterable[FunctionFields]) -> dict[str, dict[str, Any] | None]:
    """The schema of each function's arguments, by name."""
    return {tool.name: tool.parameters for tool in tools}


def called(identity: str | None, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """An earlier call in the format of chat templates: its arguments as an object, if they are one."""
    value = parsed(arguments) if isinstance(arguments, str) else arguments
    function = {"name": name, "arguments": value if isinstance(value, dict) else arguments}
    return ({} if identity is None else {"id": identity}) | {"type": "function", "function": function}


@dataclass(frozen=True)
class Conversation:
    """A conversation to be answered.

    Attributes:
        messages: in the format of chat templates; `prompt` removes the URLs of pictures from them.
        param: the request field that holds the messages.
        max_tokens: per answer; None is the rest of the context.
        counts: whether it may be longer than the context, because its tokens are only counted.
    """

    messages: Sequence[Mapping[str, Any]]
    use: ToolUse
    thinks: Thinking
    param: str = "messages"
    form: Structured | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    max_tokens: int | None = None
    logprobs: int | None = None
    counts: bool = False
    warnings: Sequence[str] = ()

    async def prompt(self, front: Front, http: HttpRequest, samples: int = 1) -> list[int] | MultimodalPrompt:
        """The conversation as its template writes it, in a thread if long; pictures reserve places for `samples`."""
        urls = await front.run_in_thread(http, self._urls)
        if not urls:
            return await front.run_in_thread(http, self._ids, front)
        front.reserve(http, max(samples, 1))  # its range is checked later
        messages, how = await front.run_in_thread(http, self._templated, front)
        return await front.pictures.chat(messages, urls, param=self.param, **how)

    def _urls(self) -> list[str]:
        contents = [each["content"] for each in self.messages if not isinstance(each["content"], str)]
        return [part.pop("url") for content in contents for part in content if part["type"] == "image"]

    def _ids(self, front: Front) -> list[int]:
        target = front.service.engine.target
        tokenizer = target.tokenizer
        if tokenizer is None:
            raise invalid(
                None, "this model has no tokenizer, so there are no chats; use /v1/completions with token ids"
            )
        messages, how = self._templated(front)
        try:
            if not self.counts and target.sources is None:
                how["most_tokens"] = target.context_length
            return first_taken(messages, partial(tokenizer.chat, **how))
        except PromptError as error:
            code = "context_length_exceeded" if isinstance(error, PromptLengthError) else "invalid_value"
            raise invalid(self.param, str(error), code) from error

    def _templated(self, front: Front) -> tuple[list[Mapping[str, Any]], ChatOptions]:
        """Messages and options for the chat template; a system message describes the tools if the template does not."""
        use, messages = self.use, list(self.messages)
        tools = [{"type": "function", "function": each.model_dump(exclude_none=True)} for each in use.tools]
        if any(message.get("tool_calls") or message.get("tool_call_id") for message in messages):
            messages = list(front.history.fitted(messages, use.notation))
        if tools and "tools" not in front.template:
            text = use.notation.tools_text(tools)
            # Many templates allow only one system message.
            if messages[0]["role"] == "system" and isinstance(messages[0]["content"], str):
                text += "\n\n" + messages.pop(0)["content"]
            messages.insert(0, {"role": "system", "content": text})
        return messages, {
            "tools": front.history.tools(tools) if tools else None,
            "template": front.chat_template,
            "variables": {**front.switches(self.thinks), **self.variables},
            "continues": self.continues,
            "trust_control_tokens": front.options.trust_control_tokens,
        }

    async def answers(self, front: Front, body: SamplingFields, http: HttpRequest) -> ResponseHandle:
        """Queue the answers."""
        prompt, use = await self.prompt(front, http, body.samples), self.use
        ids = prompt.token_ids if isinstance(prompt, MultimodalPrompt) else prompt
        left = front.service.engine.target.most_tokens(ids) - len(ids)
        if left < 1:
            message = f"the conversation has {len(ids)} tokens, and this model's context is {left + len(ids)}"
            raise invalid(self.param, f"{message}; shorten it", "context_length_exceeded")
        most = left if self.max_tokens is None else self.max_tokens
        sampling = partial(body.sampling, most, logprobs=self.logprobs, form=use.forced or self.form)
        params = await front.run_in_thread(http, lambda: use.fitted(sampling()))
        answering = await front.begin([prompt], params, body, http, notation=front.notation)
        inside, formed = front.reasons(use.notation, prompt), use.forced is not None
        schemas = schemas_of(use.tools)
        for each in answering.streams:
            each.reader = AnswerReader(
                use.notation, schemas, parallel=use.parallel, reasoning_open=inside, calls_only=formed
            )
        return answering
