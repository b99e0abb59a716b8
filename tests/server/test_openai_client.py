"""The official client against every endpoint: what it gets is what the engine answers in process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.conftest import TEMPLATE, Running
from truedraft import SamplingParams
from truedraft.server.chat import ChatRequest
from truedraft.text import infill

openai = pytest.importorskip("openai")

PROMPT = "class Stack:\n    def push(self, item):"
STACK = {"role": "user", "content": "Write a stack."}


def expected(running: Running, prompt: Any = PROMPT, **params: Any) -> Any:
    """What plain decoding answers."""
    from truedraft import Engine

    return Engine(running.engine.target).generate(prompt, SamplingParams(**params))


def chat_prompt(running: Running, *messages: dict[str, Any], tools: Any = None, continues: bool = False) -> list[int]:
    tokenizer = running.engine.target.tokenizer
    assert tokenizer is not None
    return tokenizer.chat(messages, tools=tools, template=TEMPLATE, continues=continues)


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt' here; served is 'tiny', 'alias'"):
        client.models.retrieve("gpt")


def complete(client: Any, **asked: Any) -> Any:
    return client.completions.create(**{"model": "tiny", "prompt": PROMPT, "temperature": 0} | asked)


def chat(client: Any, **asked: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": [STACK], "temperature": 0} | asked)


def respond(client: Any, **asked: Any) -> Any:
    return client.responses.create(**{"model": "tiny", "input": "hello", "temperature": 0} | asked)


def test_a_completion(running: Running, client: Any) -> None:
    plain = expected(running, max_tokens=40)
    found = complete(client, max_tokens=40)
    assert found.choices[0].text == plain.text and found.choices[0].finish_reason == plain.finish_reason
    assert found.object == "text_completion" and found.model == "tiny"
    assert found.usage.prompt_tokens == plain.prompt_tokens and found.usage.completion_tokens == len(plain.token_ids)
    speculation = found.speculation
    assert speculation["num_accepted_tokens"] <= speculation["num_draft_tokens"]
    assert sum(speculation["acceptance_histogram"]) == speculation["num_drafts"] > 0
    hits = sum(count * times for count, times in enumerate(speculation["acceptance_histogram"]))
    assert hits == speculation["num_accepted_tokens"] == sum(speculation["num_accepted_tokens_per_pos"])
    assert speculation["drafted_calls"] > 0 and speculation["undrafted"] is None


def test_what_readers_of_vllms_and_llamacpps_answers_find(running: Running, client: Any) -> None:
    """The counts of one sample, in the answer or the chunk of its usage; nothing of several.

    AIPerf ignores counts whose histogram has another length, or whose sums differ.
    """
    usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    whole = complete(client, max_tokens=40)
    told, speculation = whole.metrics["speculative_decoding"], whole.speculation
    steps = told["acceptance_histogram"]
    assert len(steps) == told["num_spec_tokens"] + 1 > len(speculation["acceptance_histogram"])
    assert sum(steps) == told["num_spec_steps"] == speculation["num_drafts"] > 0
    assert sum(j * times for j, times in enumerate(steps)) == told["num_accepted_draft_tokens"]
    assert told["num_draft_tokens"] == speculation["num_draft_tokens"] > 0
    assert told["draft_acceptance_rate"] == speculation["draft_acceptance_rate"]
    mean = 1 + told["num_accepted_draft_tokens"] / told["num_spec_steps"]
    assert told["mean_acceptance_length"] == pytest.approx(mean)
    timings = whole.timings
    assert timings["cache_n"] + timings["prompt_n"] == whole.usage.prompt_tokens
    assert timings["predicted_n"] == whole.usage.completion_tokens - 1
    assert timings["draft_n"] == told["num_draft_tokens"]
    assert timings["draft_n_accepted"] == told["num_accepted_draft_tokens"]
    for part in ("prompt", "predicted"):
        seconds = timings[f"{part}_ms"] / 1e3
        assert timings[f"{part}_per_second"] == pytest.approx(timings[f"{part}_n"] / seconds)
        assert timings[f"{part}_per_token_ms"] == pytest.approx(1e3 * seconds / max(timings[f"{part}_n"], 1))
    *_, last = complete(client, max_tokens=40, **usage)
    assert last.choices == [] and last.metrics["speculative_decoding"]["num_spec_steps"] > 0
    several = complete(client, max_tokens=40, temperature=1, n=2)
    assert not hasattr(several, "metrics") and not hasattr(several, "timings")
    chunks = list(chat(client, max_tokens=8, **usage))
    told = chat(client, max_tokens=8).metrics["speculative_decoding"]
    assert set(told) == {*chunks[-1].metrics["speculative_decoding"]} and not hasattr(chunks[0], "metrics")


def test_completions_of_many_prompts_and_samples(running: Running, client: Any) -> None:
    prompts = [PROMPT, "import os\n", "def f("]
    found = complete(client, model="alias", prompt=prompts, max_tokens=8, temperature=1, seed=4, n=2)
    assert [choice.index for choice in found.choices] == list(range(6))
    for number, prompt in enumerate(prompts):
        plain = expected(running, prompt, max_tokens=8, temperature=1.0, seed=4, n=2)
        assert found.choices[2 * number].text == plain.text
        assert found.choices[2 * number + 1].text == plain.others[0].text
    ids = running.engine.target.tokenizer.encode(PROMPT)
    by_ids, by_text, lists = (complete(client, prompt=each, max_tokens=8) for each in (ids, PROMPT, [ids, ids[:4]]))
    assert lists.choices[0].text == by_ids.choices[0].text == by_text.choices[0].text


def test_a_stream_of_completions_joins_to_the_whole(running: Running, client: Any) -> None:
    plain = expected(running, max_tokens=60, stop=("return",))
    chunks = list(complete(client, max_tokens=60, stop="return", stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == plain.text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == plain.finish_reason and not any(reasons[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(plain.token_ids)
    assert len({chunk.id for chunk in chunks}) == 1


def test_echo_logprobs_and_best_of(running: Running, client: Any) -> None:
    plain = expected(running, max_tokens=6, logprobs=2, prompt_logprobs=2)
    found = complete(client, max_tokens=6, logprobs=2, echo=True).choices[0]
    assert found.text == PROMPT + plain.text
    logprobs = found.logprobs
    assert len(logprobs.tokens) == plain.prompt_tokens + len(plain.token_ids)
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx(
        [each.logprob for each in [*plain.prompt_logprobs, *plain.logprobs]]
    )
    assert "".join(logprobs.tokens) == found.text and logprobs.text_offset[plain.prompt_tokens] == len(PROMPT)
    only = complete(client, max_tokens=0, echo=True, logprobs=0)
    assert only.choices[0].text == PROMPT and len(only.choices[0].logprobs.tokens) == plain.prompt_tokens
    best, every = (
        complete(client, max_tokens=6, temperature=1.5, logprobs=0, seed=1, **more)
        for more in ({"best_of": 4, "n": 2}, {"n": 4})
    )
    means, all_means = (
        [sum(choice.logprobs.token_logprobs) / len(choice.logprobs.tokens) for choice in each.choices]
        for each in (best, every)
    )
    assert means == pytest.approx(sorted(all_means, reverse=True)[:2])


def test_a_chat(running: Running, client: Any) -> None:
    plain = expected(running, chat_prompt(running, STACK), max_tokens=30, logprobs=3)
    choice = chat(client, max_completion_tokens=30, logprobs=True, top_logprobs=3).choices[0]
    assert choice.message.content == plain.text and choice.message.role == "assistant"
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx([e.logprob for e in plain.logprobs])
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    chunks = list(chat(client, max_tokens=30, stream=True, n=2, stream_options={"include_usage": True}))
    for number in range(2):
        parts = [c.choices[0].delta.content or "" for c in chunks if c.choices and c.choices[0].index == number]
        assert "".join(parts) == plain.text
    assert chunks[-1].usage.completion_tokens == 2 * len(plain.token_ids)
    parts = [{"type": "text", "text": "x"}]
    turns = [STACK, {"role": "assistant", "content": "ok"}, {"role": "user", "content": parts}]
    assert chat(client, messages=turns, max_tokens=4).choices[0].message.content


def test_structured_outputs(client: Any) -> None:
    schema = {"type": "object", "properties": {"size": {"type": "integer", "maximum": 99, "minimum": 0}}}
    schema |= {"required": ["size"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    found = chat(client, response_format=form, max_tokens=40).choices[0]
    assert 0 <= json.loads(found.message.content)["size"] <= 99 and found.finish_reason == "stop"
    anything = chat(client, response_format={"type": "json_object"}, max_tokens=300).choices[0]
    assert anything.finish_reason == "length" or isinstance(json.loads(anything.message.content), dict)
    for form, check in (
        ({"regex": "[0-9]{3}"}, str.isdigit),
        ({"choice": ["yes", "no"]}, ["yes", "no"].__contains__),
        ({"grammar": 'start: "a"+ "b"'}, lambda text: text.rstrip("b").strip("a") == ""),
    ):
        body = {"structured_outputs": form}
        text = complete(client, prompt="x", max_tokens=40, temperature=1, extra_body=body).choices[0]
        assert text.finish_reason == "length" or check(text.text)


DIGIT = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}}}
DIGIT |= {"required": ["x"], "additionalProperties": False}
FUNCTIONS: list[Any] = [{"name": name, "description": "d", "parameters": DIGIT} for name in ("push", "pop")]
TOOLS = [{"type": "function", "function": each} for each in FUNCTIONS]


def test_tools(client: Any) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "max_tokens": 80}
    named = chat(client, **asked, tool_choice={"type": "function", "function": {"name": "pop"}})
    call = named.choices[0].message.tool_calls[0]
    assert named.choices[0].finish_reason == "tool_calls" and named.choices[0].message.content is None
    assert call.function.name == "pop" and 0 <= json.loads(call.function.arguments)["x"] <= 9
    forced = chat(client, **asked, tool_choice="required", parallel_tool_calls=False)
    assert len(forced.choices[0].message.tool_calls) == 1
    chunks = list(chat(client, **asked, tool_choice="required", parallel_tool_calls=False, stream=True))
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    assert parts[0].id and parts[0].function.name == forced.choices[0].message.tool_calls[0].function.name
    arguments = "".join(part.function.arguments or "" for part in parts)
    assert arguments == forced.choices[0].message.tool_calls[0].function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not "".join(chunk.choices[0].delta.content or "" for chunk in chunks), "no tag of a call is text"
    free = chat(client, **asked, tool_choice="none")
    assert free.choices[0].message.tool_calls is None
    result = {"role": "tool", "tool_call_id": call.id, "content": "1"}
    declined = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    for turns in (
        [STACK, {"role": "assistant", "tool_calls": [call.model_dump()]}, result],
        [STACK, named.choices[0].message.model_dump(), result],  # as it came
        [declined, STACK],
    ):
        assert chat(client, messages=turns, max_tokens=4)
    with pytest.raises(openai.BadRequestError, match="tool_choice names 'peek'; tools has 'push', 'pop'"):
        chat(client, **asked, tool_choice={"type": "function", "function": {"name": "peek"}})


def test_responses(running: Running, client: Any) -> None:
    plain = expected(running, chat_prompt(running, {"role": "user", "content": "hello"}), max_tokens=20)
    found = respond(client, max_output_tokens=20)
    assert found.output_text == plain.text and found.status in ("completed", "incomplete")
    assert found.usage.output_tokens == len(plain.token_ids)
    events = list(respond(client, max_output_tokens=20, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type in ("response.completed", "response.incomplete")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == plain.text
    assert events[-1].response.output_text == plain.text
    asked: dict[str, Any] = {"tools": [{"type": "function"} | FUNCTIONS[0]], "tool_choice": "required"}
    called = respond(client, **asked, parallel_tool_calls=False).output
    assert [item.type for item in called] == ["function_call"] and json.loads(called[0].arguments)["x"] >= 0
    streamed = list(respond(client, **asked, parallel_tool_calls=False, stream=True))
    arguments = "".join(e.delta for e in streamed if e.type == "response.function_call_arguments.delta")
    assert arguments == called[0].arguments
    assert [item.type for item in streamed[-1].response.output] == ["function_call"]
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": "push 1"}]},
        called[0].model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": called[0].call_id, "output": "done"},
    ]
    assert respond(client, input=turns, max_output_tokens=4, instructions="be brief").output_text
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer", "maximum": 9, "minimum": 0}}}
    assert respond(client, text=form, max_output_tokens=20).output_text.isdigit()
    with pytest.raises(openai.BadRequestError, match="stores no responses"):
        respond(client, previous_response_id="resp_1")


def test_predictions_are_counted(running: Running, client: Any) -> None:
    plain = expected(running, max_tokens=60)
    details = []
    for text in (plain.text, plain.text[:40] + " nothing of this"):
        body = {"prediction": {"type": "content", "content": text}, "speculation": {"drafter": "prediction"}}
        found = complete(client, max_tokens=60, extra_body=body)
        assert found.choices[0].text == plain.text
        details.append(found.usage.completion_tokens_details)
    assert details[0].accepted_prediction_tokens > 40 and details[1].rejected_prediction_tokens > 0


def test_speculation_by_request(running: Running, client: Any) -> None:
    plain = expected(running, max_tokens=30).text

    def ask(**speculation: Any) -> Any:
        return complete(client, max_tokens=30, extra_body={"speculation": speculation})

    off = ask(enabled=False)
    assert off.speculation["num_draft_tokens"] == 0 and off.speculation["mean_acceptance_length"] == 1.0
    lookup = ask(drafter="prompt-lookup")
    assert set(lookup.speculation["drafters"]) <= {"prompt-lookup"}
    short = ask(drafter="draft", num_speculative_tokens=1)
    assert len(short.speculation["num_accepted_tokens_per_pos"]) == 1
    block = ask(rule="block")
    assert {off.choices[0].text, lookup.choices[0].text, short.choices[0].text, block.choices[0].text} == {plain}
    for wrong, message in (
        ({"drafter": "medusa"}, "unknown drafter 'medusa'"),
        ({"rule": "typical"}, "rule 'typical' is not allowed here"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"speed": 2}, "unrecognized request argument: speculation.speed"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            ask(**wrong)


def test_traces_tell_where_tokens_came_from(running: Running, client: Any) -> None:
    chunks = list(complete(client, max_tokens=40, stream=True, extra_body={"speculation": {"trace": True}}))
    tokens = [token for chunk in chunks if chunk.choices for token in chunk.trace["tokens"]]
    plain = expected(running, max_tokens=40)
    assert [token["id"] for token in tokens] == plain.token_ids
    assert {token["origin"] for token in tokens} <= {"accepted", "recovered", "bonus", "forced"}
    steps = [step for chunk in chunks if chunk.choices for step in chunk.trace["steps"]]
    assert sum(len(step["emitted"]) for step in steps) == len(tokens)
    for step in steps:
        assert all(-1 <= node["parent"] < place for place, node in enumerate(step["nodes"]))
        emitted = step["emitted"][: len(step["accepted"])]
        assert [step["nodes"][node]["text"] for node in step["accepted"]][: len(emitted)] == emitted


def test_what_the_context_holds_beside_a_prompt_may_be_asked_for(client: Any) -> None:
    """It ends where the context is full."""
    full = complete(client, prompt=[20] * 2040, max_tokens=2048, extra_body={"ignore_eos": True})
    assert full.usage.completion_tokens == 8 and full.choices[0].finish_reason == "length"


def test_logprobs_of_responses_stay_with_their_text(client: Any) -> None:
    asked: dict[str, Any] = {"max_output_tokens": 12, "include": ["message.output_text.logprobs"]}
    whole = respond(client, **asked).output[0].content[0].logprobs
    events = list(respond(client, **asked, stream=True))
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    parts = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert len(whole) == 12 and [entry.token for entry in done.logprobs] == [entry.token for entry in whole]
    assert [entry.token for entry in parts] == [entry.token for entry in whole][: len(parts)]
    (item,) = [event.item for event in events if event.type == "response.output_item.done"]
    assert item.status == "incomplete" == events[-1].response.status


def test_echoes_alone_cost_no_tokens_and_have_logprobs_in_streams_too(client: Any) -> None:
    asked: dict[str, Any] = {"echo": True, "logprobs": 1}
    alone = complete(client, **asked, max_tokens=0)
    assert alone.choices[0].text == PROMPT and alone.usage.completion_tokens == 0
    whole = complete(client, **asked, max_tokens=5)
    chunks = list(complete(client, **asked, max_tokens=5, stream=True))
    for field in ("tokens", "token_logprobs", "text_offset"):
        streamed = [value for chunk in chunks for value in getattr(chunk.choices[0].logprobs, field)]
        assert streamed == getattr(whole.choices[0].logprobs, field)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_histories_reach_templates_in_one_form() -> None:
    calls = [
        {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": None, "index": 1, "function": {"name": "f", "arguments": "no object"}},
        {"function": {"name": "f", "arguments": {"x": 2}}},
        {"function": {"name": "f", "arguments": ""}},
    ]
    results = [{"role": "tool", "content": [{"type": "text", "text": "a"}], "tool_call_id": "1"}]
    results += [{"role": "tool", "content": None}, {"role": "function", "name": "f", "content": "c"}]
    turn = {"role": "assistant", "content": [], "tool_calls": calls, "reasoning": "why", "audio": {"id": "x"}}
    body = ChatRequest.model_validate({"messages": [turn, *results]})
    shown, *told = body.templated
    assert [call["function"]["arguments"] for call in shown["tool_calls"]] == [{"x": 1}, "no object", {"x": 2}, {}]
    ids = [call["id"] for call in shown["tool_calls"]]
    assert ids[0] == "1" and len(set(ids)) == 4
    assert [(each["role"], each["tool_call_id"], each["content"]) for each in told] == [
        ("tool", "1", "a"),
        ("tool", ids[1], ""),
        ("tool", ids[2], "c"),
    ]
    assert shown["reasoning_content"] == "why" and set(shown) == {"role", "content", "tool_calls", "reasoning_content"}


def test_a_last_message_is_continued(client: Any, running: Running) -> None:
    turns: Any = [STACK, {"role": "assistant", "content": "class Stack"}]
    asked: dict[str, Any] = {"messages": turns, "max_tokens": 20}
    plain = expected(running, chat_prompt(running, *turns, continues=True), max_tokens=20).text
    more = {"continue_final_message": True, "add_generation_prompt": False}
    assert chat(client, **asked, extra_body=more).choices[0].message.content == plain
    chunks = chat(client, **asked, extra_body=more, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == plain
    for wrong, message in (
        ({"extra_body": more | {"add_generation_prompt": True}}, "add_generation_prompt begins another"),
        ({"extra_body": {"add_generation_prompt": False}}, "set continue_final_message"),
        ({"extra_body": more, "messages": turns[:1]}, "needs a last message of the assistant's"),
        ({"extra_body": more, "tools": TOOLS, "tool_choice": "required"}, "tool_choice begins the answer with a call"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            chat(client, **asked | wrong)


def test_functions_as_they_were_before_tools(client: Any) -> None:
    asked: dict[str, Any] = {"functions": FUNCTIONS, "function_call": {"name": "pop"}, "max_tokens": 80}
    choice = chat(client, **asked).choices[0]
    called = choice.message.function_call
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    assert called.name == "pop" and 0 <= json.loads(called.arguments)["x"] <= 9
    chunks = [chunk.choices[0] for chunk in chat(client, **asked, stream=True)]
    parts = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert "".join(part.arguments or "" for part in parts) == called.arguments and parts[0].name == "pop"
    assert chunks[-1].finish_reason == "function_call"
    result = {"role": "function", "name": "pop", "content": "1"}
    assert chat(client, messages=[STACK, choice.message.model_dump(exclude_none=True), result], max_tokens=4)


def test_custom_tools_and_namespaces_of_responses(client: Any) -> None:
    push = {"type": "function"} | FUNCTIONS[0]
    grammar = {"type": "grammar", "syntax": "lark", "definition": "x"}
    patch = {"type": "custom", "name": "apply_patch", "format": grammar}
    tools = [{"type": "namespace", "name": "stack", "description": "d", "tools": [push]}, patch]
    asked: dict[str, Any] = {"tools": tools, "max_output_tokens": 80}
    for choice, kind, key, namespace in (
        ({"type": "custom", "name": "apply_patch"}, "custom_tool_call", "input", None),
        ({"type": "function", "name": "push"}, "function_call", "arguments", "stack"),
    ):
        (item,) = respond(client, **asked, tool_choice=choice).output
        assert (item.type, item.name, item.namespace) == (kind, choice["name"], namespace)
        events = list(respond(client, **asked, tool_choice=choice, stream=True))
        name = {"input": "response.custom_tool_call_input", "arguments": "response.function_call_arguments"}[key]
        deltas = "".join(event.delta for event in events if event.type == f"{name}.delta")
        (done,) = [event for event in events if event.type == f"{name}.done"]
        assert deltas == getattr(done, key) == getattr(item, key) == getattr(events[-1].response.output[0], key)
        result = {"type": f"{kind}_output", "call_id": item.call_id, "output": "done"}
        turns = [{"role": "user", "content": "x"}, item.model_dump(exclude_none=True), result]
        assert respond(client, **asked | {"input": turns, "max_output_tokens": 4}).output
    only = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "push"}]}
    (item,) = respond(client, **asked, tool_choice=only, parallel_tool_calls=False).output
    assert (item.name, item.namespace) == ("push", "stack")


def test_a_text_in_the_middle(running: Running, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a family of which the embedded target has the tokens; it learnt nothing of them."""
    tokenizer = running.engine.target.tokenizer
    assert tokenizer is not None
    names = [tokenizer.backend.convert_ids_to_tokens(number) for number in (400, 401, 402)]
    monkeypatch.setattr(infill, "_FAMILIES", (infill._Family(*names),))
    ids = [400, *tokenizer.plain_ids("def f("), 401, *tokenizer.plain_ids("\n"), 402]
    plain = expected(running, ids, max_tokens=20, stop_token_ids=(400, 401, 402))
    asked: dict[str, Any] = {"prompt": "def f(", "suffix": "\n", "max_tokens": 20}
    found = complete(client, **asked)
    assert found.choices[0].text == plain.text and found.usage.prompt_tokens == len(ids)
    assert "".join(chunk.choices[0].text for chunk in complete(client, **asked, stream=True)) == plain.text
    for wrong, message in (({"prompt": [1, 2]}, "goes with a prompt that is text"), ({"echo": True}, "echo gives")):
        with pytest.raises(openai.BadRequestError, match=message):
            complete(client, **asked | wrong)


