"""Trees by calibrated survival bring no less than others: on two targets of different entropy, for both kinds of heads.

The second target is the embedded one with its logits times 0.4: the same greedy answers, flat distributions. Its heads
are the embedded ones, which end in the same LM head. Half of the answers is fitted to, the other half replayed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from support.embedded_models import embedded
from truedraft.core.top_k import TopK
from truedraft.drafters.heads.acceptance import AcceptanceOdds
from truedraft.kinds.medusa.counted_trees import RankTable, choose_tree, compare, replay_likeliest
from truedraft.kinds.medusa.module import MedusaHeads
from truedraft.kinds.medusa.traced_guesses import HeadGuesses
from truedraft.kinds.redrafter.module import RedrafterHead, RedrafterRunner
from truedraft.kinds.redrafter.traced_beams import beam_survival, tokens_of_beams
from truedraft.measure.replay import CURVE_NODES, Trace, fit_survival
from truedraft.models.embedded import embedded_heads
from truedraft.models.lm_head import LmHead
from truedraft.training.heads import lm_head_of
from truedraft.training.texts.answer_writer import WritingConfig, write_answers
from truedraft.training.texts.data import load_tokenizer
from truedraft.training.texts.prompts import cut_prompts, shipped_prompts

TARGET = "embedded:target"
SHARPNESS = {"embedded": 1.0, "flat": 0.4}
NOISE = 0.08  # tokens per call, of some hundred calls whose places follow from each other


def not_less(more: Tensor, less: Tensor, starts: Sequence[int]) -> bool:
    """Whether accepted tokens are not fewer by more than three standard errors; an answer counts once, for it loops."""
    answers = (more - less).double().split([end - first for first, end in pairwise(starts)])
    gains = torch.stack([each.mean() for each in answers])
    return bool(gains.mean() >= -3.0 * gains.std() / len(gains) ** 0.5)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sequence[Trace], Sequence[Trace]]:
    texts = [str(record["text"]) for record in shipped_prompts()]
    prompts = cut_prompts(texts, load_tokenizer(TARGET), 32, 64)
    folder, config = tmp_path_factory.mktemp("text"), WritingConfig(answer_tokens=48, temperatures=(0.0,), batch=32)
    traces = write_answers(embedded(), prompts, folder, "tree", config).traces(0.0)
    return traces[::2], traces[1::2]


@pytest.fixture(params=SHARPNESS)
def sharpness(request: pytest.FixtureRequest) -> float:
    return SHARPNESS[request.param]


def flattened(sharpness: float) -> LmHead:
    head = lm_head_of(TARGET, "cpu")
    return LmHead(head.weight * sharpness, head.bias, head.finish, head.embedding)


def rising(tokens: Sequence[float]) -> bool:
    return all(late >= early - NOISE for early, late in pairwise(tokens))


def test_medusa_trees(halves: tuple[Sequence[Trace], Sequence[Trace]], sharpness: float) -> None:
    heads = MedusaHeads.load(embedded_heads("medusa"))
    found = [HeadGuesses.along(heads, flattened(sharpness), traces, 64) for traces in halves]
    ways = compare(found)
    assert ways["calibrated"] > max(ways["raw"], ways["counted"]) - NOISE
    assert sharpness == 1.0 or ways["calibrated"] > ways["raw"] + 0.2
    calibrated = replay_likeliest(found[1], fit_survival(found[0].log_probs, found[0].ranks))
    raw, counted = replay_likeliest(found[1]), RankTable.of(found[1]).replay(choose_tree(RankTable.of(found[0])))
    for nodes in (1, 2, 4, 8, 16, 32):
        chain = _followed(found[1], min(nodes, heads.config.heads))
        for other in (raw.accepted(nodes), counted.accepted(nodes), chain):
            assert not_less(calibrated.accepted(nodes), other, calibrated.starts)
    assert rising([tokens for _, tokens in calibrated.points(CURVE_NODES)])


def _followed(guesses: HeadGuesses, depth: int) -> Tensor:
    """Tokens that a chain of first guesses would get accepted at each position."""
    return (guesses.ranks[:, :depth] == 0).cumprod(dim=1).sum(dim=1)


class Flattened(RedrafterRunner):
    """The head as it would run with a target whose logits are multiplied."""

    sharpness = 1.0

    def likeliest(self, context: Tensor, state: Tensor, ranks: int) -> TopK:
        return TopK.of(self.logits(context, state).float() * self.sharpness, ranks)


def test_beams(halves: tuple[Sequence[Trace], Sequence[Trace]], sharpness: float) -> None:
    runner = Flattened(RedrafterHead.load(embedded_heads("redrafter")), embedded())
    runner.sharpness = sharpness
    survival = beam_survival(runner, halves[0], 4)

    def tokens(beams: int, by: AcceptanceOdds | None) -> tuple[float, ...]:
        return tokens_of_beams(runner, halves[1], [beams], 4, by)[-1].tokens

    chain, calibrated, raw = tokens(1, None)[-1], tokens(4, survival), tokens(4, None)
    at_eight = CURVE_NODES.index(8)
    assert all(found >= other - NOISE for found, other in zip(calibrated, raw, strict=True))
    assert calibrated[at_eight] > chain - NOISE
    assert sharpness == 1.0 or calibrated[at_eight] > raw[at_eight] + 0.1
    assert rising(calibrated)
