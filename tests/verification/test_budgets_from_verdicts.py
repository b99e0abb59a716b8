"""Portfolios with budgets that follow a request's own past verdicts are exact; who peeks at a draw is not.

All that may be drafted, accepted and drawn is summed over on tiny vocabularies. What is drafted in a step is chosen by
a function of what became of the steps before it: which drafters, in which order they are merged, how deep each goes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from truedraft.certify.cells import kernel_probs
from truedraft.certify.worlds import Case, Prefix, Table
from truedraft.core.proposal import Draw, DrawKind, Proposal
from truedraft.core.tree import TokenTree
from truedraft.drafters.portfolio import MergedProposal
from truedraft.verification import BlockVerification, Rule, SpeculativeSampling
from truedraft.verification.exact import distance, target_dist

LENGTH = 4
EXACT = 1e-12

Plan = tuple[tuple[str, int], ...]
"""Drafters of a step in the order of merging, each with its depth."""
History = tuple[tuple[Plan, Prefix], ...]
"""Of each step so far what was drafted by, and which tokens were accepted."""
Controller = Callable[[History], Plan]
Step = dict[tuple[Prefix, int], float]
"""Probabilities of tokens that are emitted, and of how many of them were drafted."""
Keeps = Callable[[Sequence[float]], int]
"""How many tokens of a drawn chain are proposed, from the draft's probability of each."""


def every_token(probabilities: Sequence[float]) -> int:
    return len(probabilities)


class TinyWorld:
    """A target and three drafters: "a" and "b" draw chains, "pair" draws two siblings, "fixed" takes its likeliest.

    Args:
        vocab: tokens.
        keeps: of drawn chains.
    """

    def __init__(self, vocab: int, rule: Rule, keeps: Keeps = every_token) -> None:
        self.vocab, self.rule, self.keeps = vocab, rule, keeps
        self.target = Table("target", vocab, "dense")
        self.tables = {name: Table(name, vocab, "dense") for name in ("a", "b", "pair", "fixed")}
        self._steps: dict[tuple[Prefix, Plan], Step] = {}

    def drafts(self, name: str, prefix: Prefix, depth: int) -> Iterator[tuple[float, Proposal]]:
        """All that a drafter may propose, with its probability."""
        table = self.tables[name]
        if name == "fixed":
            path = prefix
            for _ in range(depth):
                path = (*path, int(table.probs(path).argmax()))
            yield 1.0, Proposal.deterministic(TokenTree.chain(list(path[len(prefix) :])))
        elif name == "pair":
            q = table.probs(prefix)
            for one, other in itertools.permutations(range(self.vocab), 2):
                tree = TokenTree.from_paths([[one], [other]])
                draws = tuple(Draw(child, 0, DrawKind.WITHOUT_REPLACEMENT) for child in (0, 1))
                yield float(q[one] * q[other] / (1.0 - q[one])), Proposal(tree, (draws, (), ()), q[None])
        else:
            for drawn in itertools.product(range(self.vocab), repeat=depth):
                rows = [table.probs((*prefix, *drawn[:place])) for place in range(depth)]
                chances = [float(row[token]) for row, token in zip(rows, drawn, strict=True)]
                kept = self.keeps(chances)
                rows = rows[:kept]
                chain = Proposal.chain(torch.tensor(drawn[:kept]), torch.stack(rows)) if rows else Proposal.empty()
                yield math.prod(chances), chain

    def step(self, prefix: Prefix, plan: Plan) -> Step:
        """What a step emits, and how many tokens of that were drafted."""
        key = prefix, plan
        if key in self._steps:
            return self._steps[key]
        found: Step = {}
        names = [name for name, _ in plan]
        for parts in itertools.product(*(self.drafts(name, prefix, depth) for name, depth in plan)):
            merged = MergedProposal.of(dict(zip(names, (each for _, each in parts), strict=True))).proposal
            paths = [(), *(merged.tree.path_tokens(node) for node in range(len(merged.tree)))]
            case = Case(1.0, merged, torch.stack([self.target.probs((*prefix, *path)) for path in paths]))
            mass = math.prod(probability for probability, _ in parts)
            for verdict, chance in kernel_probs(self.rule, case).items():
                outcome = verdict.tokens, len(verdict.path)
                found[outcome] = found.get(outcome, 0.0) + mass * chance
        self._steps[key] = found
        return found

    def answers(self, controller: Controller) -> dict[Prefix, float]:
        """The distribution of the first tokens of an answer."""
        states: dict[tuple[Prefix, History], float] = {((), ()): 1.0}
        found: dict[Prefix, float] = {}
        while states:
            reached: dict[tuple[Prefix, History], float] = {}
            for (prefix, history), mass in states.items():
                if len(prefix) >= LENGTH:
                    answer = prefix[:LENGTH]
                    found[answer] = found.get(answer, 0.0) + mass
                    continue
                plan = controller(history)
                for (tokens, accepted), chance in self.step(prefix, plan).items():
                    state = (*prefix, *tokens), (*history, (plan, tokens[:accepted]))
                    reached[state] = reached.get(state, 0.0) + mass * chance
            states = reached
        return found

    def error(self, controller: Controller) -> float:
        """Total variation from the target."""
        return distance(self.answers(controller), target_dist(self.target.probs, LENGTH))


