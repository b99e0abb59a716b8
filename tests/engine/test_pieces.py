"""What a stream gives is what the answer holds, wherever it ends; the fixture of conftest.py checks each answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from support.answers import assert_consistent, fixed
from support.letters import Letters
from truedraft import Engine, SamplingParams
from truedraft.core.stats import DrafterCounters
from truedraft.core.verdict import Origin
from truedraft.drafters import Drafter, DraftModel
from truedraft.engine import Answer, Piece
from truedraft.testing import MarkovModel, ScriptedDrafter
from truedraft.verification import LenientSampling

TEXTS = ["a", "b", "ab", "ba", "", b"\xc3", b"\xa9", "c"]
"""Token 4 is special; 5 and 6 are the bytes of "é", held back until what follows them is known."""
A, B = 0, 1
VOCAB = len(TEXTS)
STOPS = ["ab", "bab", "aa", "é", "c", "abbaab", "b\ufffd", "never"]
DRAFTERS: dict[str, Callable[[MarkovModel], Drafter | None]] = {
    "none": lambda target: None,
    "itself": lambda target: DraftModel(MarkovModel(target.probs), 3),
    "tree": lambda target: DraftModel(MarkovModel.random(VOCAB, seed=2, context_length=200), branching=(3, 2, 1)),
    "scripted": lambda target: ScriptedDrafter(lambda tokens: [[tokens[-1], A, B], [B, A, B, A, B]]),
}


@pytest.fixture
def target() -> MarkovModel:
    made = MarkovModel.random(VOCAB, seed=3, sharpness=0.7, context_length=200)
    made.tokenizer = Letters(VOCAB, TEXTS)  # type: ignore[assignment]
    return made


@pytest.fixture(params=DRAFTERS)
def drafter(request: pytest.FixtureRequest, target: MarkovModel) -> Drafter | None:
    return DRAFTERS[request.param](target)


@pytest.mark.parametrize("kind", ["greedy", "sampled", "seeded"])
def test_pieces_join_to_the_answer_wherever_it_stops(target: MarkovModel, drafter: Drafter | None, kind: str) -> None:
    engine = fixed(target, drafter, entropy=5)
    params = [
        SamplingParams(
            max_tokens=40,
            temperature=0.0 if kind == "greedy" else 1.0,
            seed=seed if kind == "seeded" else None,
            stop=stops,
            stop_token_ids=ids,
        )
        for seed in range(3)
        for stops in [(stop,) for stop in STOPS] + [("é", "bab"), ()]
        for ids in ((), (7,))
    ]
    prompts = [[seed % VOCAB, (3 * seed + 1) % VOCAB] for seed in range(len(params))]
    answers = engine.generate(prompts, params)
    for number, (prompt, its, answer) in list(enumerate(zip(prompts, params, answers, strict=True)))[::7]:
        again = fixed(target, drafter, entropy=5)
        again._unseeded = itertools.count(number)
        pieces = list(again.stream(prompt, its))
        assert [token for piece in pieces for token in piece.token_ids] == answer.token_ids
        assert "".join(piece.text for piece in pieces) == answer.text
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}


def following(letters: str, *ends: int) -> MarkovModel:
    """Token i + 1 follows token i."""
    count = len(letters)
    after = torch.eye(count, dtype=torch.float64).roll(1, dims=1)
    made = MarkovModel(after.expand(count, count, count), eos_token_ids=ends)
    made.tokenizer = Letters(count, letters)  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(("depth", "length"), [(0, 1.0), (6, 5.0)])
def test_the_mean_acceptance_length_counts_what_came_up_to_the_end(depth: int, length: float) -> None:
    """Answers that end by an end of text, a stop id and a stop text of two tokens. Plain decoding has exactly one; a
    call with right guesses gives all but the prompt's own token: five, and none behind the end."""
    letters, by_id, by_text = "_abcdefghijk", SamplingParams(stop_token_ids=(6,)), SamplingParams(stop=("ef",))
    drafter = ScriptedDrafter(lambda tokens: [[len(tokens) + place for place in range(depth)]], depth=depth or 1)
    for model, params, behind in (
        (following(letters, 6), SamplingParams(), 1),
        (following(letters), by_id, 1),
        (following(letters), by_text, 2),
    ):
        answer = fixed(model, drafter).generate([0], params)
        stats = answer.stats
        assert (answer.finish_reason, stats.stop_tokens, stats.mean_acceptance_length) == ("stop", behind, length)
        assert stats.prefill_tokens + stats.emitted_tokens == len(answer.token_ids) == 6 - behind
        assert stats.target_calls == (1 if depth else 5)
    at_once = Engine(following(letters)).generate([0], SamplingParams(stop_token_ids=(1,)))
    assert (at_once.token_ids, at_once.stats.stop_tokens, at_once.stats.target_calls) == ([], 0, 0)


