"""Spans of answers, as a collector gets them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from server.conftest import serving
from server.test_load import post
from truedraft import Engine
from truedraft.server.metrics import Spans


def test_an_answer_is_a_span(make_engine: Callable[..., Engine]) -> None:
    exporter = InMemorySpanExporter()
    spans = Spans("tiny", "", exporter)
    with serving(make_engine()) as running:
        running.service.listeners.append(spans)
        post(running.url, {"prompt": "class Stack:", "max_tokens": 12, "temperature": 0, "top_p": 0.5})
    spans.close()
    (span,) = exporter.get_finished_spans()
    told = dict(span.attributes or {})
    assert span.name == "llm_request" and told["gen_ai.request.model"] == "tiny"
    assert told["gen_ai.usage.output_tokens"] == 12 and told["gen_ai.request.top_p"] == 0.5
    assert told["gen_ai.response.finish_reasons"] == ("length",) and told["truedraft.mean_acceptance_length"] >= 1.0
    assert span.end_time is not None and span.start_time is not None
    seconds = (span.end_time - span.start_time) / 1e9
    assert 0.0 < told["gen_ai.latency.time_to_first_token"] <= seconds < 60.0
