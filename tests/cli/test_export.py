"""`truedraft export`, and `--pad-to` where answers are given."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cli.tiny import Result, Run, save_tiny_llama
from support import gguf_files
from support.eagle_reference import random_eagle
from support.layer_heads import random_head
from support.mtp_checkpoints import SHAPES, MtpReference
from truedraft import load_model
from truedraft.drafters.heads.head import Head, HeadRecord
from truedraft.kinds.block.module import BlockConfig, DFlashHead, DSparkHead
from truedraft.kinds.dflash2.module import DFlash2Config, DFlash2Head
from truedraft.kinds.eagle.module import Eagle3Config, Eagle3Head, PEagleConfig, PEagleHead
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.kinds.redrafter.module import RedrafterConfig, RedrafterHead
from truedraft.models.loading import read_model
from truedraft.models.padding import PADDED_SIZES, PaddedSize

KINDS: dict[str, type[Head]] = {
    each.kind: each for each in (Eagle3Head, PEagleHead, MedusaHeads, DFlashHead, DFlash2Head, DSparkHead)
}
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
    result = run("export", "--model", target, "--pad-to", "110M", "--out", str(out), "--dtype", "float32", "--json").ok
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
    ).ok
    record = result.record
    assert record["pad_to"] == "110M" and record["model"] == f"{target} padded to 110M"
    assert record["identical"] is True and record["speculative"]["accepted_tokens"] > 0
    assert f"{record['model']} ({record['note']})" in result.out
    assert "cost of a 110 M model" in record["note"]


def test_a_size_below_the_model_names_both(run: Run, tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "large", seed=1, layers=13)
    result = run("generate", "[1]", "--model", folder, "--pad-to", "110M")
    assert result.status == 2
    assert "cannot pad to the smaller size 110M: the model has" in result.err
    assert "(13 layers, width 64" in result.err and "110M has" in result.err and "(12 layers" in result.err


@pytest.fixture(scope="module")
def drafters(target: str, draft: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder of each kind that travels, and of heads that end in the target's LM head."""
    model, place = load_model(target, dtype="float32"), tmp_path_factory.mktemp("drafters")
    width, ids = model.head_width, model.vocab_size
    sizes: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head": 16, "inner": 32, "most_positions": 256}
    block: dict[str, Any] = sizes | {"block": 3, "mask_id": 9, "depth": 1}
    eagle = Eagle3Config(width, ids, (0, 1), **sizes, draft_vocab=40, reach=3)
    peagle = PEagleConfig(width, ids, (0, 1), **sizes, own_embedding=True, mask_token=9, reach=3)
    whole = BlockConfig(width, ids, (0,), **block)
    markov = replace(whole, from_anchor=True, markov=4)
    made: dict[str, Head] = {
        "eagle": random_eagle(eagle),
        "eagle-all": random_eagle(replace(eagle, draft_vocab=0, own_output=False)),
        "eagle-norms": random_eagle(replace(eagle, fc_norm=True, norm_output=True)),
        "eagle-queries": random_eagle(replace(eagle, query_norms=True)),
        "p-eagle": random_head(PEagleHead, peagle),
        "p-eagle-norms": random_head(PEagleHead, replace(peagle, norm_output=True)),
        "medusa": MedusaHeads(MedusaConfig(width, ids, heads=3)),
        "dflash": random_head(DFlashHead, whole),
        "dflash2": random_head(DFlash2Head, DFlash2Config(width, ids, (0,), **block, group=8, rank=4)),
        "dspark": random_head(DSparkHead, replace(markov, draft_vocab=40, own_output=True)),
        "dspark-copies": random_head(DSparkHead, replace(markov, own_output=True, own_embedding=True)),
        "dspark-gated": random_head(DSparkHead, replace(markov, markov_kind="gated", draft_vocab=40, own_output=True)),
        "redrafter": RedrafterHead(RedrafterConfig(width, ids, state=8, exit_width=width)),
    }
    for name, each in made.items():
        each.save(place / name, HeadRecord(target, model.fingerprint), dtype=torch.float32)
    return {name: str(place / name) for name in made} | {"draft": draft}


