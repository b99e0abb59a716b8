"""Trees of what followed; what is read of others, and what is told them; answers stay those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from support.tiny_models import PROMPTS, packed
from truedraft import Engine, SamplingParams
from truedraft.core.budget import Budget
from truedraft.drafters import PromptLookup, SuffixDrafter, from_spec
from truedraft.drafters.base import DraftRequest
from truedraft.drafters.suffix import SuffixStore
from truedraft.drafters.suffix.drafter import tree_of
from truedraft.drafters.suffix.index import END, Matches
from truedraft.engine.policy import Effort, measure_drafter
from truedraft.errors import OptionError

GREEDY = SamplingParams(max_tokens=24)
WIDE = Budget(8, 8, 24)


def paths(matches: Matches, depth: int = 8, nodes: int = 24, width: int = 8) -> list[tuple[int, ...]]:
    tree = tree_of(matches, depth, nodes, width)
    return [tree.path_tokens(leaf) for leaf in tree.shape.leaves]


def chains(
    drafter: SuffixDrafter | PromptLookup, request: DraftRequest, budget: Budget = WIDE
) -> list[tuple[int, ...]]:
    (proposal,) = drafter.propose([request], [budget], [])
    return [proposal.tree.path_tokens(leaf) for leaf in proposal.tree.shape.leaves]


def stored(*texts: Sequence[int], scope: object = None) -> SuffixDrafter:
    drafter = SuffixDrafter(SuffixStore(1 << 12))
    for text in texts:
        drafter.store.add(scope, text)
    drafter.store.settle()
    return drafter


def test_the_likeliest_nodes_are_taken() -> None:
    followed = Matches([3, 3, 3], [[5, 6, END], [5, 7, 9], [8, END, END]])
    assert sorted(paths(followed)) == [(5, 6), (5, 7, 9), (8,)]
    assert sorted(paths(followed, nodes=3)) in ([(5, 6), (5, 7)], [(5, 6), (8,)], [(5, 7), (8,)])
    assert paths(followed, nodes=1) == [(5,)]
    assert sorted(paths(followed, depth=1)) == [(5,), (8,)]
    assert [path[0] for path in paths(followed, width=1)] == [5]
    assert paths(Matches([], [])) == []


def test_a_longer_match_counts_more_than_two_shorter_ones() -> None:
    followed = Matches([5, 2, 2], [[1], [2], [2]])
    assert paths(followed, nodes=1) == [(1,)]
    assert paths(Matches([5, 4, 4, 4], [[1], [2], [2], [2]]), nodes=1) == [(2,)]


def test_it_drafts_what_others_were_answered() -> None:
    text = list(range(60))
    drafter = stored(text)
    request = DraftRequest(0, GREEDY, [7, 7, *text[:20]])
    drafter.begin(request)
    assert chains(drafter, request) == [tuple(range(20, 28))]
    assert chains(drafter, request, Budget(3, 1, 24)) == [(20, 21, 22)]
    assert chains(drafter, request, Budget(0, 0, 0)) == []
    drafter.end(request)
    assert drafter.held.requests == frozenset()


def test_hints_tell_long_matches_from_short_ones_and_doubt_from_certainty() -> None:
    drafter = stored(list(range(60)), [50, 51, 1, 1, 1, 1, 1, 1, 1], [50, 51, 2, 2, 2, 2, 2, 2, 2])
    kinds = set()
    for number, tokens in enumerate(([9, 0, 1], list(range(40)), [9, 50, 51], [90, 91, 92])):
        request = DraftRequest(number, GREEDY, tokens)
        drafter.begin(request)
        hint = drafter.hint(request)
        kinds.add(hint.kind if hint.finds else None)
    assert len(kinds) == 4 and None in kinds


@pytest.mark.parametrize("batch", [1, 3])
def test_answers_are_those_of_plain_decoding_and_repeated_ones_cost_a_step_for_a_path(batch: int) -> None:
    target, drafter = packed("llama"), SuffixDrafter(num_speculative_tokens=5)
    expected = Engine(target).generate([list(each) for each in PROMPTS], GREEDY)
    engine = Engine(target, drafter, controller="fixed", max_batch=batch)
    for turn in range(3):
        answers = engine.generate([list(each) for each in PROMPTS], GREEDY)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
        drafter.store.settle()
        if turn:  # prompts of one token find nothing before their second one
            assert answers[1].stats.mean_acceptance_length >= 0.9 * (5 + 1)


def test_scopes_are_namespaces() -> None:
    target, drafter = packed("llama"), SuffixDrafter()
    engine = Engine(target, drafter, controller="fixed")
    for scope in ("a", "b", "a"):
        request = engine.submit(list(PROMPTS[1]), GREEDY, scope=scope)
        while not request.closed:
            engine.step()
        answer = request.pieces[-1].answer
        assert answer is not None
        drafter.store.settle()
    assert answer.stats.mean_acceptance_length > 5
    assert len(drafter.store) == 2 * (37 + 24 + 1)


def test_rehearsals_leave_nothing() -> None:
    drafter = SuffixDrafter()
    measure_drafter(drafter, packed("llama"), effort=Effort(0.05, 1, 2))
    drafter.store.settle()
    assert len(drafter.store) == 0


def test_words(tmp_path: object) -> None:
    target = packed("llama")
    made = from_spec(f"suffix:{tmp_path}/kept,num_speculative_tokens=7,nodes=9,max_tokens=5000", target)
    assert (made.limits.depth, made.limits.nodes) == (7, 9)
    assert isinstance(made, SuffixDrafter)
    answer = Engine(target, made).generate(list(PROMPTS[1]), GREEDY)
    made.store.settle()
    again = from_spec(f"suffix:{tmp_path}/kept", target)
    assert isinstance(again, SuffixDrafter)
    assert again.store.find(None, PROMPTS[1], 24).following == [list(answer.token_ids)]
    for word, said in (
        ("suffix,nodes=0", "nodes must be 1 or more"),
        ("suffix,max_tokens=0", "max_tokens must be 1 or more"),
        ("suffix,num_speculative_tokens=0", "num_speculative_tokens must be 1 or more"),
        (f"suffix:{tmp_path}", "cannot be read or made"),
    ):
        with pytest.raises(OptionError, match=said):
            from_spec(word, target)
