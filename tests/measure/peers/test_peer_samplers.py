"""Others' samplers under the contract: the installed ones run, formulas do what papers say, missing ones say so."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from truedraft.certify.checks import Status
from truedraft.certify.samplers import certify_sampler, load_sampler
from truedraft.certify.samplers.worlds import sampler_worlds
from truedraft.errors import MissingExtraError, OptionError
from truedraft.measure.peers import samplers

LONG = 1e6  # seconds: rows end these runs, not time


def spec(name: str) -> str:
    return f"truedraft.measure.peers.samplers:{name}"


def test_transformers_own_function_runs() -> None:
    found = certify_sampler(load_sampler(spec("transformers")), seconds=LONG, rows=100)
    assert "fault" not in found.findings[0].facts
    assert found.facts["runs"][0]["rows_to"]["1e3"] is None
    assert found.facts["accepted"] == pytest.approx(found.facts["accepted_by_rule"], abs=0.15)


@pytest.mark.parametrize("name", ["eagle", "eagle2", "sglang_formula"])
def test_published_acceptance_is_lossless(name: str) -> None:
    found = certify_sampler(load_sampler(spec(name)), seconds=LONG, rows=400)
    assert "fault" not in found.findings[0].facts
    # EAGLE-2 takes q as 1, which keeps less and loses nothing.
    assert (found.facts["accepted"] > 0.98 * found.facts["accepted_by_rule"]) == (name == "eagle")


def test_medusa_is_measured_as_lossy() -> None:
    found = certify_sampler(load_sampler(spec("medusa")), seconds=LONG, rows=100)
    assert found.findings[0].status is Status.FAILS
    assert found.findings[0].facts["fault"] == "typical acceptance"
    assert "then the argmax" in found.findings[0].facts["detail"]


def test_medusa_keeps_what_passes_and_ends_with_the_argmax() -> None:
    """exp(-H) of (0.5, 0.3, 0.2) is 0.357, a third of that 0.107, so the threshold is 0.09."""
    target = torch.tensor([[[0.5, 0.3, 0.2], [0.95, 0.05, 0.0], [0.1, 0.2, 0.7]]] * 2)
    assert samplers.medusa(torch.tensor([[2, 1], [2, 0]]), target).tolist() == [[2, 0, -1], [2, 0, 2]]


def test_eagle_by_hand() -> None:
    """p/q is 0.5 at the first token; the residual of (0.2, 0.8) against (0.4, 0.6) is all on token 1."""
    q = torch.tensor([[[0.4, 0.6]]] * 3)
    p = torch.tensor([[[0.2, 0.8], [0.5, 0.5]]] * 3)
    drafts = torch.tensor([[0], [0], [1]])
    uniforms = torch.tensor([[0.49, 0.5, 0.9], [0.51, 0.01, 0.9], [0.99, 0.5, 0.1]], dtype=torch.float64)
    assert samplers.eagle(drafts, q, p, uniforms).tolist() == [[0, 1], [1, -1], [1, 0]]
    # With q as 1 token 0 stays below 0.2 alone.
    assert samplers.eagle2(drafts, p, uniforms).tolist() == [[1, -1], [1, -1], [0, -1]]


@pytest.mark.parametrize(("name", "library"), [("vllm", "vllm"), ("vllm_ngram", "vllm"), ("sglang", "sgl_kernel")])
def test_a_missing_library_is_one_sentence(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    samplers._vllm_parts.cache_clear()
    monkeypatch.setitem(sys.modules, library, None)
    function = getattr(samplers, name)
    rows = sampler_worlds()[0].rows(2, torch.Generator().manual_seed(0))
    arguments = (rows.draft_tokens, rows.draft_probs, rows.target_probs)
    with pytest.raises(MissingExtraError, match="pip install"):
        function(*(arguments if name == "vllm" else (arguments[0], arguments[2])))
    with pytest.raises(OptionError, match=r"sampler '.*pip install"):
        certify_sampler(load_sampler(spec(name)), seconds=LONG, rows=10)


def test_sglang_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("sgl_kernel")
    stand_in.tree_speculative_sampling_target_only = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sgl_kernel", stand_in)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match="no CUDA device"):
        samplers.sglang(torch.tensor([[0]]), torch.tensor([[[0.5, 0.5]] * 2]))


def test_sglang_is_called_with_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's documented walk over a tree, in the place of the kernel, emits what the formula says."""
    stand_in = ModuleType("sgl_kernel")
    stand_in.tree_speculative_sampling_target_only = walk  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sgl_kernel", stand_in)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(samplers, "_DEVICE", "cpu")
    found = certify_sampler(load_sampler(spec("sglang")), seconds=LONG, rows=60)
    assert "fault" not in found.findings[0].facts
    formula = certify_sampler(load_sampler(spec("sglang_formula")), seconds=LONG, rows=60)
    assert found.facts["accepted"] == pytest.approx(formula.facts["accepted"], abs=0.15)


def walk(**given: Any) -> None:
    """For each request: from the root along children and siblings, then a draw from what was not rejected."""
    batch = len(given["candidates"])
    for row in range(batch):
        own = {name: given[name][row] for name in ("candidates", "retrive_index", "retrive_next_token")}
        siblings, coins = given["retrive_next_sibling"][row], given["uniform_samples"][row]
        node, at, count, reached = 0, 0, 0, 0.0
        last = int(own["retrive_index"][0])
        left = given["target_probs"][row, 0].double().clone()
        coin = float(coins[0])
        node = int(own["retrive_next_token"][0])
        while node != -1:
            token = int(own["candidates"][node])
            mass = float(given["target_probs"][row, at, token])
            reached += mass
            if coin <= reached / given["threshold_acc"] or mass >= given["threshold_single"]:
                given["predicts"][last] = token
                count += 1
                last, at, reached, coin = int(own["retrive_index"][node]), node, 0.0, float(coins[node])
                given["accept_index"][row, count] = last
                left = given["target_probs"][row, at].double().clone()
                node = int(own["retrive_next_token"][node])
            else:
                left[token] = 0.0
                node = int(siblings[node])
        given["accept_token_num"][row] = count
        given["predicts"][last] = drawn_by(left, float(given["uniform_samples_for_final_sampling"][row]))


def drawn_by(weights: Tensor, number: float) -> int:
    sums = weights.cumsum(0)
    return int((sums <= number * sums[-1]).sum())
