"""A growing text in the ids of another tokenizer: as that one would have written it, whatever the pieces."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from test_translation import TEXTS, between, made, wide
from tiny_tokenizers import LINES, WIDE

from truedraft.text.reencoding import Encoding, FollowedText, whole_characters

LONG = "".join(LINES[:3]) * 3


def encoding(kind: str) -> Encoding:
    tokenizer = made(kind)
    return Encoding(tokenizer, tokenizer.vocab_size, fallback=0)


def text_read(kind: str, ids: Sequence[int]) -> bytes:
    """What they write, without the space that the tokenizer begins texts with."""
    side = encoding(kind)
    return side.text_of(ids).removeprefix(b" " if side.pads else b"")


def follow(target: str, draft: str) -> FollowedText:
    return FollowedText(encoding(target), encoding(draft), between(made(target), made(draft)))


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
@pytest.mark.parametrize("text", [*TEXTS, LONG])
def test_what_follows_is_as_in_the_whole_text(kind: str, text: str) -> None:
    side = encoding(kind)
    whole = made(kind).plain_ids(text)
    for place in range(1, len(whole)):
        known = side.text_of(whole[:place]).decode(errors="ignore").encode()
        rest = side.text_of(whole[place:])
        if known + rest == side.text_of(whole):
            assert side.text_of(side.ids_after(known, rest)) == rest
            assert side.ids_after(known, rest) == list(whole[place:])


def test_a_text_that_begins_inside_a_token_is_spelled() -> None:
    side = encoding("llama")
    assert side.ids_after(b"quick th", b"e end") != list(made("llama").plain_ids("e end"))
    assert side.text_of(side.ids_after(b"quick th", b"e end")) == b"e end"


@pytest.mark.parametrize(("target", "draft"), [("byte-level", "llama"), ("llama", "byte-level")])
@pytest.mark.parametrize("seed", range(4))
def test_a_text_read_in_pieces_is_one_read_at_once(target: str, draft: str, seed: int) -> None:
    """But for its end, which pieces leave open; half characters wait."""
    chance, ids = random.Random(seed), made(target).encode(LONG)
    piecewise, at_once = follow(target, draft), follow(target, draft)
    place = 0
    while place < len(ids):
        place = min(len(ids), place + chance.randint(1, 6))
        piecewise.take(ids[:place])
        written = text_read(target, ids[:place])
        assert text_read(draft, piecewise.ids) + piecewise.half == written
        assert piecewise.half == written[len(whole_characters(written)) :]
    at_once.take(ids)
    assert piecewise.ids == at_once.ids == made(draft).encode(LONG)
    assert (not at_once.ids[0]) == (not made(draft).encode("")) or at_once.ids[0] == made(draft).encode(LONG)[0]


def test_ids_without_text_are_translated() -> None:
    target, draft = made("byte-level"), made("llama")
    text = follow("byte-level", "llama")
    end = target.eos_token_ids[0]
    text.take([*target.encode("the end"), end, *target.encode("the")])
    assert text.ids[0] == draft.encode("")[0]
    assert draft.eos_token_ids[0] in text.ids
    assert text.ids == draft.encode("the end</s>the")
    assert text.known == b"the"


@pytest.mark.parametrize("draft", sorted(WIDE))
@pytest.mark.parametrize("target", sorted(WIDE))
def test_at_every_boundary_the_draft_reads_what_its_own_tokenizer_writes(target: str, draft: str) -> None:
    """Signs for the beginning and spaces included, of all nine pairs of kinds."""
    theirs, ours = wide(target), wide(draft)
    written = Encoding(theirs, theirs.vocab_size, fallback=0)
    read = Encoding(ours, ours.vocab_size, fallback=0)
    text = FollowedText(written, read, between(theirs, ours))
    sentence = "the quick fox jumps over the lazy end in a thick foxhole"
    ids = [token for token in theirs.encode(sentence) if token != theirs.backend.sep_token_id]
    begin = between(theirs, ours).begin
    assert begin == {"byte-level": (), "sentencepiece": (1,), "word pieces": (1,)}[draft]
    for place in range(1, len(ids) + 1):
        text.take(ids[:place])
        so_far = theirs.decode(ids[:place])
        assert tuple(text.ids) == (*begin, *ours.plain_ids(so_far)), so_far
    assert so_far == sentence
