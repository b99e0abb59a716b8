"""Drafts from n-gram tables: drawn from what is stored, judged exactly, the likeliest where nothing is drawn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.certified import assert_certified
from support.ngram_tables import table_of
from truedraft import Engine, SamplingParams
from truedraft.certify.checks import Stack
from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise
from truedraft.core.probs import probs_from_logits
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.shaping import Shaping
from truedraft.drafters import DraftRequest, NgramDrafter, from_spec
from truedraft.drafters.ngram.drafter import tree_of
from truedraft.errors import ModelError, OptionError, VocabularyMismatchError
from truedraft.testing import MarkovModel
from truedraft.training.ngrams import count_ngrams
from truedraft.verification import SpeculativeSampling
from truedraft.verification.exact import PlannedDraw, distance, emitted_dist, target_dist

VOCAB = 5
TARGET = MarkovModel.random(VOCAB, seed=3)
TABLE = table_of(TARGET)
WARM = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95)
SEEDED = SamplingParams(max_tokens=24, temperature=0.8, seed=4)
GREEDY = SamplingParams(max_tokens=24)
TEXT = [1, 0, 3]


def propose(
    drafter: NgramDrafter,
    params: SamplingParams,
    tokens: Sequence[int] = TEXT,
    seed: int = 0,
    budget: Budget | None = None,
) -> Proposal:
    request = DraftRequest(0, params, list(tokens))
    noise = KeyedNoise(seed, len(tokens), 0)
    proposal = drafter.propose([request], [budget or drafter.limits], [noise])[0]
    proposal.check()
    return proposal


SPARSE = count_ngrams([[0, 1, 0, 1, 3], [3, 2, 2]], VOCAB, 3)
BEHIND = {"known": [0, 1], "backed off": [1, 2], "unseen": [77]}
"""Texts behind which it knows all that it reads, the last token alone, and nothing, for it has no such id."""


def test_these_texts_are_what_they_are_said_to_be() -> None:
    assert [len(SPARSE._nodes(text)) for text in BEHIND.values()] == [2, 1, 0]


@pytest.mark.parametrize("text", BEHIND.values(), ids=BEHIND)
def test_candidates_leave_the_exact_distribution_of_answers_alone(text: list[int]) -> None:
    """Trees as the drafter makes them, behind every answer; a step's tree hangs where the last one ended."""
    drafter = NgramDrafter(SPARSE, 2, 3)

    def scheme(prefix: Sequence[int], drafted: Sequence[int]) -> list[PlannedDraw]:
        tree = propose(drafter, WARM, [*text, *prefix[: len(prefix) - len(drafted)]]).tree
        paths = [tree.path_tokens(node) for node in range(len(tree))]
        assert len(paths) == 3
        below = [path[-1] for path in paths if path[:-1] == tuple(drafted)]
        hot = torch.nn.functional.one_hot(torch.tensor(below, dtype=torch.int64), VOCAB).double()
        return [PlannedDraw(number, q, DrawKind.DETERMINISTIC) for number, q in enumerate(hot)]

    assert (
        distance(emitted_dist(SpeculativeSampling(), target_behind, scheme, 3), target_dist(target_behind, 3)) < 1e-12
    )


def target_behind(prefix: Sequence[int]) -> Tensor:
    return probs_from_logits(TARGET.probs_after([1, *prefix]).log()[None], WARM)[0]


