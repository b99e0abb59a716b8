"""`truedraft export`, and `--pad-to` where answers are given."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.tiny import Result, Run
from support.eagle_reference import random_eagle
from support.layer_heads import random_head
from truedraft import load_model
from truedraft.heads import BlockConfig, DFlashHead, DSparkHead, Eagle3Config, HeadRecord, MedusaConfig, MedusaHeads
from truedraft.models.padding import PADDED_SIZES, PaddedSize

TOKENS = ("--max-tokens", "8", "--dtype", "float32", "--ignore-eos")


def text_of(result: Result) -> str:
    assert result.status == 0, result.err
    (answer,) = result.record["prompts"]
    return answer["text"]


def test_an_exported_folder_answers_like_the_model(
    run: Run, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a size of a hundredth: what 110 M parameters are is held by tests/models/test_padding.py."""
    monkeypatch.setitem(PADDED_SIZES, "110M", PaddedSize("110M", layers=3, width=256, inner=384))
    out = tmp_path / "new" / "padded"
    result = run("export", "--model", target, "--pad-to", "110M", "--out", str(out), "--dtype", "float32", "--json")
    assert result.status == 0, result.err
    record = result.record
    assert (record["command"], record["model"], record["pad_to"]) == ("export", target, "110M")
    assert (record["dtype"], record["out"]) == ("float32", str(out)) and record["elapsed_s"] > 0
    assert 4 * record["parameters"] < record["bytes"] < 4.1 * record["parameters"]
    assert re.match(r"cost of a [\d.]+ M model, text of a 0\.", record["note"]) and record["note"] in result.out
    assert json.loads((out / "config.json").read_text())["hidden_size"] == 256
    assert (out / "tokenizer.json").is_file() and record["note"] in (out / "README.md").read_text()
    own = run("generate", "hello", "--model", target, "--drafter", "none", "--json", *TOKENS)
    exported = run("generate", "hello", "--model", str(out), "--drafter", f"draft:{target}", "--json", *TOKENS)
    assert text_of(exported) == text_of(own)
    assert exported.record["note"] == record["note"] and record["note"] in exported.err
    assert own.record["note"] is None and own.record["pad_to"] is None


def test_a_model_is_exported_as_it_is_without_a_size(run: Run, target: str, tmp_path: Path) -> None:
    out = tmp_path / "copy"
    out.mkdir()  # an empty folder may exist
    result = run("export", "--model", target, "--out", str(out), "--dtype", "float32", "--json")
    assert result.status == 0 and result.record["note"] is None and not (out / "README.md").exists()
    words = ("--drafter", "none", "--json", *TOKENS)
    own, exported = (run("generate", "hello", "--model", model, *words) for model in (target, str(out)))
    assert text_of(exported) == text_of(own)


def test_comparing_on_a_padded_target_says_what_the_figures_mean(run: Run, target: str) -> None:
    words = ("--model", target, "--pad-to", "110M", "--drafter", f"draft:{target}", "--controller", "fixed")
    result = run(
        "generate", "hello", *words, "--compare", "--json", "--max-tokens", "3", "--dtype", "bfloat16", "--ignore-eos"
    )
    assert result.status == 0, result.err
    record = result.record
    assert record["pad_to"] == "110M" and record["model"] == f"{target} padded to 110M"
    assert record["identical"] is True and record["speculative"]["accepted_tokens"] > 0
    assert f"{record['model']} ({record['note']})" in result.out
    assert "cost of a 110 M model" in record["note"]


def test_a_size_below_the_model_names_both(run: Run, tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "large"
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=13,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    result = run("generate", "[1]", "--model", str(folder), "--pad-to", "110M")
    assert result.status == 2
    assert "cannot pad to the smaller size 110M: the model has" in result.err
    assert "(13 layers, width 64" in result.err and "110M has" in result.err and "(12 layers" in result.err


def test_heads_are_written_for_other_projects(run: Run, target: str, tmp_path: Path) -> None:
    model = load_model(target, dtype="float32")
    sizes = Eagle3Config(model.head_width, model.vocab_size, (0, 1), 2, 1, 16, 32, draft_vocab=40, most_positions=256)
    eagle, heads = random_eagle(sizes), MedusaHeads(MedusaConfig(model.head_width, model.vocab_size, heads=2))
    block: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head": 16, "inner": 32, "block": 3, "mask_id": 9, "depth": 1}
    whole = BlockConfig(model.head_width, model.vocab_size, (0,), **block)
    copies = replace(whole, own_output=True, own_embedding=True, from_anchor=True)
    every = (eagle, heads, random_head(DFlashHead, whole), random_head(DSparkHead, copies))
    made = {each.kind: each for each in every}
    for kind, each in made.items():
        each.save(tmp_path / kind, HeadRecord(target, model.fingerprint), dtype=torch.float32)
    for kind, form, source in (
        ("eagle", "eagle", "eagle"), ("eagle", "speculators", "eagle"), ("medusa", "vllm-medusa", "medusa"),
        ("dflash", "dflash", "dflash"), ("dspark", "dspark", "dspark"), ("dflash", "speculators", "dflash for dflash"),
    ):  # fmt: skip
        out = tmp_path / f"{kind} for {form}"
        words = ("--head", str(tmp_path / source), "--format", form, "--out", str(out), "--model", target)
        result = run("export", *words, "--json")
        assert result.status == 0, result.err
        assert (result.record["kind"], result.record["target"]) == (kind, target)
        kept = type(made[kind]).load(out).state_dict()
        assert all(weight.equal(kept[name]) for name, weight in made[kind].state_dict().items())
    again = run("export", "--head", str(tmp_path / "eagle"), "--format", "eagle", "--out", str(tmp_path / "eagle"))
    assert again.status != 0 and "is not empty; name a new one" in again.err
