"""Heads that learn: those that read one vector of the target, and those that read several of its layers."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from truedraft.drafters.base import Drafter
from truedraft.drafters.heads.base import HeadDrafter, refuse_other_target
from truedraft.drafters.heads.head import Head, VectorHead
from truedraft.drafters.kinds import KINDS, dotted
from truedraft.errors import CompositionError
from truedraft.models.base import LanguageModel
from truedraft.models.lm_head import LmHead
from truedraft.training.chains import ChainLoss, Chains, Texts, chains_at
from truedraft.training.head_config import HeadLoss, HeadsObjective
from truedraft.training.online.learnable import PLACES, Learnable, Narrowed, agrees, scored
from truedraft.training.online.traffic import Answered, Score
from truedraft.training.texts.self_distillation import CollatedBatch

HeadT = TypeVar("HeadT", bound=Head)
_IDS, _OTHERS = 8192, 2048  # a larger vocabulary is narrowed to the traffic's ids and so many others
_WINDOW = 8  # positions of a span for heads that read one vector
_ROWS = 128  # with logits in memory at once
_CHAINS = 32  # of a span, one after each token, for heads that read layers


class LearnableHeads(Learnable[HeadT]):
    """Common base of all kinds of heads."""

    reads_layers: ClassVar[bool]

    def __init__(self, drafter: HeadDrafter[HeadT, Any], target: LanguageModel, lm_head: LmHead) -> None:
        self._drafter, self._target, self._lm_head = drafter, target, lm_head
        self.kind, self.plural = drafter.head.kind, drafter.head.plural
        self._config: Any = dotted(KINDS[self.kind].training)()
        some_only = getattr(drafter.head, "draft_ids", None) is not None
        own = {each.out_features for each in drafter.head.outputs if each is not None and not some_only}
        if own - {len(lm_head.weight)}:
            raise CompositionError(
                f"these {self.plural} guess among {max(own)} ids, and {target.name} has {len(lm_head.weight)}; they "
                "draft, but do not learn"
            )
        self.origin = self._placed(drafter.head)

    @classmethod
    def takes(cls, drafter: Drafter) -> bool:
        if not isinstance(drafter, HeadDrafter) or drafter.head.reads_layers != cls.reads_layers:
            return False
        kind = KINDS.get(drafter.head.kind)
        return kind is not None and bool(kind.training)

    def _placed(self, head: HeadT) -> HeadT:
        return copy.deepcopy(head).to("cpu", self._lm_head.weight.dtype).eval().requires_grad_(False)

    def change(self, module: HeadT) -> Callable[[], None]:
        return partial(self._drafter.take, module)

    def save(self, module: HeadT, folder: Path) -> None:
        target, known = self._target, self.origin.record
        record = replace(known, target_name=target.name, fingerprint=target.fingerprint, sample=target.sample)
        short = self.dtype in (torch.bfloat16, torch.float16)
        module.save(folder, record, dtype=self.dtype if short else torch.float32)

    def load(self, folder: Path) -> HeadT:
        head = type(self.origin).load(folder)
        refuse_other_target(head, self._target)
        return self._placed(head.with_record(self.origin.record))


class LearnableVectorHeads(LearnableHeads[VectorHead]):
    """Heads that read the vector from which the last token was drawn."""

    reads_layers = False
    reads_prompts = False
    answers = 16

    @property
    def least(self) -> int:  # type: ignore[override]
        return self.origin.reach + 2

    def learn(
        self, shadow: VectorHead, chosen: Sequence[Answered], known: Sequence[Answered], chance: random.Random
    ) -> int:
        batch = self._batch(chosen, shadow.reach, chance)
        own = any(output is not None for output in shadow.outputs)
        ids = None if own else some_ids(known, len(self._lm_head.weight), chance)
        narrowed = Narrowed.of(self._lm_head, self._config.distillation_loss, ids)
        loss = HeadLoss(shadow, narrowed.lm_head, narrowed.loss, decay=self._config.place_decay)
        feed = self._config.feed(shadow, self._lm_head)
        objective = HeadsObjective(shadow, self._lm_head, lambda _: batch, feed, narrowed, loss)
        objective.accumulate(batch.places, 1.0)
        return len(batch.places)

    def _batch(self, chosen: Sequence[Answered], reach: int, chance: random.Random) -> CollatedBatch:
        tokens, vectors, places, end = [], [], [], 0
        for each in chosen:
            count = min(_WINDOW, len(each) - reach)
            first = chance.randrange(len(each) - reach - count + 1)
            rows = slice(first, first + count + reach)
            tokens.append(each.tokens[rows])
            vectors.append(each.vectors[rows].to("cpu"))
            places.append(torch.arange(end, end + count))
            end += count + reach
        return CollatedBatch(torch.cat(vectors), torch.cat(tokens), torch.cat(places), np.arange(end))

    def replayed(self, modules: Sequence[VectorHead], answer: Answered) -> list[Score]:
        return replayed(modules, self._lm_head, answer)


@torch.no_grad()
def replayed(heads: Sequence[VectorHead], lm_head: LmHead, answer: Answered) -> list[Score]:
    """Scores of greedy chains of heads of one size, which together take fewer passes over a large LM head."""
    tokens = answer.tokens[: PLACES + 1]
    places, reach = len(tokens) - 1, heads[0].reach
    if places < 1:
        return [Score(0, 0, 0)] * len(heads)
    like = next(heads[0].parameters())
    hidden = answer.vectors[:places].to(like.device, like.dtype)
    padded = torch.cat([tokens, tokens.new_full((reach,), -1)])  # no guess agrees there
    embedded = lm_head.embed(padded[torch.arange(places)[:, None] + torch.arange(reach)].clamp_min(0).T)
    vectors = torch.stack([head.unroll(hidden, embedded) for head in heads])  # [heads, reach, places, exit width]
    kept = torch.zeros(len(heads), places, dtype=torch.int64)
    alive = torch.ones(len(heads), places, dtype=torch.bool)
    for place in range(reach):
        labels = padded[1 + place : 1 + place + places].expand(len(heads), -1)
        alive &= labels >= 0
        separate = heads[0].outputs[place] is not None  # otherwise all use the target's, in one product
        for number, head in enumerate(heads if separate else heads[:1]):
            some_heads = slice(number, number + 1) if separate else slice(None)
            own = torch.zeros_like(alive)
            own[some_heads] = alive[some_heads]
            rows = zip(vectors[:, place][own].split(_ROWS), labels[own].split(_ROWS), strict=True)
            alive[own] = torch.cat([agrees(head.place_logits(place, some[0], lm_head), some[1]) for some in rows])
        kept += alive
    return [scored(each) for each in kept]


def some_ids(known: Sequence[Answered], vocab: int, chance: random.Random) -> Tensor | None:
    """Ids of a training step, ascending: those of the traffic and some others; None is all, of a small vocabulary."""
    if vocab <= _IDS:
        return None
    others = torch.tensor([chance.randrange(vocab) for _ in range(_OTHERS)])
    return torch.cat([*(each.tokens for each in known), others]).unique()


class LearnableLayerHeads(LearnableHeads[Head]):
    """Heads with layers of their own, which read several of the target's."""

    reads_layers = True
    answers = 4
    least = 2

    def __init__(self, drafter: HeadDrafter[Head, Any], target: LanguageModel, lm_head: LmHead) -> None:
        super().__init__(drafter, target, lm_head)
        config: Any = self.origin.config
        self.layers = config.layers

    def _chains(self, head: Head) -> Chains:
        chains: Chains = self._config.chains(head, self._lm_head, self._target)
        return chains

    def learn(self, shadow: Head, chosen: Sequence[Answered], known: Sequence[Answered], chance: random.Random) -> int:
        chains, config, reach = self._chains(shadow), self._config, shadow.reach
        spans, pairs = [], []
        for each in chosen:
            first = chance.randrange(max(len(each) - _CHAINS, 1))
            places = range(first, min(first + _CHAINS, len(each) - 1))
            end = min(places.stop + reach, len(each))
            spans.append((each, first + 1, end))
            pairs.append(_pairs(each, places, end, reach))
        counts = chains_at(pairs, reach)
        loss = ChainLoss(chains, config.distillation_loss, None if config.by_acceptance else config.place_decay)
        loss.accumulate(chains.along(self._texts(chains, spans), pairs), counts, 1.0)
        return counts[0]

    @torch.no_grad()
    def _texts(self, chains: Chains, spans: Sequence[tuple[Answered, int, int]]) -> Texts:
        """Prompts and answers up to their second place, with the target's distributions from the first."""
        texts = [torch.cat([each.prompt, each.tokens[:end]]) for each, _, end in spans]
        starts = list(itertools.accumulate(map(len, texts), initial=0))
        rows, about = np.zeros(starts[-1], np.int64), []
        for start, (each, first, end) in zip(starts, spans, strict=False):
            about.append(start + len(each.prompt) - 1 + np.arange(first, end))
        rows[np.concatenate(about)] = np.arange(sum(map(len, about)))
        vectors = torch.cat([each.vectors[first:end] for each, first, end in spans]).to("cpu")
        log_probs, ids = functional.log_softmax(self._lm_head(vectors).float(), -1), chains.head.draft_ids
        known = log_probs if ids is None else log_probs[:, ids]
        like, layers = next(chains.head.parameters()), []
        for number in self.layers:
            # The rows of a text end with one for its last token, which is never read.
            own = [each.layers[number][: len(each.prompt) + end - 1].to(like) for each, _, end in spans]
            layers.append(torch.cat([functional.pad(each, (0, 0, 0, 1)) for each in own]))
        return Texts(torch.cat(texts), starts, layers, known, rows)

    def replayed(self, modules: Sequence[Head], answer: Answered) -> list[Score]:
        return [self._replayed(each, answer) for each in modules]

    @torch.no_grad()
    def _replayed(self, head: Head, answer: Answered) -> Score:
        end = min(len(answer), PLACES + 1)
        kept, alive = torch.zeros(end - 1, dtype=torch.int64), torch.ones(end - 1, dtype=torch.bool)
        if end > 1:
            chains, pairs = self._chains(head), _pairs(answer, range(end - 1), end, head.reach)
            for step in chains.along(self._texts(chains, [(answer, end - 1, end)]), [pairs]):
                found = torch.zeros_like(alive)
                found[step.chains] = agrees(chains.logits(step.leaving), chains.ids(step.tokens))
                alive &= found
                kept += alive
        return scored(kept)


def _pairs(answer: Answered, places: Sequence[int], end: int, reach: int) -> dict[int, int]:
    """Pairs with chains after the answer's tokens at `places`, with steps up to the token before `end`, as `chains_in`.

    Worked example: after a prompt of 4 the answer's token 0 is at 4, so its pair is 3, which is about the token at 5;
    with an answer of 3 and a reach of 3 the pairs are 3 with two steps and 4 with one.
    """
    first = len(answer.prompt) - 1
    return {first + place: min(reach, end - 1 - place) for place in places}
