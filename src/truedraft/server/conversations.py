"""From a conversation and its tools, in the format of any endpoint, to a prompt and its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import Request as HttpRequest

from truedraft.core.params import SamplingParams, Structured
from truedraft.errors import PromptError, PromptLengthError
from truedraft.models.multimodal import MultimodalPrompt
from truedraft.server.answers import Answers
from truedraft.server.errors import ApiError
from truedraft.server.fields import SamplingFields, Thinking
from truedraft.server.front import Front
from truedraft.server.tools import ToolUse, schemas_of
from truedraft.text.calls import Schemas
from truedraft.text.histories import first_taken
from truedraft.text.notations import AnswerReader
from truedraft.text.tokenizer import ChatOptions


@dataclass(frozen=True)
class Conversation:
    """A conversation to be answered.

    Attributes:
        messages: in the format of chat templates; `prompt` removes the URLs of pictures from them.
        form: grammar of the answer's text; None for free text.
        more: further variables of the chat template.
        continues: whether the answer continues the last message.
        param: the request field that holds the messages.
        samples: number of requested answers; their places are reserved while pictures are read.
        counts: whether it may be longer than the context, because its tokens are only counted.
    """

    front: Front
    http: HttpRequest
    messages: Sequence[Mapping[str, Any]]
    use: ToolUse
    thinks: Thinking
    form: Structured | None = None
    more: dict[str, Any] = field(default_factory=dict)
    continues: bool = False
    param: str = "messages"
    samples: int = 1
    counts: bool = False

    async def prompt(self) -> list[int] | MultimodalPrompt:
        """The conversation formatted by the chat template, in a thread if it is long.

        Raises:
            ApiError: there is no template, it refuses the messages, the pictures cannot be used, or there is no room.
            OptionError: the further variables are not variables of the template.
        """
        variables = self.front.switches(self.thinks) | self.more
        urls = await self.front.apart(self.http, self._urls)
        if not urls:
            return await self.front.apart(self.http, self._ids, variables)
        self.front.reserve(self.http, max(self.samples, 1))  # its range is checked later
        messages, how = await self.front.apart(self.http, self._told, variables)
        return await self.front.pictures.chat(messages, urls, param=self.param, **how)

    def _urls(self) -> list[str]:
        """Remove and return the URLs of its pictures."""
        contents = [each["content"] for each in self.messages if not isinstance(each["content"], str)]
        return [part.pop("url") for content in contents for part in content if part["type"] == "image"]

    def _ids(self, variables: Mapping[str, Any]) -> list[int]:
        target = self.front.service.engine.target
        tokenizer = target.tokenizer
        if tokenizer is None:
            message = "this model has no tokenizer, so there are no chats; ask /v1/completions with token ids"
            raise ApiError(400, message)
        messages, how = self._told(variables)
        try:
            if not self.counts and target.sources is None:
                how["most_tokens"] = target.context_length
            return first_taken(messages, partial(tokenizer.chat, **how))
        except PromptLengthError as error:
            raise ApiError(400, str(error), param=self.param, code="context_length_exceeded") from error
        except PromptError as error:
            raise ApiError(400, str(error), param=self.param, code="invalid_value") from error

    def _told(self, variables: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], ChatOptions]:
        """Messages and options for the chat template; a system message describes the tools if the template does not."""
        front, use = self.front, self.use
        tools = [{"type": "function", "function": each.model_dump(exclude_none=True)} for each in use.tools]
        messages = list(self.messages)
        if any(message.get("tool_calls") or message.get("tool_call_id") for message in messages):
            messages = list(front.history.fitted(messages, use.notation))
        if tools and "tools" not in front.template:
            text = use.notation.told(tools)
            # Many templates allow only one system message.
            if messages[0]["role"] == "system" and isinstance(messages[0]["content"], str):
                text += "\n\n" + messages.pop(0)["content"]
            messages.insert(0, {"role": "system", "content": text})
        return messages, {
            "tools": front.history.tools(tools) if tools else None,
            "template": front.chat_template,
            "variables": variables,
            "continues": self.continues,
            "trust_control_tokens": front.trust_control_tokens,
        }

    async def answers(self, body: SamplingFields, max_tokens: int | None, logprobs: int | None = None) -> Answers:
        """Queue the answers.

        Args:
            max_tokens: per answer; None is the rest of the context.
            logprobs: number of top logprobs per token; None for none.

        Raises:
            ApiError: the context has no room, the request is invalid, or the queue has no room for it.
            OptionError: a value is out of range.
        """
        prompt, front, use = await self.prompt(), self.front, self.use
        ids = prompt.token_ids if isinstance(prompt, MultimodalPrompt) else prompt
        left = front.service.engine.target.most_tokens(ids) - len(ids)
        if left < 1:
            message = f"the conversation has {len(ids)} tokens, and this model's context is {left + len(ids)}"
            raise ApiError(400, f"{message}; shorten it", param="messages", code="context_length_exceeded")
        most = left if max_tokens is None else max_tokens

        def prepared() -> tuple[SamplingParams, Schemas]:
            params = body.sampling(most, logprobs=logprobs, form=use.forced or self.form)
            return use.fitted(params), schemas_of(use.tools)

        params, schemas = await front.apart(self.http, prepared)
        answering = await front.begin([prompt], params, body, self.http, notation=front.notation)
        how = {
            "parallel": use.parallel,
            "reasoning_open": front.reasons(use.notation, prompt),
            "calls_only": use.forced is not None,
        }
        readers = [AnswerReader(use.notation, schemas, **how) for _ in answering.streams]
        return Answers(front, answering, readers, use)
