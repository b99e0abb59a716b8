"""Portfolios: names and limits of their members, merged proposals, and what each member is told of its own."""

from __future__ import annotations

import pytest
import torch

from support.ngram_tables import table_of
from truedraft import Engine, SamplingParams
from truedraft.core.budget import Budget
from truedraft.core.proposal import Draw, DrawKind, Proposal
from truedraft.core.stats import DraftShare
from truedraft.core.tree import TokenTree
from truedraft.drafters import DraftModel, Lookahead, NgramDrafter, NoDrafter, PromptLookup, SuffixDrafter
from truedraft.drafters.base import Features
from truedraft.drafters.portfolio import MergedProposal, Portfolio, joint_features, with_members
from truedraft.errors import OptionError
from truedraft.testing import MarkovModel, ScriptedDrafter


def scripted(depth: int = 3, nodes: int = 4) -> ScriptedDrafter:
    return ScriptedDrafter(lambda tokens: [], depth, nodes)


def chain(*tokens: int) -> Proposal:
    return Proposal.deterministic(TokenTree.chain(list(tokens)))


def drawn(*tokens: int, vocab: int = 9) -> Proposal:
    return Proposal.chain(torch.tensor(tokens), torch.full((len(tokens), vocab), 1 / vocab))


# ------------------------------------------------------------------------------------------ members


def test_names_limits_and_kinds() -> None:
    members = [scripted(), PromptLookup(), scripted(), scripted()]
    portfolio = Portfolio(members)
    assert list(portfolio.members) == ["scripted", "prompt-lookup", "scripted-2", "scripted-3"]
    assert list(portfolio.members.values()) == members
    assert list(Portfolio({"x": members[0], "y": members[2]}).members) == ["x", "y"]
    portfolio = Portfolio([scripted(3, 4), PromptLookup(6), DraftModel(MarkovModel.random(4, 1), 2)])
    assert portfolio.limits == Budget(6, 4 + 1 + 1, 4 + 6 + 2)
    assert portfolio.kinds == {DrawKind.DETERMINISTIC, DrawKind.INDEPENDENT}
    with pytest.raises(OptionError, match="at least one drafter"):
        Portfolio([])
    with pytest.raises(OptionError, match="'portfolio' is a portfolio"):
        Portfolio([PromptLookup(), Portfolio([scripted()])])
    with pytest.raises(OptionError, match="asked one by one"):
        Portfolio([scripted()]).propose([], [], [])


@pytest.mark.parametrize("controller", ["in-turn", "goodput"])
def test_members_of_all_kinds_change_no_answer(controller: str) -> None:
    target = MarkovModel.random(5, seed=3)
    members = [NgramDrafter(table_of(target)), Lookahead(3, 3, 2), PromptLookup(min_ngram=1), SuffixDrafter()]
    drafter = Portfolio(members)
    params = [SamplingParams(max_tokens=24, temperature=heat, seed=4) for heat in (0.0, 0.8, 1.0)]
    answers = Engine(target, drafter, controller=controller).generate([[1, 0, 3]] * 3, params)
    plain = Engine(target).generate([[1, 0, 3]] * 3, params)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
    assert not any(answer.warnings for answer in answers)
    used = {name for answer in answers for name, counts in answer.stats.by_drafter.items() if counts.accepted_tokens}
    assert controller != "in-turn" or used == {*drafter.members}


def test_other_members_in_the_same_places() -> None:
    alone, other = scripted(), PromptLookup()
    assert with_members(alone, {"scripted": other}) is other
    both = with_members(Portfolio([alone, NoDrafter()]), {"scripted": other, "none": alone})
    assert isinstance(both, Portfolio) and list(both.members.items()) == [("scripted", other), ("none", alone)]


def test_features_of_all_members_are_asked_of_the_target_at_once() -> None:
    class Last(ScriptedDrafter):
        features: Features | None = Features(layers=(5, 1))

    class All(ScriptedDrafter):
        features: Features | None = Features("all", logits=True, layers=(3, 1))

    assert joint_features(scripted()) is None
    assert joint_features(Portfolio([scripted(), PromptLookup()])) is None
    assert joint_features(Portfolio([scripted(), Last(lambda tokens: [])])) == Features(layers=(1, 5))
    both = Portfolio([Last(lambda tokens: []), All(lambda tokens: [])])
    assert joint_features(both) == Features("all", logits=True, layers=(1, 3, 5))


