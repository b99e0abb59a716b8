"""Two vocabularies compared by what their ids write, and a growing text in the ids of another tokenizer."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Sequence
from string import ascii_lowercase

import pytest
import torch
from tiny_tokenizers import BUILDERS, LINES, WIDE, byte_level, unigram
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from truedraft.errors import VocabularyMismatchError
from truedraft.text.tokenizer import Tokenizer
from truedraft.text.translation import Encoding, FollowedText, Translation, surfaces, whole_characters

TEXTS = ["the quick fox", "def f(x):\n    return x + 1", "the end. the", "naïve 日"]


ALL = BUILDERS | {"word pieces": WIDE["word pieces"]}


def made(kind: str) -> Tokenizer:
    return Tokenizer(ALL[kind](), kind)


def wide(kind: str) -> Tokenizer:
    return Tokenizer(WIDE[kind](), kind)


def between(target: Tokenizer, draft: Tokenizer) -> Translation:
    sizes = target.vocab_size, draft.vocab_size
    return Translation.between(target, draft, sizes, (target.eos_token_ids, draft.eos_token_ids))


@pytest.mark.parametrize("kind", ALL)
def test_surfaces_write_the_text(kind: str) -> None:
    tokenizer = made(kind)
    writes = surfaces(tokenizer)
    for text in TEXTS[:1] if kind in ("word pieces", "metaspace") else TEXTS:
        written = b"".join(writes[token] or b"" for token in tokenizer.plain_ids(text)).decode()
        assert written.removeprefix(" ") == text


@pytest.mark.parametrize("kind", ALL)
def test_surfaces_are_what_decoding_says(kind: str) -> None:
    tokenizer = made(kind)
    for token, written in enumerate(surfaces(tokenizer)):
        said = tokenizer.token_text(token)
        if written is not None and "\ufffd" not in said and token not in tokenizer.byte_values:
            assert written.decode() == said


@pytest.mark.parametrize(("target", "draft"), [*itertools.permutations(["byte-level", "llama"], 2)])
def test_every_token_is_spelled_in_the_drafts_ids(target: str, draft: str) -> None:
    theirs, ours = made(target), made(draft)
    translation, writes = between(theirs, ours), surfaces(ours)
    for token, text in enumerate(surfaces(theirs)):
        assert translation.reads[token]
        if text:
            assert b"".join(writes[own] or b"" for own in translation.reads[token]) == text
    for mine, its in translation.rounds:
        assert all(
            surfaces(theirs)[token] == writes[own]
            for own, token in zip(mine.tolist(), its.tolist(), strict=True)
            if writes[own]
        )


def test_the_distribution_is_the_drafts_on_what_both_know() -> None:
    """Of several ids that write the same the probabilities are summed, and the rest is left out."""
    target, draft = made("byte-level"), made("llama")
    translation = between(target, draft)
    logits = torch.randn(5, draft.vocab_size, generator=torch.Generator().manual_seed(0))
    probs = torch.softmax(logits.double(), dim=-1)
    expected = torch.zeros(5, target.vocab_size, dtype=torch.float64)
    for mine, its in translation.rounds:
        expected.index_add_(1, its, probs[:, mine])
    expected /= expected.sum(dim=-1, keepdim=True)
    found = torch.softmax(translation.logits(logits).double(), dim=-1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
    assert len(translation.rounds) > 1  # the letters and their bytes
    assert translation.shared == (expected[0] > 0).sum().item() / target.vocab_size


def test_vocabularies_that_share_nothing_are_refused() -> None:
    letters = Backend(models.WordLevel({f"word{number}": number for number in range(100)}, unk_token="word0"))
    strange = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=letters), "strange")
    with pytest.raises(VocabularyMismatchError, match="'byte-level' and 'strange' share 0 tokens"):
        between(made("byte-level"), strange)


def permuted(seed: int) -> PreTrainedTokenizerFast:
    """The byte-level tokenizer with its ids in another order; special and added ones stay."""
    described = json.loads(byte_level().backend_tokenizer.to_str())
    fixed = {each["id"] for each in described["added_tokens"]}
    vocab = described["model"]["vocab"]
    free = sorted(set(vocab.values()) - fixed)
    order = random.Random(seed).sample(free, len(free))
    to = dict(zip(free, order, strict=True))
    described["model"]["vocab"] = {token: to.get(number, number) for token, number in vocab.items()}
    backend = Backend.from_str(json.dumps(described))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", clean_up_tokenization_spaces=False)


def test_a_permuted_vocabulary_is_wholly_shared() -> None:
    target, draft = made("byte-level"), Tokenizer(permuted(1), "permuted")
    translation = between(target, draft)
    assert translation.shared == 1.0 and all(len(ids) == 1 for ids in translation.reads)
    for text in TEXTS:
        assert [translation.reads[token][0] for token in target.plain_ids(text)] == list(draft.plain_ids(text))


@pytest.mark.parametrize("draft", sorted(WIDE))
@pytest.mark.parametrize("target", sorted(WIDE))
def test_tokens_are_read_by_what_they_write(target: str, draft: str) -> None:
    """Of all nine pairs: spaces included, signs for the beginning in place of each other, nothing twice."""
    theirs, ours = wide(target), wide(draft)
    translation, writes = between(theirs, ours), surfaces(ours)
    known = set("".join(text.decode() for text in writes if text and text.isascii()))
    for token, text in enumerate(surfaces(theirs)):
        if text and known.issuperset(text.decode(errors="replace")):
            assert b"".join(writes[own] or b"" for own in translation.reads[token]) == without_lone_spaces(text, draft)
    assert translation.opens == {"byte-level": (), "sentencepiece": (1,), "word pieces": (1,)}[target]
    assert translation.begin == {"byte-level": (), "sentencepiece": (1,), "word pieces": (1,)}[draft]
    if translation.opens and translation.begin:
        assert translation.reads[translation.opens[0]] == translation.begin


def without_lone_spaces(text: bytes, draft: str) -> bytes:
    """Word pieces write a space before a letter alone."""
    return text.strip() if draft == "word pieces" and not text.strip() else text


def many(kind: str, count: int) -> Tokenizer:
    """A tokenizer of a kind with so many tokens, most of which the other kinds have, too."""
    chance = random.Random(0)
    words = dict.fromkeys("".join(chance.choices(ascii_lowercase, k=chance.randint(2, 9))) for _ in range(2 * count))
    inside, before = {"byte-level": ("", "Ġ"), "sentencepiece": ("", "▁"), "word pieces": ("##", "")}[kind]
    first = ["[UNK]", *(f"{mark}{letter}" for mark in (inside, before) for letter in ascii_lowercase)]
    if kind == "byte-level":
        first += sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(first))
    longer = (f"{(inside, before)[number % 2]}{word}" for number, word in enumerate(words))
    names = list(itertools.islice(dict.fromkeys(itertools.chain(first, longer)), count))
    vocab = {name: number for number, name in enumerate(names)}
    if kind == "byte-level":
        backend = Backend(models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    elif kind == "sentencepiece":
        backend = unigram([(name, -5.0) for name in names])
    else:
        backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"), kind)


@pytest.mark.parametrize(("target", "draft"), [("byte-level", "sentencepiece"), ("word pieces", "byte-level")])
def test_50_000_tokens_are_compared_in_seconds(target: str, draft: str) -> None:
    """It takes 0.7 s of a core of the machine that we measure on; what compares each with each would take minutes."""
    theirs, ours = many(target, 50_000), many(draft, 50_000)
    started = time.process_time()
    translation = between(theirs, ours)
    assert time.process_time() - started < 7.0
    assert len(translation.reads) == 50_000 and translation.shared > 0.9


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
