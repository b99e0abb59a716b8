"""Trees counted on traces and replayed along them, against Python loops, trees drafted by hand, and the engine."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import cross_entropy

from support.head_models import SHARPENED, hidden_of
from support.tiny_models import PROMPTS, VOCAB, packed, stock
from truedraft import Engine, SamplingParams
from truedraft.core.rank_tree import RankPath, RankTree, likeliest_paths
from truedraft.core.stats import Counters
from truedraft.drafters.heads.acceptance import AcceptanceOdds
from truedraft.drafters.heads.calibration import Calibration, tree_curves
from truedraft.errors import DataError, OptionError
from truedraft.kinds.medusa.counted_trees import (
    CountedTree,
    RankTable,
    choose_tree,
    most_frequent,
    replay_likeliest,
    tokens_of_tree,
    with_survival,
)
from truedraft.kinds.medusa.drafter import Medusa
from truedraft.kinds.medusa.guess_trees import GuessTrees
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.kinds.medusa.traced_guesses import LOGITS, HeadGuesses, guesses_along, true_ranks
from truedraft.measure.replay import CURVE_NODES, NEVER, Trace, TraceReplay, starts_of
from truedraft.models.lm_head import LmHead, LogitFinish

HEADS, WIDTH, IDS, RANKS, LIMIT = 3, 6, 7, 3, 20
LENGTHS = (9, 2, 17, 1, 5, 30)


def make_heads(tied: bool = True) -> MedusaHeads:
    heads = MedusaHeads(MedusaConfig(WIDTH, IDS, heads=HEADS, tied=tied))
    generator = torch.Generator().manual_seed(1)
    for weight in heads.parameters():
        weight.data = torch.randn(weight.shape, generator=generator)
    return heads


def make_lm_head() -> LmHead:
    """Rounded coarsely, so that many logits, and with them paths, are equal and the order of ids decides."""
    generator = torch.Generator().manual_seed(2)
    return LmHead(torch.randn(IDS, WIDTH, generator=generator).round(), None, LogitFinish(cap=5.0))


def make_traces(stopped: bool = False) -> list[Trace]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for length in LENGTHS:
        tokens = torch.randint(IDS, (length,), generator=generator)
        found.append(Trace(tokens, torch.randn(length, WIDTH, generator=generator).round(), stopped))
    return found


def guesses(traces: list[Trace] | None = None, tied: bool = True, logits_at_once: int = LOGITS) -> HeadGuesses:
    some = make_traces() if traces is None else traces
    return HeadGuesses.along(make_heads(tied), make_lm_head(), some, 64, logits_at_once)


def replayed_by_hand(accepted: list[int]) -> float:
    """Emitted tokens per call, of accepted ones at each position; a stop counts too."""
    calls = emitted = place = 0
    for length in LENGTHS:
        end = place + length - 1
        while place < end:
            calls, emitted, place = calls + 1, emitted + 1 + accepted[place], place + 1 + accepted[place]
        place = end
    return emitted / calls


def ranks_at(heads: MedusaHeads, lm_head: LmHead, trace: Trace, place: int) -> RankPath:
    """Ranks of the true tokens behind a place, by sorting; RANKS where one is missed, the last one or beyond."""
    with torch.no_grad():
        logits = heads.logits(trace.hidden[place : place + 1], lm_head, lm_head.finish)[:, 0]
    ranks = []
    for head in range(HEADS):
        after = place + 1 + head
        order = sorted(range(IDS), key=lambda token: (-float(logits[head, token]), token))
        rank = order.index(int(trace.tokens[after])) if after < len(trace.tokens) - 1 else RANKS
        ranks.append(min(rank, RANKS))
    return tuple(ranks)


def table_of(traces: list[Trace], tied: bool = True, logits_at_once: int = LOGITS) -> RankTable:
    return RankTable.of(guesses(traces, tied, logits_at_once), RANKS)


def table_by_hand(heads: MedusaHeads, lm_head: LmHead, traces: list[Trace]) -> list[list[RankPath]]:
    return [[ranks_at(heads, lm_head, trace, i) for i in range(len(trace.tokens) - 1)] for trace in traces]


def prefixes(path: RankPath) -> list[RankPath]:
    known = list(itertools.takewhile(lambda rank: rank < RANKS, path))
    return [tuple(known[: depth + 1]) for depth in range(len(known))]


def accepted(tree: RankTree, path: RankPath) -> int:
    return sum(prefix in tree.paths for prefix in prefixes(path))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("logits_at_once", [1, 4 * HEADS * IDS, 1 << 24])
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
        by_hand_too = replayed_by_hand([accepted(tree, path) for path in flat])
        (found_tokens,) = tokens_of_tree(table, tree, [nodes])
        assert found_tokens.replayed == replay.mean_acceptance_length(nodes) == pytest.approx(by_hand_too)
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
        RankTable.of(guesses(short), 0)
    with pytest.raises(DataError, match="as many vectors"):
        Trace(torch.zeros(3, dtype=torch.int64), torch.zeros(2, WIDTH))
    with pytest.raises(OptionError, match="0 nodes or more"):
        most_frequent({(0,): 0.5}, -1)
    with pytest.raises(OptionError, match="1 or more"):
        replay_likeliest(guesses(), most=0)
    table = random_table(length=100)
    for tree in (RankTree.cartesian((1, 1, 1, 1)), RankTree.cartesian((5,))):
        with pytest.raises(OptionError, match="counted were 3 heads and 4 ranks"):
            table.replay(tree)
    for nothing in (table_of([]).replay(RankTree(())), replay_likeliest(guesses([]))):
        assert math.isnan(nothing.mean_acceptance_length(0))
    assert table.replay(RankTree(())).mean_acceptance_length(0) == 1.0


# ------------------------------------------------------------------------------- trees chosen at each step


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
            of_node = {int(order[head, row, places[child] % IDS]): child for child in shape.children[node + 1]}
            if token not in of_node:
                break
            node, count = of_node[token], count + 1
        found.append(count)
    return found


@pytest.mark.parametrize("logits_at_once", [1, 7 * HEADS * IDS, 1 << 24])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_tree_accepts_what_the_replay_says(logits_at_once: int, stopped: bool) -> None:
    traces = make_traces(stopped)
    replay = replay_likeliest(guesses(traces, logits_at_once=logits_at_once), most=LIMIT)
    assert replay.fewest.shape == (sum(length - 1 for length in LENGTHS), HEADS)
    assert all((late >= early).all() for early, late in pairwise(replay.fewest.unbind(1)))
    for nodes in range(1, LIMIT + 1):
        expected = accepted_by_trees(nodes, stopped)
        assert replay.accepted(nodes).tolist() == expected
        assert replay.mean_acceptance_length(nodes) == pytest.approx(replayed_by_hand(expected))
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
    assert starts_of(make_traces(stopped=True)) == (0, 8, 9, 25, 25, 29, 58)


# ------------------------------------------------------------------------------- against the engine


@cache
def traces() -> list[Trace]:
    """Plain decoding's greedy answers, which repeat, with the vectors from which their tokens were drawn."""
    target, found = packed("llama"), []
    answers = Engine(target).generate([list(each) for each in PROMPTS], SamplingParams(max_tokens=80))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        hidden = hidden_of(target, [*prompt, *answer.token_ids])
        first = len(prompt) - 1
        found.append(Trace(torch.tensor(answer.token_ids), hidden[first : first + len(answer.token_ids)]))
    return found