def test_a_stop_text_that_came_with_three_steps_is_taken_back_from_all_counts() -> None:
    """The answer is a | c c c c | b a | b a | b x by steps; with the stop text "babab" only "acccc" counts."""
    target = following("_accccbababx")
    guesses = {2: [2, 3, 4], 6: [6, 0], 8: [8, 0], 10: [10]}  # by tokens of the text so far, the prompt's one too
    engine = fixed(target, ScriptedDrafter(lambda tokens: [guesses.get(len(tokens), [])]), entropy=5)
    whole = engine.generate([0], SamplingParams(max_tokens=11))
    assert (whole.token_ids, whole.text) == (list(range(1, 12)), "accccbababx")
    assert (whole.stats.accepted_per_position, whole.stats.tried_per_position) == ([4, 1, 1], [4, 3, 1])
    cut = engine.generate([0], SamplingParams(max_tokens=11, stop=("babab",)))
    assert (cut.token_ids, cut.text) == ([1, 2, 3, 4, 5], "acccc")
    assert (cut.stats.accepted_tokens, cut.stats.emitted_tokens, cut.stats.target_calls) == (3, 4, 4)
    assert (cut.stats.accepted_per_position, cut.stats.tried_per_position) == ([1, 1, 1], [1, 1, 1])
    assert whole.stats.by_drafter == {"scripted": DrafterCounters(4, 8, 6)}
    assert cut.stats.by_drafter == {"scripted": DrafterCounters(4, 8, 3)}


def test_tokens_wait_no_longer_than_a_stop_text_may_begin(target: MarkovModel) -> None:
    target.tokenizer = Letters(VOCAB)  # type: ignore[assignment]
    params = SamplingParams(max_tokens=30, temperature=1.0)
    plain = [piece.token_ids for piece in Engine(target, entropy=4).stream([1, 2], params)]
    assert [len(tokens) for tokens in plain] == [1] * 30 + [0]
    stream = list(Engine(target, entropy=4).stream([1, 2], replace(params, stop=("ay", "byy"))))
    given = list(itertools.accumulate(len(piece.token_ids) for piece in stream[:-1]))
    # With "a" and "b" a stop text may begin: that one token waits for the next.
    held = [tokens[0] in (A, B) for tokens in plain[:-1]]
    assert given == [place - waits for place, waits in enumerate(held, 1)]
    assert any(held) and not all(held)


PERTURBED: dict[str, Callable[[Answer, list[Piece]], object]] = {
    "a stop id in a piece": lambda answer, pieces: pieces[-1].token_ids.append(3),
    "a token twice": lambda answer, pieces: pieces[1].token_ids.extend(pieces[1].token_ids),
    "an origin": lambda answer, pieces: max(pieces, key=lambda piece: len({*piece.origins})).origins.reverse(),
    "text lost": lambda answer, pieces: pieces.pop(1),
    "accepted": lambda answer, pieces: _add(answer, "accepted_tokens"),
    "emitted": lambda answer, pieces: _add(answer, "emitted_tokens"),
    "prefill": lambda answer, pieces: _add(answer, "prefill_tokens"),
    "a call not counted": lambda answer, pieces: setattr(answer.stats, "target_calls", 1),
    "tried": lambda answer, pieces: answer.stats.tried_per_position.__setitem__(0, 1),
    "accepted by position": lambda answer, pieces: answer.stats.accepted_per_position.reverse(),
}


def _add(answer: Answer, name: str) -> None:
    setattr(answer.stats, name, getattr(answer.stats, name) + 1)


@pytest.mark.parametrize("fault", PERTURBED)
def test_the_check_sees_what_it_is_for(target: MarkovModel, fault: str) -> None:
    engine = fixed(target, DraftModel(MarkovModel.random(VOCAB, seed=2, context_length=200), 3), entropy=5)
    pieces = list(engine.stream([3, 1], SamplingParams(max_tokens=30, temperature=1.0)))
    pieces = [piece for piece in pieces if piece.token_ids or piece.answer]
    answer = deepcopy(pieces[-1].answer)
    assert answer is not None
    pieces = [*deepcopy(pieces[:-1]), replace(pieces[-1], answer=answer)]
    assert_consistent(answer, pieces)
    assert answer.origins.count(Origin.ACCEPTED) > 3 and answer.origins.count(Origin.RECOVERED) > 3
    PERTURBED[fault](answer, pieces)
    with pytest.raises(AssertionError):
        assert_consistent(answer, pieces)


def test_a_break_behind_an_accepted_token_tries_no_further_position() -> None:
    """The draws below the broken tree row were judged by a stand-in of its distribution, so they count as not tried."""
    probs = MarkovModel.random(VOCAB, seed=1).probs.clone()
    for seed in range(8):
        told = MarkovModel(probs.clone())
        first = Engine(told).generate([3, 1], SamplingParams(max_tokens=3)).token_ids
        told.probs[first[0], first[1]] = torch.nan
        for rule in (None, LenientSampling(0.5)):
            drafter = ScriptedDrafter(lambda tokens: [[first[1], seed, 0, 1]])  # noqa: B023
            answers = fixed(told, drafter, rule, entropy=5).generate(
                [[3, 1]], SamplingParams(max_tokens=9, stop_token_ids=())
            )
            assert answers[0].finish_reason == "error"
            assert answers[0].token_ids == first[:2]
            assert answers[0].stats.tried_per_position == [1, 0, 0, 0]