def longer_after_success(history: History) -> Plan:
    """Two more after a proposal that was accepted whole, one less after any other, at least one."""
    depth = 1
    for plan, accepted in history:
        depth = depth + 2 if len(accepted) == plan[0][1] else max(1, depth - 1)
    return (("a", min(depth, 3)),)


def follows_the_winner(history: History) -> Plan:
    """Who failed last hands over to the next, and every third step is plain decoding."""
    order = ("a", "b", "pair", "fixed")
    failures = sum(not accepted for _, accepted in history)
    return () if len(history) % 3 == 2 else ((order[failures % 4], 2),)


def merges_after_failure(history: History) -> Plan:
    """More drafters the more was rejected, in an order that what was accepted chooses."""
    failures = sum(not accepted for _, accepted in history)
    said = sum(sum(accepted) for _, accepted in history)
    plans: tuple[Plan, ...] = ((("b", 2),), (("a", 1), ("b", 2)), (("pair", 1), ("fixed", 2), ("a", 1)))
    plan = plans[min(failures, 2)]
    return plan[::-1] if said % 2 else plan


@pytest.mark.parametrize("vocab", [2, 3])
@pytest.mark.parametrize("controller", [longer_after_success, follows_the_winner, merges_after_failure])
def test_budgets_and_drafters_that_follow_own_verdicts_are_exact(controller: Controller, vocab: int) -> None:
    world = TinyWorld(vocab, SpeculativeSampling())
    assert world.error(controller) < EXACT
    assert sum(world.answers(controller).values()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("vocab", [2, 3])
def test_blocks_of_lengths_that_follow_own_verdicts_are_exact(vocab: int) -> None:
    assert TinyWorld(vocab, BlockVerification()).error(longer_after_success) < EXACT


# ------------------------------------------------------------------------------------------ peeking


def stops_behind_unlikely(probabilities: Sequence[float]) -> int:
    """Right: a token of less than 0.4 stays, and nothing is drafted behind it."""
    unlikely = (place for place, chance in enumerate(probabilities) if chance < 0.4)
    return next(unlikely, len(probabilities) - 1) + 1


def cuts_unlikely(probabilities: Sequence[float]) -> int:
    """Broken: a token of less than 0.4 is cut off with all behind it, though it was drawn."""
    return next((place for place, chance in enumerate(probabilities) if chance < 0.4), len(probabilities))


def cuts_an_unlikely_last(probabilities: Sequence[float]) -> int:
    """Broken: likewise, of a whole proposal's last token only."""
    return len(probabilities) - (probabilities[-1] < 0.4)


@pytest.mark.parametrize("rule", [SpeculativeSampling(), BlockVerification()])
def test_a_drawn_token_that_is_cut_because_it_is_unlikely_bends_the_answer(rule: Rule) -> None:
    def always(history: History) -> Plan:
        return (("a", 2),)

    assert TinyWorld(3, rule, stops_behind_unlikely).error(always) < EXACT
    assert TinyWorld(3, rule, cuts_unlikely).error(always) > 0.02
    assert TinyWorld(3, rule, cuts_an_unlikely_last).error(always) > 0.01


def test_a_choice_between_drafters_by_what_they_drew_bends_the_answer() -> None:
    """Both draw, and the proposal with the likelier token is kept: a peek across members."""
    world = TinyWorld(3, SpeculativeSampling())
    found: dict[tuple[Prefix, int], float] = {}
    for (one, left), (two, right) in itertools.product(world.drafts("a", (), 1), world.drafts("b", (), 1)):
        assert left.probs is not None and right.probs is not None
        likelier = left.probs[0, left.tree.host_ids[0]] >= right.probs[0, right.tree.host_ids[0]]
        kept = left if likelier else right
        rows = [(), tuple(kept.tree.host_ids)]
        case = Case(1.0, kept, torch.stack([world.target.probs(row) for row in rows]))
        for verdict, chance in kernel_probs(world.rule, case).items():
            key = verdict.tokens[:1], 0
            found[key] = found.get(key, 0.0) + one * two * chance
    emitted = {tokens: mass for (tokens, _), mass in found.items()}
    assert sum(emitted.values()) == pytest.approx(1.0)
    assert distance(emitted, target_dist(world.target.probs, 1)) > 0.02
