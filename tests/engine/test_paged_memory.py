"""Requests whose keys and values lie in reserved pages: they wait for each other, and none fails because of others."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import PreTrainedModel

from drafters.heads.test_recorded_drafts import drafter as recorded_drafter
from support.answers import fixed
from support.backends import HostRecorder, graph_backend
from support.layer_heads import target as layer_target
from support.loops import weights
from support.tiny_models import CONTEXT, VOCAB, noisy_stock, stock
from truedraft import Engine, SamplingParams
from truedraft.core.stats import StepRecord
from truedraft.core.tree import chain_shape
from truedraft.drafters import DraftModel
from truedraft.engine import memory
from truedraft.engine.memory import CacheMemory, gpu_cache_bytes
from truedraft.engine.policy.measuring import most_held
from truedraft.errors import OptionError, PromptError
from truedraft.models.backends.graphs import GraphBackend
from truedraft.models.base import Segment
from truedraft.models.cache import PAGE, PagePool, Pages, PrefixCache
from truedraft.models.huggingface import HuggingFaceModel

GIB = 1 << 30


def recorded(model: PreTrainedModel) -> GraphBackend:
    return graph_backend(model, HostRecorder())


def graphs(noise: float = 0.0) -> HuggingFaceModel:
    return HuggingFaceModel(noisy_stock("llama", noise) if noise else stock("llama"), None, "graphs", recorded)


def pool_of(model: HuggingFaceModel) -> PagePool:
    assert isinstance(model.pool, PagePool)
    return model.pool


def text(number: int, tokens: int) -> list[int]:
    return [(7 * place + 13 * number) % (VOCAB - 8) for place in range(tokens)]


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seeded"])
def test_requests_wait_for_pages_and_answers_are_those_of_each_alone(drafted: bool, options: dict[str, float]) -> None:
    """Room for three or so of eight; a long one comes last."""
    target = graphs()
    prompts = [*(text(number, 20 + number) for number in range(7)), text(9, 200)]
    params = SamplingParams(max_tokens=40, ignore_eos=True, **options)  # type: ignore[arg-type]
    alone = [Engine(target).generate(prompt, params).token_ids for prompt in prompts]
    drafter = DraftModel(graphs(0.1), 3) if drafted else None
    limit = pool_of(target).bytes_for_one(CONTEXT) * (2 if drafted else 1)
    engine = fixed(target, drafter, max_cache_bytes=limit, max_batch=8)
    pages, records = pool_of(target)._pages, list[StepRecord]()
    assert pool_of(target).most_bytes == (limit // 2 if drafted else limit)
    generation, running = pages.generation, []
    engine.listeners += [records.append, lambda _: running.append(len(engine._scheduler.running))]
    answers = engine.generate(prompts, params)
    assert [answer.token_ids for answer in answers] == alone
    assert all(answer.warnings == () for answer in answers)
    assert 1 < max(running) < 8
    assert pages.generation == generation, "nothing moved"
    assert (pages.held, pool_of(target).lost, engine.check_idle()) == (0, 0, [])


def test_who_wrote_further_than_there_is_room_for_gives_it_back_and_goes_on() -> None:
    target = HuggingFaceModel(weights("grouped heads"), None, "graphs", recorded)
    prompts, params = [text(number, 30) for number in range(3)], SamplingParams(max_tokens=300, ignore_eos=True)
    alone = [Engine(target).generate(prompt, params).token_ids for prompt in prompts]
    engine = Engine(target, max_cache_bytes=pool_of(target).bytes_for_one(620))
    assert [answer.token_ids for answer in engine.generate(prompts, params)] == alone
    assert engine.preemptions > 0


def test_a_request_that_could_never_fit_is_refused_by_what_its_models_pages_hold() -> None:
    """The draft's pages have their share of the bytes."""
    target = graphs()
    engine = Engine(target, DraftModel(graphs(0.1), 3), max_cache_bytes=pool_of(target).bytes_for_one(160))
    with pytest.raises(PromptError, match=r"need [\d,]+ bytes of cache and max_cache_bytes is"):
        engine.generate(text(1, 100), SamplingParams(max_tokens=40))
    assert len(engine.generate(text(1, 40), SamplingParams(max_tokens=20, ignore_eos=True)).token_ids) == 20


