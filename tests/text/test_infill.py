"""Infilling prompts, token by token, for the families whose tokens are known."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from text.tiny_tokenizers import byte_level, small_llama
from truedraft.errors import PromptError
from truedraft.text import Tokenizer
from truedraft.text.infill import Infilling

BAR, MARK = "\uff5c", "\u2581"
FAMILIES = (  # prefix, suffix, middle, what else ends an answer
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ("<|file_sep|>",)),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<file_sep>", "<|endoftext|>")),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ()),
    (f"<{BAR}fim{MARK}begin{BAR}>", f"<{BAR}fim{MARK}hole{BAR}>", f"<{BAR}fim{MARK}end{BAR}>", ()),
    (f"{MARK}<PRE>", f"{MARK}<SUF>", f"{MARK}<MID>", (f"{MARK}<EOT>",)),
    ("[PREFIX]", "[SUFFIX]", None, ()),
)


@pytest.mark.parametrize(("family", "special"), zip(FAMILIES, [True, False] * 3, strict=True), ids=str)
def test_a_text_in_the_middle_is_asked_for_by_the_familys_tokens(
    family: tuple[str, str, str | None, tuple[str, ...]], special: bool
) -> None:
    prefix, suffix, middle, ends = family
    backend = byte_level()
    names = [name for name in (prefix, suffix, middle, *ends) if name is not None]
    backend.add_tokens([AddedToken(name, special=special) for name in names])
    tokenizer = Tokenizer(backend)
    infilling = Infilling.of(tokenizer)
    ids = {name: backend.convert_tokens_to_ids(name) for name in names}
    head = [ids[prefix], *tokenizer.plain_ids("def f(")]
    tail = [ids[suffix], *tokenizer.plain_ids(" + 1\n")]
    expected = [*tail, *head] if middle is None else [*head, *tail, ids[middle]]
    assert infilling.prompt("def f(", " + 1\n") == expected
    assert infilling.ends == tuple(sorted(ids.values()))
    typed = infilling.prompt(f"x {suffix} y", f"z{prefix}")
    assert sum(token in ids.values() for token in typed) == len(expected) - len(head + tail) + 2, "typed ones are text"
    assert f"x {suffix} y" in tokenizer.shown_text(typed) and f"z{prefix}" in tokenizer.shown_text(typed)


def test_a_text_behind_gets_no_space_of_its_own_and_a_text_begins_with_its_token() -> None:
    backend = small_llama()
    names = [f"{MARK}<PRE>", f"{MARK}<SUF>", f"{MARK}<MID>"]
    backend.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    pre, suf, mid = map(backend.convert_tokens_to_ids, names)
    ids = Infilling.of(Tokenizer(backend)).prompt("the", "end")
    assert ids[:2] == [backend.bos_token_id, pre] and ids[-1] == mid
    assert backend.convert_ids_to_tokens(ids[ids.index(suf) + 1 : -1]) == ["end"]


def test_a_vocabulary_without_such_tokens_is_told() -> None:
    with pytest.raises(PromptError, match="suffix needs tokens for a text in the middle") as refused:
        Infilling.of(Tokenizer(byte_level(), "small"))
    assert refused.value.field == "suffix" and "'small'" in str(refused.value)
