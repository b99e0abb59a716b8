"""OpenTelemetry traces: a span for each answer, with the semantic conventions' names for language models.

Needs the extra `otel`: `pip install 'truedraft[otel]'`.
"""

from __future__ import annotations

import time
from typing import Any

from truedraft.errors import MissingExtraError
from truedraft.server.service import Stream


class Spans:
    """Sends a span for every finished answer to an OpenTelemetry collector; called in the event loop.

    Args:
        endpoint: of a collector that accepts OTLP over HTTP, as http://127.0.0.1:4318/v1/traces.
        exporter: replaces the collector, as in tests.

    Raises:
        MissingExtraError: OpenTelemetry is not installed.
    """

    def __init__(self, model: str, endpoint: str, exporter: Any = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint=endpoint)
        except ImportError as error:
            raise MissingExtraError(
                f"traces need the package {error.name}; install it by: pip install 'truedraft[otel]'"
            ) from error
        self._provider = TracerProvider(resource=Resource.create({"service.name": "truedraft"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("truedraft")
        self._model = model

    def __call__(self, stream: Stream) -> None:
        answer = stream.answer
        if answer is None:
            return
        end = time.time_ns()
        span = self._tracer.start_span("llm_request", start_time=end - int(answer.timing.total_s * 1e9))
        params, counters = stream.request.params, answer.stats
        attributes: dict[str, Any] = {
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.response.finish_reasons": [answer.finish_reason],
            "gen_ai.usage.input_tokens": answer.prompt_tokens,
            "gen_ai.usage.output_tokens": len(answer.token_ids),
            "truedraft.client": stream.client.name,
            "truedraft.mean_acceptance_length": counters.mean_acceptance_length,
            "truedraft.draft_acceptance_rate": counters.draft_acceptance_rate,
            "truedraft.cached_tokens": stream.request.copied_tokens,
            "truedraft.preemptions": stream.request.preemptions,
        }
        if answer.timing.first_token_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = answer.timing.first_token_s
        span.set_attributes(attributes)
        span.end(end)

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()
