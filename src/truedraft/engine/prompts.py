"""From callers' prompts and options to requests of token ids."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeGuard

from truedraft.core.params import SamplingParams
from truedraft.core.shaping import Form, Shaping
from truedraft.core.token_view import TokenView
from truedraft.drafters.base import DraftRequest
from truedraft.engine.request import Request
from truedraft.errors import OptionError, PromptError, TruedraftError, UnknownOptionError
from truedraft.models.base import LanguageModel, Reader
from truedraft.models.multimodal import MultimodalPrompt
from truedraft.text.detokenizer import TextStream as TextStream
from truedraft.text.forms import Forms as Forms
from truedraft.text.reasoning import ReasonedForm
from truedraft.text.tokenizer import ChatOptions as ChatOptions
from truedraft.text.tokenizer import Tokenizer
from truedraft.verification import Rule

Messages: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as a prompt; the model's chat template converts it to token ids."""

    messages: Messages
    how: ChatOptions = field(default_factory=ChatOptions)


TextPrompt: TypeAlias = str | Sequence[int]
Prompt: TypeAlias = TextPrompt | MultimodalPrompt | Chat
Prompts: TypeAlias = list[str] | list[list[int]] | list[MultimodalPrompt] | list[Chat]
ParamsOfEach: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
"""Sampling options of several prompts: one for all, or one for each."""


def chats_of(messages: Prompt | Messages | Sequence[Messages], how: ChatOptions) -> Prompt | list[Chat]:
    """A conversation, or each of several, as prompts."""
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
    """Whether this is one prompt: a text, or ids. A list of either is several; an empty list is no prompt."""
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


def params_of_each(count: int, params: ParamsOfEach) -> Sequence[SamplingParams | None]:
    """The options of each of several prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple):
        raise OptionError(f"sampling options are a SamplingParams, or a list of them, got {type(params).__name__}")
    if len(params) != count:
        raise PromptError(f"{count} prompts need one SamplingParams or {count} of them, got {len(params)}")
    return params


def encode_prompt(target: Reader, prompt: TextPrompt) -> list[int]:
    """Token ids of a prompt, checked against the target's ids and context."""
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


def encode(target: LanguageModel, prompt: Prompt) -> list[int]:
    """Token ids of any prompt, checked as in `encode_prompt`."""
    if isinstance(prompt, MultimodalPrompt):
        _check_inputs(target, prompt)
        ids = _whole_numbers(prompt.token_ids)
        _check_ids(target, ids)
        return _within_context(target, ids if target.sources is None else target.sources.heard(prompt.inputs, ids))
    if not isinstance(prompt, Chat):
        return encode_prompt(target, prompt)
    if target.tokenizer is None:
        raise PromptError(f"{target.name!r} has no tokenizer, so no chat template; give token ids")
    most: ChatOptions = {"most_tokens": target.context_length} if target.sources is None else {}
    return encode_prompt(target, target.tokenizer.chat(prompt.messages, **(most | prompt.how)))


def check_max_tokens(target: Reader, max_tokens: int) -> None:
    """Refuse more tokens than the target's context can hold after any prompt."""
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
    if unknown := sorted(set(prompt.inputs) - target.input_names):
        known = ", ".join(sorted(target.input_names))
        takes = f"takes none; it takes {known}" if known else "reads text alone here"
        raise PromptError(f"the prompt has {unknown[0]} beside its tokens, and {target.name!r} {takes}")
    if target.sources is None and len(prompt.token_ids) < 2:
        raise PromptError("a MultimodalPrompt has at least a placeholder and a token of text after it")


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


_numbers = itertools.count()  # over all engines, because two of them may share a drafter