IDS: dict[str, Any] = {"extra_body": {"return_token_ids": True}}


def test_completions_tell_ids(running: Running, client: Any) -> None:
    tokenizer = running.engine.target.tokenizer
    assert tokenizer is not None
    prompts = [PROMPT, "import os\n"]
    found = complete(client, prompt=prompts, max_tokens=12, n=2, **IDS)
    for choice in found.choices:
        prompt = prompts[choice.index // 2]
        assert choice.token_ids == expected(running, prompt, max_tokens=12).token_ids
        assert choice.prompt_token_ids == tokenizer.encode(prompt)
        assert tokenizer.decode(choice.token_ids) == choice.text
    without = complete(client, max_tokens=4).choices[0]
    assert not hasattr(without, "token_ids") and not hasattr(without, "prompt_token_ids")
    echoed = complete(client, max_tokens=0, echo=True, **IDS).choices[0]
    assert echoed.token_ids == [] and echoed.prompt_token_ids == tokenizer.encode(PROMPT)


def test_streamed_completions_tell_ids_as_they_come(running: Running, client: Any) -> None:
    tokenizer = running.engine.target.tokenizer
    assert tokenizer is not None
    for more in ({}, {"stop": "return"}, {"echo": True}):
        chunks = list(complete(client, max_tokens=60, n=2, stream=True, **more, **IDS))
        plain = expected(running, max_tokens=60, stop=more.get("stop", ())).token_ids
        for number in range(2):
            choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == number]
            told = [choice for choice in choices if hasattr(choice, "prompt_token_ids")]
            assert [choice.prompt_token_ids for choice in told] == [tokenizer.encode(PROMPT)]
            assert told[0] is choices[0]
            assert [token for choice in choices for token in getattr(choice, "token_ids", [])] == plain


def test_chats_tell_ids(running: Running, client: Any) -> None:
    found = chat(client, max_tokens=12, **IDS)
    prompt = found.prompt_token_ids
    plain = expected(running, prompt, max_tokens=12).token_ids
    assert found.choices[0].token_ids == plain and found.usage.prompt_tokens == len(prompt)
    chunks = list(chat(client, max_tokens=12, n=2, stream=True, **IDS))
    assert [chunk.prompt_token_ids for chunk in chunks if hasattr(chunk, "prompt_token_ids")] == [prompt]
    assert hasattr(chunks[0], "prompt_token_ids")
    for number in range(2):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == number]
        assert [token for choice in choices for token in getattr(choice, "token_ids", [])] == plain
    without = chat(client, max_tokens=4)
    assert not hasattr(without, "prompt_token_ids") and not hasattr(without.choices[0], "token_ids")
