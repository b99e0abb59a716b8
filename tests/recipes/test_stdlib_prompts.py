"""Cutting prompts: exact token counts, one file each, in an order that the hashes decide."""

from __future__ import annotations

import json

import pytest
from recipes.common import train_tokenizer
from recipes.stdlib.sources import COUNT, TOKENS, Source, write_prompts

from truedraft.errors import DataError


def sources(count):
    return [
        Source(
            path=f"file_{n}.py",
            text="".join(f"def call_{n}_{i}(value):\n    return value * {i} + {n}\n\n\n" for i in range(60)),
            sha256=f"{n:064x}",
            held_out=True,
        )
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([source.text for source in sources(5)], vocab_size=400, context=128)


def test_every_prompt_has_its_tokens_and_its_own_file(tokenizer, tmp_path):
    path = tmp_path / "prompts.jsonl"
    assert write_prompts(sources(COUNT + 5), tokenizer, path) == COUNT
    prompts = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({prompt["file"] for prompt in prompts}) == COUNT
    for prompt in prompts:
        assert len(tokenizer.encode(prompt["text"])) == prompt["n_tokens"] == TOKENS
        assert prompt["text"].startswith("def ")


def test_files_that_are_too_short_do_not_count(tokenizer, tmp_path):
    short = [Source(f"s{n}.py", "x = 1\n", f"{n:064x}", held_out=True) for n in range(40)]
    with pytest.raises(DataError, match="only 3 held-out files are long enough"):
        write_prompts([*short, *sources(3)], tokenizer, tmp_path / "prompts.jsonl")
