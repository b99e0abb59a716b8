"""How large a tree of the likeliest paths must be: against the trees themselves, at each position."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
import torch

from truedraft.core.params import SamplingParams
from truedraft.core.rank_tree import RankTree, likeliest_paths
from truedraft.drafters.heads.calibration import tree_curves
from truedraft.errors import OptionError
from truedraft.kinds.medusa.counted_trees import CountedTree, replay_likeliest
from truedraft.kinds.medusa.guess_trees import GuessTrees
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.kinds.medusa.traced_guesses import HeadGuesses, guesses_along, true_ranks
from truedraft.measure.replay import CURVE_NODES, NEVER, Trace, TraceReplay, starts_of
from truedraft.models.lm_head import LmHead, LogitFinish

HEADS, WIDTH, VOCAB, LIMIT = 3, 6, 9, 20
LENGTHS = (9, 2, 17, 1, 5, 40)


def make_heads() -> MedusaHeads:
    heads = MedusaHeads(MedusaConfig(WIDTH, VOCAB, heads=HEADS))
    generator = torch.Generator().manual_seed(1)
    for weight in heads.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) * 0.5
    return heads


def make_lm_head() -> LmHead:
    generator = torch.Generator().manual_seed(2)
    # Rounded coarsely, so that many logits, and with them many paths, are equal.
    return LmHead(torch.randn(VOCAB, WIDTH, generator=generator).round(), None, LogitFinish())


def make_traces(stopped: bool = False) -> list[Trace]:
    generator = torch.Generator().manual_seed(3)
    return [
        Trace(
            torch.randint(VOCAB, (n,), generator=generator), torch.randn(n, WIDTH, generator=generator).round(), stopped
        )
        for n in LENGTHS
    ]


def guesses(traces: list[Trace] | None = None) -> HeadGuesses:
    return HeadGuesses.along(make_heads(), make_lm_head(), make_traces() if traces is None else traces, 64)


def accepted_by_trees(nodes: int, stopped: bool) -> list[int]:
    """At each position the true tokens that follow a path of the very tree that would be drafted there.

    Unless the target itself ended the answer, trees are not deeper than what may be drafted before its end.
    """
    found = []
    left = [length - 2 - place for length in LENGTHS for place in range(length - 1)]
    logits, tokens = next(guesses_along(make_heads(), make_lm_head(), make_traces()))
    log_probs = logits.float().log_softmax(-1).sort(dim=-1, descending=True).values.numpy()
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    for row, depth in enumerate(left):
        depth = HEADS if stopped else min(depth, HEADS)
        if depth == 0:
            found.append(0)
            continue
        chosen = likeliest_paths(log_probs[:depth, row : row + 1], nodes)
        places, shape = chosen.places[0].tolist(), chosen.shapes[0]
        node, count = -1, 0
        for head, token in enumerate(tokens[row].tolist()):
            of_node = {int(order[head, row, places[child] % VOCAB]): child for child in shape.children[node + 1]}
            if token not in of_node:
                break
            node, count = of_node[token], count + 1
        found.append(count)
    return found


@pytest.mark.parametrize("logits_at_once", [1, 7 * HEADS * VOCAB, 1 << 24])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_tree_accepts_what_the_replay_says(logits_at_once: int, stopped: bool) -> None:
    traces = make_traces(stopped)
    found = HeadGuesses.along(make_heads(), make_lm_head(), traces, LIMIT, logits_at_once)
    replay = replay_likeliest(found, most=LIMIT)
    assert replay.fewest.shape == (sum(length - 1 for length in LENGTHS), HEADS)
    assert all((late >= early).all() for early, late in pairwise(replay.fewest.unbind(1)))
    for nodes in range(1, LIMIT + 1):
        expected = accepted_by_trees(nodes, stopped)
        assert replay.accepted(nodes).tolist() == expected
        calls, place = 0, 0
        emitted = 0  # a stop counts, too: a call gave it
        for length in LENGTHS:
            end = place + length - 1
            while place < end:
                calls += 1
                emitted += 1 + expected[place]
                place += 1 + expected[place]
        assert replay.mean_acceptance_length(nodes) == pytest.approx(emitted / calls)
    assert sum(accepted_by_trees(LIMIT, stopped)) > 20


def test_points_are_those_that_were_asked_for() -> None:
    replay = replay_likeliest(guesses(), most=LIMIT)
    assert [nodes for nodes, _ in replay.points()] == [nodes for nodes in CURVE_NODES if nodes <= LIMIT]
    assert dict(replay.points((3, 99))) == {3: replay.mean_acceptance_length(3)}
    assert replay_likeliest(guesses()).points()[-1][0] == 64


def test_the_points_are_kept_with_the_heads_and_sized_by() -> None:
    """What a training writes down is what the drafter reads."""
    replay = replay_likeliest(guesses(), most=8)
    counted = CountedTree(RankTree(((0,),), (0.5,)), (), (), 1, replay.points())
    assert counted.promised_by_likeliest(8) == replay.mean_acceptance_length(8)
    facts = json.loads(json.dumps({"trees": {"greedy": counted.as_dict()}}))
    curve = GuessTrees(HEADS, tree_curves(facts, HEADS)).acceptance_curve(SamplingParams())
    assert curve is not None and curve.tokens(8) >= replay.mean_acceptance_length(8) > curve.tokens(1)


def test_nothing_to_look_at() -> None:
    assert math.isnan(replay_likeliest(guesses([])).mean_acceptance_length(4))
    with pytest.raises(OptionError, match="1 or more"):
        replay_likeliest(guesses(), most=0)


def test_ranks_of_true_tokens() -> None:
    """Of equal logits the lower id ranks first; where no token is drafted, it ranks behind all."""
    logits = torch.tensor([[[1.0, 3.0, 3.0, 0.0]], [[1.0, 3.0, 3.0, 0.0]]])
    assert true_ranks(logits, torch.tensor([[2, -1]])).tolist() == [[1, 4]]


def test_a_replay_by_hand() -> None:
    """Rows 0 to 3 and 4 to 5; a step that accepts 2 at row 0 is followed by one at row 3, which ends the trace."""
    fewest = torch.tensor([[1, 3], [NEVER, 2], [4, NEVER], [2, 9], [NEVER, NEVER], [7, 7]])
    replay = TraceReplay(fewest, (0, 4, 6), 9)
    assert replay.accepted(3).tolist() == [2, 0, 0, 1, 0, 0]
    assert replay.visited(3).tolist() == [0, 3, 4, 5]
    assert replay.mean_acceptance_length(3) == pytest.approx(6 / 4)
    assert starts_of(make_traces(stopped=True)) == (0, 8, 9, 25, 25, 29, 68)