@cache
def fitted() -> tuple[MedusaHeads, LmHead]:
    """Heads that know the traces halfway, so that they are right often and not always."""
    lm_head = LmHead.of(stock("llama"))
    made = MedusaHeads(MedusaConfig(packed("llama").head_width, VOCAB, heads=HEADS, reads_token=True))
    optimizer = torch.optim.Adam(made.parameters(), lr=0.02)
    for _ in range(12):
        loss = torch.zeros(())
        for trace in traces():
            places = torch.arange(trace.steps - HEADS)
            embedded = lm_head.embed(trace.tokens[places])
            logits = made.logits(trace.hidden[places].clone(), lm_head, lm_head.finish, embedded)
            for head in range(HEADS):
                loss = loss + cross_entropy(logits[head], trace.tokens[places + 1 + head])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return made.eval().requires_grad_(False), lm_head


@pytest.mark.parametrize("way", ["counted", "raw", "calibrated"])
@pytest.mark.parametrize("nodes", [1, 6, 24])
def test_the_engine_keeps_the_promise_call_by_call(way: str, nodes: int) -> None:
    """Replay along what the target wrote alone is what the engine then measures."""
    heads, lm_head = fitted()
    found, tree = HeadGuesses.along(heads, lm_head, traces(), 32), None
    if way == "counted":
        table = RankTable.of(found, 6)
        tree = choose_tree(table, nodes, settle_for=nodes)
        replay, drafter = table.replay(tree), Medusa(heads, {"greedy": tree, "sampled": tree}, nodes=nodes)
    else:
        survival = AcceptanceOdds.of(SHARPENED) if way == "calibrated" else None
        replay = replay_likeliest(found, survival, most=32)
        calibration = Calibration({} if survival is None else {"greedy": survival})
        drafter = Medusa(heads, GuessTrees(HEADS, calibration=calibration), nodes=nodes)
    engine = Engine(packed("llama"), drafter, controller="fixed")
    answers = engine.generate([list(prompt) for prompt in PROMPTS], SamplingParams(max_tokens=80))
    assert [answer.token_ids for answer in answers] == [trace.tokens.tolist() for trace in traces()]
    stats = sum((answer.stats for answer in answers), Counters())
    assert stats.target_calls == len(replay.visited(nodes))
    assert stats.mean_acceptance_length == pytest.approx(replay.mean_acceptance_length(nodes))
    assert tree is None or tree.expected_tokens == pytest.approx(stats.mean_acceptance_length)
    assert stats.mean_acceptance_length > 1.1  # else there would be nothing to keep
