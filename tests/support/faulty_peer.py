"""The engines of `support.faulty_engines` as engines that are asked from outside, in process and over HTTP."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.faulty_engines import Models, Planted, embedded_models
from truedraft import Answer, Engine, SamplingParams
from truedraft.core.verdict import Origin
from truedraft.errors import PeerError, TruedraftError
from truedraft.measure.peers.asking import Peer, PeerFacts, Question, Reply

TAKES = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos", "logprobs")
_BATCH = 32
_GATHERED_S = 0.02
"""A server waits so long for more requests to batch with the first."""


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
        try:
            requests = [engine.prepare(list(each.prompt), self._asked(each.params)) for each in questions]
        except TruedraftError as error:
            return [PeerError(str(error)) for _ in questions]
        for question, request in zip(questions, requests, strict=True):
            if question.params.seed is not None:
                request.noise_seed = question.params.seed
            engine.enqueue(request)
        while not all(request.closed for request in requests):
            engine.step()
        answers = [request.pieces[-1].answer for request in requests]
        return [self._reply(*each) for each in zip(questions, answers, strict=True) if each[1] is not None]

    def _engine(self, params: SamplingParams) -> Engine:
        if params.probs_key not in self._engines:
            self._engines[params.probs_key] = self.planted.parts(self._models, params).engine(_BATCH)
        return self._engines[params.probs_key]

    def _asked(self, params: SamplingParams) -> SamplingParams:
        """What the engine works with; stop texts are looked for here where that is what is wrong.

        Seeds only key the noise, as in other engines: what a seed promises here is not kept by the parts that fail.
        """
        asked = replace(self.planted.asked(params), seed=None)
        return asked if self.planted.ends == "right" else replace(asked, stop=())

    def _reply(self, question: Question, answer: Answer) -> Reply | PeerError:
        if answer.finish_reason == "error":
            return PeerError(answer.error or "the request failed")
        kept, text, reason = len(answer.token_ids), answer.text, str(answer.finish_reason)
        if self.planted.ends != "right" and question.params.stop:
            kept, text, reason = self._ended(question.params.stop, answer)
        told = None if answer.logprobs is None else answer.logprobs[:kept]
        return Reply(
            tuple(answer.token_ids[:kept]),
            text,
            reason,
            None if told is None else tuple(each.logprob for each in told),
            None if told is None else tuple(dict(each.top) for each in told),
        )

    def _ended(self, stops: Sequence[str], answer: Answer) -> tuple[int, str, str]:
        """Tokens, text and reason of an answer whose stop texts are looked for only where a step ended."""
        tokenizer = self._models.target.tokenizer
        assert tokenizer is not None
        before = ""  # the token that ends a step
        for place, origin in enumerate(answer.origins):
            text = tokenizer.decode(answer.token_ids[: place + 1])
            if origin is not Origin.ACCEPTED:
                if self.planted.ends == "late" and any(stop in before for stop in stops):
                    return place + 1, text, "stop"  # with all that its last step wrote
                ended = [text.find(stop, max(0, len(before) - len(stop) + 1)) for stop in stops]
                start = min((each for each in ended if each >= 0), default=-1)
                if start >= 0:
                    return self._tokens_of(text[:start], answer), text[:start], "stop"
            before = text
        return len(answer.token_ids), answer.text or "", str(answer.finish_reason)

    def _tokens_of(self, text: str, answer: Answer) -> int:
        """The fewest tokens whose text begins with what is kept, as the sound engine counts them."""
        tokenizer = self._models.target.tokenizer
        assert tokenizer is not None
        lengths = range(len(answer.token_ids) + 1)
        return next(n for n in lengths if tokenizer.decode(answer.token_ids[:n]).startswith(text))


# ------------------------------------------------------------------------------------------------ over HTTP


class _Gatherer:
    """Lets requests that come together be answered in one batch, by one thread.

    Args:
        peer: is asked.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._waiting: queue.Queue[tuple[Question, Future[Reply | PeerError]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ask(self, questions: Sequence[Question]) -> list[Reply | PeerError]:
        """Replies, in order."""
        futures: list[Future[Reply | PeerError]] = [Future() for _ in questions]
        for each in zip(questions, futures, strict=True):
            self._waiting.put(each)
        return [future.result() for future in futures]

    def close(self) -> None:
        """No more requests."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (first := self._waiting.get()) is not None:
            gathered = [first]
            with contextlib.suppress(queue.Empty):
                while len(gathered) < _BATCH and (more := self._waiting.get(timeout=_GATHERED_S)) is not None:
                    gathered.append(more)
            try:
                replies = self._peer.ask([question for question, _ in gathered])
            except Exception as error:  # whoever waits must hear of it
                replies = [PeerError(str(error)) for _ in gathered]
            for (_, future), reply in zip(gathered, replies, strict=True):
                future.set_result(reply)


@contextlib.contextmanager
def serve(peer: FaultyPeer, model: str = "embedded:target") -> Iterator[str]:
    """A server at a free port of this machine, in OpenAI's form, with vLLM's `return_token_ids`; gives its URL.

    Args:
        peer: answers.
        model: the name that it goes by.
    """
    gatherer = _Gatherer(peer)
    handler = type("Handler", (_Handler,), {"gatherer": gatherer, "model": model, "tokenizer": _tokenizer()})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        gatherer.close()


def _tokenizer() -> Any:
    return embedded_models().target.tokenizer


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # connections that come together


class _Handler(BaseHTTPRequestHandler):
    """`/v1/models` and `/v1/completions`, without streams."""

    protocol_version = "HTTP/1.1"
    gatherer: _Gatherer
    model: str
    tokenizer: Any

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Say nothing."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            entry = {"id": self.model, "object": "model", "created": 0, "owned_by": "truedraft", "max_model_len": 2048}
            self._send(200, {"object": "list", "data": [entry]})
        elif self.path in ("/health", "/version"):
            self._send(200, {"version": "planted"} if self.path == "/version" else {})
        else:
            self._fail(404, f"there is no {self.path}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        if self.path != "/v1/completions":
            self._fail(404, f"there is no {self.path}")
        elif body.get("model") not in (None, self.model):
            self._fail(404, f"the model {body['model']!r} does not exist")
        else:
            try:
                prompts = self._prompts(body["prompt"])
                params = _params(body)
            except (KeyError, TypeError, ValueError) as error:
                self._fail(400, str(error))
                return
            replies = self.gatherer.ask([Question(tuple(prompt), params) for prompt in prompts])
            failed = next((reply for reply in replies if isinstance(reply, PeerError)), None)
            if failed is not None:
                self._fail(400, str(failed))
            else:
                self._send(
                    200, self._completion(body, prompts, [reply for reply in replies if isinstance(reply, Reply)])
                )

    def _prompts(self, given: Any) -> list[list[int]]:
        if isinstance(given, str):
            return [self.tokenizer.encode(given)]
        if given and isinstance(given[0], int):
            return [given]
        return [self.tokenizer.encode(each) if isinstance(each, str) else list(each) for each in given]

    def _completion(self, body: dict[str, Any], prompts: list[list[int]], replies: list[Reply]) -> dict[str, Any]:
        choices = [self._choice(body, *each) for each in zip(range(len(replies)), prompts, replies, strict=True)]
        said, asked = sum(len(reply.token_ids) for reply in replies), sum(map(len, prompts))
        usage = {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}
        head = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": self.model}
        return head | {"choices": choices, "usage": usage}

    def _choice(self, body: dict[str, Any], number: int, prompt: list[int], reply: Reply) -> dict[str, Any]:
        found = {
            "index": number,
            "text": reply.text,
            "finish_reason": reply.finish_reason,
            "logprobs": None if reply.logprobs is None else self._logprobs(body, reply),
        }
        if body.get("return_token_ids"):
            found |= {"token_ids": list(reply.token_ids), "prompt_token_ids": prompt}
        return found

    def _logprobs(self, body: dict[str, Any], reply: Reply) -> dict[str, Any]:
        def word(token: int) -> str:
            return f"token_id:{token}" if body.get("return_tokens_as_token_ids") else self.tokenizer.decode([token])

        words = [word(token) for token in reply.token_ids]
        top = [{word(token): value for token, value in each.items()} for each in reply.top_logprobs or ()]
        ends = [sum(map(len, words[:place])) for place in range(len(words))]
        return {"tokens": words, "token_logprobs": list(reply.logprobs or ()), "top_logprobs": top, "text_offset": ends}

    def _fail(self, status: int, message: str) -> None:
        kind = "NotFoundError" if status == 404 else "BadRequestError"
        self._send(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _params(body: dict[str, Any]) -> SamplingParams:
    """Options of a body, with OpenAI's defaults."""
    given = {name: body[name] for name in TAKES if body.get(name) is not None}
    stop = given.get("stop", ())
    given |= {"max_tokens": given.get("max_tokens", 16), "temperature": given.get("temperature", 1.0)}
    return SamplingParams(**given | {"stop": (stop,) if isinstance(stop, str) else tuple(stop)})
