"""Models and heads for tests of drafters with heads: a Markov table with an LM head, heads that are right at times."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from truedraft.core.tree import chain_shape
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.kinds.redrafter.module import RedrafterConfig, RedrafterHead
from truedraft.models.base import ForwardOutput, LanguageModel, Segment
from truedraft.testing import MarkovModel

SHARPENED = [[3.0, -1.5, -1.4, 1.0, -1.0], [2.0, -1.0, -0.8, 0.9, -0.5]]
"""Odds of acceptance as they are at temperature 0 where distributions are flat; see `AcceptanceOdds`."""


class MarkovWithHead(MarkovModel):
    """A Markov table whose hidden vector is the one-hot of the last two tokens, and whose LM head is its table."""

    @property
    def fingerprint(self) -> str:
        return f"markov-{float(self.probs.flatten() @ torch.arange(self.probs.numel(), dtype=self.probs.dtype)):.9f}"

    @property
    def head_width(self) -> int:  # type: ignore[override]
        return self.vocab_size**2

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        output = super().forward(segments)
        pair = (output.hidden[:, 0] * self.vocab_size + output.hidden[:, 1]).long()
        return ForwardOutput(output.logits, torch.eye(self.head_width, dtype=self.dtype)[pair])

    def vector_after(self, tokens: Sequence[int]) -> Tensor:
        """The vector from which the token after a text is drawn."""
        a, b = ([0, 0, *tokens])[-2:]
        return torch.eye(self.head_width, dtype=self.dtype)[a * self.vocab_size + b]

    def unembed(self, vectors: Tensor) -> Tensor:
        return vectors @ self.probs.log().flatten(0, 1)


def random_heads(model: LanguageModel, seed: int = 0, spread: float = 0.5, **sizes: int | bool) -> MedusaHeads:
    """Heads with random weights, in the model's dtype."""
    made = MedusaHeads(MedusaConfig(model.head_width, model.vocab_size, **sizes))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    for weight in made.parameters():
        weight.data.normal_(std=spread, generator=generator)
    return made.to(model.dtype).requires_grad_(False)


def hidden_of(model: LanguageModel, tokens: Sequence[int]) -> Tensor:
    """Vectors `[tokens, head_width]` that enter the LM head after each token of a text."""
    with torch.inference_mode():  # as the engine does: caches may not be written in both modes
        cache = model.new_cache()
        ids = torch.tensor(list(tokens), device=model.device)
        output = model.forward([Segment(cache, ids, chain_shape(len(ids)), range(len(ids)))])
        model.release_cache(cache)
    return output.hidden[:, : model.head_width].float().clone()  # an ordinary tensor, which modules may read


def fitted_heads(model: LanguageModel, texts: Sequence[Sequence[int]], heads: int = 3) -> MedusaHeads:
    """Free heads without blocks' help, fitted to texts by least squares: often right on them, and often wrong."""
    hidden = [hidden_of(model, text) for text in texts]
    made = MedusaHeads(MedusaConfig(model.head_width, model.vocab_size, heads, tied=False))
    for number, head in enumerate(made.each()):
        # The vector after token i gives token i + 1; head 0 guesses the one behind it.
        reach = number + 2
        rows = torch.cat([vectors[: len(text) - reach] for vectors, text in zip(hidden, texts, strict=True)]).double()
        wanted = torch.tensor([token for text in texts for token in text[reach:]])
        targets = torch.nn.functional.one_hot(wanted, model.vocab_size).double()
        gram = rows.T @ rows + 1e-2 * rows.pow(2).sum() / rows.shape[0] * torch.eye(rows.shape[1]).double()
        assert head.output is not None
        head.output.weight.data = torch.linalg.solve(gram, rows.T @ targets).T.float()
    return made.to(model.dtype).requires_grad_(False)


def random_redrafter(model: LanguageModel, seed: int = 0, spread: float = 0.5, **sizes: int | bool) -> RedrafterHead:
    """A recurrent head with random weights, in the model's dtype."""
    given = {"state": 7, "exit_width": model.head_width, "layers": 2, "length": 3} | sizes
    made = RedrafterHead(RedrafterConfig(model.head_width, model.vocab_size, **given))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    for weight in made.parameters():
        weight.data.normal_(std=spread / weight.shape[-1] ** 0.5, generator=generator)
    return made.to(model.dtype).requires_grad_(False)


class MarkovWithEmbedding(MarkovWithHead):
    """It also embeds its ids, each as a one-hot, so that heads can read them."""

    def embed(self, tokens: Tensor) -> Tensor:
        return torch.eye(self.head_width, dtype=self.dtype)[tokens]


def fitted_redrafter(
    model: MarkovWithEmbedding, texts: Sequence[Sequence[int]], length: int = 3, steps: int = 150
) -> RedrafterHead:
    """A recurrent head fitted to texts: often right on them, and often wrong elsewhere."""
    made = random_redrafter(model, spread=0.3, state=16, layers=1, length=length).requires_grad_(True)
    texts = [text for text in texts if len(text) > length + 2]
    hidden = torch.cat([hidden_of(model, text)[: -length - 1] for text in texts]).to(model.dtype)
    behind = [torch.tensor(text).unfold(0, length + 1, 1)[1:] for text in texts]
    tokens = torch.cat(behind)[: len(hidden)]
    read = torch.stack([model.embed(tokens[:, place]) for place in range(length)])
    optimizer = torch.optim.Adam(made.parameters(), lr=0.02)
    for _ in range(steps):
        logits = model.unembed(made.unroll(hidden, read).flatten(0, 1))
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].T.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return made.requires_grad_(False)
