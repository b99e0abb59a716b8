"""The promise of a tree: replay along what the target wrote alone is what the engine then measures, call by call."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.nn.functional import cross_entropy

from support.head_models import SHARPENED
from support.tiny_models import PROMPTS, VOCAB, packed, stock
from truedraft import Engine, SamplingParams
from truedraft.core.stats import Counters
from truedraft.core.tree import chain_shape
from truedraft.drafters.heads.acceptance import AcceptanceOdds
from truedraft.drafters.heads.calibration import Calibration
from truedraft.kinds.medusa.counted_trees import replay_likeliest
from truedraft.kinds.medusa.drafter import Medusa
from truedraft.kinds.medusa.guess_trees import GuessTrees
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.kinds.medusa.rank_paths import RankTable, choose_tree
from truedraft.kinds.medusa.traced_guesses import HeadGuesses
from truedraft.measure.replay import Trace
from truedraft.models.base import Segment
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.lm_head import LmHead

TOKENS, HEADS = 80, 3
# Answers that repeat, so that a replay meets the engine's own. Coupled ones repeat too, but there heads hear the noise,
# and draft other trees than those that are counted.
WAYS = {"greedy": SamplingParams(max_tokens=TOKENS)}


@cache
def target() -> HuggingFaceModel:
    return packed("llama")


@torch.inference_mode()
def hidden_of(tokens: list[int]) -> torch.Tensor:
    """The vectors that enter the LM head at each token of a text."""
    cache_ = target().new_cache()
    shape = chain_shape(len(tokens))
    hidden = target().forward([Segment(cache_, torch.tensor(tokens), shape, range(len(tokens)))]).hidden.clone()
    target().release_cache(cache_)
    return hidden


@cache
def traces(way: str) -> list[Trace]:
    """Plain decoding's answers, with the vectors from which their tokens were drawn."""
    found = []
    for prompt, answer in zip(PROMPTS, Engine(target()).generate([list(p) for p in PROMPTS], WAYS[way]), strict=True):
        hidden = hidden_of([*prompt, *answer.token_ids])
        first = len(prompt) - 1
        found.append(Trace(torch.tensor(answer.token_ids), hidden[first : first + len(answer.token_ids)]))
    return found


@cache
def lm_head() -> LmHead:
    return LmHead.of(stock("llama"))


@cache
def heads(way: str) -> MedusaHeads:
    """Heads that know the traces halfway, so that they are right often and not always."""
    made = MedusaHeads(MedusaConfig(target().head_width, VOCAB, heads=HEADS, reads_token=True))
    optimizer = torch.optim.Adam(made.parameters(), lr=0.02)
    for _ in range(12):
        loss = torch.zeros(())
        for trace in traces(way):
            places = torch.arange(trace.steps - HEADS)
            embedded = lm_head().embed(trace.tokens[places])
            logits = made.logits(trace.hidden[places].clone(), lm_head(), lm_head().finish, embedded)
            for head in range(HEADS):
                loss = loss + cross_entropy(logits[head], trace.tokens[places + 1 + head])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return made.eval().requires_grad_(False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nodes", [1, 6, 24])
def test_the_engine_keeps_the_promise_call_by_call(way: str, nodes: int) -> None:
    table = RankTable.of(HeadGuesses.along(heads(way), lm_head(), traces(way), 1), 6)
    tree = choose_tree(table, nodes, settle_for=nodes)
    replay = table.replay(tree)
    engine = Engine(target(), Medusa(heads(way), {"greedy": tree, "sampled": tree}, nodes=nodes), controller="fixed")
    answers = engine.generate([list(prompt) for prompt in PROMPTS], WAYS[way])
    assert [answer.token_ids for answer in answers] == [trace.tokens.tolist() for trace in traces(way)]
    stats = sum((answer.stats for answer in answers), Counters())
    assert stats.target_calls == len(replay.visited(nodes))
    assert stats.mean_acceptance_length == pytest.approx(replay.mean_acceptance_length(nodes))
    assert tree.expected_tokens == pytest.approx(stats.mean_acceptance_length)
    assert stats.mean_acceptance_length > 1.1  # else there would be nothing to keep


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("depths", [None, SHARPENED], ids=["raw", "calibrated"])
@pytest.mark.parametrize("nodes", [1, 6, 24])
def test_so_it_does_for_trees_that_are_chosen_at_each_step(
    way: str, nodes: int, depths: list[list[float]] | None
) -> None:
    survival = None if depths is None else AcceptanceOdds.of(depths)
    replay = replay_likeliest(HeadGuesses.along(heads(way), lm_head(), traces(way), 32), survival, most=32)
    calibration = Calibration({} if survival is None else {way: survival})
    engine = Engine(
        target(), Medusa(heads(way), GuessTrees(HEADS, calibration=calibration), nodes=nodes), controller="fixed"
    )
    answers = engine.generate([list(prompt) for prompt in PROMPTS], WAYS[way])
    assert [answer.token_ids for answer in answers] == [trace.tokens.tolist() for trace in traces(way)]
    stats = sum((answer.stats for answer in answers), Counters())
    assert stats.target_calls == len(replay.visited(nodes))
    assert stats.mean_acceptance_length == pytest.approx(replay.mean_acceptance_length(nodes))
    assert stats.mean_acceptance_length > 1.1
