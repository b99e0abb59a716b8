"""Heads with layers of their own: a target, random weights, notes of what was drafted, and parts of the papers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from support.backends import HostRecorder, graph_backend, native_backend
from support.tiny_models import CONTEXT, PROMPTS, VECTORS, VOCAB, build
from truedraft import Engine, SamplingParams
from truedraft.core.proposal import Proposal
from truedraft.drafters import CutShortError, DraftRequest
from truedraft.models.backends.native.build import built
from truedraft.models.backends.sequential import SequentialBackend
from truedraft.models.backends.stock import StockBackend
from truedraft.models.huggingface import HuggingFaceModel

GREEDY = SamplingParams(max_tokens=24)
_BACKENDS = {
    "stock": StockBackend,
    "alone": SequentialBackend,
    "native": native_backend,
    "graphs": lambda model: graph_backend(model, HostRecorder()),
}
_needs_library = pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason)
on_all_backends = pytest.mark.parametrize(
    "backend", ["stock", "alone", pytest.param("native", marks=_needs_library), "graphs"]
)
Head = TypeVar("Head", bound=Any)


def as_transformers_runs_it() -> PreTrainedModel:
    """A target of three layers."""
    sizes = VECTORS | {"vocab_size": VOCAB, "num_hidden_layers": 3, "max_position_embeddings": CONTEXT}
    return build(LlamaConfig(**sizes), seed=3, spread=0.15)


def target(backend: str = "stock") -> HuggingFaceModel:
    return HuggingFaceModel(as_transformers_runs_it(), None, "tiny", _BACKENDS[backend])


def plain_answers(params: SamplingParams, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Any]:
    return answers_of(Engine(target()), params, prompts)


def answers_of(engine: Engine, params: SamplingParams, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Any]:
    return [each.token_ids for each in engine.generate([list(each) for each in prompts], params)]


def random_head(kind: type[Head], config: Any) -> Head:
    """Random weights; of a reduced vocabulary every second id, as far as there are."""
    made, generator = kind(config), torch.Generator().manual_seed(5)
    for weight in made.parameters():
        weight.data.normal_(1.0 if weight.dim() == 1 else 0.0, 0.2, generator=generator)
    if made.draft_ids is not None:
        made.draft_ids.copy_(torch.arange(len(made.draft_ids)) * 2 + 1)
    found: Head = made.requires_grad_(False)
    return found


class Records:
    """A drafter, mixed in, that notes texts, what was proposed behind them, by which noise, and how deep."""

    def propose(self, batch: Sequence[DraftRequest], budgets: Any, noise: Any) -> list[Proposal]:
        try:
            proposals = super().propose(batch, budgets, noise)  # type: ignore[misc]
        except CutShortError as cut:
            self.seen = [*getattr(self, "seen", []), (list(batch[0].tokens), cut.proposal)]
            raise
        self.seen = getattr(self, "seen", [])
        self.seen += [(list(each.tokens), own) for each, own in zip(batch, proposals, strict=True)]
        self.noise = [*getattr(self, "noise", []), *noise]
        self.depths = [*getattr(self, "depths", []), *(each.depth for each in budgets)]
        return proposals

    @property
    def drafted(self) -> list[tuple[list[int], Proposal]]:
        """What was noted where something was proposed."""
        return [(text, own) for text, own in self.seen if len(own.tree)]


def noted(kind: type) -> Any:
    """A kind of drafters that is one of `Records`, too."""
    return type(f"Noted{kind.__name__}", (Records, kind), {})


class Page:
    """What the papers' heads have in common, for a vector at a time.

    Args:
        model: the target, as transformers runs it.
        made: the head.
    """

    dropped: Callable[[int], int] = staticmethod(lambda place: 0)  # by a bounded context, from token 16 on

    def __init__(self, model: PreTrainedModel, made: Any) -> None:
        self.model, self.made, self.weights = model, made, dict(made.named_parameters())

    def product(self, name: str, x: Tensor) -> Tensor:
        return self.weights[f"{name}.weight"] @ x

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean() + self.made.config.eps) * self.weights[f"{name}.weight"]

    def turned(self, x: Tensor, position: int) -> Tensor:
        half = len(x) // 2
        angles = position / self.made.config.rope["rope_theta"] ** (torch.arange(half) / half)
        a, b = x[:half], x[half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])

    def sees(self, layer: int, query: int, key: int) -> bool:
        """Whether a layer sees the text's token `key` from the token `query`, at or behind it."""
        config = self.made.config
        window = config.windows[layer] if config.windows else 0
        inside = not window or query - key < window or key < config.sink
        return inside and not 16 <= key < 16 + self.dropped(query)

    def mlp(self, layer: str, x: Tensor) -> Tensor:
        gate, up = (self.product(f"{layer}.mlp.{each}_proj", x) for each in ("gate", "up"))
        return self.product(f"{layer}.mlp.down_proj", gate * torch.sigmoid(gate) * up)

    def whole(self, logits: Tensor) -> Tensor:
        """Logits of the head over the target's whole vocabulary."""
        if not self.made.config.draft_vocab:
            return logits
        found = torch.full((self.made.config.vocab_size,), -torch.inf)
        found[self.made.draft_ids] = logits
        return found
