"""Plans: candidates and their words, predictions by hand, what-if, files, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from support.backends import fused_backend
from support.eagle_reference import random_eagle
from support.head_models import MarkovWithEmbedding, random_heads, random_redrafter
from support.ngram_tables import table_of
from support.tiny_models import GROUPED, PROMPTS, build, packed
from truedraft.core.intervals import Interval, ratio_of_rates
from truedraft.core.params import SamplingParams
from truedraft.core.theory import CostCurve, DraftCost, DraftPoint, TargetCost
from truedraft.drafters import from_spec, specs
from truedraft.drafters.heads.head import HeadRecord
from truedraft.engine.policy import CostStore, StepCosts
from truedraft.errors import CompositionError, DataError, OptionError, UnknownOptionError
from truedraft.kinds.eagle.module import Eagle3Config
from truedraft.measure import NONE, Plan, WhatIf, candidates_of, fitting_drafters, make_plan, read_plan
from truedraft.measure.plan import LONGEST
from truedraft.measure.predictions import Circumstance, Drafting, Footprint, PlanOption, options_of
from truedraft.measure.traces import trace_answers
from truedraft.measure.walks import Walk, walk_along
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.options import Words
from truedraft.testing import MarkovModel

GREEDY = SamplingParams(max_tokens=30)
DRAWN = dataclasses.replace(GREEDY, temperature=1.0)
ALONE = CostCurve((1.0, 64.0), (1.0, 1.0))


def forwards(row_s: float = 0.001) -> TargetCost:
    return TargetCost.fit({(rows, context): 0.009 + row_s * rows for rows in (1, 2, 64) for context in (0, 512)})


def option(words: str, nodes: int, tokens: float) -> PlanOption:
    return PlanOption(words, nodes, Interval(tokens, tokens - 0.1, tokens + 0.1), ((nodes, nodes, 1.0),))


def chains(cost: float = 0.001) -> Drafting:
    """Chains of one and two; a proposal takes 1 ms a token."""
    options = (option("draft,num_speculative_tokens=1", 1, 1.6), option("draft,num_speculative_tokens=2", 2, 2.0))
    points = DraftCost((DraftPoint(1, 1, cost), DraftPoint(2, 2, 2 * cost)))
    return Drafting("draft", "draft", options, (0.6, 0.4), points, ALONE, Footprint(100, 4, each_token=True))


def plan_of(*drafters: Drafting, row_s: float = 0.001) -> Plan:
    machine = {"cpu": "x", "threads": 1}
    model = {"model": "m", "fingerprint": None}
    return Plan("0", model, machine, {"temperature": 0.0}, 3, 90, 100, 1, forwards(row_s), Footprint(1000), drafters)


@pytest.fixture
def costs(tmp_path: Path) -> StepCosts:
    """Of the tiny Llama, given rather than measured."""
    return StepCosts(packed("llama"), forwards=forwards(), store=CostStore(tmp_path))


# --- candidates ---


def test_open_sizes_are_all_tried() -> None:
    world = MarkovModel.random(6, seed=1)
    (copied,) = candidates_of("prompt-lookup,max_ngram=3", world, GREEDY)
    assert copied.sizes == tuple(range(1, LONGEST + 1)) and copied.drafter.limits.depth == LONGEST
    assert copied.words[3] == "prompt-lookup,max_ngram=3,num_speculative_tokens=3"
    assert from_spec(copied.words[3], world).limits.depth == 3
    (chosen,) = candidates_of("prompt-lookup,num_speculative_tokens=2", world, GREEDY)
    assert chosen.words == {2: "prompt-lookup,num_speculative_tokens=2"}
    assert candidates_of("none", world, GREEDY) == []


def test_trees_of_likeliest_tokens_are_sized_by_nodes(tmp_path: Path) -> None:
    """Their lengths are open, too, but what a budget keeps are nodes."""
    world = MarkovModel.random(6, seed=1)
    table_of(world).write(tmp_path / "t.ngram")
    for word, sampled in ((f"ngram:{tmp_path}/t.ngram", DRAWN), ("suffix", GREEDY)):
        (trees,) = candidates_of(word, world, sampled)
        assert trees.sizes[-1] == trees.drafter.limits.nodes == 64
        assert trees.words[4] == f"{word},nodes=4" and from_spec(trees.words[4], world).limits.nodes == 4


def test_heads(tmp_path: Path) -> None:
    world = MarkovWithEmbedding.random(6, seed=1, context_length=80)
    random_heads(world, heads=3).save(tmp_path / "a,b", HeadRecord("m", world.fingerprint), dtype=torch.float32)
    random_redrafter(world).save(tmp_path / "r", HeadRecord("m", world.fingerprint), dtype=torch.float32)
    (trees,) = candidates_of(f'medusa:"{tmp_path / "a,b"}"', world, DRAWN)
    assert trees.sizes[-1] == trees.drafter.limits.nodes == 64
    assert from_spec(trees.words[4], world).limits.nodes == 4
    traces = trace_answers(world, [("one", [1, 2], GREEDY)], [trees.drafter])
    assert walk_along(trees.drafter, world, traces)[0].tokens == GREEDY.max_tokens - 1, "it drafts as it is"
    beams = candidates_of(f"redrafter:{tmp_path / 'r'}", world, GREEDY)
    assert len(beams) == 4 * 3 and len({id(each.timed) for each in beams}) == 4
    assert all(from_spec(words, world).limits.nodes == size for each in beams for size, words in each.words.items())
    coupled = candidates_of(f"redrafter:{tmp_path / 'r'}", world, dataclasses.replace(DRAWN, seed=1))
    assert all(len(each.sizes) == 1 for each in coupled) and len(coupled) > len(beams)
    assert len(candidates_of(f"redrafter:{tmp_path / 'r'},beams=2", world, GREEDY)) == 1
    # Drawn beams are not replayed, so where they would be drawn the plan is of chosen ones, and its words say so.
    for temperature, said in ((0.5, ""), (1.0, ",sampled=false")):
        params = dataclasses.replace(DRAWN, temperature=temperature)
        planned = candidates_of(f"redrafter:{tmp_path / 'r'}", world, params)
        assert all(words.count(",sampled=false") == bool(said) for each in planned for words in each.words.values())
        (whole,) = candidates_of(f"redrafter:{tmp_path / 'r'},beams=2,nodes=3", world, params)
        assert list(whole.words.values()) == [f"redrafter:{tmp_path / 'r'},beams=2,nodes=3{said}"]
    with pytest.raises(OptionError, match="best of several paths"):
        candidates_of(f"redrafter:{tmp_path / 'r'},sampled=true", world, DRAWN)


def test_heads_that_read_pairs_are_tried_as_chains_and_where_greedy_as_likeliest_trees(tmp_path: Path) -> None:
    target = packed("llama")
    sizes = Eagle3Config(48, target.vocab_size, (0, 1), heads=4, kv_heads=2, head=16, inner=64, most_positions=256)
    random_eagle(sizes).save(tmp_path, HeadRecord("tiny", None))
    words = f"eagle:{tmp_path}"
    for params, count in ((GREEDY, 2), (DRAWN, 1)):
        chains, *trees = candidates_of(words, target, params)
        assert chains.words[LONGEST] == f"{words},num_speculative_tokens={LONGEST}" and len(trees) == count - 1
        assert all(each.words[8] == f"{words},nodes=8" for each in trees)
        assert len(candidates_of(f"{words},branching=2-1", target, params)) == 1


def test_both_widths_of_weights_are_tried() -> None:
    config = LlamaConfig(**GROUPED | {"max_position_embeddings": 128})
    target = HuggingFaceModel(build(config, seed=3), None, "tiny", fused_backend)
    found = candidates_of("self", target, GREEDY)
    assert {each.typed for each in found} == {"self"}
    assert [each.words[2] for each in found] == [f"self:int{n},num_speculative_tokens=2" for n in (8, 4)]
    (chosen,) = candidates_of("self:int4,num_speculative_tokens=3", target, GREEDY)
    assert chosen.words == {3: "self:int4,num_speculative_tokens=3"}


def test_what_is_tried_without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(fitting_drafters(packed("llama"))) == ["prompt-lookup"]
    embedded = MarkovModel.random(3, seed=0)
    embedded.name = "embedded:target padded to 110M"
    assert next(iter(fitting_drafters(embedded))) == "prompt-lookup"
    monkeypatch.setattr(specs, "_LEAST_OWN_BYTES", 0)
    target = HuggingFaceModel(build(LlamaConfig(**GROUPED), seed=3), None, "tiny", fused_backend)
    assert list(fitting_drafters(target)) == ["prompt-lookup", "self:int4"], "as auto takes it"


def test_a_kind_alone_names_what_auto_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bare word is the newest of the kind, which auto may have left out."""
    target, place = packed("llama"), "truedraft.measure.plan"
    options = {"num_speculative_tokens": "12", "context": "512"}
    monkeypatch.setattr(f"{place}.auto_members", lambda *_, **__: [(Words("drafter", "draft", "old", options), None)])
    for newest, words in (("new", "draft:old,context=512"), ("old", "draft,context=512")):
        found = [SimpleNamespace(kind="draft", folder=name) for name in dict.fromkeys((newest, "old"))]
        monkeypatch.setattr(f"{place}.find_drafters", lambda _, found=found: found)
        assert list(fitting_drafters(target)) == [words]
    with pytest.raises(UnknownOptionError):
        candidates_of("nobody", packed("llama"), GREEDY)


