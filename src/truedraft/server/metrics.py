"""What operators see: `/metrics` for Prometheus, and spans for OpenTelemetry (`pip install 'truedraft[otel]'`).

Metrics that vLLM has keep its names, after the prefix `truedraft:` and also after `vllm:`, for routers (proposal 003 of
the Gateway API inference extension), dashboards and benchmark clients that read those.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from truedraft.core.stats import Counters, StepRecord
from truedraft.engine.policy.decisions import Decisions, Speedup
from truedraft.errors import MissingExtraError
from truedraft.models.cache import BLOCK
from truedraft.server.service import Service, Stream

_PREFIX = "truedraft:"
_VLLM = "vllm:"
_OF_VLLM = {
    "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos", "prompt_tokens", "generation_tokens", "prefix_cache_queries",
    "prefix_cache_hits", "request_success", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
}  # fmt: skip
_RECENT_STEPS = 512
_RECENT_S = 60.0
_FRESH_S = 5.0
_PARTS = ("draft", "target", "verify", "decide")
"""Parts of a step with their seconds in its record."""
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96)
_EACH = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_WHOLE = (0.1, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)


class Metrics(Collector):
    """Counts steps and requests of a service; without a price, the cost of tokens is omitted."""

    def __init__(self, service: Service, model: str, price_per_hour: float | None) -> None:
        self._service = service
        self._model = model
        self._price = price_per_hour
        self._steps = Counters()
        self._drafts = 0
        self._prompt_tokens = 0
        self._seconds = dict.fromkeys((*_PARTS, "other"), 0.0)
        self._budgets: dict[int, int] = {}  # number of drafts by their number of nodes
        self._finished: dict[str, int] = {}
        self._recoveries = 0
        self._queried_tokens = 0
        self._shared_tokens = 0
        self._recent: deque[tuple[float, StepRecord]] = deque(maxlen=_RECENT_STEPS)
        self._speedup: Speedup | None = None
        self._estimated = 0.0  # time of the estimate
        self._histograms: list[Histogram] = []
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._first = self._histogram("time_to_first_token_seconds", "From a request to its first token.", _FIRST)
        self._each = self._histogram("inter_token_latency_seconds", "Mean time between an answer's tokens.", _EACH)
        self._whole = self._histogram("e2e_request_latency_seconds", "From a request to its last token.", _WHOLE)
        service.engine.listeners.append(self._note)
        service.listeners.append(self._note_end)

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        whole = Histogram(_PREFIX + name, meaning, ("model_name",), buckets=buckets, registry=None)
        self._histograms.append(whole)
        return whole.labels(self._model)

    def _note(self, record: StepRecord) -> None:
        """Count a step; called in the engine thread."""
        self._recent.append((time.monotonic(), record))
        for step in record.requests:
            self._steps.count(step)
            if step.prefill:
                self._prompt_tokens += step.rows
            else:
                self._drafts += step.nodes > 0
                self._budgets[step.nodes] = self._budgets.get(step.nodes, 0) + 1
        spent = {part: getattr(record, f"{part}_s") for part in _PARTS}
        spent["other"] = max(record.total_s - sum(spent.values()), 0.0)
        for part, seconds in spent.items():
            self._seconds[part] += seconds

    def _note_end(self, stream: Stream) -> None:
        """Count a finished request; called in the event loop."""
        answer = stream.answer
        if answer is None:
            return
        reason = "abort" if answer.finish_reason == "cancelled" else answer.finish_reason
        self._finished[reason] = self._finished.get(reason, 0) + 1
        self._recoveries += answer.stats.recoveries
        self._queried_tokens += stream.request.prompt_tokens
        self._shared_tokens += stream.request.copied_tokens
        timing = answer.timing
        self._whole.observe(timing.total_s)
        if timing.first_token_s is not None:
            self._first.observe(timing.first_token_s)
            if len(answer.token_ids) > 1:
                self._each.observe(timing.decode_s / (len(answer.token_ids) - 1))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """The metrics, those of vLLM under both prefixes; called by the registry."""
        for metric in itertools.chain(self._counted(), self._now(), *(each.collect() for each in self._histograms)):
            yield metric
            if metric.name.removeprefix(_PREFIX) in _OF_VLLM:
                again = Metric(metric.name.replace(_PREFIX, _VLLM), metric.documentation, metric.type)
                again.samples = [each._replace(name=each.name.replace(_PREFIX, _VLLM)) for each in metric.samples]
                yield again

    def _counted(self) -> Iterator[Metric]:
        steps = self._steps
        yield self._counter("spec_decode_num_drafts", "Times that something was drafted.", self._drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Drafted tokens.", steps.draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Of them, accepted ones.", steps.accepted_tokens)
        places = {str(place): count for place, count in enumerate(steps.accepted_per_position)}
        meaning = "Accepted tokens by their place in what was drafted."
        yield self._labelled("spec_decode_num_accepted_tokens_per_pos", meaning, "position", places)
        drafters = steps.by_drafter.copy().items()
        drafted = {name: each.draft_tokens for name, each in drafters}
        accepted = {name: each.accepted_tokens for name, each in drafters}
        yield self._labelled("drafter_draft_tokens", "Drafted tokens by drafter.", "drafter", drafted)
        yield self._labelled("drafter_accepted_tokens", "Accepted tokens by drafter.", "drafter", accepted)
        yield self._counter("prompt_tokens", "Tokens of prompts that were computed.", self._prompt_tokens)
        yield self._counter("generation_tokens", "Tokens of answers.", steps.emitted_tokens + steps.prefill_tokens)
        yield self._counter("prefix_cache_queries", "Tokens of prompts that were looked up.", self._queried_tokens)
        yield self._counter("prefix_cache_hits", "Of them, copied instead of computed.", self._shared_tokens)
        yield self._counter("preemptions", "Requests that gave their room back.", self._service.engine.preemptions)
        yield self._counter("recoveries", "Steps or drafts that failed and were done again.", self._recoveries)
        yield self._labelled("request_success", "Requests that ended.", "finished_reason", self._finished.copy())
        yield self._labelled("step_seconds", "Seconds of steps, by what they were spent on.", "part", self._seconds)
        budgets = {str(nodes): count for nodes, count in sorted(self._budgets.copy().items())}
        yield self._labelled("budget_tokens", "Steps of a request by the tokens drafted.", "tokens", budgets)
        yield from self._learned()

    def _now(self) -> Iterator[Metric]:
        service, engine = self._service, self._service.engine
        stuck = engine.waiting  # in the engine, which has no room for them
        for name, meaning, value in (
            ("num_requests_running", "Requests that are answered.", max(service.running - stuck, 0)),
            ("num_requests_waiting", "Requests that wait.", service.waiting + stuck),
            ("kv_cache_usage_perc", "Share of the room for tokens that running requests take.", engine.cache_usage),
        ):
            yield self._gauge(name, meaning, value)
        # For routers that hash prompts by block; prefixes are cached by block.
        blocks = {"block_size": str(BLOCK), "num_gpu_blocks": str(engine.cache_tokens // BLOCK)}
        meaning = "Tokens that prefixes are kept by, and how many such blocks there is room for."
        yield self._gauge("cache_config_info", meaning, 1.0, _VLLM, blocks)
        yield self._gauge("kv_cache_bytes", "Bytes of keys and values, of target and drafters.", engine.cache_bytes)
        if (speedup := self._speedup_now()) is not None:
            yield self._gauge("speedup", "Estimated factor over plain decoding, of the last steps.", speedup.factor)
        since = time.monotonic() - _RECENT_S
        recent = [(when, record) for when, record in list(self._recent) if when >= since]
        if len(recent) > 1:
            tokens = sum(step.emitted for _, record in recent for step in record.requests)
            rate = tokens / max(time.monotonic() - recent[0][0], 1e-9)
            yield self._gauge("tokens_per_second", "Of the last minute at most.", rate)
            if self._price is not None and rate > 0.0:
                cost = self._price / 3600.0 / rate * 1e6
                yield self._gauge("cost_per_million_tokens", "At that rate, by the price of an hour.", cost)

    def _learned(self) -> Iterator[Metric]:
        if (learner := self._service.engine.learner) is None:
            return
        status = learner.status
        yield self._counter("learner_promotions", "Learned heads that were put in service.", status.promotions)
        yield self._counter("learner_rollbacks", "Of them, taken out again.", status.rollbacks)
        yield self._counter("learner_trials", "Learned heads that were held to those in service.", status.trials)
        yield self._gauge("learner_version", "Version of the heads in service, the highest.", status.version)
        yield self._gauge("learner_time_share", "Processor time for learning, of all time.", status.time_share)
        yield self._gauge("learner_answers_bytes", "Of answers that are learned from.", status.answers_bytes)
        meaning = "Heads that learn no more, versions not noted; the log says why."
        yield self._gauge("learner_failures", meaning, status.failures)
        for when, tokens in (("before", status.tokens_per_call_before), ("after", status.tokens_per_call_after)):
            if tokens is not None:
                meaning = f"By replay of the same answers, {when} the last promotion."
                yield self._gauge(f"learner_tokens_per_call_{when}", meaning, tokens)

    def _speedup_now(self) -> Speedup | None:
        """The speedup of the last steps, computed at most every `_FRESH_S` seconds, because scrapes may be frequent."""
        now = time.monotonic()
        if self._speedup is None or now - self._estimated > _FRESH_S:
            self._estimated = now
            recent = [record for _, record in list(self._recent)]
            self._speedup = Decisions.of(recent, self._service.forward_s).estimate()
        return self._speedup

    def _counter(self, name: str, meaning: str, value: float) -> Metric:
        family = CounterMetricFamily(_PREFIX + name, meaning, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _gauge(
        self, name: str, meaning: str, value: float, prefix: str = _PREFIX, labels: Mapping[str, str] | None = None
    ) -> Metric:
        labels = {"model_name": self._model} | dict(labels or {})
        family = GaugeMetricFamily(prefix + name, meaning, labels=tuple(labels))
        family.add_metric(tuple(labels.values()), value)
        return family

    def _labelled(self, name: str, meaning: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(_PREFIX + name, meaning, labels=("model_name", label))
        for value, count in values.items():
            family.add_metric((self._model, value), count)
        return family


class Spans:
    """Sends a span for every finished answer to a collector (OTLP over HTTP); called in the event loop."""

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
        self._provider.shutdown()
