"""Proposals: consistent trees, draws and distributions; merging keeps every path, every draw and their order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from truedraft.core.proposal import Draw, DrawCheck, DrawKind, Proposal, merge
from truedraft.core.tree import TokenTree, TreeShape

VOCAB = 4
quick = settings(max_examples=150, deadline=None, derandomize=True)
IND, WOR, DET = DrawKind.INDEPENDENT, DrawKind.WITHOUT_REPLACEMENT, DrawKind.DETERMINISTIC


@st.composite
def proposals(draw: st.DrawFn) -> Proposal:
    """Random trees without equal siblings; several draws may name one child; each distribution is recognisable."""
    paths = draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4).map(tuple), max_size=5))
    tree = TokenTree.from_paths(paths)
    dists = 0
    draws: list[tuple[Draw, ...]] = []
    for children in tree.shape.children:
        if not children:
            draws.append(())
            continue
        named = draw(st.permutations([*children, *draw(st.lists(st.sampled_from(children), max_size=2))]))
        kind = draw(st.sampled_from([IND, WOR, DET, DrawKind.COUPLED]))
        here = []
        for child in named:
            fixed = kind is DET or draw(st.booleans())
            here.append(Draw(child, -1 if fixed else dists, DET if fixed else kind))
        if any(each.dist >= 0 for each in here):
            dists += 1
        draws.append(tuple(here))
    seeded = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    return Proposal(tree, tuple(draws), torch.rand(dists, VOCAB, generator=seeded) if dists else None)


def described(proposal: Proposal) -> dict[tuple[int, ...], list[tuple]]:
    """For each path of an inner node its draws in order: token, kind, and the distribution's own numbers."""
    found = {}
    for row, draws in enumerate(proposal.draws):
        path = proposal.tree.path_tokens(row - 1)
        found.setdefault(path, []).extend(
            (
                proposal.tree.host_ids[d.child],
                d.kind,
                None if d.dist < 0 else tuple(proposal.probs[d.dist].tolist()),
            )
            for d in draws
        )
    return found


@quick
@given(st.lists(proposals(), min_size=1, max_size=4))
def test_merging_keeps_paths_draws_distributions_and_order(parts: list[Proposal]) -> None:
    for part in parts:
        part.check()
    merged = merge(parts)[0]
    merged.check()
    paths = [merged.tree.path_tokens(node) for node in range(len(merged.tree))]
    assert len(set(paths)) == len(paths)
    assert set(paths) == {part.tree.path_tokens(node) for part in parts for node in range(len(part.tree))}
    expected: dict[tuple[int, ...], list[tuple]] = {}
    for part in parts:
        for path, draws in described(part).items():
            expected.setdefault(path, []).extend(draws)
    assert described(merged) == expected  # repeats kept, earlier proposals first, each draw with its own distribution
    assert merged.kinds == frozenset().union(*(part.kinds for part in parts))
    # Rows that two proposals number alike stay apart: no draw of one loses tokens to the other.
    rows = sum(0 if part.probs is None else len(part.probs) for part in parts)
    assert (0 if merged.probs is None else len(merged.probs)) == rows


@quick
@given(proposals())
def test_merging_one_proposal_changes_nothing(proposal: Proposal) -> None:
    merged = merge([proposal])[0]
    assert merged.tree.host_ids == proposal.tree.host_ids
    assert merged.tree.shape == proposal.tree.shape
    assert merged.draws == proposal.draws
    assert merged.probs is proposal.probs or torch.equal(merged.probs, proposal.probs)
    beside = merge([Proposal.empty(), proposal, Proposal.empty()])[0]
    assert described(beside) == described(proposal)


def test_the_worked_example_of_merge() -> None:
    probs = torch.eye(9)[:2]
    merged, nodes = merge(
        [Proposal.chain(torch.tensor([5, 7]), probs), Proposal.chain(torch.tensor([5, 8]), probs + 1)]
    )
    assert nodes == [(0, 1), (0, 2)]
    assert merged.tree.host_ids == [5, 7, 8]
    assert merged.tree.shape.parents == (-1, 0, 0)
    assert merged.draws == (
        (Draw(0, 0, IND), Draw(0, 2, IND)),
        (Draw(1, 1, IND), Draw(2, 3, IND)),
        (),
        (),
    )
    assert torch.equal(merged.probs, torch.cat([probs, probs + 1]))


def test_merging_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        merge([])


# ------------------------------------------------------------------------------- building


