"""Heads on one vector in other projects' files, Medusa's, vLLM's and Apple's: they compute what each format says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.tiny_models import PROMPTS, VOCAB, packed
from truedraft import Engine, SamplingParams
from truedraft.drafters import Medusa
from truedraft.drafters.exporting import ExportTarget
from truedraft.errors import CompositionError, ModelError, ModelNotFoundError
from truedraft.kinds.medusa.folders import published_tree, write_vllm_medusa
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads, MedusaRunner
from truedraft.kinds.redrafter.module import RedrafterHead

NOBODY = ExportTarget("", None)
WIDTH, HEADS, FEW = 48, 3, 30
APPLE_WIDTH, APPLE_IDS = 6, 13


def random(seed: int = 0) -> Any:
    noise = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=noise)


def block(x: Tensor, weight: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """x + SiLU(W x + b) of rows."""
    inner = x @ weight.T + bias
    return x + inner * torch.sigmoid(inner)


# ------------------------------------------------------------------------------- the original Medusa project


def original(heads: int, layers: int, prefix: str = "") -> dict[str, Tensor]:
    """As `torch.save(medusa_head.state_dict())` of the original has it: blocks, then an output without bias."""
    made, state = random(), {}
    for head in range(heads):
        for layer in range(layers):
            state[f"{prefix}{head}.{layer}.linear.weight"] = made(6, 6)
            state[f"{prefix}{head}.{layer}.linear.bias"] = made(6)
        state[f"{prefix}{head}.{layers}.weight"] = made(13, 6)
    return state


@pytest.mark.parametrize(("layers", "prefix"), [(1, ""), (2, "medusa_head.")])
def test_a_folder_of_the_original_computes_what_it_computes(tmp_path: Path, layers: int, prefix: str) -> None:
    torch.save(original(3, layers, prefix), tmp_path / "medusa_lm_head.pt")
    # The project's published configurations count fewer heads than their files hold.
    config = {"medusa_num_heads": 2, "medusa_num_layers": layers, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    kept, state = MedusaHeads.load(tmp_path), original(3, layers)
    assert (kept.record.target_name, kept.record.fingerprint) == ("lmsys/vicuna-7b-v1.3", None)
    assert "lmsys/vicuna-7b-v1.3" in (kept.record.note or "")
    assert (kept.config.heads, kept.config.layers, kept.config.tied) == (3, layers, False)
    h = random(1)(2, 6)
    logits = kept.logits(h, lambda vectors: vectors, lambda product: product)
    for head in range(3):
        x = h
        for layer in range(layers):
            x = block(x, state[f"{head}.{layer}.linear.weight"], state[f"{head}.{layer}.linear.bias"])
        torch.testing.assert_close(logits[head], x @ state[f"{head}.{layers}.weight"].T)
    assert kept.record.trees["greedy"] == kept.record.trees["sampled"] == published_tree().within(3, 10)


def test_a_file_alone_loads_without_a_name(tmp_path: Path) -> None:
    torch.save(original(5, 1), tmp_path / "heads.pt")
    kept = MedusaHeads.load(tmp_path / "heads.pt")
    assert (kept.record.target_name, kept.record.trees["greedy"]) == ("", published_tree())
    assert "no target" in (kept.record.note or "")


class Payload:
    """Unpickling it would run code."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, ("/nonexistent/should-not-run",))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"not a file of torch", "cannot read"),
        (Payload(), "cannot read"),
        ([torch.zeros(2)], "no dictionary of tensors"),
        ({"weight": torch.zeros(2, 2)}, "no Medusa heads"),
        ({name: w for name, w in original(2, 1).items() if name != "1.0.linear.bias"}, r"lacks 1\.0\.linear\.bias"),
        (original(2, 1) | {"2.2.weight": torch.zeros(13, 6)}, "no Medusa heads"),
    ],
)
def test_other_files_are_no_medusa_heads(tmp_path: Path, content: object, said: str) -> None:
    file = tmp_path / "medusa_lm_head.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    refused(MedusaHeads, tmp_path, said)


