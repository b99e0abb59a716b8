"""The doctor names each planted fault, and has nothing to say of sound drafters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes.common import pretraining_loop
from safetensors.torch import load_file, save_file

from support.embedded_models import embedded
from training.conftest import SHAPE
from truedraft import load_model
from truedraft.embedded import embedded_folder, embedded_heads
from truedraft.heads import Eagle3Head, MedusaHeads, RedrafterHead
from truedraft.heads.eagle_folders import write_eagle_folder
from truedraft.models.architecture import save_llama
from truedraft.models.base import LanguageModel
from truedraft.planning.doctor import Diagnosis, Prompt, examine
from truedraft.planning.variants import case_of
from truedraft.training.drafts import DraftConfig
from truedraft.training.eagle import Eagle3TrainingConfig
from truedraft.training.heads import train_heads
from truedraft.training.optimizer import OptimizerConfig, WarmupStableDecay
from truedraft.training.texts.answer_writer import WritingConfig
from truedraft.training.texts.data import Curriculum
from truedraft.training.texts.prompts import PromptSets
from truedraft.training.texts.tokenizer import save_tokenizer

PROMPTS, TOKENS = 14, 14
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n<|endoftext|>\n\n{% endfor %}"


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory, tokenizer, stream) -> Path:
    """A target with layers enough to be one off, that has learned its text."""
    folder = tmp_path_factory.mktemp("deep")
    rates, curriculum = OptimizerConfig(1e-2, 1e-2), Curriculum(32, 64, 256, 256)
    config = DraftConfig(schedule=WarmupStableDecay(3, 60, 10), optimizer=rates, curriculum=curriculum)
    loop = pretraining_loop(replace(SHAPE, layers=8), config, stream, folder / "work")
    loop.run()
    save_llama(loop.model, folder)
    save_tokenizer(tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def target(deep_folder) -> LanguageModel:
    return load_model(deep_folder, dtype="float32")


def trained(folder: Path, stream: Any, out: Path, **more: Any) -> Path:
    pieces = [stream[first : first + 12].tolist() for first in range(0, 1200, 30)]
    prompts = PromptSets(pieces[:24], pieces[24:30], pieces[30:], stream[900:1000])
    config = Eagle3TrainingConfig(
        tokens=800, writing=WritingConfig(answer_tokens=32, batch=8), steps=60, learning_rate=1e-2, length=3,
        positions_per_step=128, layers=(1, 3, 5), evaluated_positions=64, **more,
    )  # fmt: skip
    train_heads(str(folder), prompts, out, config)
    return out


@pytest.fixture(scope="module")
def eagle(deep_folder, stream, tmp_path_factory) -> Path:
    """An EAGLE-3.1 head with fewer ids than the target."""
    return trained(deep_folder, stream, tmp_path_factory.mktemp("eagle"), draft_vocab=64)


@pytest.fixture(scope="module")
def plain_eagle(deep_folder, stream, tmp_path_factory) -> Path:
    """One without the norms of 3.1, that ends in the target's LM head."""
    more = {"draft_vocab": 0, "fc_norm": False, "norm_output": False}
    return trained(deep_folder, stream, tmp_path_factory.mktemp("plain"), **more)


@pytest.fixture(scope="module")
def asked(stream) -> list[Prompt]:
    """Prompts that no head was trained on, as far as this text has any."""
    starts = range(1311, 1311 + 37 * PROMPTS, 37)
    ids = [tuple(map(int, stream[first : first + 12])) for first in starts]
    return [Prompt(str(number), each, each) for number, each in enumerate(ids)]


def changed(head: Any, weights: dict[str, Any] | None = None, **sizes: Any) -> Any:
    return type(head).with_weights(replace(head.config, **sizes), head.state_dict() | (weights or {}), Path("planted"))


def diagnosed(path: Path | str, target: LanguageModel, prompts: Sequence[Prompt], part: Any = None) -> Diagnosis:
    kind, case = case_of(str(path), target)
    return examine(kind, case if part is None else case.of(part), prompts, tokens=TOKENS)


