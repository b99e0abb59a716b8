"""The drafter that docs/adding_a_drafter.md writes by hand is certified, and what the page warns of is not."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.virtual_time import VirtualTime
from truedraft import SamplingParams
from truedraft.certify import Finding, Part, Stack, Status, certify, statistics
from truedraft.certify.checks import Context
from truedraft.drafters import Drafter, Proposal, Purpose
from truedraft.errors import DrafterError
from truedraft.testing import MarkovModel
from truedraft.verification import SpeculativeSampling

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_drafter.md"
TEXTS = [[1, 2, 3], [4], [5, 5, 0, 2], [3, 1]]
WARM = SamplingParams(max_tokens=16, temperature=1.0)


def class_of_the_page(name: str) -> Any:
    """A class of the page's snippets, with what the snippets up to it import."""
    space: dict[str, Any] = {"__name__": "snippet"}
    for body in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(body, PAGE.name, "exec"), space)
        if name in space:
            return space[name]
    raise AssertionError(f"{PAGE.name} has no class {name}")


Bigram = class_of_the_page("Bigram")


def storing(change: Callable[[Tensor, Sequence[int]], Tensor]) -> type[Drafter]:
    """A drafter that draws as it should and stores something else than what it drew from."""

    class StoresAnother(Bigram):  # type: ignore[misc]
        def chain(self, request, budget, noise):  # type: ignore[no-untyped-def]
            made = super().chain(request, budget, noise)
            if made.probs is None:
                return made
            return Proposal(made.tree, made.draws, change(made.probs, made.tree.host_ids))

    return StoresAnother


OtherProbs = storing(lambda probs, tokens: torch.full_like(probs, 1 / probs.shape[-1]))
"""Says that it drew from even distributions, which it did not."""


class NoiseOfTheRule(Bigram):  # type: ignore[misc]
    """Draws with the numbers that the rule accepts by."""

    def choose(self, dist, params, noise, depth):  # type: ignore[no-untyped-def]
        class Judging:
            def uniform(self, purpose: Purpose, depth: int, index: int = 0) -> float:
                return noise.uniform(Purpose.ACCEPT, depth, index)

            def gumbel(self, *where):  # type: ignore[no-untyped-def]
                return noise.gumbel(*where)

        return super().choose(dist, params, Judging(), depth)


class DropsUnlikely(Bigram):  # type: ignore[misc]
    """Proposes what it drew only if that was likely."""

    def chain(self, request, budget, noise):  # type: ignore[no-untyped-def]
        made = super().chain(request, budget, noise)
        if made.probs is None or not len(made.tree):
            return made
        return made if float(made.probs[0, made.tree.host_ids[0]]) > 0.2 else Proposal.empty()


def stack_of(drafter: type[Drafter]) -> Stack:
    target = MarkovModel.random(vocab=8, seed=1)
    return Stack(target, drafter(target.probs.mean(dim=0)), SpeculativeSampling())  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "params",
    [pytest.param(WARM, id="sampled"), pytest.param(replace(WARM, seed=1), id="seeded", marks=pytest.mark.slow)],
)
def test_the_drafter_of_the_page_is_certified(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    VirtualTime(monkeypatch, 0.01)
    certificate = certify(stack_of(Bigram), TEXTS, params, batch=4, seconds=10.0)
    assert certificate.issued, certificate.verdict
    equality = [finding for finding in certificate.findings if finding.part is Part.EQUALITY]
    assert sum(finding.facts.get("accepted_tokens", 0) for finding in equality) > 20


def looked_at(drafter: type[Drafter], monkeypatch: pytest.MonkeyPatch) -> Finding:
    """What the tests of sampled tokens say."""
    VirtualTime(monkeypatch, 0.01)
    monkeypatch.setattr(statistics, "joint_result", lambda *_, **__: None)
    return statistics.Statistics().run(Context(stack_of(drafter), TEXTS, WARM, 4, 4.0))[0]


@pytest.mark.parametrize("drafter", [OtherProbs, NoiseOfTheRule, DropsUnlikely])
def test_what_the_page_warns_of_is_found(drafter: type[Drafter], monkeypatch: pytest.MonkeyPatch) -> None:
    found = looked_at(drafter, monkeypatch)
    assert found.status is Status.FAILS, found.summary


def undrawn(probs: Tensor, tokens: Sequence[int]) -> Tensor:
    """Nothing for the token that was drawn first, all for the others."""
    changed = probs.clone()
    changed[0, tokens[0]] = 0.0
    return changed / changed.sum(dim=-1, keepdim=True)


NO_LAWS: dict[str, Callable[[Tensor, Sequence[int]], Tensor]] = {
    "log probabilities": lambda probs, tokens: probs.log(),
    "half of it is missing": lambda probs, tokens: probs / 2,
    "a drawn token has none": undrawn,
}


@pytest.mark.plants_failures
@pytest.mark.filterwarnings("ignore:drafter:RuntimeWarning")
@pytest.mark.parametrize("name", NO_LAWS)
def test_a_drafter_that_names_no_distribution_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DrafterError, match="'bigram'"):
        looked_at(storing(NO_LAWS[name]), monkeypatch)


@pytest.mark.plants_failures
@pytest.mark.filterwarnings("ignore:drafter:RuntimeWarning")
def test_a_drafter_that_names_no_distribution_gets_no_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    VirtualTime(monkeypatch, 0.01)
    stack = stack_of(storing(NO_LAWS["log probabilities"]))
    certificate = certify(stack, TEXTS, WARM, batch=4, seconds=4.0)
    assert not certificate.issued
    for part in (Part.STATISTICAL, Part.INVARIANCE):
        told = [finding.summary for finding in certificate.failures if finding.part is part]
        assert any("drafter 'bigram' failed" in summary for summary in told), (part, certificate.verdict)
    greedy = [finding for finding in certificate.findings if finding.part is Part.EQUALITY]
    assert not {finding.status for finding in greedy} & {Status.FAILS}, "greedy requests are given candidates"
