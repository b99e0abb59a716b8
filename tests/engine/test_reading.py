"""How much of prompts a step reads: within a bound of seconds on a device, a fixed number of tokens on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from support.answers import fixed
from support.records import watched
from support.tiny_models import build, llama, with_noise
from truedraft import Engine, SamplingParams
from truedraft.core import transfers
from truedraft.core.stats import RequestStep, StepRecord
from truedraft.drafters import Drafter, DraftModel, Features, PromptLookup
from truedraft.engine.prompts import new_request
from truedraft.engine.request import Request
from truedraft.engine.scheduler import (
    LONGEST_DECODING_S,
    LONGEST_S,
    MOST_SHOWN,
    MOST_TOKENS,
    FixedParts,
    PromptReading,
    Scheduler,
    TimedParts,
    reading_on,
)
from truedraft.models.base import ForwardOutput, LanguageModel, Segment
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.testing import MarkovModel
from truedraft.verification import CoupledSampling

TABLE = MarkovModel.random(20, seed=1, context_length=1 << 17)
PARAMS = SamplingParams(max_tokens=4)


def asked(prompt: int, computed: int = 0, params: SamplingParams = PARAMS) -> Request:
    """A request that runs, whose prompt has so many tokens."""
    request = new_request(TABLE, [place % 20 for place in range(prompt)], params, CoupledSampling())
    request.cache = TABLE.new_cache()
    compute(request, computed)
    return request


def compute(request: Request, tokens: int) -> None:
    assert request.cache is not None
    request.cache.reserve(tokens)
    request.cache.commit(range(tokens))


class Device:
    """Runs what a scheduler says, in seconds that are a function of the prompts' tokens and of the rows that decode."""

    def __init__(self, reading: PromptReading, seconds: Callable[[int, int], float]) -> None:
        self.scheduler = Scheduler(1024, reading)
        self.seconds = seconds
        self.now = 0.0

    def come(self, *requests: Request) -> None:
        self.scheduler.running += requests

    def step(self) -> dict[Request, int]:
        """One step; what each request was fed of its prompt, 0 where it decoded."""
        batch = self.scheduler.next()
        steps, fed = [], {}
        for item in batch:
            request = item.request
            step = RequestStep(request.id, item.context, item.fed, item.prefill, emitted=int(item.judged))
            fed[request] = item.fed if item.prefill else 0
            compute(request, item.fed)
            if item.judged:
                request.tokens.append(0)
            if request.emitted >= request.params.max_tokens:
                self.scheduler.remove(request)
            steps.append(step)
        took = self.seconds(batch.prompt_tokens, sum(not item.prefill for item in batch))
        self.now += took
        self.scheduler.reading.observe(record(steps, took))
        return fed

    def read(self, *requests: Request) -> list[dict[Request, int]]:
        """Steps until all of these have been read."""
        self.come(*requests)
        steps = []
        while not all(request.emitted for request in requests):
            steps.append(self.step())
        return steps


def record(steps: Sequence[RequestStep], seconds: float, *, settled: bool = True) -> StepRecord:
    return StepRecord(tuple(steps), 0.0, seconds, 0.0, seconds, settled=settled)


def linear(per_token: float, base: float = 0.0, per_row: float = 0.0) -> Callable[[int, int], float]:
    return lambda tokens, rows: base + per_token * tokens + per_row * rows


def one_prompt(tokens: int, seconds: float, *, emitted: int = 1, settled: bool = True) -> StepRecord:
    return record([RequestStep(0, 0, tokens, prefill=True, emitted=emitted)], seconds, settled=settled)


# -------------------------------------------------------------------------------------------- bounds on a device


@pytest.mark.parametrize(
    ("per_token", "base", "alone", "decoding"),
    [
        (40e-6, 0.005, 8192, 2048),  # 8 billion weights on an H100
        (5e-6, 0.002, 8192, 8192),
        (300e-6, 0.03, 1024, 256),
        (9e-3, 0.0, 256, 256),
        (0.0, 0.057, 8192, 8192),  # bound by the host: the more the better
    ],
)
def test_steps_grow_to_what_the_bound_allows_and_no_further(
    per_token: float, base: float, alone: int, decoding: int
) -> None:
    reading = TimedParts()
    device = Device(reading, linear(per_token, base))
    for _ in range(12):
        device.read(asked(8192))
        device.scheduler.running.clear()
    assert reading.tokens(False) == alone
    writer = asked(300, params=replace(PARAMS, max_tokens=100_000))
    device.read(writer)
    longest = [0.0]
    for _ in range(300 if not per_token else 12):  # where twice the seconds are not known to fit, more is tried seldom
        before = device.now
        steps = device.read(asked(8192, params=replace(PARAMS, max_tokens=1)))
        assert all(step[writer] == 0 for step in steps), "an answer that is being written goes on in each step"
        longest.append((device.now - before) / len(steps))
    assert reading.tokens(True) == decoding
    assert longest[-1] <= LONGEST_DECODING_S or decoding == 256


