"""Trees that a draft model draws: chains that stay on a device hold what those read by the host hold."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from support.tiny_models import PROMPTS, noisy
from truedraft.core import transfers
from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.params import SamplingParams
from truedraft.core.proposal import Draw, Proposal
from truedraft.drafters import DraftModel
from truedraft.drafters.base import DraftRequest
from truedraft.drafters.draws import DraftIds, OpenNode, TopTokens, existing
from truedraft.drafters.tree_builder import TreeBuilder, draw_level, is_fixed_chain

KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2),
]


def proposals_of(drafter: DraftModel, budgets: list[Budget], far: bool) -> list[Proposal]:
    """Proposals for requests of all kinds side by side."""
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(transfers, "waits", lambda device: far)
        batch = [
            DraftRequest(number, params, list(PROMPTS[number]))
            for number, (params, _) in enumerate(zip(KINDS, budgets, strict=True))
        ]
        for request in batch:
            drafter.begin(request)
        noise = [KeyedNoise(request.id, 9, 1) for request in batch]
        proposals = drafter.propose(batch, budgets, noise)
        assert all(proposal.tree.on_device is (far and len(proposal.tree) > 0) for proposal in proposals)
        for request in batch:
            drafter.end(request)
        return proposals


@pytest.mark.parametrize(
    "budgets",
    [
        [Budget(4)] * 4,
        [Budget(4), Budget(1), Budget(0), Budget(3)],
        [Budget(4, nodes=2), Budget(9), Budget(2, width=1), Budget(4, width=0)],
    ],
)
def test_a_chain_is_the_same_wherever_it_is_drawn(budgets: list[Budget]) -> None:
    drafter = DraftModel(noisy("llama", 0.1), num_speculative_tokens=5)
    for ours, theirs in zip(
        proposals_of(drafter, budgets, far=True), proposals_of(drafter, budgets, far=False), strict=True
    ):
        assert ours.tree.tokens.tolist() == theirs.tree.tokens.tolist()
        assert ours.tree.shape == theirs.tree.shape
        assert ours.draws == theirs.draws
        assert (ours.probs is None) == (theirs.probs is None)
        assert ours.probs is None or (theirs.probs is not None and torch.equal(ours.probs, theirs.probs))


def test_which_trees_are_chains_that_no_token_cuts() -> None:
    assert is_fixed_chain(Budget(4), (1, 1, 1, 1))
    assert is_fixed_chain(Budget(1), (1, 3))
    assert is_fixed_chain(Budget(3, width=1), (3, 2, 1))
    assert not is_fixed_chain(Budget(2, width=4), (1, 3))
    assert not is_fixed_chain(Budget(4, min_probability=0.1), (1, 1, 1, 1))


# ------------------------------------------------------------------------------- broken logits

VOCAB = 40
HERE, FAR = torch.device("cpu"), torch.device("cuda")
"""Where a builder believes its tokens to lie; the logits are on the CPU."""


def logits(rows: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 2


def drafted(scores: Tensor, params: SamplingParams, device: torch.device, width: int = 1) -> list[Proposal]:
    """Trees of one level, one from each row of logits."""
    builders = [
        TreeBuilder(None, DraftRequest(i, params, [0]), Budget(1, 3), KeyedNoise(70 + i, 5, 1), (width,), device)  # type: ignore[arg-type]
        for i in range(len(scores))
    ]
    assert draw_level(builders, scores) == []
    return [builder.proposal() for builder in builders]


@pytest.mark.parametrize("device", [HERE, FAR], ids=["host", "device"])
@pytest.mark.parametrize("params", [KINDS[0], *KINDS[2:]], ids=["greedy", "sampled", "coupled"])
@pytest.mark.parametrize("branching", [(1, 1, 1), (3, 2, 1)])
def test_a_tree_is_what_is_drawn_node_by_node(
    branching: tuple[int, ...], params: SamplingParams, device: torch.device
) -> None:
    """Two trees of one computation are those of a draw at a time, over all ids or some, cut by probabilities or not."""
    for ids, least in ((None, 0.0), (DraftIds(torch.arange(VOCAB) * 2 + 1, 2 * VOCAB + 1), 0.0), (None, 0.15)):
        budgets = [Budget(3, 3, nodes, least) for nodes in (14, 9)]
        builders = [
            TreeBuilder(None, DraftRequest(i, params, [0]), budget, KeyedNoise(i, 5, 1), branching, device)  # type: ignore[arg-type]
            for i, budget in enumerate(budgets)
        ]
        expected: list[list[tuple[int, int]]] = [[], []]  # parents and tokens of each tree
        draws: list[list[Draw]] = [[], []]
        probs: list[list[Tensor]] = [[], []]
        opened = [[-1], [-1]]
        for depth in range(3):
            assert [list(each.open) for each in builders] == opened
            growing = [builder for builder, own in zip(builders, opened, strict=True) if own]
            if not growing:
                break
            scores = logits(sum(map(len, opened))) * (1 + depth)
            for tree, rows in enumerate(scores.split(list(map(len, opened)))):
                found, kept, first = expected[tree], [], len(expected[tree])
                for node, row in zip(opened[tree], rows if ids is None else ids.whole(rows), strict=True):
                    width = max(0, min(branching[depth], budgets[tree].nodes - first))
                    one = [OpenNode(KeyedNoise(tree, 5, 1), depth, first, max(width, 1))]
                    first += width
                    tokens, own = builders[tree].drawing.draw(row[None], params, one)
                    chances = torch.softmax(row, -1) if own is None else own[0]
                    dist = -1 if own is None else len(probs[tree])
                    probs[tree] += [] if own is None else [chances]
                    for token in [each for each in tokens[0, :width].tolist() if each < len(row)]:
                        kept += [len(found)] if chances[token] >= budgets[tree].min_probability else []
                        draws[tree].append(Draw(len(found), dist, builders[tree].drawing.kind))
                        found.append((node, token))
                opened[tree] = kept if depth < 2 and len(found) < budgets[tree].nodes else []
            grow_on = draw_level(growing, scores, ids)
            assert grow_on == [builder for builder, own in zip(builders, opened, strict=True) if own]
        for builder, found, drawn, own in zip(builders, expected, draws, probs, strict=True):
            made = builder.proposal()
            assert list(zip(made.tree.shape.parents, made.tree.tokens.tolist(), strict=True)) == found
            assert [draw for row in made.draws for draw in row] == drawn
            assert (made.probs is None) == (not own)
            if made.probs is not None:
                torch.testing.assert_close(made.probs, torch.stack(own), rtol=0, atol=1e-6)


@pytest.mark.parametrize("params", KINDS[2:], ids=["sampled", "coupled"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_chain_on_a_device_goes_on_with_a_stand_in_where_the_logits_are_broken(
    params: SamplingParams, bad: float
) -> None:
    scores = logits(3)
    clean = drafted(scores, params, FAR)
    scores[1] = bad
    ours = drafted(scores, params, FAR)
    assert ours[1].tree.tokens.tolist() == [0]
    assert ours[1].probs is not None
    assert ours[1].probs.tolist() == [[1.0] + [0.0] * (VOCAB - 1)]
    for number in (0, 2):
        one, other = ours[number].probs, clean[number].probs
        assert ours[number].tree.tokens.tolist() == clean[number].tree.tokens.tolist()
        assert one is not None and other is not None and torch.equal(one, other)


@pytest.mark.parametrize("params", KINDS[2:], ids=["sampled", "coupled"])
@pytest.mark.parametrize("width", [1, 3])
def test_a_tree_that_the_host_reads_ends_where_the_logits_are_broken(params: SamplingParams, width: int) -> None:
    scores = logits(3)
    scores[1, 11] = math.nan
    for device in (HERE, FAR) if width > 1 else (HERE,):
        assert [len(each.tree) for each in drafted(scores, params, device, width)] == [width, 0, width]


def test_a_greedy_draft_of_broken_logits_is_some_token() -> None:
    scores = logits(2)
    scores[0] = math.nan
    first, second = drafted(scores, SamplingParams(), FAR)
    assert first.probs is None
    assert 0 <= int(first.tree.tokens[0]) < VOCAB
    assert second.tree.tokens.tolist() == [int(scores[1].argmax())]


def test_a_row_without_mass_has_no_likeliest_token() -> None:
    """Where the host does not see that, token 0 stands in, as a deterministic candidate."""
    logits = torch.tensor([[-torch.inf] * 4, [-torch.inf, 2.0, -torch.inf, -torch.inf]])
    nodes = [OpenNode(KeyedNoise(0, 0, 0), 0, 0, 1)] * 2
    tokens, probs = TopTokens().draw(logits, SamplingParams(), nodes)
    assert tokens.tolist() == [[4], [1]] and probs is None
    assert existing(tokens[:, 0], probs, 4)[0].tolist() == [0, 1]
    wide = [node._replace(width=3) for node in nodes]
    assert TopTokens().draw(logits, SamplingParams(), wide)[0].tolist() == [[4, 4, 4], [1, 4, 4]]
