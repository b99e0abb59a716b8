from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import TOK512

from truedraft.text.detokenizer import ShownTokens, StreamDetokenizer
from truedraft.text.tokenizer import Tokenizer

MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXTS = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("ab the\n  é日👩‍💻🏽\u0301\ufffd▁")),
    max_size=40,
)
TRICKY = "x 👩‍💻👍🏽 e\u0301 \ufffd\ufffd日本語   the  \n\n🇩🇪 é"


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = StreamDetokenizer(tokenizer)
    return [*(detokenizer.push([token]) for token in ids), detokenizer.finish()]


def assert_exact(tokenizer: Tokenizer, ids: list[int]) -> None:
    whole = tokenizer.decode(ids)
    assert "".join(streamed(tokenizer, ids)) == whole
    detokenizer = StreamDetokenizer(tokenizer)
    so_far = ""
    for count, token in enumerate(ids, 1):
        so_far += detokenizer.push([token])
        assert whole.startswith(so_far)
        assert so_far + detokenizer.pending() == tokenizer.decode(ids[:count])


@MANY
@given(text=TEXTS)
def test_any_text(tokenizer: Tokenizer, text: str) -> None:
    assert_exact(tokenizer, tokenizer.encode(text))


@MANY
@given(data=st.data())
def test_any_ids(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=60))
    assert_exact(tokenizer, ids)