def test_a_slow_step_halves_what_is_read_and_quick_ones_double_it() -> None:
    reading = TimedParts()
    sizes = [reading.tokens(False)]
    for seconds in (0.15, 0.3, 0.5, 0.5, 0.25, 0.1, 0.1):
        reading.observe(one_prompt(sizes[-1], seconds))
        sizes.append(reading.tokens(False))
    assert sizes == [2048, 4096, 4096, 2048, 1024, 1024, 2048, 4096]
    assert reading.tokens(True) == 2048, "nothing is known of steps beside answers"
    reading = TimedParts(most=4096)
    for seconds, size in ((0.0, 4096), (9.0, 256)):
        for _ in range(8):
            reading.observe(one_prompt(reading.tokens(False), seconds))
        assert reading.tokens(False) == size
    reading = TimedParts()
    reading.observe(one_prompt(2048, LONGEST_S + 0.1))
    for _ in range(64):
        assert reading.tokens(False) == 1024
        reading.observe(one_prompt(1024, 0.9 * LONGEST_S))
    assert reading.tokens(False) == 2048, "after 64 steps more is tried again"


def test_what_says_nothing_changes_nothing() -> None:
    reading = TimedParts()
    for _ in range(100):
        reading.observe(one_prompt(2048, 9.0, settled=False))
        reading.observe(one_prompt(1024, 0.001))  # half as much and less
        reading.observe(record([RequestStep(0, 5, 1, prefill=False, emitted=1)], 9.0))
        reading.observe(one_prompt(2048, 0.001, emitted=0))  # only queued
        reading.observe(record([RequestStep(0, 5, 1, prefill=False, emitted=1)], 0.001))
    assert reading.tokens(False) == reading.tokens(True) == 2048


@pytest.mark.parametrize(
    ("queued", "seconds", "settled", "size"),
    [(3, 0.597, True, 4096), (3, 4 * LONGEST_S, True, 1024), (1, 9.0, False, 2048)],
)
def test_queued_steps_count_for_the_one_that_is_waited_for(
    queued: int, seconds: float, settled: bool, size: int
) -> None:
    """Parts of 2,048 tokens, all but the last of which the host only queues."""
    reading = TimedParts()
    for _ in range(queued):
        reading.observe(one_prompt(2048, 0.001, emitted=0, settled=settled))
    reading.observe(one_prompt(2048, seconds))
    assert reading.tokens(False) == size


# ------------------------------------------------------------------------------------------- whose prompts


def parts(reading: PromptReading, *requests: Request, decoding: bool = False) -> list[int]:
    return reading.parts(requests, decoding)


def test_several_prompts_share_a_step() -> None:
    """Half of it is for the first one and half for the shortest; parts end at multiples of 256."""
    assert parts(TimedParts(), *(asked(512) for _ in range(6))) == [512] * 4 + [0, 0]
    assert parts(TimedParts(), asked(500), asked(600), asked(1500)) == [500, 600, 768]
    assert parts(TimedParts(), asked(5000)) == [2048]
    assert parts(TimedParts(), asked(5000, computed=100)) == [1948]
    assert parts(TimedParts(), asked(2100, computed=100)) == [2000]
    assert parts(TimedParts(most=256), asked(300), asked(100)) == [256, 0]
    first, second, short = asked(30_000), asked(3_000), asked(40)
    assert parts(TimedParts(), first, second, short) == [1024, 768, 40]
    assert parts(TimedParts(), first, short) == [1792, 40]
    assert parts(TimedParts(most=512), first, asked(300), asked(200)) == [256, 0, 200]


def test_prompts_with_images_are_read_at_once_and_those_with_logprobs_in_small_parts() -> None:
    seen = asked(5000)
    seen.inputs = {"pixel_values": torch.zeros(1)}
    assert parts(TimedParts(), seen, asked(40)) == [5000, 0]
    assert parts(TimedParts(), asked(100), seen, asked(40)) == [100, 0, 40]
    assert parts(FixedParts(), seen, asked(40)) == [5000, 0]
    compute(seen, 4000)
    assert parts(TimedParts(), asked(100), seen) == [100, 1000]
    told = asked(5000, params=replace(PARAMS, prompt_logprobs=1))
    assert parts(TimedParts(), told, asked(3000)) == [256, 1792]
    assert parts(TimedParts(), asked(3000), told) == [1792, 256]


