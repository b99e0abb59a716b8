"""Chains and trees of DFlash 2: over all that can be drawn, what is emitted has exactly the target's distribution.

All trees are enumerated with the probability of their tokens, on four ids with three candidates for each place, and the
rule judges each against the target. Distributions of drafts are float32, so the sums are exact to its rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import LlamaConfig

from engine.test_form_law import NoTwins, table_forms
from support.drawn_trees import emitted_distance
from support.layer_heads import random_head
from support.tiny_models import build
from truedraft import Engine, SamplingParams
from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.params import Structured
from truedraft.core.probs import probs_from_logits
from truedraft.core.proposal import Proposal
from truedraft.core.shaping import Shaping
from truedraft.core.tree import chain_shape
from truedraft.drafters import tree_builder
from truedraft.drafters.base import DraftRequest, StepOutcome
from truedraft.kinds.dflash2.drafter import DFlash2, _drawn
from truedraft.kinds.dflash2.module import DFlash2Config, DFlash2Head
from truedraft.models.backends.stock import StockBackend
from truedraft.models.base import Segment
from truedraft.models.huggingface import HuggingFaceModel

VOCAB, PROMPT, DEPTH = 4, [1, 0, 2, 1], 2
CONFIG = DFlash2Config(
    width=16, vocab_size=VOCAB, layers=(0, 1), heads=2, kv_heads=1, head=8, inner=16, block=DEPTH + 1, mask_id=3,
    depth=1, group=4, rank=3, candidates=3,
)  # fmt: skip
ROUNDING = 1e-6
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.8},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "a bias": {"logit_bias": {1: 1.5}},
    "a grammar": {"structured": Structured("regex", ".*")},
}


@cache
def target() -> HuggingFaceModel:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, head_dim=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return HuggingFaceModel(build(config, 3, 0.35), None, "tiny", StockBackend)


def drafter(candidates: int = 3, **options: Any) -> DFlash2:
    made = random_head(DFlash2Head, replace(CONFIG, candidates=candidates))
    made.candidate_selector.successor_codebook *= 20.0  # so that the token before matters
    found = DFlash2(made, **options)
    found.check(target())
    return found


def request_of(params: SamplingParams) -> DraftRequest:
    form = NoTwins(PROMPT, len(PROMPT)) if params.structured else None
    return DraftRequest(0, params, PROMPT, Shaping(params, PROMPT, len(PROMPT), (), (), VOCAB, form))


@contextmanager
def begun(drafts: DFlash2, request: DraftRequest) -> Iterator[None]:
    """A request of which the target has shown all but the last token."""
    drafts.begin(request)
    drafts.observe([request], [StepOutcome(Proposal.empty(), (), (), layers=shown(drafts.head.config.layers))])
    yield
    drafts.end(request)


@cache
def shown(layers: tuple[int, ...]) -> tuple[Tensor, ...]:
    model = target()
    segment = Segment(model.new_cache(), torch.tensor(PROMPT), chain_shape(len(PROMPT)), range(len(PROMPT)))
    return tuple(each[:-1].clone() for each in model.forward_showing([segment], layers).layers)


def proposed(drafts: DFlash2, request: DraftRequest, seed: int = 0) -> Proposal:
    """Behind the prompt."""
    with begun(drafts, request):
        return drafts.propose([request], [Budget(DEPTH, 3, 9)], [KeyedNoise(0, 0, seed)])[0]


def apart(params: SamplingParams, shape: Any, patch: pytest.MonkeyPatch, stored: Any = lambda probs: probs) -> float:
    """Total variation between what is emitted and the target's distribution of as many tokens."""
    drafts, request = drafter(**shape), request_of(params)
    (kind,) = drafts.kinds

    @cache
    def law(path: tuple[int, ...]) -> Tensor:
        ids, shaping = torch.tensor([*PROMPT, *path]), request.shaping
        segment = Segment(target().new_cache(), ids, chain_shape(len(ids)), [len(ids) - 1])
        assert shaping is not None
        shaped = shaping.of_paths(target().forward([segment]).logits.double(), [path])
        return probs_from_logits(shaped, params)[0]

    def among_candidates(probs: Tensor) -> Tensor:
        assert ((probs > 0.0).sum(-1) <= 3).all()
        kept: Tensor = stored(probs)
        return kept

    return emitted_distance(
        lambda: proposed(drafts, request), tree_builder, kind, law, DEPTH + 1, patch, among_candidates
    )


