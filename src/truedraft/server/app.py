"""The web application: routes, access control and limits."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from truedraft.errors import TruedraftError
from truedraft.machine import machine_facts
from truedraft.server.access import ApiKeys, Gate, Hosts
from truedraft.server.bodies import BodyRoute
from truedraft.server.chat import chat_router
from truedraft.server.completions import completions_router
from truedraft.server.errors import AnthropicErrorAnswer, ApiError, ErrorAnswer, answer_unreadable, invalid
from truedraft.server.fields import Fields, Many
from truedraft.server.front import Front
from truedraft.server.messages import messages_router
from truedraft.server.metrics import Metrics
from truedraft.server.responses import responses_router
from truedraft.text.tokenizer import Tokenizer

_ERRORS = {
    400: "The request cannot be used as it is.",
    401: "No API key, or none that is known.",
    404: "There is no such model.",
    408: "The body did not come in time.",
    413: "The body is too long.",
    421: "The server does not accept this host name.",
    429: "Too many requests wait; ask again after `Retry-After` seconds.",
    500: "The model or the server failed.",
    503: "The server is being stopped.",
    504: "The answer took longer than this server allows.",
}
_WRITTEN = 1 << 12  # token ids formatted at once
_PLAYGROUND = "playground.html"
_GENERATING = "/v1/chat/completions, /v1/completions, /v1/responses and /v1/messages"
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def build_app(front: Front, metrics: Metrics, keys: ApiKeys, hosts: Hosts) -> FastAPI:
    """The application over a service; it starts and stops the service."""
    options = front.options

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        front.service.start()
        try:
            yield
        finally:
            front.service.stop()

    version = str(machine_facts()["truedraft"])
    app = FastAPI(title="truedraft", version=version, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.metrics, app.state.front = metrics, front
    answering = completions_router(front), chat_router(front), responses_router(front)
    openai = *answering, _models(front), _texts(front), _state(front, metrics)
    for form, routers in ((ErrorAnswer, openai), (AnthropicErrorAnswer, (messages_router(front),))):
        errors: dict[int | str, dict[str, Any]] = {
            status: {"model": form, "description": meaning} for status, meaning in _ERRORS.items()
        }
        for router in routers:
            app.include_router(router, responses=errors)
    if not options.no_playground:
        page = files(__package__).joinpath(_PLAYGROUND).read_text(encoding="utf-8")
        headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}

        @app.get("/", include_in_schema=False)
        async def playground() -> HTMLResponse:
            return HTMLResponse(page, headers=headers)

    async def answer_error(http: HttpRequest, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 404:
            path = http.scope["path"]
            error = ApiError(404, f"there is nothing at {path!r}: this server only generates text, at {_GENERATING}")
        return front.service.api_error(error).response(http.scope["path"])

    for kind in (ApiError, TruedraftError, UnicodeEncodeError, HTTPException, Exception):
        app.add_exception_handler(kind, answer_error)
    app.add_exception_handler(RequestValidationError, answer_unreadable)
    app.add_middleware(Gate, front=front, keys=keys, hosts=hosts)
    if origins := list(options.cors_origin):
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    return app


class TokenizeRequest(Fields):
    """The body of a request for token ids."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(Fields):
    """The body of a request for the text of token ids."""

    model: str | None = None
    tokens: Many[int]


def _models(front: Front) -> APIRouter:
    router = APIRouter()
    engine = front.service.engine

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The models that are served: one, by all its names, and its adapters."""
        return {"object": "list", "data": list(map(model, front.served))}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        """A model that is served."""
        front.check_model(name)
        return model(name)

    def model(name: str) -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": front.created, "owned_by": "truedraft"}
        return about | {
            "root": front.names[0],
            "parent": None if name in front.names else front.names[0],
            "max_model_len": engine.target.context_length,
            "speculation": {
                "drafters": [name for name, each in engine.drafter.members.items() if not each.limits.is_zero],
                "rule": engine.rule.name,
                "rules": list(front.rules),
                "lossless": engine.rule.lossless and all(rule.lossless for rule in front.rules.values()),
            },
            "chat": bool(front.template),
            "calls": front.notation.name if front.template else None,
            "reasoning": [marks.opening, marks.closing] if (marks := front.notation.reasoning) is not None else None,
        }

    return router


def _texts(front: Front) -> APIRouter:
    router = APIRouter(route_class=BodyRoute)
    target = front.service.engine.target

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest, http: HttpRequest) -> Response:
        """The token ids of a text."""
        front.check_model(body.model)
        return await front.run_in_thread(http, tokenized, body)

    def tokenized(body: TokenizeRequest) -> Response:
        encode = tokenizer().encode if body.add_special_tokens else tokenizer().plain_ids
        ids = encode(body.prompt)
        # In parts, because no other thread runs while one is formatted.
        parts = [",".join(map(str, ids[place : place + _WRITTEN])) for place in range(0, len(ids), _WRITTEN)]
        content = f'{{"count":{len(ids)},"max_model_len":{target.context_length},"tokens":[{",".join(parts)}]}}'
        return Response(content, media_type="application/json")

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, http: HttpRequest) -> dict[str, Any]:
        """The text of token ids."""
        front.check_model(body.model)
        return {"prompt": await front.run_in_thread(http, detokenized, body)}

    def detokenized(body: DetokenizeRequest) -> str:
        wrong = next((token for token in body.tokens if not 0 <= token < target.vocab_size), None)
        if wrong is not None:
            raise invalid("tokens", f"token id {wrong} is outside 0 to {target.vocab_size - 1}")
        return tokenizer().decode(body.tokens)

    def tokenizer() -> Tokenizer:
        if target.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer; it takes and gives token ids")
        return target.tokenizer

    return router


def _state(front: Front, metrics: Metrics) -> APIRouter:
    router = APIRouter()
    service = front.service

    @router.get("/health")
    async def health() -> Response:
        """Whether the engine works: 200, or 503 where only a new process helps, also while the server drains."""
        return state(service.trouble)

    @router.get("/ready")
    async def ready() -> Response:
        """Whether new requests are taken: 200, or 503 while the server is being stopped or its engine does not work."""
        return state(service.trouble or ("the server is being stopped" if service.draining else None))

    def state(trouble: str | None) -> Response:
        return JSONResponse({"status": trouble or "ok"}, 200 if trouble is None else 503)

    @router.get("/metrics", response_class=PlainTextResponse)
    def numbers() -> PlainTextResponse:  # in a thread, because it reads all of the last steps
        """Numbers for Prometheus."""
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