# --- predictions ---


def test_a_prediction_by_hand() -> None:
    """2.0 tokens, V(1) = 10 ms, V(3) = 12 ms, drafting 2 ms: 2.0 * 10 / 14; one token: 1.6 * 10 / 12."""
    there, drafting = Circumstance(forwards(), 100), chains()
    one, two = (there.predict(drafting, each).speedup for each in drafting.options)
    assert one.value == pytest.approx(1.6 * 10 / 12) and two.value == pytest.approx(2.0 * 10 / 14)
    assert (two.low, two.high) == (pytest.approx(1.9 * 10 / 14), pytest.approx(2.1 * 10 / 14))
    assert there.best_of(drafting).option.nodes == 2


def test_steps_that_draft_nothing_cost_no_rows() -> None:
    drafting = chains()
    rare = dataclasses.replace(drafting.options[1], steps=((0, 0, 0.75), (2, 2, 0.25)))
    found = Circumstance(forwards(), 100).predict(drafting, rare)
    assert found.step_s == pytest.approx(0.75 * (0.010 + 0.001) + 0.25 * (0.012 + 0.002))


def test_break_even_and_batches() -> None:
    made = plan_of(chains(), row_s=0.002)
    (best,) = made.best()
    over = dict(made.there().over_batches(best))
    assert over[1] > 1.0 > over[64]
    first = made.break_even(best)
    assert first is not None
    there = Circumstance(forwards(0.002), 100)
    assert there.predict(best.drafting, best.option, first).speedup.value <= 1.0
    assert all(there.predict(best.drafting, best.option, n).speedup.value > 1.0 for n in range(1, first))
    assert made.recommended() == "draft,num_speculative_tokens=2"
    assert made.recommended(batch=64) == NONE
    assert plan_of(chains(), row_s=0.0).break_even(best) is None


