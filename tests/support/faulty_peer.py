"""The engines of `support.faulty_engines` as engines that are asked from outside, in process and over HTTP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from measure.peers.scripted_server import Asked, Made, completion, models, scripted
from support.faulty_engines import Models, Planted, embedded_models
from truedraft import Answer, Engine, SamplingParams
from truedraft.errors import PeerError, TruedraftError
from truedraft.measure.peers.asking import Peer, PeerFacts, Question, Reply

TAKES = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos", "logprobs")
_BATCH = 32


class FaultyPeer(Peer):
    """Asks such an engine in process.

    Questions of equal temperature and filters go through one engine together; one engine runs at a time.

    Args:
        planted: what is changed, or nothing.
        models: sound ones; None loads the embedded pair in float32.
    """

    def __init__(self, planted: Planted, models: Models | None = None) -> None:
        self.planted = planted
        self._models = models or embedded_models()
        self._engines: dict[tuple[float, int, float, float], Engine] = {}
        self.facts = PeerFacts("truedraft", "", planted.filters, TAKES, gives_ids=True, logprobs="raw")

    def answers(self, questions: Sequence[Question]) -> Iterator[tuple[int, Reply | PeerError]]:
        groups: dict[tuple[float, int, float, float], list[int]] = {}
        for number, question in enumerate(questions):
            refused = self.refuses(question.params)
            if refused:
                yield number, PeerError(f"truedraft does not take {refused}; leave it out")
            else:
                groups.setdefault(question.params.probs_key, []).append(number)
        for numbers in groups.values():
            yield from zip(numbers, self._answered([questions[number] for number in numbers]), strict=True)

    def _answered(self, questions: Sequence[Question]) -> list[Reply | PeerError]:
        """Replies to questions of equal temperature and filters."""
        engine = self._engine(questions[0].params)
        try:  # seeds only key the noise, as in other engines
            asked = [replace(self.planted.asked(each.params), seed=None) for each in questions]
            requests = [engine.prepare(list(each.prompt), own) for each, own in zip(questions, asked, strict=True)]
        except TruedraftError as error:
            return [PeerError(str(error)) for _ in questions]
        for question, request in zip(questions, requests, strict=True):
            if question.params.seed is not None:
                request.noise_seed = question.params.seed
            engine.enqueue(request)
        while not all(request.closed for request in requests):
            engine.step()
        answers = [request.pieces[-1].answer for request in requests]
        return [self._reply(answer) for answer in answers if answer is not None]

    def _engine(self, params: SamplingParams) -> Engine:
        if params.probs_key not in self._engines:
            self._engines[params.probs_key] = self.planted.parts(self._models, params).engine(_BATCH)
        return self._engines[params.probs_key]

    def _reply(self, answer: Answer) -> Reply | PeerError:
        if answer.finish_reason == "error":
            return PeerError(answer.error or "the request failed")
        told = answer.logprobs
        return Reply(
            tuple(answer.token_ids),
            answer.text,
            str(answer.finish_reason),
            None if told is None else tuple(each.logprob for each in told),
            None if told is None else tuple(dict(each.top) for each in told),
        )


@contextlib.contextmanager
def serve(peer: FaultyPeer, model: str = "embedded:target") -> Iterator[str]:
    """A server by this name in OpenAI's form, with vLLM's `return_token_ids`; gives its URL. It answers in turn."""
    tokenizer, one_at_a_time = embedded_models().target.tokenizer, threading.Lock()
    assert tokenizer is not None

    def words(body: Mapping[str, Any], tokens: Iterable[int]) -> list[str]:
        as_ids = body.get("return_tokens_as_token_ids")
        return [f"token_id:{token}" if as_ids else tokenizer.decode([token]) for token in tokens]

    def logprobs(body: Mapping[str, Any], reply: Reply) -> dict[str, Any] | None:
        if reply.logprobs is None:
            return None
        tokens = words(body, reply.token_ids)
        top = [dict(zip(words(body, each), each.values(), strict=True)) for each in reply.top_logprobs or ()]
        ends = [sum(map(len, tokens[:place])) for place in range(len(tokens))]
        told = list(reply.logprobs)
        return {"tokens": tokens, "token_logprobs": told, "top_logprobs": top, "text_offset": ends}

    def completions(asked: Asked) -> Made:
        body, given = asked.body, asked.body["prompt"]
        prompt = tokenizer.encode(given) if isinstance(given, str) else list(given)
        try:
            with one_at_a_time:
                (reply,) = peer.ask([Question(tuple(prompt), _params(body))])
        except ValueError as error:
            reply = PeerError(str(error))
        if isinstance(reply, PeerError):
            return Made({"error": {"message": str(reply), "type": "BadRequestError", "code": 400}}, 400)
        ids = {"token_ids": list(reply.token_ids), "prompt_token_ids": prompt} if body.get("return_token_ids") else {}
        more = {"logprobs": logprobs(body, reply), **ids}
        counts = {"prompt_tokens": len(prompt), "tokens": len(reply.token_ids)}
        return Made(completion(body, reply.text or "", reason=reply.finish_reason, model=model, **counts, **more))

    with scripted() as server:
        server.handlers["/v1/models"] = models("planted", model, max_model_len=2048)
        server.handlers |= {"/health": lambda _: Made({}), "/version": lambda _: Made({"version": "planted"})}
        server.handlers["/v1/completions"] = completions
        yield server.url


def _params(body: Mapping[str, Any]) -> SamplingParams:
    """Options of a body, with OpenAI's defaults."""
    given = {name: body[name] for name in TAKES if body.get(name) is not None}
    stop = given.get("stop", ())
    given |= {"max_tokens": given.get("max_tokens", 16), "temperature": given.get("temperature", 1.0)}
    return SamplingParams(**given | {"stop": (stop,) if isinstance(stop, str) else tuple(stop)})
