"""Prompts cut from texts: sides that share nothing, whole lines, and the embedded target's own."""

from __future__ import annotations

import json

import pytest

from truedraft.errors import DataError
from truedraft.models.embedded import heldout_prompts_file
from truedraft.training.texts import prompts
from truedraft.training.texts.data import load_tokenizer
from truedraft.training.texts.prompts import (
    PromptCounts,
    cut_prompts,
    prompts_hash,
    shuffled,
    split_prompts,
    standard_library_prompts,
)

TEXT = "".join(f"x{number} = add(left, {number})\n" for number in range(300))


def decoded(tokenizer, prompts):
    return [tokenizer.decode(prompt) for prompt in prompts]


def test_prompts_begin_with_a_line_and_are_spread_over_all_texts(tokenizer):
    """A short text is a short prompt, and nothing comes twice."""
    texts = [TEXT[:3000], TEXT[3000:]]
    prompts = cut_prompts(texts, tokenizer, 20, 12)
    assert len(prompts) == 20 and all(0 < len(prompt) <= 12 for prompt in prompts)
    starts = [TEXT.find(prompt) for prompt in decoded(tokenizer, prompts)]
    assert starts == sorted(starts) and starts[0] == 0 and starts[-1] > len(TEXT) * 0.9
    assert all(start in (0, 3000) or TEXT[start - 1] == "\n" for start in starts)
    assert decoded(tokenizer, cut_prompts(["ab\n"], tokenizer, 5, 12)) == ["ab\n"]
    assert cut_prompts([], tokenizer, 5, 12) == []


def test_without_held_out_texts_the_end_is_kept_back(tokenizer):
    sets = split_prompts([TEXT], (), tokenizer, PromptCounts(30, 6, 4), 10)
    train, tree, test = (decoded(tokenizer, side) for side in (sets.train, sets.tree, sets.test))
    assert (len(train), len(tree), len(test)) == (30, 6, 4)
    held_out = tokenizer.decode(sets.text[1:].tolist())
    assert TEXT.endswith(held_out) and 0.15 < len(held_out) / len(TEXT) < 0.25
    kept = TEXT[: -len(held_out)]
    assert all(prompt in kept and prompt not in held_out for prompt in train)
    assert all(prompt in held_out for prompt in (*tree, *test))
    assert max(map(held_out.find, tree)) < min(map(held_out.find, test))


def test_few_prompts_keep_back_enough_to_measure_on(tokenizer):
    for count, kept in ((6, 2), (57, 12), (100, 16), (1000, 61)):
        prompts = [[number] for number in range(count)]
        sets = split_prompts([], (), tokenizer, PromptCounts(2000, 64, 64), 10, prompts=prompts)
        assert [*sets.tree, *sets.test, *sets.train] == prompts and len(sets.tree) + len(sets.test) == kept


def test_held_out_texts_are_shared_by_tree_and_test_and_too_little_is_refused(tokenizer):
    sets = split_prompts([TEXT[:4000]], [TEXT[4000:]], tokenizer, PromptCounts(10, 5, 5), 10)
    assert all(prompt in TEXT[:4000] for prompt in decoded(tokenizer, sets.train))
    assert not set(map(tuple, sets.tree)) & set(map(tuple, sets.test))
    with pytest.raises(DataError, match=r"no prompts to .*: give more text"):
        split_prompts(["x"], (), tokenizer, PromptCounts(4, 2, 2), 10)


def test_prompts_that_overlap_count_as_what_their_text_is_worth(tokenizer):
    """Of a short text every line begins a prompt, but they say the same."""
    short = TEXT[:400]
    sets = split_prompts([short], [TEXT[4000:]], tokenizer, PromptCounts(40, 5, 5), 30)
    tokens = len(tokenizer.encode(short, add_special_tokens=False))
    assert sum(map(len, sets.train)) > 2 * tokens
    assert sets.apart == len(sets.train) * tokens // sum(map(len, sets.train)) < len(sets.train) / 2
    enough = split_prompts([TEXT], [TEXT[4000:]], tokenizer, PromptCounts(10, 5, 5), 10)
    assert enough.apart == 10
    records = [f"a{number}\n" for number in range(40)]  # short texts of their own share nothing
    sets = split_prompts(records, [TEXT], tokenizer, PromptCounts(40, 5, 5), 30)
    assert sets.apart == len(sets.train)


def test_shuffled_prompts_are_the_same_prompts_and_their_hash_knows_where_they_end():
    prompts = [[number] for number in range(50)]
    assert shuffled(prompts, 0) == shuffled(prompts, 0) != shuffled(prompts, 1)
    assert shuffled(prompts, 0)[:5] != prompts[:5] and sorted(shuffled(prompts, 0)) == prompts
    assert prompts_hash([[1, 2], [3]]) == prompts_hash([[1, 2], [3]]) != prompts_hash([[1], [2, 3]])


def test_the_embedded_target_keeps_the_files_of_the_shipped_prompts_back(monkeypatch):
    tokenizer = load_tokenizer("embedded:target")
    sets = standard_library_prompts(tokenizer, PromptCounts(40, 12, 32), 32)
    shipped = [json.loads(line) for line in heldout_prompts_file().read_text().splitlines()]
    assert decoded(tokenizer, sets.test) == [record["text"] for record in shipped]
    library = prompts._library()
    held_out = "\0".join(library[record["file"]] for record in shipped if record["file"] in library)
    if held_out:  # another Python may lack those files
        assert all(prompt in held_out for prompt in decoded(tokenizer, sets.tree))
        assert sum(prompt in held_out for prompt in decoded(tokenizer, sets.train)) == 0
    assert not any(prompt in test for prompt in decoded(tokenizer, sets.tree) for test in decoded(tokenizer, sets.test))
    monkeypatch.setattr(prompts, "_library", dict)
    with pytest.raises(DataError, match="without the sources of its standard library"):
        standard_library_prompts(tokenizer, PromptCounts(4, 2, 2), 8)
