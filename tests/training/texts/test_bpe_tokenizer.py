"""The tokenizer gives every text back unchanged."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes.common import END_OF_TEXT

from truedraft.training.texts.data import load_tokenizer, save_tokenizer

HARD = [
    "",
    " ",
    "\n",
    "def f():\n\treturn 1\r\n    \n\n  x",
    "  leading and trailing  ",
    "don 't . clean , this",
    "héllo wörld — 東京 \U0001f600 \x00\x7f",
    "a" * 500,
    "\n\n\n        deep = [1,2,3333333]\n",
]


@pytest.mark.parametrize("text", HARD)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_any_text_round_trips(tokenizer, text):
    if END_OF_TEXT not in text:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert 0 not in ids


def test_end_of_text_is_id_0_and_the_size_is_as_asked(tokenizer):
    assert tokenizer.eos_token_id == 0
    assert len(tokenizer) == 300


def test_saved_and_loaded_it_is_the_same(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    loaded = load_tokenizer(tmp_path)
    for text in HARD:
        assert loaded.encode(text) == tokenizer.encode(text)
        assert loaded.decode(loaded.encode(text)) == text
    assert loaded.eos_token_id == 0


def test_a_line_break_keeps_its_indentation(tokenizer):
    ids = tokenizer.encode("total\n    return")
    assert "\n    " in [tokenizer.decode([token]) for token in ids]
