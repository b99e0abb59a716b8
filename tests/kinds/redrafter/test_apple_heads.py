"""Checkpoints of Apple's `Drafter` format: they compute what an independent reading of the format computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from truedraft.errors import ModelError, ModelNotFoundError
from truedraft.kinds.redrafter.module import RedrafterHead

HIDDEN, VOCAB = 6, 13


def config_of(exit_dim: int, layers: int, rnn: bool) -> dict[str, object]:
    return {
        "model_type": "recurrent_drafting_drafter",
        "architectures": ["Drafter"],
        "hidden_size": HIDDEN,
        "exit_dim": exit_dim,
        "num_draft_layers": layers,
        "rnn": rnn,
        "vocab_size": VOCAB,
    }


def state_of(exit_dim: int, layers: int, rnn: bool) -> dict[str, Tensor]:
    """The tensors of a `Drafter`, by the names that its module tree gives them."""
    noise = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise)

    state = {}
    if exit_dim != 2 * HIDDEN:
        state |= {"input_proj.weight": random(exit_dim, 2 * HIDDEN), "input_proj.bias": random(exit_dim)}
    for layer in range(layers):
        state[f"lm_head.{layer}.linear.weight"] = random(exit_dim, exit_dim)
        state[f"lm_head.{layer}.linear.bias"] = random(exit_dim)
    state[f"lm_head.{layers}.weight"] = random(VOCAB, exit_dim)
    if rnn:
        state |= {"rnn_u.weight": random(HIDDEN, HIDDEN), "rnn_u.bias": random(HIDDEN)}
        state["rnn_w.weight"] = random(HIDDEN, HIDDEN)
    return state


def by_hand(state: dict[str, Tensor], layers: int, hidden: Tensor, embedded: Tensor) -> list[Tensor]:
    """Logits at each place, from the tensors alone: hidden `[rows, HIDDEN]`, embedded `[places, rows, HIDDEN]`."""
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
            inner = x @ state[f"lm_head.{layer}.linear.weight"].T + state[f"lm_head.{layer}.linear.bias"]
            x = x + inner * torch.sigmoid(inner)
        found.append(x @ state[f"lm_head.{layers}.weight"].T)
    return found


def write(folder: Path, config: dict[str, object], state: dict[str, Tensor], *, pickled: bool = False) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file(state, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize(
    ("exit_dim", "layers", "rnn"),
    [(2 * HIDDEN, 2, True), (HIDDEN, 1, True), (HIDDEN, 2, False), (2 * HIDDEN, 0, False), (3 * HIDDEN, 2, True)],
)
def test_it_computes_what_the_format_says(tmp_path: Path, exit_dim: int, layers: int, rnn: bool, pickled: bool) -> None:
    state = state_of(exit_dim, layers, rnn)
    kept = RedrafterHead.load(write(tmp_path, config_of(exit_dim, layers, rnn), state, pickled=pickled))
    config = kept.config
    assert (config.state, config.exit_width, config.tied, config.scaled, config.rnn) == (
        HIDDEN, exit_dim, False, False, rnn,
    )  # fmt: skip
    assert (kept.record.target_name, kept.record.fingerprint, kept.record.facts) == ("", None, {})
    assert "Apple" in (kept.record.note or "") and "sizes fit" in (kept.record.note or "")
    noise = torch.Generator().manual_seed(1)
    hidden, embedded = torch.randn(3, HIDDEN, generator=noise), 5 * torch.randn(4, 3, HIDDEN, generator=noise)
    assert kept.output is not None
    logits = kept.output(kept.unroll(hidden, embedded))
    for place, expected in enumerate(by_hand(state, layers, hidden, embedded)):
        torch.testing.assert_close(logits[place], expected, rtol=1e-4, atol=1e-4)


class Payload:
    """Unpickling it would run code."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, ("/nonexistent/should-not-run",))


CONFIG, STATE = config_of(HIDDEN, 1, True), state_of(HIDDEN, 1, True)


def without(name: str) -> dict[str, Tensor]:
    return {other: weight for other, weight in STATE.items() if other != name}


@pytest.mark.parametrize(
    ("config", "state", "words"),
    [
        (CONFIG, without("rnn_u.bias"), r"lacks rnn_u\.bias, which heads of its sizes have"),
        (CONFIG, without("input_proj.weight"), r"lacks input_proj\.weight"),
        (CONFIG, STATE | {"rnn_w.bias": torch.zeros(HIDDEN)}, r"holds rnn_w\.bias, unknown to heads of its sizes"),
        (CONFIG | {"rnn": False}, STATE, r"holds rnn_u\.bias, rnn_u\.weight, rnn_w\.weight, unknown"),
        (CONFIG | {"num_draft_layers": 2}, STATE, r"lacks lm_head\.1\.linear\.bias"),
        (
            CONFIG | {"vocab_size": 14},
            STATE,
            r"lm_head\.1\.weight .* has the shape \[13, 6\].* of its sizes have \[14, 6\]",
        ),
        (CONFIG, STATE | {"rnn_u.bias": torch.zeros(HIDDEN, dtype=torch.float64)}, "numbers of several kinds"),
        ({k: v for k, v in CONFIG.items() if k != "exit_dim"}, STATE, "does not name 'exit_dim'"),
        (CONFIG | {"exit_dim": 0}, STATE, "make no head .*exit_width"),
        (CONFIG | {"exit_dim": "6"}, STATE, "make no head"),
        (CONFIG | {"rnn": None}, STATE, "make no head .rnn is None"),
    ],
)
def test_other_files_are_refused_in_one_sentence(
    tmp_path: Path, config: dict[str, object], state: dict[str, Tensor], words: str
) -> None:
    write(tmp_path, config, state)
    with pytest.raises(ModelError, match=words) as caught:
        RedrafterHead.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"no file of torch", "cannot read"), (Payload(), "cannot read"), ([torch.zeros(2)], "no dictionary of tensors")],
)
def test_only_tensors_are_read(tmp_path: Path, content: object, words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelNotFoundError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        RedrafterHead.load(tmp_path)
    if isinstance(content, bytes):
        (tmp_path / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=words) as caught:
        RedrafterHead.load(tmp_path)
    assert "\n" not in str(caught.value)