def test_nobody_waits_for_ever_and_short_prompts_do_not_wait_for_long_ones() -> None:
    """A long prompt, and one of middle length, while short ones come at each step."""
    device = Device(TimedParts(), linear(LONGEST_DECODING_S / 2500))
    long, middle = asked(40_000), asked(4_000)
    device.come(long, middle)
    waited: dict[str, int] = {}
    step = 0
    while not (long.emitted and middle.emitted):
        short = asked(200, params=replace(PARAMS, max_tokens=1))
        device.come(short)
        fed = device.step()
        step += 1
        assert fed[short] == 200 and (long.emitted or fed[long] >= 1024 or fed[long] % 256)
        for name, request in (("long", long), ("middle", middle)):
            if request.emitted:
                waited.setdefault(name, step)
    assert waited["middle"] < waited["long"] <= 40_000 / 1024 + 1


# ---------------------------------------------------------------------------------------------------- memory


def test_where_memory_was_short_no_step_reads_as_much_again() -> None:
    reading = TimedParts()
    assert reading.read_less(2048) and reading.tokens(False) == reading.tokens(True) == 1024
    for _ in range(4):
        reading.observe(one_prompt(1024, 0.001))
    assert reading.tokens(False) == 1024
    assert reading.read_less(1000) and reading.tokens(False) == 512
    assert reading.read_less(257) and reading.tokens(False) == 256
    assert not reading.read_less(256) and not reading.read_less(0) and not reading.read_less(5000)


class Scarce(MarkovModel):
    """Lacks memory for more than so many rows together."""

    most = 700

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        rows = sum(len(segment.shape) for segment in segments)
        if rows > self.most:
            raise torch.OutOfMemoryError(f"no room for {rows} rows")
        return super().forward(segments)


@pytest.mark.plants_failures
def test_a_step_that_lacks_memory_is_read_in_smaller_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[place % 20 for place in range(tokens)] for tokens in (3000, 40, 900)]
    plain = Engine(TABLE).generate(prompts, PARAMS)
    monkeypatch.setattr(transfers, "waits", lambda device: True)
    engine = Engine(Scarce.random(20, seed=1, context_length=1 << 17))
    fed: list[int] = []
    engine.listeners.append(lambda step: fed.append(step.rows))
    assert [answer.token_ids for answer in engine.generate(prompts, PARAMS)] == [each.token_ids for each in plain]
    assert 256 < max(fed) <= 700


# ------------------------------------------------------------------------------------------------ on processors


def test_on_a_cpu_parts_are_fixed() -> None:
    """One part beside answers, 1,024 tokens without; what is copied does not move the ends."""
    reading = reading_on(torch.device("cpu"), None)
    long = [asked(1000, computed=100), asked(256), asked(30), asked(300), asked(300), asked(20)]
    assert parts(reading, *long) == [156, 256, 30, 256, 256, 20]
    assert parts(reading, *long, decoding=True) == [156, 256, 30, 0, 0, 20], "the first and the shortest, in two parts"
    assert parts(reading, asked(1000), asked(1000), asked(300), decoding=True) == [256, 0, 256]
    for seconds in (0.0, 9.0):
        reading.observe(one_prompt(256, seconds))
    assert not reading.read_less(1000)
    assert parts(reading, *long) == [156, 256, 30, 256, 256, 20]


@pytest.mark.parametrize("others", [1, 6])
def test_on_a_cpu_a_long_prompt_holds_no_answers_up(others: int) -> None:
    """While 8,000 tokens are read: 95 % of intervals as usual, and a first token in 1.2 of the time alone."""
    alone = Device(FixedParts(), linear(1.2e-3, per_row=1e-3))
    alone.read(asked(8000))
    device = Device(FixedParts(), linear(1.2e-3, base=3e-3, per_row=1e-3))
    writers = [asked(20, params=replace(PARAMS, max_tokens=100_000)) for _ in range(others)]
    device.read(*writers)
    device.step()
    usual = -device.now
    device.step()
    usual += device.now
    long, start = asked(8000), device.now
    device.come(long)
    intervals, last = [], start
    while not long.emitted:
        if writers[0] in device.step():
            intervals.append(device.now - last)
            last = device.now
    assert device.now - start <= 1.2 * alone.now
    assert sorted(intervals)[int(0.95 * len(intervals))] <= 2 * usual
    assert max(intervals) <= 1.5, "a second, and what a part takes"
    short = asked(30, params=replace(PARAMS, max_tokens=1))
    assert len(device.read(short)) <= 1 + 25, "a short prompt waits for what decoding is owed alone"


