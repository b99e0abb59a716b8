"""Portfolios in the engine: answers, what members are told, and what the failure of one costs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from engine.test_features import GUESSES, Merged, Watching
from support.faulty_parts import raising
from support.random_decisions import RandomDecisions
from support.records import watched
from support.tiny_models import packed, stock
from truedraft import Engine, SamplingParams
from truedraft.drafters import Drafter, DraftModel, DraftRequest, Features, PromptLookup
from truedraft.drafters.portfolio import Portfolio
from truedraft.engine.policy import AssistedHeuristic, Budget, ConfidenceStop, Controller, Decision, Goodput
from truedraft.engine.scheduler import FixedParts
from truedraft.models.base import LanguageModel
from truedraft.testing import MarkovModel, ScriptedDrafter

VOCAB = 6
PROMPTS = [[3, 1, 2], [0], [5, 5, 4, 1], [2, 2], [1, 4, 1, 4, 1], [3], [4, 0, 5], [1, 2, 3, 1, 2, 3]]
CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "goodput": Goodput,
    "probing": lambda: Goodput(probing=0.3),
    "heuristic": AssistedHeuristic,
    "confidence": lambda: ConfidenceStop(0.5),
    "random": lambda: RandomDecisions(4),
}


def markov() -> tuple[LanguageModel, LanguageModel]:
    target = MarkovModel.random(VOCAB, 1, context_length=128)
    return target, MarkovModel.random(VOCAB, 1, sharpness=1.0, context_length=128)


def llama() -> tuple[LanguageModel, LanguageModel]:
    return packed("llama"), packed("gemma3")


def portfolio(draft: LanguageModel) -> Portfolio:
    """Chains and trees, drawn and chosen, told at once and told late."""
    tree = DraftModel(draft, branching=(2, 2))
    return Portfolio([PromptLookup(min_ngram=1), DraftModel(draft, 4), tree, ScriptedDrafter(lambda tokens: GUESSES)])


# ------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize("models", [markov, llama])
@pytest.mark.parametrize("controller", CONTROLLERS)
def test_greedy_and_seeded_answers_are_those_of_plain_decoding(
    controller: str, models: Callable[[], tuple[LanguageModel, LanguageModel]]
) -> None:
    target, draft = models()
    count = 40 if models is markov else 24
    params = [
        SamplingParams(max_tokens=count, temperature=1.0, seed=seed) if seed % 2 else SamplingParams(count)
        for seed in range(8)
    ]
    plain = Engine(target).generate(PROMPTS, params)
    engine = Engine(target, portfolio(draft), controller=CONTROLLERS[controller]())
    together = engine.generate(PROMPTS, params)
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in plain]
    drafted = sum(answer.stats.draft_tokens for answer in together)
    weighs_costs = engine.controller.weighs_costs  # on a machine that somebody else is using nothing may pay
    assert drafted or weighs_costs
    for number in (0, 1):
        assert engine.generate(PROMPTS[number], params[number]).token_ids == plain[number].token_ids


# ------------------------------------------------------------------------------------------ what members are told


class Last(Watching):
    guesses = [[2, 1], [4]]  # noqa: RUF012
    features = Features(logits=True, layers=(1, 0))


class Every(Watching):
    guesses = [[2, 3], [1, 1]]  # noqa: RUF012
    features = Features("all", layers=(1,))


@torch.inference_mode()
def states_after(tokens: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """What each layer gives at the last token; of the last layer it is normed already."""
    output = stock("gemma3")(input_ids=torch.tensor([list(tokens)]), output_hidden_states=True, use_cache=False)
    return tuple(states[0, -1] for states in output.hidden_states[1:])


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", [("none", "last", "every"), ("every", "last", "none")])
def test_each_member_is_told_of_its_own_nodes_and_the_layers_it_declared(order: tuple[str, ...]) -> None:
    target = packed("gemma3")
    members = {"none": Watching(), "last": Last(), "every": Every()}
    engine = Engine(target, Portfolio(members), controller=Merged(*order))
    engine._scheduler.reading = FixedParts(2)
    engine.generate([[1, 2, 3, 4, 5], [3]], SamplingParams(max_tokens=8))
    steps = [len(member.seen) for member in members.values()]
    assert steps[0] == steps[1] == steps[2] > 10
    none, last, every = members.values()
    assert all(outcome.hidden is None and outcome.layers == () for _, outcome in none.seen)
    for member in members.values():
        own = [(before, outcome.proposal) for before, outcome in member.seen if len(outcome.proposal.tree)]
        made = [(text, proposal) for text, proposal in member.proposed if len(proposal.tree)]
        assert [(text, list(p.tree.host_ids)) for text, p in own] == [(text, list(p.tree.host_ids)) for text, p in made]
        for _, outcome in member.seen:
            path = tuple(outcome.proposal.tree.host_ids[node] for node in outcome.path)
            assert path == outcome.tokens[: len(path)]
    for before, outcome in last.seen:
        if outcome.partial:
            continue
        text = [*before, *outcome.tokens[:-1]]
        first, second, _ = states_after(text)
        assert outcome.logits is not None and outcome.logits.shape[0] == 1
        assert [len(each) for each in outcome.layers] == [1, 1]
        near(outcome.layers[0][0], second)
        near(outcome.layers[1][0], first)
    for before, outcome in every.seen:
        tree = outcome.proposal.tree
        assert outcome.logits is None and len(outcome.layers) == 1 and outcome.hidden is not None
        if outcome.tokens and len(tree):
            assert len(outcome.layers[0]) == len(outcome.hidden) == 1 + len(tree)
            for row, path in enumerate([(), *(tree.path_tokens(node) for node in range(len(tree)))]):
                near(outcome.layers[0][row], states_after([*before, *path])[1])


class Checked(DraftModel):
    """Checks its caches: of a Markov model they hold the token ids themselves."""

    checks = 0

    def propose(self, batch, budgets, noise):  # type: ignore[no-untyped-def]
        made = super().propose(batch, budgets, noise)
        for request, own in zip(batch, made, strict=True):
            self._check(request, len(own.tree))
        return made

    def observe(self, batch, outcomes):  # type: ignore[no-untyped-def]
        super().observe(batch, outcomes)
        for request in batch:
            self._check(request, 0)

    def _check(self, request: DraftRequest, nodes: int) -> None:
        cache = self.caches[request.id]
        if nodes:
            assert cache.length == len(request.tokens), "it caught up before it drafted"
        with torch.inference_mode():
            ((held, _),) = cache.entries() if cache.length else [(torch.empty(0), None)]
        assert held.flatten()[: cache.length].long().tolist() == list(request.tokens[: cache.length])
        self.checks += 1


class ToldAtOnce(Checked):
    observes_lazily = False


@pytest.mark.parametrize("seed", range(3))
def test_who_observes_lazily_knows_what_others_know(seed: int) -> None:
    """Caches that skipped steps are those of a fresh computation, and proposals those of who is told of every step."""
    target, draft = markov()
    params = SamplingParams(max_tokens=40, temperature=1.0)
    answers, checks = [], []
    for kind in (Checked, ToldAtOnce):
        chain, tree = kind(draft, 4), kind(draft, branching=(2, 2))
        drafter = Portfolio([PromptLookup(min_ngram=1), chain, tree])
        made = Engine(target, drafter, controller=RandomDecisions(seed), entropy=9).generate(PROMPTS, params)
        answers.append([(answer.token_ids, answer.stats) for answer in made])
        checks.append(chain.checks + tree.checks)
    assert answers[0] == answers[1]
    assert 100 < checks[0] < checks[1], "who is told late is told less often"


def test_who_observes_lazily_is_told_of_its_own_steps_at_once_and_else_of_the_last_one() -> None:
    class Late(Watching):
        observes_lazily = True

    class Turns(Controller):
        """The late one at every third step."""

        step = 0

        def decide(self, views):  # type: ignore[no-untyped-def]
            self.step += 1
            return [Decision("other" if self.step % 3 else "late", Budget(3)) for _ in views]

    late, other = Late(), Watching()
    engine = Engine(markov()[0], Portfolio({"other": other, "late": late}), controller=Turns())
    tokens = [1, 2, *engine.generate([1, 2], SamplingParams(max_tokens=30)).token_ids]
    asked = [len(text) for text, _ in late.proposed]
    assert len(asked) >= 3
    ends = {len(before) + len(outcome.tokens) for before, outcome in late.seen}
    assert ends >= set(asked), "before it proposes it was told up to there"
    own = [(before, outcome) for before, outcome in late.seen if len(outcome.proposal.tree)]
    assert [before for before, _ in own] == [text for text, _ in late.proposed]
    assert len(late.seen) <= 2 * len(asked) < len(other.seen)
    assert all(tokens[: len(before)] == before for before, _ in late.seen)


# ------------------------------------------------------------------------------------------ failures


@pytest.mark.plants_failures
@pytest.mark.parametrize("together", [1, 8])
def test_a_member_that_fails_now_and_then_costs_no_answer(together: int) -> None:
    """Requests that it failed for go on with the other one; where it fails for a batch it is asked for each alone."""
    target = markov()[0]
    plain = Engine(target).generate(PROMPTS, SamplingParams(max_tokens=60))
    calls = itertools.count(1)
    tenth = raising(
        ScriptedDrafter(lambda tokens: GUESSES),
        "the tenth time",
        propose=lambda batch, *_: any(next(calls) % 10 == 0 for _ in batch),
    )
    members: dict[str, Drafter] = {"failing": tenth, "lookup": PromptLookup(min_ngram=1)}
    engine = Engine(target, Portfolio(members), controller=RandomDecisions(1), max_batch=together)
    steps = watched(engine)
    answers = engine.generate(PROMPTS, SamplingParams(max_tokens=60))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
    failed = [answer for answer in answers if answer.warnings]
    assert failed if together == 1 else failed or any(answer.stats.recoveries for answer in answers)
    for answer in failed:
        (warning,) = answer.warnings
        assert "drafter 'failing' failed" in warning and "the tenth time" in warning
    late = [share.drafter for record in steps[-10:] for each in record.requests for share in each.shares]
    assert "lookup" in late
