"""The tokenizer gives every text back unchanged."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes.common import END_OF_TEXT

from truedraft.training.texts.data import load_tokenizer, save_tokenizer

HARD = [
    "", " ", "\n", "def f():\n\treturn 1\r\n    \n\n  x", "  leading and trailing  ", "don 't . clean , this",
    "héllo wörld — 東京 \U0001f600 \x00\x7f", "a" * 500, "\n\n\n        deep = [1,2,3333333]\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def loaded(tokenizer, tmp_path_factory):
    """Saved and loaded again."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(tokenizer, folder)
    return load_tokenizer(folder)


@settings(max_examples=60, deadline=None)
@given(st.text())
def test_any_text_round_trips(tokenizer, text):
    if END_OF_TEXT not in text:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert 0 not in ids


def test_hard_texts_and_what_ids_mean_are_the_same_when_it_was_loaded(tokenizer, loaded):
    for text in HARD:
        assert loaded.encode(text) == tokenizer.encode(text)
        assert loaded.decode(loaded.encode(text)) == text
    assert loaded.eos_token_id == tokenizer.eos_token_id == 0 and len(tokenizer) == 300
    ids = tokenizer.encode("total\n    return")
    assert "\n    " in [tokenizer.decode([token]) for token in ids], "a line break keeps its indentation"