def test_answers_that_wait_for_a_prompt_go_on_where_it_is_over_or_nobody_decodes() -> None:
    reading = FixedParts()
    device = Device(reading, linear(1e-3, per_row=9e-3))
    writer, first, second = asked(20, params=replace(PARAMS, max_tokens=100_000)), asked(700), asked(700)
    device.read(writer)
    device.step()  # 9 milliseconds pay for a prompt read in 20
    device.come(first)
    steps = [device.step() for _ in range(3)]
    assert [fed.get(first) for fed in steps] == [256, 256, 188]
    assert [writer in fed for fed in steps] == [False, False, True], "the last part is no reason to wait"
    device.come(second)
    steps = [device.step() for _ in range(3)]
    assert [fed.get(second) for fed in steps] == [256, 256, None], "after a second of reading decoding has to catch up"
    assert steps[-1] == {writer: 0, first: 0}
    assert parts(reading, asked(1000), decoding=True) == [0]
    assert parts(reading, asked(1000)) == [256], "unless there is nothing to decode"
    assert parts(reading, asked(1000), decoding=True) == [256]


def test_on_a_device_parts_are_timed() -> None:
    device = torch.device("cuda")
    for features, most in (
        (None, MOST_TOKENS),
        (Features(rows="last"), MOST_TOKENS),
        (Features(rows="all"), MOST_SHOWN),
    ):
        reading = reading_on(device, features)
        assert isinstance(reading, TimedParts)
        for _ in range(9):
            reading.observe(one_prompt(reading.tokens(False), 0.0))
        assert reading.tokens(False) == most


# --------------------------------------------------------------------------------------------------- answers

LENGTHS = (700, 20, 330, 256, 1, 515)
OPTIONS = {"greedy": SamplingParams(max_tokens=20), "seeded": SamplingParams(max_tokens=20, temperature=0.8, seed=3)}
DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "lookup": lambda: PromptLookup(min_ngram=1),
    "draft": lambda: DraftModel(long_llama(noise=0.01)),
}


def long_llama(noise: float = 0.0) -> LanguageModel:
    """A model whose context holds the prompts. Nothing nearly ties in float64, so rounding decides nothing."""
    stock = build(llama(max_position_embeddings=1024), seed=2, dtype=torch.float64)
    return HuggingFaceModel(with_noise(stock, noise), None, "llama")


@cache
def answered_alone(options: str, prompt: tuple[int, ...]) -> list[int]:
    return Engine(long_llama(), prefix_cache_bytes=0).generate(list(prompt), OPTIONS[options]).token_ids


class Unmoved(TimedParts):
    """Reads so many tokens a step, whatever they take."""

    def observe(self, record: StepRecord) -> None:
        pass


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("drafter", "most"), [("none", 256), ("none", 1024), ("lookup", 512), ("draft", 512)])
def test_prompts_read_together_beside_answers_are_answered_as_alone(options: str, drafter: str, most: int) -> None:
    target = long_llama()
    params = OPTIONS[options]
    prompts = [[(number + 3 * place * place) % 60 for place in range(tokens)] for number, tokens in enumerate(LENGTHS)]
    alone = [answered_alone(options, tuple(prompt)) for prompt in prompts]
    engine = fixed(target, DRAFTERS[drafter](), prefix_cache_bytes=0)
    engine._scheduler.reading = Unmoved(most)
    records = watched(engine)
    writer = engine.submit([1, 2, 3], SamplingParams(max_tokens=60))
    engine.step()
    requests = [engine.submit(prompt, params) for prompt in prompts]
    while engine.step():
        pass
    assert [request.tokens[request.prompt_tokens :] for request in requests] == alone
    assert writer.tokens[3:] == Engine(target).generate([1, 2, 3], SamplingParams(max_tokens=60)).token_ids
    together = [sum(each.prefill for each in record.requests) for record in records[1:]]
    assert max(together) > 1 and sum(each > 0 for each in together) < len(LENGTHS) + sum(LENGTHS) // most
    assert all(not record.requests[0].prefill for record in records[1:3])
