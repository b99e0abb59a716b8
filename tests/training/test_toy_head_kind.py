"""A kind of heads of somebody else takes one file and an entry point, and gets what each of ours has."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.linear_kind import LinearConfig, LinearDrafter, LinearHead
from truedraft import Engine, load_model
from truedraft.drafters.heads.head import HeadRecord
from truedraft.errors import CompositionError, ModelError
from truedraft.kinds.medusa.module import MedusaHeads

TESTS = Path(__file__).parents[1]


def test_other_kinds_and_other_targets_are_told_apart(learned_folder, tmp_path: Path):
    LinearHead(LinearConfig(32, 300)).save(tmp_path, HeadRecord("another", "0" * 32))
    with pytest.raises(ModelError, match="holds a linear head, not Medusa heads; use linear:"):
        MedusaHeads.load(tmp_path)
    with pytest.raises(CompositionError, match=r"these linear heads were trained for another .* and the target is"):
        Engine(load_model(learned_folder), LinearDrafter(LinearHead.load(tmp_path)), controller="fixed")


COMMANDS = """
import sys
from truedraft.cli.main import main
for words in WORDS:
    print("STATUS", main(words), words[0], flush=True)
"""


@pytest.mark.slow
def test_a_package_brings_a_kind_with_all_its_commands(learned_folder, tmp_path: Path):
    """Training, drafting, `auto`, plan, export and the doctor, by an entry point."""
    about = tmp_path / "site" / "linear_kind-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: linear-kind\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[truedraft.kinds]\nlinear = support.linear_kind:KINDS\nbroken = no_such_package:KINDS\n"
    )
    text, out, model = tmp_path / "text.txt", str(tmp_path / "head"), str(learned_folder)
    text.write_text(Path(argparse.__file__).read_text(encoding="utf-8"))
    (tmp_path / "prompts.txt").write_text("".join(f"def add_{n}(left, right):\n" for n in range(14)))
    few = ["--model", model, "--prompts", str(tmp_path / "prompts.txt"), "--limit", "12"]
    words = [
        ["drafters", "linear"],
        ["train", "linear", "--model", model, "--data", str(text), "--out", out, "--tokens", "2000", "--steps", "4",
         "--answer-tokens", "16", "--prompt-tokens", "8"],
        ["generate", "def add(left", "--model", model, "--drafters-dir", out, "--max-tokens", "8"],
        ["generate", "def add(left", "--model", model, "--drafter", f"linear:{out}", "--max-tokens", "8"],
        ["plan", *few, "--max-tokens", "8", "--drafter", f"linear:{out}"],
        ["export", f"linear:{out}", "--for", "vllm", "--out", str(tmp_path / "vllm")],
        ["export", f"linear:{out}", "--for", "sglang", "--out", str(tmp_path / "none")],
        ["doctor", *few, "--tokens", "8", "--drafter", f"linear:{out}"],
    ]  # fmt: skip
    path = os.pathsep.join([str(tmp_path / "site"), str(TESTS), *sys.path])
    code = COMMANDS.replace("WORDS", json.dumps(words), 1)
    environment = os.environ | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    statuses = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("STATUS")]
    assert statuses == ["0", "0", "0", "0", "0", "0", "2", "0"], done.stdout + done.stderr
    assert "one linear layer guesses one token" in done.stdout and "seen: " in done.stdout
    assert "A linear head" in (tmp_path / "head" / "README.md").read_text()
    assert (tmp_path / "vllm" / "model.safetensors").is_file() and "train another" in done.stderr
    assert "the kind of drafters 'broken' of no_such_package:KINDS is left out" in " ".join(done.stderr.split())