def new_request(
    target: LanguageModel,
    ids: Sequence[int],
    params: SamplingParams,
    rule: Rule,
    *,
    sample: int = 0,
    scope: Hashable = None,
    prompt: MultimodalPrompt | None = None,
    forms: Forms | None = None,
    shown: Mapping[int, str] | None = None,
) -> Request:
    """A request for an answer after a prompt's checked ids.

    Args:
        scope: prefixes and prepared forms are shared only with requests of the same scope.
        prompt: its inputs in addition to tokens; prefixes are then shared as a whole.
        shown: names by id of special tokens that its text shows.
    """
    tokens, sources = list(ids), target.source_tokens(ids)
    _check_target(params, target, sources)
    stop_ids = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else target.eos_token_ids)))
    shaping = None
    if params.shapes_logits:
        banned = _ids_of_words(params.bad_words, target.tokenizer)
        _check_known("allowed_token_ids", params.allowed_token_ids, target.vocab_size)
        _check_known("logit_bias", [token for token, _ in params.logit_bias], target.vocab_size)
        _check_known("bad_words", [token for word in banned for token in word], target.vocab_size)
        ends = [token for token in stop_ids if token < target.vocab_size]
        form = _form(params, target, forms, tokens, scope)
        shaping = Shaping(params, tokens, len(tokens), ends, banned, target.vocab_size, form, sources)
    predicted = _predicted(params.prediction, target)
    text = TextStream(target.tokenizer, params.stop, params.min_tokens, shown)
    # The ids of placeholders are the same for different inputs.
    scope, inputs = (scope, None) if prompt is None else ((scope, prompt.digest), prompt.inputs)
    view = TokenView(tokens)
    draft = DraftRequest(next(_numbers), params, view, shaping, scope, predicted, inputs, judged=rule.prefers)
    most_tokens = min(len(tokens) + params.max_tokens, target.most_tokens(ids))
    return Request(draft, tokens, most_tokens, stop_ids, text, rule, sample)


def _check_target(params: SamplingParams, target: LanguageModel, source_tokens: int) -> None:
    if params.prompt_logprobs is not None and source_tokens:
        raise OptionError("is for models that write their prompts, and an encoder reads them", field="prompt_logprobs")
    name = params.adapter
    if name is not None and not target.adapters:
        message = f"names {name!r}, and the target was loaded without adapters; load it with some"
        raise OptionError(message, field="adapter")
    if name is not None and name not in target.adapters:
        raise UnknownOptionError.nearest("adapter", name, target.adapters)


def _form(
    params: SamplingParams, target: LanguageModel, forms: Forms | None, tokens: list[int], owner: Hashable
) -> Form | None:
    structured, span = params.structured, params.reasoning
    if structured is None and (span is None or span.budget is None):
        return None
    if target.tokenizer is None or forms is None:
        name = "structured" if span is None else "reasoning"
        raise OptionError("needs a tokenizer, and this model has none", field=name)
    if span is None:
        assert structured is not None
        return forms.start(structured, tokens, len(tokens), owner)
    start = None if structured is None else partial(forms.start, structured, prompt_tokens=0, owner=owner)
    return ReasonedForm(span, start, target.tokenizer, target.vocab_size, target.eos_token_ids, tokens, len(tokens))


def _predicted(prediction: str | tuple[int, ...] | None, target: LanguageModel) -> tuple[int, ...]:
    if isinstance(prediction, str):
        if target.tokenizer is None:
            raise OptionError("is a text and needs a tokenizer; this model has none, so give ids", field="prediction")
        known = target.tokenizer.plain_ids(prediction)
        ids = tuple(itertools.takewhile(lambda token: token < target.vocab_size, known))
    else:
        ids = prediction or ()
        _check_known("prediction", ids, target.vocab_size)
    if len(ids) > target.context_length:
        raise OptionError(
            f"has {len(ids)} tokens, and this model's context holds {target.context_length}; shorten it",
            field="prediction",
        )
    return ids


def _check_known(field: str, ids: Sequence[int], vocab_size: int) -> None:
    wrong = next((token for token in ids if token >= vocab_size), None)
    if wrong is not None:
        raise OptionError(f"names token id {wrong}, and the model's ids end at {vocab_size - 1}", field=field)


def _ids_of_words(words: Sequence[str | tuple[int, ...]], tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for word in words:
        if not isinstance(word, str):
            found.append(word)
        elif tokenizer is None:
            raise OptionError(f"{word!r} needs a tokenizer, and this model has none; give token ids", field="bad_words")
        elif ids := tokenizer.word_ids(word):
            found += ids
        else:
            raise OptionError(f"holds {word!r}, which is no token of this model; remove it", field="bad_words")
    return found
