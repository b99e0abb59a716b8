"""Families that cannot run packed: answers as of transformers, one text at a time through their own attention.

Or, of those that keep nothing which could be taken back, by the whole text at every step.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, BertConfig, PreTrainedModel

from models.test_recurrence import stock as carrying
from support.pairwise import by_turns
from support.tiny_models import (
    CONTEXT,
    DRAFTED,
    PROMPTS,
    SMALL,
    VOCAB,
    build,
    drafter_of,
    stock,
    stock_greedy,
    with_noise,
)
from support.verdicts import DRAFTED as DRAFTED_IDS
from support.verdicts import TREE, assert_same_entries, read, verdicts
from truedraft import Engine, SamplingParams, load_model
from truedraft.core.tree import chain_shape
from truedraft.errors import UnsupportedModelError
from truedraft.models import HuggingFaceModel, Segment
from truedraft.models.backends.sequential import SequentialBackend, WholeTextBackend, runs_of
from truedraft.models.loading import fastest_backend, run_alone
from truedraft.models.probe import check_against_stock

COUNT = 24
_IDS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SMALL: dict[str, Any] = SMALL | {"max_position_embeddings": CONTEXT}
_OLD: dict[str, Any] = _IDS | {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
_DECODER: dict[str, Any] = _IDS | {
    "d_model": 48, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64,
    "forced_eos_token_id": None,
    "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "max_position_embeddings": CONTEXT,
}  # fmt: skip
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": ("gptj", _OLD | {"rotary_dim": 8}),
    "codegen": ("codegen", _OLD | {"rotary_dim": 8}),
    "gpt_neo": ("gpt_neo", _IDS | {
        "hidden_size": 48, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
        "window_size": 8, "max_position_embeddings": CONTEXT}),
    "bloom": ("bloom", _IDS | {"hidden_size": 48, "n_layer": 2, "n_head": 4}),
    "mpt": ("mpt", _IDS | {"d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": CONTEXT}),
    "falcon": ("falcon", _SMALL | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon with one key head": ("falcon", _SMALL | {"new_decoder_architecture": False, "multi_query": True}),
    "falcon with alibi": ("falcon", _SMALL | {"new_decoder_architecture": False, "alibi": True, "multi_query": False}),
    "xglm": ("xglm", _IDS | {
        "d_model": 48, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64, "max_position_embeddings": CONTEXT,
        "pad_token_id": 1}),
    "bart": ("bart", _DECODER | {"pad_token_id": 1}),
    "llama4_text with scaled queries": ("llama4_text", _SMALL | {
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "intermediate_size_mlp": 64,
        "num_local_experts": 2, "no_rope_layers": [1, 0], "attn_temperature_tuning": True, "floor_scale": 4,
        "attention_chunk_size": 64}),
}  # fmt: skip
WHOLE = ("llama", "rwkv", "openai-gpt", "recurrent_gemma")
PACKED = {"gptj", "codegen"} if Version(transformers.__version__) >= Version("5.24") else set()
"""Of `ALONE`, whose attention the installed transformers has made one that runs packed."""
WIDE = {"bloom": 0.5, "xglm": 0.5}  # where answers would repeat themselves


def random_model(family: str) -> PreTrainedModel:
    if family in WHOLE and family != "openai-gpt":
        return stock(family) if family == "llama" else carrying(family)
    kind, sizes = ALONE.get(family, (family, _OLD | {"tie_word_embeddings": False}))
    return build(AutoConfig.for_model(kind, **sizes), 0, WIDE.get(family, 0.25))


def run(model: PreTrainedModel, family: str) -> HuggingFaceModel:
    """As `load_model` makes it, checked."""
    kind = WholeTextBackend if family in WHOLE else SequentialBackend
    return run_alone(model, None, family, UnsupportedModelError("asked so"), kind)


@cache
def alone(family: str, noise: float = 0.0) -> HuggingFaceModel:
    return run(with_noise(random_model(family), noise), family)


@cache
def by_transformers(family: str) -> list[list[int]]:
    """Each by a model of its own: Recurrent Gemma reads a prompt of one token behind what it read last."""
    return [stock_greedy(random_model(family), prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize("family", [family for family in ALONE if family not in PACKED])
def test_packed_it_is_refused(family: str) -> None:
    model = random_model(family)
    check = check_against_stock(model, family)
    with pytest.raises(UnsupportedModelError):
        check(HuggingFaceModel(model, None, family, fastest_backend))


@pytest.mark.parametrize(
    ("family", "drafted"),
    [*by_turns(ALONE, ("none", "chain", "tree"), always=["tree"]), *by_turns(WHOLE, DRAFTED, always=["tree"])],
)
def test_greedy_equals_transformers(family: str, drafted: str) -> None:
    expected = by_transformers(family)
    assert max(len(set(answer)) for answer in expected) >= 6
    engine = Engine(alone(family), drafter_of(drafted, alone(family, 0.05)), controller="fixed")
    answers = engine.generate([list(prompt) for prompt in PROMPTS], SamplingParams(max_tokens=COUNT))
    assert [list(answer.token_ids) for answer in answers] == expected
    assert not any(answer.warnings for answer in answers) and engine.check_idle() == []
    if drafted in ("chain", "tree") and family in ALONE:
        accepted = sum(answer.stats.accepted_tokens for answer in answers)
        assert 0 < accepted < sum(answer.stats.draft_tokens for answer in answers)


@pytest.mark.parametrize("family", ALONE)
def test_it_loads_and_says_how_it_runs(family: str, tmp_path: Path) -> None:
    random_model(family).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype="float32")
    assert isinstance(loaded._backend, SequentialBackend) != (family in PACKED)
    if family in PACKED:
        answers = Engine(loaded).generate([list(prompt) for prompt in PROMPTS], SamplingParams(max_tokens=COUNT))
        assert [list(answer.token_ids) for answer in answers] == by_transformers(family)
        return
    assert loaded.note is not None and "one text at a time, since it cannot run packed: " in loaded.note


@pytest.mark.parametrize("family", ["gptj", "bloom", "gpt_neo"])
def test_a_tree_leaves_the_cache_of_its_path(family: str) -> None:
    model = alone(family)
    for after, logits, ids in verdicts(model, PROMPTS[0], TREE):
        fresh, expected = read(model, ids, cuts=[len(PROMPTS[0])])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert_same_entries(after, fresh)
        model.release_cache(fresh)


@pytest.mark.parametrize("family", [*ALONE, *WHOLE])
def test_layers_show_what_transformers_gives(family: str) -> None:
    """The first layer of two, behind a prompt and at all nodes of a tree, by `output_hidden_states` of each path."""
    model, tree, below = alone(family), TREE, list(DRAFTED_IDS)
    prompt = list(PROMPTS[0])
    cache, whole = model.new_cache(), random_model(family)
    segment = Segment(cache, torch.tensor(prompt), chain_shape(len(prompt)), range(len(prompt)))
    behind = model.forward_showing([segment], (0,)).layers[0]
    cache.commit(range(len(prompt)))
    layers = tuple(reversed(range(model.shown_layers)))
    plain = model.forward([Segment(cache, torch.tensor(below), tree, (1, 5, 4))])
    found = model.forward_showing([Segment(cache, torch.tensor(below), tree, (1, 5, 4))], layers)
    torch.testing.assert_close(found.logits, plain.logits)
    for row, node in enumerate((1, 5, 4)):
        text = torch.tensor([[*prompt, *(below[place] for place in tree.path(node))]])
        with torch.no_grad():
            expected = whole(text, output_hidden_states=True).hidden_states[family != "rwkv"][0]  # which tells no input
        torch.testing.assert_close(behind, expected[: len(prompt)], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.layers[-1][row], expected[-1], rtol=1e-4, atol=1e-4)
        assert found.layers[0].shape == found.layers[-1].shape and not torch.equal(found.layers[0], found.layers[-1])
    assert model.forward_showing([Segment(cache, torch.tensor([1]), chain_shape(1), ())], (0,)).layers[0].shape[0] == 0
    model.release_cache(cache)


def test_a_tree_is_read_in_runs() -> None:
    assert runs_of(TREE, 0) == [[0, 1, 4], [2, 3, 5]]
    assert runs_of(TREE, 3) == [[3, 5], [4]]
    assert runs_of(chain_shape(5), 2) == [[2, 3, 4]]


@pytest.mark.parametrize("family", ["recurrent_gemma", "openai-gpt"])
def test_what_keeps_a_state_or_nothing_is_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match="asked so"):
        run_alone(random_model(family), None, "such", UnsupportedModelError("asked so"))


def test_what_cannot_run_so_either_is_read_as_a_whole(tmp_path: Path) -> None:
    random_model("openai-gpt").save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype="float32")
    assert loaded.note is not None and "the whole text again" in loaded.note and "\n" not in loaded.note
    assert Engine(loaded).generate([5, 6, 7], SamplingParams(max_tokens=4)).token_ids


def test_rows_that_see_later_tokens_are_refused() -> None:
    encoder = build(BertConfig(**_SMALL, intermediate_size=64), seed=1, spread=0.4)
    with pytest.raises(UnsupportedModelError, match="asked so") as caught:
        run_alone(encoder, None, "bert", UnsupportedModelError("asked so"), WholeTextBackend)
    assert "later ones" in str(caught.value.__cause__)


def test_long_rotary_positions_stay_where_they_do_not_change(tmp_path: Path) -> None:
    factors = [1.0] * 6
    phi = AutoConfig.for_model(
        "phi3", **_SMALL, num_key_value_heads=2, intermediate_size=64, original_max_position_embeddings=64,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors,
                         "long_factor": [2.0] * 6, "original_max_position_embeddings": 64},
    )  # fmt: skip
    build(phi, 0).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype="float32")
    assert loaded.context_length == 64 and loaded.note is not None and f"64 tokens of its {CONTEXT}" in loaded.note
    prompt = list(PROMPTS[1])
    expected = stock_greedy(build(phi, 0), prompt, 20)
    assert list(Engine(loaded, "prompt-lookup").generate(prompt, SamplingParams(max_tokens=20)).token_ids) == expected
