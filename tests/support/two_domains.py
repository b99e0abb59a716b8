"""A tiny target with two kinds of texts that never mix, and heads that know the first kind alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from support.head_models import MarkovWithEmbedding
from truedraft import Engine, SamplingParams
from truedraft.drafters import Medusa, Redrafter
from truedraft.drafters.heads.base import HeadDrafter
from truedraft.heads import MedusaConfig, MedusaHeads, RedrafterConfig, RedrafterHead, VectorHead
from truedraft.learning import Learner
from truedraft.learning.student import Student
from truedraft.models.lm_head import LmHead, LogitFinish

VOCAB, HALF, REACH = 12, 6, 3
ODD = 1e-3  # of a token of the other kind


class TwoDomains(MarkovWithEmbedding):
    """Ids below `HALF` are texts of the first kind, the others of the second; what follows hangs on the last two."""

    def lm_head(self) -> LmHead:
        embedding = torch.eye(self.head_width, dtype=self.dtype)[: self.vocab_size]
        return LmHead(self.probs.log().flatten(0, 1).T.contiguous(), None, LogitFinish(), embedding)


def two_domains(seed: int = 0) -> TwoDomains:
    """Within a kind one token follows with a probability of about 0.9."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.full((VOCAB, VOCAB, VOCAB), ODD / VOCAB, dtype=torch.float64)
    for last in range(VOCAB):
        first = last // HALF * HALF
        for before in range(VOCAB):
            probs[before, last, first : first + HALF] += 0.1 / HALF
            probs[before, last, first + int(torch.randint(HALF, (), generator=generator))] += 0.9
    return TwoDomains(probs / probs.sum(-1, keepdim=True), context_length=256)


def prompts(kind: int, count: int, seed: int = 0) -> list[list[int]]:
    """Of kind 0 or 1."""
    chance = random.Random(f"{kind} {seed}")
    return [[HALF * kind + chance.randrange(HALF) for _ in range(4)] for _ in range(count)]


def untrained(kind: type[VectorHead] = RedrafterHead) -> VectorHead:
    """A head that was never trained."""
    torch.manual_seed(0)
    width = VOCAB**2
    if kind is MedusaHeads:
        return MedusaHeads(MedusaConfig(width, VOCAB, REACH, reads_token=True)).double().requires_grad_(False)
    made = RedrafterHead(RedrafterConfig(width, VOCAB, state=16, exit_width=width, layers=1, length=REACH))
    return made.double().requires_grad_(False)


def drafter_of(head: VectorHead) -> HeadDrafter:
    """Chains of its best guesses, or a small tree."""
    if isinstance(head, MedusaHeads):
        return Medusa(head, nodes=REACH)
    assert isinstance(head, RedrafterHead)
    return Redrafter(head, beams=1, length=REACH, nodes=REACH, sampled=False)


class Unthreaded(Learner):
    """Works when it is told to, and learns in larger steps, for its heads are tiny."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **{"rate": 0.01, **options})

    def _run(self) -> None:
        pass

    def settle(self, most: int = 4000) -> None:
        """Work until there is nothing to do."""
        for _ in range(most):
            if not self._work():
                return

    @property
    def student(self) -> Student:
        """The only one."""
        (found,) = self._students.values()
        assert found is not None
        return found


def learning(head: VectorHead, learner: Learner | None, **options: Any) -> Engine:
    """An engine that drafts with a head, on `two_domains`."""
    return Engine(two_domains(), drafter_of(head), controller="fixed", learner=learner, entropy=1, **options)


def ask(engine: Engine, asked: Sequence[list[int]], temperature: float = 1.0, tokens: int = 40) -> float:
    """Tokens per call over the answers to some prompts."""
    answers = engine.generate(list(asked), SamplingParams(max_tokens=tokens, temperature=temperature))
    calls = sum(each.stats.target_calls for each in answers)
    return sum(each.stats.emitted_tokens for each in answers) / calls


def measured(head: VectorHead, kind: int) -> float:
    """Tokens per call of a head on prompts that nobody learned from."""
    return ask(learning(head, None), prompts(kind, 24, seed=99))


def teach(engine: Engine, learner: Unthreaded, kind: int, rounds: int) -> None:
    """Ask prompts of a kind, and let it learn behind each round."""
    for turn in range(rounds):
        ask(engine, prompts(kind, 16, turn))
        learner.settle()
    ask(engine, prompts(kind, 1))  # a step in which the last change is made


@cache
def trained(kind: type[VectorHead] = RedrafterHead) -> VectorHead:
    """A head that learned the first kind of texts, from what was answered."""
    learner = Unthreaded(share=1.0)
    teach(learning(untrained(kind), learner), learner, 0, 6)
    assert learner.student.promotions
    return learner.student.served.head
