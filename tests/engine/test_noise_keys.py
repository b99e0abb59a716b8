"""Over whole answers, for every drafter and every rule, no noise serves two decisions; held by what it decides.

Which bits a key has is for other tests. Where a key came twice, whatever drafted and judged would still look right
token by token, and the distribution of whole answers would be bent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from support.head_models import MarkovWithEmbedding, random_heads, random_redrafter
from support.random_decisions import RandomDecisions
from truedraft import Engine, SamplingParams
from truedraft.core.noise import KeyedNoise, Purpose, UniformKeys, mix, open_unit, uniforms
from truedraft.core.verdict import Origin
from truedraft.drafters import Drafter, DraftModel, Medusa, PromptLookup, Redrafter
from truedraft.drafters.portfolio import Portfolio
from truedraft.engine import Answer
from truedraft.engine.policy import Controller
from truedraft.engine.request import Request
from truedraft.kinds.medusa.guess_trees import GuessTrees
from truedraft.testing import MarkovModel, ScriptedDrafter
from truedraft.verification import BlockVerification, LenientSampling, Rule, SpeculativeSampling, TypicalAcceptance

VOCAB = 6
SAMPLED = SamplingParams(max_tokens=40, temperature=1.0)
OPTIONS = {
    "sampled": SAMPLED,
    "nucleus": replace(SAMPLED, temperature=1.3, top_p=0.9, top_k=5),
    "seeded": replace(SAMPLED, seed=1),
    "greedy": SamplingParams(max_tokens=40),
}
RULES: list[Rule] = [SpeculativeSampling(), BlockVerification(), LenientSampling(0.5), TypicalAcceptance(0.05, 0.2)]
DRAFTERS: dict[str, Callable[[MarkovWithEmbedding], Drafter | None]] = {
    "none": lambda target: None,
    "prompt lookup": lambda target: PromptLookup(min_ngram=1),
    "chain": lambda target: DraftModel(draft(), 4),
    "tree": lambda target: DraftModel(draft(), branching=(3, 2, 1)),
    "chains": lambda target: DraftModel(draft(), 3, chains=3),
    "scripted": lambda target: ScriptedDrafter(lambda tokens: [[tokens[-1], 1], [2, 3, 4], [2, 0]]),
    "medusa": lambda target: Medusa(random_heads(target, heads=3), GuessTrees(3), nodes=6),
    "redrafter": lambda target: Redrafter(random_redrafter(target), beams=3),
    "drawn beams": lambda target: Redrafter(random_redrafter(target), beams=3, sampled=True),
}


def draft() -> MarkovModel:
    return MarkovModel.random(VOCAB, seed=2, sharpness=0.8)


_FINALS = {Origin.RECOVERED: Purpose.RECOVERED, Origin.BONUS: Purpose.BONUS}


@dataclass(frozen=True)
class Read:
    """One look at a number between 0 and 1: for what, for which place of the text, in which step of the request."""

    purpose: Purpose
    place: int
    step: int
    index: int


@dataclass
class NoiseRecord:
    """What one answer took, by the numbers themselves: however keys are made, equal ones give equal numbers; by chance
    two keys give one number with probability below 1e-6."""

    reads: dict[float, list[Read]] = field(default_factory=dict)  # by number, all looks at it
    places: dict[int, set[int]] = field(default_factory=dict)  # by key of Gumbel noise, where in the text it was taken

    def check(self, answer: Answer, vocab: int) -> None:
        """Nothing was used twice, and each token that was not drafted came by a number of its own place."""
        twice = [reads for reads in self.reads.values() if len(reads) > 1]
        assert not twice, f"one number served several decisions: {twice[:3]}"
        # The noise of a place is shared by draft and target, in every step that comes by it, and by nothing else.
        shared = {key: places for key, places in self.places.items() if len(places) > 1}
        assert not shared, f"the noise of one place served others: {list(shared.values())[:3]}"
        assert len(self.places) == len(set().union(*self.places.values()))
        assert not self.reads.keys() & {open_unit(mix(key, token)) for key in self.places for token in range(vocab)}
        finals = sorted(
            (read.place, read.purpose)
            for several in self.reads.values()
            for read in several
            if read.purpose in _FINALS.values() and read.index == 0  # a lossy rule's measurement takes others
        )
        if finals:  # typical acceptance goes on with the argmax, which takes none
            origins = enumerate(answer.origins, answer.prompt_tokens)
            assert finals == [(place, _FINALS[origin]) for place, origin in origins if origin in _FINALS]


@contextmanager
def recorded(patch: pytest.MonkeyPatch) -> Iterator[NoiseRecord]:
    """Record all noise that is taken within; one request at a time, as requests of one seed share it."""
    record = NoiseRecord()
    uniform, gumbel_key = KeyedNoise.uniform, KeyedNoise.gumbel_key

    def recording_uniform(noise: KeyedNoise, purpose: Purpose, depth: int, index: int = 0) -> float:
        number = uniform(noise, purpose, depth, index)
        read = Read(purpose, noise._position + depth, noise._step, index)
        record.reads.setdefault(number, []).append(read)
        return number

    def recording_key(noise: KeyedNoise, depth: int) -> int:
        key = gumbel_key(noise, depth)
        record.places.setdefault(key, set()).add(noise._position + depth)
        return key

    with patch.context() as within:
        within.setattr(KeyedNoise, "uniform", recording_uniform)
        within.setattr("truedraft.core.noise._FEW", 1 << 30)  # all are made one by one
        within.setattr(KeyedNoise, "gumbel_key", recording_key)
        yield record


@pytest.fixture
def target() -> MarkovWithEmbedding:
    made = MarkovWithEmbedding.random(VOCAB, seed=1, sharpness=0.8)
    assert isinstance(made, MarkovWithEmbedding)
    return made


def answered(
    patch: pytest.MonkeyPatch,
    target: MarkovModel,
    drafter: Drafter | None,
    rule: Rule,
    params: SamplingParams,
    controller: Controller | str = "fixed",
) -> tuple[Answer, NoiseRecord]:
    engine = Engine(target, drafter, rule, controller, entropy=5)
    with recorded(patch) as record:
        return engine.generate([3, 1, 2], params), record


PAIRS = [
    pytest.param(name, rule, id=f"{name}-{rule.spec}".replace(" ", "-"))
    for name in DRAFTERS
    for rule in RULES
    if not (isinstance(rule, BlockVerification) and name in ("tree", "drawn beams"))  # which it refuses
]


@pytest.mark.parametrize(("name", "rule"), PAIRS)
def test_no_noise_serves_two_decisions(
    target: MarkovWithEmbedding, monkeypatch: pytest.MonkeyPatch, name: str, rule: Rule
) -> None:
    for kind, params in OPTIONS.items():
        if params.seeded and not rule.lossless:
            continue
        answer, record = answered(monkeypatch, target, DRAFTERS[name](target), rule, params)
        record.check(answer, VOCAB)
        assert name == "none" or answer.stats.draft_tokens > 20
        if kind == "seeded":
            assert not record.reads
            assert {place for places in record.places.values() for place in places} >= {*range(3, 43)}
        else:
            assert not record.places
            assert record.reads or kind == "greedy" or isinstance(rule, TypicalAcceptance)


def test_each_draw_and_each_judgement_has_a_number(
    target: MarkovWithEmbedding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a recorder that sees too little is noticed, too."""
    answer, record = answered(monkeypatch, target, DraftModel(draft(), 4), SpeculativeSampling(), SAMPLED)
    purposes = [read.purpose for reads in record.reads.values() for read in reads]
    stats = answer.stats
    assert purposes.count(Purpose.DRAFT) == stats.draft_tokens
    assert purposes.count(Purpose.ACCEPT) == sum(stats.tried_per_position)
    assert purposes.count(Purpose.RECOVERED) + purposes.count(Purpose.BONUS) == 40 - stats.accepted_tokens


