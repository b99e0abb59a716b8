"""Padded models: the same function, bit for bit where that can be, at the cost of a larger one."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from cli.tiny import save_tiny_llama
from truedraft import Engine, SamplingParams, load_model
from truedraft.errors import ModelError, ModelNotFoundError, OptionError, UnknownOptionError, UnsupportedModelError
from truedraft.models.embedded import embedded_folder
from truedraft.models.export import export_model, save_padded
from truedraft.models.padding import (
    PADDED_SIZES,
    PaddedSize,
    choose_heads,
    count_parameters,
    head_places,
    inner_places,
    pad_model,
    padded_config,
    padded_name,
    padding_note,
    padding_note_of,
    unpadded_name,
)

WIDTH = 64
FOUR_TIMES = PaddedSize("2M", layers=4, width=4 * WIDTH, inner=384)
READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
LENGTHS = (1, 2, 5, 8, 40)


def tiny(dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    """Grouped queries (4 heads read 2), weights wide enough that logits differ."""
    sizes: dict[str, Any] = {
        "vocab_size": 128, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.25, "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
    }  # fmt: skip
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**sizes | changes)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.data = weight.data.to(dtype)  # not the rotary frequencies, as transformers loads a model
            if "norm" in name:
                weight.uniform_(0.5, 1.5)  # all ones would hide a wrong scale
            elif name.endswith("bias"):
                weight.normal_(std=0.5)
    return model


def logits(model: LlamaForCausalLM, length: int, vocab: int = 128) -> Tensor:
    """`[length, vocab]` by the stock forward."""
    ids = torch.arange(1, length + 1)[None] * 7919 % vocab
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits[0]


def embedded_target(dtype: torch.dtype, layers: int) -> LlamaForCausalLM:
    try:
        folder = embedded_folder("target")
    except ModelNotFoundError:
        pytest.skip("the embedded models are not in this checkout")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    return model.eval()


def embedded_shape() -> LlamaForCausalLM:
    """The embedded target's sizes without its weights."""
    config = LlamaConfig(
        vocab_size=8192, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def adds_in_one_order(dtype: torch.dtype, ratio: int) -> bool:
    """Whether this machine's products keep their bits where inputs are followed by zeros; ours has no part in it."""
    draw = torch.Generator().manual_seed(0)
    for rows in LENGTHS:
        inputs, weight = (torch.randn(count, WIDTH, generator=draw).to(dtype) for count in (rows, 2 * WIDTH))
        zeros = torch.zeros(rows, (ratio - 1) * WIDTH, dtype=dtype)
        beside = torch.randn(2 * WIDTH, (ratio - 1) * WIDTH, generator=draw).to(dtype)
        wide = linear(torch.cat([inputs, zeros], 1), torch.cat([weight, beside], 1))
        if not torch.equal(wide, linear(inputs, weight)):
            return False
    return True


def is_same(padded: LlamaForCausalLM, model: LlamaForCausalLM, length: int, vocab: int = 128) -> bool:
    """Whether logits have the same bits; in float32 where the machine adds in another order, are rounded no worse."""
    dtype, found, own = padded.dtype, logits(padded, length, vocab), logits(model, length, vocab)
    if dtype == torch.bfloat16 or adds_in_one_order(dtype, padded.config.hidden_size // model.config.hidden_size):
        return torch.equal(found, own)
    exact = logits(copy.deepcopy(model).double(), length, vocab)
    error, own_error = (each.double().sub(exact).square().mean().sqrt() for each in (found, own))
    return bool(error < own_error * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ratio", [4, 16])
def test_logits_are_the_same_bits_where_the_ratio_is_a_power_of_four(dtype: torch.dtype, ratio: int) -> None:
    model = tiny(dtype)
    size = dataclasses.replace(FOUR_TIMES, width=ratio * WIDTH)
    padded = pad_model(model, size)
    assert padded.dtype == dtype
    for length in LENGTHS:
        assert is_same(padded, model, length)


def test_an_epsilon_that_matters_and_biases_and_an_untied_head_keep_their_bits() -> None:
    model = tiny(attention_bias=True, mlp_bias=True, tie_word_embeddings=False, rms_norm_eps=0.05)
    padded = pad_model(model, FOUR_TIMES)
    assert padded.lm_head.weight is not padded.model.embed_tokens.weight
    assert is_same(padded, model, 8)
    wrong = copy.deepcopy(padded)
    wrong.model.norm.variance_epsilon *= 4
    assert not is_same(wrong, model, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_embedded_target_keeps_its_bits_at_500m(dtype: torch.dtype) -> None:
    model = embedded_target(dtype, layers=2)
    padded = pad_model(model, dataclasses.replace(PADDED_SIZES["500M"], layers=3))
    for length in (1, 4, 13, 200):
        assert is_same(padded, model, length, 8192)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_twice_the_width_logits_are_rounded_no_worse_than_before(dtype: torch.dtype) -> None:
    model = tiny(dtype)
    padded = pad_model(model, dataclasses.replace(FOUR_TIMES, width=2 * WIDTH))
    exact = logits(copy.deepcopy(model).double(), 40)
    error, own_error = (logits(each, 40).double().sub(exact).square().mean().sqrt() for each in (padded, model))
    assert own_error < error * 2 and error < own_error * 2


def test_query_heads_go_on_reading_their_key_heads_when_groups_grow() -> None:
    assert choose_heads(6, 2, 64, 1536) == (24, 8) and choose_heads(10, 2, 64, 768) == (12, 2)
    assert choose_heads(4, 4, 80, 800) == (10, 10) and choose_heads(8, 2, 64, 384) is None
    assert choose_heads(4, 2, 16, 144) == (9, 3)
    assert head_places(4, 2, 9, 3) == [0, 1, 3, 4]
    model = tiny()
    padded = pad_model(model, dataclasses.replace(FOUR_TIMES, width=144))
    assert (padded.config.num_attention_heads, padded.config.num_key_value_heads) == (9, 3)
    own, wide = model.model.layers[1].self_attn, padded.model.layers[1].self_attn
    for head, place in enumerate([0, 1, 3, 4]):
        assert head // 2 == place // 3  # the key/value head that it reads
        rows = wide.q_proj.weight[place * 16 : place * 16 + 16, :WIDTH]
        assert torch.equal(rows, own.q_proj.weight[head * 16 : head * 16 + 16])
    assert torch.allclose(logits(padded, 40), logits(model, 40), atol=1e-4)


def test_a_bfloat16_mlp_is_placed_as_the_kernels_add_up() -> None:
    places = inner_places(1024, 5248, torch.bfloat16).tolist()
    assert places == [*range(512), *range(1024, 1536)]
    assert inner_places(1024, 5248, torch.float32).tolist() == list(range(1024))
    assert inner_places(1024, 1100, torch.bfloat16).tolist() == list(range(1024))  # no room for a second block
    assert inner_places(512, 5248, torch.bfloat16).tolist() == list(range(512))


def test_added_weights_cost_what_real_ones_cost() -> None:
    model = tiny()
    padded = pad_model(model, FOUR_TIMES)
    assert sum(weight.numel() for weight in padded.parameters()) == count_parameters(padded.config)
    for number, layer in enumerate(padded.model.layers):
        for name, module in layer.named_modules():
            if name.endswith(READERS):
                added = module.weight[-WIDTH:] if number < 2 else module.weight
                assert added.isfinite().all() and 0.1 < added.std() < 0.2  # 1 / sqrt(64)
                assert (added.abs() < 1e-30).sum() == 0
            elif name.endswith(("o_proj", "down_proj")):
                assert bool(module.weight.any()) is (number < 2)
                assert not module.weight[WIDTH:].any()
    assert not padded.model.embed_tokens.weight[:, WIDTH:].any()
    assert padded.lm_head.weight is padded.model.embed_tokens.weight


def test_the_seed_decides_the_added_weights_and_the_model_stays_as_it_is() -> None:
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    layers: list[tuple[int, int]] = []
    first = pad_model(model, FOUR_TIMES, seed=1, on_layer=lambda *done: layers.append(done))
    again, other = (pad_model(model, FOUR_TIMES, seed=seed) for seed in (1, 2))
    name = "model.layers.3.mlp.up_proj.weight"
    assert torch.equal(first.state_dict()[name], again.state_dict()[name])
    assert not torch.equal(first.state_dict()[name], other.state_dict()[name])
    assert layers == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert model.config.hidden_size == WIDTH and padding_note_of(model) is None


@pytest.mark.parametrize(
    ("name", "parameters", "heads"),
    [("110M", 110_119_680, (12, 4)), ("500M", 500_221_440, (24, 8)), ("7B", 7_097_112_576, (96, 32))],
)
def test_sizes_are_near_their_names(name: str, parameters: int, heads: tuple[int, int]) -> None:
    config = padded_config(embedded_shape(), name)  # no weight is made
    assert count_parameters(config) == parameters
    named = float(name[:-1]) * {"M": 1e6, "B": 1e9}[name[-1]]
    assert abs(parameters / named - 1) < 0.02
    assert (config.num_attention_heads, config.num_key_value_heads) == heads
    assert config.vocab_size == 8192 and config.head_dim == 64
    assert config.hidden_size % 256 == 0 and config.intermediate_size % 128 == 0


def test_a_padded_model_says_so() -> None:
    note = "cost of a 500 M model, text of a 16 M model (a real 500 M would be harder to guess)"
    assert padding_note(15_735_168, "500M") == note
    assert padding_note(1_500_000, "7B").startswith("cost of a 7 B model, text of a 1.5 M model")
    assert padded_name("some/model", "7B") == "some/model padded to 7B"
    assert unpadded_name("some/model padded to 7B") == "some/model" == unpadded_name("some/model")
    twice = pad_model(pad_model(tiny(), FOUR_TIMES), PaddedSize("9M", 4, 16 * WIDTH, 384))
    assert padding_note_of(twice) == padding_note(sum(weight.numel() for weight in tiny().parameters()), "9M")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", seed=1, layers=2)


def test_a_padded_model_answers_like_the_model(folder: str) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    own = load_model(folder, dtype="float32")
    padded = load_model(folder, dtype="float32", pad_to="110M", fast_paths=False)  # packing takes seconds
    assert padded.name == f"{folder} padded to 110M"
    assert padded.vocab_size == own.vocab_size and padded.context_length == own.context_length
    assert padded.eos_token_ids == own.eos_token_ids
    text = "hello world"
    assert Engine(padded).generate(text, params).token_ids == Engine(own).generate(text, params).token_ids


def test_a_saved_padded_model_is_an_ordinary_folder(tmp_path: Path) -> None:
    model = tiny(torch.bfloat16)
    padded = pad_model(model, FOUR_TIMES)
    save_padded(padded, None, tmp_path / "padded", max_shard_size="1MB")
    assert len(list((tmp_path / "padded").glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "padded", dtype=torch.bfloat16)
    assert type(loaded) is LlamaForCausalLM
    assert torch.equal(logits(loaded, 40), logits(model, 40))
    assert padding_note_of(loaded) == padding_note_of(padded) is not None
    assert "measuring speed only" in (tmp_path / "padded" / "README.md").read_text()


def test_what_fails_leaves_no_half_a_folder(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        (tmp_path / "out" / "half").touch()
        raise OSError("no space left")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", interrupted)
    with pytest.raises(ModelError, match=r"cannot write the model into .*no space left"):
        export_model(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_found_before_it_is_full(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 10**6})
    monkeypatch.setattr("truedraft.models.export.shutil.disk_usage", lambda _: usage)
    with pytest.raises(OptionError, match=r"take 0\.2 GB.*has 0\.0 GB free"):
        export_model(folder, tmp_path / "out", pad_to="110M", dtype="bfloat16")


def test_unusable_sizes_are_refused() -> None:
    with pytest.raises(UnknownOptionError, match="unknown padding size '501M'; did you mean '500M'"):
        pad_model(tiny(), "501M")
    with pytest.raises(UnknownOptionError, match="valid: 110M, 500M, 7B"):
        load_model("embedded:target", pad_to="huge")
    smaller = r"smaller size 110M: the model has 500,221,440 parameters .*, 110M has 110,119,680 parameters"
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(padded_config(embedded_shape(), "500M"))
    with pytest.raises(OptionError, match=smaller):
        pad_model(model, "110M")
    with pytest.raises(OptionError, match=r"the model has .* \(2 layers, width 64"):
        pad_model(tiny(), dataclasses.replace(FOUR_TIMES, layers=1))
    with pytest.raises(OptionError, match="4 heads of 256 entries do not fit its width of 256"):
        pad_model(tiny(head_dim=256), dataclasses.replace(FOUR_TIMES, layers=20))


def test_other_models_are_refused() -> None:
    shape = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    with pytest.raises(UnsupportedModelError, match="a MistralForCausalLM cannot be padded"):
        pad_model(MistralForCausalLM(MistralConfig(**shape, num_attention_heads=4, num_key_value_heads=2)), "110M")
    quantized = tiny()
    quantized.config.quantization_config = {"bits": 4}
    with pytest.raises(UnsupportedModelError, match="quantized"):
        pad_model(quantized, "110M")