def test_chains() -> None:
    probs = torch.rand(3, VOCAB)
    chain = Proposal.chain(torch.tensor([1, 2, 3]), probs, DrawKind.COUPLED)
    chain.check()
    assert chain.probs is probs  # the very tensor that was sampled from
    assert chain.tree.shape.is_chain
    assert chain.draws == (*((Draw(i, i, DrawKind.COUPLED),) for i in range(3)), ())
    assert chain.kinds == {DrawKind.COUPLED}
    assert Proposal.chain(torch.tensor([1]), probs).kinds == {IND}
    assert Proposal.chain(torch.tensor([], dtype=torch.int64), probs[:0]).draws == ((),)


def test_fixed_trees() -> None:
    proposal = Proposal.deterministic(TokenTree.from_paths([[1, 2], [1, 3], [0]]))
    proposal.check()
    assert proposal.kinds == {DET}
    assert proposal.probs is None
    assert [[draw.child for draw in draws] for draws in proposal.draws] == [[0, 3], [1, 2], [], [], []]


def test_an_empty_proposal() -> None:
    empty = Proposal.empty()
    empty.check()
    assert len(empty.tree) == 0
    assert empty.draws == ((),)
    assert empty.kinds == frozenset()


TREE = TokenTree(torch.tensor([1, 2]), TreeShape((-1, -1)))
LAWS = torch.full((1, VOCAB), 0.25)


@pytest.mark.parametrize(
    ("draws", "probs", "message"),
    [
        (((Draw(0, 0, IND),), (), ()), LAWS, "tree row 0 name other nodes"),
        (((Draw(0, 0, IND), Draw(1, 0, IND)), (Draw(1, 0, IND),), ()), LAWS, "tree row 1 name other nodes"),
        (((Draw(0, 0, IND), Draw(1, 1, IND)), (), ()), LAWS, "names no distribution"),
        (((Draw(0, 0, IND), Draw(1, -1, IND)), (), ()), LAWS, "names no distribution"),
        (((Draw(0, -1, DET), Draw(1, 0, DET)), (), ()), LAWS, "names no distribution"),
        (((Draw(0, 0, IND), Draw(1, 0, IND)), (), ()), None, "names no distribution"),
    ],
)
def test_contradictions_are_found(draws: tuple, probs: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Proposal(TREE, draws, probs).check()


def test_a_tree_row_for_the_root_and_for_each_node() -> None:
    with pytest.raises(ValueError, match="has 3 tree rows, got 2"):
        Proposal(TREE, ((), ()))
    repeated = Proposal(TREE, ((Draw(0, 0, IND), Draw(1, 0, IND), Draw(0, 0, IND)), (), ()), LAWS)
    repeated.check()  # two draws may name one child


def dist_faults(*proposals: Proposal) -> dict[int, set[int]]:
    check = DrawCheck(proposals, torch.device("cpu"))
    return check.unsound([each.flatten().tolist() for each in check.wanted])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_distributions_are_checked_within_what_rounding_explains(dtype: torch.dtype) -> None:
    """Over a vocabulary as large as any; half precision rounds each entry to three decimals or less."""
    logits = torch.randn(3, 200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4
    probs = torch.softmax(logits, dim=-1).to(dtype)
    chain = Proposal.chain(probs.argmax(dim=-1), probs)
    wrong = probs.clone()
    wrong[1] *= 1.02
    assert dist_faults(chain, chain) == {}
    assert dist_faults(chain, Proposal(chain.tree, chain.draws, wrong)) == {1: {1}}


def test_draws_of_a_tree_are_checked_by_the_distributions_they_name() -> None:
    """Nodes 0 and 1 at the root come from distribution 1, node 2 below node 0 from distribution 0; distribution 2 is
    named by a coupled draw."""
    probs = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.0, 0.8], [7.0, 7.0, 7.0]])
    kind = DrawKind.WITHOUT_REPLACEMENT
    draws = (
        (Draw(0, 1, kind), Draw(1, 1, kind)),
        (Draw(2, 0, kind),),
        (Draw(3, 2, DrawKind.COUPLED),),
        (),
        (),
    )
    for tokens, expected in (([0, 2, 1, 0], {}), ([0, 1, 1, 0], {0: {0}}), ([0, 2, 2, 0], {0: {1}})):
        proposal = Proposal(TokenTree.of_ids(tokens, TreeShape((-1, -1, 0, 1))), draws, probs)
        proposal.check()
        assert dist_faults(proposal) == expected
    without = proposal.without_draws({1})
    assert without.draws == (draws[0], (), *draws[2:]) and without.tree is proposal.tree
    assert dist_faults(without) == {}
    assert dist_faults(Proposal.empty()) == {}
