"""Heads that learn from what an engine answers: what is promoted, what is not, and that no answer hangs on it."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from support.two_domains import (
    VOCAB,
    Unthreaded,
    ask,
    drafter_of,
    learnable_of,
    learning,
    measured,
    prompts,
    served,
    teach,
    trained,
    two_domains,
    untrained,
)
from truedraft import Engine, SamplingParams, load_model
from truedraft.drafters import DraftModel, Portfolio, PromptLookup
from truedraft.drafters.base import StepOutcome
from truedraft.drafters.heads.base import HeadDrafter
from truedraft.errors import CompositionError, OptionError
from truedraft.kinds.block.module import DFlashHead, DSparkHead
from truedraft.kinds.dflash2.module import DFlash2Head
from truedraft.kinds.eagle.module import Eagle3Head, PEagleHead
from truedraft.kinds.medusa.module import MedusaHeads
from truedraft.kinds.redrafter.module import RedrafterHead
from truedraft.training.online import Learner
from truedraft.training.online.learnable import LearnableLayerHeads, narrowed
from truedraft.training.online.learner import Tenants
from truedraft.training.online.student import Candidate, Student, _Winner
from truedraft.training.online.traffic import Answered, Score, Traffic

LEARNED = [RedrafterHead, MedusaHeads, Eagle3Head, LlamaForCausalLM]
OTHERS = [PEagleHead, DFlashHead, DFlash2Head, DSparkHead]


def heads_of(kind: type[Any]) -> tuple[Any, Any]:
    """One that drafts well where it learned in another test, and one that does not."""
    return trained(kind) if kind in LEARNED else untrained(kind, 1), untrained(kind)


def drafting(engine: Engine) -> torch.nn.Module:
    """The module that drafts."""
    drafter: Any = engine.drafter
    return drafter.model.module if isinstance(drafter, DraftModel) else drafter.head


@pytest.mark.parametrize(
    "kind", [RedrafterHead, *(pytest.param(each, marks=pytest.mark.slow) for each in [*LEARNED[1:], *OTHERS])]
)
def test_it_learns_a_new_kind_of_texts_and_keeps_the_old_one(kind: type[Any]) -> None:
    before, learner = trained(kind), Unthreaded(share=1.0)
    engine = learning(before, learner)
    teach(engine, learner, 0, 2)
    teach(engine, learner, 1, 7 if kind is Eagle3Head else 10)
    after = learner.student.served.module
    assert learner.status.promotions
    drafts = drafting(engine).state_dict()
    assert all(torch.equal(drafts[name], each) for name, each in after.state_dict().items())
    assert measured(after, 1) > 1.1 * measured(before, 1)
    assert measured(after, 0) > 0.98 * measured(before, 0)
    gained = learner.status
    assert gained.tokens_per_call_before is not None and gained.tokens_per_call_after is not None
    assert gained.tokens_per_call_before < gained.tokens_per_call_after
    learner.close()


class Noting(Unthreaded):
    """Notes what came, and never learns from it."""

    def _take(self, scope: object, answer: Answered) -> None:
        self.seen = [*getattr(self, "seen", []), (scope, answer)]


@pytest.mark.parametrize(
    ("kind", "temperature"), [(RedrafterHead, 0.0), (RedrafterHead, 1.0), (Eagle3Head, 1.0), (LlamaForCausalLM, 0.0)]
)
def test_the_answers_and_their_vectors_are_what_is_recorded(kind: type[Any], temperature: float) -> None:
    learner = Noting()
    engine = learning(trained(kind), learner)
    asked = prompts(0, 5)
    params = SamplingParams(max_tokens=23, temperature=temperature)
    requests = served(engine, asked, params, range(5))
    target = two_domains()
    assert sorted(scope for scope, _ in learner.seen) == [0, 1, 2, 3, 4]
    for scope, noted in learner.seen:
        answer = requests[scope].pieces[-1].answer
        assert answer is not None and noted.tokens.tolist() == answer.token_ids
        for place, vector in enumerate(noted.vectors):
            assert torch.equal(vector, target.vector_after([*asked[scope], *answer.token_ids[:place]]))
        text = [*asked[scope], *answer.token_ids]
        assert noted.prompt.tolist() == ([] if kind is RedrafterHead else asked[scope])
        rows = [target.vector_after(text[: place + 1]) for place in range(len(text) - 1)]
        assert list(noted.layers) == ([0] if kind is Eagle3Head else [])
        assert all(torch.equal(layer, torch.stack(rows)) for layer in noted.layers.values())


class Swapping(Unthreaded):
    """Gives heads in turn, one behind each so many steps, and notes how often."""

    heads: Sequence[Any] = ()
    every, steps, swaps = 3, 0, 0

    def changes(self):  # type: ignore[no-untyped-def]
        self.steps += 1
        if self.steps % self.every or not self.heads:
            return ()
        self.swaps += 1
        ((name, learnable),) = self._able.items()
        return [(name, learnable.change(self.heads[self.swaps % len(self.heads)]))]


@pytest.mark.parametrize("kind", [*LEARNED, *OTHERS])
def test_a_swap_in_the_middle_changes_no_answer(kind: type[Any]) -> None:
    """Greedy and seeded ones, side by side."""
    params = [SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=0.9, seed=5)] * 3
    asked = prompts(0, 3) + prompts(1, 3)
    plain = [each.token_ids for each in Engine(two_domains()).generate(asked, params)]
    learner = Swapping()
    learner.heads = heads_of(kind)
    answers = learning(learner.heads[0], learner).generate(asked, params)
    assert [each.token_ids for each in answers] == plain
    assert learner.swaps > 3 and not any(each.warnings for each in answers)


def test_a_swap_in_the_middle_changes_no_distribution() -> None:
    """Chi-square of the tokens behind swaps against the target's own distribution."""
    learner = Swapping()
    learner.heads, learner.every = (trained(), untrained()), 2
    engine = learning(trained(), learner)
    prompt, counts = prompts(1, 1)[0], torch.zeros(3, VOCAB)
    answers = engine.generate([prompt] * 2000, SamplingParams(max_tokens=3, temperature=1.0))
    for each in answers:
        for place, token in enumerate(each.token_ids):
            counts[place, token] += 1
    target, dist = two_domains(), torch.eye(VOCAB**2, dtype=torch.float64)[prompt[-2] * VOCAB + prompt[-1]]
    for place in range(3):
        expected = torch.zeros(VOCAB, dtype=torch.float64)
        following = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
        for pair, share in enumerate(dist):
            following[pair % VOCAB] += share * target.probs[pair // VOCAB, pair % VOCAB]
        expected, dist = following.sum(0), following.flatten()
        chi = ((counts[place] - 2000 * expected) ** 2 / (2000 * expected)).sum()
        assert chi < 45, place  # 11 degrees of freedom: 5e-6
    assert learner.swaps > 50


def held_by(drafter: HeadDrafter) -> dict[int, torch.Tensor]:
    return {key: vector.clone() for key, vector in drafter._vectors.items() if vector is not None}


def test_what_a_drafter_holds_behind_a_swap_is_what_a_new_one_would() -> None:
    learner = Swapping()
    learner.heads, learner.every = (untrained(),), 10**9
    engine = learning(trained(), learner)
    requests = [engine.submit(prompt, SamplingParams(max_tokens=30)) for prompt in prompts(0, 3)]
    for _ in range(4):
        engine.step()
    drafter = engine.drafter
    assert isinstance(drafter, HeadDrafter)
    before = held_by(drafter)
    engine._drafting.renew(drafter.name, partial(drafter.take, untrained()), engine._scheduler.running)
    assert before.keys() == {each.id for each in requests}
    target = two_domains()
    for each in requests:
        expected = target.vector_after(each.tokens[:-1])
        assert torch.equal(held_by(drafter)[each.id], expected) and torch.equal(before[each.id], expected)
    fresh = drafter_of(untrained())
    fresh.check(target)
    for each in requests:
        fresh.begin(each.draft)
        fresh.observe([each.draft], [StepOutcome(None, (), (), hidden=target.vector_after(each.tokens[:-1])[None])])  # type: ignore[arg-type]
    own = [drafter.propose([each.draft], [drafter.limits], [each.noise()])[0].tree for each in requests]
    new = [fresh.propose([each.draft], [drafter.limits], [each.noise()])[0].tree for each in requests]
    assert [tree.host_ids for tree in own] == [tree.host_ids for tree in new]


def test_a_change_that_fails_leaves_what_was_there() -> None:
    engine = learning(trained(), Swapping())
    request = engine.submit(prompts(0, 1)[0], SamplingParams(max_tokens=20))
    engine.step()
    other = untrained(MedusaHeads)
    drafter = engine.drafter
    assert isinstance(drafter, HeadDrafter)
    with pytest.raises(CompositionError, match="no head of the sizes"):
        drafter.take(other)
    engine._drafting.renew(drafter.name, partial(drafter.take, other), engine._scheduler.running)
    while engine.step():
        pass
    assert drafter.head is trained() and request.finish_reason == "length" and not request.warnings


def feed(learner: Unthreaded, answers: Sequence[Answered], works: int = 12) -> None:
    for answer in answers:
        learner._take(None, answer)
        learner.settle(works)


@pytest.mark.parametrize("kind", [RedrafterHead, Eagle3Head, LlamaForCausalLM])
def test_random_labels_are_not_promoted(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that nothing foretells, with vectors of the target that say something else."""
    monkeypatch.setattr(LearnableLayerHeads, "answers", 1)  # of a step, for speed
    learner, target, chance = Unthreaded(share=1.0), two_domains(), random.Random(0)
    engine = learning(trained(kind), learner)
    answers = []
    for _ in range(160):
        tokens = torch.tensor([chance.randrange(VOCAB) for _ in range(40)])
        pairs = [[chance.randrange(VOCAB), chance.randrange(VOCAB)] for _ in range(40)]
        vectors = torch.stack([target.vector_after(pair) for pair in pairs])
        answers.append(Answered(tokens, vectors, prompt=tokens[:1], layers={0: vectors}))
    before = copy.deepcopy(drafting(engine).state_dict())
    feed(learner, answers, 3 if kind is Eagle3Head else 12)
    assert learner.status.trials > 3 and learner.status.promotions == 0
    ask(engine, prompts(0, 1))
    assert all(torch.equal(before[name], each) for name, each in drafting(engine).state_dict().items())


def test_a_head_that_turns_out_worse_is_rolled_back() -> None:
    learner = Unthreaded(share=1.0)
    engine = learning(trained(), learner)
    teach(engine, learner, 0, 4)
    student = learner.student
    good = student.served
    student._promote(type(good)(copy.deepcopy(untrained())))  # as if it had been shown to be better
    student._learned = 10**9  # nothing is trained, so that nothing else can be promoted
    ask(engine, prompts(0, 1))
    drafter = engine.drafter
    assert isinstance(drafter, HeadDrafter) and drafter.head is not good.module
    teach(engine, learner, 0, 6)
    assert student.rollbacks == 1 and student.served is good and drafter.head is good.module


def judged(student: Student, newest: int = 24, **kept: int) -> Candidate:
    """What is served when a winner was judged that keeps so many guesses of 60 on older answers, and on the newest."""
    winner = Candidate(untrained())
    with torch.no_grad():
        for weight in winner.module.parameters():
            weight.add_(1.0)
    heads = {"served": student.served, "origin": student.origin, "new": winner}
    answers = [Answered(torch.zeros(61), torch.zeros(61, 1), number=number) for number in range(24)]
    for answer in answers:
        here = {"served": 20, "origin": 20} | ({"new": newest} if answer.number >= 16 else kept)
        answer.scores = {heads[name].number: Score(60, 40, count) for name, count in here.items()}
    student._winner = _Winner(winner, winner, 1.0, [{*range(8)}, {*range(8, 16)}, {*range(16, 24)}])
    student._judge_winner(student._winner, answers)
    return winner


@pytest.fixture
def student() -> Iterator[Student]:
    """Of an engine that never learns by itself."""
    learner = Unthreaded(share=1.0)
    engine = learning(untrained(), learner)
    yield learner.student
    assert engine.learner is learner


@pytest.mark.parametrize("better", ["served", "origin"])
def test_less_is_taken_of_what_is_worse_on_older_answers(better: str, student: Student) -> None:
    student.served = served = Candidate(untrained(), 7)
    winner = judged(student, new=20, **{better: 21})
    assert student.served is served and student._winner is not None and student._winner.whole is winner
    less = student._winner
    assert less.share == pytest.approx(0.7) and less.now is not winner
    began, whole, now = (list(each.parameters()) for each in (student._began, winner.module, less.now.module))
    for first, last, found in zip(began, whole, now, strict=True):
        torch.testing.assert_close(found.float(), torch.lerp(first, last.float(), 0.7))
        assert not torch.equal(first, found.float())
    promoted = judged(student, new=20)
    assert student.served is promoted and student._winner is None and student.promotions == 1


def test_a_winner_that_loses_at_every_share_is_dropped_and_seen_answers_are_forgotten(student: Student) -> None:
    judged(student, new=10)
    shares = []
    while student._winner is not None and len(shares) < 9:
        shares.append(student._winner.share)
        winner = student._winner
        answers = [Answered(torch.zeros(61), torch.zeros(61, 1), number=number) for number in range(24)]
        for answer in answers:
            kept = 24 if answer.number >= 16 else 10
            answer.scores = {student.served.number: Score(60, 40, 20), winner.now.number: Score(60, 40, kept)}
        student._judge_winner(winner, answers)
    assert shares == pytest.approx([0.7, 0.49, 0.343, 0.2401]) and student.promotions == 0
    student._judged.update(range(1000, 2000))
    student._judge()
    assert not student._judged
    judged(student, newest=20, new=30)
    assert student.served is student.origin and student._winner is None, "what no longer gains on the newest answers"


@pytest.mark.parametrize("kind", [each for each in (*LEARNED, *OTHERS) if each is not MedusaHeads])  # makes no chains
def test_replay_is_what_an_engine_with_chains_does(kind: type[Any]) -> None:
    """Tokens and calls of greedy answers, against the engine's own counts; two heads together as each alone."""
    target, (head, another) = two_domains(), heads_of(kind)
    engine, learnable = learning(head, None), learnable_of(head)
    for domain in (0, 1):
        for prompt in prompts(domain, 6):
            answer = engine.generate(prompt, SamplingParams(max_tokens=32))
            texts = [[*prompt, *answer.token_ids[:place]] for place in range(len(answer.token_ids))]
            vectors = torch.stack([target.vector_after(text) for text in texts])
            read = torch.stack([target.vector_after(prompt[:end]) for end in range(1, len(prompt))])
            layers = {0: torch.cat([read, vectors])}
            answered_ = Answered(torch.tensor(answer.token_ids), vectors, prompt=torch.tensor(prompt), layers=layers)
            own, other = learnable.replayed([head, another], answered_)
            assert own[:2] == (answer.stats.emitted_tokens, answer.stats.target_calls)
            assert own.tokens - own.calls <= own.kept  # chains begin at every place, also within others
            assert other == learnable.replayed([another], answered_)[0]


def test_a_narrowed_step_learns_what_the_whole_vocabulary_says_of_its_ids() -> None:
    lm_head = two_domains().lm_head()
    ids = torch.tensor([1, 2, 5, 7])
    found = narrowed(lm_head, ids)
    vectors = torch.randn(6, VOCAB**2, dtype=torch.float64)
    torch.testing.assert_close(found(vectors), lm_head(vectors)[:, ids])
    assert torch.equal(found.embed(torch.tensor([11])), lm_head.embed(torch.tensor([11])))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_lm_head_that_is_learned_with_is_the_targets(dtype: str) -> None:
    target = load_model("embedded:target", dtype=dtype)
    lm_head = target.lm_head()
    vectors = torch.randn(9, target.head_width, generator=torch.Generator().manual_seed(0)).to(target.dtype)
    expected = target.unembed(vectors).float()
    spread = expected.std()
    torch.testing.assert_close(lm_head(vectors).float() / spread, expected / spread, rtol=0, atol=0.02)
    ids = torch.arange(0, target.vocab_size, 97)
    assert torch.equal(lm_head.embed(ids), target.embed(ids))
    assert not lm_head.weight.is_inference() and not lm_head.embedding.is_inference()


def test_a_tenants_strings_reach_no_other_tenants_drafts() -> None:
    """One tenant asks for texts of the second kind alone; what others are drafted stays what it was."""
    learner = Unthreaded(share=1.0, per_tenant=True)
    engine = learning(trained(), learner)

    for turn in range(12):
        ask(engine, prompts(1, 16, turn), "planter")
        learner._meet()
        learner.settle()
    ask(engine, prompts(1, 1), "planter")
    assert learner.status.promotions
    (drafter,) = learner._tenants.values()
    seen: dict[str, list[list[int]]] = {}
    inner = {"planter": drafter._own["planter"], "other": drafter.base}  # type: ignore[union-attr]
    assert inner["other"].head is trained() and inner["planter"].head is not trained()
    texts: Sequence[list[int]] = prompts(1, 6, 77)
    for scope in ("planter", "other", "plain"):
        plain = learning(trained(), None) if scope == "plain" else engine
        requests = [plain.submit(each, SamplingParams(max_tokens=30), scope=scope) for each in texts]
        while plain.step():
            seen.setdefault(scope, []).extend(
                list(each.last_step.proposal.tree.host_ids) for each in requests if each.last_step is not None
            )
    assert seen["other"] == seen["plain"] and seen["planter"] != seen["plain"]


def test_a_tenant_that_is_forgotten_leaves_nothing() -> None:
    now = [0.0]
    learner = Unthreaded(per_tenant=True, keep_s=60.0, clock=lambda: now[0])
    engine = learning(trained(), learner)
    for _ in range(8):
        learner._take("a", answered(9, width=VOCAB**2))
    learner._meet()
    learner._students["a", "redrafter"]._promote(Candidate(untrained()))  # type: ignore[union-attr]
    ask(engine, prompts(0, 1))
    (drafter,) = learner._tenants.values()
    assert isinstance(drafter, Tenants) and set(drafter._own) == {"a"}
    now[0] = 100.0
    learner.turn()
    assert learner.status.answers_bytes == 0 and not learner._students
    engine.step()
    assert not drafter._own


@pytest.mark.parametrize("kind", [RedrafterHead, Eagle3Head])
def test_both_tenants_are_drafted_for_in_one_batch(kind: type[Any]) -> None:
    learner = Unthreaded(per_tenant=True)
    engine = learning(trained(kind), learner)
    (drafter,) = learner._tenants.values()
    drafter.take("b", untrained(kind))
    asked = prompts(0, 4)
    requests = served(engine, asked, SamplingParams(max_tokens=30), "ab")
    plain = Engine(two_domains()).generate(asked, SamplingParams(max_tokens=30))
    assert [each.pieces[-1].answer.token_ids for each in requests] == [each.token_ids for each in plain]  # type: ignore[union-attr]
    lengths = [each.counters.mean_acceptance_length for each in requests]
    assert min(lengths[0], lengths[2]) > max(lengths[1], lengths[3])
    assert not drafter.held.requests and not drafter.held.n_bytes


def test_what_cannot_learn_or_is_no_number_is_refused_in_a_sentence() -> None:
    target = two_domains()
    with pytest.raises(CompositionError, match=r"nothing of what drafts here \(prompt-lookup\) can learn while"):
        Engine(target, PromptLookup(), learner=Learner())
    with pytest.raises(CompositionError, match=r"drafts here \(none\) can learn"):
        Engine(target, learner=Learner())
    for share in (0.0, 1.5, float("nan"), True):
        with pytest.raises(OptionError, match=r"learn_share must lie in \(0, 1\]"):
            Learner(share=share)
    with pytest.raises(OptionError, match="learn_keep_s must be a number above 0"):
        Learner(keep_s=-1.0)
    learner = Unthreaded()
    learning(trained(), learner)
    with pytest.raises(CompositionError, match="beside another engine already"):
        learning(trained(), learner)


def test_of_a_portfolio_the_heads_learn() -> None:
    learner = Unthreaded(share=1.0)
    drafter = Portfolio([drafter_of(untrained()), PromptLookup(), drafter_of(untrained(MedusaHeads))])
    engine = Engine(two_domains(), drafter, controller="fixed", learner=learner, entropy=1)
    ask(engine, prompts(0, 16))
    learner.settle()
    assert set(learner._students) == {(None, "redrafter"), (None, "medusa")}
    assert all(each is not None and each._learned for each in learner._students.values())


def answered(count: int, since_s: float = 0.0, width: int = 4) -> Answered:
    return Answered(torch.zeros(count, dtype=torch.int64), torch.zeros(count, width), since_s)


def test_memory_is_bounded_older_answers_are_sampled_evenly_and_forgotten_in_time() -> None:
    traffic = Traffic(most_bytes=96_000, most_tokens=3_000, keep_s=100.0)
    for number in range(2000):
        traffic.add(answered(10, number / 1000))
        assert traffic.n_bytes <= 96_000
        assert sum(map(len, (*traffic.trained, *traffic.held))) <= 3_000
    old = [each.number for each in traffic.trained.old]
    assert len(old) > 50 and 700 < sum(old) / len(old) < 1250  # of 2000, the newest left out
    assert [each.number for each in traffic.trained.fresh] == sorted(each.number for each in traffic.trained.fresh)
    assert not {each.number for each in traffic.trained} & {each.number for each in traffic.held}

    traffic = Traffic(1 << 20, 10_000, keep_s=60.0)
    for number in range(40):
        traffic.add(answered(10, float(number)))
    traffic.forget(70.0)
    assert {each.since_s for each in (*traffic.trained, *traffic.held)} == set(map(float, range(10, 40)))
    traffic.forget(1000.0)
    assert traffic.is_empty and traffic.n_bytes == 0


@pytest.mark.parametrize("kind", [RedrafterHead, Eagle3Head])
def test_what_is_too_long_is_cut(kind: type[Any]) -> None:
    """An answer behind, and a prompt, where it is noted, before."""
    learner = Noting()
    target = two_domains()
    target.context_length = 2000
    engine = Engine(target, drafter_of(untrained(kind)), controller="fixed", learner=learner)
    prompt = prompts(0, 1)[0] * 150
    tokens = engine.generate(prompt, SamplingParams(max_tokens=700)).token_ids
    ((_, answer),) = learner.seen
    assert len(answer) == len(answer.vectors) == 512
    if kind is Eagle3Head:
        text = [*prompt, *tokens[:511]]
        expected = torch.stack([target.vector_after(text[:end]) for end in range(89, len(text) + 1)])
        assert answer.prompt.tolist() == prompt[-512:] and torch.equal(answer.layers[0], expected)
