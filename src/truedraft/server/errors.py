"""Error responses in OpenAI's and Anthropic's formats."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from truedraft.errors import FormMemoryError, OptionError, PromptError, TruedraftError

_KINDS: dict[int, tuple[str, str, str | None]] = {
    401: ("authentication_error", "authentication_error", "invalid_api_key"),
    403: ("permission_error", "permission_error", None),
    404: ("not_found_error", "not_found_error", None),
    413: ("invalid_request_error", "request_too_large", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error", "rate_limit_exceeded"),
    500: ("server_error", "api_error", None),
    503: ("server_error", "overloaded_error", "server_unavailable"),
    504: ("server_error", "timeout_error", "timeout"),
}
"""By status: OpenAI's and Anthropic's error type, and OpenAI's code."""
_OTHER = ("invalid_request_error", "invalid_request_error", None)

_NO_MEMORY = re.compile("can't (start new thread|allocate memory)")
_PATH = re.compile(
    r"(?:^|[\s'\"(\[=:,])(?:~|[A-Za-z]:)?[/\\](?!/)[^\s'\"]|\bfile:"  # /a, ~/a, C:\a, and no https://
    r"|(?<![\w/:.~-])[\w.~-]+[/\\][\w.~-]"  # a/b, ./a, ..\a
    r"|\w\.(?:bin|gguf|jinja|json|jsonl|model|pt|pth|py|safetensors|so|txt)\b"  # a file by its name
)
"""Matches possible file paths."""
_SHOWN = 80  # characters of a client's value that errors show


class ErrorFields(BaseModel):
    """The description of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of an answer that is an error."""

    error: ErrorFields


class AnthropicErrorFields(BaseModel):
    """The description of an error in Anthropic's protocol."""

    type: str
    message: str


class AnthropicErrorAnswer(BaseModel):
    """The body of an answer to them that is an error."""

    type: str
    error: AnthropicErrorFields


class ApiError(Exception):
    """An error that is sent to the client, who may retry after `retry_s`; `code` None is the default of the status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self._openai, self._anthropic, usual = _KINDS.get(status, _OTHER)
        self.code = code if code is not None else usual
        self.headers = {**(headers or {})} | ({} if retry_s is None else {"Retry-After": str(retry_s)})

    @property
    def body(self) -> dict[str, Any]:
        message = self.message.encode(errors="replace").decode()  # text of a client may hold a lone surrogate
        return {"error": {"message": message, "type": self._openai, "param": self.param, "code": self.code}}

    @property
    def anthropic(self) -> dict[str, Any]:
        return {"type": "error", "error": {"type": self._anthropic, "message": self.body["error"]["message"]}}

    def response(self, path: str) -> JSONResponse:
        body = self.anthropic if path.startswith("/v1/messages") else self.body
        return JSONResponse(body, self.status, self.headers)

    @classmethod
    def of(
        cls, error: BaseException, fields: Mapping[str, str] | None = None, shown: Mapping[str, str] | None = None
    ) -> ApiError:
        """Convert an error of the library: a client's mistakes keep their message, all else is an error of the server.

        `fields` has the client's names of fields, and `shown` the names that clients see, by the library's.
        """
        if isinstance(error, TruedraftError) and fields:
            error.call_fields(fields)
        message = known = str(error)
        param = None if (own := getattr(error, "field", None)) is None else (fields or {}).get(own, own)
        for name, instead in (shown or {}).items():
            message, known = message.replace(name, instead), known.replace(name, "")
        if isinstance(error, ApiError):
            error.message = message
            return error
        if isinstance(error, FormMemoryError):
            return cls(429, message, param=param, retry_s=1)
        if isinstance(error, OptionError | PromptError) and not _is_about_a_file(error):
            return cls(400, message, param=param, code="invalid_value")
        if isinstance(error, HTTPException):
            return cls(error.status_code, str(error.detail), headers=error.headers)
        if isinstance(error, UnicodeEncodeError):
            return cls(400, "a text has half a character (a lone surrogate); mend how it was cut")
        if isinstance(error, TruedraftError):
            hides = _is_about_a_file(error) or _PATH.search(known) is not None
            return cls(500, f"the model failed ({'the log of the server says why' if hides else message})")
        if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
            return cls(503, "the server lacks memory for this request; ask again", retry_s=1)
        return cls(500, f"the server failed ({type(error).__name__}); its log says more")


async def answer_unreadable(request: Request, error: Exception) -> JSONResponse:
    """FastAPI's handler for a body that is not JSON or has an invalid field; reports the first one."""
    assert isinstance(error, RequestValidationError)
    kind = request.headers.get("content-type", "")
    if error.body is not None and not isinstance(error.body, dict | list) and not is_json(kind):
        message = f"the header Content-Type is {quoted(kind) if kind else 'missing'}; send JSON as application/json"
        return invalid("Content-Type", message).response(request.scope["path"])
    errors = [{**each, "loc": each["loc"][1:]} for each in error.errors()]  # without its "body" or "path"
    return unreadable(errors, error.body).response(request.scope["path"])


