"""Memory for caches: never more than is allowed, drafters give way first, and answers are what they always are."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from models import test_copied, test_encoder_decoder, test_recurrence
from support import rare_families
from support.answers import finished, fixed
from support.head_models import MarkovWithHead, fitted_heads
from support.pairwise import by_turns
from support.tiny_models import build, noisy_stock, packed, stock
from truedraft import Engine, SamplingParams
from truedraft.core.stats import StepRecord
from truedraft.drafters import Cascade, DraftModel, Medusa, PromptLookup
from truedraft.drafters.base import Drafter
from truedraft.drafters.portfolio import Portfolio
from truedraft.engine import Request, memory
from truedraft.engine.policy import Goodput
from truedraft.errors import PromptError
from truedraft.kinds.medusa.guess_trees import GuessTrees
from truedraft.models.backends.base import BackendMaker
from truedraft.models.backends.stock import StockBackend
from truedraft.models.base import LanguageModel
from truedraft.models.cache import key_span
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.loading import fastest_backend
from truedraft.testing import MarkovModel

VOCAB = 8
CONTEXT = 2000
POSITION = 16  # bytes of a Markov model's position: one key and one value in float64


def markov(seed: int = 1) -> MarkovModel:
    return MarkovModel.random(VOCAB, seed, context_length=CONTEXT)


def allocated(engine: Engine) -> int:
    """Bytes of all buffers, one by one."""
    pools = {id(pool): pool for model in models(engine) if (pool := model.pool) is not None}
    kept = [cache for pool in pools.values() for cache in pool._free]
    running = [request.cache for request in engine._scheduler.running if request.cache is not None]
    drafted = [
        cache
        for member in engine.drafter.members.values()
        for own in member.held.models
        for cache in own.caches.values()
    ]
    held = sum(len(member.held.requests) * member.held.request_bytes for member in engine.drafter.members.values())
    return held + sum(cache.n_bytes for cache in (*kept, *running, *drafted))


def models(engine: Engine) -> list[LanguageModel]:
    drafts = [each.model for member in engine.drafter.members.values() for each in member.held.models]
    return [engine.target, *drafts]


class Watch:
    """Holds every step to the bytes that are allowed, and notes who drafted."""

    def __init__(self, engine: Engine, most: int) -> None:
        self.engine, self.most = engine, most
        self.largest = 0
        self.drafted: list[dict[int, tuple[str, ...]]] = []  # of each step, by request
        engine.listeners.append(self)

    def __call__(self, record: StepRecord) -> None:
        used = allocated(self.engine)
        assert used == self.engine.cache_bytes
        assert used <= self.most
        self.largest = max(self.largest, used)
        decoding = [step for step in record.requests if not step.prefill]
        self.drafted.append({step.id: tuple(share.drafter for share in step.shares) for step in decoding})


def load(seed: int, count: int = 20) -> tuple[list[list[int]], list[SamplingParams]]:
    chance = random.Random(seed)
    prompts = [[chance.randrange(VOCAB) for _ in range(chance.choice((3, 70, 400)))] for _ in range(count)]
    return prompts, [SamplingParams(max_tokens=chance.choice((5, 60, 200))) for _ in prompts]


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "chain": lambda: DraftModel(markov(2)),
    "tree": lambda: DraftModel(markov(2), branching=(3, 2, 1)),
    "cascade": lambda: Cascade(DraftModel(markov(3), 2), DraftModel(markov(2)), 6),
    "portfolio": lambda: Portfolio([DraftModel(markov(2)), DraftModel(markov(3), branching=(4, 4)), PromptLookup()]),
}


CASES = [
    pytest.param(*case.values, "in-turn", marks=case.marks, id=case.id)
    for case in by_turns(DRAFTERS, [20_000, 60_000, 1_000_000], always=[20_000])
]


@pytest.mark.parametrize(
    ("drafter", "most", "controller"), [*CASES, ("portfolio", 40_000, Goodput), ("chain", None, "fixed")]
)
def test_no_step_holds_more_than_is_allowed_and_answers_are_those_of_plain_decoding(
    drafter: str, most: int | None, controller: str | type[Goodput]
) -> None:
    """Also where decisions are kept; without a limit nobody waits, and the same is counted."""
    target, made = markov(), DRAFTERS[drafter]()
    decides = controller if isinstance(controller, str) else controller()
    engine = Engine(target, made, controller=decides, max_cache_bytes=most)
    watch, running = Watch(engine, most or 1 << 40), list[int]()
    engine.listeners.append(lambda record: running.append(len(engine._scheduler.running)))
    prompts, params = load(most or 0)
    answers = engine.generate(prompts, params)
    plain = Engine(markov()).generate(prompts, params)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
    assert all(answer.warnings == () for answer in answers)
    assert max(running) == 20 if most is None else watch.largest > most // 2 or most == 1_000_000
    assert engine.check_idle() == []
    assert target.pool.in_use == 0
    assert all(not member.held.requests for member in made.members.values())


def span(tokens: int) -> int:
    return POSITION * key_span(tokens)


def run(engine: Engine, *requests: Request) -> list[list[int]]:
    return [answer.token_ids for answer in finished(engine, requests)]


def test_drafters_give_way_to_requests_and_draft_again_when_there_is_room() -> None:
    """Room for two requests and one drafter's cache, with something to spare."""
    params = SamplingParams(max_tokens=250, ignore_eos=True)
    short = SamplingParams(max_tokens=60, ignore_eos=True)
    most = span(256) + span(64) + span(68)
    engine = fixed(markov(), DraftModel(markov(2)), max_cache_bytes=most)
    watch = Watch(engine, most)
    first = engine.submit([1, 2, 3], short)
    for _ in range(4):
        engine.step()
    assert watch.drafted[-1] == {first.id: ("draft",)}
    second = engine.submit([3, 2, 1], params)  # its cache fits beside the first one's, and no draft's does
    engine.step()
    engine.step()
    assert set(watch.drafted[-1]) == {first.id, second.id}
    engine.step()
    assert watch.drafted[-1][second.id] == ()
    run(engine, first)
    assert second.drafting.no_room == {"draft"}  # 256 + 256 + 4 tokens are more than all
    run(engine, second)
    third = engine.submit([1, 2, 3], short)
    run(engine, third)
    assert any(drafted.get(third.id) == ("draft",) for drafted in watch.drafted)
    plain, requests = Engine(markov()), (first, second, third)
    expected = plain.generate([each.tokens[: each.prompt_tokens] for each in requests], [short, params, short])
    assert run(engine, *requests) == [answer.token_ids for answer in expected]
    assert not any(request.warnings for request in requests)


