"""What a client is told when its request cannot be answered: OpenAI's form of an error, and its status codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from truedraft.errors import FormMemoryError, OptionError, PromptError, TruedraftError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
_CODES = {
    401: "invalid_api_key",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "server_unavailable",
    504: "timeout",
}


class ErrorFields(BaseModel):
    """What is told of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of an answer that is an error."""

    error: ErrorFields


class ApiError(Exception):
    """A request is answered with an error.

    Args:
        status: of the answer, by HTTP.
        message: one sentence: what was wrong, and what to do.
        param: the field of the request that it is about.
        code: a word for programs; None is what the status says.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code if code is not None else _CODES.get(status)
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """As it is sent."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        message = self.message.encode(errors="replace").decode()  # what a client sent may hold half a character
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body, self.status, self.headers)

    @classmethod
    def of(cls, error: BaseException, names: Mapping[str, str] | None = None) -> ApiError:
        """An error of the library as clients see it: what they can mend is told, all else is an error of the server.

        Args:
            error: of any kind.
            names: what the client calls fields, where these are not the library's words.
        """
        if isinstance(error, ApiError):
            return error
        if isinstance(error, TruedraftError) and names:
            error.call_fields(names)
        if isinstance(error, FormMemoryError):
            return cls(429, str(error), param=_called(error.field, names), headers={"Retry-After": "1"})
        if isinstance(error, OptionError | PromptError):
            return cls(400, str(error), param=_called(error.field, names), code="invalid_value")
        if isinstance(error, HTTPException):
            return cls(error.status_code, str(error.detail), headers=error.headers)
        if isinstance(error, UnicodeEncodeError):
            return cls(400, "a text has half a character (a lone surrogate); mend how it was cut")
        if isinstance(error, TruedraftError):
            return cls(500, f"the model failed ({error})")
        return cls(500, f"the server failed ({type(error).__name__}); its log says more")


def _called(field: str | None, names: Mapping[str, str] | None) -> str | None:
    return field if field is None else (names or {}).get(field, field)


async def answer_api_error(_: Request, error: Exception) -> JSONResponse:
    """For FastAPI: an error of ours, or of the web framework's: no such page, or not by this method."""
    return ApiError.of(error).response()


async def answer_unreadable(_: Request, error: Exception) -> JSONResponse:
    """For FastAPI: a body that is no JSON, or whose fields are not what they must be; the first of them is told."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = [str(part) for part in first["loc"][1:]]  # behind where it was: the body, the path
    kind, message = str(first["type"]), str(first["msg"])
    if kind == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first.get('ctx', {}).get('error', message)}").response()
    if kind == "extra_forbidden":
        return ApiError(400, f"unrecognized request argument: {'.'.join(place)}", param=place[0]).response()
    if not place:
        return ApiError(400, f"the body cannot be used: {message}").response()
    if kind == "value_error":  # ours
        return ApiError(
            400, f"{'.'.join(place)} {first['ctx']['error']}", param=place[0], code="invalid_value"
        ).response()
    given = first.get("input")
    shown = f", got {_shown(given)}" if kind != "missing" else ""
    return ApiError(400, f"{'.'.join(place)}: {message}{shown}", param=place[0], code="invalid_value").response()


def _shown(given: object) -> str:
    """A value that a client sent, short enough to be told back."""
    text = repr(given)
    return text if len(text) <= 80 else f"{text[:77]}..."
