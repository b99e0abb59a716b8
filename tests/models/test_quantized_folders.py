"""Hugging Face folders with quantised weights: their numbers, the native forward over their codes, and broken ones."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from support.codes import assert_given_by_codes, logits, read_in_eight_bits
from support.multimodal_models import FAMILIES as MULTIMODAL
from support.quantized_folders import (
    SIZES,
    Made,
    awq,
    bitsandbytes_8,
    edit,
    four_bits,
    fp8,
    gptq,
    grouped,
    packed,
    whole,
    words,
    write,
)
from support.rows import assert_rows_are_alike
from support.tiny_models import build
from truedraft import Engine, SamplingParams, load_model
from truedraft.core.tree import chain_shape
from truedraft.drafters import DraftModel
from truedraft.errors import ModelError, UnsupportedModelError
from truedraft.models import Segment, quantized_folder
from truedraft.models.backends.native.build import built
from truedraft.models.quantized import Scheme, StoredWeight
from truedraft.models.quantized_folder import Layout

pytestmark = pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason)
IDS = torch.arange(1, 40) * 37 % 190
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
SECOND = GPTQ | {"checkpoint_format": "gptq_v2"}


def compressed(bits: int, group: int | None, kind: str = "pack-quantized") -> dict[str, Any]:
    """What compressed-tensors writes into config.json."""
    strategy = "channel" if group is None else "group"
    weights = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"]}


def grouped_bytes(weight: Tensor) -> Made:
    """As compressed-tensors writes "int-quantized" with the order of activations ("actorder": "group")."""
    made = grouped(weight, 8, 32, symmetric=True, seed=7)
    tensors = {"weight": (made.codes - 128).to(torch.int8), "weight_scale": made.scales}
    return tensors | {"weight_g_idx": made.group_of.int()}, made.numbers


BY_CODES = [
    pytest.param(gptq, GPTQ, id="gptq"),
    pytest.param(partial(gptq, group=64, symmetric=True), GPTQ | {"group_size": 64}, id="gptq-symmetric"),
    pytest.param(partial(gptq, bits=8, group=128), GPTQ | {"bits": 8, "group_size": 128}, id="gptq-8-bits"),
    pytest.param(partial(gptq, group=-1, dtype=torch.float32), GPTQ | {"group_size": -1}, id="gptq-wide-scales"),
    pytest.param(partial(gptq, first_format=False, dtype=torch.bfloat16), SECOND, id="gptq-second-format"),
    pytest.param(partial(gptq, seed=5), GPTQ | {"desc_act": True}, id="gptq-by-activation"),
    pytest.param(
        partial(gptq, bits=8, seed=6, group=64), GPTQ | {"bits": 8, "group_size": 64}, id="gptq-8-by-activation"
    ),
    pytest.param(awq, AWQ, id="awq"),
    pytest.param(partial(awq, group=64), AWQ | {"group_size": 64}, id="awq-64"),
    pytest.param(partial(awq, group=-1), AWQ | {"group_size": -1}, id="awq-channel"),
    pytest.param(packed, compressed(4, 32), id="w4a16"),
    pytest.param(partial(packed, group=128, dtype=torch.bfloat16), compressed(4, 128), id="w4a16-128"),
    pytest.param(partial(packed, symmetric=False), compressed(4, 32), id="w4a16-zeros"),
    pytest.param(partial(packed, seed=4), compressed(4, 32), id="w4a16-by-activation"),
    pytest.param(partial(packed, bits=8, group=-1, dtype=torch.float32), compressed(8, None), id="w8a16"),
    pytest.param(whole, compressed(8, None, "int-quantized"), id="w8a8"),
    pytest.param(partial(whole, symmetric=False), compressed(8, None, "int-quantized"), id="w8a8-zeros"),
    pytest.param(grouped_bytes, compressed(8, 32, "int-quantized"), id="w8-by-activation"),
    pytest.param(packed, compressed(4, 32) | {"sparsity_config": {"format": "dense"}}, id="w4a16-dense"),
    pytest.param(partial(gptq, group=64), GPTQ | {"dynamic": {"+:.*": {"group_size": 64}}}, id="gptq-dynamic"),
    pytest.param(bitsandbytes_8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, id="bitsandbytes-8"),
]
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
IN_NUMBERS = [
    pytest.param(four_bits, NF4, id="nf4"),
    pytest.param(partial(four_bits, double=True), NF4 | {"bnb_4bit_use_double_quant": True}, id="nf4-double"),
    pytest.param(partial(fp8, block=(64, 96)), {"quant_method": "fp8", "weight_block_size": [64, 96]}, id="fp8-blocks"),
    pytest.param(partial(fp8, block=None), {"quant_method": "fp8", "weight_block_size": None}, id="fp8-whole"),
    pytest.param(partial(fp8, block=(1, 0), end="weight_scale"), {"quant_method": "fbgemm_fp8"}, id="fp8-by-output"),
    pytest.param(partial(fp8, block=(1, 0), end="weight_scale"), compressed(8, None, "float-quantized"), id="w8a8-fp8"),
]


def orders(folder: Path) -> dict[str, Tensor]:
    """Of each layer whose inputs fall into groups in an order of their own."""
    tensors = load_file(folder / "model.safetensors")
    ends = (".g_idx", ".weight_g_idx")
    said = {name.rpartition(".")[0]: tensor for name, tensor in tensors.items() if name.endswith(ends)}
    return {name: tensor.argsort(stable=True) for name, tensor in said.items()}


@pytest.mark.parametrize(("quantise", "said"), BY_CODES)
def test_a_folder_is_run_by_its_codes(quantise: Callable[[Tensor], Made], said: dict[str, Any], tmp_path: Path) -> None:
    """Its forward is that of its numbers by transformers' modules, where these read inputs of 8 bits."""
    folder, twin = write(tmp_path, quantise, said)
    model = load_model(folder, dtype="float32")
    numbers, read = (load_model(each, dtype="float32", fast_paths=False) for each in (twin, folder))
    assert model.fast_paths[0] == "native forward"
    assert "bits" in model.fast_paths[1]
    assert model.equality == "bit for bit"
    assert model.weight_bytes < 0.4 * numbers.weight_bytes
    for (name, own), other in zip(read.module.named_parameters(), numbers.module.parameters(), strict=True):
        assert torch.equal(own, other), f"{name} is another number"
    assert model.fingerprint == numbers.fingerprint
    read_in_eight_bits(numbers, orders(folder), ends=("_proj",))
    assert_given_by_codes(logits(model, IDS), logits(numbers, IDS))


