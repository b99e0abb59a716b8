"""From a prompt to token ids that the target can run."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from truedraft.errors import PromptError
from truedraft.models.base import LanguageModel


def encode_prompt(target: LanguageModel, prompt: str | Sequence[int]) -> list[int]:
    """Token ids of a prompt, checked against the target's ids and context.

    Raises:
        PromptError: the prompt is empty, too long, of the wrong type, or holds ids that do not exist.
    """
    ids = _encode_text(target, prompt) if isinstance(prompt, str) else _whole_numbers(prompt)
    vocab, context = target.vocab_size, target.context_length
    if not ids:
        raise PromptError("the prompt has no tokens; give at least one")
    wrong = next((token for token in ids if not 0 <= token < vocab), None)
    if wrong is not None:
        raise PromptError(f"token id {wrong} is outside 0 to {vocab - 1}, the ids of {target.name!r}")
    if len(ids) >= context:
        raise PromptError(
            f"the prompt has {len(ids)} tokens, and {target.name!r} has a context of {context} for prompt and "
            "answer together; shorten it"
        )
    return ids


def _encode_text(target: LanguageModel, prompt: str) -> list[int]:
    if target.tokenizer is None:
        raise PromptError(f"{target.name!r} has no tokenizer; give a prompt as a list of token ids, not text")
    if not prompt:
        raise PromptError("the prompt is empty; give at least one character")
    return target.tokenizer.encode(prompt)


def _whole_numbers(prompt: Sequence[int]) -> list[int]:
    try:
        # index, unlike int, refuses 2.7 and "2", and takes the whole numbers of numpy and torch.
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise PromptError(f"a prompt is a text or a list of token ids, got {prompt!r}") from error