def heldout() -> list[Prompt]:
    from truedraft.embedded import heldout_prompts_file

    lines = heldout_prompts_file().read_text().splitlines()[:PROMPTS]
    texts = [json.loads(line)["text"][:160] for line in lines]
    tokenizer = embedded().tokenizer
    assert tokenizer is not None
    return [Prompt(str(number), each, tuple(tokenizer.encode(each))) for number, each in enumerate(texts)]


def at(head: Any, move: Callable[[Sequence[int]], Sequence[int]]) -> Any:
    return changed(head, layers=tuple(move(head.config.layers)))


def with_table(head: Any) -> Any:
    noise = torch.randn(head.config.vocab_size, head.config.width, generator=torch.Generator().manual_seed(1))
    return changed(head, {"embed_tokens.weight": noise.bfloat16()}, own_embedding=True)


def with_output(head: Any) -> Any:
    noise = torch.randn(head.config.vocab_size, head.config.width, generator=torch.Generator().manual_seed(1))
    return changed(head, {"lm_head.weight": noise.bfloat16()}, own_output=True)


PLANTED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "layers one later": (lambda head: at(head, lambda layers: [each + 1 for each in layers]), "layers one earlier"),
    "layers one earlier": (lambda head: at(head, lambda layers: [each - 1 for each in layers]), "layers one later"),
    "layers reversed": (lambda head: at(head, lambda layers: layers[::-1]), "layers reversed"),
    "norm_output": (lambda head: changed(head, norm_output=True), "norm_output"),
    "norm_before_residual": (lambda head: changed(head, norm_before_residual=True), "norm_before_residual"),
    "rope theta": (
        lambda head: changed(head, rope={"rope_type": "default", "rope_theta": 3.0}),
        "rope theta of the target",
    ),
    "another embedding": (with_table, "embedding of the target"),
    "another LM head": (with_output, "LM head of the target"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_fault_of_an_eagle_head_is_named(planted, plain_eagle, target, asked) -> None:
    plant, name = PLANTED[planted]
    head = Eagle3Head.load(plain_eagle)
    found = diagnosed(plain_eagle, target, asked, plant(head))
    assert [each.name for each in found.faults] == [name]
    assert found.best[0.0].value > found.given[0.0].value + 0.1
    assert all(torch.equal(each, head.state_dict()[name]) for name, each in found.part.state_dict().items())


def test_ids_in_the_table_of_offsets_are_named(eagle, target, asked, tmp_path) -> None:
    """In a folder of another project it cannot be loaded; in one of ours offsets are taken for ids."""
    head = Eagle3Head.load(eagle)
    write_eagle_folder(head, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["d2t"] = weights["d2t"] + torch.arange(64)
    save_file(weights, tmp_path / "model.safetensors")
    found = diagnosed(tmp_path, target, asked)
    assert [each.name for each in found.faults] == ["d2t as ids"]
    offsets = changed(head, {"draft_ids": head.draft_ids - torch.arange(64)})
    assert [each.name for each in diagnosed(eagle, target, asked, offsets).faults] == ["d2t as offsets"]


def test_numbers_that_bfloat16_cannot_tell_apart_are_named(eagle, deep_folder, asked) -> None:
    """A large vector in all rows of the LM head moves all logits alike: to float32 it is nothing."""
    head = Eagle3Head.load(eagle).float()
    common = 300.0 * torch.randn(head.config.width, generator=torch.Generator().manual_seed(1))
    moved = changed(head, {"lm_head.weight": head.state_dict()["lm_head.weight"] + common})
    found = diagnosed(eagle, load_model(deep_folder, dtype="bfloat16"), asked, moved)
    assert [each.name for each in found.faults] == ["float32"]


def test_an_overflow_is_named(plain_eagle, target, asked) -> None:
    head = Eagle3Head.load(plain_eagle)
    broken = changed(head, {"fc.weight": (1e6 * head.state_dict()["fc.weight"]).half().bfloat16()})
    found = diagnosed(plain_eagle, target, asked, broken)
    assert "numbers that are none" in [each.name for each in found.faults] and "fc.weight" in found.sentence


def test_a_start_of_the_rotation_is_no_fault(eagle, target, asked) -> None:
    """Rotations are relative, so heads of `speculators`, which count from 1, need no variant."""
    kind, case = case_of(str(eagle), target)
    examined = examine(kind, case, asked, tokens=TOKENS)
    moved = examine(kind, case.of(changed(case.part, rope_start=1)), asked, tokens=TOKENS)
    assert not moved.faults
    for temperature, each in examined.given.items():
        assert moved.given[temperature].value == pytest.approx(each.value, rel=1e-4)


def test_faults_of_other_heads_are_named() -> None:
    recurrent, medusa = RedrafterHead.load(embedded_heads("redrafter")), MedusaHeads.load(embedded_heads("medusa"))
    one = diagnosed(embedded_heads("redrafter"), embedded(), heldout(), changed(recurrent, scaled=False))
    assert [each.name for each in one.faults] == ["embeddings scaled or not"]
    state, width = medusa.state_dict(), medusa.config.width
    shifted = {f"heads.{int(name.split('.')[1]) + 1}.{name.split('.', 2)[2]}": each
               for name, each in state.items() if name.startswith("heads.")}  # fmt: skip
    first = {name: torch.zeros_like(each) for name, each in state.items() if name.startswith("heads.0.")}
    rest = {name: each for name, each in state.items() if not name.startswith("heads.")}
    config = replace(medusa.config, heads=medusa.config.heads + 1)
    later = MedusaHeads.with_weights(config, rest | shifted | first, Path("planted"))
    assert width == config.width
    other = diagnosed(embedded_heads("medusa"), embedded(), heldout(), later)
    assert [each.name for each in other.faults] == ["heads one later"]


def copied_draft(folder: Path) -> Path:
    return Path(shutil.copytree(embedded_folder("draft"), folder))


def test_a_draft_with_files_of_another_tokenizer_is_named(tokenizer, tmp_path) -> None:
    folder = copied_draft(tmp_path / "draft")
    save_tokenizer(tokenizer, folder)
    found = diagnosed(folder, embedded(), heldout())
    assert [each.name for each in found.faults] == ["ids of the target"]


def test_a_draft_whose_ids_mean_other_tokens_is_named(tmp_path) -> None:
    folder = copied_draft(tmp_path / "draft")
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    order = torch.randperm(8192, generator=torch.Generator().manual_seed(1))
    name = "model.embed_tokens.weight"
    save_file(weights | {name: weights[name][order]}, file, {"format": "pt"})
    found = diagnosed(folder, embedded(), heldout())
    assert [each.name for each in found.faults] == ["other ids"] and "tokenizer" in found.sentence


def test_a_draft_with_another_theta_is_named(tmp_path) -> None:
    folder = copied_draft(tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 100.0
    (folder / "config.json").write_text(json.dumps(config))
    found = diagnosed(folder, embedded(), heldout())
    assert [each.name for each in found.faults] == ["rope theta of the target"]


def test_a_head_that_never_saw_the_chat_template_is_named(plain_eagle, target, tokenizer, asked) -> None:
    backend = target.tokenizer.backend
    backend.chat_template = TEMPLATE
    try:
        texts = [(each.name, backend.decode(each.ids)) for each in asked]
        chats = [
            Prompt(name, text, tuple(target.tokenizer.chat([{"role": "user", "content": text}])))
            for name, text in texts
        ]
        found = diagnosed(plain_eagle, target, chats)
    finally:
        backend.chat_template = None
    assert [each.name for each in found.faults] == ["prompts without chat template"]


SOUND = (
    "eagle",
    "plain eagle",
    "published eagle",
    "smaller draft",
    "the target itself",
    "medusa",
    "redrafter",
    "draft",
)


@pytest.mark.parametrize("sound", SOUND)
def test_a_sound_drafter_raises_no_alarm(
    sound, eagle, plain_eagle, learned_folder, deep_folder, target, asked, tmp_path
) -> None:
    if sound == "published eagle":
        write_eagle_folder(Eagle3Head.load(eagle), tmp_path)
    own = {
        "eagle": eagle,
        "plain eagle": plain_eagle,
        "published eagle": tmp_path,
        "smaller draft": learned_folder,
        "the target itself": deep_folder,
    }
    if sound in own:
        found = diagnosed(own[sound], target, asked)
    else:
        path = embedded_folder("draft") if sound == "draft" else embedded_heads(sound)
        found = diagnosed(path, embedded(), heldout())
    assert not found.faults and found.sentence.startswith("sound: no variant is better")
    assert found.given == found.best and found.given[0.0].low > 1.2
