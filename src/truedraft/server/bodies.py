"""Request bodies: long ones are parsed in a thread, in steps between which other requests continue."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterator
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from truedraft.server.errors import ApiError, invalid, is_json, spelled, unreadable

MOST_VALUES = 1 << 19
"""Limit of JSON values in a body."""
_QUICK_VALUES = 1 << 15
"""Bodies below this are parsed by the C parser, which blocks other threads for some hundredths of a second."""


class BodyRoute(APIRoute):
    """An endpoint with a body that is parsed and validated by `Front.run_in_thread`, not in the event loop."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()
        model = None if self.body_field is None else self.body_field.field_info.annotation
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return answer

        async def read_and_answer(http: HttpRequest) -> Response:
            given = _ReadRequest(http.scope, http.receive)
            try:
                body = await given.body()
            except ClientDisconnect:
                raise ApiError(499, "the client closed the connection") from None
            if body and is_json(http.headers.get("content-type", "")):
                given.known = await http.app.state.front.run_in_thread(http, read_body, body, model)
            return await answer(given)

        return read_and_answer


class _ReadRequest(HttpRequest):
    known: BaseModel

    async def json(self) -> BaseModel:
        return self.known


def read_body(body: bytes, model: type[BaseModel]) -> BaseModel:
    """Parse and validate a JSON body; an `ApiError` if it cannot be used."""
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        value = _decoded(text)
        try:
            text.encode()
            is_whole = "\\ud" not in text and "\\uD" not in text  # a quick test that most bodies pass
        except UnicodeEncodeError:
            is_whole = False
        # Tokenizers cannot encode lone surrogates, and no answer can contain them.
        for place, half in () if is_whole else _halves(value, ()):
            where = spelled(place)
            message = f"{where or 'the body'} has half a character (U+{ord(half):04X}); mend how its text was cut"
            raise invalid(where or None, message, "invalid_value")
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is no JSON: {error.msg}") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply; make it flatter") from error
    except ValueError as error:
        raise ApiError(400, f"the body cannot be read ({error})") from error
    try:
        return model.model_validate(value, from_attributes=True)
    except ValidationError as error:
        raise unreadable([{**each} for each in error.errors(include_url=False)], value) from error


def _decoded(text: str) -> Any:
    """Parse JSON; long bodies by the pure Python parser, because other threads can run between its steps."""
    if sum(map(text.count, ",[{")) < _QUICK_VALUES:
        return json.loads(text)
    decoder, left = json.JSONDecoder(), MOST_VALUES

    def counted(text: str, place: int) -> tuple[Any, int]:
        nonlocal left
        left -= 1
        if left < 0:
            raise ApiError(400, f"the body holds more than {MOST_VALUES} values; send less at once")
        found: tuple[Any, int] = scan(text, place)
        return found

    decoder.parse_array = lambda at, _: JSONArray(at, counted)  # type: ignore[attr-defined]
    decoder.parse_object = lambda at, strict, _, *more: JSONObject(at, strict, counted, *more)  # type: ignore[attr-defined]
    scan = py_make_scanner(decoder)
    decoder.scan_once = counted  # type: ignore[attr-defined]
    return decoder.decode(text)


def _halves(value: Any, place: tuple[int | str, ...]) -> Iterator[tuple[tuple[int | str, ...], str]]:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            yield place, error.object[error.start]
    elif isinstance(value, dict):
        yield from _halves("".join(value), place)
        for name, each in value.items():
            yield from _halves(each, (*place, name))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _halves(each, (*place, number))
