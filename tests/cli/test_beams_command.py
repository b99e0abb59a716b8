"""`truedraft generate --num-beams`: the beams of transformers' own search, on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cli.tiny import Run, prompts_in, save_tiny_llama, tiny_tokenizer
from truedraft.cli.terminal import visible

PROMPT = "def f(x):"
TOKENS = ("--max-tokens", "20", "--dtype", "float32")


@torch.inference_mode()
def by_transformers(folder: str, **options: Any) -> tuple[list[list[int]], list[float]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([tiny_tokenizer().encode(PROMPT)])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0,
        output_scores=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    return found.sequences[:, ids.shape[1] :].tolist(), found.sequences_scores.tolist()


@pytest.mark.parametrize("drafter", ["none", "draft", "itself"])
def test_beams_are_those_of_transformers(run: Run, target: str, draft: str, drafter: str) -> None:
    word = {"none": "none", "draft": f"draft:{draft},num_speculative_tokens=3", "itself": f"draft:{target}"}[drafter]
    words = ("--num-beams", "4", "--num-return-sequences", "3", "--length-penalty", "0.5", "--early-stopping", "never")
    result = run("generate", PROMPT, "--model", target, "--drafter", word, *words, *TOKENS, "--json")
    expected = by_transformers(target, num_beams=4, num_return_sequences=3, length_penalty=0.5, early_stopping="never")
    (prompt,) = result.record["prompts"]
    assert result.status == 0 and len(prompt["beams"]) == 3
    for beam, tokens, score in zip(prompt["beams"], *expected, strict=True):
        assert beam["token_ids"] == tokens[: len(beam["token_ids"])]
        assert beam["score"] == pytest.approx(score, rel=1e-4)
        assert visible(beam["text"]) in result.out and f"(score {beam['score']:.4f})" in result.out
    record = result.record
    assert (record["num_beams"], record["length_penalty"], record["early_stopping"]) == (4, 0.5, "never")
    assert (record["draft"], record["draft_beams"]) == (
        (None, None) if drafter == "none" else (word[6:].split(",")[0], 8)
    )
    assert prompt["target_calls"] <= prompt["steps"] and (prompt["drafted"] > 0) == (drafter != "none")
    assert drafter != "itself" or prompt["target_calls"] < prompt["steps"]


def test_standard_output_holds_nothing_but_the_best(run: Run, target: str) -> None:
    words = ("generate", PROMPT, "--model", target, "--num-beams", "3", *TOKENS)
    result, told = run(*words), run(*words, "--json").record
    assert result.out.removesuffix("\n") == visible(told["prompts"][0]["beams"][0]["text"]).removesuffix("\n")
    assert "3 beams" in result.err and "calls of the target" in result.err and told["draft"] is None


def test_compared_with_plain_search(run: Run, target: str, draft: str) -> None:
    words = ("--num-beams", "3", "--draft-beams", "5", "--drafter", f"draft:{target}", "--compare", "--json")
    result = run("generate", PROMPT, "--model", target, *words, *TOKENS)
    record = result.record
    (prompt,) = record["prompts"]
    assert result.status == 0 and record["identical"] is True and record["speedup"] > 0
    assert prompt["speculative"]["target_calls"] < prompt["plain"]["target_calls"] == prompt["plain"]["steps"]
    assert prompt["plain"]["drafted"] == 0 < prompt["speculative"]["drafted"]
    assert "identical: yes" in result.out and "speed-up: " in result.out
    assert f"draft {target}, 5 beams of it, float32, medians of 3 runs" in result.out


def test_prompts_of_a_file_have_their_own_lengths(run: Run, target: str, tmp_path: Path) -> None:
    lines = {"id": "short", "prompt": PROMPT, "max_tokens": 4}, {"prompt": "x" * 600}, {"prompt": [101, 102]}
    words = ("generate", "--prompts", prompts_in(tmp_path, *lines), "--model", target, "--num-beams", "2", *TOKENS)
    result = run(*words, "--json")
    short, long, ids = result.record["prompts"]
    assert result.status == 1 and "error: prompt 2: the prompt has 600 tokens" in result.err
    assert (len(short["beams"][0]["token_ids"]), len(ids["beams"][0]["token_ids"])) == (4, 20)
    assert "600 tokens" in long["error"] and "short, beam 1 (score" in result.out
    compared = run(*words, "--compare", "--json")
    assert compared.status == 1 and compared.record["identical"] is True and "identical: yes (2 of 2)" in compared.out


def test_auto_takes_the_draft_that_was_trained_for_the_target(run: Run, tmp_path: Path) -> None:
    from truedraft import load_model
    from truedraft.drafters.registry import write_record

    folder = save_tiny_llama(tmp_path / "target", seed=1, layers=2)
    own = Path(save_tiny_llama(tmp_path / "target" / "drafters" / "own", seed=2, layers=1))
    write_record(own, "draft", "it", load_model(folder).fingerprint, {})
    record = run("generate", PROMPT, "--model", folder, "--num-beams", "2", *TOKENS, "--json").record
    assert record["draft"] == str(own) and record["prompts"][0]["drafted"] > 0


def test_the_draft_ends_at_its_own_context(run: Run, target: str, tmp_path: Path) -> None:
    """Behind it nothing is drafted, and the beams are the same."""
    folder = tmp_path / "short"
    save_tiny_llama(folder, seed=1, layers=2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    words = ("generate", PROMPT, "--model", target, "--num-beams", "2", *TOKENS, "--json")
    short, plain = (run(*words, "--drafter", each) for each in (f"draft:{folder}", "none"))
    (short_beam,), (plain_beam,) = (each.record["prompts"][0]["beams"] for each in (short, plain))
    assert short_beam["token_ids"] == plain_beam["token_ids"]
    assert short.record["prompts"][0]["drafted"] > 0
