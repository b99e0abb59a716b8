"""Samplers with a known fault are found and named, sound ones raise no alarm; and the pieces of that evidence."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from certify.samplers.own_samplers import FAULTS, by_blocks, sampler, token_by_token
from truedraft.certify import Finding, Part, Report, Status
from truedraft.certify.e_process import log_dirichlet, smallest_detectable, total_variation, variation_by_chance
from truedraft.certify.faults import Fault, sound
from truedraft.certify.samplers import DEPENDENT, UNKNOWN, Sampler, certify_sampler
from truedraft.certify.samplers.run import Evidence, Tally
from truedraft.certify.samplers.worlds import SamplerWorld, accepted_by_rule, drawn, joint_of, sampler_worlds, suspects

WORLDS = sampler_worlds()
ROWS = 60_000


def farthest(probs: torch.Tensor) -> float:
    """The total variation of ROWS draws that one in a hundred thousand samples passes, at most (McDiarmid 1989)."""
    mean = variation_by_chance(ROWS, probs) * math.sqrt(math.pi / 2.0)  # of |x| at most the root of the mean of x^2
    return mean + math.sqrt(math.log(1e5) / (2.0 * ROWS))


def suspect(fault: str, detail: str) -> Fault:
    return next(each for each in suspects() if (each.name, each.detail) == (fault, detail))


@pytest.fixture(params=WORLDS, ids=lambda world: world.name)
def world(request: pytest.FixtureRequest) -> SamplerWorld:
    return request.param


def test_worlds_are_of_all_kinds() -> None:
    assert len({world.name for world in WORLDS}) == len(WORLDS)
    assert {world.vocab for world in WORLDS} == {2, 3, 4, 5}
    assert {world.drafted for world in WORLDS} == {1, 2, 3}
    pairs = [(world.target[0][0], world.draft[0][0]) for world in WORLDS]
    assert any(bool(((p == 0) & (q > 0)).any()) for p, q in pairs)
    assert any(bool(((q == 0) & (p > 0)).any()) for p, q in pairs)
    assert any(torch.equal(p, q) for p, q in pairs)
    assert any(0.0 < float((p - q).abs().sum()) < 0.05 for p, q in pairs)
    assert sum(float(q.max()) == 1.0 for _, q in pairs) >= 2


def test_the_joint_distribution_is_the_product(world: SamplerWorld) -> None:
    for cell, text in enumerate(itertools.product(range(world.vocab), repeat=world.drafted + 1)):
        product, before = 1.0, 0
        for depth, token in enumerate(text):
            product *= float(world.target[depth][before, token])
            before = before * world.vocab + token
        assert float(world.joint[cell]) == pytest.approx(product, abs=1e-15)
    assert float(world.joint.sum()) == pytest.approx(1.0)


def test_rows_follow_the_draft_and_cells_the_target(world: SamplerWorld) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = world.rows(ROWS, generator)
    first = rows.draft_tokens[:, 0].bincount(minlength=world.vocab).double()
    assert total_variation(first, world.draft[0][0]) < farthest(world.draft[0][0])
    nothing = torch.full((ROWS, world.drafted + 1), -1)
    cells = world.cells(nothing, generator).bincount(minlength=len(world.joint)).double()
    assert total_variation(cells, world.joint) < farthest(world.joint)
    assert not bool(cells[world.joint == 0.0].any())
    kept = torch.nn.functional.pad(rows.draft_tokens, (0, 1), value=-1)
    texts = world.cells(kept, generator) // world.vocab
    expected = torch.zeros(ROWS, dtype=torch.int64)
    for token in rows.draft_tokens.T:
        expected = expected * world.vocab + token
    assert torch.equal(texts, expected)


def test_tokens_without_mass_are_never_drawn() -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64).expand(5_000, -1)
    assert set(drawn(probs, torch.Generator().manual_seed(0)).tolist()) == {1, 3}


def test_closed_forms_are_distributions(world: SamplerWorld) -> None:
    assert torch.allclose(joint_of(Fault("none", form=sound), world), world.joint, atol=1e-12)
    for suspect in suspects():
        joint = joint_of(suspect, world)
        assert float(joint.sum()) == pytest.approx(1.0, abs=1e-9), suspect
        assert float(joint.min()) >= 0.0, suspect


def test_suspects_are_told_apart() -> None:
    found = suspects()
    assert len({(each.name, each.detail) for each in found}) == len(found)
    joints = [[joint_of(each, world) for world in WORLDS] for each in found]
    for one, other in itertools.combinations(range(len(found)), 2):
        pairs = zip(joints[one], joints[other], strict=True)
        assert max(float((a - b).abs().sum()) for a, b in pairs) / 2.0 > 0.01, (found[one], found[other])


@pytest.mark.parametrize(("fault", "detail"), FAULTS)
def test_a_closed_form_is_what_the_fault_emits(fault: str, detail: str) -> None:
    """In each world frequencies lie by the closed form, as near as chance brings them."""
    planted = suspect(fault, detail)
    generator = torch.Generator().manual_seed(3)
    for number, world in enumerate(WORLDS):
        rows = world.rows(ROWS, generator)
        cells = (
            world.cells(FAULTS[fault, detail].emit(rows, number), generator)
            .bincount(minlength=len(world.joint))
            .double()
        )
        exact = joint_of(planted, world)
        assert total_variation(cells, exact) < farthest(exact), world.name


def test_acceptance_by_the_rule() -> None:
    world = WORLDS[0]
    tally, generator = Tally(world), torch.Generator().manual_seed(0)
    rows = world.rows(ROWS, generator)
    uniforms = torch.rand(ROWS, 2 * world.drafted + 1, dtype=torch.float64, generator=generator)
    tally.add(rows, token_by_token(rows.draft_tokens, rows.draft_probs, rows.target_probs, uniforms))
    assert tally.accepted / ROWS == pytest.approx(accepted_by_rule(world), abs=0.03)
    assert tally.strays == tally.forbidden == 0


def test_the_average_over_priors_is_a_martingale() -> None:
    """Its mean over all samples of three rows is 1, the value it starts with; with a cell that p forbids, below."""
    for probs in ([0.5, 0.3, 0.2], [0.6, 0.4, 0.0]):
        p = torch.tensor(probs, dtype=torch.float64)
        mean = 0.0
        for sample in itertools.product(range(3), repeat=3):
            counts = torch.tensor(sample).bincount(minlength=3).double()
            mean += math.prod(probs[cell] for cell in sample) * math.exp(log_dirichlet(counts, p))
        assert mean == pytest.approx(1.0) if min(probs) > 0.0 else mean < 1.0


def test_the_whole_e_value_is_a_martingale() -> None:
    """The same of all parts together, suspects and pairs too: over every pair of cells of a small world."""
    world = next(each for each in WORLDS if each.vocab == 2 and each.drafted == 2)
    dense = SamplerWorld(
        "dense",
        tuple(torch.full_like(t, 0.25).index_fill(1, torch.tensor([1]), 0.75) for t in world.target),
        world.draft,
    )
    mean = 0.0
    for one, other in itertools.product(range(len(dense.joint)), repeat=2):
        evidence = Evidence([dense], suspects())
        evidence.tallies[0].count([torch.tensor([one]), torch.tensor([other])])
        mean += float(dense.joint[one] * dense.joint[other]) * math.exp(evidence.log_e())
    assert mean == pytest.approx(1.0)


def test_merged_evidence_is_that_of_all_rows() -> None:
    world = WORLDS[1]
    cells = [torch.tensor([0, 4, 8, 13]), torch.tensor([1, 5, 20, 26])]
    parts = [Evidence([world], suspects()) for _ in range(2)]
    for part in parts:
        part.tallies[0].count(cells)
    parts[0].merge(parts[1])
    assert parts[0].rows == 16
    whole = Evidence([world], suspects())
    whole.tallies[0].count(cells)
    whole.tallies[0].count(cells)
    assert parts[0].log_e() == whole.log_e()


def test_more_rows_show_smaller_deviations() -> None:
    probs = WORLDS[1].joint
    needed = math.log(1e6)
    few, many = (smallest_detectable(probs, rows, needed) for rows in (1_000, 16_000))
    assert 3.0 < few / many < 6.0  # four times as small, for sixteen times as many rows
    assert smallest_detectable(torch.tensor([1.0, 0.0], dtype=torch.float64), 16_000, needed) < 0.002
    assert smallest_detectable(probs, 4, needed) == 1.0


LONG = 1e6  # seconds: rows end these runs, not time
FEW = WORLDS[::4]
SOUND = {"token by token": token_by_token, "by blocks": by_blocks}


def certified(own: Sampler, rows: int = 200, seed: int = 0) -> Report:
    return certify_sampler(own, seconds=LONG, rows=rows, seed=seed)


def named(found: Report) -> Finding:
    """What is said of all worlds together."""
    return found.findings[0]


def planted_variation(fault: str, detail: str) -> float:
    """The total variation of a named fault, in closed form, averaged over worlds."""
    planted = suspect(fault, detail)
    return sum(float((joint_of(planted, world) - world.joint).abs().sum()) / 2.0 for world in WORLDS) / len(WORLDS)


@pytest.mark.parametrize("runs", [10, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SOUND)
def test_sound_samplers_raise_no_alarm(name: str, runs: int) -> None:
    """An e-value of 1,000 comes up in one of a thousand sound ones, at most; seeds are fixed."""
    for seed in range(runs):
        found = certify_sampler(sampler(SOUND[name]), seconds=LONG, rows=40, worlds=FEW, seed=seed)
        assert len(found.facts["runs"]) == 1
        assert found.facts["runs"][0]["rows_to"] == {"1e3": None, "1e6": None}
        assert "fault" not in named(found).facts


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_sampler_is_lossless_where_enough_was_seen(name: str) -> None:
    found = certified(sampler(SOUND[name]), rows=30_000)
    assert named(found).status is Status.HOLDS
    assert found.facts["runs"][0]["log10_e"] < 0.0
    assert named(found).facts["smallest_detectable_tv"] <= 0.05
    assert len([each for each in found.findings if each.part is Part.WORLDS]) == 1 + len(WORLDS)
    if name == "by blocks":  # it keeps more, and that is no fault
        assert found.facts["accepted"] > found.facts["accepted_by_rule"] + 0.01
    else:
        assert found.facts["accepted"] == pytest.approx(found.facts["accepted_by_rule"], abs=0.005)


def test_half_precision_is_not_called_faulty() -> None:
    def rounds(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor) -> Tensor:
        return token_by_token(draft_tokens, draft_probs.bfloat16(), target_probs.bfloat16(), uniforms)

    found = certified(Sampler.of(rounds, "rounds"), rows=4_000)
    assert found.facts["runs"][0]["rows_to"]["1e3"] is None
    assert "fault" not in named(found).facts


@pytest.mark.parametrize(("fault", "detail"), FAULTS)
def test_a_fault_is_found_and_named(fault: str, detail: str) -> None:
    found = certified(FAULTS[fault, detail])
    assert named(found).status is Status.FAILS
    assert (named(found).facts["fault"], named(found).facts["detail"]) == (fault, detail)
    assert named(found).facts["log10_over_next"] > 1.0
    assert len(found.facts["runs"]) == 2
    for run in found.facts["runs"]:
        assert run["rows_to"]["1e3"] is not None and run["tokens_to"]["1e6"] is not None
        assert run["rows_to"]["1e3"] <= (run["rows_to"]["1e6"] or 0) <= run["rows"]
        assert run["tokens_to"]["1e3"] is not None
        if planted_variation(fault, detail) >= 0.06:
            assert run["tokens_to"]["1e3"] <= 3_000
        assert run["log10_e"] > 3.0


def test_few_rows_are_not_enough_evidence() -> None:
    found = certified(sampler(), rows=20)
    assert named(found).status is Status.NOT_ENOUGH
    assert named(found).facts["smallest_detectable_tv"] > 0.05


def test_a_deviation_that_does_not_repeat_is_none() -> None:
    """A sampler that is wrong in its first calls alone, which are enough: two in each world."""
    calls, first = 0, 2 * len(WORLDS)

    def recovers(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        wrong = {"accept": lambda p, q: torch.ones_like(p)} if calls <= first else {}
        return token_by_token(draft_tokens, draft_probs, target_probs, uniforms, **wrong)

    found = certified(Sampler.of(recovers, "recovers"))
    assert named(found).status is Status.NOT_ENOUGH
    assert [run["rows_to"]["1e6"] is not None for run in found.facts["runs"]] == [True, False]


def test_rows_that_share_their_noise_are_found() -> None:
    def one_row(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
        batch, k = draft_tokens.shape
        uniforms = torch.rand(1, 2 * k + 1, dtype=torch.float64).expand(batch, -1)
        return token_by_token(draft_tokens, draft_probs, target_probs, uniforms)

    def one_seed(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
        torch.manual_seed(0)
        uniforms = torch.rand(len(draft_tokens), 2 * draft_tokens.shape[1] + 1, dtype=torch.float64)
        return token_by_token(draft_tokens, draft_probs, target_probs, uniforms)

    for own, detail in ((one_row, "neighbouring rows"), (one_seed, "calls repeat")):
        found = certified(Sampler.of(own, own.__name__))
        assert named(found).status is Status.FAILS
        assert named(found).facts["fault"] == DEPENDENT
        assert detail in named(found).facts["detail"]


def test_what_is_no_known_fault_is_not_called_one() -> None:
    """Ids are turned round: the last for the first."""

    def reversed_ids(draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor) -> Tensor:
        out = token_by_token(draft_tokens, draft_probs, target_probs, uniforms)
        return torch.where(out < 0, out, draft_probs.shape[-1] - 1 - out)

    found = certified(Sampler.of(reversed_ids, "reversed"))
    assert named(found).status is Status.FAILS
    assert named(found).facts["fault"] == UNKNOWN
    assert any("target probability 0" in note for note in named(found).facts["notes"])
    assert any("not drafted" in note for note in named(found).facts["notes"])


def test_runs_are_a_function_of_their_seed() -> None:
    own = sampler()
    first, again, other = (certified(own, rows=20, seed=seed) for seed in (3, 3, 4))
    assert first.facts == again.facts and first.findings == again.findings
    assert not math.isclose(first.facts["runs"][0]["log10_e"], other.facts["runs"][0]["log10_e"])
