"""Code as users write it, which `mypy --strict` takes and which runs: tests/test_types.py does both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from truedraft import Answer, Engine, Piece, SamplingParams, TruedraftError, load_model
from truedraft.core.params import Structured
from truedraft.drafters import PromptLookup
from truedraft.models.multimodal import MultimodalPrompt

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def options() -> list[SamplingParams]:
    """Each option in every form that it takes."""
    return [
        SamplingParams(max_tokens=4, stop="\n"),
        SamplingParams(max_tokens=4, stop=["\n", "END"], stop_token_ids=[3]),
        SamplingParams(max_tokens=4, logit_bias={1: 2.0}, bad_words=["bad", [1, 2]]),
        SamplingParams(max_tokens=4, logit_bias=[(1, 2.0)], allowed_token_ids={1, 2, 3}),
        SamplingParams(max_tokens=4, structured=SCHEMA),
        SamplingParams(max_tokens=4, structured=Structured("choice", ["Paris", "Rome"])),
        SamplingParams(max_tokens=4, prediction="The capital", temperature=0.8, seed=7),
    ]


def kept(params: SamplingParams) -> tuple[tuple[str, ...], dict[int, float], Structured | None]:
    """What an option was given as is not what it is kept as."""
    return params.stop, dict(params.logit_bias), params.structured


def load(folder: Path) -> Engine:
    """An engine of a model in a folder."""
    target = load_model(folder, dtype="float32")
    return Engine(target, drafter=PromptLookup(), controller="fixed")


def token_ids(folder: Path) -> list[int]:
    """A chat's ids: whoever loads a model by its name knows whether it has a tokenizer."""
    target = load_model(folder)
    return target.tokenizer.chat(QUESTION) + target.tokenizer.encode("Paris")


def ask(engine: Engine, params: SamplingParams) -> list[Answer]:
    """Prompts and chats, one and several."""
    one: Answer = engine.generate("The capital of France is", params)
    several: list[Answer] = engine.generate(["The capital of France is", "The capital of Italy is"], params)
    by_ids: list[Answer] = engine.generate([[5, 6, 7], [8, 9]], [params, params])
    chat: Answer = engine.chat(QUESTION, params)
    chats: list[Answer] = engine.chat([QUESTION, [*QUESTION, {"role": "assistant", "content": "It"}]], params)
    goes_on: Answer = engine.chat([*QUESTION, {"role": "assistant", "content": "It"}], params, continues=True)
    return [one, *several, *by_ids, chat, *chats, goes_on]


def stream(engine: Engine, params: SamplingParams) -> Iterator[str]:
    """A prompt and a chat, piece by piece."""
    for pieces in (engine.stream("The capital of France is", params), engine.stream(QUESTION, params)):
        piece: Piece
        for piece in pieces:
            yield piece.text


async def ask_async(engine: Engine, params: SamplingParams) -> str:
    """The same in `asyncio`."""
    answer = await engine.agenerate("The capital of France is", params)
    texts = [piece.text async for piece in engine.astream(QUESTION, params)]
    return (answer.text or "") + "".join(texts)


def refused(engine: Engine) -> str:
    """What cannot be answered is one sentence."""
    try:
        engine.generate("")
    except TruedraftError as error:
        return str(error)
    return ""


def prompts() -> list[str | list[int] | MultimodalPrompt]:
    """A prompt in each form that does not need a template."""
    return ["text", [1, 2]]


def drafting(answer: Answer) -> str:
    """What drafting brought."""
    stats = answer.stats
    return f"{stats.mean_acceptance_length:.2f} tokens a call, {stats.draft_tokens} drafted"
