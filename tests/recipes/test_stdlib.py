"""The recipe of the embedded pair: its corpus, all stages with tiny models on a planted one, and what is committed."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from recipes.common import train_tokenizer
from recipes.stdlib import build, publish, settings, sources
from recipes.stdlib.settings import DRAFT_SHAPE, TARGET_SHAPE
from recipes.stdlib.sources import COUNT, TOKENS, Source

from truedraft import load_model
from truedraft.errors import DataError
from truedraft.machine import describe_machine
from truedraft.models.architecture import LlamaShape, load_causal_lm
from truedraft.training.texts.data import Curriculum, load_tokenizer

EMBEDDED = Path(__file__).parents[2] / "packages" / "truedraft-embedded" / "src" / "truedraft_embedded"
MIB = 2**20
TINY = LlamaShape(vocab_size=400, width=32, layers=1, heads=2, kv_heads=1, intermediate=32, context=128, head_size=16)


def planted(count: int) -> list[Source]:
    texts = [
        "".join(f"def call_{n}_{i}(value):\n    return value * {i} + {n}\n\n\n" for i in range(50))
        for n in range(count)
    ]
    return [Source(f"file_{n}.py", text, f"{n:064x}", held_out=n % 2 == 0) for n, text in enumerate(texts)]


def test_an_unchanged_library_is_taken_and_every_difference_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, manifest = tmp_path / "lib", tmp_path / "manifest.json"
    for name in ("os.py", "test/copy.py", "another.py"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text("x = 1\n")
    hashes = dict.fromkeys(("os.py", "test/copy.py"), hashlib.sha256(b"x = 1\n").hexdigest())
    manifest.write_text(json.dumps({"python": sources.PYTHON_VERSION, "held_out": ["os.py"], "sha256": hashes}))
    found = sources.load_sources(manifest, library)
    assert [(each.path, each.held_out) for each in found] == [("os.py", True), ("test/copy.py", False)]
    (library / "os.py").write_text("import os\n")
    with pytest.raises(DataError, match=r"1 files .* differ from the manifest \(first: os.py\)"):
        sources.load_sources(manifest, library)
    (library / "os.py").unlink()
    (library / "test/copy.py").unlink()
    with pytest.raises(DataError, match=r"2 files .* \(first: os.py\)"):
        sources.load_sources(manifest, library)
    monkeypatch.setattr(platform, "python_version", lambda: "3.12.0")
    with pytest.raises(DataError, match=r"pinned to .* Python 3.11.7, but this is Python 3.12.0"):
        sources.load_sources(manifest)


def test_the_committed_manifest() -> None:
    pinned = json.loads(sources.MANIFEST.read_text())
    held_out, hashes = set(pinned["held_out"]), pinned["sha256"]
    assert pinned["python"] == sources.PYTHON_VERSION and held_out < set(hashes) and len(held_out) >= 32
    for cluster in pinned["near_duplicate_clusters"]:
        assert len(set(cluster) & held_out) in (0, len(cluster))
    assert not [name for name in hashes if name.startswith(("encodings/cp", "pydoc_data/topics", "site-packages"))]
    try:
        found = sources.load_sources()
    except DataError as error:
        pytest.skip(f"another Python than the recipe's, or changed by its distributor: {error}")
    assert 0 < sum(each.held_out for each in found) / len(found) < 0.06


def test_every_prompt_has_its_tokens_and_its_own_file(tmp_path: Path) -> None:
    path, corpus = tmp_path / "prompts.jsonl", planted(COUNT + 5)
    tokenizer = train_tokenizer([source.text for source in corpus[:5]], vocab_size=400, context=128)
    assert sources.write_prompts(corpus, tokenizer, path) == COUNT
    prompts = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({prompt["file"] for prompt in prompts}) == COUNT
    for prompt in prompts:
        assert len(tokenizer.encode(prompt["text"])) == prompt["n_tokens"] == TOKENS
        assert prompt["text"].startswith("def ")
    short = [Source(f"s{n}.py", "x = 1\n", f"{n:064x}", held_out=True) for n in range(40)]
    with pytest.raises(DataError, match="only 3 held-out files are long enough"):
        sources.write_prompts([*short, *corpus[:3]], tokenizer, path)


@pytest.fixture
def tiny_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[build.Recipe]:
    """The real stages; only the corpus, the shapes and the lengths are small."""
    corpus = planted(20)
    monkeypatch.setattr(sources, "COUNT", 8)
    monkeypatch.setattr(build, "VOCAB_SIZE", 400)
    monkeypatch.setattr(build, "load_sources", lambda: corpus)
    monkeypatch.setattr(publish, "LOGS", tmp_path / "logs")
    small = Curriculum(stable_length=32, decay_length=64, tokens_per_step=256, tokens_per_pass=256)
    monkeypatch.setattr(settings, "CURRICULUM", small)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    steps = {"target": (6, 2), "first_target": (3, 2), "draft_start": (3, 0), "first_draft": (2, 2), "draft": (2, 2)}
    small_stages = {name: settings.Stage(TINY, *steps[name], *own[-2:]) for name, own in settings.STAGES.items()}
    yield build.Recipe(tmp_path / "run", small_stages, every=1)
    torch.set_num_threads(before)


@pytest.mark.slow
def test_all_stages_then_nothing_left_to_do(
    tiny_recipe: build.Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tiny_recipe.all(tmp_path / "out")
    assert 0 < result["alpha"] <= 1 and 0 <= result["greedy_agreement"] <= 1
    for name in ("target", "draft"):
        folder = tmp_path / "out" / name
        names = {path.name for path in folder.iterdir()}
        assert {"config.json", "tokenizer.json", "tokenizer_config.json", "README.md"} <= names
        assert not names & {"checkpoint.pt", "log.jsonl", "run.json", "work", "progress.json"}
        card = (folder / "README.md").read_text()
        assert "bits per byte" in card and f"| machine | {describe_machine()} |" in card
    record = json.loads((tmp_path / "out" / "draft" / "drafter.json").read_text())
    assert record["target"]["fingerprint"] == load_model(tmp_path / "out" / "target", dtype="float32").fingerprint
    assert record["figures"]["alpha"] == result["alpha"] and len(record["figures"]["served"]) == 2
    assert len((tmp_path / "out" / "heldout_prompts.jsonl").read_text().splitlines()) == 8
    lines = [json.loads(line) for line in (tmp_path / "logs" / "target.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(8))
    branch = json.loads((tiny_recipe.run / "first-target" / "progress.json").read_text())
    assert branch["step"] == 5, "the early target is a branch of the final one"

    capsys.readouterr()
    assert tiny_recipe.all(tmp_path / "again") == result
    assert "step" not in capsys.readouterr().out
    others = [replace(source, held_out=not source.held_out) for source in build.load_sources()]
    monkeypatch.setattr(build, "load_sources", lambda: others)
    with pytest.raises(DataError, match="made from another manifest: name a new --run folder"):
        tiny_recipe.data()


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (DataError("1 files differ"), 1, "error: 1 files differ\n"),
        (KeyboardInterrupt(), 130, "interrupted; the same command goes on from the last checkpoint\n"),
    ],
)
def test_what_breaks_off_is_told_in_one_line(
    error: BaseException, status: int, told: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    def refuse(_: object) -> None:
        raise error

    monkeypatch.setattr(build.Recipe, "data", refuse)
    assert build.main(["--run", str(tmp_path), "--threads", "1"]) == status
    assert capsys.readouterr().err == told


# ---------------------------------------------------------------------------------------------------- what is committed


def test_file_sizes() -> None:
    shards = [shard.stat().st_size for shard in EMBEDDED.rglob("*.safetensors")]
    assert max(shards) < 16 * MIB and sum(shards) < 48e6


@pytest.mark.parametrize(
    ("name", "shape", "low", "high"), [("target", TARGET_SHAPE, 15e6, 17e6), ("draft", DRAFT_SHAPE, 1e6, 2e6)]
)
def test_both_load_as_ordinary_models_and_have_their_cards(
    name: str, shape: LlamaShape, low: float, high: float
) -> None:
    model, tokenizer = load_causal_lm(EMBEDDED / name, dtype=torch.bfloat16), load_tokenizer(EMBEDDED / name)
    config = model.config
    assert low <= model.num_parameters() <= high and config.model_type == "llama"
    assert config.vocab_size == shape.vocab_size == len(tokenizer) == 8192
    assert config.max_position_embeddings == shape.context == 2048 and shape.head_size == 64
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tokenizer.eos_token_id == config.eos_token_id == 0
    tokenizers = [(EMBEDDED / each / "tokenizer.json").read_bytes() for each in ("target", "draft")]
    assert tokenizers[0] == tokenizers[1]
    card = (EMBEDDED / name / "README.md").read_text()
    for row in ("parameters", "data", "steps", "training time", "machine", "validation loss", "bits per byte"):
        assert re.search(rf"^\| {row}", card, re.MULTILINE), row
    assert "license: apache-2.0" in card and "PSF License" in card
    assert name == "target" or ("alpha" in card and "greedy agreement" in card)


def test_prompts_come_from_held_out_files_and_have_96_tokens() -> None:
    prompts = [json.loads(line) for line in (EMBEDDED / "heldout_prompts.jsonl").read_text().splitlines()]
    held_out = set(json.loads(sources.MANIFEST.read_text())["held_out"])
    tokenizer = load_tokenizer(EMBEDDED / "target")
    assert len(prompts) == len({prompt["file"] for prompt in prompts}) == COUNT
    assert [prompt["id"] for prompt in prompts] == list(range(COUNT))
    for prompt in prompts:
        assert prompt["file"] in held_out
        ids = tokenizer.encode(prompt["text"], add_special_tokens=False)
        assert len(ids) == prompt["n_tokens"] == TOKENS
        assert tokenizer.decode(ids) == prompt["text"]
