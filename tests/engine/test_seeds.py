"""A seed is a promise, whatever drafts, judges, decides or stands beside; without one no noise is shared."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.answers import fixed
from support.head_models import MarkovWithHead, random_heads
from support.random_decisions import RandomDecisions
from truedraft import Engine, SamplingParams
from truedraft.drafters import Drafter, DraftModel, Medusa, PromptLookup
from truedraft.drafters.portfolio import Portfolio
from truedraft.engine.policy import Controller
from truedraft.errors import OptionError
from truedraft.kinds.medusa.guess_trees import GuessTrees
from truedraft.testing import MarkovModel
from truedraft.verification import BlockVerification, Rule, SpeculativeSampling

VOCAB = 8
PROMPT = [3, 1, 4]
SEEDED = SamplingParams(max_tokens=40, temperature=1.0, seed=11)
UNSEEDED = SamplingParams(max_tokens=40, temperature=1.0)
DRAFTERS: dict[str, Callable[[MarkovWithHead], Drafter | None]] = {
    "none": lambda target: None,
    "lookup": lambda target: PromptLookup(min_ngram=1),
    "draft": lambda target: DraftModel(MarkovModel.random(VOCAB, seed=2), 3),
    "tree": lambda target: DraftModel(MarkovModel.random(VOCAB, seed=2), branching=(3, 2)),
    "medusa": lambda target: Medusa(random_heads(target, heads=3), GuessTrees(3), nodes=6),
    "auto": lambda target: Portfolio([PromptLookup(min_ngram=1), DraftModel(MarkovModel.random(VOCAB, seed=2), 3)]),
}
CONTROLLERS: dict[str, Callable[[], Controller | str | None]] = {
    "goodput": lambda: None,
    "fixed": lambda: "fixed",
    "one random": lambda: RandomDecisions(1),
    "another": lambda: RandomDecisions(2),
}


@pytest.fixture
def target() -> MarkovWithHead:
    made = MarkovWithHead.random(VOCAB, seed=1)
    assert isinstance(made, MarkovWithHead)
    return made


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_seed_gives_one_answer(target: MarkovWithHead, drafter: str) -> None:
    """Alone and in batches, under every controller and lossless rule, streamed, and as one sample of several."""
    plain = Engine(target).generate(PROMPT, SEEDED)
    assert plain.seed == 11
    assert Engine(target).generate(PROMPT, SamplingParams(40, 1.0, seed=12)).token_ids != plain.token_ids
    rules: list[Rule] = [SpeculativeSampling()]
    if drafter in ("none", "lookup", "draft"):  # trees are not judged as blocks
        rules.append(BlockVerification())
    drafted = 0
    for rule in rules:
        for controller in CONTROLLERS.values():
            engine = Engine(target, DRAFTERS[drafter](target), rule, controller())
            beside = [SamplingParams(25, 1.3), SamplingParams(30), SamplingParams(9, 0.7, seed=11), UNSEEDED]
            answers = [engine.generate(PROMPT, SEEDED)]
            answers.append(engine.generate([[1], PROMPT, [2, 2], PROMPT, [5]], [*beside[:1], SEEDED, *beside[1:]])[1])
            answers.append(engine.generate(PROMPT, SamplingParams(40, 1.0, seed=11, n=3)))
            streamed = [token for piece in engine.stream(PROMPT, SEEDED) for token in piece.token_ids]
            assert [answer.token_ids for answer in answers] == [plain.token_ids] * 3
            assert streamed == plain.token_ids
            drafted += sum(answer.stats.draft_tokens for answer in answers)
    assert (drafted > 100) == (drafter != "none")


def test_without_a_seed_no_two_requests_share_noise(target: MarkovWithHead) -> None:
    for entropy in (None, 7):
        engine = fixed(target, DRAFTERS["tree"](target), entropy=entropy)
        answers = engine.generate([PROMPT] * 20, UNSEEDED) + [engine.generate(PROMPT, UNSEEDED) for _ in range(5)]
        first = engine.generate(PROMPT, SamplingParams(40, 1.0, n=5))
        answers += [first, *first.others]
        assert all(answer.seed is None for answer in answers)
        assert len({tuple(answer.token_ids) for answer in answers}) == 30  # two are equal with probability below 1e-9
    keys = {Engine(target, entropy=entropy).prepare(PROMPT).noise_seed for entropy in range(100)}
    engine = Engine(target, entropy=0)
    keys |= {engine.prepare(PROMPT).noise_seed for _ in range(100)}
    assert len(keys) == 199, "those of one engine are not those of another with the next entropy"


def test_entropy_fixes_what_is_not_seeded_by_the_order_in_which_it_comes(target: MarkovWithHead) -> None:
    def answers(entropy: int | None, seeded_between: int = 0) -> list[list[int]]:
        engine = fixed(target, DRAFTERS["draft"](target), entropy=entropy)
        found = [engine.generate(PROMPT, UNSEEDED).token_ids]
        for _ in range(seeded_between):
            engine.generate(PROMPT, SEEDED)
            engine.generate([[VOCAB + 1]], UNSEEDED)  # refused
        return found + [answer.token_ids for answer in engine.generate([PROMPT, PROMPT], UNSEEDED)]

    assert answers(7) == answers(7) == answers(7, seeded_between=2)
    assert not {*map(tuple, answers(7))} & {*map(tuple, answers(8))}
    assert answers(None) != answers(None)
    with pytest.raises(OptionError, match="entropy must be a whole number"):
        Engine(target, entropy=-1)


def test_requests_without_a_seed_are_judged_by_the_engines_own_rule(target: MarkovWithHead) -> None:
    """So tests that fix their noise by entropy look at that rule, and not at the one of seeded requests."""
    engine = fixed(target, DRAFTERS["draft"](target), BlockVerification(), entropy=7)
    assert engine.prepare(PROMPT, UNSEEDED).rule is engine.rule
    assert engine.prepare(PROMPT, SEEDED).rule.name == "coupled"