def refused(kind: Any, folder: Path, said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        kind.load(folder)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------- vLLM's Medusa heads


VARIANTS: dict[str, dict[str, Any]] = {
    "as usual": {},
    "biases": {"medusa_fc_bias": True},
    "one LM head": {"original_lm_head": True},
    "fewer ids": {"truncated_vocab_size": FEW},
    "fewer ids, one LM head": {"truncated_vocab_size": FEW, "original_lm_head": True, "medusa_fc_bias": True},
}


def of_vllm(folder: Path, **said: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    about = {
        "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": WIDTH, "vocab_size": VOCAB,
        "truncated_vocab_size": VOCAB, "num_heads": HEADS, "num_hidden_layers": 2, "original_lm_head": False,
        "medusa_fc_bias": False,
    } | said  # fmt: skip
    made, ids, weights = random(3), about["truncated_vocab_size"], {}
    for head in range(HEADS):
        for layer in range(2):
            weights[f"blocks.{head}.layers.{layer}.weight"] = made(WIDTH, WIDTH) * 0.2
            if about["medusa_fc_bias"]:
                weights[f"blocks.{head}.layers.{layer}.bias"] = made(WIDTH)
        if not about["original_lm_head"]:
            weights[f"lm_heads.{head}.weight"] = made(ids, WIDTH)
    if about["original_lm_head"]:
        weights["lm_head.weight"] = made(ids, WIDTH)
    if ids < about["vocab_size"]:
        weights["token_map"] = torch.randperm(about["vocab_size"], generator=torch.Generator().manual_seed(3))[:ids]
    write(folder, about, weights)
    return about, weights


def write(folder: Path, about: dict[str, Any], weights: dict[str, Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(about))


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_heads_guess_what_vllm_drafts_and_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    about, weights = of_vllm(tmp_path / "theirs", **VARIANTS[name])
    heads = MedusaHeads.load(tmp_path / "theirs")
    assert "it is used because its sizes fit" in (heads.record.note or "")
    vectors = random(1)(9, WIDTH)
    guesses = MedusaRunner(heads, packed("llama"), HEADS).likeliest(vectors, HEADS, 2).ids
    for head in range(HEADS):
        x = vectors
        for layer in range(2):
            at = f"blocks.{head}.layers.{layer}."
            x = block(x, weights[at + "weight"], weights.get(at + "bias", 0.0))
        places = (x @ weights.get("lm_head.weight", weights.get(f"lm_heads.{head}.weight")).T).argmax(-1)
        assert guesses[head, :, 0].equal(weights["token_map"][places] if "token_map" in weights else places)
    write_vllm_medusa(heads, tmp_path / "again", NOBODY)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == weights.keys() and all(again[each].equal(weights[each]) for each in weights)
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == about
    heads.save(tmp_path / "ours", heads.record, dtype=torch.float32)
    kept = MedusaHeads.load(tmp_path / "ours")
    assert kept.config == heads.config
    assert all(each.equal(kept.state_dict()[key]) for key, each in heads.state_dict().items())


def test_what_is_answered_with_fewer_ids_is_what_the_target_says(tmp_path: Path) -> None:
    of_vllm(tmp_path, truncated_vocab_size=FEW)
    model, prompts = packed("llama"), [list(each) for each in PROMPTS]
    for params in (SamplingParams(max_tokens=16), SamplingParams(max_tokens=16, temperature=1.0, seed=5)):
        drafted = Engine(model, Medusa(MedusaHeads.load(tmp_path)), controller="fixed").generate(prompts, params)
        plain = Engine(model).generate(prompts, params)
        assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]


def test_whole_outputs_are_cut_and_a_prefix_is_left_out(tmp_path: Path) -> None:
    about, weights = of_vllm(tmp_path, truncated_vocab_size=FEW)
    cut = MedusaHeads.load(tmp_path).state_dict()
    for head in range(HEADS):
        whole = torch.ones(VOCAB, WIDTH)
        whole[weights["token_map"]] = weights[f"lm_heads.{head}.weight"]
        weights[f"lm_heads.{head}.weight"] = whole
    write(tmp_path, about, {f"medusa_heads.{name}": each for name, each in weights.items()})
    found = MedusaHeads.load(tmp_path).state_dict()
    assert all(found[name].equal(each) for name, each in cut.items())


def test_heads_that_end_in_the_targets_lm_head_bring_it_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = MedusaHeads(MedusaConfig(WIDTH, VOCAB, heads=2))
    for heads in (made, MedusaHeads(MedusaConfig(WIDTH, VOCAB, reads_token=True))):
        with pytest.raises(ModelError, match="read no tokens"):
            write_vllm_medusa(heads, tmp_path, NOBODY)
    weight = torch.randn(VOCAB, WIDTH)
    monkeypatch.setattr(ExportTarget, "lm_head", lambda self, head: weight)
    write_vllm_medusa(made, tmp_path, NOBODY)
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].equal(weight)
    outputs = [each.weight for each in MedusaHeads.load(tmp_path).outputs if each is not None]
    assert len(outputs) == 2 and all(each.equal(weight) for each in outputs)


@pytest.mark.parametrize(
    ("record", "weights", "said"),
    [
        ({}, {"blocks.1.layers.0.weight": None}, r"lacks blocks\.1\.layers\.0\.weight"),
        ({}, {"blocks.3.layers.0.weight": torch.ones(WIDTH, WIDTH)}, r"holds blocks\.3\.layers\.0\.weight, unknown"),
        ({}, {"lm_heads.2.weight": torch.ones(VOCAB, 9)}, r"lm_heads\.2\.weight .* has the shape \[97, 9\]"),
        ({}, {"token_map": torch.arange(4)}, "holds token_map, unknown"),
        ({"medusa_fc_bias": True}, {}, r"lacks blocks\.0\.layers\.0\.bias"),
        ({"truncated_vocab_size": FEW}, {}, "lacks token_map"),
        ({"truncated_vocab_size": FEW}, {"token_map": torch.arange(FEW) + 80}, "does not name 30 different ids"),
        ({"truncated_vocab_size": FEW}, {"token_map": torch.zeros(FEW, dtype=torch.int64)}, "does not name 30"),
        ({"num_heads": "3"}, {}, "makes no head"),
        ({"logit_scale": 2.0}, {}, "its logits are scaled by 2.0"),
    ],
)
def test_damage_of_a_folder_of_vllm(
    record: dict[str, Any], weights: dict[str, Tensor | None], said: str, tmp_path: Path
) -> None:
    about, whole = of_vllm(tmp_path)
    write(tmp_path, about | record, {name: each for name, each in (whole | weights).items() if each is not None})
    refused(MedusaHeads, tmp_path, said)


def test_a_folder_without_weights_and_ids_of_another_target_are_refused(tmp_path: Path) -> None:
    of_vllm(tmp_path, vocab_size=200, truncated_vocab_size=150)
    with pytest.raises(CompositionError, match=r"guesses the id .*and llama has 97 ids"):
        Medusa(MedusaHeads.load(tmp_path)).check(packed("llama"))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"has neither model\.safetensors nor"):
        MedusaHeads.load(tmp_path)