def without_order(weight: Tensor, **options: Any) -> Made:
    """As older tools of GPTQ wrote it."""
    tensors, numbers = gptq(weight, **options)
    return {end: each for end, each in tensors.items() if end != "g_idx"}, numbers


def by_one_scale(weight: Tensor, shape: tuple[int, ...]) -> Made:
    """As compressed-tensors writes "int-quantized" by the strategy "tensor"."""
    scale = weight.abs().max() / 100
    codes = (weight / scale).round() + 7
    beside = {"weight_scale": scale.view(shape), "weight_zero_point": torch.tensor(7, dtype=torch.int8).view(shape)}
    return {"weight": codes.to(torch.int8)} | beside, scale * (codes - 7)


class Layer(dict[str, Tensor]):
    """`Tensors` that are in memory."""

    def shape(self, end: str) -> tuple[int, ...]:
        return tuple(self[end].shape)

    broken = unread = staticmethod(ModelError)


READERS: list[tuple[Callable[..., Made], Callable[[Any, Layout], StoredWeight], Layout, dict[str, Any]]] = [
    (gptq, quantized_folder.gptq, Layout((4,), (32,), zeros_less_one=True), {}),
    (gptq, quantized_folder.gptq, Layout((8,), (64,)), {"bits": 8, "group": 64, "first_format": False, "seed": 1}),
    (gptq, quantized_folder.gptq, Layout((4,), (32,), others=True), {"bits": 8, "first_format": False}),
    (without_order, quantized_folder.gptq, Layout((4,), (32,), zeros_less_one=True), {}),
    (without_order, quantized_folder.gptq, Layout((8,), (64,), zeros_less_one=True), {"bits": 8, "group": 64}),
    (awq, quantized_folder.awq, Layout((4,), (32,)), {}),
    (packed, quantized_folder.packed, Layout((4,), (32,)), {"symmetric": False}),
    (packed, quantized_folder.packed, Layout((8,), (64,)), {"bits": 8, "group": 64, "symmetric": False}),
    (packed, quantized_folder.packed, Layout((4, 8), (32,), others=True), {"bits": 8, "symmetric": False, "seed": 2}),
    (packed, quantized_folder.packed, Layout((4,)), {"group": -1, "dtype": torch.float32}),
    (packed, quantized_folder.packed, Layout((4,), (128, 256, 0)), {"group": -1}),
    (whole, quantized_folder.whole, Layout((8,)), {"symmetric": False}),
    (by_one_scale, quantized_folder.whole, Layout((8,)), {"shape": ()}),
    (by_one_scale, quantized_folder.whole, Layout((8,)), {"shape": (1,)}),
    (bitsandbytes_8, quantized_folder.of_bitsandbytes, Layout((8,)), {}),
    (bitsandbytes_8, quantized_folder.of_bitsandbytes, Layout((8,)), {"dtype": torch.float16}),
]


