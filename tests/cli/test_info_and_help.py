"""`truedraft info`, `--help` and `--version`."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file
from transformers import GPTNeoConfig

import truedraft
from cli.tiny import Result, Run
from support.gguf_files import write
from support.tiny_models import build
from truedraft import load_model
from truedraft.cli import info
from truedraft.cli.main import build_app
from truedraft.drafters import registry
from truedraft.drafters.registry import write_record
from truedraft.files import parameters_in
from truedraft.models import embedded
from truedraft.models.backends.native.build import built

HEAVY = ("torch", "transformers", "tokenizers", "numpy", "safetensors")


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["train", "draft", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
from truedraft.cli.main import main
status = main({arguments!r})
heavy = [name for name in {HEAVY!r} if name in sys.modules]
sys.exit(f"loaded {{heavy}}" if heavy else status)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert ("Usage" in result.stdout) is (arguments != ["--version"])


def test_the_bare_command_shows_its_help(run: Run) -> None:
    result = run()
    assert result.status == 0 and "generate" in result.out and result.err == ""


def test_help_of_a_command_is_one_screen_and_help_all_has_the_rest(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 100)
    app = typer.main.get_command(build_app())
    groups = {name: each for name, each in app.commands.items() if hasattr(each, "commands")}  # type: ignore[attr-defined]
    commands = [name for name in app.commands if name not in groups]  # type: ignore[attr-defined]
    commands += [f"{group} {name}" for group, each in groups.items() for name in each.commands]
    for words in map(str.split, commands):
        first, whole = run(*words, "--help"), run(*words, "--help-all")
        assert first.status == 0 and len(first.out.strip().splitlines()) <= 45, words
        if "--help-all" in first.out:
            assert whole.status == 0 and len(whole.out) > len(first.out), words
            assert whole.out.count(" --") > 14, words
            assert run(*words, "--help").out == first.out, "what was shown once stays hidden"
        else:
            assert whole.status == 2
    told = run("generate", "--help").out
    assert all(option in told for option in ("--model", "--drafter", "--max-tokens", "truedraft drafters"))
    assert "--repetition-penalty" not in told and "--repetition-penalty" in run("generate", "--help-all").out


def test_drafters_are_listed_and_told_one_by_one(run: Run) -> None:
    listed = run("drafters", "--json")
    assert listed.status == 0 and "an EAGLE-3 head on vectors of several of the target's layers" in listed.out
    assert {"auto", "none", "eagle[:DIR]", "portfolio(A;B;...)"} <= set(listed.record["drafters"])
    told = run("drafters", "eagle", "--json")
    assert ",num_speculative_tokens=5" in told.out and told.record["drafters"]["typed"] == "eagle[:DIR]"
    wrong = run("drafters", "eagl", "--json")
    assert wrong.status == 2 and "did you mean 'eagle'?" in wrong.record["error"]


def test_version(run: Run) -> None:
    assert run("--version") == Result(0, f"truedraft {truedraft.__version__}\n", "")


def test_info_without_embedded_models(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_PACKAGE", "no_such_package")
    monkeypatch.setattr(registry, "_GROUP", "no packages of drafters")
    result = run("info", "--json")
    record = result.record
    assert result.status == 0
    assert record["torch"] == torch.__version__ and record["threads"] == torch.get_num_threads()
    assert record["dtype_auto"] in ("float32", "bfloat16") and record["fast_paths"] is None
    assert [model["installed"] for model in record["embedded_models"]] == [False] * 4
    assert record["drafters"] == [] and record["model"] is None and "none found" in result.out
    assert "not installed" in result.out and torch.__version__ in result.out
    refused = run("generate", "x", "--model", "embedded:target")
    assert refused.status == 2 and "pip install ./packages/truedraft-embedded" in " ".join(refused.err.split())


def test_parameters_and_card_are_read_from_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    (tmp_path / "README.md").write_text("---\nlicense: x\n---\n\n# A title\n\nWhat it is.\nMore.\n")
    found = info._embedded("it", lambda name: tmp_path)
    assert (found["parameters"], found["card"]) == (17, "What it is.")
    (tmp_path / "README.md").unlink()
    assert info._embedded("it", lambda name: tmp_path)["card"] is None


def test_safetensors_header_is_as_read_here(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}).encode()
    (tmp_path / "y.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    assert parameters_in(tmp_path / "y.safetensors") == 6


def test_info_with_embedded_models(run: Run) -> None:
    record = run("info", "--json").record
    target, draft, *heads = record["embedded_models"]
    assert 15e6 <= target["parameters"] <= 17e6 and 1e6 <= draft["parameters"] <= 2e6
    assert target["bytes"] + draft["bytes"] < 48e6
    assert len(heads) == 2
    assert all(1e6 <= each["parameters"] <= 2e6 and each["bytes"] < 4e6 and each["card"] for each in heads)
    assert target["card"] and draft["card"] and isinstance(record["fast_paths"], list)


def test_info_lists_trained_drafters(run: Run, target: str, tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "another"
    for folder in (mine, other):
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llama"}')
    write_record(other, "draft", "other model", "1" * 16, {"served": []})
    served = [{"temperature": 0.0, "mean_acceptance_length": 2.345}]
    write_record(mine, "draft", "my model", load_model(target, dtype="float32").fingerprint, {"served": served})
    result = run("info", "--model", target, "--drafters-dir", str(tmp_path), "--json")
    record = result.record
    assert result.status == 0
    own, *others = record["drafters"]
    shipped = [each for each in others if each["found"] != "--drafters-dir"]
    assert len(shipped) == len(others) - 1, "those of the model stand first"
    assert (own["folder"], own["kind"], own["found"], own["belongs"]) == (str(mine), "draft", "--drafters-dir", True)
    assert own["target"] == {"name": "my model", "fingerprint": record["fingerprint"]}
    assert own["figures"] == {"served": served}
    assert {each["kind"] for each in shipped} == {"draft", "medusa", "redrafter"}
    assert all(each["belongs"] is False and each["figures"]["served"] for each in shipped)
    assert "belongs to --model" in result.out and "2.35 at temperature 0" in result.out
    seconds = record["runs"]["forward_s"]
    assert f"at most {2.345 * seconds['1'] / seconds['3']:.2f} times plain decoding here" in " ".join(
        result.out.split()
    )
    assert info._most_gain(20.0, {"1": 1.0, "16": 2.0}) is None and info._most_gain(3.0, {"1": 1.0, "4": 2.0}) == 1.5


def test_info_says_how_a_model_runs_and_what_that_costs(run: Run, tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "max_position_embeddings": 64}
    kinds = {"attention_types": [[["global"], 1]], "bos_token_id": None, "eos_token_id": None}
    build(GPTNeoConfig(**sizes, **kinds), seed=0).save_pretrained(tmp_path / "gpt_neo")
    result = run("info", "--model", str(tmp_path / "gpt_neo"), "--json")
    runs = result.record["runs"]
    assert result.status == 0, result.err
    assert "one text at a time, since it cannot run packed" in runs["note"]
    assert runs["context"] == 48 and {"1", "8", "16"} <= set(runs["forward_s"]) and runs["forward_s"]["1"] > 0
    size = {"float32": 4, "bfloat16": 2}[runs["dtype"]]
    assert runs["context_length"] == 64 and runs["cache_bytes"] == 2 * 32 * 64 * size
    assert "a chat of 64 tokens takes 0.0 MB of keys and values" in " ".join(result.out.split())
    assert runs["weight_bytes"] > 0 and (runs["read_bytes_per_s"] or 1.0) > 0.0
    told = " ".join(result.out.split())
    assert "one text at a time, since it cannot run packed" in told and "a forward after 48 tokens: 1 token" in told
    assert run("info", "--json").record["runs"] is None
    assert all(each["belongs"] is None for each in run("info", "--json").record["drafters"])


@pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason)
def test_info_says_what_exact_means_of_quantised_weights(
    run: Run, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truedraft.models.gguf.cache_folder", lambda: tmp_path)
    file = write(tmp_path / "model.gguf", "llama", {"": "Q4_1"})
    result = run("info", "--model", str(file), "--json").ok
    said = result.record["runs"]["quantised"]
    assert "plain decoding of these quantised weights" in said and said in " ".join(result.out.split())
    assert run("info", "--model", target, "--json").record["runs"]["quantised"] is None


def test_divergences_that_info_tells_are_those_that_were_measured() -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results" / "quantised_weights.jsonl"
    found: dict[str, dict[str, str]] = {"SmolLM2 135M": {}, "Gemma 3 270M": {}}
    for record in map(json.loads, results.read_text().splitlines()):
        kind = record["file"].split(".")[-2].split("-")[-1]
        if kind not in ("F16", "BF16"):  # which have no codes
            model = "Gemma 3 270M" if record["file"].startswith("gemma") else "SmolLM2 135M"
            found[model][kind] = f"{record['ways']['codes, bfloat16']['mean_kl']:.4f}"
    told = re.findall(r"([A-Z]\w+ [\w ]+): ((?:\w+ 0\.\d{4}(?:, )?)+)", info._OF_CODES)
    assert {model: dict(each.split() for each in kinds.split(", ")) for model, kinds in told} == found


def test_the_main_job(run: Run) -> None:
    words = ("--model", "embedded:target", "--compare", "--json", "--max-tokens", "48")
    result = run("generate", "def quicksort(items):", *words).ok
    assert result.record["identical"] is True and result.record["drafters"][0] == "draft"