# ------------------------------------------------------------------------------- Apple's recurrent heads


def apple(exit_dim: int, layers: int, rnn: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors of a `Drafter`, by the names that its module tree gives them."""
    made, width = random(), APPLE_WIDTH
    about = {
        "model_type": "recurrent_drafting_drafter", "architectures": ["Drafter"], "hidden_size": width,
        "exit_dim": exit_dim, "num_draft_layers": layers, "rnn": rnn, "vocab_size": APPLE_IDS,
    }  # fmt: skip
    state = {}
    if exit_dim != 2 * width:
        state |= {"input_proj.weight": made(exit_dim, 2 * width), "input_proj.bias": made(exit_dim)}
    for layer in range(layers):
        state[f"lm_head.{layer}.linear.weight"] = made(exit_dim, exit_dim)
        state[f"lm_head.{layer}.linear.bias"] = made(exit_dim)
    state[f"lm_head.{layers}.weight"] = made(APPLE_IDS, exit_dim)
    if rnn:
        state |= {"rnn_u.weight": made(width, width), "rnn_u.bias": made(width), "rnn_w.weight": made(width, width)}
    return about, state


def recurrent_by_hand(state: dict[str, Tensor], layers: int, hidden: Tensor, embedded: Tensor) -> list[Tensor]:
    """Logits at each place, from the tensors alone: hidden `[rows, width]`, embedded `[places, rows, width]`."""
    recurrent, found = torch.zeros_like(hidden), []
    for each in embedded:
        if "rnn_w.weight" in state:
            recurrent = recurrent @ state["rnn_u.weight"].T + state["rnn_u.bias"] + each @ state["rnn_w.weight"].T
            recurrent = recurrent * torch.sigmoid(recurrent)
        else:
            recurrent = recurrent + each
        x = torch.cat([hidden, recurrent], dim=1)
        if "input_proj.weight" in state:
            x = x @ state["input_proj.weight"].T + state["input_proj.bias"]
        for layer in range(layers):
            x = block(x, state[f"lm_head.{layer}.linear.weight"], state[f"lm_head.{layer}.linear.bias"])
        found.append(x @ state[f"lm_head.{layers}.weight"].T)
    return found


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize(("exit_dim", "layers", "rnn"), [(12, 2, True), (6, 1, True), (6, 2, False), (12, 0, False)])
def test_a_recurrent_head_computes_what_the_format_says(
    tmp_path: Path, exit_dim: int, layers: int, rnn: bool, pickled: bool
) -> None:
    about, state = apple(exit_dim, layers, rnn)
    write(tmp_path, about, state)
    if pickled:
        (tmp_path / "model.safetensors").unlink()
        torch.save(state, tmp_path / "pytorch_model.bin")
    kept = RedrafterHead.load(tmp_path)
    config, record = kept.config, kept.record
    assert (config.state, config.exit_width, config.tied, config.scaled, config.rnn) == (6, exit_dim, False, False, rnn)
    assert (record.target_name, record.fingerprint, record.facts) == ("", None, {})
    assert "Apple" in (record.note or "") and "sizes fit" in (record.note or "")
    made = random(1)
    hidden, embedded = made(3, 6), 5 * made(4, 3, 6)
    assert kept.output is not None
    logits = kept.output(kept.unroll(hidden, embedded))
    for place, expected in enumerate(recurrent_by_hand(state, layers, hidden, embedded)):
        torch.testing.assert_close(logits[place], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("record", "weights", "said"),
    [
        ({}, {"rnn_u.bias": None}, r"lacks rnn_u\.bias, which heads of its sizes have"),
        ({}, {"input_proj.weight": None}, r"lacks input_proj\.weight"),
        ({"rnn": False}, {}, r"holds rnn_u\.bias, rnn_u\.weight, rnn_w\.weight, unknown"),
        ({"num_draft_layers": 2}, {}, r"lacks lm_head\.1\.linear\.bias"),
        ({"vocab_size": 14}, {}, r"lm_head\.1\.weight .* has the shape \[13, 6\].* of its sizes have \[14, 6\]"),
        ({}, {"rnn_u.bias": torch.zeros(APPLE_WIDTH, dtype=torch.float64)}, "numbers of several kinds"),
        ({"exit_dim": None}, {}, "does not name 'exit_dim'"),
        ({"exit_dim": 0}, {}, "makes no head .*exit_width"),
        ({"exit_dim": "6"}, {}, "makes no head"),
        ({"rnn": 1}, {}, "makes no head here .rnn is 1"),
    ],
)
def test_damage_of_a_recurrent_head(
    record: dict[str, Any], weights: dict[str, Tensor | None], said: str, tmp_path: Path
) -> None:
    about, state = apple(APPLE_WIDTH, 1, True)
    kept = {name: each for name, each in (about | record).items() if each is not None}
    write(tmp_path, kept, {name: each for name, each in (state | weights).items() if each is not None})
    refused(RedrafterHead, tmp_path, said)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor pytorch_model\.bin|makes no|does not name"):
        RedrafterHead.load(tmp_path)
