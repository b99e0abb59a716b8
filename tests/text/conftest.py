from __future__ import annotations

import pytest
from tiny_tokenizers import BUILDERS, TOK512, byte_level, small_llama, stories_tokenizer

from truedraft.text.tokenizer import Tokenizer


@pytest.fixture(scope="session", params=sorted(BUILDERS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(BUILDERS[request.param](), request.param)


@pytest.fixture(scope="session")
def bytes_bpe() -> Tokenizer:
    return Tokenizer(byte_level(), "byte-level")


@pytest.fixture(scope="session")
def llama() -> Tokenizer:
    return Tokenizer(small_llama(), "llama")


@pytest.fixture(scope="session")
def stories() -> Tokenizer:
    if not TOK512.is_file():
        pytest.skip("shared/data/models/stories260K/tok512.model is absent")
    return Tokenizer(stories_tokenizer(), "stories260K")
