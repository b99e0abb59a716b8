"""The OpenAPI document, and what the server does with anything that it allows or forbids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from server.conftest import Running, serving
from server.test_load import get
from truedraft import Engine

schemathesis = pytest.importorskip("schemathesis")


PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/models", "/v1/models/{name}", "/tokenize", "/detokenize", "/health", "/ready", "/metrics",
)  # fmt: skip


@pytest.fixture(scope="module")
def short(make_engine: Callable[..., Engine], template_file: Any) -> Iterator[Running]:
    """A server that ends long answers: valid requests may ask for thousands of tokens."""
    with serving(make_engine(), chat_template=template_file, request_timeout_s=0.3) as found:
        yield found


@pytest.mark.parametrize("path", PATHS)
def test_whatever_is_sent_is_answered_as_documented(short: Running, path: str) -> None:
    schema = schemathesis.openapi.from_url(f"{short.url}/openapi.json")
    method = "POST" if "post" in schema.raw_schema["paths"][path] else "GET"
    checks = schemathesis.checks

    @given(case=schema[path][method].as_strategy())
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    def send(case: Any) -> None:
        answer = case.call_and_validate(
            checks=[checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]
        )
        assert answer.status_code not in (500, 502), "504 is what long answers get here"

    send()


def test_the_document_lists_every_endpoint(short: Running) -> None:
    document = json.loads(get(short.url, "/openapi.json")[1])
    assert set(document["paths"]) == set(PATHS)
    for path, methods in document["paths"].items():
        for method in methods.values():
            assert method["description"] or method["summary"], path
