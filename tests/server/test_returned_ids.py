"""`return_token_ids`, as vLLM has it: ids of prompts and answers beside their text, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from server.conftest import Running
from truedraft import Engine, SamplingParams

openai = pytest.importorskip("openai")

PROMPT = "class Stack:\n    def push(self, item):"
ASKED: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"return_token_ids": True}}


@pytest.fixture(scope="module")
def client(running: Running) -> Any:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def plain_ids(running: Running, prompt: Any, **params: Any) -> list[int]:
    """What plain decoding answers."""
    return Engine(running.engine.target).generate(prompt, SamplingParams(**params)).token_ids


def test_completions_tell_ids(running: Running, client: Any) -> None:
    tokenizer = running.engine.target.tokenizer
    assert tokenizer is not None
    prompts = [PROMPT, "import os\n"]
    found = client.completions.create(prompt=prompts, max_tokens=12, n=2, **ASKED)
    for choice in found.choices:
        prompt = prompts[choice.index // 2]
        assert choice.token_ids == plain_ids(running, prompt, max_tokens=12)
        assert choice.prompt_token_ids == tokenizer.encode(prompt)
        assert tokenizer.decode(choice.token_ids) == choice.text
    without = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4)
    assert not hasattr(without.choices[0], "token_ids") and not hasattr(without.choices[0], "prompt_token_ids")
    echoed = client.completions.create(prompt=PROMPT, max_tokens=0, echo=True, **ASKED).choices[0]
    assert echoed.token_ids == [] and echoed.prompt_token_ids == tokenizer.encode(PROMPT)


def test_streamed_completions_tell_ids_as_they_come(running: Running, client: Any) -> None:
    tokenizer = running.engine.target.tokenizer
    assert tokenizer is not None
    stop = "return"
    for more in ({}, {"stop": stop}, {"echo": True}):
        chunks = list(client.completions.create(prompt=PROMPT, max_tokens=60, n=2, stream=True, **more, **ASKED))
        expected = plain_ids(running, PROMPT, max_tokens=60, stop=more.get("stop", ()))
        for number in range(2):
            choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == number]
            told = [choice for choice in choices if hasattr(choice, "prompt_token_ids")]
            assert [choice.prompt_token_ids for choice in told] == [tokenizer.encode(PROMPT)]
            assert told[0] is choices[0]
            assert [token for choice in choices for token in getattr(choice, "token_ids", [])] == expected


def test_chats_tell_ids(running: Running, client: Any) -> None:
    messages = [{"role": "user", "content": "Write a stack."}]
    found = client.chat.completions.create(messages=messages, max_tokens=12, **ASKED)
    expected = plain_ids(running, found.prompt_token_ids, max_tokens=12)
    assert found.choices[0].token_ids == expected and found.usage.prompt_tokens == len(found.prompt_token_ids)
    chunks = list(client.chat.completions.create(messages=messages, max_tokens=12, n=2, stream=True, **ASKED))
    assert [chunk.prompt_token_ids for chunk in chunks if hasattr(chunk, "prompt_token_ids")] == [
        found.prompt_token_ids
    ]
    assert hasattr(chunks[0], "prompt_token_ids")
    for number in range(2):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == number]
        assert [token for choice in choices for token in getattr(choice, "token_ids", [])] == expected
    without = client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
    assert not hasattr(without, "prompt_token_ids") and not hasattr(without.choices[0], "token_ids")
