"""Drafts with another tokenizer on the command line: what reports say of them, and what is refused in one sentence."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cli.tiny import Run, prompts_in, save_tiny_llama

sys.path.append(str(Path(__file__).parents[1] / "text"))
from tiny_tokenizers import WIDE

TOKENS = ("--max-tokens", "24", "--dtype", "float32", "--ignore-eos", "--temperature", "1", "--seed", "3")


def saved(folder: Path, kind: str, seed: int) -> str:
    tokenizer = WIDE[kind]()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, max_position_embeddings=256, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    return saved(folder / "target", "byte-level", 1), saved(folder / "draft", "sentencepiece", 2)


def test_compare_says_what_is_shared_and_what_that_costs(run: Run, pair: tuple[str, str]) -> None:
    target, draft = pair
    words = ("--model", target, "--drafter", f"draft:{draft}", "--controller", "fixed", "--compare", "--json")
    result = run("generate", "the quick fox", *words, *TOKENS)
    (found,) = result.record["vocabularies"]
    assert found["drafter"] == "draft" and found["places"] == 24
    assert 0.0 < found["shared"] < 1.0 and 0.0 < found["unshared_mass"] < 1.0
    assert 0.0 < found["acceptance"] <= 1.0 - found["unshared_mass"]
    said = f"draft can write {found['shared']:.3f} of the target's tokens, for the tokenizers differ"
    assert said in result.out and f"this draft's is {found['acceptance']:.3f}" in result.out


def test_generate_tells_the_drafts_note(run: Run, pair: tuple[str, str]) -> None:
    target, draft = pair
    words = ("--model", target, "--drafter", f"draft:{draft}", "--controller", "fixed")
    result = run("generate", "the quick fox", *words, *TOKENS)
    assert result.status == 0 and "draft: " in result.err and "of the target's tokens can be drafted" in result.err


def test_bench_notes_it(run: Run, pair: tuple[str, str], quick_curves: Path, tmp_path: Path) -> None:
    target, draft = pair
    prompts = prompts_in(tmp_path, "the quick fox", "the lazy end")
    words = ("--model", target, "--drafter", f"draft:{draft}", "--prompts", prompts, "--json")
    result = run("bench", *words, "--max-tokens", "12", "--dtype", "float32", "--temperature", "1")
    (found,) = result.record["vocabularies"]
    assert found["places"] > 12 and "note: draft:draft can write" in result.out


def test_one_tokenizer_has_no_such_line(run: Run, target: str, draft: str) -> None:
    words = ("--model", target, "--drafter", f"draft:{draft}", "--compare", "--json")
    result = run("generate", "abc", *words, "--max-tokens", "8")
    assert result.record["vocabularies"] == [] and "tokenizers differ" not in result.out


@pytest.mark.parametrize("kind", ["draft", "reencoded"])
def test_pairs_that_cannot_be_compared_are_refused(
    run: Run, pair: tuple[str, str], target: str, tmp_path: Path, kind: str
) -> None:
    """A draft without tokenizer files, one that shares next to nothing, one whose tokenizer is broken."""
    bare = tmp_path / "bare"
    shutil.copytree(pair[1], bare)
    for file in bare.glob("*token*"):
        file.unlink()
    broken = tmp_path / "broken"
    shutil.copytree(pair[1], broken)
    (broken / "tokenizer.json").write_text("{")
    for draft, told in (
        (bare, f"'{bare}' comes without a tokenizer"),
        (Path(save_numbers(tmp_path / "numbers")), "too few to draft with"),
        (broken, "the tokenizer of"),
    ):
        result = run("generate", "the", "--model", pair[0], "--drafter", f"{kind}:{draft}", *TOKENS, "--json")
        assert result.status != 0 and result.record["status"] == result.status
        assert told in result.err and result.err.startswith("truedraft: error: ") and result.err.count("\n") == 1


def save_numbers(folder: Path) -> str:
    """A model whose tokenizer knows whole words of its own alone."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save_tiny_llama(folder, seed=4, layers=1)
    backend = Tokenizer(models.WordLevel({f"word{number}": number for number in range(257)}, unk_token="word0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    for file in folder.glob("*token*"):
        file.unlink()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="word0").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("role", ["model", "draft"])
def test_code_of_a_models_own_is_refused(run: Run, pair: tuple[str, str], tmp_path: Path, role: str) -> None:
    folder = tmp_path / "own"
    shutil.copytree(pair[1], folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "my_own", "auto_map": {"AutoConfig": "my.Config", "AutoModelForCausalLM": "my.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "my.py").write_text("raise SystemExit('ran')\n")
    own = ["--model", str(folder)] if role == "model" else ["--model", pair[0], "--drafter", f"draft:{folder}"]
    result = run("generate", "the", *own, *TOKENS, "--json")
    assert result.status == result.record["status"] == 2
    assert f"'{folder}' is made by code that comes with it, and such remote code is not run" in result.err
    assert result.err.startswith("truedraft: error: ") and result.err.count("\n") == 1
