"""The doctor names each planted fault, and has nothing to say of sound drafters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.embedded_models import embedded
from training.conftest import LEARNING, SHAPE, pretrained
from truedraft import load_model
from truedraft.drafters.exporting import ExportTarget
from truedraft.kinds.block.training import DFlashTrainingConfig
from truedraft.kinds.dflash2.training import DFlash2TrainingConfig
from truedraft.kinds.dflash2.variants import codebooks_exchanged, convolutions
from truedraft.kinds.eagle.folders import write_eagle_folder
from truedraft.kinds.eagle.module import Eagle3Head
from truedraft.kinds.eagle.training import Eagle3TrainingConfig
from truedraft.kinds.medusa.module import MedusaHeads
from truedraft.kinds.redrafter.module import RedrafterHead
from truedraft.measure.doctor import Diagnosis, Prompt, examine
from truedraft.measure.variants import case_of, changed
from truedraft.models.base import LanguageModel
from truedraft.models.embedded import embedded_folder, embedded_heads
from truedraft.training.heads import train_heads
from truedraft.training.optimizer import WarmupStableDecay
from truedraft.training.texts.answer_writer import WritingConfig
from truedraft.training.texts.data import save_tokenizer
from truedraft.training.texts.prompts import PromptSets

pytestmark = pytest.mark.slow  # four heads are trained first; tests/cli/test_doctor_command.py has one fault

PROMPTS, TOKENS = 14, 14
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n<|endoftext|>\n\n{% endfor %}"


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory, tokenizer, stream) -> Path:
    """A target with layers enough to be one off, that has learned its text."""
    config = replace(LEARNING, schedule=WarmupStableDecay(3, 60, 10))
    return pretrained(tmp_path_factory.mktemp("deep"), tokenizer, stream, config, replace(SHAPE, layers=8))


@pytest.fixture(scope="module")
def target(deep_folder) -> LanguageModel:
    return load_model(deep_folder, dtype="float32")


@pytest.fixture(scope="module")
def heads(deep_folder, stream, tmp_path_factory) -> dict[str, Path]:
    """An EAGLE-3.1 head with fewer ids than the target, one without its norms that ends in the target's LM head, and
    a block drafter."""
    pieces = [stream[first : first + 12].tolist() for first in range(0, 1200, 30)]
    prompts = PromptSets(pieces[:24], pieces[24:30], pieces[30:], stream[900:1000])
    common = {"tokens": 800, "writing": WritingConfig(answer_tokens=32, batch=8), "steps": 60, "learning_rate": 1e-2,
              "length": 3, "positions_per_step": 128, "layers": (1, 3, 5), "evaluated_positions": 64}  # fmt: skip
    configs = {
        "eagle": Eagle3TrainingConfig(**common, draft_vocab=64),
        "plain eagle": Eagle3TrainingConfig(**common, draft_vocab=0, fc_norm=False, norm_output=False),
        "dflash": DFlashTrainingConfig(**common, draft_vocab=64, depth=1),
        "dflash2": DFlash2TrainingConfig(**common, depth=1, rank=64, selector_weight=4.0),
    }
    folders = {name: tmp_path_factory.mktemp(name.replace(" ", "-")) for name in configs}
    for name, config in configs.items():
        train_heads(str(deep_folder), prompts, folders[name], config)
    return folders


@pytest.fixture(scope="module")
def asked(stream) -> list[Prompt]:
    """Prompts that no head was trained on, as far as this text has any."""
    starts = range(1311, 1311 + 37 * PROMPTS, 37)
    ids = [tuple(map(int, stream[first : first + 12])) for first in starts]
    return [Prompt(str(number), each, each) for number, each in enumerate(ids)]


def diagnosed(path: Path | str, target: LanguageModel, prompts: Sequence[Prompt], part: Any = None) -> Diagnosis:
    kind, case = case_of(str(path), target)
    return examine(kind, case if part is None else case.of(part), prompts, tokens=TOKENS)


def heldout() -> list[Prompt]:
    from truedraft.models.embedded import heldout_prompts_file

    lines = heldout_prompts_file().read_text().splitlines()[:PROMPTS]
    texts = [json.loads(line)["text"][:160] for line in lines]
    tokenizer = embedded().tokenizer
    assert tokenizer is not None
    return [Prompt(str(number), each, tuple(tokenizer.encode(each))) for number, each in enumerate(texts)]


def untrained(weight: str, flag: str) -> Callable[[Any], Any]:
    """A table of its own, with a row for each id, that nobody trained."""

    def change(head: Any) -> Any:
        noise = torch.randn(head.config.vocab_size, head.config.width, generator=torch.Generator().manual_seed(1))
        return changed(head, {flag: True}, weights={weight: (0.05 * noise).to(next(head.parameters()).dtype)})

    return change


def moved(by: int) -> Callable[[Any], Any]:
    return lambda head: changed(head, {"layers": tuple(each + by for each in head.config.layers)})


def reversed_layers(head: Any) -> Any:
    return changed(head, {"layers": head.config.layers[::-1]})


def far_apart(head: Any, by: float = 100.0) -> Any:
    """A vector in all rows of the LM head, which moves all logits alike: to float32 it is nothing."""
    weight = head.lm_head.weight.float()
    common = by * torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(1))
    return changed(head.float(), {}, weights={"lm_head.weight": weight + common})


def as_offsets(head: Any) -> Any:
    return changed(head, {}, weights={"draft_ids": head.draft_ids - torch.arange(len(head.draft_ids))})


def flipped(name: str) -> Callable[[Any], Any]:
    return lambda head: changed(head, {name: not getattr(head.config, name)})


def theta_of(theta: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] = theta
        (folder / "config.json").write_text(json.dumps(config))

    return change


def ids_exchanged(folder: Path) -> None:
    """Rows of the embedding in another order, as of another tokenizer."""
    (file,), name = folder.glob("*.safetensors"), "model.embed_tokens.weight"
    weights = load_file(file)
    order = torch.randperm(len(weights[name]), generator=torch.Generator().manual_seed(1))
    save_file(weights | {name: weights[name][order].contiguous()}, file, {"format": "pt"})


PLANTED: list[tuple[str, Callable[[Any], Any], str]] = [
    ("plain eagle", moved(1), "layers one earlier"),
    ("plain eagle", moved(-1), "layers one later"),
    ("plain eagle", reversed_layers, "layers reversed"),
    ("plain eagle", flipped("norm_output"), "norm_output"),
    ("plain eagle", flipped("norm_before_residual"), "norm_before_residual"),
    ("plain eagle", lambda head: changed(head, {"rope": head.config.rope | {"rope_theta": 3.0}}),
     "rope theta of the target"),
    ("plain eagle", untrained("embed_tokens.weight", "own_embedding"), "embedding of the target"),
    ("plain eagle", untrained("lm_head.weight", "own_output"), "LM head of the target"),
    ("eagle", as_offsets, "d2t as offsets"),
    ("dflash", moved(1), "layers one earlier"),
    ("dflash", flipped("from_anchor"), "sample_from_anchor"),
    ("dflash2", flipped("from_anchor"), "sample_from_anchor"),
    ("dflash2", convolutions(lambda each: each.flip(1)), "taps in the other order"),
    ("dflash2", convolutions(lambda each: each.flip(0)), "sides exchanged"),
    ("dflash2", codebooks_exchanged, "predecessors and successors exchanged"),
]  # fmt: skip


@pytest.mark.parametrize(("drafter", "plant", "name"), PLANTED, ids=[f"{each[0]}, {each[2]}" for each in PLANTED])
def test_a_fault_of_a_head_is_named(drafter, plant, name, heads, target, asked) -> None:
    kind, case = case_of(str(heads[drafter]), target)
    found = examine(kind, case.of(plant(case.part)), asked, tokens=TOKENS)
    assert [each.name for each in found.faults] == [name]
    assert found.best[0.0].tokens_per_call.value > found.given[0.0].tokens_per_call.value + 0.1
    assert all(torch.equal(each, case.part.state_dict()[name]) for name, each in found.part.state_dict().items())


def test_faults_of_a_folder_of_numbers_and_of_an_overflow_are_named(
    heads, target, deep_folder, asked, tmp_path
) -> None:
    """A folder of another project with ids in its table of offsets cannot be loaded as it is."""
    head = Eagle3Head.load(heads["eagle"])
    write_eagle_folder(head, tmp_path, ExportTarget("", None))
    weights = load_file(tmp_path / "model.safetensors")
    weights["d2t"] = weights["d2t"] + torch.arange(64)
    save_file(weights, tmp_path / "model.safetensors")
    assert [each.name for each in diagnosed(tmp_path, target, asked).faults] == ["d2t as ids"]
    planted, short = far_apart(head, by=300.0), load_model(deep_folder, dtype="bfloat16")
    assert [each.name for each in diagnosed(heads["eagle"], short, asked, planted).faults] == ["float32"]
    head = Eagle3Head.load(heads["eagle"])
    broken = changed(head, {}, weights={"fc.weight": (1e6 * head.state_dict()["fc.weight"]).half().bfloat16()})
    found = diagnosed(heads["eagle"], target, asked, broken)
    assert "numbers that are none" in [each.name for each in found.faults] and "fc.weight" in found.sentence


def test_a_start_of_the_rotation_is_no_fault(heads, target, asked) -> None:
    """Rotations are relative, so heads of `speculators`, which count from 1, need no variant."""
    kind, case = case_of(str(heads["eagle"]), target)
    examined = examine(kind, case, asked, tokens=TOKENS)
    moved = examine(kind, case.of(changed(case.part, {"rope_start": 1})), asked, tokens=TOKENS)
    assert not moved.faults
    for temperature, each in examined.given.items():
        assert moved.given[temperature].calls == pytest.approx(each.calls, rel=1e-4)


def shifted(medusa: Any) -> Any:
    """Medusa heads behind one that guesses the next token itself."""
    state = medusa.state_dict()
    split = {name: name.split(".", 2) for name in state if name.startswith("heads.")}
    later = {f"heads.{int(number) + 1}.{rest}": state[name] for name, (_, number, rest) in split.items()}
    first = {name: torch.zeros_like(state[name]) for name, (_, number, _) in split.items() if number == "0"}
    return changed(medusa, {"heads": medusa.config.heads + 1}, r"^heads\.", later | first)


def test_faults_of_other_heads_are_named() -> None:
    recurrent, medusa = RedrafterHead.load(embedded_heads("redrafter")), MedusaHeads.load(embedded_heads("medusa"))
    one = diagnosed(embedded_heads("redrafter"), embedded(), heldout(), changed(recurrent, {"scaled": False}))
    assert [each.name for each in one.faults] == ["embeddings scaled or not"]
    other = diagnosed(embedded_heads("medusa"), embedded(), heldout(), shifted(medusa))
    assert [each.name for each in other.faults] == ["heads one later"]


@pytest.mark.parametrize(
    ("plants", "names"),
    [
        ("tokenizer", ["ids of the target"]),
        ("ids", ["other ids"]),
        ("theta", ["rope theta of the target"]),
        ("tokenizer, theta", ["ids of the target", "rope theta of the target"]),
    ],
)
def test_faults_of_a_draft_model_are_named(plants, names, tokenizer, tmp_path) -> None:
    folder = Path(shutil.copytree(embedded_folder("draft"), tmp_path / "draft"))
    plant = {"tokenizer": partial(save_tokenizer, tokenizer), "ids": ids_exchanged, "theta": theta_of(100.0)}
    for planted in plants.split(", "):
        plant[planted](folder)
    found = diagnosed(folder, embedded(), heldout())
    assert [each.name for each in found.faults] == names


def test_a_head_that_never_saw_the_chat_template_is_named(heads, target, tokenizer, asked) -> None:
    backend = target.tokenizer.backend
    backend.chat_template = TEMPLATE
    try:
        chats = []
        for each in asked:
            text = backend.decode(each.ids)
            ids = target.tokenizer.chat([{"role": "user", "content": text}])
            chats.append(Prompt(each.name, text, tuple(ids)))
        found = diagnosed(heads["plain eagle"], target, chats)
    finally:
        backend.chat_template = None
    assert [each.name for each in found.faults] == ["prompts without chat template"]


SOUND = (
    "eagle", "plain eagle", "dflash", "dflash2", "published eagle", "smaller draft", "the target itself", "medusa",
    "redrafter", "draft",
)  # fmt: skip


@pytest.mark.parametrize("sound", SOUND)
def test_a_sound_drafter_raises_no_alarm(sound, heads, learned_folder, deep_folder, target, asked, tmp_path) -> None:
    if sound == "published eagle":
        write_eagle_folder(Eagle3Head.load(heads["eagle"]), tmp_path, ExportTarget("", None))
    own = heads | {"published eagle": tmp_path, "smaller draft": learned_folder, "the target itself": deep_folder}
    if sound in own:
        found = diagnosed(own[sound], target, asked)
    else:
        path = embedded_folder("draft") if sound == "draft" else embedded_heads(sound)
        found = diagnosed(path, embedded(), heldout())
    assert not found.faults and found.sentence.startswith("sound: no variant is better")
    assert found.given == found.best and found.given[0.0].tokens_per_call.low > 1.2