def is_json(content_type: str) -> bool:
    """Whether a Content-Type header is JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def unreadable(errors: list[dict[str, Any]], body: Any) -> ApiError:
    """The error of the first invalid field; for a union, of the member that validated the furthest."""
    placed = [(_place(each, body), each) for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
    place, first = max(placed, key=lambda each: len(each[0]))
    named = spelled(place)
    same = [each for where, each in placed if where == place]
    first = next((each for each in same if each["type"] == "too_long"), first)
    kind, message, context = str(first["type"]), str(first["msg"]), first.get("ctx", {})
    if kind == "json_invalid":
        return ApiError(400, f"the body is no JSON: {context.get('error', message)}")
    if kind == "extra_forbidden" and named.startswith("guided_"):  # vLLM's former fields
        options = "response_format, or structured_outputs with json, regex, choice or grammar"
        return invalid(named, f"{named} is not known here; request a form by {options}")
    if kind == "extra_forbidden":
        return invalid(named, f"unrecognized request argument: {named}")
    if not place:
        message = "it is missing; send a JSON object" if kind == "missing" else message
        return ApiError(400, f"the body cannot be used: {message}")
    shown = f", got {quoted(first.get('input'))}"
    if kind == "value_error":  # raised by this library
        text = f"{named} {context['error']}"
    elif kind == "union_tag_invalid":
        named += ".type"
        text = f"{named} is {quoted(context['tag'])}, which is not known here; known are {context['expected_tags']}"
    elif kind == "union_tag_not_found":
        text = f"{named} must be an object with a type{shown}"
    elif kind == "missing":
        text = f"{named}: {message}"
    elif kind == "too_long":
        text = f"{named} holds {context['actual_length']} entries, of at most {context['max_length']}"
    else:
        expected = dict.fromkeys(str(each["msg"]).removeprefix("Input should be ") for each in same)
        message = f"Input should be {' or '.join(expected)}" if len(expected) > 1 else message
        text = f"{named}: {message}{shown}"
    return invalid(named, text, "invalid_value")


def spelled(place: Sequence[int | str]) -> str:
    """A path in a body as clients write it: `messages[0].content`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")


def _place(error: dict[str, Any], body: Any) -> tuple[int | str, ...]:
    """The path of an error in a body, without pydantic's names of union members."""
    found: list[int | str] = []
    for number, part in enumerate(error["loc"], start=1):
        within = 0 <= part < len(body) if isinstance(part, int) and isinstance(body, list) else False
        if within or (isinstance(body, dict) and part in body):
            body = body[part]
        elif not (isinstance(body, dict) and error["type"] == "missing" and number == len(error["loc"])):
            continue
        found.append(part)
    return tuple(found)


def _is_about_a_file(error: BaseException | None) -> bool:
    """Whether a file of the server caused it, which a client cannot fix."""
    while error is not None:
        if isinstance(error, OSError) and error.filename is not None:
            return True
        error = error.__cause__
    return False


def quoted(given: object) -> str:
    """A client's value, shortened for an error message."""
    text = repr(_beginning(given, _SHOWN))
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _beginning(given: Any, most: int) -> Any:
    """A value without most of what is long in it; the deeper, the less is left."""
    if isinstance(given, str):
        return given[: _SHOWN + 1]
    if isinstance(given, dict):
        few = itertools.islice(given.items(), most)
        return {_beginning(name, most): _beginning(value, most // 2) for name, value in few}
    return [_beginning(each, most // 2) for each in given[:most]] if isinstance(given, list) else given


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """The error of a request with an unusable field."""
    return ApiError(400, message, param=param, code=code)