def test_answers_are_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a table that guesses behind some texts alone, so that there are steps with trees and without."""
    stack = Stack(TARGET, NgramDrafter(SPARSE, 3, 5), SpeculativeSampling())
    assert_certified(monkeypatch, stack, [[1, 2, 3], [4], [4, 4, 0, 2, 1], [3, 1]])


def best_of(text: Sequence[int], nodes: int, depth: int) -> list[list[int]]:
    """Paths of the likeliest nodes, by looking at all that there are."""
    paths = itertools.chain.from_iterable(itertools.product(range(VOCAB), repeat=n + 1) for n in range(depth))

    def likely(path: tuple[int, ...]) -> float:
        found = 1.0
        for place, token in enumerate(path):
            found *= float(TABLE.probs([*text, *path[:place]])[token])
        return found

    return sorted(map(list, sorted(paths, key=likely, reverse=True)[:nodes]))


@pytest.mark.parametrize("params", [GREEDY, WARM, SEEDED], ids=["greedy", "sampled", "seeded"])
@pytest.mark.parametrize(("nodes", "depth"), [(1, 3), (7, 3), (12, 2), (4, 1)])
def test_a_tree_has_the_likeliest_nodes_the_likeliest_first(params: SamplingParams, nodes: int, depth: int) -> None:
    drafter = NgramDrafter(TABLE, depth, nodes)
    proposal = propose(drafter, params)
    paths = [list(proposal.tree.path_tokens(node)) for node in range(len(proposal.tree))]
    assert sorted(paths) == best_of(TEXT, nodes, depth) and proposal.kinds == {DrawKind.DETERMINISTIC}
    for fewer in range(nodes):
        cut = propose(drafter, params, budget=Budget(depth, nodes, fewer)).tree
        assert [list(cut.path_tokens(node)) for node in range(len(cut))] == paths[:fewer]


def test_a_budget_cuts_width_depth_and_what_lies_below_unlikely_tokens() -> None:
    drafter = NgramDrafter(TABLE, 3)
    text = list(TEXT)
    for _ in range(3):
        text.append(int(TABLE.probs(text).argmax()))
    chain = propose(drafter, GREEDY, budget=Budget(3))
    assert chain.tree.host_ids == text[len(TEXT) :] and chain.kinds == {DrawKind.DETERMINISTIC}
    assert propose(drafter, GREEDY, budget=Budget(2)).tree.host_ids == text[len(TEXT) : -1]
    assert propose(drafter, GREEDY, budget=Budget(0)).tree.host_ids == []
    for more in ({"min_probability": 1.0}, {"floor": 0.999}):
        assert propose(drafter, GREEDY, budget=Budget(3, **more)).tree.host_ids == text[len(TEXT) : -2]


def test_likeliest_tree_as_its_example_says() -> None:
    behind = {(): [(5, 0.6), (6, 0.3)], (5,): [(7, 0.9), (8, 0.1)], (5, 7): [(1, 0.0)], (6,): [(2, 1.0)]}
    tree = tree_of(lambda path: behind[path], Budget(3, 2, 3))
    assert [tree.path_tokens(node) for node in range(3)] == [(5,), (5, 7), (6,)]


def test_a_shorter_order_reads_less() -> None:
    short = propose(NgramDrafter(TABLE, 1, 1, order=2), GREEDY)
    assert short.tree.host_ids == [int(TABLE.probs(TEXT[-1:]).argmax())]
    alone = propose(NgramDrafter(TABLE, 1, 1, order=1), GREEDY)
    assert alone.tree.host_ids == [int(TABLE.probs([]).argmax())]


def test_penalties_change_its_guesses_as_the_target_s() -> None:
    params = SamplingParams(max_tokens=30, presence_penalty=1.5)
    answer = Engine(TARGET, NgramDrafter(TABLE), controller="fixed").generate(TEXT, params)
    assert answer.token_ids == Engine(TARGET).generate(TEXT, params).token_ids
    assert answer.stats.accepted_tokens > 0


def test_what_options_forbid_is_not_drafted() -> None:
    best = int(TABLE.probs(TEXT).argmax())
    params = SamplingParams(max_tokens=8, logit_bias={best: -100.0})
    engine = Engine(TARGET, NgramDrafter(TABLE, 1, 1), controller="fixed")
    assert engine.generate(TEXT, params).token_ids == Engine(TARGET).generate(TEXT, params).token_ids
    request = DraftRequest(0, params, TEXT, Shaping(params, TEXT, len(TEXT), (), (), VOCAB))
    proposal = NgramDrafter(TABLE, 1, VOCAB).propose([request], [Budget(1, VOCAB, 2)], [KeyedNoise(0, 3, 0)])[0]
    assert best not in proposal.tree.host_ids and len(proposal.tree) == 2


def test_hints_tell_apart_how_sure_it_is() -> None:
    table = count_ngrams([[0, 1] * 20, [2, 0, 2, 1, 2, 3, 2, 4]], VOCAB, 2)
    drafter = NgramDrafter(table)
    sure, unsure = (drafter.hint(DraftRequest(0, GREEDY, [last])).kind for last in (0, 2))
    assert sure > unsure > 0


def test_a_target_with_more_ids_is_drafted_for_and_one_with_fewer_refused() -> None:
    more = MarkovModel.random(VOCAB + 3, seed=1)
    params = [GREEDY, SamplingParams(max_tokens=24, temperature=1.0)]
    answers = Engine(more, NgramDrafter(TABLE), controller="fixed").generate([[7], [1]], params)
    assert not any(answer.warnings for answer in answers)
    assert all(answer.stats.draft_tokens for answer in answers)
    with pytest.raises(VocabularyMismatchError, match="has 5 token ids and target 'markov' has 4; count one"):
        NgramDrafter(TABLE).check(MarkovModel.random(4, seed=1))


def test_bad_options() -> None:
    for option, value in {"num_speculative_tokens": 0, "nodes": 0, "order": 0}.items():
        for wrong in (value, 1025):
            with pytest.raises(OptionError):
                NgramDrafter(TABLE, **{option: wrong})


def test_words(tmp_path: Path) -> None:
    file = tmp_path / "code.ngram"
    TABLE.write(file)
    plain = from_spec(f"ngram:{file}", TARGET)
    assert plain.limits == Budget(4, 7, 7) and plain.kinds == {DrawKind.DETERMINISTIC}
    assert from_spec(f"ngram:{file},num_speculative_tokens=7,nodes=9", TARGET).limits == Budget(7, 9, 9)
    assert from_spec(f"ngram:{file},order=2", TARGET).limits == Budget(4, 7, 7)
    for gone in ("branching=3-2", "sampled=true"):
        with pytest.raises(OptionError, match="unknown option of drafter 'ngram'"):
            from_spec(f"ngram:{file},{gone}", TARGET)
    both = from_spec(f"portfolio(ngram:{file};prompt-lookup)", TARGET)
    assert list(both.members) == ["ngram", "prompt-lookup"]
    with pytest.raises(OptionError, match="needs its table: ngram:FILE"):
        from_spec("ngram", TARGET)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="is cut off"):
        from_spec(f"portfolio(ngram:{file};prompt-lookup)", TARGET)
