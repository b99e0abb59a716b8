"""From callers' prompts to token ids that the target can run."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard

from truedraft.core.params import SamplingParams
from truedraft.errors import OptionError, PromptError, TruedraftError, UnknownOptionError
from truedraft.models.base import LanguageModel, Reader
from truedraft.models.multimodal import MultimodalPrompt
from truedraft.text.tokenizer import ChatOptions

Messages: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as a prompt; the model's chat template converts it to token ids."""

    messages: Messages
    how: ChatOptions = field(default_factory=ChatOptions)


TextPrompt: TypeAlias = str | Sequence[int]
Prompt: TypeAlias = TextPrompt | MultimodalPrompt | Chat


def chats_of(messages: Prompt | Messages | Sequence[Messages], how: ChatOptions) -> Prompt | list[Chat]:
    """A conversation, or each of several, as prompts.

    Raises:
        PromptError: it is neither, or a message lacks its role or content.
        OptionError: an option is not the template's.
        UnknownOptionError: there is no such option.
    """
    for name in how:
        if name in SamplingParams.__dataclass_fields__:
            raise OptionError(f"is a sampling option; give SamplingParams({name}=...)", field=name)
        if name not in ChatOptions.__annotations__:
            raise UnknownOptionError.nearest("option of a chat", name, ChatOptions.__annotations__)
    if isinstance(messages, list | tuple) and messages and all(map(_is_chat, messages)):
        return [_chat(each, how) for each in messages]
    if _is_chat(messages):
        return _chat(messages, how)
    held = sorted({type(each).__name__ for each in messages}) if isinstance(messages, list | tuple) else []
    raise PromptError(
        'a chat is a list of messages as {"role": "user", "content": "Hello"}, and several are a list of such lists; '
        f"got a {type(messages).__name__}{' of ' * bool(held)}{' and '.join(held)}"
    )


def _chat(messages: Messages, how: ChatOptions) -> Chat:
    if not messages:
        raise PromptError("messages is empty; give at least one")
    for place, message in enumerate(messages):
        if "role" not in message or not {"content", "tool_calls"} & {*message}:
            lacks = "content" if "role" in message else "role"
            raise PromptError(f"messages[{place}] has no {lacks!r}, only {', '.join(map(repr, message)) or 'nothing'}")
    return Chat(messages, how)


def is_messages(given: object) -> TypeGuard[Messages]:
    """Whether this is a non-empty conversation."""
    return _is_chat(given) and bool(given)


def _is_chat(given: object) -> TypeGuard[Messages]:
    return isinstance(given, list | tuple) and all(isinstance(each, Mapping) for each in given)


def is_one(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt: a text, or ids. A list of either is several; an empty list is no prompt.

    Raises:
        PromptError: it is neither.
    """
    if isinstance(prompt, str | MultimodalPrompt | Chat):
        return True
    if is_messages(prompt) or (isinstance(prompt, list | tuple) and any(map(is_messages, prompt))):
        raise PromptError("messages of a chat are no prompt; give them to engine.chat, which uses the chat template")
    if isinstance(prompt, _NO_LISTS) or not hasattr(prompt, "__getitem__"):
        raise _wrong_type(prompt)
    if len(prompt) == 0:
        return not isinstance(prompt, list | tuple)
    first = prompt[0]
    if isinstance(first, MultimodalPrompt | Chat):
        return False
    return not isinstance(first, Collection) or getattr(first, "ndim", 1) == 0


def params_of_each(
    count: int, params: SamplingParams | Sequence[SamplingParams] | None
) -> Sequence[SamplingParams | None]:
    """The options of each of several prompts.

    Raises:
        OptionError: neither one SamplingParams nor a list of them.
        PromptError: their number is not that of the prompts.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple):
        raise OptionError(f"sampling options are a SamplingParams, or a list of them, got {type(params).__name__}")
    if len(params) != count:
        raise PromptError(f"{count} prompts need one SamplingParams or {count} of them, got {len(params)}")
    return params


def encode_prompt(target: Reader, prompt: TextPrompt) -> list[int]:
    """Token ids of a prompt, checked against the target's ids and context.

    Raises:
        PromptError: the prompt is empty, too long, of the wrong type, or has ids that do not exist.
    """
    if target.sources is not None and target.sources.sound is not None:
        raise PromptError(
            f"{target.name!r} hears and reads no text; from Python give a MultimodalPrompt.heard of a sound, which the "
            "command line and the server do not take"
        )
    is_text = isinstance(prompt, str)
    ids = _encode_text(target, prompt) if isinstance(prompt, str) else _whole_numbers(prompt)
    if not ids:
        raise PromptError("the prompt has no tokens; give at least one")
    _check_ids(target, ids)
    return _within_context(target, ids if target.sources is None else target.sources.text(ids, continues=not is_text))