@pytest.mark.parametrize("shape", [{}, {"branching": (2, 2)}], ids=["chain", "tree"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("name", OPTIONS)
@torch.inference_mode()
def test_what_is_emitted_has_the_targets_distribution(
    name: str, temperature: float, shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=temperature, **OPTIONS[name])
    assert apart(params, shape, monkeypatch) < ROUNDING


@pytest.mark.parametrize("shape", [{}, {"branching": (2, 2)}], ids=["chain", "tree"])
@torch.inference_mode()
def test_distributions_of_other_nodes_would_bend_it(shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every node of a depth drew from one distribution, whichever token is before it."""
    params = SamplingParams(temperature=1.0)
    assert apart(params, shape, monkeypatch, lambda probs: probs.mean(0).expand_as(probs).flip(-1)) > 0.01


@torch.inference_mode()
def test_nodes_of_one_depth_have_distributions_of_their_own() -> None:
    drafts, request = drafter(branching=(2, 1)), request_of(SamplingParams(temperature=1.0))
    probs = proposed(drafts, request).probs
    assert probs is not None and probs.shape == (3, VOCAB)
    assert (probs > 0.0).sum(-1).tolist() == [3, 3, 3] and float((probs[1] - probs[2]).abs().max()) > 0.05


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@torch.inference_mode()
def test_chains_of_plain_requests_are_drawn_from_what_they_say(temperature: float) -> None:
    """They are drawn without logits of the whole vocabulary; their distributions are those along the same tokens."""
    drafts, found = drafter(), []
    request = DraftRequest(0, SamplingParams(temperature=temperature), PROMPT, None)
    for seed in range(400 if temperature else 1):
        found.append(proposed(drafts, request, seed))
        tokens = found[-1].tree.host_ids
        with begun(drafts, request):
            (along,) = drafts.along([request], [Budget(DEPTH)], [tokens])
        dists = torch.eye(VOCAB)[tokens] if found[-1].probs is None else found[-1].probs
        torch.testing.assert_close(dists, along, rtol=0, atol=1e-6)
        assert [[draw.child for draw in own] for own in found[-1].draws] == [[0], [1], []]
        assert [draw.dist for own in found[-1].draws for draw in own] == ([0, 1] if temperature else [-1, -1])
    if temperature:
        counts = torch.bincount(torch.tensor([each.tree.host_ids[0] for each in found]), minlength=VOCAB)
        among = along[0] > 0.0
        assert not counts[~among].any()
        assert stats.chisquare(counts[among], (len(found) * along[0][among].double()).numpy()).pvalue > 1e-3


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_a_candidate_is_drawn_by_the_sums_of_its_distribution(temperature: float) -> None:
    """Over a grid of uniform numbers each is drawn as often as its probability says."""
    logits, grid = np.array([0.3, -1.0, 2.0, -np.inf, 0.1], np.float32), 4096
    drawn = [_drawn(logits, temperature, (number + 0.5) / grid) for number in range(grid)]
    counts = np.bincount([place for place, _ in drawn], minlength=5) / grid
    expected = torch.softmax(torch.tensor(logits).double() / temperature, 0).numpy()
    assert np.allclose(drawn[0][1], expected, atol=1e-6) and np.allclose(counts, expected, atol=1.5 / grid)
    assert counts[3] == 0.0


@pytest.mark.parametrize("broken", [[np.nan, 1.0], [np.inf, 1.0], [-np.inf, -np.inf]])
def test_logits_that_are_not_finite_draw_the_first_candidate_for_sure(broken: list[float]) -> None:
    for temperature in (0.0, 1.0):
        place, dist = _drawn(np.array(broken, np.float32), temperature, 0.7)
        assert place == 0 and dist.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_form_that_forbids_every_candidate_ends_the_draft_there(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a single candidate for each place, which the form may forbid."""
    params = SamplingParams(max_tokens=12, temperature=temperature, structured=Structured("regex", ".*"))
    with table_forms(monkeypatch):
        plain = Engine(target(), entropy=1).generate(PROMPT, params)
        engine = Engine(target(), drafter(candidates=1), controller="fixed", entropy=1)
        answers = [engine.generate(PROMPT, params) for _ in range(8)]
    assert all(not each.warnings and each.stats.draft_tokens for each in answers)
    assert temperature or all(each.token_ids == plain.token_ids for each in answers)
