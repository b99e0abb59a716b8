"""Models whose own cache is copied for what is drafted: answers as of transformers, no token read again in vain."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from support.pairwise import by_turns
from support.tiny_models import DRAFTED, PROMPTS, drafter_of, stock, stock_greedy
from support.verdicts import CHAIN, TREE, read, verdicts
from truedraft import Engine, SamplingParams, load_model
from truedraft.core.tree import chain_shape
from truedraft.errors import UnsupportedModelError
from truedraft.models import HuggingFaceModel, Segment
from truedraft.models.backends.sequential import CopiedBackend
from truedraft.models.loading import run_alone

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import conformance  # noqa: E402

KNOWN = json.loads(conformance.SHAPES.read_text())
FAMILIES = ["deepseek_v4", "inkling_text", "qwen4_exp_text"]
COUNT = 16


def random_model(family: str, noise: float = 0.0) -> PreTrainedModel:
    config = conformance.small_config(family, KNOWN)
    if family == "deepseek_v4":  # short enough for entries to be completed among few tokens
        config.compress_rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6}
    return conformance.random_model(config, family, 0.25, noise)


@cache
def copied(family: str, noise: float = 0.0) -> HuggingFaceModel:
    return run_alone(random_model(family, noise), None, family, UnsupportedModelError("asked so"), CopiedBackend)


@cache
def by_transformers(family: str) -> list[list[int]]:
    model = random_model(family)
    return [stock_greedy(model, prompt, COUNT) for prompt in PROMPTS]


@contextmanager
def counted(model: HuggingFaceModel) -> Iterator[list[int]]:
    """How many tokens each forward of the model itself reads meanwhile."""
    read: list[int] = []

    def note(_: Any, __: Any, given: dict[str, Any]) -> None:
        read.append(given["input_ids"].shape[1])

    hook = model.module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield read
    finally:
        hook.remove()


@pytest.mark.parametrize(("family", "drafted"), by_turns(FAMILIES, DRAFTED, always=["tree"]))
def test_greedy_equals_transformers(family: str, drafted: str) -> None:
    expected = by_transformers(family)
    engine = Engine(copied(family), drafter_of(drafted, copied(family, 0.05)), controller="fixed")
    answers = engine.generate([list(prompt) for prompt in PROMPTS], SamplingParams(max_tokens=COUNT, ignore_eos=True))
    assert [list(answer.token_ids)[: len(own)] for answer, own in zip(answers, expected, strict=True)] == expected
    assert not any(answer.warnings for answer in answers) and not engine.check_idle()


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_reads_every_token_once(family: str) -> None:
    model, prompt = copied(family), list(PROMPTS[1])
    with counted(model) as found:
        Engine(model).generate(prompt, SamplingParams(max_tokens=COUNT, ignore_eos=True))
    assert found == [len(prompt)] + [1] * (COUNT - 1)


def test_what_was_rejected_costs_its_own_tokens_and_what_stays_is_not_read_for_ever() -> None:
    """Of five drafted tokens none stays; what the kept cache lacks is read along, up to sixteen tokens of it."""
    model, prompt = copied("deepseek_v4"), list(PROMPTS[1])
    with counted(model) as found:
        cache, _ = read(model, prompt)
        for step in range(20):
            model.forward([Segment(cache, torch.tensor([step, 1, 2, 3, 4, 5]), chain_shape(6), range(6))])
            cache.commit((0,))
    model.release_cache(cache)
    assert found == [len(prompt), *range(6, 23), 17, 6, 7, 8]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_any_verdict_is_what_follows_plain_decoding(family: str) -> None:
    model = copied(family)
    for after, logits, ids in verdicts(model, PROMPTS[1], CHAIN, TREE):
        plain, expected = read(model, ids, len(PROMPTS[1]))
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        ends = [model.forward([Segment(each, torch.tensor([23]), chain_shape(1), (0,))]) for each in (after, plain)]
        torch.testing.assert_close(ends[0].logits, ends[1].logits, rtol=1e-3, atol=1e-3)
        model.release_cache(plain)


def test_copies_count_as_memory_and_go_with_their_request() -> None:
    model = copied("qwen4_exp_text")
    cache, _ = read(model, PROMPTS[1])
    alone = cache.n_bytes
    model.forward([Segment(cache, torch.tensor([1, 2, 3]), chain_shape(3), range(3))])
    assert alone > cache.storage.n_bytes and cache.n_bytes > 2 * alone - cache.storage.n_bytes
    model.release_cache(cache)
    assert cache.family.auxiliary is None and cache.n_bytes == cache.storage.n_bytes


def test_a_folder_of_such_a_model_loads_and_says_how_it_runs(tmp_path: Path) -> None:
    random_model("inkling_text").save_pretrained(tmp_path)
    assert "behind copies of its own cache" in str(load_model(tmp_path, dtype="float32").note)


def test_a_model_that_gives_no_cache_is_refused() -> None:
    model = stock("llama")
    forward = model.forward
    model.forward = lambda *args, **given: forward(*args, **given | {"use_cache": False})
    with pytest.raises(UnsupportedModelError, match="gives no cache back"):
        run_alone(model, None, "such", UnsupportedModelError("asked so"), CopiedBackend)