def encode_chat(target: Reader, chat: Chat) -> list[int]:
    """Token ids of a conversation up to the beginning of its answer, checked as in `encode_prompt`.

    Raises:
        PromptError: as `encode_prompt`; or the model has no chat template, or its template rejects these messages.
    """
    if target.tokenizer is None:
        raise PromptError(f"{target.name!r} has no tokenizer, so no chat template; give token ids")
    most: ChatOptions = {"most_tokens": target.context_length} if target.sources is None else {}
    return encode_prompt(target, target.tokenizer.chat(chat.messages, **(most | chat.how)))


def encode_inputs(target: LanguageModel, prompt: MultimodalPrompt) -> list[int]:
    """Token ids of a prompt with images or sound, checked as in `encode_prompt`, with inputs that the target accepts.

    Raises:
        PromptError: as `encode_prompt`, or the target does not accept such inputs.
    """
    _check_inputs(target, prompt)
    ids = _whole_numbers(prompt.token_ids)
    _check_ids(target, ids)
    return _within_context(target, ids if target.sources is None else target.sources.heard(prompt.inputs, ids))


def check_max_tokens(target: Reader, max_tokens: int) -> None:
    """Refuse more tokens than the target's context can hold after any prompt.

    A smaller number is accepted; the answer ends with the finish reason "length" when the context is full.

    Raises:
        OptionError: says what the context can hold.
    """
    if max_tokens > target.context_length:
        raise OptionError(
            f"must be at most {target.context_length}, the context of {target.name!r} for prompt and answer together, "
            f"got {max_tokens}",
            field="max_tokens",
        )


def _check_ids(target: Reader, ids: Sequence[int]) -> None:
    vocab = target.vocab_size
    wrong = next((token for token in ids if not 0 <= token < vocab), None)
    if wrong is not None:
        raise PromptError(f"token id {wrong} is outside 0 to {vocab - 1}, the ids of {target.name!r}")


def _within_context(target: Reader, ids: list[int]) -> list[int]:
    context = target.most_tokens(ids)
    if len(ids) >= context:
        raise _too_long(target, f"{len(ids)} tokens", context)
    return ids


def _too_long(target: Reader, has: str, context: int) -> PromptError:
    return PromptError(
        f"the prompt has {has}, and {target.name!r} has a context of {context} for prompt and answer together; "
        "shorten it"
    )


def _check_inputs(target: LanguageModel, prompt: MultimodalPrompt) -> None:
    """Check the inputs of a prompt against those that the target's forward accepts."""
    unknown = sorted(set(prompt.inputs) - target.input_names)
    if unknown and not target.input_names:
        raise PromptError(f"the prompt has {unknown[0]} beside its tokens, and {target.name!r} reads text alone here")
    if unknown:
        known = ", ".join(sorted(target.input_names))
        raise PromptError(
            f"the prompt has {unknown[0]} beside its tokens, and {target.name!r} takes none; it takes {known}"
        )
    if target.sources is None and len(prompt.token_ids) < 2:
        raise PromptError("a MultimodalPrompt has at least a placeholder and a token of text behind it")


def _encode_text(target: Reader, prompt: str) -> list[int]:
    if target.tokenizer is None:
        raise PromptError(f"{target.name!r} has no tokenizer; give a prompt as a list of token ids, not text")
    if not prompt:
        raise PromptError("the prompt is empty; give at least one character")
    if target.sources is None and (least := target.tokenizer.least_tokens(prompt)) >= target.context_length:
        raise _too_long(target, f"{least} tokens or more", target.context_length)
    try:
        return target.tokenizer.encode(prompt)
    except TruedraftError:
        raise
    except Exception as error:
        raise PromptError(f"the tokenizer of {target.name!r} failed ({type(error).__name__}: {error})") from error


_NO_LISTS = (bytes, bytearray, memoryview, Mapping, Set)
"""Their elements may be numbers, but they are not ordered ids."""


def _whole_numbers(prompt: Sequence[int]) -> list[int]:
    if isinstance(prompt, _NO_LISTS) or not hasattr(prompt, "__iter__"):
        raise _wrong_type(prompt)
    return [_whole_number(token) for token in prompt]


def _whole_number(token: object) -> int:
    if not isinstance(token, bool) and "bool" not in str(getattr(token, "dtype", "")):
        try:
            # index, unlike int, rejects 2.7 and "2", and accepts the integers of numpy and torch.
            return operator.index(token)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise PromptError(f"a prompt is a text or a list of token ids, which are whole numbers, got {token!r} among them")


def _wrong_type(prompt: object) -> PromptError:
    return PromptError(f"a prompt is a text or a list of token ids, got {type(prompt).__name__}")
