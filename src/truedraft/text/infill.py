"""Infilling: a text between a prefix and a suffix, by the tokens that a model was trained with for it.

Which they are is told by the vocabulary. All families but Mistral's write the prefix first, the suffix behind it, and
then the token behind which the answer begins; Mistral's write the suffix first, and the answer follows the prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.errors import PromptError
from truedraft.text.control_tokens import ControlTokens
from truedraft.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Family:
    """The names of the tokens of one family.

    Attributes:
        prefix: before the text that stands before the answer.
        suffix: before the text that stands behind it.
        middle: before the answer; None where the suffix stands first, and the answer follows the prefix.
        ends: which end the answer beside these, where the vocabulary has them.
    """

    prefix: str
    suffix: str
    middle: str | None
    ends: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """The tokens that are written."""
        return tuple(name for name in (self.prefix, self.suffix, self.middle) if name is not None)


_FAMILIES = (
    _Family(  # Qwen 2.5 Coder and later, CodeGemma, Granite 4
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
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
_ANCHOR = "\u263a"  # a character that no tokenizer joins with what follows


@dataclass(frozen=True, slots=True)
class Infilling:
    """How one tokenizer asks for a text in the middle.

    Attributes:
        tokenizer: as given.
        control: its tokens that stay text where an editor's text spells them.
        prefix: token before the text that stands before the answer.
        suffix: token before the text that stands behind it.
        middle: token before the answer; None where the answer follows the prefix.
        ends: tokens that end an answer.
    """

    tokenizer: Tokenizer
    control: ControlTokens
    prefix: int
    suffix: int
    middle: int | None
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Infilling:
        """By the first family of which a vocabulary has all tokens.

        Raises:
            PromptError: it has those of none.
        """
        backend = tokenizer.backend
        for family in _FAMILIES:
            names = (*family.needed, *family.ends)
            found = dict(zip(names, map(backend.convert_tokens_to_ids, names), strict=True))
            ids = {name: number for name, number in found.items() if number not in (None, backend.unk_token_id)}
            if all(name in ids for name in family.needed):
                control = ControlTokens(backend, tokenizer.name, "".join(names))
                middle = None if family.middle is None else ids[family.middle]
                ends = tuple(sorted(set(ids.values())))
                return cls(tokenizer, control, ids[family.prefix], ids[family.suffix], middle, ends)
        raise PromptError(
            f"needs tokens for a text in the middle, such as <|fim_middle|>, and the vocabulary of {tokenizer.name!r} "
            "has none; leave it out, or take a model that was trained with them",
            field="suffix",
        )

    def prompt(self, before: str, behind: str) -> list[int]:
        """The token ids behind which the text between two texts follows.

        Raises:
            PromptError: a text spells a token that this tokenizer cannot keep as text.
        """
        first = self.tokenizer.backend.bos_token_id
        begun = [first] if first is not None and self.tokenizer.encode("")[:1] == [first] else []
        head = [self.prefix, *self.control.literal_ids(before)]
        tail = [self.suffix, *self._continued(behind)]
        return [*begun, *tail, *head] if self.middle is None else [*begun, *head, *tail, self.middle]

    def _continued(self, text: str) -> list[int]:
        """The ids of a text in the middle of another; SentencePiece would put a space before it."""
        ids = self.control.literal_ids(text)
        if not ids or not str(self.tokenizer.backend.convert_ids_to_tokens(ids[0])).startswith("\u2581"):
            return ids
        anchor = self.control.literal_ids(_ANCHOR)
        both = self.control.literal_ids(_ANCHOR + text)
        return both[len(anchor) :] if both[: len(anchor)] == anchor else ids
