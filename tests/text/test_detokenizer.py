"""The text of a growing sequence of ids, and stop texts: held to decoding all ids again after each one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import TOK512

from truedraft.errors import OptionError
from truedraft.text.detokenizer import ShownTokens, StopScanner, StreamDetokenizer, TextStream
from truedraft.text.tokenizer import Tokenizer

MANY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    detokenizer, at_once = StreamDetokenizer(tokenizer), StreamDetokenizer(tokenizer)
    assert at_once.push(ids) + at_once.finish() == whole
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


# --- stop texts -----------------------------------------------------------------------------------------------

SMALL = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def first_complete(text: str, stops: list[str]) -> int | None:
    """Where the answer ends, letter by letter."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


def scan(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    scanner, emitted = StopScanner(tuple(stops)), ""
    for piece in pieces:
        text, stopped = scanner.push(piece)
        emitted += text
        if stopped:
            assert scanner.push("more") == ("", True) and scanner.finish() == ""
            return emitted, True
    return emitted + scanner.finish(), False


@MANY
@given(pieces=st.lists(SMALL, max_size=8), stops=STOPS)
def test_several_stops_whatever_the_pieces(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    place = first_complete(text, stops)
    assert scan(pieces, stops) == scan(list(text), stops) == ((text, False) if place is None else (text[:place], True))


@MANY
@given(text=SMALL, stops=STOPS)
def test_holds_no_more_than_needed(text: str, stops: list[str]) -> None:
    """What is held is the longest beginning of a stop text, so a stream is never late without a reason."""
    scanner, emitted = StopScanner(tuple(stops)), ""
    for count, letter in enumerate(text, 1):
        piece, stopped = scanner.push(letter)
        emitted += piece
        if stopped:
            return
        held = text[:count][len(emitted) :]
        ends = [text[:count][-n:] for n in range(1, 7) if n <= count]
        beginnings = [end for end in ends if any(stop.startswith(end) and stop != end for stop in stops)]
        assert held == max(beginnings, key=len, default="")


def test_unusable_stops() -> None:
    for stops in (("",), ("a", ""), "ab", (1,)):
        with pytest.raises(OptionError, match="at least one character"):
            StopScanner(stops)


# --- token by token ---------------------------------------------------------------------------------------------


def run(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> tuple[TextStream, int]:
    """The stream, and how many tokens were pushed."""
    stream, emitted, pushed, settled = TextStream(tokenizer, tuple(stops)), "", 0, [0]
    for pushed, token in enumerate(ids, 1):
        text, stopped = stream.push(token)
        emitted += text
        settled.append(stream.settled_tokens)
        assert stream.stopped == stopped
        assert stops or settled[-1] == pushed
        if stopped:
            break
    emitted += stream.finish()
    assert emitted == stream.text
    # What was settled stays so: no later token, and no end, takes it back.
    assert settled == sorted(settled) and settled[-1] <= stream.kept_tokens
    assert not stream.stopped or stream.settled_tokens == stream.kept_tokens
    return stream, pushed


def assert_as_defined(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> None:
    """Against the definition: decode all tokens so far again after each one."""
    stream, pushed = run(tokenizer, ids, stops)
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        place = first_complete(text, stops)
        if place is not None:
            assert (stream.stopped, pushed, stream.text) == (True, count, text[:place])
            counts = range(count + 1)
            assert stream.kept_tokens == next(n for n in counts if tokenizer.decode(ids[:n]).startswith(text[:place]))
            return
    assert (stream.stopped, stream.kept_tokens, stream.text) == (False, len(ids), tokenizer.decode(ids))


@MANY
@given(data=st.data())
def test_any_text_any_part_of_it_as_stop(tokenizer: Tokenizer, data: st.DataObject) -> None:
    letters = st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("the quick\né日👍🏽"))
    ids = tokenizer.encode(data.draw(st.text(letters, min_size=1, max_size=40)))
    text = tokenizer.decode(ids)
    place = data.draw(st.integers(0, max(len(text) - 1, 0)))
    stop = text[place : place + data.draw(st.integers(1, 5))]
    stops = [stop, "zzq"] if stop and "\ufffd" not in stop else ["zzq"]
    assert_as_defined(tokenizer, ids, stops)


@MANY
@given(data=st.data())
def test_any_ids_any_stops(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert_as_defined(tokenizer, ids, data.draw(st.lists(st.text("aet h\n", min_size=1, max_size=2), max_size=3)))


def test_a_line_break_as_byte_token_stops_at_once(llama: Tokenizer) -> None:
    """The run of byte tokens is held back, but the answer need not wait for its end."""
    ids = llama.encode("ab\ncd")
    newline = ids.index(llama.backend.convert_tokens_to_ids("<0x0A>"))
    stream, pushed = run(llama, ids, ["\n"])
    assert (pushed, stream.text, stream.kept_tokens) == (newline + 1, "ab", newline)


def test_broken_bytes_before_a_line_break_do_not_hide_it(llama: Tokenizer) -> None:
    broken, newline, letter = llama.backend.convert_tokens_to_ids(["\ufffd", "<0x0A>", "a"])
    stream, pushed = run(llama, [letter, broken, newline, letter], ["\n"])
    assert (pushed, stream.text, stream.kept_tokens) == (3, "a\ufffd", 2)


def test_an_unfinished_character_is_not_yet_a_replacement_character(llama: Tokenizer) -> None:
    """The second byte of three is also the last one of a stop text."""
    ids = llama.backend.convert_tokens_to_ids(["a", "<0xE3>", "<0xA9>", "<0xAA>", "a"])
    stream, _ = run(llama, ids, ["é", "\ufffd"])
    assert (stream.stopped, stream.text) == (False, "a\u3a6aa")


def test_tokens_are_settled_as_soon_as_their_text_is_out(bytes_bpe: Tokenizer) -> None:
    ids = bytes_bpe.encode("a👍b the the")
    stream, settled = TextStream(bytes_bpe, ("he tea",)), []
    for token in ids:
        stream.push(token)
        settled.append((stream.settled_tokens, stream.text))
    # Of the four tokens of a character the first counts with it, the others with what is behind it; of " the" only " t"
    # is out while a stop text may begin, which suffices.
    assert settled == [*[(1, "a")] * 4, (2, "a👍"), (6, "a👍b"), (7, "a👍b t"), (8, "a👍b the t")]


def test_a_stop_of_replacement_characters_waits_until_they_are_real(bytes_bpe: Tokenizer) -> None:
    ids = bytes_bpe.encode("a👍b\ufffdc")
    assert run(bytes_bpe, ids, ["\ufffd"])[0].text == "a👍b"


def test_finish_finds_a_stop_in_what_was_held(bytes_bpe: Tokenizer) -> None:
    stream, _ = run(bytes_bpe, bytes_bpe.encode("a\ufffd"), ["\ufffd"])
    assert (stream.text, stream.stopped, stream.kept_tokens) == ("a", True, 1)


def test_without_a_tokenizer() -> None:
    stream = TextStream(None, ())
    assert stream.push(5) == ("", False)
    assert (stream.finish(), stream.text, stream.kept_tokens) == ("", "", 1)
    with pytest.raises(OptionError, match="stop_token_ids"):
        TextStream(None, ("x",))


def test_a_long_run_of_byte_tokens_with_stops_takes_no_age(llama: Tokenizer) -> None:
    ids = llama.encode("\u1000" * 700)
    stream, _ = run(llama, ids, ["\n"])
    assert stream.text == "\u1000" * 700


def test_a_stop_text_that_begins_before_the_least_tokens_does_not_count(bytes_bpe: Tokenizer) -> None:
    ids = bytes_bpe.encode("tea tea tea")
    least = next(count for count in range(len(ids)) if bytes_bpe.decode(ids[:count]).startswith("tea t"))
    stream = TextStream(bytes_bpe, ("tea",), least)
    ends = [stream.push(token)[1] for token in ids]
    assert ends.index(True) >= least and stream.text.startswith("tea ") and not stream.text.endswith("tea")
    at_once = TextStream(bytes_bpe, ("tea",))
    assert [at_once.push(token)[1] for token in ids].index(True) < least
