"""What the formats' own tools write and read, held against ours; left out where a tool is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, TorchAoConfig

from support.codes import logits
from support.quantized_folders import Made, edit, grouped, tiny_llama, write
from support.tiny_models import GROUPED, build
from truedraft import load_model
from truedraft.errors import MissingExtraError

IDS = torch.arange(1, 40) * 37 % 97


def numbers_of(folder: Path) -> dict[str, Tensor]:
    """The weights as they are made numbers, in float32."""
    return dict(load_model(folder, dtype="float32", fast_paths=False).module.named_parameters())


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "kind"),
    [
        (4, 32, True, "pack-quantized"),
        (4, 128, False, "pack-quantized"),
        (8, None, True, "pack-quantized"),
        (8, 64, False, "pack-quantized"),
        (8, None, True, "int-quantized"),
        (8, None, False, "int-quantized"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_codes_of_compressed_tensors(
    bits: int, group: int | None, symmetric: bool, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    tool = pytest.importorskip("compressed_tensors")
    args = tool.quantization.QuantizationArgs(
        num_bits=bits, type="int", symmetric=symmetric, strategy="group" if group else "channel", group_size=group
    )
    scheme = tool.quantization.QuantizationScheme(targets=["Linear"], weights=args)
    compressor = tool.compressors.base.BaseCompressor.get_value_from_registry(kind)

    def quantise(weight: Tensor) -> Made:
        made = grouped(weight, bits, group or -1, symmetric=symmetric, dtype=dtype)
        zeros = (made.zeros - 2 ** (bits - 1)).to(torch.int8)
        given = {"weight": weight.to(dtype), "weight_scale": made.scales, "weight_zero_point": zeros}
        written = compressor.compress(given, scheme)
        return written, compressor.decompress(dict(written), scheme)["weight"].float()

    groups = {"group_0": {"targets": ["Linear"], "weights": args.model_dump(mode="json")}}
    said = {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"]}
    folder, twin = write(tmp_path, quantise, said)
    ours, theirs = numbers_of(folder), numbers_of(twin)
    assert all(torch.equal(ours[name].to(dtype), theirs[name].to(dtype)) for name in theirs)
    assert load_model(folder, dtype="float32").fast_paths[0] == "native forward"


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
def test_codes_of_bitsandbytes_in_4_bits(kind: str, double: bool, tmp_path: Path) -> None:
    tool = pytest.importorskip("bitsandbytes.functional")

    def quantise(weight: Tensor) -> Made:
        codes, state = tool.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=double)
        beside = {f"weight.{end}": tensor for end, tensor in state.as_dict(packed=True).items()}
        return {"weight": codes} | beside, tool.dequantize_4bit(codes, state)

    folder, twin = write(tmp_path, quantise, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    ours, theirs = numbers_of(folder), numbers_of(twin)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_codes_of_bitsandbytes_in_8_bits(tmp_path: Path) -> None:
    tool = pytest.importorskip("bitsandbytes.functional")

    def quantise(weight: Tensor) -> Made:
        codes, scales, _ = tool.int8_vectorwise_quant(weight.half())
        written = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return written, tool.int8_vectorwise_dequant(codes, scales)

    folder, twin = write(tmp_path, quantise, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    ours, theirs = numbers_of(folder), numbers_of(twin)
    for name, weight in theirs.items():  # the tool multiplies by the scale and by 1/127 one after the other
        torch.testing.assert_close(ours[name], weight, rtol=2e-7, atol=0)


@pytest.mark.parametrize(
    "kind", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"]
)
def test_a_folder_of_torchao_is_made_numbers(kind: str, tmp_path: Path) -> None:
    tool = pytest.importorskip("torchao.quantization")
    tiny_llama().save_pretrained(tmp_path / "numbers")
    asked = TorchAoConfig(getattr(tool, kind)())
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "numbers", quantization_config=asked, dtype=torch.bfloat16)
    made.save_pretrained(tmp_path / "quantised")
    ours = numbers_of(tmp_path / "quantised")
    for name, weight in made.named_parameters():
        theirs = weight if type(weight.data) is Tensor else weight.dequantize()
        assert torch.equal(ours[name].float(), theirs.float())
    assert any("proj" in name and type(weight.data) is not Tensor for name, weight in made.named_parameters())


def test_without_torchao_its_folders_are_refused_in_one_sentence(tmp_path: Path) -> None:
    try:
        import torchao  # noqa: F401
    except ImportError:
        tiny_llama().save_pretrained(tmp_path)
        edit(tmp_path, quantization_config={"quant_method": "torchao", "quant_type": "int8_weight_only"})
        with pytest.raises(
            MissingExtraError, match=r"need a package that is not installed \(.*torchao.*\); install it"
        ):
            load_model(tmp_path)
    else:
        pytest.skip("torchao is installed")


def mxfp4(rows: Tensor) -> Made:
    """Codes of 4 bits `[.., groups, 16]`, of random numbers in groups of 32 inputs, and the numbers `[.., in]`."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat([table, -table])
    groups = rows.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    codes = (groups[..., None] / exponents.exp2()[..., None, None] - table).abs().argmin(-1)
    octets = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    numbers = (table[codes] * exponents.exp2()[..., None]).flatten(-2)
    return {"blocks": octets, "scales": (exponents + 127).to(torch.uint8)}, numbers


def test_a_folder_in_mxfp4_is_made_numbers(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_local_experts": 4}
    config = GptOssConfig(**GROUPED | sizes, num_experts_per_tok=2, max_position_embeddings=256, sliding_window=8)
    build(config, 5, dtype=torch.bfloat16).save_pretrained(tmp_path / "numbers")
    build(config, 5, dtype=torch.bfloat16).save_pretrained(tmp_path / "quantised")
    tensors = load_file(tmp_path / "numbers" / "model.safetensors")
    coded: dict[str, Tensor] = {}
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        layer, numbers = mxfp4(tensors[name].float().transpose(1, 2))
        tensors[name] = numbers.transpose(1, 2).bfloat16().contiguous()
        coded |= {f"{name}_{end}": each for end, each in layer.items()}
    save_file(tensors, tmp_path / "numbers" / "model.safetensors", {"format": "pt"})
    kept = {name: each for name, each in tensors.items() if f"{name}_blocks" not in coded}
    save_file(kept | coded, tmp_path / "quantised" / "model.safetensors", {"format": "pt"})
    edit(tmp_path / "quantised", quantization_config={"quant_method": "mxfp4"})
    ours, theirs = (load_model(tmp_path / each, dtype="float32") for each in ("quantised", "numbers"))
    assert ours.fingerprint == theirs.fingerprint
    assert torch.equal(logits(ours, IDS), logits(theirs, IDS))
    assert not any(
        isinstance(module, nn.Module) and "Mxfp4" in type(module).__name__ for module in ours.module.modules()
    )