def test_requests_that_begin_alike_hold_those_pages_once() -> None:
    target = graphs()
    system, params = text(1, 10 * PAGE), SamplingParams(max_tokens=30, ignore_eos=True)
    prompts = [[*system, *text(number, 9)] for number in range(2, 6)]
    alone = [Engine(target, prefix_cache_bytes=0).generate(prompt, params).token_ids for prompt in prompts]
    limit = 3 * pool_of(target).bytes_for_one(CONTEXT)
    engine, held = Engine(target, max_cache_bytes=limit, prefix_cache_bytes=limit), []
    pages = pool_of(target)._pages
    engine.listeners.append(lambda _: held.append((len(engine._scheduler.running), pages.held)))
    assert [answer.token_ids for answer in engine.generate(prompts, params)] == alone
    # Of the text that all begin with one copy, and three pages or four for each request.
    assert max(count for _, count in held) <= 10 + 4 * 4 < 4 * 10
    assert max(running for running, _ in held) == 4
    assert pages.held == pages.kept >= 10
    again = engine.generate([*system, 5, 6, 7], params)
    assert engine.shared_tokens == 3 * len(system) + 128, "blocks of 64 tokens are kept"
    assert again.token_ids == Engine(target, prefix_cache_bytes=0).generate([*system, 5, 6, 7], params).token_ids


