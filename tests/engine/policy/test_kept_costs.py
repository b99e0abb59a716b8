"""Kept costs: found while they hold, measured again when what they depend on changed or steps take something else."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import tempfile
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from support.fake_times import FakeClock, timed_model
from support.records import step_record
from support.tiny_models import noisy, packed
from truedraft import Engine, __version__
from truedraft.core.params import SamplingParams
from truedraft.core.theory import CostCurve, TargetCost
from truedraft.drafters import DraftModel, NoDrafter, PromptLookup
from truedraft.engine.policy import (
    CostStore,
    CurveCheck,
    Effort,
    Measured,
    StepCosts,
    drafter_cost,
    parts,
    sizes,
    target_cost,
)
from truedraft.engine.policy import kept as kept_module
from truedraft.engine.policy.kept import CostKey, drafter_key, model_identity, target_key
from truedraft.engine.policy.sizes import ratio_of_steps
from truedraft.errors import DrafterError
from truedraft.files import could_not_be_kept
from truedraft.machine import versions
from truedraft.measure.bench import OurEngine, Suite
from truedraft.measure.bench import costs as bench_costs
from truedraft.models.threads import torch_on_one_thread
from truedraft.testing import MarkovModel

ONCE = Effort(budget_s=0.0, least_rounds=1, most_rounds=1)


@pytest.fixture
def store(tmp_path: Path) -> CostStore:
    return CostStore(tmp_path / "kept" / "costs")


def model() -> MarkovModel:
    return MarkovModel.random(5, 0, context_length=64)


def cost_of(target: MarkovModel, store: CostStore, **options: bool) -> Measured[TargetCost]:
    return target_cost(target, effort=ONCE, store=store, **options)


def test_a_cost_is_measured_once_unless_it_is_to_be_refreshed(store: CostStore) -> None:
    first = cost_of(model(), store)
    assert (first.kept, first.warnings) == (False, ()) and first.measuring_s > 0.0
    again = target_cost(model(), store=store, progress=fail)
    assert again == Measured(first.value, True, 0.0, first.path)
    assert [path.name for path in store.folder.iterdir()] == [first.path.name]  # no temporary file stays
    fresh = cost_of(model(), store, refresh=True)
    assert not fresh.kept and fresh.warnings == ()
    assert cost_of(model(), store).value == fresh.value


def test_what_was_measured_beside_other_programs_is_kept_until_there_is_better(
    store: CostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_s = iter([1.0, 31.0, 31.0, 61.0])  # of measurements that take far less
    monkeypatch.setattr(kept_module, "run_delay_s", lambda: next(waited_s))
    found, key = cost_of(model(), store), target_key(model())
    [warning] = found.warnings
    assert "are in doubt, for other programs ran while they were measured (100% of that time" in warning
    assert store.doubt(key) == 1.0 and store.load(key, TargetCost) == (None, None)
    assert store.load(key, TargetCost, 1.0) == (found.value, None)
    assert not cost_of(model(), store).kept  # whoever wants to be sure measures again
    monkeypatch.setattr(kept_module, "run_delay_s", lambda: 1.0)
    assert not cost_of(model(), store).kept  # nobody was in the way
    assert cost_of(model(), store).kept and store.doubt(key) == 0.0
    better = store.load(key, TargetCost)
    assert store.save(key, dataclasses.asdict(found.value), 0.5) is None
    assert store.load(key, TargetCost) == better, "a worse one takes no place"


def test_a_short_cost_in_doubt_is_used_at_once_and_measured_on(
    store: CostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, params = packed("llama"), SamplingParams()
    delays = itertools.count(step=10.0)
    monkeypatch.setattr(kept_module, "run_delay_s", lambda: next(delays))  # each waits far longer than it takes
    first = StepCosts(target, store=store)
    [whole] = first.pieces({}, params, fail)
    while whole.go_on():
        pass
    kept = first.forwards()
    assert first.measuring_s == 0.0
    monkeypatch.setattr(kept_module, "measure_target", fail)
    again = StepCosts(target, store=store)
    [piece] = again.pieces({}, params, fail)
    assert piece.known and again.forwards() == kept
    monkeypatch.setattr(kept_module, "run_delay_s", lambda: 0.0)
    while piece.go_on():
        assert again.forwards() == kept, "a part of a measurement is worse"
    assert again.forwards() != kept
    sure = StepCosts(target, store=store)
    assert sure.pieces({}, params, fail) == [] and sure.forwards() == again.forwards()


def test_costs_are_known_from_their_first_round_on_and_hold_nothing_when_they_rest(
    store: CostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_module, "run_delay_s", lambda: 0.0)
    target, params, lookup = packed("llama"), SamplingParams(), PromptLookup()
    costs = StepCosts(target, store=store)
    forwards, drafting = costs.pieces({"lookup": lookup}, params, fail)
    assert (forwards.name, drafting.name) == (None, "lookup")
    for piece, keys in ((forwards, 24), (drafting, 10)):
        count = 0
        while not piece.known:
            piece.release()  # as between the last request and the next one
            assert piece.go_on()
            count += 1
        assert keys <= count <= 2 * keys + 1, "the round that warms up, and one that counts"
    assert costs.forwards()(4, [8]) > 0.0 and costs.drafting(lookup, params).points
    assert costs.measuring_s == 0.0, "nothing was measured at once"
    assert CostStore(store.folder / "short").doubt(target_key(target)) == pytest.approx(2 / 3, abs=1e-3)
    assert not lookup.held.requests
    for piece in (forwards, drafting):
        while piece.go_on():
            pass
    assert CostStore(store.folder / "short").doubt(target_key(target)) == 0.0
    zero = NoDrafter()
    assert all(each.name is None for each in StepCosts(target, store=store).pieces({"none": zero}, params, fail))
    failures: list[str] = []
    lookup.propose = lambda *given: 1 / 0  # type: ignore[method-assign]
    for piece in StepCosts(target, store=store).pieces(
        {"lookup": lookup}, params, lambda name, error: failures.append(name)
    ):
        assert piece.name is None
    assert failures == ["lookup"]


def fail(*given: object) -> NoReturn:
    pytest.fail(f"{given} was asked for")


def test_costs_are_measured_where_only_the_sources_are(store: CostStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        assert name != "truedraft", "an installed package was asked for"
        return "5.0"

    monkeypatch.setattr(metadata, "version", version)
    assert not cost_of(model(), store).kept
    assert versions()["truedraft"] == __version__


@pytest.mark.parametrize(
    "damage",
    [
        *(b"", b"{", b"[1, 2]", b"\xff\xfe", b'{"format": 1, "state": 3}', b'{"format": 99, "state": {}, "cost": {}}'),
        *({"cost": None}, {"cost": {}}, {"cost": {"base": 1, "attention": 2, "request_s": 3}}),
    ],
)
def test_a_corrupt_file_is_rebuilt_with_a_warning(store: CostStore, damage: bytes | dict[str, object]) -> None:
    path = cost_of(model(), store).path
    kept = json.loads(path.read_text())
    path.write_bytes(damage if isinstance(damage, bytes) else json.dumps(kept | damage).encode())
    rebuilt = cost_of(model(), store)
    assert not rebuilt.kept
    (warning,) = rebuilt.warnings
    assert str(path) in warning and warning.endswith("; they are measured again")
    assert ("damaged" in warning) == (not isinstance(damage, bytes))
    assert cost_of(model(), store).kept


def test_an_unreadable_place_is_told_and_worked_around(store: CostStore, tmp_path: Path) -> None:
    path = cost_of(model(), store).path
    path.unlink()
    path.mkdir()
    found = cost_of(model(), store)
    assert not found.kept
    read, kept = found.warnings
    assert "cannot be read" in read and "could not be kept" in kept
    assert not list(store.folder.glob("*.tmp"))
    (tmp_path / "file").write_text("in the way")
    found = cost_of(model(), CostStore(tmp_path / "file" / "costs"))
    (kept,) = found.warnings
    assert not found.kept and found.value(1, [10]) > 0.0 and "TRUEDRAFT_CACHE" in kept


def test_other_versions_and_sizes_make_it_stale(store: CostStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cost_of(model(), store)
    assert "vocab_size was 5, now 6" in cost_of(MarkovModel.random(6, 0, context_length=64), store).warnings[0]
    cost_of(model(), store)
    now = versions() | {"torch": "9.9"}
    monkeypatch.setattr(kept_module, "versions", lambda: now)
    stale = cost_of(model(), store)
    assert not stale.kept
    assert stale.warnings[0].endswith(f"(torch was {torch.__version__}, now 9.9); they are measured again")
    assert cost_of(model(), store).kept


def test_other_names_dtypes_and_threads_are_kept_side_by_side(
    store: CostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {cost_of(model(), store).path}
    single = MarkovModel(model().probs.float(), context_length=64)
    paths.add(cost_of(single, store).path)
    named, faster = model(), model()
    named.name, faster.fast_paths = "other", ("packed weights",)
    paths |= {cost_of(named, store).path, cost_of(faster, store).path}
    assert cost_of(faster, store).kept
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    paths.add(cost_of(model(), store).path)
    monkeypatch.undo()
    assert len(paths) == 5
    assert all(path.is_file() for path in paths)
    assert cost_of(model(), store).kept


def test_drafters_are_kept_by_their_options_and_distributions(store: CostStore) -> None:
    target, draft = packed("llama"), noisy("llama", 0.3)
    sampled = SamplingParams(temperature=1.0)
    drafters = [DraftModel(draft, 2), DraftModel(draft, branching=(2, 1)), DraftModel(draft, 2, min_probability=0.1)]
    drafters += [PromptLookup(3), PromptLookup(4)]  # type: ignore[list-item]
    found = [drafter_cost(drafter, target, effort=ONCE, store=store) for drafter in drafters]
    found.append(drafter_cost(drafters[0], target, params=sampled, effort=ONCE, store=store))
    assert not any(each.kept or each.warnings for each in found)
    assert len({each.path for each in found}) == len(found)
    again = drafter_cost(DraftModel(draft, 2), target, effort=ONCE, store=store)
    assert again.kept and again.value == found[0].value


def test_a_drafter_whose_cost_is_kept_drafts_once_before_it_is_asked_for(
    store: CostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it makes when it first drafts, as weights of 4 bits in a second, would be made in somebody's answer."""
    target = packed("llama")
    StepCosts(target, store=store).drafting(PromptLookup(), SamplingParams())
    costs, drafter, asked = StepCosts(target, store=store), PromptLookup(), []
    propose = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda *given: asked.append(given) or propose(*given))
    costs.drafting(drafter, SamplingParams())
    assert costs.measuring_s == 0.0 and 0 < len(asked) <= 2 and not drafter.held.requests
    del asked[:]
    costs.drafting(drafter, SamplingParams())
    assert not asked
    monkeypatch.setattr(drafter, "propose", lambda *given: 1 / 0)
    with pytest.raises(DrafterError, match="failed while its cost was measured"):
        StepCosts(target, store=store).drafting(drafter, SamplingParams())


