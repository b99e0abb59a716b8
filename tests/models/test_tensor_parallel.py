"""A model in several processes answers as in one, to the last bit alike whatever shares a forward, and ends with them.

Most of these start processes, which takes seconds each time: `make test-scale`.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from transformers import GPT2Config, LlamaConfig, PreTrainedModel

from cli.tiny import save_tiny_llama
from engine.test_cache_bytes import hold_to_a_budget, texts
from support.real_models import needs_smollm2
from support.rows import assert_rows_are_alike
from support.tiny_models import PROMPTS, drafter_of, noisy, reference_with_lead, stock, stock_logits
from truedraft import Engine, SamplingParams, load_model
from truedraft.certify import Stack, certify
from truedraft.cli.report import target_record
from truedraft.cli.session import StackOptions
from truedraft.core.tree import chain_shape
from truedraft.drafters.specs import from_spec
from truedraft.engine.policy.specs import controller_from_spec
from truedraft.errors import ModelError, OptionError, UnsupportedModelError
from truedraft.models import HuggingFaceModel, Segment
from truedraft.models.loading import load_reader, read_model, resolve_source
from truedraft.models.ranks import Ranks, refuse_unsharded, shard
from truedraft.verification import SpeculativeSampling

COUNT = 24
EMBEDDED_DRAFTERS = ("prompt-lookup", "suffix", "draft", "draft,branching=2-2-1", "medusa,nodes=8", "redrafter", "auto")


def saved(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(stock("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def two(tiny: str) -> HuggingFaceModel:
    return load_model(tiny, dtype="float32", tensor_parallel=2)


@pytest.fixture(scope="module")
def embedded_two() -> HuggingFaceModel:
    return load_model("embedded:target", dtype="bfloat16", tensor_parallel=2)


def processes_of(model: HuggingFaceModel) -> Sequence[subprocess.Popen[bytes]]:
    return model._backend._ranks.others  # type: ignore[attr-defined]


def together(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
    return [answer.token_ids for answer in engine.generate([list(each) for each in prompts], params)]


def ranks_of(count: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What each of several threads finds that are joined as processes are."""
    stores = [distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    port = stores[0].port
    stores += [distributed.TCPStore("127.0.0.1", port, None, False) for _ in range(count - 1)]
    found: list[Any] = [None] * count

    def run(rank: int) -> None:
        ranks = Ranks(rank, count, stores[rank])
        ranks.join(torch.device("cpu"))
        found[rank] = work(ranks)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_added_in_the_order_of_ranks_and_rounded_once(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    parts = [
        (torch.randn(37, 96, generator=generator) * 10.0 ** torch.randn(37, 96, generator=generator)).to(dtype)
        for _ in range(count)
    ]
    expected = parts[0].double().float()
    for each in parts[1:]:
        expected = expected + each.float()
    expected = expected.to(dtype)

    def work(ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
        part = parts[ranks.rank]
        return ranks.added(part), ranks.added(part[5:6]), ranks.gathered(part[:2])

    for whole, row, gathered in ranks_of(count, work):
        assert whole.equal(expected) and row.equal(expected[5:6])
        assert gathered.equal(torch.stack([part[:2] for part in parts]))


def test_each_process_has_its_heads_and_all_parts_are_the_whole() -> None:
    parts = [stock("llama") for _ in range(2)]
    for rank, model in enumerate(parts):
        shard(model, "tiny", Ranks(rank, 2, None))  # type: ignore[arg-type]
    whole = stock("llama").state_dict()
    first, second = (model.state_dict() for model in parts)
    for name, weight in whole.items():
        axis = 1 if "o_proj" in name or "down_proj" in name else 0 if "_proj" in name else None
        joined = first[name] if axis is None else torch.cat([first[name], second[name]], axis)
        assert joined.equal(weight), name
    assert first["model.layers.0.self_attn.k_proj.weight"].shape == (12, 48)  # one of two key heads


def test_two_processes_answer_as_one(two: HuggingFaceModel) -> None:
    answers, lead = reference_with_lead("llama")
    assert lead > 1e-3
    params = SamplingParams(COUNT, ignore_eos=True)
    for word in ("prompt-lookup", "tree"):
        engine = Engine(two, drafter_of(word, noisy("llama", 0.1)), controller=controller_from_spec("fixed"))
        assert together(engine, PROMPTS, params) == [list(answer[:COUNT]) for answer in answers], word


@pytest.mark.slow
def test_two_processes_keep_to_a_budget(two: HuggingFaceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_to_a_budget(two, texts(3), monkeypatch)


def test_a_text_that_begins_alike_is_copied_in_every_process(two: HuggingFaceModel) -> None:
    """From kept blocks, and from a request that runs; the answer is that of a text that was read."""
    text = [*PROMPTS[1], *PROMPTS[3], *PROMPTS[1]]
    engine = Engine(two, prefix_cache_bytes=1 << 24)
    params = SamplingParams(COUNT, ignore_eos=True)
    (first,) = together(Engine(two), [text], params)
    assert together(engine, [text], params) == [first]
    copied = engine.shared_tokens
    assert together(engine, [text, text, [*text[:80], 1, 2]], params)[:2] == [first, first]
    assert engine.shared_tokens >= copied + 128


def test_rows_are_the_same_bits_whatever_shares_a_forward(two: HuggingFaceModel) -> None:
    assert_rows_are_alike(two)


def test_the_lm_head_alone_gives_the_logits_of_its_vectors(two: HuggingFaceModel) -> None:
    with two.trying() as cache:
        output = two.forward([Segment(cache, torch.arange(1, 9), chain_shape(8), range(8))])
    torch.testing.assert_close(two.unembed(output.hidden), output.logits, rtol=0, atol=1e-4)
    weight = stock("llama").get_output_embeddings().weight
    torch.testing.assert_close(two.lm_head().weight, weight, rtol=0, atol=1e-6)


def test_reports_name_the_number_of_processes_and_the_fingerprint_is_the_whole_models(
    two: HuggingFaceModel, tiny: str
) -> None:
    assert "tensor parallel over 2" in two.fast_paths
    assert two.note is not None and "runs in 2 processes" in two.note
    alone = load_model(tiny, dtype="float32")
    assert (two.fingerprint, two.parameters) == (alone.fingerprint, alone.parameters)


def test_what_cannot_be_done_together_is_refused_in_a_sentence(tiny: str, tmp_path: Path) -> None:
    def refusal(name: str | Path = tiny, count: int = 2, **options: Any) -> str:
        with pytest.raises((OptionError, UnsupportedModelError)) as caught:
            load_model(name, tensor_parallel=count, **options)
        return f"{caught.value.field}: {caught.value}"

    assert "has 4 attention heads and 2 key heads, which cannot be shared so; take 2" in refusal(count=3)
    assert "2 key heads" in refusal(count=4) and "must be 1 or more, got 0" in refusal(count=0)
    for option, given in {"weights": "q8", "pad_to": "110M", "adapters": {"a": "b"}}.items():
        assert refusal(**{option: given}) == (
            f"{option}: {option} is for one process, and tensor_parallel is 2; leave one of them out"
        )
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    assert "no tensor parallel plan for the layers of" in refusal(tmp_path)
    needs_smollm2()
    assert "not quantised, and those of 'smollm2' are quantised by GGUF" in refusal("smollm2", 3)


def test_self_drafts_need_the_native_forward_which_runs_in_one_process(two: HuggingFaceModel) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot draft for itself with weights of 8 bits"):
        two.quantized(8)


def test_another_style_of_a_plan_and_a_width_that_cannot_be_shared_are_refused() -> None:
    ranks = Ranks(0, 2, None)  # type: ignore[arg-type]
    model = stock("llama")
    model._tp_plan = {**model.tp_plan, "model.layers.*.mlp": "sequence_parallel"}
    with pytest.raises(UnsupportedModelError, match="has the style 'sequence_parallel'"):
        shard(model, "tiny", ranks)
    odd = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=7, num_hidden_layers=1, num_attention_heads=2)
    refuse_unsharded(odd, "odd", 2)
    with pytest.raises(UnsupportedModelError, match="gate_proj of 'odd' is 7 wide"):
        shard(type(stock("llama"))(odd), "odd", ranks)


@pytest.mark.scale
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_neox", "mistral", "mixtral", "qwen3_moe"])
def test_two_processes_answer_as_one_in_other_families(family: str, tmp_path: Path) -> None:
    answers, lead = reference_with_lead(family)
    assert lead > 1e-3
    model = load_model(saved(stock(family), tmp_path), dtype="float32", tensor_parallel=2)
    params = SamplingParams(COUNT, ignore_eos=True)
    engine = Engine(model, drafter_of("tree", noisy(family, 0.1)), controller=controller_from_spec("fixed"))
    assert together(engine, PROMPTS, params) == [list(answer[:COUNT]) for answer in answers]
    if family not in ("mixtral", "qwen3_moe"):  # whose routers have other bits for one row, in one process too
        assert_rows_are_alike(model)


@pytest.mark.scale
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_drafter_answers_as_plain_decoding_does_in_as_many_processes(
    embedded_two: HuggingFaceModel, temperature: float
) -> None:
    assert embedded_two.tokenizer is not None
    prompts = [embedded_two.tokenizer.encode(text) for text in ("import os\n", "def area(radius):\n    ")]
    params = SamplingParams(32, temperature=temperature, seed=7, ignore_eos=True)
    plain = together(Engine(embedded_two), prompts, params)
    for words in EMBEDDED_DRAFTERS:
        engine = Engine(embedded_two, from_spec(words, embedded_two), controller=controller_from_spec("fixed"))
        assert together(engine, prompts, params) == plain, words


@pytest.mark.scale
def test_a_certificate_is_issued_and_names_the_number(embedded_two: HuggingFaceModel) -> None:
    assert embedded_two.tokenizer is not None
    prompts = [embedded_two.tokenizer.encode(text) for text in ("import os\n", "def area(radius):\n    ")]
    stack = Stack(embedded_two, from_spec("draft", embedded_two), SpeculativeSampling(), entropy=1)
    report = certify(stack, prompts, SamplingParams(16, temperature=0.0), seconds=20.0)
    assert report.issued, report.verdict
    record = target_record(embedded_two, StackOptions(tensor_parallel=2))
    assert record["tensor_parallel"] == 2 and "runs in 2 processes" in record["note"]


@pytest.mark.scale
def test_three_processes_answer_as_one_with_a_real_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    """9 attention heads and 3 of keys; the LM head is shared out, too."""
    needs_smollm2()
    tokenizer = load_reader("smollm2").tokenizer
    assert tokenizer is not None
    prompts = [tokenizer.encode(text) for text in ("The capital of France is", "def area(radius):")]
    reference = read_model(resolve_source("smollm2"), "smollm2", torch.float32).eval()
    folder = saved(reference, tmp_path_factory.mktemp("smollm2"))
    three = load_model(folder, dtype="float32", tensor_parallel=3)
    answers = together(Engine(three), prompts, SamplingParams(24, ignore_eos=True))
    for prompt, answer in zip(prompts, answers, strict=True):
        rows = stock_logits(reference, [*prompt, *answer])[len(prompt) - 1 : -1]
        behind = rows.max(-1).values - rows[range(len(answer)), answer]
        assert behind.max() < 1e-3  # transformers would say the same, or the two nearly tie
    assert_rows_are_alike(three)


@pytest.mark.scale
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_dies_ends_requests_within_seconds(tiny: str, number: signal.Signals) -> None:
    model = load_model(tiny, dtype="float32", tensor_parallel=2)
    (other,) = processes_of(model)
    stream = Engine(model).stream([5, 9, 11], SamplingParams(200, ignore_eos=True))
    next(stream)
    assert model.failure is None
    os.kill(other.pid, number)
    began = time.monotonic()
    said = (
        f"rank 1 of the 2 processes that run the model was ended by signal {number.value}, so the model answers no more"
    )
    with pytest.raises(ModelError, match=said):
        list(stream)
    assert time.monotonic() - began < 5.0
    with pytest.raises(ModelError, match=said):
        Engine(model).generate([5, 9, 11], SamplingParams(4))
    assert said in str(model.failure)


@pytest.mark.scale
def test_processes_end_with_the_model_and_with_the_first_of_them(tiny: str) -> None:
    model = load_model(tiny, dtype="float32", tensor_parallel=2)
    (other,) = processes_of(model)
    del model
    gc.collect()
    assert other.poll() is not None
    code = (
        "import sys; from truedraft import load_model; model = load_model(sys.argv[1], tensor_parallel=2); "
        "print(model._backend._ranks.others[0].pid, flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code, tiny]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        pid = int(first.stdout.readline())
        first.kill()
    ends = time.monotonic() + 5.0
    command = Path(f"/proc/{pid}/cmdline")  # empty once it has ended, and until somebody asks how
    while command.exists() and command.read_bytes() and time.monotonic() < ends:
        time.sleep(0.05)
    assert not command.exists() or not command.read_bytes()


@pytest.mark.scale
def test_a_launcher_may_start_the_processes(tmp_path: Path) -> None:
    tiny = save_tiny_llama(tmp_path / "target", seed=1, layers=2)
    asked = ["truedraft", "generate", "ab", "--model", tiny, "--drafter", "prompt-lookup", "--json"]
    asked += ["--ignore-eos", "--max-tokens", "16"]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]

    def answered(*words: str) -> dict[str, Any]:
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return record

    alone = answered(*asked)
    two = answered(*launcher, *asked, "--tensor-parallel", "2")
    assert two["prompts"][0]["token_ids"] == alone["prompts"][0]["token_ids"]
    assert (alone["tensor_parallel"], two["tensor_parallel"]) == (1, 2)
