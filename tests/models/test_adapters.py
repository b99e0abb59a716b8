"""LoRA adapters: the answers of peft's own model, each request with its own in one batch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import PretrainedConfig, PreTrainedModel

from support.pairwise import some_of
from support.tiny_models import PROMPTS, VOCAB, build, gpt2, llama, mistral, noisy, stock_greedy
from truedraft import Engine, SamplingParams, load_model
from truedraft.drafters import DraftModel
from truedraft.errors import ModelError, ModelNotFoundError, OptionError, UnknownOptionError, UnsupportedModelError
from truedraft.models.adapters import LowRank, read_adapters

COUNT = 20
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "mistral": ["k_proj", "o_proj"], "gpt2": ["c_attn", "c_fc"]}
CONFIGS = {"llama": llama, "mistral": mistral, "gpt2": gpt2}
LIST = [list(prompt) for prompt in PROMPTS]


def small(family: str) -> PreTrainedModel:
    made: PretrainedConfig = CONFIGS[family]()
    return build(made, seed=2)


def write_adapter(family: str, folder: Path, seed: int, **more: Any) -> Path:
    """An adapter with random weights, in the way that peft writes them."""
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS[family], task_type="CAUSAL_LM", **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = peft.get_peft_model(small(family), config)
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.data = 0.3 * torch.randn_like(weight)
    adapted.save_pretrained(str(folder))
    return folder


@cache
def plainly(family: str) -> list[list[int]]:
    return [stock_greedy(small(family), prompt, COUNT) for prompt in PROMPTS]


@cache
def by_peft(family: str, folder: Path) -> list[list[int]]:
    model = peft.PeftModel.from_pretrained(small(family), str(folder)).eval()
    return [stock_greedy(model, prompt, COUNT) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=some_of(sorted(TARGETS), ["gpt2", "llama"]))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folders(family: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp(family)
    small(family).save_pretrained(made / "model")
    for seed, name in enumerate(("one", "two")):
        write_adapter(family, made / name, seed)
    return {name: made / name for name in ("model", "one", "two")}


@pytest.mark.parametrize("fast", [False, True])
def test_each_request_has_its_own(family: str, folders: dict[str, Path], fast: bool) -> None:
    """In one batch, with none among them, drafted by a model that knows of no adapter."""
    beside = {name: folders[name] for name in ("one", "two")}
    model = load_model(folders["model"], dtype="float32", fast_paths=fast, adapters=beside)
    assert model.adapters == ("one", "two")
    asked = ["one", None, "two", "one"]
    plain = plainly(family)
    by = {None: plain, "one": by_peft(family, folders["one"]), "two": by_peft(family, folders["two"])}
    expected = [by[name][number] for number, name in enumerate(asked)]
    assert expected != plain and by["one"] != by["two"]
    params = [SamplingParams(max_tokens=COUNT, adapter=name) for name in asked]
    for drafter in (None, DraftModel(noisy(family, 0.05), branching=(2, 2, 1))):
        answers = Engine(model, drafter, controller="fixed").generate(LIST, params)
        assert [list(answer.token_ids) for answer in answers] == expected
        assert not any(answer.warnings for answer in answers)


def test_neighbours_change_no_bit(family: str, folders: dict[str, Path]) -> None:
    """In bfloat16: alone or beside others, drafted or not, the same tokens."""
    beside = {name: folders[name] for name in ("one", "two")}
    model = load_model(folders["model"], dtype="bfloat16", adapters=beside)
    params = [
        SamplingParams(max_tokens=COUNT, temperature=1.0, seed=3, adapter=name) for name in ("two", "one", None, "two")
    ]
    engine = Engine(model, "prompt-lookup,min_ngram=1", controller="fixed", prefix_cache_bytes=1 << 20)
    together = engine.generate(LIST, params)
    alone = [Engine(model).generate(prompt, own) for prompt, own in zip(LIST, params, strict=True)]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]


def test_what_was_read_with_one_is_not_shared_with_another(family: str, folders: dict[str, Path]) -> None:
    model = load_model(folders["model"], dtype="float32", adapters={"one": folders["one"], "two": folders["two"]})
    prompt = [(11 * place + 3) % VOCAB for place in range(150)]
    engine = Engine(model, prefix_cache_bytes=1 << 24)
    first, second, again = (
        engine.generate(prompt, SamplingParams(max_tokens=8, adapter=name)) for name in ("one", "two", "one")
    )
    assert engine.shared_tokens == 128
    assert first.token_ids == again.token_ids
    cold = Engine(model, prefix_cache_bytes=0).generate(prompt, SamplingParams(max_tokens=8, adapter="two"))
    assert second.token_ids == cold.token_ids


def test_one_can_be_merged(family: str, folders: dict[str, Path]) -> None:
    model = load_model(folders["model"], dtype="float32", adapter=folders["one"])
    answers = Engine(model, "prompt-lookup").generate(LIST, SamplingParams(max_tokens=COUNT))
    assert [list(answer.token_ids) for answer in answers] == by_peft(family, folders["one"])
    assert model.fingerprint != load_model(folders["model"], dtype="float32").fingerprint


def test_reading_adapters_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = small("llama")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    found = read_adapters(model, {"one": write_adapter("llama", tmp_path, 0)})
    assert sorted({path.rsplit(".", 1)[-1] for path in found["one"]}) == sorted(TARGETS["llama"])
    assert {name: weight.tolist() for name, weight in model.named_parameters()} == {
        name: weight.tolist() for name, weight in before.items()
    }


def test_a_row_does_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    down, up, x = (torch.randn(*size, generator=generator).bfloat16() for size in ((8, 96), (64, 8), (9, 96)))
    delta = LowRank(down, up)
    assert all(delta.of(x[:rows]).equal(delta.of(x)[:rows]) for rows in range(1, 10))


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Those that do what no row can have for itself, and another model's."""
    small("llama").save_pretrained(tmp_path / "model")
    odd: tuple[tuple[dict[str, Any], str], ...] = (
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "whole modules"),
    )
    for more, told in odd:
        folder = write_adapter("llama", tmp_path / told, 0, **more)
        with pytest.raises(UnsupportedModelError, match=f"'odd' does more than add.*{told}.*merge it at load"):
            load_model(tmp_path / "model", dtype="float32", adapters={"odd": folder})
    folder = write_adapter("gpt2", tmp_path / "adapter", 0)
    with pytest.raises(ModelError, match="does not fit this model"):
        load_model(tmp_path / "model", dtype="float32", adapters={"odd": folder})
    with pytest.raises(ModelNotFoundError, match="holds no adapter"):
        load_model(tmp_path / "model", dtype="float32", adapter=tmp_path / "nothing")


def test_an_unknown_name_is_refused(folders: dict[str, Path]) -> None:
    model = load_model(folders["model"], dtype="float32", adapters={"one": folders["one"]})
    with pytest.raises(UnknownOptionError, match="unknown adapter 'onne'; did you mean 'one'"):
        Engine(model).generate([1, 2], SamplingParams(adapter="onne"))
    bare = load_model(folders["model"], dtype="float32")
    with pytest.raises(OptionError, match="adapter names 'one', and the target was loaded without adapters"):
        Engine(bare).generate([1, 2], SamplingParams(adapter="one"))
