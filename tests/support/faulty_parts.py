"""Parts with a fault, beside those of `truedraft.certify.faults`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from truedraft.certify.faults import as_bfloat16_draws, commits_wrongly, given_another, judging
from truedraft.core import probs as L
from truedraft.core.budget import Budget
from truedraft.core.noise import Noise, Purpose
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.tree import TokenTree
from truedraft.core.verdict import Origin, Verdict
from truedraft.drafters import Drafter, DraftModel
from truedraft.drafters.base import DraftRequest
from truedraft.drafters.draws import Drawing, OpenNode
from truedraft.drafters.tree_builder import TreeBuilder
from truedraft.models.base import LanguageModel
from truedraft.models.cache import RequestCache
from truedraft.testing import altered
from truedraft.verification import Rule

Changed = TypeVar("Changed")

# ------------------------------------------------------------------------------------------------ drafters


def drawing(drafter: Drafter, how: Drawing) -> Drafter:
    """A draft model that draws for sampled requests in another way."""
    assert isinstance(drafter, DraftModel)
    make = drafter._builder

    def builder(request: DraftRequest, budget: Budget, noise: Noise) -> TreeBuilder:
        made = make(request, budget, noise)
        if not request.params.greedy:
            made.drawing = how
        return made

    return altered(drafter, _builder=builder)


class GumbelTokens(Drawing):
    """argmax(log q + g), g the Gumbel noise of the token's place: by itself as right as any other way."""

    kind = DrawKind.INDEPENDENT

    def draw(self, logits: Tensor, params: SamplingParams, nodes: Sequence[OpenNode]) -> tuple[Tensor, Tensor]:
        probs = L.probs_from_logits(logits, params)
        noise = torch.stack([node.noise.gumbel(node.depth, probs.shape[-1], probs.device) for node in nodes])
        return (probs.double().log() + noise).argmax(dim=-1)[:, None], probs


def draws_by_gumbel(drafter: Drafter) -> Drafter:
    """A draft model that draws by `GumbelTokens`."""
    return drawing(drafter, GumbelTokens())


class BfloatTokens(Drawing):
    """Inverts a cumulative sum in bfloat16, and tells the q of float32: small cells vanish or grow to 1/256."""

    kind = DrawKind.INDEPENDENT

    def draw(self, logits: Tensor, params: SamplingParams, nodes: Sequence[OpenNode]) -> tuple[Tensor, Tensor]:
        probs = L.probs_from_logits(logits, params)
        numbers = [node.noise.uniform(Purpose.DRAFT, node.depth, node.first_child) for node in nodes]
        return L.draw(as_bfloat16_draws(probs), torch.tensor(numbers, dtype=torch.float64))[:, None], probs


def draws_in_bfloat16(drafter: Drafter) -> Drafter:
    """A draft model that draws by `BfloatTokens`."""
    return drawing(drafter, BfloatTokens())


def cuts_unlikely_draws(drafter: Drafter, least: float) -> Drafter:
    """Looks at the tokens drawn and cuts the chain before the first that the draft gave less than `least`."""

    def propose(batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]) -> list[Proposal]:
        return [_cut(own, least) for own in drafter.propose(batch, budgets, noise)]

    return altered(drafter, propose=propose)


def _cut(chain: Proposal, least: float) -> Proposal:
    if chain.probs is None:
        return chain
    ids = chain.tree.host_ids
    length = next((i for i, token in enumerate(ids) if float(chain.probs[i, token]) < least), len(ids))
    if length == len(ids):
        return chain
    if not length:
        return Proposal.empty()
    return Proposal(TokenTree.chain(ids[:length]), (*chain.draws[:length], ()), chain.probs[:length])


# ------------------------------------------------------------------------------------------------ rules


def replaced_probs(rule: Rule, change: Callable[[Tensor], Tensor]) -> Rule:
    """A rule that judges against other distributions than the engine made for it."""
    return given_another(rule, lambda proposal, probs, noise: (proposal, change(probs), noise))


def recovers_by_the_same_noise(rule: Rule) -> Rule:
    """After a rejection takes argmax(log residual + g), g the noise that drew the rejected token."""

    def redrawn(verdict: Verdict, proposal: Proposal, probs: Tensor, noise: Noise) -> Verdict:
        if verdict.final is not Origin.RECOVERED:
            return verdict
        row = verdict.path[-1] + 1 if verdict.path else 0
        assert proposal.probs is not None
        left = L.residual(probs[row], proposal.probs[proposal.draws[row][0].dist])
        token = int((left.double().log() + noise.gumbel(len(verdict.path), len(left), left.device)).argmax())
        return replace(verdict, tokens=(*verdict.tokens[:-1], token))

    return judging(rule, redrawn)


def nucleus_off_by_one(p: Tensor, top_p: float, more: int) -> Tensor:
    """Distributions `[tokens, vocab]` cut to the nucleus and one token more (`more` 1) or less (-1; at least one)."""
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    count = (ordered.cumsum(dim=-1, dtype=torch.float64) < top_p).sum(dim=-1, keepdim=True) + 1 + more
    kept = torch.arange(p.shape[-1]) < count.clamp(1, p.shape[-1])
    found = torch.zeros_like(p).scatter_(-1, order, ordered * kept)
    return found / found.sum(dim=-1, keepdim=True)


def llama_cpp_filters(p: Tensor, params: SamplingParams) -> Tensor:
    """Of distributions at temperature 1 `[tokens, vocab]`: top-k, top-p, min-p, and the temperature behind them."""
    logits = p.log()
    kept = L.probs_from_logits(logits, replace(params, temperature=1.0))
    return L.probs_from_logits(kept.log(), SamplingParams(temperature=params.temperature))


# ------------------------------------------------------------------------------------------------ states


def keeps_rejected(model: LanguageModel) -> LanguageModel:
    """As a recurrent state that is not rolled back: the first rejected token takes the last accepted one's place."""

    def wrong(cache: RequestCache, path: Sequence[int]) -> Sequence[int]:
        return (*path[:-1], path[-1] + 1) if path and path[-1] + 1 < cache.uncommitted else path

    return commits_wrongly(model, wrong)


# ------------------------------------------------------------------------------------------------ calls


def raising(part: Changed, words: str = "no idea", **when: Callable[..., object]) -> Changed:
    """A part of which some methods raise a RuntimeError where what is given for them says so of their arguments."""

    def method(name: str, raises: Callable[..., object]) -> Callable[..., Any]:
        call = getattr(part, name)

        def called(*given: Any) -> Any:
            if raises(*given):
                raise RuntimeError(words)
            return call(*given)

        return called

    return altered(part, **{name: method(name, raises) for name, raises in when.items()})
