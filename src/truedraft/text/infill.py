"""Infilling: generate the text between a prefix and a suffix, by the tokens that the model was trained with.

All families except Mistral's write the prefix first, then the suffix, and then the token after which the answer begins;
Mistral's write the suffix first, and the answer follows the prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from truedraft.errors import PromptError
from truedraft.text.control_tokens import ControlTokens
from truedraft.text.tokenizer import Tokenizer


class _Family(NamedTuple):
    """Names of tokens: before prefix, suffix and answer, and further ends. Without `middle` the suffix comes first."""

    prefix: str
    suffix: str
    middle: str | None
    ends: tuple[str, ...] = ()


_FAMILIES = (
    _Family(  # Qwen 2.5 Coder and later, CodeGemma, Granite 4
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    _Family(  # StarCoder, Granite
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>", "<filename>", "<|endoftext|>")
    ),
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>", "<|endoftext|>")),  # SantaCoder
    _Family("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
    _Family("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ("\u2581<EOT>",)),  # Code Llama
    _Family("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
_ANCHOR = "\u263a"  # a character that no tokenizer merges with what follows


@dataclass(frozen=True, slots=True)
class Infilling:
    """The infilling tokens of one tokenizer; `control` keeps tokens that the texts of an editor spell as text."""

    tokenizer: Tokenizer
    control: ControlTokens
    prefix: int
    suffix: int
    middle: int | None
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Infilling:
        """By the first family with all its tokens in the vocabulary; a `PromptError` if none has."""
        backend = tokenizer.backend
        for prefix, suffix, middle, ends in _FAMILIES:
            needed = (prefix, suffix) if middle is None else (prefix, suffix, middle)
            found = {name: backend.convert_tokens_to_ids(name) for name in (*needed, *ends)}
            ids = {name: number for name, number in found.items() if number not in (None, backend.unk_token_id)}
            if all(name in ids for name in needed):
                control = ControlTokens(backend, tokenizer.name, "".join(found))
                answer = None if middle is None else ids[middle]
                return cls(tokenizer, control, ids[prefix], ids[suffix], answer, tuple(sorted(set(ids.values()))))
        raise PromptError(
            f"needs tokens for a text in the middle, such as <|fim_middle|>, and the vocabulary of {tokenizer.name!r} "
            "has none; leave it out, or take a model that was trained with them",
            field="suffix",
        )

    def prompt(self, before: str, after: str) -> list[int]:
        """Prompt ids for the text between `before` and `after`."""
        first = self.tokenizer.backend.bos_token_id
        begun = [first] if first is not None and self.tokenizer.encode("")[:1] == [first] else []
        head = [self.prefix, *self.control.literal_ids(before)]
        tail = [self.suffix, *self._continued(after)]
        return [*begun, *tail, *head] if self.middle is None else [*begun, *head, *tail, self.middle]

    def _continued(self, text: str) -> list[int]:
        ids = self.control.literal_ids(text)
        if not ids or not str(self.tokenizer.backend.convert_ids_to_tokens(ids[0])).startswith("\u2581"):
            return ids
        anchor = self.control.literal_ids(_ANCHOR)
        both = self.control.literal_ids(_ANCHOR + text)
        return both[len(anchor) :] if both[: len(anchor)] == anchor else ids