def members(target: MarkovWithEmbedding) -> Portfolio:
    """Some that draw, of which two are the same drafter, and some that choose."""
    made = [DRAFTERS[name](target) for name in ("chain", "prompt lookup", "tree", "chain", "drawn beams")]
    return Portfolio([member for member in made if member is not None])


@pytest.mark.parametrize("rule", [SpeculativeSampling(), LenientSampling(0.5)], ids=lambda rule: rule.spec)
@pytest.mark.parametrize("merges", [True, False])
def test_no_noise_serves_two_members(
    target: MarkovWithEmbedding, monkeypatch: pytest.MonkeyPatch, rule: Rule, merges: bool
) -> None:
    """Several draw for one request in one step, or one after another."""
    for kind, params in OPTIONS.items():
        if params.seeded and not rule.lossless:
            continue
        decisions = RandomDecisions(3, merges=merges)
        answer, record = answered(monkeypatch, target, members(target), rule, params, decisions)
        record.check(answer, VOCAB)
        assert answer.stats.draft_tokens > 20
        assert bool(record.reads) == (kind in ("sampled", "nucleus"))


def test_keys_of_members_are_their_own_and_those_of_the_first_are_those_of_a_drafter_alone() -> None:
    """Numbers of all purposes, depths, indices and steps of several members; by chance two are equal below 1e-9."""
    places = [(*each, index) for each in itertools.product(range(3), Purpose, range(4)) for index in range(5)]
    seen = set()
    for step in range(4):
        alone = KeyedNoise(11, 20, step)
        for member in range(6):
            own = alone.of_member(member)
            for position, purpose, depth, index in places:
                moved = KeyedNoise(11, 20 + 100 * position, step).of_member(member)
                number = moved.uniform(purpose, depth, index)
                if not member:
                    assert number == KeyedNoise(11, 20 + 100 * position, step).uniform(purpose, depth, index)
                seen.add(number)
            assert own.gumbel_key(2) == alone.gumbel_key(2), "coupled noise is shared by all"
        assert alone.of_member(0) is alone
    assert len(seen) == 4 * 6 * len(places)