@pytest.mark.parametrize(("quantise", "read", "layout", "options"), READERS)
@pytest.mark.parametrize(("out", "inputs"), [(40, 128), (37, 128), (37, 100), (3, 32)])
def test_a_layer_of_any_size_is_the_numbers_that_were_packed(
    quantise: Any, read: Any, layout: Layout, options: dict[str, Any], out: int, inputs: int
) -> None:
    """Words of zeros and codes that are not full have their padding at the end; a zero of 0, less one, is a borrow."""
    if read in (quantized_folder.gptq, quantized_folder.awq) and (out % 8 or inputs % 32):
        pytest.skip("the format has full words alone")
    if "seed" in options and inputs % layout.groups[0]:
        pytest.skip("groups of 32 in any order are full")
    weight = torch.randn(out, inputs, generator=torch.Generator().manual_seed(out))
    weight[::3] = weight[::3].abs()  # their zeros are 0
    tensors, numbers = quantise(weight, **options)
    stored = read(Layer(tensors), layout)
    assert stored.shape == (out, inputs)
    assert (stored.order is not None) == ("seed" in options and inputs > 32)
    assert torch.equal(stored.read().dequantized(), numbers)
    some = torch.tensor([out - 1, 0])
    assert torch.equal(stored.rows(some).dequantized(), numbers[some])


