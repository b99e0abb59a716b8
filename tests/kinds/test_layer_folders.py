"""EAGLE-3 heads and block drafters in other projects' folders: round trips, and each kind of damage in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from support.eagle_reference import random_eagle
from support.layer_heads import random_head
from truedraft.drafters import Eagle3
from truedraft.drafters.exporting import ExportTarget
from truedraft.drafters.heads.head import HeadRecord
from truedraft.errors import ModelError, ModelNotFoundError, OptionError
from truedraft.kinds.block import folders as block_folders
from truedraft.kinds.block.folders import write_dflash_folder, write_dspark_folder
from truedraft.kinds.block.module import BlockConfig, DFlashHead, DSparkHead
from truedraft.kinds.dflash2 import folders as dflash2_folders
from truedraft.kinds.dflash2.folders import write_dflash2_folder
from truedraft.kinds.dflash2.module import DFlash2Config, DFlash2Head
from truedraft.kinds.eagle import folders as eagle_folders
from truedraft.kinds.eagle.folders import write_eagle_folder
from truedraft.kinds.eagle.module import Eagle3Config, Eagle3Head, PEagleConfig, PEagleHead

SIZES: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head": 16, "inner": 64}
EAGLE = Eagle3Config(48, 97, (0, 2, 5), **SIZES, draft_vocab=40)
EAGLE_1 = replace(EAGLE, rope_start=1, reach=7)  # `speculators` counts positions from 1
PEAGLE = PEagleConfig(48, 97, (0, 2, 5), **SIZES, draft_vocab=40, own_embedding=True, more_layers=2, mask_token=9)
DFLASH = BlockConfig(48, 97, (0, 2, 5), block=4, mask_id=96, depth=2, **SIZES)
DSPARK = replace(DFLASH, from_anchor=True, markov=8, confidence=True, confidence_reads_token=True)
DFLASH2 = DFlash2Config(48, 97, (0, 2, 5), block=4, mask_id=96, depth=2, **SIZES, taps=3, group=8, rank=6, candidates=5)
FACTORS: dict[str, Any] = {"embedding_scale": 2.5, "factor": 0.5, "cap": 30.0}
REDUCED: dict[str, Any] = {"draft_vocab": 40, "own_output": True}


def eagle(config: Any) -> Any:
    return random_eagle(config)


def peagle(config: Any) -> Any:
    return random_head(PEagleHead, config)


def dflash(config: Any) -> Any:
    return random_head(DFlashHead, config)


def dspark(config: Any) -> Any:
    return random_head(DSparkHead, config)


def dflash2(config: Any) -> Any:
    return random_head(DFlash2Head, config)


named = eagle_folders.write_speculators_folder
TARGET = ExportTarget("org/target", LlamaConfig(num_hidden_layers=9, architectures=["LlamaForCausalLM"]))
HEADS: dict[str, tuple[Callable[[Any], Any], Any, Callable[[Any, Path, ExportTarget], None]]] = {
    "EAGLE": (eagle, EAGLE, write_eagle_folder),
    "EAGLE-3.1": (eagle, replace(EAGLE, fc_norm=True, norm_output=True), write_eagle_folder),
    "speculators, eagle": (eagle, EAGLE_1, named),
    "norms before, an embedding": (
        eagle, replace(EAGLE_1, norm_before_residual=True, norm_before_fc=True, own_embedding=True), named,
    ),
    "all ids": (eagle, replace(EAGLE_1, draft_vocab=0), named),
    "norms of queries, theta": (
        eagle, replace(EAGLE_1, query_norms=True, rope={"rope_type": "default", "rope_theta": 7e5}), named,
    ),
    "speculators, p-eagle": (peagle, PEAGLE, named),
    "windows, eagle": (eagle, replace(EAGLE, windows=(512,)), write_eagle_folder),
    "windows, p-eagle": (peagle, replace(PEAGLE, windows=(0, 512, 512)), named),
    "windows, z-lab": (dflash, replace(DFLASH, windows=(512, 0)), write_dflash_folder),
    "causal windows, speculators": (
        dflash, replace(DFLASH, windows=(512,), window_causal=True), block_folders.write_speculators_folder,
    ),
    "z-lab": (dflash, DFLASH, write_dflash_folder),
    "DeepSpec": (
        dspark, replace(DSPARK, own_output=True, own_embedding=True, markov_kind="gated"), write_dspark_folder,
    ),
    "speculators, dflash": (dflash, replace(DFLASH, **REDUCED), block_folders.write_speculators_folder),
    "speculators, all ids": (dflash, DFLASH, block_folders.write_speculators_folder),
    "speculators, dspark": (
        dspark, replace(DSPARK, markov_kind="rnn", **REDUCED), block_folders.write_speculators_folder,
    ),
    "z-lab, dflash2": (dflash2, DFLASH2, write_dflash2_folder),
    "z-lab, factors": (dflash2, replace(DFLASH2, **FACTORS), write_dflash2_folder),
    "speculators, dflash2": (dflash2, replace(DFLASH2, **FACTORS), dflash2_folders.write_speculators),
}  # fmt: skip


def written(name: str, folder: Path) -> tuple[Any, Path]:
    make, config, write = HEADS[name]
    head = make(config)
    write(head, folder, TARGET)
    return head, folder


def record_in(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return record


def change(folder: Path, weights: Callable[[dict[str, Tensor]], object] = lambda each: None, **record: Any) -> None:
    """Write a folder again with other weights, or other words in its config.json; None takes one away."""
    found = load_file(folder / "model.safetensors")
    weights(found)
    save_file(found, folder / "model.safetensors")
    about = record_in(folder) | record
    about = {name: each for name, each in about.items() if each is not None}
    (folder / "config.json").write_text(json.dumps(about))


@pytest.mark.parametrize("name", HEADS)
def test_a_round_trip_is_bit_for_bit(name: str, tmp_path: Path) -> None:
    head, folder = written(name, tmp_path / "once")
    kept = type(head).load(folder)
    assert kept.config == head.config and kept.state_dict().keys() == head.state_dict().keys()
    assert all(each.equal(kept.state_dict()[key]) for key, each in head.state_dict().items())
    assert not kept.training and not any(each.requires_grad for each in kept.parameters())
    assert "it is used because its sizes fit" in (kept.record.note or "")
    assert kept.record.target_name == ("org/target" if "speculators_model_type" in record_in(folder) else "")
    assert kept.reach == head.reach, "it drafts as far as its folder says"
    HEADS[name][2](kept, tmp_path / "again", TARGET)
    for file in ("config.json", "model.safetensors"):
        assert (folder / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
        assert (folder / file).stat().st_mode & 0o777 == 0o644, "others may read it"


def test_what_is_written_is_as_the_projects_have_it(tmp_path: Path) -> None:
    """Layers of flat folders are numbered by their outputs, as here; by `speculators` 2 is what layer 1 gives.

    SGLang 0.5.23 (models/llama.py, `set_eagle3_layers_to_capture`) takes what enters layer number + 1; vLLM
    (gpu/spec_decode/eagle/eagle3_utils.py) reads those beside `eagle_config`, which count what enters.
    """
    numbers = {}
    for name in HEADS:
        about = record_in(written(name, tmp_path / name)[1])
        inner = about.get("eagle_config") or about.get("dflash_config") or about
        (numbers[name],) = (each for word, each in inner.items() if word.endswith("layer_ids"))
        layer = about.get("transformer_layer_config", about)
        assert layer["rope_parameters"]["rope_theta"] == HEADS[name][1].rope["rope_theta"]
        if layer is about:  # readers with a transformers before 5
            assert (about["rope_theta"], about["rope_scaling"]) == (10000.0, None)
        if "eagle_config" in about:
            assert about["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    entered = {name for name, each in numbers.items() if each == [1, 3, 6]}
    speculators = {name for name in HEADS if "speculators_model_type" in record_in(tmp_path / name)}
    assert entered == speculators and all(numbers[name] == [0, 2, 5] for name in HEADS.keys() - entered)
    assert load_file(tmp_path / "EAGLE" / "model.safetensors")["d2t"][:3].tolist() == [1, 2, 3]
    assert "layers.0.mlp.up_proj.weight" in load_file(tmp_path / "speculators, eagle" / "model.safetensors")


_LAYER = {
    *(f"{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")),
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}
_NORMS = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
_BLOCK = {f"layers.{layer}.{name}" for layer in range(2) for name in _LAYER | _NORMS} | {
    "fc.weight", "hidden_norm.weight", "norm.weight",
}  # fmt: skip
SGLANG: dict[str, tuple[set[str], set[str]]] = {
    "EAGLE-3.1": (
        {f"midlayer.{name}" for name in _LAYER | {"hidden_norm.weight"}}
        | {"fc.weight", *(f"fc_norm.{number}.weight" for number in range(3)), "norm.weight", "lm_head.weight"}
        | {"d2t", "t2d"},
        {"draft_vocab_size", "fc_norm", "norm_output", "eagle_config"},
    ),
    "z-lab": (_BLOCK, {"block_size", "num_target_layers", "layer_types", "dflash_config"}),
    "DeepSpec": (
        _BLOCK | {"embed_tokens.weight", "lm_head.weight", "confidence_head.proj.weight", "confidence_head.proj.bias"}
        | {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
        | {"markov_head.gate_proj.weight", "markov_head.gate_proj.bias"},
        {"block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type",
         "confidence_head_with_markov"},
    ),
}  # fmt: skip
"""Tensors, and what its models read of config.json, of SGLang 0.5.23 (models/llama_eagle3.py, dflash.py, dspark.py)."""


@pytest.mark.parametrize("name", SGLANG)
def test_sglang_finds_all_tensors_by_its_names(name: str, tmp_path: Path) -> None:
    """It passes over a tensor that it does not know, and leaves one that it misses as it was made, without a word."""
    folder = written(name, tmp_path)[1]
    tensors, read = SGLANG[name]
    assert load_file(folder / "model.safetensors").keys() == tensors
    usual = {"hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"}
    assert record_in(folder).keys() >= read | usual | {"intermediate_size", "rms_norm_eps", "rope_parameters"}


IDS = "eagle_aux_hidden_state_layer_ids"


def optimized(folder: Path, config: Eagle3Config, inside: dict[str, Any], **beside: Any) -> Eagle3Head:
    """A head in the form that NVIDIA's Model Optimizer writes (export/plugins/hf_spec_export.py): flags inside
    `eagle_config`, the layer called `layers.0`, an LM head, `d2t` alone."""
    head = eagle(config)
    weights = eagle_folders.weights_of(head)
    weights.pop("t2d")
    folder.mkdir()
    save_file(
        {name.replace("midlayer.", "layers.0."): each for name, each in weights.items()}, folder / "model.safetensors"
    )
    usual = {
        "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
        "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": None,
    }  # fmt: skip
    about = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 48,
        "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97,
        "draft_vocab_size": 40, "num_hidden_layers": 1 + config.more_layers, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "rope_scaling": None, "max_position_embeddings": 4096, "attention_bias": False,
        "mlp_bias": False, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
        "eagle_config": usual | inside, **beside,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(about))
    return head


@pytest.mark.parametrize(
    "config", [replace(EAGLE, norm_before_fc=True), replace(EAGLE, more_layers=1), EAGLE], ids=["norm", "deep", "plain"]
)
def test_heads_of_model_optimizer_are_read_with_the_flags_inside_eagle_config(
    config: Eagle3Config, tmp_path: Path
) -> None:
    """`input_norm` is there where `norm_before_fc` is set, and its place is inside (vLLM's PR 42143)."""
    inside = {"norm_before_fc": True} if config.norm_before_fc else {}
    head = optimized(tmp_path / "head", config, {IDS: [24, 30, 36], **inside})
    kept = Eagle3Head.load(tmp_path / "head")
    assert kept.config == replace(config, layers=(24, 30, 36), layers_unsettled=True)
    assert kept.state_dict().keys() == head.state_dict().keys()
    assert all(each.equal(kept.state_dict()[key]) for key, each in head.state_dict().items())
    assert kept.config.at_usual_layers(36) == replace(config, layers=(23, 29, 35))


@pytest.mark.parametrize(
    ("inside", "beside", "count", "layers"),
    [
        ([24, 30, 36], None, 36, (23, 29, 35)),  # nvidia/gpt-oss-120b-Eagle3-v3: SGLang's PR 32334
        ([1, 17, 32], None, 36, (1, 17, 32)),  # the usual ones of Model Optimizer and SpecForge
        ([1, 20, 30], None, 36, (1, 20, 30)),  # SGLang's PR 25454: those that begin with 1 count what layers give
        ([2, 18, 33], None, 36, (1, 17, 32)),  # the usual ones of vLLM and EAGLE
        ([3, 20, 30], [4, 21, 31], 36, (3, 20, 30)),
        ([3, 20, 30], [3, 20, 30], 36, (2, 19, 29)),
        (None, [3, 20, 30], 36, (2, 19, 29)),  # vLLM
    ],
)
def test_what_the_numbers_of_layers_count_is_settled_by_the_folder_and_the_target(
    inside: list[int] | None, beside: list[int] | None, count: int, layers: tuple[int, ...], tmp_path: Path
) -> None:
    optimized(tmp_path / "head", EAGLE, {IDS: inside}, **({} if beside is None else {IDS: beside}))
    settled = Eagle3Head.load(tmp_path / "head").config.at_usual_layers(count)
    assert settled.layers == layers and not settled.layers_unsettled


def test_numbers_of_layers_that_fit_either_count_are_refused(tmp_path: Path) -> None:
    optimized(tmp_path / "head", EAGLE, {IDS: [3, 20, 30]})
    head = Eagle3Head.load(tmp_path / "head")
    said = r"\[3, 20, 30\] where they count what enters layers, \[4, 21, 31\] where they count what layers give"
    with pytest.raises(OptionError, match=said):
        head.config.at_usual_layers(36)
    with pytest.raises(OptionError, match="give its config at_usual_layers of the target"):
        Eagle3(head)
    optimized(tmp_path / "both", EAGLE, {IDS: [1, 20, 30]}, **{IDS: [1, 20, 30]})
    with pytest.raises(ModelError, match=r"\[1, 20, 30\] in eagle_config, which is neither one lower nor the same"):
        Eagle3Head.load(tmp_path / "both")


@pytest.mark.parametrize(("name", "count", "usual"), [("EAGLE", 32, (1, 15, 28)), ("z-lab", 36, (1, 9, 17, 25, 33))])
def test_layers_that_nobody_names_are_the_usual_ones_of_the_target(name: str, count: int, usual: Any) -> None:
    """Of EAGLE what enters layers 2, 16 and 29; DFlash for Qwen3-4B, of 36 layers, reads the outputs of these five."""
    config = HEADS[name][1]
    assert replace(config, layers=()).merged == len(usual)
    assert replace(config, layers=()).at_usual_layers(count).layers == usual
    assert config.at_usual_layers(count) is config
    with pytest.raises(OptionError, match=f"of a target with 6 layers there are no {len(usual)}"):
        replace(config, layers=()).at_usual_layers(6)


def test_what_a_configuration_may_leave_out_is_what_its_project_takes(tmp_path: Path) -> None:
    folder = written("EAGLE", tmp_path / "eagle")[1]
    change(
        folder, eagle_config=None, eagle_aux_hidden_state_layer_ids=None, rope_parameters=None,
        rope_scaling={"type": "linear", "factor": 2.0},
    )  # fmt: skip
    config = Eagle3Head.load(folder).config
    assert config.layers == () and config.rope == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    folder = written("speculators, dspark", tmp_path / "nested")[1]
    layer = record_in(folder)["transformer_layer_config"]
    del layer["rms_norm_eps"], layer["max_position_embeddings"], layer["rope_parameters"]
    copies = {"verifier_norm.weight": torch.ones(48), "verifier_lm_head.weight": torch.ones(40, 48)}
    verifier = {"verifier": {"name_or_path": "org/target"}}
    change(
        folder, lambda weights: weights.update(copies), transformer_layer_config=layer, sample_from_anchor=None,
        confidence_head_with_markov=None, enable_confidence_head=None, speculators_config=verifier,
    )  # fmt: skip
    kept = DSparkHead.load(folder)
    assert kept.config.eps == 1e-6 and kept.config.most_positions == 32768 and kept.config.rope["rope_theta"] == 10000.0
    assert kept.config.from_anchor and kept.config.confidence_reads_token and kept.record.target_name == "org/target"
    newer = written("z-lab", tmp_path / "flat")[1]
    inside = {"block_size": 4, "mask_token_id": 96, "target_layer_ids": [0, 2, 5]}
    change(newer, block_size=None, dflash_config=inside, rope_parameters=None, rope_theta=1e6)
    entered = {"block_size": 4, "mask_token_id": 96, "layer_ids": [1, 3, 6]}  # vLLM: they count what enters
    other = written("z-lab", tmp_path / "entered")[1]
    change(other, dflash_config=entered)
    assert DFlashHead.load(other).config.layers == (0, 2, 5)
    spec_forge = written("DeepSpec", tmp_path / "SpecForge")[1]
    inside |= {name: record_in(spec_forge)[name] for name in ("markov_rank", "markov_head_type")}
    change(
        spec_forge, architectures=["DSparkDraftModel"], dflash_config=inside, mask_token_id=None, target_layer_ids=None,
        markov_rank=None, markov_head_type=None,
    )  # fmt: skip
    assert DSparkHead.load(spec_forge).config == HEADS["DeepSpec"][1]
    assert DFlashHead.load(newer).config.block == 4 and DFlashHead.load(newer).config.rope["rope_theta"] == 1e6


@pytest.mark.parametrize(
    ("made", "record", "windows"),
    [
        ("EAGLE", {"sliding_window": 512}, (512,)),  # TensorRT-LLM's PR 14200
        ("EAGLE", {"sliding_window": 512, "use_sliding_window": False}, ()),
        ("z-lab", {"layer_types": None, "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 1},
         (0, 512)),
        ("z-lab", {"dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 2, 5], "use_swa": True,
                                     "swa_window_size": 512}}, (512, 512)),  # Model Optimizer's PR 1960
    ],
)  # fmt: skip
def test_windows_of_other_projects(made: str, record: dict[str, Any], windows: Any, tmp_path: Path) -> None:
    head, folder = written(made, tmp_path)
    change(folder, **record)
    assert type(head).load(folder).config == replace(head.config, windows=windows)


@pytest.mark.parametrize("config", [replace(EAGLE, windows=(512,), sink=4), replace(DFLASH, windows=(512, 9))])
def test_windows_that_a_format_has_no_words_for_are_not_written(config: Any, tmp_path: Path) -> None:
    write = HEADS["EAGLE" if isinstance(config, Eagle3Config) else "z-lab"][2]
    with pytest.raises(ModelError, match="one window for all layers with one, which sees no first tokens"):
        write(eagle(config) if isinstance(config, Eagle3Config) else dflash(config), tmp_path / "head", TARGET)
    assert not (tmp_path / "head").exists()


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: weights.pop(name)


def put(name: str, weight: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: weights.update({name: weight})


ZLAB, NESTED, FLASH2 = "z-lab", "speculators, dspark", "z-lab, dflash2"
SELECTING = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
ZLAB_INSIDE = {"mask_token_id": 96, "target_layer_ids": [0, 2, 5]}
BROKEN: list[tuple[str, Callable[[dict[str, Tensor]], object], str]] = [
    ("EAGLE", without("midlayer.mlp.up_proj.weight"), "lacks midlayer.mlp.up_proj.weight"),
    (NESTED, without("markov_head.markov_w2.weight"), "lacks markov_head.markov_w2.weight"),
    ("EAGLE", put("midlayer.extra", torch.ones(3)), "holds midlayer.extra, unknown"),
    ("EAGLE", put("fc.weight", torch.ones(48, 96)), r"fc.weight .* has the shape \[48, 96\]"),
    ("EAGLE", put("fc.weight", torch.ones(48, 144).half()), "numbers of several kinds"),
    ("EAGLE", put("d2t", torch.arange(40) * 2 + 1), "it holds offsets"),
    ("EAGLE", put("t2d", torch.ones(97, dtype=torch.bool)), "d2t and t2d .* different ids"),
    ("EAGLE", put("d2t", torch.ones(3, dtype=torch.int64)), "no list of 40 whole numbers"),
    (FLASH2, without("layers.1.mlp_conv.base_kernel"), "lacks layers.1.mlp_conv.base_kernel"),
    (FLASH2, put("layers.0.attention_conv.bias", torch.ones(3)), "holds layers.0.attention_conv.bias, unknown"),
    (FLASH2, put("layers.0.attention_conv.base_kernel", torch.ones(2, 2, 48)), r"has the shape \[2, 2, 48\]"),
]
SENSELESS: list[tuple[str, dict[str, Any], str]] = [
    ("EAGLE", {"hidden_size": None}, "does not name 'hidden_size'"),
    ("EAGLE", {"hidden_act": "gelu"}, "activation is 'gelu'"),
    ("EAGLE", {"target_hidden_size": 64}, "48 wide, and its target 64"),
    ("EAGLE", {IDS: None, "eagle_config": {IDS: [1.0, 2.0, 3.5]}}, "reads different layers"),
    ("EAGLE", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
    ("EAGLE", {"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm is False"),
    ("EAGLE", {"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm is True"),
    ("EAGLE", {"eagle_config": {"use_input_layernorm_in_first_layer": False}}, "in_first_layer is False"),
    (
        "EAGLE",
        {"eagle_config": {"parallel_draft_step": 4}},
        "parallel_draft_step is 4, and heads are read where it is 1",
    ),
    ("EAGLE", {"num_hidden_layers": 10**9}, "more_layers of an EAGLE-3 head must be 0 or more, at most 1024"),
    (
        "speculators, eagle",
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": 10**9}]}},
        "at most 1024",
    ),
    (ZLAB, {"num_hidden_layers": 10**9}, "depth of a block drafter must be at most 1024, got 1000000000"),
    ("EAGLE", {"mlp_bias": True}, "mlp_bias is True"),
    ("EAGLE", {"logit_scale": 0.5}, "logit_scale is 0.5"),
    ("EAGLE", {"quantization_config": {"quant_algo": "FP8"}}, "quantization_config is .*FP8.*not supported"),
    ("EAGLE", {"eagle_config": [1]}, "names what makes no head"),
    ("EAGLE", {"speculators_config": {"verifier": [1]}}, "names what makes no head"),
    ("EAGLE", {"rope_parameters": {"rope_type": "odd", "rope_theta": 1e4}}, "no parameters of a rotation"),
    ("EAGLE", {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "no parameters of a rotation"),
    ("EAGLE", {"draft_vocab_size": 40.0}, "has 1 to 97 ids, got 40.0"),
    ("EAGLE", {"rms_norm_eps": "x"}, "eps of an EAGLE-3 head must be a number"),
    ("EAGLE", {"architectures": 5}, "is not of an EAGLE-3 head"),
    ("speculators, eagle", {"transformer_layer_config": [1]}, "names what makes no head"),
    (ZLAB, {"hidden_size": None}, "does not name 'hidden_size'"),
    (ZLAB, {"hidden_size": True}, "width of a block drafter must be 1 or more, got True"),
    (ZLAB, {"block_size": None}, "does not name 'block_size'"),
    (ZLAB, {"attention_bias": True}, "attention_bias is True"),
    (ZLAB, {"is_causal": True}, "is_causal is True, and heads are read where it is False"),
    (ZLAB, {"is_neox_style": False}, "is_neox_style is False"),
    *(
        (ZLAB, {"dflash_config": ZLAB_INSIDE | {name: value}}, f"{name} is {value!r}")
        for name, value in (
            ("causal", True),
            ("attention_sink_bias", True),
            ("use_aux_hidden_state", False),
            ("input_embedding_scale", 2.5),
            ("output_multiplier", 2.0),
            ("final_logit_softcapping", 30.0),
            ("conv_kernel_size", 2),
            ("selector_rank", 256),
        )
    ),
    (ZLAB, {"dflash_config": ZLAB_INSIDE | {"block_size": 8}}, "block_size is 4 there, and 8 in its dflash_config"),
    (ZLAB, {"layer_types": ["sliding_attention"] * 2}, "its sliding_window is None"),
    (ZLAB, {"layer_types": ["full_attention", "chunked_attention"]}, "of the type 'chunked_attention'"),
    (ZLAB, {"layer_types": ["sliding_attention"] * 3, "sliding_window": 9}, "windows are 3, and it has 2 layers"),
    (ZLAB, {"layer_types": None, "use_sliding_window": True}, "its sliding_window is None"),
    ("windows, eagle", {"sliding_window": 5}, "more than the 5 tokens that are drafted, got 5"),
    (ZLAB, {"num_target_layers": 6}, "reads layer 5 of 6, the last"),
    (ZLAB, {"max_position_embeddings": "x"}, "most_positions of a block drafter must be 1 or more, got 'x'"),
    (NESTED, {"markov_head_type": "lstm"}, "vanilla, gated, rnn"),
    (NESTED, {"aux_hidden_state_layer_ids": [0, 1, 2]}, r"got \[-1, 0, 1\]"),
    (NESTED, {"mask_token_id": None}, "does not name 'mask_token_id'"),
    (NESTED, {"speculators_model_type": []}, "is not of a DSpark head"),
    (FLASH2, {"hidden_size": 50}, "groups divide 50 entries"),
    *(
        (FLASH2, {"dflash_config": {**ZLAB_INSIDE, **SELECTING, "block_size": 4, name: value}}, said)
        for name, value, said in (
            ("output_multiplier", "x", "factor of a DFlash 2 head must be a number above 0, got 'x'"),
            ("final_logit_softcapping", -30.0, "cap of a DFlash 2 head must be a number above 0, got -30.0"),
            ("selector_top_k", 98, "candidates of a DFlash 2 head must be at most its 97 ids, got 98"),
            ("selector_top_k", 0, "candidates of a DFlash 2 head must be 1 or more, got 0"),
            ("conv_kernel_size", 5, "at most the block's 4 rows, got groups of 8 and 5 taps"),
            ("conv_group_size", None, "group of a DFlash 2 head must be 1 or more, got None"),
        )
    ),
]


@pytest.mark.parametrize(
    ("made", "weights", "record", "said"),
    [
        *((made, weights, {}, said) for made, weights, said in BROKEN),
        *((made, lambda _: None, record, said) for made, record, said in SENSELESS),
    ],
)
def test_damaged_weights_and_senseless_configurations_are_told_in_a_sentence(
    made: str, weights: Any, record: dict[str, Any], said: str, tmp_path: Path
) -> None:
    head, folder = written(made, tmp_path / "head")
    change(folder, weights, **record)
    with pytest.raises(ModelError, match=said) as caught:
        type(head).load(folder)
    assert "\n" not in str(caught.value)


def test_lists_in_lists_without_end_are_told_in_a_sentence(tmp_path: Path) -> None:
    folder = written("EAGLE", tmp_path)[1]
    (folder / "config.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
        Eagle3Head.load(folder)


def test_another_kind_is_named(tmp_path: Path) -> None:
    folder = written("speculators, dspark", tmp_path / "head")[1]
    with pytest.raises(ModelError, match="holds a DSpark head, not a DFlash head; use dspark:"):
        DFlashHead.load(folder)
    with pytest.raises(ModelError, match="holds a DSpark head, not an EAGLE-3 head; use dspark:"):
        Eagle3Head.load(folder)
    masks = written("speculators, p-eagle", tmp_path / "masks")[1]
    with pytest.raises(ModelError, match="holds a P-EAGLE head, not an EAGLE-3 head; use p-eagle:"):
        Eagle3Head.load(masks)
    PEagleHead.load(masks).save(tmp_path / "ours", HeadRecord("tiny", None))
    with pytest.raises(ModelError, match="holds a P-EAGLE head, not an EAGLE-3 head; use p-eagle:"):
        Eagle3Head.load(tmp_path / "ours")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"has neither model\.safetensors nor"):
        DSparkHead.load(folder)


@pytest.mark.parametrize(
    ("write", "head", "said"),
    [
        (write_eagle_folder, eagle(EAGLE_1), "whose positions count from 0"),
        (write_eagle_folder, eagle(replace(EAGLE, norm_before_fc=True)), "normed behind fc alone"),
        (write_eagle_folder, peagle(PEAGLE), "of one layer"),
        (named, eagle(replace(EAGLE, own_output=False, draft_vocab=0)), "LM head of their own"),
        (HEADS["z-lab"][2], dflash(replace(DFLASH, **REDUCED)), "train with --draft-vocab 0"),
        (HEADS["DeepSpec"][2], dspark(DSPARK), "copies of the target's embedding"),
        (block_folders.write_speculators_folder, dspark(replace(DSPARK, own_output=True)), "train dspark --tied"),
        *(
            (write, dflash2(replace(DFLASH2, **{changed: True})), "train dflash2 --tied")
            for write in (write_dflash2_folder, dflash2_folders.write_speculators)
            for changed in ("own_output", "own_embedding", "from_anchor")
        ),
    ],
)
def test_a_format_without_a_place_for_something_refuses_it(write: Any, head: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        write(head, tmp_path, ExportTarget("org/target", None))
    assert not list(tmp_path.iterdir())