@MANY
@given(raw=st.lists(st.sampled_from([0x20, 0x41, 0x80, 0x9F, 0xA0, 0xBF, 0xC3, 0xE2, 0xED, 0xF0, 0xF1, 0xF4, 0xFF])))
def test_any_bytes(bytes_bpe: Tokenizer, raw: list[int]) -> None:
    """Lead and continuation bytes in every order: where a window is cut must not matter."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2 writes these bytes as themselves
    others = [byte for byte in range(256) if byte not in printable]  # and the others as characters from 256 on
    signs = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    ids = [bytes_bpe.backend.convert_tokens_to_ids(signs[byte]) for byte in raw * 3]
    assert bytes_bpe.decode(ids) == bytes(raw * 3).decode(errors="replace")
    assert_exact(bytes_bpe, ids)


@MANY
@given(data=st.data())
def test_pieces_do_not_depend_on_how_tokens_are_pushed(tokenizer: Tokenizer, data: st.DataObject) -> None:
    blocks = data.draw(st.lists(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6), max_size=12))
    detokenizer, single = StreamDetokenizer(tokenizer), StreamDetokenizer(tokenizer)
    for block in blocks:
        assert detokenizer.push(block) == "".join(single.push([token]) for token in block)
    assert detokenizer.finish() == single.finish()


@pytest.mark.parametrize("seed", range(5))
def test_long_random_ids(tokenizer: Tokenizer, seed: int) -> None:
    draw = random.Random(seed)
    ids = [draw.randrange(tokenizer.vocab_size) for _ in range(2000)]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_no_half_characters(bytes_bpe: Tokenizer, llama: Tokenizer) -> None:
    text = "a👍🏽é日 b"
    for tokenizer in (bytes_bpe, llama):
        pieces = streamed(tokenizer, tokenizer.encode(text))
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
        assert len([piece for piece in pieces if piece]) > 1


def test_a_bad_byte_breaks_its_whole_run(llama: Tokenizer) -> None:
    """Byte fallback makes U+FFFD of every byte of a run with a bad byte, so a run is held until it ends."""
    good, bad = (llama.backend.convert_tokens_to_ids(token) for token in ("<0x41>", "<0xFF>"))
    a = llama.backend.convert_tokens_to_ids("a")
    assert streamed(llama, [a, good, bad, a]) == ["a", "", "", "\ufffd\ufffda", ""]


def test_special_tokens_do_not_move_spaces(llama: Tokenizer) -> None:
    """A window that held only special tokens would drop the space of the next word."""
    the = llama.encode("the")[1:]
    ids = [*the, *[1] * 30, *the, *[2] * 30, *the]
    assert "".join(streamed(llama, ids)) == llama.decode(ids) == "the the the"


@pytest.mark.parametrize("run", ["one broken byte", "one word", "byte tokens"])
def test_cost_per_token_does_not_grow(bytes_bpe: Tokenizer, llama: Tokenizer, run: str) -> None:
    """The window stays short, also where no character is ever complete; counted in tokens decoded, not seconds."""
    tokenizer = llama if run == "byte tokens" else bytes_bpe
    broken = next(i for i in range(1, 257) if bytes_bpe.decode([i]) == "\ufffd" == bytes_bpe.decode([i, i])[1:])
    token = {"one broken byte": broken, "one word": bytes_bpe.encode(" the")[0], "byte tokens": 200}[run]

    decoded = 0
    decode = tokenizer.decode

    class Counting:
        vocab_size, skipped_ids, byte_values = tokenizer.vocab_size, tokenizer.skipped_ids, tokenizer.byte_values

        def decode(self, ids: list[int]) -> str:
            nonlocal decoded
            decoded += len(ids)
            return decode(ids)

    ids = [token] * 3000
    detokenizer = StreamDetokenizer(Counting())
    assert "".join([*(detokenizer.push([i]) for i in ids), detokenizer.finish()]) == decode(ids)
    assert decoded < 40 * len(ids)


def test_the_real_sentencepiece_model(stories: Tokenizer) -> None:
    golden = (TOK512.parent / "greedy200_ids.txt").read_text().split()
    ids = [int(token) for token in golden]
    text = stories.decode(ids)
    assert "Once upon a time" in text
    assert "".join(streamed(stories, ids)) == text
    assert stories.decode(stories.encode(TRICKY)) == TRICKY
    assert_exact(stories, stories.encode(TRICKY))


class Stripping:
    """A decoder that drops spaces at both ends, as slow SentencePiece tokenizers do."""

    vocab_size = 3
    skipped_ids: frozenset[int] = frozenset()
    byte_values: Mapping[int, int] = {}

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(" ab"[token] for token in ids).strip()


@MANY
@given(spaces=st.lists(st.integers(0, 40), max_size=6))
def test_a_decoder_that_strips(spaces: list[int]) -> None:
    ids = [token for count in spaces for token in [*[0] * count, 1, 2]]
    detokenizer = StreamDetokenizer(Stripping())
    pieces = [detokenizer.push([token]) for token in ids]
    assert "".join([*pieces, detokenizer.finish()]) == Stripping().decode(ids)


def test_speed_is_reasonable(bytes_bpe: Tokenizer) -> None:
    ids = bytes_bpe.encode("the quick brown fox " * 100)
    start = time.perf_counter()
    streamed(bytes_bpe, ids)
    assert (time.perf_counter() - start) / len(ids) < 0.005  # ~0.00003 measured; fails only if something is absurd


def test_shown_tokens_stand_in_the_text_by_their_names(tokenizer: Tokenizer) -> None:
    special = [token for token in sorted(tokenizer.skipped_ids) if tokenizer.token_text(token) != "None"]
    names = {token: tokenizer.token_text(token) for token in special[:1]}
    decoder = ShownTokens(tokenizer, names | {tokenizer.plain_ids("a")[-1]: "never"})
    ids = [*tokenizer.plain_ids("the quick"), *special, *tokenizer.plain_ids("the"), *special[:1]]
    stream = StreamDetokenizer(decoder)
    text = "".join([stream.push([token]) for token in ids] + [stream.finish()])
    assert text == decoder.decode(ids) and text.count(names[special[0]]) == 2
    hidden = "".join(tokenizer.decode(tokenizer.plain_ids(part)) for part in ("the quick", "the"))
    assert text.replace(names[special[0]], "") == hidden, "all others stay hidden, and plain tokens are as they were"
