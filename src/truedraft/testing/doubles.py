"""Test doubles: a Markov table as a language model, scripted parts, and parts with one change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.core.proposal import Proposal
from truedraft.core.top_k import TopK
from truedraft.core.tree import TokenTree
from truedraft.drafters.base import Drafter, DraftRequest, StepOutcome
from truedraft.engine.policy import Controller, Decision, RequestView
from truedraft.models.base import ForwardOutput, LanguageModel, Segment
from truedraft.models.cache import CachePool


class MarkovModel(LanguageModel):
    """A language model with a table as its distribution: exact, tiny, and as strict about its cache as a real one.

    The next token depends on the last two tokens; before the text there is token 0. Its "keys" are the token ids, in an
    ordinary `RequestCache`, so a wrong commit, rollback or mask changes its output.

    Args:
        probs: `[vocab, vocab, vocab]`: `probs[a, b]` is the distribution after ... a b; float64 keeps it exact.
    """

    def __init__(
        self, probs: Tensor, *, context_length: int = 64, eos_token_ids: Sequence[int] = (), name: str = "markov"
    ) -> None:
        self.probs = probs
        self.name = name
        self.tokenizer = None
        self.vocab_size = probs.shape[-1]
        self.context_length = context_length
        self.eos_token_ids = tuple(eos_token_ids)
        self.device = probs.device
        self.dtype = probs.dtype
        self.pool = CachePool(context_length)

    @classmethod
    def random(cls, vocab: int, seed: int, sharpness: float = 1.5, **options: int) -> MarkovModel:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(vocab, vocab, vocab, generator=generator, dtype=torch.float64) * sharpness
        return cls(torch.softmax(logits, dim=-1), **options)  # type: ignore[arg-type]

    def probs_after(self, tokens: Sequence[int]) -> Tensor:
        a, b = ([0, 0, *tokens])[-2:]
        return self.probs[a, b]

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        """The hidden state is the pair of the last two tokens."""
        pairs = [pair for segment in segments for pair in _pairs(segment)]
        index = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
        return ForwardOutput(self.probs[index[:, 0], index[:, 1]].log(), index.to(self.dtype))


def _pairs(segment: Segment) -> list[tuple[int, int]]:
    cache, shape, begin = segment.cache, segment.shape, max(segment.cache.stored - 1, 0)
    cache.reserve(len(shape), segment.written)
    ids = segment.tokens.to(torch.float64).view(1, -1, 1)
    keys = cache.write(0, ids, ids)[0][0, 0, begin : cache.stored + len(shape)]
    stored = [int(token) for token in keys.tolist()]
    if not cache.length:  # before the text there is token 0
        stored.insert(0, 0)
    nodes = (segment.written + row for row in segment.rows)
    return [(stored[shape.parents[node] + 1], stored[node + 1]) for node in nodes]


Script = Callable[[Sequence[int]], Sequence[Sequence[int]]]


class ScriptedDrafter(Drafter):
    """Proposes paths from a function of the text so far, as deterministic candidates.

    Args:
        script: from the tokens so far to paths of guessed tokens; paths that share prefixes are merged. `propose`
            raises its exceptions.

    Attributes:
        outcomes: all observed outcomes, in order, with the request's id.
    """

    name: ClassVar[str] = "scripted"

    def __init__(self, script: Script, depth: int = 8, nodes: int = 64) -> None:
        self._script = script
        self.limits = Budget(depth=depth, width=nodes, nodes=nodes)
        self.outcomes: list[tuple[int, StepOutcome]] = []
        self.ended: list[int] = []

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        proposals = []
        for request, budget in zip(batch, budgets, strict=True):
            nodes: dict[tuple[int, ...], None] = {}  # by path, in order
            for path in self._script(request.tokens):
                for length in range(1, min(len(path), budget.depth) + 1):
                    if len(nodes) < budget.nodes:
                        nodes[tuple(path[:length])] = None
            proposals.append(Proposal.deterministic(TokenTree.from_paths(list(nodes))))
        return proposals

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        self.outcomes.extend((request.id, outcome) for request, outcome in zip(batch, outcomes, strict=True))

    def end(self, request: DraftRequest) -> None:
        self.ended.append(request.id)


class ScriptedController(Controller):
    """Returns given budgets in turn, one per request and step, and then the last one forever."""

    def __init__(self, budgets: Sequence[Budget]) -> None:
        self._budgets = list(budgets)

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        drafters = (next(iter(view.limits)) for view in views)
        return [
            Decision(name, self._budgets.pop(0) if len(self._budgets) > 1 else self._budgets[0]) for name in drafters
        ]


Changed = TypeVar("Changed")


def altered(part: Changed, **changes: Any) -> Changed:
    """A shallow copy of an object with some attributes or methods replaced; calls of it to itself use these, too.

    Weights, caches and states are shared, so only one of the two may run at a time.

    Worked example: `altered(model, forward=watched)` is the model, except that its forwards call `watched`, which may
    call `model.forward`.

    Args:
        changes: by name; a function replaces a method and is called without `self`.

    Raises:
        AttributeError: there is no such attribute, or it cannot be set.
    """
    twin = copy.copy(part)
    for name, change in changes.items():
        getattr(part, name)  # a misspelt name would change nothing
        setattr(twin, name, change)
    return twin


def scaled(model: LanguageModel, factor: float) -> LanguageModel:
    """A model with float32 logits times a factor: itself at another temperature, or a draft with a known error."""

    return _with_logits(model, lambda logits: logits.float() * factor)


def _with_logits(model: LanguageModel, change: Callable[[Tensor], Tensor], **more: Any) -> LanguageModel:
    def showing(segments: Sequence[Segment], layers: Sequence[int]) -> ForwardOutput:
        output = model.forward_showing(segments, layers) if layers else model.forward(segments)
        return replace(output, logits=change(output.logits))

    return altered(model, forward=lambda segments: showing(segments, ()), forward_showing=showing, **more)


def reduced(model: LanguageModel, kept: Sequence[int]) -> LanguageModel:
    """A model with logits of -inf for all ids but `kept`, so that joint distributions can be summed."""
    ids = list(kept)

    def only_kept(logits: Tensor) -> Tensor:  # [rows, vocab]
        found = logits.new_full(logits.shape, float("-inf"))
        found[:, ids] = logits[:, ids]
        return found

    def unembed(vectors: Tensor) -> Tensor:
        return only_kept(model.unembed(vectors))

    return _with_logits(
        model,
        only_kept,
        unembed=unembed,
        likeliest=lambda vectors, count: TopK.of(unembed(vectors), count),
        shared_heads=lambda blocks: None,  # a faster way would not restrict the ids
    )