def test_many_numbers_of_a_member_at_once_are_those_one_by_one() -> None:
    """Of several requests and members in one call, few and many."""
    noise = [KeyedNoise(5, 9, 2).of_member(member) for member in (0, 1, 3)]
    for count in (4, 100):
        keys = UniformKeys(*np.array([(i % 3, i % 5, i) for i in range(count)], np.int64).T)
        found = uniforms(noise, Purpose.DRAFT, keys)
        assert found.tolist() == [noise[i % 3].uniform(Purpose.DRAFT, i % 5, i) for i in range(count)]


# ------------------------------------------------------------------------------- faults it must find


def test_members_that_share_their_noise_are_found(target: MarkovWithEmbedding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyedNoise, "of_member", lambda noise, member: noise)
    drafter, decisions = members(target), RandomDecisions(3)
    answer, record = answered(monkeypatch, target, drafter, SpeculativeSampling(), SAMPLED, decisions)
    with pytest.raises(AssertionError, match="served"):
        record.check(answer, VOCAB)


Change = Callable[[Purpose, int, int], tuple[Purpose, int, int]]


def _uniforms(change: Change) -> Callable[[pytest.MonkeyPatch], None]:
    """Numbers are those of another purpose, depth or index."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        uniform = KeyedNoise.uniform
        changed = lambda noise, purpose, depth, index=0: uniform(noise, *change(purpose, depth, index))  # noqa: E731
        patch.setattr(KeyedNoise, "uniform", changed)

    return plant


def _shared(one: Purpose, other: Purpose) -> Callable[[pytest.MonkeyPatch], None]:
    return _uniforms(lambda purpose, depth, index: (other if purpose is one else purpose, depth, index))


_without_depth = _uniforms(lambda purpose, depth, index: (purpose, 0, index))
_without_index = _uniforms(lambda purpose, depth, index: (purpose, depth, 0))


def _without_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "noise", lambda request: KeyedNoise(request.noise_seed, len(request.tokens), 0))


def _without_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeyedNoise, "gumbel_key", lambda noise, depth: mix(noise._root, depth))


@pytest.mark.parametrize(
    ("plant", "name", "kind"),
    [
        (_shared(Purpose.ACCEPT, Purpose.DRAFT), "chain", "sampled"),
        (_shared(Purpose.ACCEPT, Purpose.DRAFT), "tree", "sampled"),
        (_shared(Purpose.RECOVERED, Purpose.ACCEPT), "chain", "sampled"),
        (_without_step, "block", "sampled"),
        (_without_step, "drawn beams", "sampled"),
        (_without_depth, "chain", "sampled"),
        (_without_index, "tree", "sampled"),
        (_without_index, "drawn beams", "sampled"),
        (_without_place, "chain", "seeded"),
        (_without_place, "none", "seeded"),
    ],
)
def test_noise_used_twice_is_found(
    target: MarkovWithEmbedding,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    name: str,
    kind: str,
) -> None:
    plant(monkeypatch)
    rule: Rule = BlockVerification() if name == "block" else SpeculativeSampling()
    drafter = DRAFTERS["chain" if name == "block" else name](target)
    answer, record = answered(monkeypatch, target, drafter, rule, OPTIONS[kind])
    with pytest.raises(AssertionError, match="served"):
        record.check(answer, VOCAB)
