"""What a user of the engine relies on: batches, limits, stops, cancellation, and failures that stay where they are."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch

from support.answers import finished, fixed
from support.faulty_parts import raising
from support.fixed_noise import answers_of
from support.markov import greedy
from support.ngram_tables import table_of
from support.parallel_drafting import beside
from support.records import watched
from truedraft import Engine, SamplingParams
from truedraft.core.budget import NO_DRAFT, Budget, Decision, Hint, RequestView
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.stats import StepRecord
from truedraft.core.verdict import Origin
from truedraft.drafters import Cascade, Drafter, DraftModel, DraftRequest, NgramDrafter, PromptLookup, SuffixDrafter
from truedraft.engine.policy import FixedBudget
from truedraft.errors import OptionError, PromptError
from truedraft.testing import MarkovModel, ScriptedController, ScriptedDrafter, altered

VOCAB = 8


@pytest.fixture
def target() -> MarkovModel:
    return MarkovModel.random(VOCAB, seed=1)


def oracle(model: MarkovModel, depth: int = 4) -> ScriptedDrafter:
    """A drafter that is always right at temperature 0."""
    return ScriptedDrafter(lambda tokens: [greedy(model, list(tokens), depth)], depth=depth)


DRAFTERS = {
    "none": lambda target: None,
    "prompt lookup": lambda target: PromptLookup(min_ngram=1),
    "chain": lambda target: DraftModel(MarkovModel.random(VOCAB, seed=2)),
    "ahead": lambda target: beside(MarkovModel.random(VOCAB, seed=2))[0],
    "tree": lambda target: DraftModel(MarkovModel.random(VOCAB, seed=2), branching=(3, 2, 1)),
    "itself": lambda target: DraftModel(target, num_speculative_tokens=3),
    "suffix": lambda target: SuffixDrafter(),
    "cascade": lambda target: Cascade(PromptLookup(min_ngram=1), DraftModel(MarkovModel.random(VOCAB, seed=2)), 5),
    "n-gram tree": lambda target: NgramDrafter(table_of(target)),
    "oracle": oracle,
    "wrong": lambda target: ScriptedDrafter(lambda tokens: [[(tokens[-1] + 1) % VOCAB] * 3]),
}


@pytest.fixture(params=DRAFTERS, ids=lambda name: name.replace(" ", "-"))
def drafter(request: pytest.FixtureRequest, target: MarkovModel) -> Drafter | None:
    return DRAFTERS[request.param](target)


def test_greedy_is_the_argmax_chain_with_every_drafter(target: MarkovModel, drafter: Drafter | None) -> None:
    answer = fixed(target, drafter).generate([3, 1, 4], SamplingParams(max_tokens=30))
    assert answer.token_ids == greedy(target, [3, 1, 4], 30)
    assert (answer.finish_reason, answer.text, len(answer.origins)) == ("length", None, 30)


@pytest.mark.parametrize("name", ["chain", "tree", "cascade"])
def test_no_drafted_distribution_outlives_the_next_step(target: MarkovModel, name: str) -> None:
    """With a large vocabulary they are the largest thing of a step."""
    drafter = DRAFTERS[name](target)
    propose = drafter.propose
    made: list[weakref.ref[torch.Tensor]] = []

    def watched(*asked: object) -> list[Proposal]:
        proposals: list[Proposal] = propose(*asked)
        made.extend(weakref.ref(each.probs) for each in proposals if each.probs is not None)
        return proposals

    drafter.propose = watched
    params = SamplingParams(temperature=1.0, max_tokens=20)
    fixed(target, drafter).generate([[3, 1, 4], [2]], params)
    assert len(made) > 8
    assert sum(there() is not None for there in made) <= 2  # of the last step, of two requests


def test_the_limits_end_inside_an_accepted_block(target: MarkovModel, drafter: Drafter | None) -> None:
    engine = fixed(target, drafter)
    for count in (1, 2, 3, 5, 7):
        answer = engine.generate([3, 1], SamplingParams(max_tokens=count))
        assert answer.token_ids == greedy(target, [3, 1], count)
        assert answer.stats.prefill_tokens + answer.stats.emitted_tokens == count
    small = MarkovModel(target.probs, context_length=20)
    answer = fixed(small, drafter).generate([3, 1, 4], SamplingParams(max_tokens=100))
    assert (answer.token_ids, answer.finish_reason) == (greedy(target, [3, 1, 4], 17), "length")


def test_stop_ids_and_end_of_text_end_the_answer_where_they_stand(target: MarkovModel, drafter: Drafter | None) -> None:
    plain = greedy(target, [3, 1, 4], 12)
    first = plain.index(plain[6])
    stopped = fixed(target, drafter).generate([3, 1, 4], SamplingParams(max_tokens=12, stop_token_ids=(plain[6],)))
    ending = fixed(MarkovModel(target.probs, eos_token_ids=(plain[6],)), drafter)
    for answer in (stopped, ending.generate([3, 1, 4], SamplingParams(max_tokens=12))):
        assert (answer.token_ids, answer.finish_reason) == (plain[:first], "stop")
        # What lies behind the stop was neither accepted nor emitted.
        assert answer.stats.prefill_tokens + answer.stats.emitted_tokens == first
        assert answer.stats.accepted_tokens <= answer.stats.emitted_tokens
    assert ending.generate([3, 1, 4], SamplingParams(max_tokens=12, ignore_eos=True)).token_ids == plain


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.9}, {"temperature": 0.9, "seed": 5}, {"temperature": 1.3, "top_p": 0.8, "top_k": 5}],
    ids=["greedy", "sampled", "seeded", "nucleus"],
)
def test_a_request_answers_alike_alone_in_a_batch_and_streamed(
    target: MarkovModel, drafter: Drafter | None, options: dict[str, float]
) -> None:
    params = SamplingParams(max_tokens=20, **options)
    if isinstance(drafter, SuffixDrafter) and not (params.greedy or params.seeded):
        pytest.skip("what others were answered decides what it drafts, and so which draws decide")
    engine = fixed(target, drafter)
    prompts = [[3, 1, 4], [1] * 9, [2], [5, 6]]
    alone = [answers_of(engine, [prompt], params)[0].token_ids for prompt in prompts]
    together = [answer.token_ids for answer in answers_of(engine, prompts, params)]
    few = fixed(target, drafter, max_batch=2)
    assert together == alone == [answer.token_ids for answer in answers_of(few, prompts, params)]
    if params.greedy or params.seeded:
        assert [token for piece in engine.stream(prompts[0], params) for token in piece.token_ids] == alone[0]


def test_the_target_as_its_own_draft_accepts_everything(target: MarkovModel) -> None:
    for options in ({}, {"temperature": 0.7}, {"temperature": 0.7, "seed": 3}):
        engine = fixed(target, DraftModel(target, num_speculative_tokens=3))
        stats = engine.generate([3, 1], SamplingParams(max_tokens=41, **options)).stats
        assert (stats.target_calls, stats.emitted_tokens, stats.accepted_tokens) == (10, 40, 30)
        assert stats.draft_acceptance_rate == 1.0
        assert stats.mean_acceptance_length == 4.0
        assert stats.accepted_per_position == stats.tried_per_position == [10, 10, 10]


def test_origins_tell_accepted_recovered_and_bonus_apart(target: MarkovModel) -> None:
    right = greedy(target, [3, 1], 3)

    def script(tokens: list[int]) -> list[list[int]]:
        if len(tokens) == 3:  # after the prefill's token: one right guess, then a wrong one
            return [[right[1], (right[2] + 1) % VOCAB]]
        return []

    answer = fixed(target, ScriptedDrafter(script)).generate([3, 1], SamplingParams(max_tokens=4))
    assert answer.origins == [Origin.BONUS, Origin.ACCEPTED, Origin.RECOVERED, Origin.BONUS]


def test_drafter_observes_every_step_and_the_end(target: MarkovModel) -> None:
    drafter = oracle(target, depth=2)
    answer = fixed(target, drafter).generate([3, 1], SamplingParams(max_tokens=8))
    emitted = [token for _, outcome in drafter.outcomes for token in outcome.tokens]
    assert emitted == answer.token_ids
    assert drafter.ended == [drafter.outcomes[0][0]]
    assert drafter.outcomes[0][1].proposal.tree.host_ids == []  # the prefill is a step with an empty proposal


def test_budgets_are_obeyed_and_a_pause_leaves_no_stale_draft(target: MarkovModel) -> None:
    pause = [Budget(2), NO_DRAFT, NO_DRAFT, Budget(3), NO_DRAFT, Budget(1), Budget(3)]
    draft = MarkovModel.random(VOCAB, seed=2)
    for branching in ((1, 1, 1), (3, 2, 1)):
        engine = Engine(target, DraftModel(draft, branching=branching), controller=ScriptedController(pause))
        answer = engine.generate([3, 1, 4], SamplingParams(max_tokens=30))
        assert answer.token_ids == greedy(target, [3, 1, 4], 30)
    # The target as its own draft shows staleness by lost acceptance.
    engine = Engine(target, DraftModel(target, 3), controller=ScriptedController(pause))
    assert engine.generate([3, 1, 4], SamplingParams(max_tokens=30)).stats.draft_acceptance_rate == 1.0


def test_minimum_probability_keeps_the_unlikely_token_and_drafts_no_further(target: MarkovModel) -> None:
    draft = DraftModel(target, num_speculative_tokens=5)
    engine = Engine(target, draft, controller=ScriptedController([Budget(5, min_probability=1.0)]), entropy=1)
    stats = engine.generate([3, 1], SamplingParams(max_tokens=20, temperature=1.0)).stats
    assert stats.draft_tokens == stats.target_calls - (1 if stats.tried_per_position[0] < stats.target_calls else 0)


def test_bad_prompts_are_refused_with_one_sentence_and_fail_alone_in_a_list(target: MarkovModel) -> None:
    engine = Engine(target)
    for prompt, words in (
        (torch.tensor([], dtype=torch.int64), "no tokens"),
        ("text", "has no tokenizer"),
        ([1, VOCAB], f"token id {VOCAB} is outside"),
        ([-1], "token id -1 is outside"),
        ([1] * 64, "has a context of 64"),
    ):
        with pytest.raises(PromptError, match=words) as caught:
            engine.generate(prompt)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    with pytest.raises(OptionError, match="tokenizer"):
        engine.generate([1], SamplingParams(stop=("x",)))
    with pytest.raises(PromptError, match="2 prompts need"):
        engine.generate([[1], [2]], [SamplingParams()])
    with pytest.raises(OptionError, match="SamplingParams"):
        engine.submit([1], {"max_tokens": 3})  # type: ignore[arg-type]
    answers = engine.generate([[3, 1], [99], [1.5], [2]], SamplingParams(max_tokens=5))  # type: ignore[list-item]
    assert [answer.finish_reason for answer in answers] == ["length", "error", "error", "length"]
    assert "99" in (answers[1].error or "")
    assert answers[0].token_ids == greedy(target, [3, 1], 5)
    assert engine.step() is False


def broken_after(target: MarkovModel, pair: tuple[int, int]) -> MarkovModel:
    probs = target.probs.clone()
    probs[pair] = torch.nan
    return MarkovModel(probs)


def test_nan_behind_the_end_of_an_answer_does_not_matter(target: MarkovModel, drafter: Drafter | None) -> None:
    text = [3, 1, *greedy(target, [3, 1], 12)]
    stop = next(i for i in range(4, 12) if text[i] not in text[2:i])
    broken = broken_after(target, (text[stop - 1], text[stop]))
    answer = fixed(broken, drafter).generate([3, 1], SamplingParams(max_tokens=12, stop_token_ids=(text[stop],)))
    assert (answer.finish_reason, answer.token_ids) == ("stop", text[2:stop])


@pytest.mark.plants_failures
@pytest.mark.parametrize("when", ["propose", "observe", "begin", "end"])
def test_a_drafter_that_raises_leaves_the_answer_and_the_neighbours_alone(target: MarkovModel, when: str) -> None:
    of_second = {
        "propose": lambda batch, *_: any(request.tokens[0] == 1 and len(request.tokens) > 6 for request in batch),
        "observe": lambda batch, _: True,
        "begin": lambda request: request.tokens[0] == 1,
        "end": lambda request: True,
    }
    drafter = raising(oracle(target, 3), **{when: of_second[when]})
    prompts = [[3, 1], [1, 1], [2, 5]]
    answers = fixed(target, drafter).generate(prompts, SamplingParams(max_tokens=15))
    assert [answer.token_ids for answer in answers] == [greedy(target, prompt, 15) for prompt in prompts]
    assert "no idea" in answers[1].warnings[0]
    if when in ("propose", "begin"):
        assert answers[0].warnings == answers[2].warnings == ()
        assert answers[0].stats.accepted_tokens > answers[1].stats.accepted_tokens


def test_cancelling_gives_the_cache_back_and_others_go_on(target: MarkovModel) -> None:
    engine = fixed(target, DraftModel(MarkovModel.random(VOCAB, seed=2)))
    stream = engine.stream([3, 1], SamplingParams(max_tokens=50))
    other = engine.submit([2, 5], SamplingParams(max_tokens=10))
    got = next(stream).token_ids
    stream.close()
    assert target.pool.in_use == 1
    (answer,) = finished(engine, [other])
    assert target.pool.in_use == 0
    assert got == greedy(target, [3, 1], len(got))
    assert answer.token_ids == greedy(target, [2, 5], 10)


def test_a_waiting_request_can_be_cancelled(target: MarkovModel) -> None:
    engine = Engine(target, max_batch=1)
    first, second = engine.submit([3, 1], SamplingParams(max_tokens=5)), engine.submit([2])
    engine.step()
    engine.cancel(second)
    assert [answer.finish_reason for answer in finished(engine, [first, second])] == ["length", "cancelled"]
    assert target.pool.in_use == 0


def test_long_prompts_are_prefilled_in_parts(target: MarkovModel) -> None:
    long = MarkovModel(target.probs, context_length=2000)
    prompts = [[(i * i + 3) % VOCAB for i in range(length)] for length in (1, 255, 256, 257, 700)]
    engine = fixed(long, DraftModel(long, 2), prefix_cache_bytes=0)  # for they begin alike
    answers = engine.generate(prompts, SamplingParams(max_tokens=9))
    assert [a.token_ids for a in answers] == [greedy(target, prompt, 9) for prompt in prompts]
    assert [a.stats.prefill_calls for a in answers] == [1, 1, 1, 2, 3]
    assert [a.stats.draft_acceptance_rate for a in answers] == [1.0] * 5


def test_requests_join_and_leave_between_steps(target: MarkovModel, drafter: Drafter | None) -> None:
    engine = fixed(target, drafter, max_batch=3)
    requests = []
    for number in range(9):
        requests.append(engine.submit([number % VOCAB, 3], SamplingParams(max_tokens=3 + 2 * (number % 4))))
        engine.step()
    for number, answer in enumerate(finished(engine, requests)):
        assert answer.token_ids == greedy(target, [number % VOCAB, 3], 3 + 2 * (number % 4))
    assert target.pool.in_use == 0


def test_ctrl_c_in_a_step_leaves_nothing_behind(target: MarkovModel) -> None:
    class Interrupted(ScriptedDrafter):
        def observe(self, batch, outcomes):  # type: ignore[no-untyped-def]
            if any(len(request.tokens) >= 5 for request in batch):
                raise KeyboardInterrupt

    engine = fixed(target, Interrupted(lambda tokens: []))
    short = engine.submit([3, 1], SamplingParams(max_tokens=3))
    with pytest.raises(KeyboardInterrupt):
        engine.generate([2, 5], SamplingParams(max_tokens=9))
    assert target.pool.in_use == 0
    assert finished(engine, [short])[0].token_ids == greedy(target, [3, 1], 3)
    assert engine.step() is False


def test_two_engines_may_share_a_drafter(target: MarkovModel) -> None:
    draft = MarkovModel.random(VOCAB, seed=2)
    drafter = DraftModel(draft)
    streams = [fixed(target, drafter).stream(prompt, SamplingParams(max_tokens=20)) for prompt in ([3, 1], [2, 5])]
    got: list[list[int]] = [[], []]
    for pieces in itertools.zip_longest(*streams):
        for tokens, piece in zip(got, pieces, strict=True):
            if piece is not None:
                assert piece.answer is None or piece.answer.warnings == ()
                tokens.extend(piece.token_ids)
    assert got == [greedy(target, prompt, 20) for prompt in ([3, 1], [2, 5])]
    assert draft.pool.in_use == 0


def test_a_stream_that_is_never_read_was_never_queued(target: MarkovModel) -> None:
    engine = Engine(target)
    with pytest.raises(PromptError):
        engine.stream([99])
    engine.stream([3, 1]).close()
    assert engine.step() is False


@pytest.mark.plants_failures
@pytest.mark.parametrize(
    ("made", "said"), [(1, "coupled draws, which the rule cannot judge"), (0, "made 0 proposals for 1 requests")]
)
def test_a_drafter_that_lies_about_its_draws_is_not_believed(target: MarkovModel, made: int, said: str) -> None:
    even = torch.full((1, VOCAB), 1 / VOCAB, dtype=torch.float64)
    lie = Proposal.chain(torch.tensor([2]), even, DrawKind.COUPLED)
    liar = altered(ScriptedDrafter(lambda tokens: []), propose=lambda batch, *_: [lie for _ in batch[:made]])
    answer = fixed(target, liar).generate([3], SamplingParams(max_tokens=4, temperature=1.0))
    assert said in answer.warnings[0]
    assert answer.stats.draft_tokens == 0


def raises(views: Sequence[RequestView]) -> list[Decision]:
    raise RuntimeError("no idea")


@pytest.mark.plants_failures
@pytest.mark.parametrize(
    ("decisions", "said"),
    [
        (raises, "the controller failed (RuntimeError: no idea)"),
        (lambda views: [], "0 decisions for 1 requests"),
        (lambda views: [Decision("other", Budget(1))], "it chose a drafter 'other'; there is 'scripted'"),
    ],
)
def test_a_controller_that_fails_costs_only_the_drafting(
    target: MarkovModel, decisions: Callable[[object], list[Decision]], said: str
) -> None:
    controller = altered(ScriptedController([]), decide=decisions)
    answer = Engine(target, oracle(target), controller=controller).generate([3, 1], SamplingParams(max_tokens=6))
    assert answer.token_ids == greedy(target, [3, 1], 6)
    assert said in answer.warnings[0]


@pytest.mark.plants_failures
def test_a_controller_that_fails_for_one_request_goes_on_for_the_others(target: MarkovModel) -> None:
    params = [SamplingParams(max_tokens=6, seed=seed) for seed in (6, 7)]
    by_seed = raising(
        ScriptedController([Budget(2)]), decide=lambda views: any(each.params.seed == 7 for each in views)
    )
    fine, bad = Engine(target, oracle(target), controller=by_seed).generate([[3, 1], [3, 1]], params)
    assert fine.token_ids == bad.token_ids == greedy(target, [3, 1], 6)
    assert fine.stats.draft_tokens > 0 and fine.warnings == ()
    assert bad.stats.draft_tokens == 0 and "the controller failed (RuntimeError: no idea)" in bad.warnings[0]


def test_a_controller_sees_each_request_that_may_be_drafted_for_and_what_a_step_counted(target: MarkovModel) -> None:
    seen: list[object] = []
    counted: list[tuple[int, int]] = []

    class Watching(ScriptedController):
        def decide(self, views):  # type: ignore[no-untyped-def]
            assert all(list(view.limits) == ["scripted"] for view in views)
            seen.append(
                [(view.params.seed, view.context, view.remaining, view.counters.target_calls) for view in views]
            )
            return super().decide(views)

        def observe(self, record):  # type: ignore[no-untyped-def]
            assert record.draft_s > 0.0 and record.target_s > 0.0
            counted.append((record.counters.draft_tokens, record.counters.accepted_tokens))

    params = [SamplingParams(max_tokens=5, seed=1), SamplingParams(max_tokens=3, seed=2)]
    Engine(target, oracle(target), controller=Watching([Budget(1)])).generate([[3, 1], [4, 4, 4]], params)
    assert seen == [[(1, 2, 4, 0), (2, 3, 2, 0)], [(1, 4, 2, 1)]]
    assert counted == [(0, 0), (2, 2), (1, 1)]


# ------------------------------------------------------------------------------------------ controllers that rest


class Resting(FixedBudget):
    """Drafts nothing, rests three steps, then says what it was asked and told."""

    def __init__(self) -> None:
        super().__init__(NO_DRAFT)
        self.asked: list[tuple[int, ...]] = []
        self.told = 0

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        self.asked.append(tuple(view.id for view in views))
        self.rests = 3
        return super().decide(views)

    def observe(self, record: StepRecord) -> None:
        self.told += not record.prefill


def test_a_controller_that_rests_is_asked_and_told_of_every_fourth_step() -> None:
    controller = Resting()
    engine = Engine(MarkovModel.random(5, 1), ScriptedDrafter(lambda tokens: []), controller=controller)
    records = watched(engine)
    engine.generate([[1, 2]], SamplingParams(max_tokens=14))
    decoding = [record for record in records if not record.prefill]
    assert len(decoding) == 13
    assert (len(controller.asked), controller.told) == (4, 4)
    decisions = [record.requests[0].decision for record in decoding]
    assert all(decision is not None and decision.is_zero for decision in decisions), "listeners see them all"


def test_a_controller_that_rests_is_asked_as_soon_as_other_requests_run() -> None:
    controller = Resting()
    engine = Engine(MarkovModel.random(5, 1), ScriptedDrafter(lambda tokens: []), controller=controller)
    engine.generate([[1, 2], [1, 3]], [SamplingParams(max_tokens=7), SamplingParams(max_tokens=20)])
    both, one = controller.asked[0], controller.asked[-1]
    assert len(both) == 2 and len(one) == 1
    # Six steps together, of which the first and the fifth are asked; then the other one alone, thirteen.
    assert controller.asked == [both] * 2 + [one] * 4


class Changing(ScriptedDrafter):
    """Finds something in two of four steps, as its kinds say what."""

    def __init__(self, kinds: Callable[[int], int]) -> None:
        super().__init__(lambda tokens: [])
        self.found = kinds

    def hint(self, request: DraftRequest) -> Hint:
        return Hint(self.found(len(request.tokens)), finds=len(request.tokens) % 4 < 2)


def test_what_drafters_find_anew_ends_a_rest_and_what_was_found_before_does_not() -> None:
    asked = []
    for kinds in (lambda length: length, lambda length: 1):
        controller = Resting()
        engine = Engine(MarkovModel.random(5, 1), Changing(kinds), controller=controller)
        engine.generate([[1, 2], [1, 3, 2]], SamplingParams(max_tokens=31))
        asked.append(len(controller.asked))
    assert asked == [15, 8]


class RestingWithDrafts(Resting):
    """Drafts four tokens, and decides the same for four steps."""

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        super().decide(views)
        return [Decision(next(iter(view.limits)), Budget(4)) for view in views]


def test_a_decision_to_draft_that_is_kept_drafts_no_more_than_the_answer_has_left() -> None:
    target, controller = MarkovModel.random(5, 1), RestingWithDrafts()
    engine = Engine(target, oracle(target), controller=controller)
    records = watched(engine)
    plain = Engine(target).generate([1, 2], SamplingParams(max_tokens=14))
    assert engine.generate([1, 2], SamplingParams(max_tokens=14)).token_ids == plain.token_ids
    # One token is the prompt's; each of the steps emits five but for the last, whose draft was cut to two.
    assert [record.nodes for record in records if not record.prefill] == [4, 4, 2]
    assert (len(controller.asked), controller.told) == (1, 3), "it is told what became of each draft"


@pytest.mark.parametrize(("kinds", "asked"), [(lambda length: 1, 15), (lambda length: length, 30)])
def test_a_decision_to_draft_is_kept_only_while_drafters_find_the_same(kinds: Callable[[int], int], asked: int) -> None:
    """Something is found in two of four steps; thirty steps of one token each follow the prompt's."""
    controller = RestingWithDrafts()
    engine = Engine(MarkovModel.random(5, 1), Changing(kinds), controller=controller)
    engine.generate([1, 2, 3], SamplingParams(max_tokens=31))
    assert len(controller.asked) == pytest.approx(asked, abs=8)