@pytest.mark.parametrize(
    ("bits", "zero", "scale", "scheme"),
    [
        (4, 8, 0.5, Scheme.ONE),
        (4, 8, 0.1, Scheme.WIDE),
        (4, 7, 0.5, Scheme.ZEROED),
        (4, 7, 0.1, Scheme.WIDE_ZEROED),
        (8, 128, 0.5, Scheme.ONE),
        (8, 8, 0.5, Scheme.ZEROED),
    ],
)
def test_zeros_that_are_middle_codes_and_scales_that_fit_float16_are_kept_in_brief(
    bits: int, zero: int, scale: float, scheme: Scheme
) -> None:
    codes = torch.randint(2**bits, (8, 64), generator=torch.Generator().manual_seed(0))
    tensors = {"weight_packed": words(codes, bits), "weight_shape": torch.tensor([8, 64])}
    tensors["weight_zero_point"] = words(torch.full((2, 8), zero), bits).T
    tensors["weight_scale"] = torch.full((8, 2), scale)
    layer: Any = Layer(tensors)
    stored = quantized_folder.packed(layer, Layout((bits,), (32,)))
    assert stored.form == stored.read().form == (bits, scheme)
    assert torch.equal(stored.read().dequantized(), (codes - zero) * torch.tensor(scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("quantise", "said"), [BY_CODES[place] for place in (0, 3, 5, 16)])
def test_a_row_has_the_same_bits_whatever_shares_its_forward(
    quantise: Callable[[Tensor], Made], said: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    if built(dtype).library is None:
        pytest.skip(built(dtype).reason or "")
    model = load_model(write(tmp_path, quantise, said)[0], dtype=dtype)
    ids = torch.randint(190, (240,), generator=torch.Generator().manual_seed(0))
    expected = logits(model, ids)
    for size in (1, 2, 3, 5, 8, 13, 100):
        cache, found = model.new_cache(), []
        for part in ids.split(size):
            output = model.forward([Segment(cache, part, chain_shape(len(part)), range(len(part)))])
            found.append(output.logits.float())
            cache.commit(range(len(part)))
        assert torch.equal(torch.cat(found), expected), f"in pieces of {size}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("quantise", "said"), [BY_CODES[0], BY_CODES[3], BY_CODES[5]])
def test_speculation_changes_no_answer(
    quantise: Callable[[Tensor], Made], said: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    if built(getattr(torch, dtype)).library is None:
        pytest.skip(built(getattr(torch, dtype)).reason or "")
    folder, twin = write(tmp_path, quantise, said)
    target = load_model(folder, dtype=dtype)
    assert_rows_are_alike(target)
    prompts = [IDS[:8].tolist(), IDS[3:24].tolist()]
    draft = DraftModel(load_model(twin, dtype=dtype))
    engines = [Engine(target), Engine(target, draft, controller="fixed")]
    plain, drafted = (each.generate(prompts, SamplingParams(max_tokens=48)) for each in engines)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert sum(each.stats.accepted_tokens for each in drafted) > 0


def test_a_copy_native_linears_reads_inputs_in_their_order(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, partial(gptq, bits=8, seed=6), GPTQ | {"bits": 8})
    model = load_model(folder, dtype="float32")
    expected = logits(model, IDS)
    assert 0 < (logits(model.quantized(4), IDS) - expected).std() < 0.6 * expected.std()


@pytest.mark.parametrize(("quantise", "said"), IN_NUMBERS)
def test_small_floats_are_made_numbers(
    quantise: Callable[[Tensor], Made], said: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, twin = write(tmp_path, quantise, said)
    with caplog.at_level(logging.WARNING, "truedraft"):
        models = [load_model(each, dtype="float32") for each in (folder, twin)]
    assert len(caplog.records) == 1
    assert f"{folder}: its quantised weights are made float32" in caplog.text
    assert "take 1.4 MB of memory" in caplog.text
    assert torch.equal(logits(models[0], IDS), logits(models[1], IDS))
    assert models[0].fingerprint == models[1].fingerprint
    assert "quantized" not in str(models[0].module.config)


FAMILIES = [
    pytest.param(Qwen3Config(**SIZES, head_dim=32), True, id="qwen3"),
    pytest.param(Phi3Config(**SIZES), True, id="phi3"),
    pytest.param(Gemma3TextConfig(**SIZES, head_dim=32, sliding_window=8, query_pre_attn_scalar=32), True, id="gemma3"),
    pytest.param(
        Qwen3MoeConfig(**SIZES, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64),
        False,
        id="qwen3-moe",
    ),
]


@pytest.mark.parametrize(("config", "codes"), FAMILIES)
def test_families_are_run_by_codes_or_numbers(config: PretrainedConfig, codes: bool, tmp_path: Path) -> None:
    """Experts lie one by one in a folder, and together in the model, so they are made numbers."""
    folder, twin = write(tmp_path, gptq, GPTQ, build(config, 1, 0.15))
    model, numbers = (load_model(each, dtype="float32") for each in (folder, twin))
    assert (model.weight_bytes < 0.6 * numbers.weight_bytes) == codes
    assert model.fingerprint == numbers.fingerprint
    expected = logits(numbers, IDS)
    apart = (logits(model, IDS) - expected).std() / expected.std()
    assert 0 < apart < 0.1 if codes else apart == 0


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "gemma3"])
def test_models_that_also_see_are_made_numbers(family: str, tmp_path: Path) -> None:
    """Their folders call layers otherwise than transformers does."""
    folder, twin = write(tmp_path, packed, compressed(4, 32), MULTIMODAL[family].model())
    model, numbers = (load_model(each, dtype="float32") for each in (folder, twin))
    assert model.fingerprint == numbers.fingerprint
    assert torch.equal(logits(model, IDS % 140), logits(numbers, IDS % 140))


def test_layers_with_their_inputs_first_are_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 192, "n_embd": 128, "n_layer": 1, "n_head": 4, "n_positions": 256}
    model = build(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None), 1)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "transformer.h.0.attn.c_proj"
    layer, _ = gptq(tensors.pop(f"{name}.weight").T)
    tensors |= {f"{name}.{end}": each.contiguous() for end, each in layer.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    edit(tmp_path, quantization_config=GPTQ)
    with pytest.raises(UnsupportedModelError, match="of layers that have their inputs first, as GPT-2's, which"):
        load_model(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_a_quantised_lm_head(tied: bool, tmp_path: Path) -> None:
    """By its codes; where it is said to be the embedding, which has others, transformers reads it as of its own."""
    folder, twin = write(tmp_path, gptq, GPTQ)
    tensors, numbers = (load_file(each / "model.safetensors") for each in (folder, twin))
    layer, numbers["lm_head.weight"] = gptq(tensors.pop("lm_head.weight"))
    tensors |= {f"lm_head.{end}": each for end, each in layer.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_file(numbers, twin / "model.safetensors", {"format": "pt"})
    edit(folder, tie_word_embeddings=tied)
    model = load_model(folder, dtype="float32")
    assert model.fast_paths[1].startswith("weights of 4 bits") == (not tied)
    assert model.fingerprint == load_model(twin, dtype="float32").fingerprint


def test_an_embedding_that_is_written_twice(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, gptq, GPTQ)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(folder, tie_word_embeddings=True)
    model = load_model(folder, dtype="float32")
    assert "bits" in model.fast_paths[1]
    assert model.module.lm_head.weight is model.module.model.embed_tokens.weight


def test_weights_in_several_files(tmp_path: Path) -> None:
    folder, twin = write(tmp_path, packed, compressed(4, 32))
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)  # a layer's tensors are parted, too
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, folder / file, {"format": "pt"})
    places = {name: file for file, own in parts.items() for name in own}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert load_model(folder, dtype="float32").fingerprint == load_model(twin, dtype="float32").fingerprint
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00002\.safetensors, a file of its weights; fetch"):
        load_model(folder, dtype="float32")


def test_layers_that_read_one_row_in_several_orders_are_made_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No tool writes such: queries, keys and values are quantised by the same inputs."""
    folder, twin = write(tmp_path, lambda weight: gptq(weight, seed=len(weight)), GPTQ | {"desc_act": True})
    model, numbers = (load_model(each, dtype="float32") for each in (folder, twin))
    assert "its quantised weights are made float32" in caplog.text
    assert torch.equal(logits(model, IDS), logits(numbers, IDS))


def test_biases_of_zeros_for_layers_without_any_are_left_out(tmp_path: Path) -> None:
    """Some tools write one for every layer."""

    def biased(weight: Tensor, bias: float) -> Made:
        tensors, numbers = gptq(weight)
        return tensors | {"bias": torch.full((len(weight),), bias)}, numbers

    folder, twin = write(tmp_path / "0", partial(biased, bias=0.0), GPTQ)
    assert load_model(folder, dtype="float32").fingerprint == load_model(twin, dtype="float32").fingerprint
    folder, _ = write(tmp_path / "1", partial(biased, bias=1.0), GPTQ)
    with pytest.raises(ModelError, match=r"14 tensor\(s\) that its config.json does not have, the first .*bias"):
        load_model(folder, dtype="float32")


LAYER = "model.layers.1.mlp.up_proj"


def without(end: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(f"{LAYER}.{end}")


def with_shape(end: str, *shape: int) -> Callable[[dict[str, Tensor]], Any]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.{end}"] = torch.ones(shape, dtype=tensors[f"{LAYER}.{end}"].dtype)

    return change


def with_first(end: str, number: float) -> Callable[[dict[str, Tensor]], Any]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.{end}"].view(-1)[0] = number

    return change


def nothing(tensors: dict[str, Tensor]) -> None:
    """Leaves them as they are."""


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, gptq, GPTQ)
    edit(folder, intermediate_size=128)
    with pytest.raises(ModelError, match=r"'model.layers.0.mlp.\w+.weight' of the shape .*, and its config.json has"):
        load_model(folder, dtype="float32")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has quantised weights, and no model\.safetensors that holds them"):
        load_model(folder, dtype="float32")
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ModelError, match="cannot load the weights of"):
        load_model(folder, dtype="float32")


def with_groups(*sizes: int) -> dict[str, Any]:
    groups = {f"group_{size}": {"weights": {"num_bits": 4, "type": "int", "group_size": size}} for size in sizes}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def test_layers_with_groups_of_several_sizes(tmp_path: Path) -> None:
    """192 inputs in groups of 128 are 128 and 64, not twice 96."""

    def quantise(weight: Tensor) -> Made:
        return packed(weight, group=128 if weight.shape[1] == 192 else 32)

    model = build(LlamaConfig(**SIZES | {"intermediate_size": 192}), seed=3, spread=0.15)
    folder, twin = write(tmp_path, quantise, with_groups(32, 128), model)
    numbers, read = (load_model(each, dtype="float32", fast_paths=False) for each in (twin, folder))
    for (name, own), other in zip(read.module.named_parameters(), numbers.module.parameters(), strict=True):
        assert torch.equal(own, other), f"{name} is another number"
    edit(folder, quantization_config=with_groups(32, 96, 128))
    with pytest.raises(UnsupportedModelError, match="2 groups of 192 inputs, which may be groups of 96 or 128"):
        load_model(folder, dtype="float32")


def awq_in_bytes(weight: Tensor) -> Made:
    tensors, numbers = awq(weight)
    return {end: each if end == "scales" else each.repeat(1, 2) for end, each in tensors.items()}, numbers


EIGHT_OR_FOUR = compressed(8, 32)
EIGHT_OR_FOUR["config_groups"] |= {"group_1": compressed(4, 32)["config_groups"]["group_0"]}
BYTES = compressed(8, None, "int-quantized")
FP8 = {"quant_method": "fp8"}
STATE = "weight.quant_state.bitsandbytes__nf4"
shifted = partial(packed, symmetric=False)


def of_group(**said: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"a": said}}


def with_zeros_of_bytes(tensors: dict[str, Tensor]) -> None:
    tensors[f"{LAYER}.weight_zero_point"] = torch.zeros(256, 4, dtype=torch.int8)


DAMAGED: list[tuple[Any, dict[str, Any], Callable[[dict[str, Tensor]], Any], str]] = [
    (gptq, GPTQ, without("scales"), f"layer '{LAYER}' of .* lacks its scales"),
    (gptq, GPTQ, without("qzeros"), f"layer '{LAYER}' of .* lacks its qzeros"),
    (gptq, GPTQ, without("qweight"), f"lack 1 of the tensors .*, the first '{LAYER}.weight'"),
    (gptq, GPTQ, with_shape("scales", 3, 256), "scales of 3 groups, and inputs of groups 1 to 4"),
    (gptq, GPTQ, with_shape("qzeros", 3, 32), r"zeros of the shape \[256, 3\], and scales of \[256, 4\]"),
    (gptq, GPTQ, with_first("scales", torch.inf), "scales that are no numbers"),
    (gptq, GPTQ, with_first("scales", torch.nan), "scales that are no numbers"),
    (gptq, GPTQ, with_first("g_idx", -1), "scales of 4 groups, and inputs of groups 0 to 4"),
    (gptq, GPTQ, with_shape("qweight", 16, 128), r"qweight of the shape \[16, 128\] in place of \[16, 256\]"),
    (gptq, GPTQ, with_shape("g_idx", 64), "64 codes in 16 words of 32 bits, and config.json says 4 bits"),
    (gptq, GPTQ | {"bits": 8}, nothing, "256 codes in 32 words of 32 bits, and config.json says 8 bits"),
    (gptq, GPTQ | {"bits": "four"}, nothing, "says 'four' bits in groups of 32"),
    (gptq, GPTQ, with_shape("scales", 256), r"tensors that do not fit together \(not enough values"),
    (awq, AWQ, without("qzeros"), "lacks its qzeros"),
    (awq, AWQ, with_shape("qweight", 64, 32), "scales of 4 groups, and inputs of groups 1 to 2"),
    (awq, AWQ, with_shape("qzeros", 4, 31), r"zeros of the shape \[248, 4\], and scales of \[256, 4\]"),
    (awq, AWQ, with_shape("scales", 4, 250), r"qweight of the shape \[128, 32\] in place of \[128, 31\]"),
    (awq, AWQ, with_shape("qweight", 128, 30), "256 codes in 30 words of 32 bits, and .* says 4 bits"),
    (packed, compressed(4, 32), with_shape("weight_shape", 3), "tensors that do not fit together"),
    (packed, compressed(4, 32), without("weight_scale"), "lacks its weight_scale"),
    (packed, compressed(4, 32), without("weight_shape"), "lacks its weight_shape"),
    (packed, compressed(8, 32), nothing, "codes in .* words of 32 bits, and config.json says 8 bits"),
    (packed, compressed(4, 64), nothing, "scales of . groups, and inputs of groups 1 to"),
    (partial(packed, group=64), compressed(4, 32), nothing, "scales of . groups, and inputs of groups 1 to"),
    (partial(packed, seed=4), compressed(4, 32), with_first("weight_g_idx", -1), "inputs of groups 0 to 4"),
    (packed, compressed(4, 32), with_shape("weight_packed", 255, 16), r"weight_packed of the shape \[255, 16\]"),
    (packed, EIGHT_OR_FOUR, with_shape("weight_packed", 256, 36), "128 codes in 36 words .* says 8 or 4 bits"),
    (packed, compressed(4, 32), with_shape("weight_scale", 3, 4), "scales of 3 outputs in place of 256"),
    (whole, BYTES, without("weight_scale"), "lacks its weight_scale"),
    (bitsandbytes_8, NF4, with_shape("SCB", 3), "scales of 3 outputs in place of 256"),
    (bitsandbytes_8, NF4, without("SCB"), "lacks its SCB"),
    (four_bits, NF4, without("weight.absmax"), "lacks its weight.absmax"),
    (four_bits, NF4, with_shape("weight", 9, 1), "18 codes and 512 scales for a weight of .256, 128."),
    (four_bits, NF4, with_shape(STATE, 5), "a quant_state that cannot be read"),
    (four_bits, NF4, without(STATE), "a weight of U8, and no scales"),
    (partial(fp8, block=None), FP8, with_shape("weight", 9), "do not fit together"),
    (partial(fp8, block=(64, 64)), FP8, nothing, "config.json says no blocks"),
    (partial(fp8, block=(64, 64)), FP8 | {"weight_block_size": [64, 64]}, without("weight_scale_inv"), "weight_scale;"),
]
UNREAD: list[tuple[Any, dict[str, Any], Callable[[dict[str, Tensor]], Any], str]] = [
    (gptq, GPTQ | {"checkpoint_format": "marlin"}, nothing, "in GPTQ's format 'marlin'"),
    (gptq, GPTQ | {"is_marlin_format": True}, nothing, "with the is_marlin_format True"),
    (gptq, GPTQ | {"pack_dtype": "int16"}, nothing, "with the pack_dtype 'int16'"),
    (gptq, GPTQ | {"quant_method": "aqlm"}, nothing, "quantised by aqlm"),
    (partial(gptq, bits=2), GPTQ | {"bits": 2}, nothing, "with codes of 2 bits"),
    (awq, AWQ | {"zero_point": False}, nothing, "with the zero_point False"),
    (awq, AWQ | {"version": "gemv"}, nothing, "in AWQ's format 'gemv'"),
    (awq, AWQ | {"version": None, "checkpoint_format": "gemv_fast"}, nothing, "in AWQ's format 'gemv_fast'"),
    (awq_in_bytes, AWQ | {"bits": 8}, nothing, "with codes of 8 bits by AWQ"),
    (packed, compressed(4, 32, "marlin-24"), nothing, "in the format 'marlin-24'"),
    (packed, compressed(4, 32) | {"sparsity_config": {"format": "sparse-24"}}, nothing, "format 'sparse-24'"),
    (packed, compressed(4, 32) | {"transform_config": {"R1": {}}}, nothing, "with the transform_config {"),
    (packed, of_group(format="nvfp4-pack-quantized"), nothing, "in the format 'nvfp4-pack-quantized'"),
    (whole, of_group(weights={"strategy": "block"}), nothing, "by the strategy 'block' with codes of the type 'int'"),
    (shifted, compressed(4, 32), with_zeros_of_bytes, "with weight_zero_point of I8 in place of I32"),
    (partial(packed, group=16), compressed(4, 16), nothing, "groups of inputs that are no multiples of 32"),
]


def refused(tmp_path: Path, quantise: Any, config: dict[str, Any], change: Any, error: type[ModelError]) -> str:
    folder, _ = write(tmp_path, quantise, config)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(error) as caught:
        load_model(folder, dtype="float32")
    message = str(caught.value)
    assert type(caught.value) is error and "\n" not in message and str(folder) in message
    return message


@pytest.mark.parametrize(("quantise", "config", "change", "said"), DAMAGED)
def test_a_damaged_folder(quantise: Any, config: dict[str, Any], change: Any, said: str, tmp_path: Path) -> None:
    assert re.search(said, refused(tmp_path, quantise, config, change, ModelError))


@pytest.mark.parametrize(("quantise", "config", "change", "said"), UNREAD)
def test_what_is_not_read(quantise: Any, config: dict[str, Any], change: Any, said: str, tmp_path: Path) -> None:
    message = refused(tmp_path, quantise, config, change, UnsupportedModelError)
    assert said in message and "which truedraft does not read" in message