RAN = [
    ("vllm", "eagle", "eagle3", 3), ("vllm", "eagle-all", "eagle3", 3), ("vllm", "eagle-norms", "eagle3", 3),
    ("vllm", "p-eagle", "eagle3", 3), ("vllm", "medusa", "medusa", 3), ("vllm", "dflash", "dflash", 2),
    ("vllm", "dspark", "dspark", 3), ("vllm", "dspark-copies", "dspark", 3), ("vllm", "dflash2", "dflash", 2),
    ("sglang", "dflash2", "DFLASH", 2), ("llamacpp", "dflash2", "draft-dflash", 2), ("speculators", "dflash2", "", 2),
    ("vllm", "draft", "draft_model", 4),
    ("sglang", "eagle", "EAGLE3", 3), ("sglang", "eagle-all", "EAGLE3", 3), ("sglang", "eagle-norms", "EAGLE3", 3),
    ("sglang", "dflash", "DFLASH", 2), ("sglang", "dspark-copies", "DSPARK", 3), ("sglang", "draft", "STANDALONE", 4),
    ("llamacpp", "eagle", "draft-eagle3", 3), ("llamacpp", "eagle-all", "draft-eagle3", 3),
    ("llamacpp", "dflash", "draft-dflash", 2), ("llamacpp", "dspark", "draft-dspark", 3),
    ("llamacpp", "dspark-copies", "draft-dspark", 3), ("llamacpp", "draft", "draft-simple", 4),
    ("speculators", "eagle-norms", "", 3), ("speculators", "p-eagle-norms", "", 3), ("speculators", "dspark", "", 3),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "name", "method", "tokens"), RAN)