def test_what_was_given_back_is_made_anew_in_the_middle_of_an_answer() -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    short = SamplingParams(max_tokens=20, ignore_eos=True)
    most = span(259) + span(263) + 2 * span(410) - 1  # of its 403 tokens it is granted 259 at first
    engine = fixed(markov(), DraftModel(markov(2)), max_cache_bytes=most)
    watch = Watch(engine, most)
    long = engine.submit([1, 2, 3], params)
    for _ in range(3):
        engine.step()
    others = [engine.submit([3] * 390, short) for _ in range(2)]  # three caches of the target are nearly all
    engine.step()
    assert long.drafting.no_room == {"draft"}
    run(engine, *others)
    steps = len(watch.drafted)
    assert run(engine, long) == [Engine(markov()).generate([1, 2, 3], params).token_ids]
    drafted = [step.get(long.id) for step in watch.drafted]
    assert ("draft",) in drafted[:3] and () in drafted[3:steps] and ("draft",) in drafted[steps:]
    assert long.counters.recoveries == 0 and long.warnings == []


def test_others_of_a_portfolio_draft_for_whom_one_has_no_room() -> None:
    target = MarkovWithHead(markov().probs)
    heads = fitted_heads(target, [[1, 2, 3, 4, 5, 6, 7, 0] * 4])
    drafter = Portfolio([DraftModel(markov(2)), Medusa(heads, GuessTrees(3), nodes=8), PromptLookup(min_ngram=1)])
    engine = Engine(target, drafter, controller="in-turn", max_cache_bytes=span(60) + 900)
    watch = Watch(engine, span(60) + 900)
    prompt, params = [1, 2, 3, 1, 2, 3, 1, 2], SamplingParams(max_tokens=40, ignore_eos=True)
    answer = engine.generate(prompt, params)
    assert answer.token_ids == Engine(target).generate(prompt, params).token_ids
    names = {name for step in watch.drafted for drafted in step.values() for name in drafted}
    assert names == {"medusa", "prompt-lookup"}


@pytest.mark.parametrize("backend", [StockBackend, fastest_backend])
def test_real_models_hold_what_is_counted(backend: BackendMaker) -> None:
    """Buffers that are given back come again at other addresses, which compiled forwards must notice."""
    target = HuggingFaceModel(stock("llama"), None, "llama", backend)
    draft = HuggingFaceModel(noisy_stock("llama", 0.05), None, "noisy", backend)
    prompts = [[(7 * place + number) % 97 for place in range(10 + 37 * number)] for number in range(5)]
    params = [SamplingParams(max_tokens=20 + 10 * number) for number in range(5)]
    plain = Engine(target).generate(prompts, params)
    most = int(2.5 * 2 * 2 * 24 * 4 * 256)  # 2 layers, keys and values, 2 heads of 12, float32, 256 positions
    for _ in range(2):
        engine = fixed(target, DraftModel(draft), max_cache_bytes=most)
        Watch(engine, most)
        answers = engine.generate(prompts, params)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]


def test_chats_take_what_is_said_of_them() -> None:
    """Sixteen of 4,000 tokens, in half of the model's context."""
    target = MarkovModel.random(VOCAB, 1, context_length=8192)
    engine = Engine(target, max_batch=16, max_cache_bytes=1 << 30)
    for number in range(16):
        engine.submit([(number + place) % VOCAB for place in range(3900)], SamplingParams(max_tokens=100))
    most = 0
    while engine.step():
        most = max(most, allocated(engine))
    said = 16 * memory.bytes_of_cache(target, 4000)
    assert said == 16 * POSITION * key_span(4000) and 0.95 * said <= most <= 1.05 * said