def test_what_if() -> None:
    made = plan_of(chains(0.004))
    dear = made.best()[0].speedup.value
    assert made.best(what_if=WhatIf(draft_cost=0.5))[0].speedup.value > dear
    faster = WhatIf(bandwidth=2.0)
    base = faster.forwards(forwards()).base
    # V(1) is reading and takes half of 10 ms; the 2 ms of two more rows are computing and stay.
    assert base(1) == pytest.approx(0.005) and base(3) == pytest.approx(0.007)
    # A tenth of the target's bytes takes 1 ms a level, of which half is saved.
    assert faster.drafting(chains(0.004), Footprint(1000), forwards()).cost(2) == pytest.approx(0.008 - 0.001)
    with pytest.raises(OptionError, match="bandwidth"):
        WhatIf(bandwidth=0.0)


def test_options_of_walks() -> None:
    never = 1 << 40
    fewest = np.array([[1, 2], [never, never], [1, never], [never, never]])
    walk = Walk(fewest, (fewest < never).astype(float), np.array([[0, 1, 2]] * 4), np.array([2, 2, 2, 2]))
    options, survival = options_of([walk] * 5, {1: "a", 2: "b"})
    assert [each.tokens_per_call.value for each in options] == [2.0, 2.0]
    assert options[1].tokens_per_call == Interval(2.0, 2.0, 2.0)  # all prompts alike
    assert options[1].steps == ((2, 2, 1.0),)
    assert survival == (0.5, 0.5)
    with pytest.raises(DataError, match="second token"):
        options_of([], {1: "a"})