def test_drafters_travel_with_the_command_that_serves_them(
    engine: str, name: str, method: str, tokens: int, run: Run, drafters: dict[str, str], target: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = run("export", drafters[name], "--for", engine, "--out", str(out), "--model", target, "--json").ok
    record, kind = result.record, "p-eagle" if name.startswith("p-") else name.partition("-")[0]
    assert (record["kind"], record["engine"], record["target"]) == (kind, engine, target)
    assert record["tokens"] == tokens and all(line in result.out.splitlines() for line in record["commands"])
    words = shlex.split(record["commands"][-1]) if engine != "speculators" else []
    if not words:
        assert record["commands"] == [] and "to serve it" not in result.out
    elif engine == "vllm":
        about = json.loads(words[-1])
        assert words[:4] == ["vllm", "serve", target, "--speculative-config"]
        assert about.pop("parallel_drafting", False) is (name == "p-eagle")
        assert about == {"method": method, "model": str(out), "num_speculative_tokens": tokens}
    elif engine == "sglang":
        said = dict(itertools.pairwise(words))
        assert words[:5] == ["python", "-m", "sglang.launch_server", "--model-path", target]
        assert (said["--speculative-algorithm"], said["--speculative-draft-model-path"]) == (method, str(out))
        drafted = said.get("--speculative-num-draft-tokens", str(tokens + 1))
        assert drafted == str(tokens + 1) and ("--speculative-eagle-topk" in said) == (kind in ("eagle", "draft"))
        assert (said.get("--speculative-dspark-block-size") == str(tokens)) is (kind == "dspark")
    else:
        served = ["llama-server", "-m", f"{out}-target.gguf", "-md", str(out / "draft.gguf")]
        assert words == [*served, "--spec-type", method, "--spec-draft-n-max", str(tokens)]
        whole, made = (shlex.split(line) for line in record["commands"][:-1])
        assert whole == ["python", "convert_hf_to_gguf.py", target, "--outfile", f"{out}-target.gguf"]
        assert (made[2], made[-1]) == (str(out), str(out / "draft.gguf"))
        assert ("--target-model-dir" in made) is (kind != "draft")
    if name == "draft":
        assert load_model(str(out), dtype="float32").vocab_size == load_model(target, dtype="float32").vocab_size
        return
    kept, own = (KINDS[kind].load(folder).state_dict() for folder in (out, drafters[name]))
    assert all(weight.equal(kept[part]) for part, weight in own.items())
    if name == "eagle-all":  # it ends in the target's, of which a copy lies beside it now
        assert kept["lm_head.weight"].equal(read_model(target, target, torch.float32).get_output_embeddings().weight)


REFUSED = [
    ("vllm", "redrafter", "vllm runs no redrafter drafters; train an EAGLE-3 head in its place: truedraft train eagle"),
    ("vllm", "prompt-lookup", """--speculative-config '{"method": "ngram", "num_speculative_tokens": 4"""),
    ("sglang", "suffix", "it looks n-grams up by itself: --speculative-algorithm NGRAM"),
    ("llamacpp", "lookahead", "it looks n-grams up by itself: --spec-type ngram-simple"),
    ("sglang", "medusa", "sglang runs no medusa drafters; train an EAGLE-3 head"),
    ("llamacpp", "p-eagle", "llamacpp runs no p-eagle drafters; train an EAGLE-3 head"),
    ("vllm", "self:int4", "vllm runs no self drafters; train a draft model"),
    ("vllm", "portfolio(draft;prompt-lookup)", "vllm runs no portfolio drafters; it runs one drafter; export one"),
    ("vllm", "auto", "vllm runs no auto drafters; it runs one drafter"),
    ("vllm", "eagle:{eagle},nodes=8", "nodes is of trees and rules that vllm does not have; leave it out"),
    ("sglang", "draft:{draft},branching=2-2", "branching is of trees and rules that sglang does not have"),
    ("vllm", "eagle:{eagle},num_speculative_tokens=4", "num_speculative_tokens must be 1 to 3, got 4"),
    ("vllm", "draft:{draft},num_speculative_tokens=0", "num_speculative_tokens must be 1 to as many as pay, got 0"),
    ("vllm", "eagle", "'eagle' does not say which one; give its folder: eagle:DIR"),
    ("vllm", "eagle:{dflash}", "holds a DFlash head, not an EAGLE-3 head"),
    ("vllm", "nowhere", "there is no folder 'nowhere', and no drafter of that name"),
    ("sglang", "{dspark}", "this format is of heads with copies of the target's embedding and LM head"),
    (
        "llamacpp",
        "{eagle-norms}",
        "llamacpp reads eagle heads with fc_norm False, not True, norm_output False, not True; vLLM reads it: "
        "--for vllm; llamacpp would read one made by truedraft train eagle --no-fc-norm --no-norm-output",
    ),
    ("llamacpp", "{dspark-gated}", "llamacpp reads dspark heads with markov_kind vanilla, not gated; SGLang reads"),
    ("vllm", "{dspark-gated}", "vllm reads dspark heads with markov_kind vanilla, not gated; SGLang reads one"),
    ("vllm", "{p-eagle-norms}", "vllm reads p-eagle heads with norm_output False, not True; train an EAGLE-3 head"),
    ("sglang", "{eagle-queries}", "sglang reads eagle heads with query_norms False, not True; vLLM reads it"),
    (
        "vllm",
        "mtp",
        "vllm runs no mtp drafters from folders, but the layer in the model's own files: --speculative-config",
    ),
    ("llamacpp", "mtp:DIR", "own files: --spec-type draft-mtp; --for speculators writes one"),
    ("speculators", "mtp", "hold no MTP layer"),
    ("speculators", "mtp,num_speculative_tokens=0", "num_speculative_tokens must be 1 to as many as pay, got 0"),
    ("speculators", "medusa", "speculators runs no medusa drafters; train an EAGLE-3 head"),
    ("speculators", "prompt-lookup", "; it trains heads on the target's vectors, which `truedraft train --help` lists"),
    ("tgi", "{eagle}", "unknown engine 'tgi'; valid: llamacpp, sglang, speculators, vllm"),
]


@pytest.mark.parametrize(("engine", "drafter", "said"), REFUSED)
def test_what_an_engine_cannot_run_is_refused_with_the_nearest(
    engine: str, drafter: str, said: str, run: Run, drafters: dict[str, str], target: str, tmp_path: Path
) -> None:
    word = drafters.get(drafter, drafter) if drafter in ("redrafter", "medusa", "p-eagle") else drafter
    for name, folder in drafters.items():
        word = word.replace(f"{{{name}}}", folder)
    out = tmp_path / "out"
    result = run("export", word, "--for", engine, "--out", str(out), "--model", target, "--json")
    assert result.status != 0 and said in result.record["error"], result.err
    assert not out.exists() or not any(out.iterdir())


def test_targets_that_a_head_or_the_engines_script_does_not_know_are_refused(
    run: Run, drafters: dict[str, str], tmp_path: Path
) -> None:
    words = ("--out", str(tmp_path / "out"), "--model", "embedded:target")
    result = run("export", drafters["eagle"], "--for", "llamacpp", *words)
    assert result.status == 2 and "does not know the tokenizer of 'embedded:target'; take a published" in result.err
    result = run("export", drafters["eagle"], "--for", "vllm", *words)
    assert result.status == 2 and "whose vectors have 384 entries, and this head reads 64; name the" in result.err
    assert not (tmp_path / "out").exists()


def test_an_mtp_layer_travels_to_where_it_is_trained_and_back(run: Run, tmp_path: Path) -> None:
    model = str(MtpReference(SHAPES["qwen3"]).write(tmp_path / "model"))
    folders = [str(tmp_path / name) for name in ("first", "second")]
    for word, folder, more in (("mtp", folders[0], ",num_speculative_tokens=2"), (folders[0], folders[1], "")):
        words = ("export", word + more, "--for", "speculators", "--model", model, "--out", folder, "--json")
        result = run(*words).ok
        assert (result.record["kind"], result.record["tokens"], result.record["commands"]) == ("mtp", 2, [])
    for file in ("config.json", "model.safetensors"):
        first, second = (Path(folder, file).read_bytes() for folder in folders)
        assert first == second


def test_drafts_of_another_vocabulary_go_to_llamacpp_alone(
    run: Run, drafters: dict[str, str], target: str, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    config = LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(other)
    words = ("--out", str(tmp_path / "out"), "--model", target, "--json")
    refused = run("export", f"draft:{other}", "--for", "vllm", *words)
    assert "vllm wants a draft with the target's vocabulary" in refused.record["error"] and "99 ids" in refused.err


def test_a_gguf_draft_is_copied_and_a_gguf_target_made_a_folder(run: Run, target: str, tmp_path: Path) -> None:
    for name in ("target", "small"):
        gguf_files.write(tmp_path / f"{name}.gguf", "llama", {"": "Q8_0"})
    gguf, small, out = str(tmp_path / "target.gguf"), tmp_path / "small.gguf", tmp_path / "out"
    words = ("export", f"draft:{small}", "--model", gguf, "--json")
    result = run(*words, "--for", "llamacpp", "--out", str(out))
    assert result.status == 0 and (out / "draft.gguf").read_bytes() == small.read_bytes(), result.err
    serve = f"llama-server -m {gguf} -md {out}/draft.gguf --spec-type draft-simple --spec-draft-n-max 4"
    assert result.record["commands"] == [serve]
    result = run(*words, "--for", "vllm", "--out", str(tmp_path / "folder"))
    first, last = result.record["commands"]
    assert first == f"truedraft export --model {gguf} --out {tmp_path}/folder-target"
    assert last.startswith(f"vllm serve {tmp_path}/folder-target --spec") and (tmp_path / "folder/config.json").exists()


def test_heads_of_another_target_are_not_exported_for_this_one(
    run: Run, drafters: dict[str, str], target: str, tmp_path: Path
) -> None:
    out, other = str(tmp_path / "out"), str(tmp_path / "other")
    config = LlamaConfig.from_pretrained(target)
    for change, said in (({"hidden_size": 128}, "have 128 entries"), ({"num_hidden_layers": 1}, "has 1 layers")):
        LlamaForCausalLM(LlamaConfig(**config.to_dict() | change)).save_pretrained(other)
        for name in ("eagle", "dflash"):
            result = run("export", drafters[name], "--for", "speculators", "--model", other, "--out", out, "--json")
            fits = name == "dflash" and change == {"num_hidden_layers": 1}  # it reads the first layer alone
            assert (result.status == 0) is fits and (fits or said in result.record["error"]), result.err
            assert Path(out).exists() is fits
            shutil.rmtree(out, ignore_errors=True)


def test_damage_leaves_no_folder(run: Run, drafters: dict[str, str], target: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(drafters["eagle"], broken)
    (broken / "heads.safetensors").write_bytes((broken / "heads.safetensors").read_bytes()[:-64])
    for word, said in ((f"eagle:{broken}", "heads.safetensors"), (f"eagle:{tmp_path}", "has no config.json")):
        result = run("export", word, "--for", "vllm", "--out", str(tmp_path / "out"), "--model", target)
        assert result.status != 0 and said in result.err and not (tmp_path / "out").exists()
    again = run("export", drafters["eagle"], "--for", "vllm", "--out", drafters["eagle"], "--model", target)
    assert again.status != 0 and "is not empty; name a new one" in again.err