def test_the_key_of_a_model_survives_loading_it_again() -> None:
    """Loading writes into the configuration: the name of our attention function, numbered, is one such thing."""
    assert model_identity(packed("llama")) == model_identity(packed("llama"))
    config = model_identity(packed("llama"))["config"]
    assert config is not None
    assert config != model_identity(packed("qwen3"))["config"]


def test_what_is_kept_is_plain_json(store: CostStore) -> None:
    key = CostKey("tests", {"a": 1}, {"b": [1, 2], "c": Path("x")})
    curve = CostCurve((1.0, 2.0), (0.1, 0.2))
    assert store.load(key, CostCurve) == (None, None)
    assert store.save(key, dataclasses.asdict(curve)) is None
    assert store.load(key, CostCurve) == (curve, None)
    assert json.loads(store.path(key).read_text())["what"] == "tests"


def test_costs_are_kept_in_the_cache_folder_and_counted(
    store: CostStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRUEDRAFT_CACHE", str(tmp_path / "own"))
    assert CostStore().folder == tmp_path / "own" / "costs"
    assert store.describe() == "none kept yet; measured at first use"
    cost_of(model(), store)
    cost_of(model(), CostStore(store.folder / "short"))
    assert store.describe() == f"2 kept in {store.folder}; measured at first use"


def test_a_full_disk_is_told_in_one_sentence_whatever_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it can be said once for all costs."""
    monkeypatch.setenv("TRUEDRAFT_CACHE", str(tmp_path))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    stores = CostStore(), CostStore(tmp_path / "costs" / "short")
    told = {store.save(CostKey(what, {}, {}), {}) for store in stores for what in ("one", "another")}
    assert told == {could_not_be_kept(tmp_path, "No space left on device")}


V = TargetCost.fit({(rows, context): 0.01 * rows for rows in (1, 2, 4) for context in (10, 100)})
STEP = step_record(2, 20, 1, target_s=0.02, total_s=0.03)


def test_the_median_of_50_decoding_steps_is_told() -> None:
    told: list[float] = []
    check = CurveCheck(V, told.append)
    for number in range(200):
        slow = number % 5 == 0  # a neighbour now and then
        check(step_record(2, 20, prefill=True, target_s=9.0))
        check(dataclasses.replace(STEP, target_s=9.0, settled=False))
        check(dataclasses.replace(STEP, target_s=0.2 if slow else 0.03 if number >= 100 else 0.02))
    assert told == pytest.approx([1.0, 1.0, 1.5, 1.5])


def test_what_is_too_far_apart() -> None:
    ratios = (0.5, 0.86, 0.88, 1.0, 1.14, 1.16, 3.0)
    assert [ratio for ratio in ratios if parts(ratio)] == [0.5, 0.86, 1.16, 3.0]


class Kept:
    """A kept curve of a model, judged as time goes by."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.clock.now = 1e9
        self.store = CostStore(folder, self.clock)
        self.model = MarkovModel.random(5, 0, context_length=64)

    def use(self) -> Measured[TargetCost]:
        return target_cost(self.model, effort=ONCE, store=self.store)

    def steps_take(self, ratio: float, after_s: float) -> None:
        self.clock.now += after_s
        StepCosts(self.model, store=self.store).judge(ratio)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    found = Kept(tmp_path)
    found.use()
    return found


@pytest.mark.parametrize("ratio", [0.4, 1.3])
def test_a_curve_from_which_steps_parted_is_measured_again_after_a_minute(kept: Kept, ratio: float) -> None:
    kept.steps_take(1.1, after_s=100)
    assert kept.use().kept
    kept.steps_take(ratio, after_s=100)
    again = kept.use()
    assert not again.kept
    assert again.warnings and f"steps took {ratio} times what they say" in again.warnings[0]
    kept.steps_take(2.0, after_s=59)
    assert kept.use().kept
    kept.steps_take(2.0, after_s=2)
    assert not kept.use().kept


def test_costs_in_a_step_are_those_kept_outside_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a step torch has one thread, forwards have all."""
    threads = [3]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    model = MarkovModel.random(5, 0)
    draft = DraftModel(model)
    outside = target_key(model), drafter_key(draft, model, SamplingParams())
    with torch_on_one_thread():
        assert (target_key(model), drafter_key(draft, model, SamplingParams())) == outside


def test_drafts_that_guess_among_fewer_ids_have_costs_of_their_own() -> None:
    target, params = packed("llama"), SamplingParams()
    keys = [drafter_key(DraftModel(target, ids=ids), target, params) for ids in (None, torch.arange(9))]
    assert keys[0].file_name != keys[1].file_name


def test_an_engine_uses_a_doubted_curve_until_there_is_a_better_one(kept: Kept) -> None:
    kept.steps_take(1.4, after_s=100)
    costs = StepCosts(kept.model, store=kept.store)
    (piece,) = costs.pieces({}, SamplingParams(), lambda name, error: None)
    assert piece.known and costs.forwards()(1, [3]) > 0.0 and costs.measuring_s == 0.0
    while piece.go_on():
        pass
    piece.release()
    again = StepCosts(kept.model, store=kept.store)
    assert not again.pieces({}, SamplingParams(), lambda name, error: None)


def test_steps_that_always_part_do_not_have_it_measured_for_ever(kept: Kept) -> None:
    """A small model's forwards take longer in an engine, whose other work empties the caches, than by themselves."""
    kept.steps_take(1.4, after_s=100)
    assert not kept.use().kept
    kept.steps_take(1.5, after_s=100)
    assert kept.use().kept, "as before it was measured again"
    kept.steps_take(0.6, after_s=100)
    assert not kept.use().kept
    kept.steps_take(1.0, after_s=100)
    kept.steps_take(0.6, after_s=100)
    assert not kept.use().kept, "what was usual once no longer is"


def test_nothing_is_kept_and_nothing_is_judged(tmp_path: Path) -> None:
    store = CostStore(tmp_path / "none")
    StepCosts(MarkovModel.random(5, 0, context_length=64), store=store).judge(9.0)
    assert not store.folder.exists()


def test_steps_of_an_engine_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr("truedraft.engine.step.time.perf_counter", clock)
    engine = Engine(timed_model(clock, lambda rows, contexts: 0.013 * rows))
    assert ratio_of_steps(engine, V) == pytest.approx(1.3)
    assert engine.listeners == []
    small = Engine(MarkovModel.random(5, 0, context_length=40))
    assert ratio_of_steps(small, V) is None


@pytest.mark.parametrize(("ratio", "measured"), [(1.1, 1), (2.2, 2), (None, 1)])
def test_a_benchmark_measures_kept_curves_again_where_plain_steps_part(
    kept: Kept, ratio: float | None, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def curve(model: MarkovModel, *, progress: object, refresh: bool) -> Measured[TargetCost]:
        asked.append(refresh)
        return dataclasses.replace(kept.use(), value=V, kept=not refresh)

    monkeypatch.setattr(bench_costs, "target_cost", curve)
    monkeypatch.setattr(bench_costs, "read_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(sizes, "ratio_of_steps", lambda engine, forwards: ratio)
    suite = Suite(kept.model, lossless=True, ours=[OurEngine("plain", Engine(kept.model))])
    found = bench_costs.measure_costs(suite, SamplingParams(), lambda done, label: None)
    assert asked == [False, True][:measured]
    assert found.kept == (measured == 1)
    assert any("2.20 times" in warning for warning in found.warnings) == (measured == 2)