def test_intervals_hold_what_they_say() -> None:
    """Of 200 samples of 24 prompts about 95 % should hold the truth, a factor of 2; the seed is fixed."""
    generator = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        seconds = generator.gamma(9.0, 1.0, 24)
        found = ratio_of_rates([(8.0, 4.0 / s) for s in seconds], [(8.0, 1.0)] * 24)
        held += found.low <= 2.0 <= found.high  # the mean of 1 / s is 1 / 8
    assert held >= 176


# --- a plan of a model ---


def asked(count: int = 4) -> list[tuple[str, list[int], SamplingParams]]:
    return [(str(n), list(PROMPTS[n % 4]), GREEDY) for n in range(count)]


def test_a_plan_and_its_file(tmp_path: Path, costs: StepCosts) -> None:
    seen: list[float] = []
    words, told = ["prompt-lookup,min_ngram=1"], lambda done, remark: seen.append(done)
    made = make_plan(packed("llama"), words, asked(), GREEDY, costs=costs, progress=told)
    assert seen == sorted(seen) and seen[-1] == 1.0
    assert made.tokens == 4 * 29 and made.prompts == 4
    assert [each.nodes for each in made.drafters[0].options] == list(range(1, LONGEST + 1))
    made.check(packed("llama"))
    (tmp_path / "plan.json").write_text(json.dumps(made.to_dict()))
    for path in (tmp_path, tmp_path / "plan.json"):
        again = read_plan(path)
        assert json.dumps(again.to_dict()) == json.dumps(made.to_dict())
        assert again.recommended() == made.recommended()


def test_another_model_machine_or_version(costs: StepCosts) -> None:
    made = make_plan(packed("llama"), ["prompt-lookup"], asked(), GREEDY, costs=costs)
    with pytest.raises(CompositionError, match=r"another fingerprint .*run truedraft plan again"):
        made.check(packed("qwen3"))
    with pytest.raises(CompositionError, match="another threads"):
        dataclasses.replace(made, machine=dict(made.machine) | {"threads": 97}).check(packed("llama"))
    with pytest.raises(CompositionError, match=r"of truedraft 0\.0\.0"):
        dataclasses.replace(made, truedraft="0.0.0").check(packed("llama"))
    with pytest.raises(CompositionError, match="another dtype"):
        dataclasses.replace(made, model=dict(made.model) | {"dtype": "float16"}).check(packed("llama"))
    renamed = dataclasses.replace(made, model=dict(made.model) | {"model": "another name of it"})
    renamed.check(packed("llama"))


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"format": 9}', '{"format": 2, "truedraft": "0"}'])
def test_what_is_no_plan(tmp_path: Path, text: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(DataError, match="run truedraft plan again"):
        read_plan(file)
    with pytest.raises(DataError, match="cannot read"):
        read_plan(tmp_path / "none.json")


def test_nothing_to_plan_with(costs: StepCosts) -> None:
    with pytest.raises(OptionError, match="no drafter"):
        make_plan(packed("llama"), ["none"], asked(), GREEDY, costs=costs)
    with pytest.raises(OptionError, match="cannot be planned with"):
        make_plan(packed("llama"), ["prompt-lookup"], asked(), dataclasses.replace(GREEDY, min_tokens=2), costs=costs)
    short = [(name, prompt, dataclasses.replace(own, max_tokens=1)) for name, prompt, own in asked()]
    with pytest.raises(DataError, match="second token"):
        make_plan(packed("llama"), ["prompt-lookup"], short, GREEDY, costs=costs)