@pytest.mark.parametrize(("name", "options"), [("EAGLE-3", {"nodes": 9, "beams": 3}), ("DFlash", {})])
def test_pages_of_heads_are_reserved_beside_the_targets(name: str, options: dict[str, int]) -> None:
    """Where they have no room for all, requests wait or are not drafted for; nothing grows or moves."""
    target, drafter = layer_target("graphs"), recorded_drafter(name, HostRecorder(), **options)
    prompts = [*(text(number, 20 + number) for number in range(4)), text(9, 200)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    alone = [Engine(target).generate(prompt, params).token_ids for prompt in prompts]
    of_target = pool_of(target)
    drafter.check(target)
    (heads,) = drafter.held.heads
    assert isinstance(heads.pool, PagePool)
    room = of_target.position_bytes + heads.pool.position_bytes
    engine = fixed(target, drafter, max_cache_bytes=room * (CONTEXT + 64), max_batch=8)
    pages, moved, seen = heads.pool._pages, heads.pool._pages.generation, list[tuple[int, int]]()
    assert pages.reserved == 1
    assert heads.pool.most_bytes == heads.pool.bytes_for_one(CONTEXT + 64), "its share, by what a token takes"
    engine.listeners.append(lambda _: seen.append((drafter.held.n_bytes, pages.held * pages.page_bytes)))
    answers = engine.generate(prompts, params)
    assert [answer.token_ids for answer in answers] == alone
    assert all(answer.warnings == () for answer in answers)
    assert sum(answer.stats.draft_tokens for answer in answers) > 20
    assert pages.generation == moved and max(held for _, held in seen) > 0
    assert all(0 < held <= told for told, held in seen if held), "and vectors beside"
    assert (pages.held, heads.pool.lost, engine.check_idle()) == (0, 0, [])
    with_new = drafter.with_head(drafter.head)
    assert with_new._running[0].pool is heads.pool, "other weights go on with the same pages"


def test_an_engine_that_is_gone_holds_no_pages() -> None:
    target = graphs()
    pages = pool_of(target)._pages
    kept = PrefixCache(1 << 20)
    first = CacheMemory(target, {}, 1 << 20, [(kept, target.pool)], requests=1)
    second = CacheMemory(target, {}, 1 << 20, requests=1)
    cache = target.begun_cache()
    target.forward([Segment(cache, torch.arange(70), chain_shape(70), ())])
    cache.commit(range(70))
    kept.join(1, cache, list(range(70)))
    kept.keep(1)
    kept.leave(1)
    target.release_cache(cache)
    assert pages.kept == pages.held == 4 and pages.reserved == 2
    del first
    assert (pages.reserved, pages.held) == (1, 0) and pages.count > 0
    del second
    assert (pages.reserved, pages.count) == (0, 0)


def test_pages_are_no_more_than_all_requests_can_need() -> None:
    target = graphs()
    _engine = Engine(target, max_cache_bytes=1 << 34, max_batch=2)
    most = pool_of(target).most_bytes
    assert most is not None and most <= pool_of(target).bytes_for_one(2 * (CONTEXT + 256) + PAGE)


def test_what_a_gpu_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.9 of 80 GiB, less 20 in use and 1.5 for what forwards compute; what was reserved before is counted in."""
    monkeypatch.setattr(memory, "gpu_memory", lambda _: (20 * GIB, 80 * GIB))
    device = torch.device("cpu")
    assert gpu_cache_bytes(device, 0.9) == (72 - 20) * GIB - 3 * GIB // 2
    assert gpu_cache_bytes(device, 0.9, reserved=5 * GIB) == (72 - 15) * GIB - 3 * GIB // 2
    with pytest.raises(OptionError, match=r"0\.25 of the GPU's 85\.9 GB leaves nothing for keys and values: 21\.5 GB"):
        gpu_cache_bytes(device, 0.25)
    target, draft = graphs(), graphs(0.1)
    engine = Engine(target, DraftModel(draft, 3), gpu_memory_utilization=0.5, max_batch=2)
    measured = sum(pool_of(model).bytes_for_one(most_held(target)) for model in (target, draft))
    assert 1 << 20 < measured < GIB
    assert engine.max_cache_bytes == (40 - 20) * GIB - 3 * GIB // 2 - measured
    assert Engine(graphs(), max_cache_bytes=4096 * 40, gpu_memory_utilization=0.5).max_cache_bytes == 4096 * 40
    for wrong in (0, -1, 1.5, True, "much"):
        with pytest.raises(OptionError, match="gpu_memory_utilization must be above 0 and at most 1, got"):
            gpu_cache_bytes(device, wrong)  # type: ignore[arg-type]


def test_pages_and_what_is_measured_are_within_the_share_together(monkeypatch: pytest.MonkeyPatch) -> None:
    target = graphs()
    pool = pool_of(target)
    most, beside = pool.bytes_for_one(CONTEXT // 2), pool.bytes_for_one(most_held(target))
    monkeypatch.setattr(memory, "_WORKSPACE", 0)
    monkeypatch.setattr(memory, "gpu_memory", lambda _: (0, beside + most))
    engine = Engine(target, gpu_memory_utilization=1.0)
    assert pool._pages.count * pool._pages.page_bytes == beside + most
    assert engine.max_cache_bytes == pool.most_bytes == most
    with pytest.raises(PromptError, match=f"and gpu_memory_utilization leaves {most:,}; ask for fewer max_tokens"):
        engine.submit(text(1, CONTEXT // 2), SamplingParams(max_tokens=1))
    monkeypatch.setattr(memory, "gpu_memory", lambda _: (most, beside + most))
    with pytest.raises(OptionError, match=r"^gpu_memory_utilization leaves .* and those with which costs are measured"):
        Engine(graphs(), gpu_memory_utilization=1.0)


@pytest.mark.parametrize("options", [{"max_cache_bytes": 5 << 20}, {"gpu_memory_utilization": 0.5}])
def test_a_reservation_for_which_there_is_no_memory_is_refused(
    options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else took it, or torch's allocator has it in pieces."""
    monkeypatch.setattr(memory, "gpu_memory", lambda _: (20 * GIB, 80 * GIB))
    monkeypatch.setattr(memory, "free_memory", lambda _: 3_000_000)
    target = graphs()
    pages = pool_of(target)._pages

    empty = Pages._empty

    def little_left(own: Pages, count: int) -> torch.Tensor:
        if count > 100:
            raise torch.OutOfMemoryError
        return empty(own, count)

    with monkeypatch.context() as patch:
        patch.setattr(Pages, "_empty", little_left)
        with pytest.raises(
            OptionError, match=r"asks for [\d.]+ MB for keys and values at once, and 3\.0 MB are"
        ) as told:
            Engine(target, max_batch=2, **options)  # type: ignore[arg-type]
    assert told.value.field in options
    assert str(told.value).endswith("free; lower gpu_memory_utilization or max_cache_bytes")
    del told
    gc.collect()
    assert (pages.reserved, pages.held) == (0, 0)
    Engine(target, max_batch=2, **options)  # type: ignore[arg-type]


def test_a_processor_has_no_such_limit() -> None:
    assert gpu_cache_bytes(torch.device("cpu"), 0.9) is None
    assert Engine(graphs()).max_cache_bytes is None
