"""`train_heads` for every kind: what it leaves behind, honest numbers, exact after a kill, refusals by name."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.linear_kind import LinearDrafter, LinearTrainingConfig
from training.head_runs import assert_resumed_equals_uninterrupted, copied, full_disk, log_of, trained_in
from truedraft import Engine, SamplingParams, load_model, training
from truedraft.core.stats import Counters
from truedraft.drafters import DFlash, DSpark, Eagle3, PEagle
from truedraft.drafters.heads.calibration import Calibration
from truedraft.drafters.heads.head import HeadRecord
from truedraft.errors import ModelError, OptionError, TrainingError
from truedraft.kinds.block.training import DFlashTrainingConfig, DSparkTrainingConfig
from truedraft.kinds.dflash2.drafter import DFlash2
from truedraft.kinds.dflash2.training import DFlash2TrainingConfig
from truedraft.kinds.eagle.module import Eagle3Head
from truedraft.kinds.eagle.training import Eagle3TrainingConfig, PEagleTrainingConfig
from truedraft.kinds.medusa.drafter import Medusa
from truedraft.kinds.medusa.guess_trees import GuessTrees
from truedraft.kinds.medusa.training import MedusaTrainingConfig
from truedraft.kinds.redrafter import traced_beams
from truedraft.kinds.redrafter.drafter import Redrafter
from truedraft.kinds.redrafter.module import RedrafterHead
from truedraft.kinds.redrafter.training import RedrafterTrainingConfig
from truedraft.training.heads import HeadJob, lm_head_of, starting_head, train_heads
from truedraft.training.loop import Callbacks
from truedraft.training.texts.answer_writer import WritingConfig

ANSWER = 20
COMMON: dict[str, Any] = {
    "tokens": 400, "writing": WritingConfig(answer_tokens=16, batch=8), "positions_per_step": 64,
    "checkpoint_every_s": 0.0,
}  # fmt: skip
LAYERS: dict[str, Any] = COMMON | {
    "steps": 30, "learning_rate": 1e-2, "length": 4, "evaluate_every": 10, "layers": (0, 1), "draft_vocab": 64,
}  # fmt: skip
KINDS: dict[str, Any] = {
    "medusa": MedusaTrainingConfig(**COMMON, heads=2, steps=7, window=8, learning_rate=2e-2, evaluate_every=3),
    "redrafter": RedrafterTrainingConfig(
        **COMMON, length=3, state=24, layers=1, steps=6, self_fed=0.3, learning_rate=2e-2, evaluate_every=3
    ),
    "eagle": Eagle3TrainingConfig(**LAYERS),
    "dflash": DFlashTrainingConfig(**LAYERS, anchors=6),
    "dflash2": DFlash2TrainingConfig(**LAYERS | {"draft_vocab": 0}, anchors=6, rank=8, candidates=8),
    "dspark": DSparkTrainingConfig(**LAYERS, anchors=4, markov=8, markov_kind="rnn", by_acceptance=True),
    "p-eagle": PEagleTrainingConfig(**LAYERS, depth=2, own_embedding=True),
    "linear": LinearTrainingConfig(**COMMON, steps=40, learning_rate=2e-2, evaluate_every=20),
}
LEVELS: dict[str, Any] = {"eagle": Eagle3, "dflash": DFlash, "dflash2": DFlash2, "dspark": DSpark, "p-eagle": PEagle}
SIZES: dict[str, Any] = {  # what is measured at each temperature, by the entry of the record that has it
    "medusa": [("nodes", 8), ("nodes", 32)],
    "redrafter": [("nodes", 8), ("nodes", 32)],
    "linear": [("num_speculative_tokens", 1)],
} | dict.fromkeys(LEVELS, (("num_speculative_tokens", 2), ("num_speculative_tokens", 4), ("nodes", 16)))


@pytest.fixture(scope="module", autouse=True)
def few_positions(short_answers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced_beams, "_POSITIONS", 40)
        yield


@pytest.fixture(scope="module")
def training_of(learned_folder, prompts, tmp_path_factory):
    """The uninterrupted training of a kind, once."""
    return functools.cache(lambda kind: trained_in(learned_folder, prompts, tmp_path_factory.mktemp(kind), KINDS[kind]))


def drafter_of(kind: str, folder: Path, about: Any) -> Any:
    """The drafter of a measurement."""
    head = KINDS[kind].head.load(folder)
    if kind == "redrafter":  # chosen beams, which are replayed
        return Redrafter(head, **{name: about[name] for name in ("nodes", "beams", "length")}, sampled=False)
    if kind == "medusa":
        chosen = GuessTrees(head.reach, calibration=Calibration.of(head.record.facts["survival"]))
        return Medusa(head, head.record.trees if about["trees"] == "counted" else chosen, nodes=about["nodes"])
    if kind == "linear":
        return LinearDrafter(head)
    nodes = {} if "nodes" not in about else {"nodes": about["nodes"]}
    return LEVELS[kind](head, num_speculative_tokens=about.get("num_speculative_tokens", 4), **nodes)


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_leaves_behind(kind, training_of, learned_folder):
    (out, result, said), config = training_of(kind), KINDS[kind]
    kept, target, word = config.head.load(out), load_model(learned_folder), config.head.place_word
    assert kept.record.fingerprint == target.fingerprint and kept.record.target_name == str(learned_folder)
    assert kept.record.facts["served"] == [each.as_dict() for each in result.report.evaluations]
    assert f"{kind}:FOLDER" in (out / "README.md").read_text() and len(list(out.glob("*.safetensors"))) == 1
    assert len(json.loads((out / "work" / "run.json").read_text())["identity"]["text_sha256"]) == 64
    assert json.loads(json.dumps(result.as_dict(), allow_nan=False))["steps"] == config.steps == result.effort.steps
    log, every = log_of(out), config.evaluate_every
    measured = sorted({*range(every - 1, config.steps, every), config.steps - 1})
    assert [each["step"] for each in log if f"{word}_1_top_1" in each] == measured
    for place in range(1, kept.reach + 1):
        first = log[every - 1][f"{word}_{place}_top_1"]
        assert 0.0 <= first <= log[every - 1].get(f"{word}_{place}_top_5", 1.0) <= 1.0
    assert [done for what, done, *_ in said if what == "training"] == list(range(1, config.steps + 1))
    assert any((what, done, total) == ("writing text", 20, 20) for what, done, total, _ in said)
    last = next(remark for what, done, _, remark in said if what == "training" and done == config.steps)
    assert f"{word}s right" in last
    if kind in LEVELS:
        assert kept.config.layers == (0, 1) and result.report.evaluations[1].stats.accepted_tokens > 10


@pytest.mark.parametrize("kind", KINDS)
def test_the_measured_acceptance_is_that_of_the_engine(kind, training_of, learned_folder, prompts):
    out, result, _ = training_of(kind)
    target, reach = load_model(learned_folder), KINDS[kind].head.load(out).reach
    found = [(each.temperature, *size) for each in result.report.evaluations for size in each.about.items()]
    heats = (0.0,) if kind == "linear" else (0.0, 1.0)
    assert {(heat, *size) for heat in heats for size in SIZES[kind]} <= set(found)
    for served in result.report.evaluations:
        params = SamplingParams(max_tokens=ANSWER, temperature=served.temperature)
        engine = Engine(target, drafter_of(kind, out, served.about), controller="fixed", entropy=0)
        answers = engine.generate(list(prompts.test), params)
        stats = sum((answer.stats for answer in answers), Counters())
        assert (served.stats.emitted_tokens, served.stats.target_calls) == (stats.emitted_tokens, stats.target_calls)
        tokens = stats.emitted_tokens + stats.stop_tokens
        assert served.as_dict()["mean_acceptance_length"] == pytest.approx(tokens / stats.target_calls)
        assert 0.9 < served.about["promised"] <= reach + 1.0
        if served.temperature == 0.0:
            plain = Engine(target).generate(list(prompts.test), params)
            assert [each.token_ids for each in answers] == [each.token_ids for each in plain]


@pytest.mark.parametrize("kind", ["medusa", "redrafter", "dspark", "p-eagle", "dflash2"])
def test_resumed_after_a_kill_equals_uninterrupted_to_the_bit(kind, training_of, learned_folder, prompts, tmp_path):
    assert_resumed_equals_uninterrupted(training_of(kind), learned_folder, prompts, tmp_path, KINDS[kind], killed_at=4)


CHANGES: dict[str, dict[str, Any]] = {
    "medusa": {
        "heads was 2 and is now 3": {"heads": 3},
        "law_share was 1.0 and is now 0.5": {"law_share": 0.5},
        "optimizer.matrix_rate was 0.02 and is now 0.01": {"learning_rate": 1e-2},
        "answer_tokens was 16 and is now 15": {"writing": WritingConfig(answer_tokens=15)},
    },
    "redrafter": {
        f"{name} was {getattr(KINDS['redrafter'], name)} and is now {value}": {name: value}
        for name, value in {"length": 4, "loss": "tv", "self_fed": 0.0, "laws": "stored", "place_decay": 0.7}.items()
    },
}


@pytest.mark.parametrize("kind", CHANGES)
def test_another_configuration_is_refused_by_name(kind, training_of, learned_folder, prompts, tmp_path):
    folder, config = tmp_path / "out", KINDS[kind]
    shutil.copytree(training_of(kind)[0], folder)
    record = (folder / "work" / "run.json").read_text()
    for message, changes in CHANGES[kind].items():
        with pytest.raises(OptionError, match=message):
            train_heads(learned_folder, prompts, folder, replace(config, **changes))
    with pytest.raises(OptionError, match="prompts_sha256"):
        train_heads(learned_folder, replace(prompts, train=prompts.train[:-1]), folder, config)
    assert (folder / "work" / "run.json").read_text() == record


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (MedusaTrainingConfig, {"heads": 0}, "heads must be a whole number of 1 or more, got 0"),
        (MedusaTrainingConfig, {"stage": 3}, "stage must be 1 .* or 2"),
        (MedusaTrainingConfig, {"epochs": 0.0}, "epochs must be a number above 0"),
        (MedusaTrainingConfig, {"steps": 0}, "steps"),
        (MedusaTrainingConfig, {"law_share": 2.0}, r"law_share must be a number in \[0, 1\]"),
        (MedusaTrainingConfig, {"seed": -1}, "seed"),
        (MedusaTrainingConfig, {"place_decay": 0.0}, "place_decay must lie in"),
        (RedrafterTrainingConfig, {"length": 0}, "length"),
        (RedrafterTrainingConfig, {"state": 0}, "state"),
        (RedrafterTrainingConfig, {"layers": -1}, "layers must be a whole number of 0 or more"),
        (RedrafterTrainingConfig, {"loss": "l2"}, "unknown loss 'l2'"),
        (RedrafterTrainingConfig, {"loss": "kl=x"}, "is not a positive number"),
        (RedrafterTrainingConfig, {"laws": "guessed"}, "valid: computed, stored"),
        (RedrafterTrainingConfig, {"laws": "stored", "loss": "ce"}, "need not be stored for the loss 'ce'"),
        (RedrafterTrainingConfig, {"self_fed": 1.5}, "self_fed"),
        (Eagle3TrainingConfig, {"loss": "ce"}, "must compare distributions"),
        (Eagle3TrainingConfig, {"stage": 2}, "must be 1: the target of an EAGLE-3 head"),
        (DFlashTrainingConfig, {"anchors": 0}, "anchors"),
        (DSparkTrainingConfig, {"markov": 0}, "markov"),
        (PEagleTrainingConfig, {"kept": 0.0}, r"must lie in \(0, 1\], got 0"),
        (PEagleTrainingConfig, {"depth": 0}, "depth"),
    ],
)
def test_unusable_numbers(kind, options, words):
    with pytest.raises(OptionError, match=words):
        kind(**options)


def test_an_eagle_head_is_trained_further_with_the_layers_that_it_reads(training_of, learned_folder, prompts, tmp_path):
    out, _, _ = training_of("eagle")
    kept, more = Eagle3Head.load(out), replace(KINDS["eagle"], start_from=out, steps=1, learning_rate=1e-9, seed=3)
    job = HeadJob(str(learned_folder), prompts, replace(more, layers=()))
    started = starting_head(job, lm_head_of(job.target, "cpu"), load_model(learned_folder).fingerprint)
    assert started.config == kept.config and job.config.sizes(32, 300).layers == ()
    train_heads(learned_folder, prompts, tmp_path / "further", more)
    for name, weight in Eagle3Head.load(tmp_path / "further").state_dict().items():
        torch.testing.assert_close(weight, kept.state_dict()[name], rtol=0, atol=1e-6, msg=name)


def test_a_recurrent_head_keeps_its_calibration(training_of):
    out, result, _ = training_of("redrafter")
    kept = RedrafterHead.load(out)
    assert (kept.config.state, kept.config.length) == (24, 3)
    assert {kind: len(each) for kind, each in result.report.facts["beams"].items()} == {"greedy": 18, "sampled": 18}
    assert kept.record.facts["survival"].keys() <= {"greedy", "sampled"} == kept.record.facts["beams"].keys()
    assert list(result.report.facts["accuracy"]) == [f"place_{k}_top_{top}" for k in (1, 2, 3) for top in (1, 5)]
    plan = Redrafter(kept).size_plans(SamplingParams())[0]
    assert plan.curve.measured_on == "the target's answers to 6 held-out prompts"
    assert Redrafter(kept).size_plans(SamplingParams(max_tokens=ANSWER))


def test_training_teaches_a_recurrent_head(learned_folder, prompts, tmp_path, training_of):
    trained = training_of("redrafter")
    long = replace(KINDS["redrafter"], steps=40, evaluate_every=40, loss="tv=0.5,kl=0.5", self_fed=0.0)
    result = train_heads(learned_folder, prompts, copied(trained, tmp_path), long)
    log = log_of(tmp_path)
    assert log[-1]["loss"] < 0.7 * log[0]["loss"]
    before, after = (sum(each.report.facts["accuracy"].values()) for each in (trained[1], result))
    assert after > before + 0.1, (before, after)


def test_distributions_are_stored_once_and_read_again_also_behind_a_full_disk(
    training_of, learned_folder, prompts, tmp_path
):
    said: list[str] = []
    config = replace(KINDS["redrafter"], laws="stored", steps=3)
    copied(training_of("redrafter"), tmp_path)
    with full_disk("train.laws"), pytest.raises(TrainingError, match="No space left on device"):
        train_heads(learned_folder, prompts, tmp_path, config)
    assert not [*(tmp_path / "work").glob("checkpoint.pt.*")]
    train_heads(learned_folder, prompts, tmp_path, config, callbacks=Callbacks(lambda what, *_: said.append(what)))
    assert {*said} >= {"storing distributions", "training"}
    lines = (tmp_path / "work" / "train.jsonl").read_text().splitlines()
    tokens = sum(len(json.loads(line)["answer"]) for line in lines)
    assert (tmp_path / "work" / "train.laws").stat().st_size == tokens * 65 * 2
    (tmp_path / "work" / "checkpoint.pt").unlink()
    first = RedrafterHead.load(tmp_path).state_dict()
    train_heads(learned_folder, prompts, tmp_path, config)
    assert all(torch.equal(weight, first[name]) for name, weight in RedrafterHead.load(tmp_path).state_dict().items())


def test_what_makes_no_head_is_refused_before_the_target_writes(training_of, learned_folder, prompts, tmp_path):
    config = KINDS["redrafter"]
    for options, words in (({"exit_width": 40}, "got an exit width of 40"), ({"rnn": False}, "sums embeddings")):
        with pytest.raises(OptionError, match=words):
            train_heads(learned_folder, prompts, tmp_path / "out", replace(config, **options))
    RedrafterHead.load(training_of("redrafter")[0]).save(tmp_path / "other", HeadRecord("another", "0" * 32))
    record = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(record | {"kind": "medusa"}))
    with pytest.raises(ModelError, match="holds Medusa heads, not a recurrent drafter; use medusa:"):
        train_heads(learned_folder, prompts, tmp_path / "out", replace(config, start_from=tmp_path / "other"))
    assert not (tmp_path / "out").exists()


def test_every_public_name_loads():
    assert [getattr(training, name).__name__ for name in training.__all__] == training.__all__
