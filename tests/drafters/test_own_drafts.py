"""What requests bring along to be drafted from: predictions, and forms of their answers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from support import tiny_models
from truedraft import Engine, SamplingParams
from truedraft.core.budget import Budget
from truedraft.core.noise import KeyedNoise
from truedraft.drafters import DraftModel, DraftRequest, NoDrafter, Portfolio
from truedraft.drafters.prediction import FormDrafter, PredictionDrafter, _Follower, with_own_drafts
from truedraft.errors import OptionError

BUDGET = Budget(depth=8, nodes=8)


def places(text: Sequence[int], answer: Sequence[int]) -> list[int | None]:
    """Where an answer stands in a prediction, after each of its tokens."""
    follower = _Follower(text, 0)
    return [follower.find(answer[: count + 1])[0] for count in range(len(answer))]


def test_the_place_moves_with_the_answer_and_is_found_again() -> None:
    assert places([1, 2, 3, 4, 5, 6], [1, 9, 4, 5]) == [1, None, None, 5]
    assert places([1, 2, 3], [1, 2, 3, 4]) == [1, 2, None, None], "nothing follows the end"
    assert places([5, 6, 1, 5, 6, 2, 5, 6, 3], [5, 6, 1, 5, 6, 7, 5, 6]) == [1, 2, 3, 4, 5, None, None, 5]
    follower = _Follower([5, 6, 7, 0, 8, 5, 6, 9, 9], 0)
    assert follower.find([8, 5, 6]) == (7, 0), "the longest ending counts, not the nearest"
    assert follower.find([8, 5, 6, 9]) == (8, 1)
    assert _Follower([], 0).find([1, 2]) == (None, 0)


def test_of_places_alike_the_next_one_behind_counts_then_the_nearest_before() -> None:
    follower = _Follower([5, 6, 1, 5, 6, 2, 5, 6, 3], 0)
    assert follower.find([5, 6, 1, 5]) == (4, 4)
    assert follower.find([5, 6, 1, 5, 7, 5, 6]) == (5, 0), "the answer left at 4"
    assert follower.find([5, 6, 1, 5, 7, 5, 6, 2, 5, 6, 3, 5, 6]) == (8, 0), "nothing lies behind the end"
    long = _Follower([5, 6] * 5000, 0)
    assert long.find([5, 6, 5, 6, 9, 5, 6]) == (4, 0), "where it stood"


def test_it_reads_only_what_is_new() -> None:
    follower = _Follower([1, 2, 3, 4], 2)
    assert follower.find([7, 7]) == (0, 0), "the prompt is no part of the answer"
    assert follower.find([7, 7, 1, 2]) == (2, 2)


def test_it_drafts_within_its_budget_and_only_where_something_is_predicted() -> None:
    drafter = PredictionDrafter(num_speculative_tokens=4)
    request = DraftRequest(1, SamplingParams(), [7, 7], prediction=(1, 2, 3, 4, 5, 6))
    assert drafter.serves(request) and not drafter.serves(DraftRequest(2, SamplingParams(), [7]))
    drafter.begin(request)
    noise = KeyedNoise(0, 2, 0)
    (made,) = drafter.propose([request], [BUDGET], [noise])
    assert made.tree.host_ids == [1, 2, 3, 4] and drafter.hint(request).finds
    (none,) = drafter.propose([request], [Budget(0)], [noise])
    assert len(none.tree) == 0
    drafter.end(request)
    assert not drafter.held.requests
    for number in (0, 5000):
        with pytest.raises(
            OptionError, match=f"num_speculative_tokens must be 1 or more and at most 1024, got {number}"
        ):
            PredictionDrafter(number)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prediction_changes_no_answer_and_saves_calls(temperature: float) -> None:
    target = tiny_models.packed("llama")
    prompt = [3, 1, 4, 1, 5]
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    plain = Engine(target).generate(prompt, params)
    engine = Engine(target, with_own_drafts(DraftModel(tiny_models.noisy("llama", 0.05))))
    wrong = [*plain.token_ids[:15], 0, 1, 2, *plain.token_ids[17:]]
    for predicted in (plain.token_ids, wrong, [0] * 30, [1]):
        asked = SamplingParams(**{**_options(params), "prediction": predicted})
        answer = engine.generate(prompt, asked)
        assert answer.token_ids == plain.token_ids
    copied = Engine(target, PredictionDrafter(), controller="fixed")
    asked = SamplingParams(**{**_options(params), "prediction": plain.token_ids})
    answer = copied.generate(prompt, asked)
    assert answer.token_ids == plain.token_ids and answer.stats.target_calls <= 3
    assert answer.stats.by_drafter["prediction"].accepted_tokens >= 36


def _options(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in ("max_tokens", "temperature", "seed")}


def test_they_stand_by_beside_other_drafters() -> None:
    draft = DraftModel(tiny_models.packed("llama"))
    together = with_own_drafts(draft)
    assert list(together.members) == ["draft", "prediction", "forced"]
    assert with_own_drafts(NoDrafter()).limits.is_zero
    named = Portfolio({"prediction": PredictionDrafter(4), "draft": draft})
    assert with_own_drafts(named).members["prediction"] is named.members["prediction"]
    assert not FormDrafter().serves(DraftRequest(1, SamplingParams(), [1]))


def test_requests_without_a_prediction_ask_nobody_for_one() -> None:
    target = tiny_models.packed("llama")
    engine = Engine(target, with_own_drafts(DraftModel(tiny_models.packed("llama"))))
    assert engine.prepare([1, 2]).drafting.excluded == {"prediction", "forced"}
    assert engine.prepare([1, 2], SamplingParams(prediction=(1, 2))).drafting.excluded == {"forced"}
    with pytest.raises(OptionError, match="prediction is a text and needs a tokenizer"):
        engine.prepare([1, 2], SamplingParams(prediction="text"))
    context = target.context_length
    with pytest.raises(OptionError, match=f"prediction has {context + 1} tokens, and this model's context holds"):
        engine.prepare([1, 2], SamplingParams(prediction=(1,) * (context + 1)))
