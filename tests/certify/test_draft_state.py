"""A drafter's state after many steps: fresh where it is kept right, found where it is stale, and never a fault."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from certify.planted_faults import TEXTS, ForgetsTheLast, StaleDraft, findings_of, healthy, markov
from support.faulty_parts import keeps_rejected
from support.head_models import MarkovWithHead, fitted_heads
from support.ngram_tables import table_of
from support.parallel_drafting import beside
from support.tiny_models import PROMPTS, noisy, packed
from support.virtual_time import VirtualTime
from truedraft import SamplingParams
from truedraft.certify.checks import Context, Finding, Stack, Status
from truedraft.certify.draft_state import DraftState
from truedraft.certify.equality import Equality
from truedraft.drafters import DraftModel, Medusa, NgramDrafter, NoDrafter, PromptLookup
from truedraft.drafters.base import Drafter
from truedraft.kinds.medusa.guess_trees import GuessTrees
from truedraft.models.base import LanguageModel
from truedraft.verification import SpeculativeSampling

PARAMS = SamplingParams(max_tokens=32)


def draft(kind: type[DraftModel] = DraftModel, **options: object) -> Drafter:
    return kind(markov(0, astray=0.8), **options)  # type: ignore[arg-type]


def finding(drafter: Drafter, batch: int = 3, target: LanguageModel | None = None) -> Finding:
    stack = healthy().but(target=target or markov(0), drafter=drafter)
    (found,) = findings_of(DraftState(), stack, PARAMS, batch).values()
    return found


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "drafter",
    [
        draft,
        lambda: draft(branching=(2, 2, 1)),
        lambda: PromptLookup(min_ngram=1),
        lambda: NgramDrafter(table_of(markov(0))),
    ],
    ids=["chain", "tree", "lookup", "table"],
)
def test_a_state_that_is_kept_right_is_fresh(drafter: type[Drafter], batch: int) -> None:
    found = finding(drafter(), batch)
    assert found.status is Status.HOLDS and not found.facts["stale"]
    assert found.facts["compared"] > 20 and found.facts["different"] == found.facts["skipped"] == 0
    assert found.facts["draft_acceptance_rate"] == found.facts["draft_acceptance_rate_fresh"] > 0
    if "'draft'" in found.name:
        assert found.facts["caches_compared"] > 20 and found.facts["largest_cache_difference"] == 0.0


@pytest.mark.parametrize("batch", [1, 3])
def test_of_a_draft_in_another_process_proposals_are_compared_alone(batch: int) -> None:
    """Its caches are there; those that lie ready here are empty, and equal nothing."""
    drafter, worker = beside(markov(0, astray=0.8))
    found = finding(drafter, batch)
    assert found.status is Status.HOLDS and found.facts["compared"] > 20 and worker.replies
    assert found.facts["caches_compared"] == 0 and "caches" not in found.summary


def test_heads_are_fresh() -> None:
    target = MarkovWithHead(markov(0).probs)
    heads = fitted_heads(target, [[1, 2, 3, 4, 5, 6, 7, 0] * 4])
    assert finding(Medusa(heads, GuessTrees(3), nodes=8), target=target).status is Status.HOLDS


@pytest.mark.parametrize(
    ("context", "prompts"),
    [(None, PROMPTS[::2]), (128, [[(7 * n + 1) % 97 for n in range(end)] for end in (121, 190)])],
)
def test_a_llama_as_draft_is_fresh_up_to_rounding(context: int | None, prompts: Sequence[Sequence[int]]) -> None:
    stack = Stack(packed("llama"), DraftModel(noisy("llama", 0.05), 3, context=context), SpeculativeSampling())
    params = SamplingParams(max_tokens=16)
    (found,) = DraftState().run(Context(stack, prompts[:2], params, 2))
    assert found.status is Status.HOLDS and found.facts["caches_different"] == 0
    assert found.facts["largest_cache_difference"] < 1e-4


@pytest.mark.parametrize(
    ("kind", "options"),
    [(StaleDraft, {"branching": (3, 2, 1)}), (ForgetsTheLast, {})],
    ids=["tree keeps the wrong entries", "chain forgets its last token"],
)
def test_a_stale_cache_is_reported_and_answers_stay_exact(kind: type[DraftModel], options: dict[str, object]) -> None:
    found = finding(draft(kind, **options))
    assert found.status is Status.MEASURED and found.facts["stale"]
    assert found.facts["different"] > 0 and found.facts["caches_different"] > 0 and found.facts["examples"]
    assert found.facts["draft_acceptance_rate"] < found.facts["draft_acceptance_rate_fresh"]
    assert "Stale" in found.summary and "answers stay exact, acceptance falls from" in found.summary
    stack = healthy().but(drafter=draft(kind, **options))
    equal = Equality().run(Context(stack, TEXTS, SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=5), 3))
    assert {each.status for each in equal} == {Status.HOLDS}


def test_a_broken_target_does_not_make_the_draft_stale() -> None:
    """Places where the new request comes to another text are skipped."""
    found = finding(draft(), target=keeps_rejected(markov(0)))
    assert found.status is Status.HOLDS and found.facts["skipped"] > 0


def test_no_time_is_not_enough_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while answers come about nor while they are looked at does it take a step more than its time."""
    time = VirtualTime(monkeypatch, step_s=1.0)
    statuses = []
    for seconds in (0.0, 2.0, 4.0, 8.0, 1000.0):
        time.seconds = 0.0
        (found,) = DraftState().run(Context(healthy().but(drafter=draft()), TEXTS, PARAMS, 3, seconds))
        assert time.seconds <= 4 * seconds + 1
        assert (found.status is Status.NOT_ENOUGH) == (found.facts["compared"] == 0)
        statuses.append(found.status)
    assert statuses[:2] == [Status.NOT_ENOUGH] * 2 and statuses[-1] is Status.HOLDS


def test_without_proposals_there_is_nothing_to_say() -> None:
    assert finding(NoDrafter()).status is Status.DOES_NOT_APPLY