# ------------------------------------------------------------------------------------------ merged proposals


def test_what_is_alone_stays_as_it_is() -> None:
    own = drawn(5, 8, 2)
    merged = MergedProposal.of({"a": own})
    assert merged.proposal is own
    assert merged.own("a") == (own, None)
    assert merged.own_path("a", (0, 1)) == (0, 1)
    assert merged.shares((0, 1), True) == (DraftShare("a", 3, 3, (0, 1), 3),)
    assert merged.shares((0, 1, 2), False) == (DraftShare("a", 3, 3, (0, 1, 2), 3),)
    nothing = MergedProposal.of({})
    assert not len(nothing.proposal.tree)
    assert nothing.own("a") == (Proposal.empty(), None)
    assert nothing.own_path("a", ()) == ()
    assert nothing.shares((), False) == ()


def test_merged_chains_by_hand() -> None:
    """5 7 and 5 8 share their first node, whose two draws are both judged."""
    merged = MergedProposal.of({"a": chain(5, 7), "b": drawn(5, 8)})
    assert merged.proposal.tree.host_ids == [5, 7, 8]
    assert merged.nodes == {"a": (0, 1), "b": (0, 2)}
    kinds = DrawKind.DETERMINISTIC, DrawKind.INDEPENDENT
    assert merged.proposal.draws[0] == (Draw(0, -1, kinds[0]), Draw(0, 0, kinds[1]))
    assert merged.proposal.draws[1] == (Draw(1, -1, kinds[0]), Draw(2, 1, kinds[1]))
    assert merged.own("c") == (Proposal.empty(), ()), "it proposed nothing of all that"
    assert merged.own_path("a", (0, 2)) == (0,)
    assert merged.own_path("b", (0, 2)) == (0, 1)
    assert merged.own_path("c", (0, 2)) == ()


def test_shares_by_hand() -> None:
    """Verdicts came to places of a path that a drafter drew for, whoever's token stayed; below another's to none."""
    merged = MergedProposal.of({"a": chain(5, 7, 1), "b": drawn(5, 8)})

    def shares(path: tuple[int, ...], rejected: bool) -> list[tuple[tuple[int, ...], int]]:
        found = merged.shares(path, rejected)
        assert [(each.drafter, each.nodes, each.depth) for each in found] == [("a", 3, 3), ("b", 2, 2)]
        return [(each.path, each.judged) for each in found]

    ids = merged.proposal.tree.host_ids
    seven, one, eight = (ids.index(token) for token in (7, 1, 8))
    assert shares((), True) == [((), 1), ((), 1)]
    assert shares((0,), True) == [((0,), 2), ((0,), 2)]
    assert shares((0, seven), True) == [((0, 1), 3), ((0,), 2)]
    assert shares((0, eight), False) == [((0,), 2), ((0, 1), 2)]
    assert shares((0, seven, one), False) == [((0, 1, 2), 3), ((0,), 2)]
    assert shares((0,), False) == [((0,), 1), ((0,), 1)], "cut by the end of the answer: nobody was rejected"


def test_trees_that_share_nothing_keep_their_own_numbers() -> None:
    one = Proposal.deterministic(TokenTree.from_paths([[1, 2], [3]]))
    other = Proposal.deterministic(TokenTree.from_paths([[4], [5, 6], [5, 7]]))
    merged = MergedProposal.of({"one": one, "other": other})
    for name, own in (("one", one), ("other", other)):
        for node in range(len(own.tree)):
            place = merged.nodes[name][node]
            assert merged.proposal.tree.path_tokens(place) == own.tree.path_tokens(node)
            assert merged.own_path(name, merged.proposal.tree.shape.path(place)) == own.tree.shape.path(node)
            assert merged.own_path("other" if name == "one" else "one", merged.proposal.tree.shape.path(place)) == ()
