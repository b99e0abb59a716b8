"""MTP layers as drafter: layers in a checkpoint; which hidden states they read is found by measuring.

Checkpoints differ in whether the layer reads the target's hidden states, and its own output, before or after a norm,
and none documents it. A wrong choice only lowers acceptance. Both are tried on a few tokens of the target's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.core.tree import chain_shape, shape_of
from truedraft.drafters.base import Features, StepOutcome
from truedraft.kinds.eagle.drafter import PairDrafter, PairRunner
from truedraft.kinds.mtp.module import MtpHead
from truedraft.models.base import LanguageModel, Segment

_BEGINNING = "The best way to learn a language is to"
_READ_IDS, _WRITTEN = 8, 32  # tokens of a prompt without a tokenizer, and tokens that the target generates
_BEHIND, _BEFORE = "behind", "before"


@dataclass(frozen=True, slots=True)
class _Own:
    """A text with the target's greedy continuation, and its hidden states `[n, width]` after and before the norm."""

    tokens: Tensor
    vectors: dict[str, Tensor]
    first: int

    @classmethod
    def of(cls, target: LanguageModel) -> _Own:
        if target.tokenizer is None:
            ids = [7919 * place % target.vocab_size for place in range(1, _READ_IDS + 1)]
        else:
            ids = target.tokenizer.encode(_BEGINNING)
        layers = (target.shown_layers - 1,) if target.shown_layers else ()
        given, first = list(ids), len(ids)
        found: dict[str, list[Tensor]] = {place: [] for place in (_BEHIND, _BEFORE)[: 1 + len(layers)]}
        with target.trying() as cache:
            while len(ids) < first + _WRITTEN:
                segment = Segment(cache, torch.tensor(given), chain_shape(len(given)), range(len(given)))
                output = target.forward_showing([segment], layers) if layers else target.forward([segment])
                cache.commit(range(len(given)))
                for vectors, shown in zip(found.values(), (output.hidden, *output.layers), strict=True):
                    vectors.append(shown[:, : target.head_width].clone())
                given = [int(output.logits[-1].argmax())]
                ids += given
        return cls(torch.tensor(ids), {place: torch.cat(rows) for place, rows in found.items()}, first)


class MtpRunner(PairRunner):
    """An MTP layer that runs with its target.

    Attributes:
        reads: "behind" or "before" the final norm: which hidden states of the target it reads.
        returns: the same of its own output, fed back after or before the norm that follows it.
        scores: mean log probability of the target's own tokens for each choice of `reads` and of `returns`.
    """

    def __init__(self, head: MtpHead, target: LanguageModel) -> None:
        self._layer, self._target = head.layer, target
        self.device, self.pool = target.device, head.layer.pool
        own = _Own.of(target)
        first = {place: self._first_steps(own, vectors) for place, vectors in own.vectors.items()}
        reads = {place: score for place, (score, _) in first.items()}
        self.reads = max(reads, key=lambda place: reads[place])
        returns = self._second_steps(own, self.reads, first[self.reads][1])
        self.returns = max(returns, key=lambda place: returns[place])
        self.token_bytes = self.pool.position_bytes
        self.scores = {"reads": reads, "returns": returns}

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], vectors: Tensor, observed: bool) -> tuple[Tensor, Tensor]:
        own, logits = self._run(segments, vectors)
        return own[self.returns], logits

    def _run(self, segments: Sequence[Segment], vectors: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tokens = torch.cat([each.tokens.to(self.device) for each in segments])
        before, after = self._layer.forward(segments, self._target.embed(tokens), vectors)
        return {_BEHIND: after, _BEFORE: before}, self._target.unembed(after)

    def _first_steps(self, own: _Own, vectors: Tensor) -> tuple[float, dict[str, Tensor]]:
        """Mean log probability of the target's tokens, and the layer's output."""
        tokens = own.tokens[1:-1]
        cache = self.pool.acquire()
        try:
            segment = Segment(cache, tokens, chain_shape(len(tokens)), range(len(tokens)))
            given, logits = self._run([segment], vectors[:-1])
            cache.commit(range(len(tokens)))
            self.pool.measure(cache)
        finally:
            self.pool.release(cache)
        return _mean(logits, own.tokens[2:], own.first - 2), given

    def _second_steps(self, own: _Own, reads: str, given: dict[str, Tensor]) -> dict[str, float]:
        """The same given each kind of the layer's output.

        Pairs 0, 1, 2 are a chain, and the first two have the next pair as a child: parents -1, 0, 1, 0, 1.
        """
        tokens = own.tokens[1:-1]
        pairs = len(tokens)
        parents = (*range(-1, pairs - 1), *range(pairs - 1))
        scores: dict[str, float] = {}
        for place, vectors in given.items():
            cache = self.pool.acquire()
            try:
                self._run([Segment(cache, tokens, chain_shape(pairs), ())], own.vectors[reads][:-1])
                below = Segment(cache, tokens[1:], shape_of(parents), range(pairs - 1), written=pairs)
                _, logits = self._run([below], vectors[:-1])
            finally:
                self.pool.release(cache)
            scores[place] = _mean(logits, own.tokens[3:], own.first - 3)
        return scores


def _mean(logits: Tensor, tokens: Tensor, first: int) -> float:
    found = logits.float().log_softmax(-1)[torch.arange(len(tokens)), tokens.to(logits.device)]
    return float(found[max(first, 0) :].mean())


class Mtp(PairDrafter[MtpHead, MtpRunner]):
    """Drafts with the MTP layer in the target's checkpoint; options: `LevelDrafter`.

    Which hidden states it reads is measured by `check`, see `MtpRunner`; `facts` and `note` have the result.
    """

    name = "mtp"

    def _features(self) -> Features:
        return Features("kept")

    def _new_runner(self, target: LanguageModel) -> MtpRunner:
        runner = MtpRunner(self.head, target)
        layers = (target.shown_layers - 1,) if runner.reads == _BEFORE else ()
        self.features = Features("kept", layers=layers)
        self.facts |= {"reads": runner.reads, "returns": runner.returns, "log_probs": runner.scores}
        scores = ", ".join(f"{score:.2f} {place} it" for place, score in runner.scores["reads"].items())
        self.note = (
            f"its MTP layer reads vectors {runner.reads} the final norm, and of its own those {runner.returns} the "
            f"norm that follows: by {_WRITTEN} tokens of the target, whose log-probability was {scores}"
        )
        return runner

    def _observed(self, outcome: StepOutcome) -> Tensor | None:
        found = outcome.layers[0] if outcome.layers else outcome.hidden
        return None if found is None else found[:, : self.head.config.width]
