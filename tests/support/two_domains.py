"""A tiny target with two kinds of texts that never mix, and heads that know the first kind alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from transformers import LlamaForCausalLM

from support.head_models import MarkovWithEmbedding
from support.tiny_models import build, llama
from truedraft import Engine, SamplingParams
from truedraft.drafters import DFlash, DraftModel, DSpark, Eagle3, Medusa, PEagle, Redrafter
from truedraft.drafters.heads.base import HeadDrafter
from truedraft.drafters.heads.head import Head
from truedraft.engine.request import Request
from truedraft.kinds.block.module import DFlashHead, DSparkHead
from truedraft.kinds.dflash2.drafter import DFlash2
from truedraft.kinds.dflash2.module import DFlash2Head
from truedraft.kinds.eagle.module import Eagle3Head, PEagleHead
from truedraft.kinds.medusa.module import MedusaHeads
from truedraft.kinds.redrafter.module import RedrafterHead
from truedraft.models.backends.stock import StockBackend
from truedraft.models.base import ForwardOutput, Segment
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.lm_head import LmHead, LogitFinish
from truedraft.training.online import Learner
from truedraft.training.online.learnable import Learnable
from truedraft.training.online.learner import _able
from truedraft.training.online.student import Student

VOCAB, HALF, REACH = 12, 6, 3
ODD = 1e-3  # of a token of the other kind


class TwoDomains(MarkovWithEmbedding):
    """Ids below `HALF` are texts of the first kind, the others of the second; what follows hangs on the last two.

    Its one layer gives what enters the LM head."""

    shown_layers = 1

    def forward_showing(self, segments: Sequence[Segment], layers: Sequence[int]) -> ForwardOutput:
        output = self.forward(segments)
        return replace(output, layers=(output.hidden,) * len(layers))

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


WIDTH = VOCAB**2
_DRAFT = llama(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=16
)
_LAYERS: dict[str, Any] = {"layers": (0,), "heads": 4, "kv_heads": 4, "head": 8, "inner": 64}
_BLOCK = _LAYERS | {"mask_id": VOCAB - 1, "depth": 1}
_SIZES: dict[type[Head], dict[str, Any]] = {
    MedusaHeads: {"heads": REACH, "reads_token": True},
    RedrafterHead: {"state": 16, "exit_width": WIDTH, "layers": 1, "length": REACH},
    Eagle3Head: {**_LAYERS, "reach": REACH},
    PEagleHead: {**_LAYERS, "reach": REACH, "mask_token": VOCAB - 1},
    DFlashHead: {**_BLOCK, "block": REACH + 1},
    DFlash2Head: {**_BLOCK, "block": REACH + 1, "group": 4, "rank": 8, "candidates": 4},
    DSparkHead: {**_BLOCK, "block": REACH, "from_anchor": True, "markov": 16},
}


def untrained(kind: type[Any] = RedrafterHead, seed: int = 0) -> Any:
    """A head, or a draft model, that was never trained."""
    if kind is LlamaForCausalLM:
        return build(_DRAFT, seed, spread=0.05).requires_grad_(False)
    torch.manual_seed(seed)
    made: Head = kind(kind.sizes(WIDTH, VOCAB, **_SIZES[kind]))
    return made.double().requires_grad_(False)


def drafter_of(head: Any) -> Any:
    """Chains of its best guesses, or a small tree."""
    if isinstance(head, LlamaForCausalLM):
        return DraftModel(HuggingFaceModel(copy.deepcopy(head), None, "tiny", StockBackend), REACH)
    if isinstance(head, MedusaHeads):
        return Medusa(head, nodes=REACH)
    if isinstance(head, RedrafterHead):
        return Redrafter(head, beams=1, length=REACH, nodes=REACH, sampled=False)
    kinds: dict[str, Any] = {each.name: each for each in (Eagle3, PEagle, DFlash, DFlash2, DSpark)}
    made: HeadDrafter = kinds[head.kind](head)
    return made


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


def learning(head: Any, learner: Learner | None, **options: Any) -> Engine:
    """An engine that drafts with a head, on `two_domains`."""
    return Engine(two_domains(), drafter_of(head), controller="fixed", learner=learner, entropy=1, **options)


def learnable_of(head: Any) -> Learnable[Any]:
    """How a head learns, on `two_domains`."""
    (found,) = _able(learning(head, None), False).values()
    return found


def served(engine: Engine, asked: Sequence[list[int]], params: SamplingParams, scopes: Sequence[Any]) -> list[Request]:
    """Requests of some scopes in turn, when all were answered."""
    requests = [engine.submit(each, params, scope=scopes[number % len(scopes)]) for number, each in enumerate(asked)]
    while engine.step():
        pass
    return requests


def ask(engine: Engine, asked: Sequence[list[int]], scope: Any = None) -> float:
    """Tokens per call over the answers to some prompts at temperature 1."""
    requests = served(engine, asked, SamplingParams(max_tokens=40, temperature=1.0), [scope])
    calls = sum(each.counters.target_calls for each in requests)
    return sum(each.counters.emitted_tokens for each in requests) / calls


def measured(head: Any, kind: int) -> float:
    """Tokens per call of a head on prompts that nobody learned from."""
    return ask(learning(head, None), prompts(kind, 24, seed=99))


def teach(engine: Engine, learner: Unthreaded, kind: int, rounds: int) -> None:
    """Ask prompts of a kind, and let it learn behind each round."""
    for turn in range(rounds):
        ask(engine, prompts(kind, 16, turn))
        learner.settle()
    ask(engine, prompts(kind, 1))  # a step in which the last change is made


@cache
def trained(kind: type[Any] = RedrafterHead) -> Any:
    """A head that learned the first kind of texts, from what was answered."""
    learner = Unthreaded(share=1.0)
    teach(learning(untrained(kind), learner), learner, 0, 6)
    assert learner.student.promotions
    return learner.student.served.module