def test_a_request_that_could_never_fit_is_refused_in_one_sentence() -> None:
    engine = fixed(markov(), DraftModel(markov(2)), max_cache_bytes=span(128))
    with pytest.raises(
        PromptError, match=r"^3 tokens of prompt and up to 126 of answer need 3,072 bytes of cache"
    ) as told:
        engine.submit([1, 2, 3], SamplingParams(max_tokens=126))
    assert "max_cache_bytes is 2,048; ask for fewer max_tokens, shorten the prompt, or allow more" in str(told.value)
    fine, refused = engine.generate([[1, 2, 3], [1] * 200], SamplingParams(max_tokens=125))
    assert len(fine.token_ids) == 125 and refused.finish_reason == "error" and "need" in (refused.error or "")


def test_requests_that_wait_are_let_in_in_their_order() -> None:
    """A small one that would fit does not overtake a large one."""
    engine = Engine(markov(), max_cache_bytes=span(256))
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    large = [engine.submit([1] * 80, params) for _ in range(2)]
    small = engine.submit([1], SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    assert [request.cache is not None for request in (*large, small)] == [True, False, False]
    run(engine, small)
    assert large[0].closed and not large[1].closed
    run(engine, large[1])


@pytest.mark.parametrize("tokens", [256, 257, 258])
def test_a_request_that_resumes_is_read_until_it_goes_on(tokens: int) -> None:
    """Also where its last part is one token: parts have 256."""
    prompt, params = [1, 2, 3] * 80, SamplingParams(max_tokens=40, temperature=1.0, seed=2, ignore_eos=True)
    expected = Engine(markov()).generate(prompt, params)
    engine = Engine(markov(), prefix_cache_bytes=0)
    request = engine.submit(prompt, params)
    while len(request.tokens) < tokens:
        engine.step()
    engine._preempt(request)
    run(engine, request)
    counters = request.counters
    assert request.tokens[len(prompt) :] == expected.token_ids
    assert (counters.prefill_tokens, counters.target_calls, counters.emitted_tokens) == (2, 38, 38)
    assert counters.prefill_calls == (2 if tokens == 256 else 3)


def hold_to_a_budget(
    model: LanguageModel, prompts: list[list[int]], patch: pytest.MonkeyPatch, params: SamplingParams | None = None
) -> None:
    """Requests of whom few fit are let in, wait, and give their room back; their answers are those without a limit.

    Plain ones, and drafted ones.
    """
    params = replace(params or SamplingParams(), max_tokens=60, ignore_eos=True)
    patch.setattr(memory, "_AHEAD", 16)
    patch.setattr(memory, "_NEAR", 4)
    plain = Engine(model, prefix_cache_bytes=0).generate(prompts, params)
    pool = model.pool
    assert pool is not None
    for drafter in (None, "prompt-lookup,min_ngram=1"):
        # It learns what a token takes, and how many are drafted.
        fixed(model, drafter, max_cache_bytes=1 << 40)
        begun, whole = pool.bytes_for_one(40), pool.bytes_for_one(max(map(len, prompts)) + params.max_tokens)
        most = max(2 * begun, whole + begun // 2)
        engine = fixed(model, drafter, max_cache_bytes=most)
        running, used = list[int](), list[int]()
        engine.listeners.append(lambda _: running.append(len(engine._scheduler.running)))  # noqa: B023
        engine.listeners.append(lambda _: used.append(engine.cache_bytes))  # noqa: B023
        answers = engine.generate(prompts, params)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
        assert 1 < max(running) < len(prompts) and max(used) <= most
        assert engine.preemptions > 0 or whole == begun or drafter, "states alone do not grow"
        assert (engine.check_idle(), pool.in_use, pool.lost) == ([], 0, 0)


def texts(count: int) -> list[list[int]]:
    return [[(7 * place + 13 * number) % 89 for place in range(10)] for number in range(count)]


def gemma4_of_two_widths() -> LanguageModel:
    config = rare_families.gemma4_text()
    config.global_head_dim = 32
    return HuggingFaceModel(build(config, seed=1), None, "gemma4")


FAMILIES: dict[str, Callable[[], LanguageModel]] = {
    "experts": lambda: packed("mixtral"),
    "several rotations": lambda: packed("gemma3"),
    "layers of two shapes": gemma4_of_two_widths,
    "hybrid": lambda: test_recurrence.packed("lfm2"),
    "recurrent": lambda: test_recurrence.packed("mamba"),
    "encoder-decoder": lambda: test_encoder_decoder.target("t5"),
    "copied": lambda: test_copied.copied("inkling_text"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_budget(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES[family]()
    prompts = texts(3)
    if model.sources is not None:
        prompts = [[*text[:-1], model.sources.end] for text in prompts]
    hold_to_a_budget(model, prompts, monkeypatch)