@pytest.mark.plants_failures
def test_a_decision_that_is_kept_asks_nobody_who_failed_since() -> None:
    calls = itertools.count(1)
    drafter = raising(ScriptedDrafter(lambda tokens: [[0, 0, 0, 0]]), propose=lambda *_: next(calls) == 2)
    engine = Engine(MarkovModel.random(5, 1), drafter, controller=RestingWithDrafts())
    answer = engine.generate([1, 2], SamplingParams(max_tokens=14))
    assert (answer.error, len(answer.token_ids), next(calls)) == (None, 14, 3)


@pytest.mark.plants_failures
@pytest.mark.parametrize("controller", ["fixed", "resting"])
def test_hints_that_fail_cost_no_answer(controller: str) -> None:
    target, params = MarkovModel.random(5, 1), SamplingParams(max_tokens=12)
    plain = Engine(target).generate([[1, 2], [1, 3]], params)
    calls = itertools.count(1)
    drafter = raising(PromptLookup(4, min_ngram=1), "no hint", hint=lambda request: next(calls) > 2)
    engine = Engine(target, drafter, controller=Resting() if controller == "resting" else controller)
    answers = engine.generate([[1, 2], [1, 3]], params)
    assert next(calls) > 3
    told = ("drafter 'prompt-lookup' failed (RuntimeError: no hint); the answer went on undrafted",)
    for answer, alone in zip(answers, plain, strict=True):
        assert (answer.error, answer.warnings, answer.token_ids) == (None, told, alone.token_ids)
