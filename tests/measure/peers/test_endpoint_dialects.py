"""How each kind of server is recognised, asked and read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from measure.peers.scripted_server import Asked, Made, ScriptedServer, completion, models, named_logprobs
from truedraft import SamplingParams
from truedraft.errors import OptionError, PeerError
from truedraft.measure.peers import Endpoint, Question, Reply
from truedraft.text import Tokenizer

PROMPT = "def add(a, b):"
ANSWER = " return a + b\n"


def opened(server: ScriptedServer, tokenizer: Tokenizer | None, **more: Any) -> Endpoint:
    return Endpoint.open(server.url, tokenizer=tokenizer, **more)


def question(tokenizer: Tokenizer, **params: Any) -> Question:
    return Question(tuple(tokenizer.encode(PROMPT)), SamplingParams(**{"max_tokens": 8} | params))


def only(found: Sequence[Reply | PeerError]) -> Reply:
    (reply,) = found
    assert isinstance(reply, Reply), reply
    return reply


def refusal(found: Sequence[Reply | PeerError]) -> str:
    (reply,) = found
    assert isinstance(reply, PeerError), reply
    assert "\n" not in str(reply)
    return str(reply)


def answered(server: ScriptedServer, tokenizer: Tokenizer, **params: Any) -> Reply:
    with opened(server, tokenizer) as endpoint:
        return only(endpoint.ask([question(tokenizer, **params)]))


def refused(server: ScriptedServer, tokenizer: Tokenizer, **params: Any) -> str:
    with opened(server, tokenizer) as endpoint:
        return refusal(endpoint.ask([question(tokenizer, **params)]))


def answers_vllm(server: ScriptedServer, tokenizer: Tokenizer, ids: Sequence[int], **choice: Any) -> None:
    server.handlers["/v1/models"] = models("vllm", "m", root="/models/m")
    server.handlers["/version"] = lambda _: Made({"version": "0.32.0"})

    def answer(asked: Asked) -> Made:
        told = {"token_ids": list(ids), "prompt_token_ids": asked.body["prompt"]} | choice
        return Made(completion(asked.body, told.pop("text", tokenizer.decode(ids)), **told))

    server.handlers["/v1/completions"] = answer


def test_vllm_is_asked_by_ids_with_every_option_said(server: ScriptedServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.plain_ids(ANSWER)
    answers_vllm(server, tokenizer, ids)
    with opened(server, tokenizer) as endpoint:
        assert (endpoint.facts.name, endpoint.facts.version, endpoint.model) == ("vllm", "0.32.0", "m")
        assert endpoint.facts.filters == ("temperature", "min_p", "top_k", "top_p")
        assert endpoint.facts.gives_ids and endpoint.facts.logprobs == "raw"
        reply = only(endpoint.ask([question(tokenizer, temperature=0.8, min_p=0.1, seed=3, stop=("x",))]))
    assert reply == Reply(ids, ANSWER)
    (body,) = server.posted()
    assert body == {
        "model": "m", "prompt": tokenizer.encode(PROMPT), "max_tokens": 8, "temperature": 0.8, "top_p": 1.0,
        "top_k": 0, "min_p": 0.1, "seed": 3, "stop": ["x"], "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False, "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip


def test_what_vllm_would_do_otherwise_is_refused(server: ScriptedServer, tokenizer: Tokenizer) -> None:
    answers_vllm(server, tokenizer, (5,))
    with opened(server, tokenizer) as endpoint:
        cold = refusal(endpoint.ask([question(tokenizer, temperature=0.005)]))
        assert cold == "vllm samples at temperature 0.01 or above, or at 0, got 0.005"
        assert "does not take logprobs_mode" in refusal(endpoint.ask([question(tokenizer, logprobs_mode="processed")]))
    assert not server.posted()


def test_what_ends_an_answer_is_no_token_of_it(server: ScriptedServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.plain_ids(ANSWER)
    logprobs = {
        "tokens": [f"token_id:{token}" for token in (*ids, 0)],
        "token_logprobs": [-float(place) for place in range(len(ids) + 1)],
        "top_logprobs": [{f"token_id:{token}": -0.25, "token_id:7": -2.0} for token in (*ids, 0)],
    }
    answers_vllm(server, tokenizer, (*ids, 0), reason="stop", logprobs=logprobs)
    with opened(server, tokenizer) as endpoint:
        asked = [question(tokenizer, logprobs=2), question(tokenizer, logprobs=2, ignore_eos=True)]
        ended, continues = endpoint.ask(asked)
    assert isinstance(ended, Reply) and isinstance(continues, Reply)
    assert ended.token_ids == ids and ended.finish_reason == "stop"
    assert ended.logprobs == tuple(-float(place) for place in range(len(ids)))
    assert ended.top_logprobs == tuple({token: -0.25, 7: -2.0} for token in ids)
    assert (
        continues.token_ids == (*ids, 0) and continues.logprobs is not None and len(continues.logprobs) == len(ids) + 1
    )


def test_a_stop_token_is_left_out_and_more_tokens_than_asked_for_are_kept(
    server: ScriptedServer, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.plain_ids(ANSWER * 3)
    for text in (ANSWER * 3, tokenizer.decode(ids[:-1])):  # with the text of the stop token, and as vLLM without it
        answers_vllm(server, tokenizer, ids, reason="stop", text=text)
        reply = answered(server, tokenizer, max_tokens=2, stop_token_ids=(ids[-1],))
        assert reply.token_ids == ids[:-1] and len(reply.token_ids) > 2


def test_a_stop_text_cuts_the_text_and_not_the_ids(server: ScriptedServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.plain_ids(ANSWER)
    answers_vllm(server, tokenizer, ids, reason="stop", text=" return")
    reply = answered(server, tokenizer, stop=(" a",))
    assert (reply.token_ids, reply.text) == (ids, " return")
    assert "do not mean the text" in refused(server, tokenizer)


def test_half_a_character_is_compared_up_to_there(server: ScriptedServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.plain_ids("a漢")[:-1]
    assert "\ufffd" in tokenizer.decode(ids)
    for text in ("a", "a\ufffd", "a\ufffd\ufffd"):
        answers_vllm(server, tokenizer, ids, text=text)
        assert answered(server, tokenizer).token_ids == ids
    answers_vllm(server, tokenizer, ids, text="b\ufffd")
    assert "do not mean the text" in refused(server, tokenizer)


def llama_cpp(server: ScriptedServer, **told: Any) -> None:
    server.handlers["/v1/models"] = models("llamacpp", "m.gguf")
    server.handlers["/props"] = lambda _: Made({"build_info": "b6000-abc", "default_generation_settings": {}})
    server.handlers["/completion"] = lambda asked: Made(
        {"stop_type": "limit", "model": "m.gguf", "tokens_evaluated": len(asked.body["prompt"])} | told
    )


def test_llama_cpp_is_asked_by_its_own_json(server: ScriptedServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.plain_ids(ANSWER)
    entries = [
        {"id": token, "token": "?", "logprob": -0.5, "top_logprobs": [{"id": 5, "token": "$", "logprob": -0.1}]}
        for token in (*ids, 0)
    ]
    llama_cpp(server, content=ANSWER, tokens=[*ids, 0], stop_type="eos", completion_probabilities=entries)
    with opened(server, tokenizer) as endpoint:
        assert (endpoint.facts.name, endpoint.facts.version) == ("llama.cpp", "b6000-abc")
        assert endpoint.facts.filters == ("top_k", "top_p", "min_p", "temperature")
        reply = only(endpoint.ask([question(tokenizer, temperature=0.8, top_p=0.9, logprobs=0)]))
        assert "does not take ignore_eos" in refusal(endpoint.ask([question(tokenizer, ignore_eos=True)]))
        assert "takes seeds up to" in refusal(endpoint.ask([question(tokenizer, seed=1 << 32)]))
    assert reply == Reply(ids, ANSWER, "stop", (-0.5,) * len(ids), ({5: -0.1},) * len(ids))
    (body,) = server.posted("/completion")
    neutral = {
        "repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "typical_p": 1.0,
        "top_n_sigma": -1.0, "dry_multiplier": 0.0, "xtc_probability": 0.0, "mirostat": 0, "dynatemp_range": 0.0,
    }  # fmt: skip
    assert body == neutral | {
        "model": "m.gguf", "prompt": tokenizer.encode(PROMPT), "n_predict": 8, "temperature": 0.8, "top_k": 0,
        "top_p": 0.9, "min_p": 0.0, "stop": [], "return_tokens": True, "seed": -1, "n_probs": 1,
    }  # fmt: skip


def test_llama_cpp_knows_no_logprobs_of_tokens_that_it_drafted(server: ScriptedServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.plain_ids(ANSWER)
    entries = [{"id": token, "token": "?", "logprob": 0.0, "top_logprobs": []} for token in ids]
    llama_cpp(server, content=ANSWER, tokens=list(ids), completion_probabilities=entries)
    assert answered(server, tokenizer, logprobs=1) == Reply(ids, ANSWER)
    llama_cpp(server, content=ANSWER, tokens=list(ids), tokens_evaluated=99)
    assert "counts 99 tokens in a prompt of" in refused(server, tokenizer), "it adds some of its own"


def openai_like(
    server: ScriptedServer,
    tokenizer: Tokenizer,
    text: str,
    *,
    takes_ids: bool = True,
    takes_logprobs: bool = True,
    **choice: Any,
) -> None:
    """A server that tells nothing of itself; told count of tokens is that of its text, unless `tokens` says else."""
    server.handlers["/v1/models"] = models("somebody", "m")

    def answer(asked: Asked) -> Made:
        prompt = asked.body["prompt"]
        if not takes_ids and not isinstance(prompt, str):
            return Made({"error": {"message": "prompt must be a string"}}, 400)
        if not takes_logprobs and "logprobs" in asked.body:
            return Made({"error": {"message": "no logprobs here"}}, 400)
        read = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        told = {"prompt_tokens": len(read)} | choice
        if "tokens" not in told:
            told["tokens"] = len(tokenizer.plain_ids(text))
        return Made(completion(asked.body, text, **told))

    server.handlers["/v1/completions"] = answer


def test_a_generic_server_that_names_its_tokens(server: ScriptedServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.plain_ids(ANSWER)
    openai_like(server, tokenizer, ANSWER, logprobs=named_logprobs(tokenizer, ids))
    with opened(server, tokenizer) as endpoint:
        assert endpoint.facts.name == "openai" and endpoint.facts.filters == ("temperature", "top_p")
        assert not endpoint.facts.gives_ids and endpoint.facts.logprobs == "raw"
        assert endpoint.facts.more["prompts"] == "ids"
        reply = only(endpoint.ask([question(tokenizer, temperature=1.0)]))
        assert "does not take top_k" in refusal(endpoint.ask([question(tokenizer, top_k=5)]))
    rival = 3
    assert reply == Reply(ids, ANSWER, "length", (-0.5,) * len(ids), tuple({token: -0.5, rival: -1.5} for token in ids))
    assert set(server.posted()[-1]) == {"model", "prompt", "max_tokens", "temperature", "top_p", "logprobs"}


def test_logprobs_behind_the_temperature_are_noticed(server: ScriptedServer, tokenizer: Tokenizer) -> None:
    openai_like(server, tokenizer, "x")
    plain = server.handlers["/v1/completions"]

    def answer(asked: Asked) -> Made:
        made = plain(asked)
        made.content["choices"][0]["logprobs"] = {
            "tokens": ["x"], "token_logprobs": [-3.0], "top_logprobs": [{"x": -2.0 * asked.body["temperature"]}]
        }  # fmt: skip
        return made

    server.handlers["/v1/completions"] = answer
    with opened(server, tokenizer) as endpoint:
        assert endpoint.facts.logprobs == "processed"


def test_a_server_that_takes_and_tells_text_alone(server: ScriptedServer, tokenizer: Tokenizer) -> None:
    openai_like(server, tokenizer, ANSWER, takes_ids=False, takes_logprobs=False)
    with opened(server, tokenizer) as endpoint:
        assert endpoint.facts.more["prompts"] == "text" and not endpoint.facts.logprobs
        assert "logprobs" not in endpoint.facts.takes
        reply = only(endpoint.ask([question(tokenizer)]))
        split = tuple(token for letter in PROMPT for token in tokenizer.plain_ids(letter))
        lost = refusal(endpoint.ask([Question(split, SamplingParams())]))
    assert reply.token_ids == tokenizer.plain_ids(ANSWER) and reply.text == ANSWER
    assert "hides ids" in reply.unsure and server.posted()[-1]["prompt"] == PROMPT
    assert "the prompt's text encodes to other token ids" in lost


def test_answers_whose_ids_cannot_be_known_are_errors(server: ScriptedServer, tokenizer: Tokenizer) -> None:
    for text, told, message in (
        ("caf\ufffd", {}, "half a character"),
        ("caf\ud83d", {"tokens": None}, "half a character"),
        (ANSWER, {"tokens": 99}, "99 tokens by its count"),
        (" return", {"prompt_tokens": 3}, "counts 3 tokens in a prompt of"),
    ):
        openai_like(server, tokenizer, "x")
        with opened(server, tokenizer) as endpoint:
            openai_like(server, tokenizer, text, **told)
            assert message in refusal(endpoint.ask([question(tokenizer)]))


def test_a_text_that_merges_with_the_prompt_is_an_error(server: ScriptedServer, tokenizer: Tokenizer) -> None:
    openai_like(server, tokenizer, "urn x", takes_logprobs=False)
    prompt = tuple(tokenizer.encode("    ret"))
    assert tokenizer.encode("    return x")[: len(prompt)] != list(prompt)
    with opened(server, tokenizer) as endpoint:
        assert "merges with the prompt's" in refusal(endpoint.ask([Question(prompt, SamplingParams())]))


def test_names_that_mean_something_else_here_give_way_to_the_text(server: ScriptedServer, tokenizer: Tokenizer) -> None:
    wrong = named_logprobs(tokenizer, tokenizer.plain_ids(" raise a"))
    openai_like(server, tokenizer, ANSWER, logprobs=wrong)
    reply = answered(server, tokenizer)
    assert reply.token_ids == tokenizer.plain_ids(ANSWER) and reply.unsure


def test_which_model_is_asked(server: ScriptedServer, tokenizer: Tokenizer) -> None:
    openai_like(server, tokenizer, ANSWER)
    del server.handlers["/v1/models"]
    for model in (None, "other"):
        with opened(server, tokenizer, model=model) as endpoint:
            assert endpoint.model == model == server.posted()[-1].get("model")
    ids = tokenizer.plain_ids(ANSWER)
    answers_vllm(server, tokenizer, ids, model="m-2026-01-31")  # the date of a version is the same model
    assert answered(server, tokenizer).token_ids == ids
    answers_vllm(server, tokenizer, ids, model="m-large")
    assert "was asked for model 'm', and 'm-large' answered" in refused(server, tokenizer)
    with pytest.raises(PeerError, match="does not serve model 'gpt', but 'm'"):
        opened(server, tokenizer, model="gpt")
    with opened(server, tokenizer, model="/models/m") as endpoint:
        assert endpoint.model == "/models/m"
    server.handlers["/v1/models"] = models("vllm", "a", "b")
    told: list[str] = []
    with opened(server, tokenizer, tell=told.append) as endpoint:
        assert endpoint.model == "a"
    assert told == [f"{server.url} serves 2 models, and the first is asked: 'a'"]


def test_the_key_goes_to_the_server(server: ScriptedServer, tokenizer: Tokenizer) -> None:
    answers_vllm(server, tokenizer, (5,))
    with opened(server, tokenizer, api_key="s3cret") as endpoint:
        only(endpoint.ask([question(tokenizer)]))
        assert "s3cret" not in repr(endpoint.facts)
    assert {each.headers["Authorization"] for each in server.asked} == {"Bearer s3cret"}
    with pytest.raises(OptionError, match="api_key holds what no HTTP header can"):
        opened(server, tokenizer, api_key="two\nlines")


def test_an_address_may_end_in_v1(server: ScriptedServer, tokenizer: Tokenizer) -> None:
    answers_vllm(server, tokenizer, (5,))
    with Endpoint.open(f"{server.url}/v1/", tokenizer=tokenizer) as endpoint:
        only(endpoint.ask([question(tokenizer)]))
        assert json.loads(json.dumps(endpoint.facts.more))["endpoint"] == server.url
