"""Counts and replay against Python loops over positions, and trees chosen from them."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

from truedraft.core.rank_tree import RankPath, RankTree
from truedraft.errors import DataError, OptionError
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.kinds.medusa.rank_paths import RankTable, choose_tree, most_frequent, tokens_of_tree, with_survival
from truedraft.kinds.medusa.traced_guesses import LOGITS, HeadGuesses
from truedraft.measure.replay import NEVER, Trace
from truedraft.models.lm_head import LmHead, LogitFinish

HEADS, WIDTH, VOCAB, RANKS = 3, 6, 7, 3
LENGTHS = (9, 2, 17, 1, 5, 30)


def make_heads(tied: bool = True) -> MedusaHeads:
    heads = MedusaHeads(MedusaConfig(WIDTH, VOCAB, heads=HEADS, tied=tied))
    generator = torch.Generator().manual_seed(1)
    for weight in heads.parameters():
        weight.data = torch.randn(weight.shape, generator=generator)
    return heads


def make_lm_head() -> LmHead:
    generator = torch.Generator().manual_seed(2)
    # Rounded coarsely, so that many logits are equal and the order of ids decides.
    return LmHead(torch.randn(VOCAB, WIDTH, generator=generator).round(), None, LogitFinish(cap=5.0))


def make_traces(stopped: bool = False) -> list[Trace]:
    generator = torch.Generator().manual_seed(3)
    return [
        Trace(
            torch.randint(VOCAB, (length,), generator=generator),
            torch.randn(length, WIDTH, generator=generator).round(),
            stopped,
        )
        for length in LENGTHS
    ]


def ranks_at(heads: MedusaHeads, lm_head: LmHead, trace: Trace, place: int) -> RankPath:
    """Ranks of the true tokens behind a place, by sorting; RANKS where one is missed, the last one or beyond."""
    with torch.no_grad():
        logits = heads.logits(trace.hidden[place : place + 1], lm_head, lm_head.finish)[:, 0]
    ranks = []
    for head in range(HEADS):
        after = place + 1 + head
        order = sorted(range(VOCAB), key=lambda token: (-float(logits[head, token]), token))
        rank = order.index(int(trace.tokens[after])) if after < len(trace.tokens) - 1 else RANKS
        ranks.append(min(rank, RANKS))
    return tuple(ranks)


def table_of(traces: list[Trace], tied: bool = True, logits_at_once: int = LOGITS) -> RankTable:
    return RankTable.of(HeadGuesses.along(make_heads(tied), make_lm_head(), traces, 1, logits_at_once), RANKS)


def table_by_hand(heads: MedusaHeads, lm_head: LmHead, traces: list[Trace]) -> list[list[RankPath]]:
    return [[ranks_at(heads, lm_head, trace, i) for i in range(len(trace.tokens) - 1)] for trace in traces]


def prefixes(path: RankPath) -> list[RankPath]:
    known = list(itertools.takewhile(lambda rank: rank < RANKS, path))
    return [tuple(known[: depth + 1]) for depth in range(len(known))]


def accepted(tree: RankTree, path: RankPath) -> int:
    return sum(prefix in tree.paths for prefix in prefixes(path))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("logits_at_once", [1, 4 * HEADS * VOCAB, 1 << 24])
def test_table_counts_and_replay_are_those_of_a_loop(tied: bool, logits_at_once: int) -> None:
    traces = make_traces()
    table = table_of(traces, tied, logits_at_once)
    by_hand = table_by_hand(make_heads(tied), make_lm_head(), traces)
    flat = [path for paths in by_hand for path in paths]
    assert [tuple(row) for row in table.ranks.tolist()] == flat

    whole = [paths[i] for paths in by_hand for i in range(len(paths) - HEADS)]
    assert len(table.whole) == len(whole) == 5 + 13 + 1 + 26
    found = Counter(prefix for path in whole for prefix in prefixes(path))
    assert table.counted == pytest.approx({path: count / len(whole) for path, count in found.items()})
    for head, rank in itertools.product(range(HEADS), range(RANKS)):
        share = sum(path[head] == rank for path in whole) / len(whole)
        assert table.accuracy[head][rank] == pytest.approx(share)

    for nodes in range(9):
        tree = most_frequent(table.counted, nodes)
        replay = table.replay(tree)
        assert replay.accepted(nodes).tolist() == [accepted(tree, path) for path in flat]
        fewer = tree.first(nodes // 2)
        assert replay.accepted(nodes // 2).tolist() == [accepted(fewer, path) for path in flat]
        calls = emitted = 0
        for paths in by_hand:
            place = 0
            while place < len(paths):
                calls += 1
                emitted += 1 + accepted(tree, paths[place])
                place += 1 + accepted(tree, paths[place])
        (found_tokens,) = tokens_of_tree(table, tree, [nodes])
        assert found_tokens.replayed == replay.mean_acceptance_length(nodes) == pytest.approx(emitted / calls)
        assert tree.expected_tokens == pytest.approx(found_tokens.counted)
        product = sum(math.prod(table.accuracy[k][rank] for k, rank in enumerate(path)) for path in tree.paths)
        assert found_tokens.product == pytest.approx(1 + product)


def test_the_chosen_paths_are_the_best_of_all_trees() -> None:
    """Greedy choice on joint counts is optimal: no other tree of three nodes expects more tokens."""
    counted = table_of(make_traces()).counted
    every = [path for depth in (1, 2, 3) for path in itertools.product(range(RANKS), repeat=depth)]
    trees = [set(three) for three in itertools.combinations(every, 3)]
    trees = [tree for tree in trees if all(len(path) == 1 or path[:-1] in tree for path in tree)]
    best = max(sum(counted.get(path, 0.0) for path in tree) for tree in trees)
    assert most_frequent(counted, 3).expected_tokens == pytest.approx(1 + best)


def test_the_worked_example() -> None:
    table = RankTable(torch.tensor([[0], [2], [1], [2]]), (0, 4), 2)
    replay = table.replay(RankTree(((0,), (1,))))
    assert replay.fewest[:, 0].tolist() == [1, NEVER, 2, NEVER]
    assert replay.accepted(1).tolist() == [1, 0, 0, 0]
    assert replay.visited(1).tolist() == [0, 2, 3]
    assert replay.mean_acceptance_length(1) == pytest.approx(4 / 3)


def test_a_stop_token_counts_as_any_other() -> None:
    """A call gave the stop at the end, though it is no part of the answer."""
    tree = RankTree(((0,), (0, 0), (1,)))
    plain, ended = (table_of(make_traces(stopped)).replay(tree) for stopped in (False, True))
    assert ended.points([3]) == plain.points([3]) and plain.mean_acceptance_length(3) > 1.0


def random_table(seed: int = 0, length: int = 4000) -> RankTable:
    """Heads that miss again soon after a miss, so that where steps start matters."""
    generator = torch.Generator().manual_seed(seed)
    hard = torch.rand(length, generator=generator) < 0.4
    ranks = torch.empty(length, 3, dtype=torch.int64)
    for head in range(3):
        harder = hard.roll(-1 - head) | hard
        chance = torch.where(harder, 0.15, 0.85)
        hit = torch.rand(length, generator=generator) < chance
        ranks[:, head] = torch.where(hit, 0, torch.randint(1, 5, (length,), generator=generator))
        ranks[torch.arange(length) % 100 + head >= 99, head] = 4  # the last token, and what lies beyond
    return RankTable(ranks, tuple(range(0, length + 1, 100)), 4)


def test_the_reach_of_a_chosen_tree_promises_its_replayed_length() -> None:
    table = random_table()
    plain = most_frequent(table.counted, 40)
    for settle_for in (4, 12, 40):
        tree = choose_tree(table, 40, settle_for)
        replayed = table.replay(tree).mean_acceptance_length(settle_for)
        assert tree.first(settle_for).expected_tokens == pytest.approx(replayed, abs=1e-9)
        assert replayed >= table.replay(plain).mean_acceptance_length(settle_for)
    # Plain counts do not see that steps start where the heads have failed.
    assert abs(plain.first(12).expected_tokens - table.replay(plain).mean_acceptance_length(12)) > 0.02


def test_promises_at_several_budgets() -> None:
    table = random_table()
    tree = choose_tree(table, nodes=20, settle_for=8)
    found = tokens_of_tree(table, tree, budgets=(1, 8, 64))
    assert [each.nodes for each in found] == [1, 8, 20]
    for each in found:
        part = tree.first(each.nodes)
        assert each.replayed == pytest.approx(table.replay(part).mean_acceptance_length(each.nodes))
        assert each.counted == pytest.approx(1 + sum(table.counted[path] for path in part.paths))
        product = sum(math.prod(table.accuracy[k][rank] for k, rank in enumerate(path)) for path in part.paths)
        assert each.product == pytest.approx(1 + product)
    assert [each.replayed for each in found] == sorted(each.replayed for each in found)


def test_a_path_that_no_step_followed_has_reach_0() -> None:
    table = random_table(length=400)
    tree = with_survival(table, RankTree(((0,), (3,), (3, 3), (3, 3, 3))), 4)
    assert tree.survival[0] > 0.3 and tree.survival[3] < 0.02


def test_nothing_to_count_or_to_look_up() -> None:
    short = [Trace(torch.zeros(HEADS + 1, dtype=torch.int64), torch.zeros(HEADS + 1, WIDTH))]
    with pytest.raises(DataError, match="at least 5 tokens"):
        choose_tree(table_of(short))
    with pytest.raises(DataError, match="at least 5 tokens"):
        choose_tree(table_of([]))
    with pytest.raises(OptionError, match="ranks must be 1 or more"):
        RankTable.of(HeadGuesses.along(make_heads(), make_lm_head(), short, 1), 0)
    with pytest.raises(DataError, match="as many vectors"):
        Trace(torch.zeros(3, dtype=torch.int64), torch.zeros(2, WIDTH))
    with pytest.raises(OptionError, match="0 nodes or more"):
        most_frequent({(0,): 0.5}, -1)
    table = random_table(length=100)
    for tree in (RankTree.cartesian((1, 1, 1, 1)), RankTree.cartesian((5,))):
        with pytest.raises(OptionError, match="counted were 3 heads and 4 ranks"):
            table.replay(tree)
    assert math.isnan(table_of([]).replay(RankTree(())).mean_acceptance_length(0))


def test_an_empty_tree_is_plain_decoding() -> None:
    assert random_table(length=200).replay(RankTree(())).mean_acceptance_length(0) == 1.0
