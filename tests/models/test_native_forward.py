"""The native forward: sizes that fill no whole unit, threads, what it refuses, and how it is compiled and kept.

That it gives what the model's own modules give in every shape of forward: `test_loops.py`; that rows do not depend on
each other: `test_row_invariance.py`.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma3TextConfig,
    Glm4Config,
    GlmConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from support.backends import llama_of, native_backend
from support.embedded_models import embedded
from support.loops import run_forwards
from support.tiny_models import VECTORS, build, stock_greedy
from truedraft import Engine, SamplingParams, compiled, lazy, load_model
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.drafters import DraftModel
from truedraft.errors import CacheError, ModelError
from truedraft.machine import pick_dtype
from truedraft.models import HuggingFaceModel, LanguageModel, Segment
from truedraft.models.backends.fused import FusedBackend
from truedraft.models.backends.native import NativeBackend, backend
from truedraft.models.backends.native import build as building
from truedraft.models.backends.native.build import built
from truedraft.models.backends.native.memory import Scratch, packed, padded_bias
from truedraft.models.backends.stock import StockBackend
from truedraft.models.loading import fastest_backend
from truedraft.models.packed_linear import can_pack
from truedraft.models.quantized import Scheme

needs_library = pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason)
needs_compiler = pytest.mark.skipif(
    sys.platform == "win32" or not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler"
)


PARTLY: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}


def llama(**sizes: Any) -> PretrainedConfig:
    return LlamaConfig(**VECTORS | sizes)


CONFIGS = {
    "nothing fills a unit": llama,
    "less than a vector of ids": lambda: llama(vocab_size=5),
    "one vector": lambda: llama(hidden_size=16, num_attention_heads=1, intermediate_size=16, vocab_size=16),
    "heads wider than the model": lambda: llama(head_dim=160, vocab_size=64, num_key_value_heads=3),
    "the widest head": lambda: llama(head_dim=256, vocab_size=65),
    "biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "five to a key head": lambda: Qwen3Config(**VECTORS | {"num_attention_heads": 10, "num_key_value_heads": 2}),
    "a window of 1": lambda: MistralConfig(**VECTORS, sliding_window=1),
    "a window of 3": lambda: MistralConfig(**VECTORS, sliding_window=3),
    "fused projections": lambda: Phi3Config(**VECTORS, pad_token_id=None),
    "part of a head": lambda: Phi3Config(
        **VECTORS | {"head_dim": 64}, pad_token_id=None, rope_parameters=PARTLY | {"partial_rotary_factor": 0.5}
    ),
    "neighbours rotated": lambda: GlmConfig(**VECTORS, pad_token_id=None, attention_bias=True, rope_parameters=PARTLY),
    "norms behind sums": lambda: Glm4Config(
        **VECTORS | {"head_dim": 64}, pad_token_id=None, rope_parameters=PARTLY | {"partial_rotary_factor": 0.5}
    ),
    "two rotations, weights from 1": lambda: Gemma3TextConfig(
        **VECTORS | {"num_hidden_layers": 4},
        pad_token_id=None,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=40,
    ),
    "experts": lambda: MixtralConfig(**VECTORS, num_local_experts=5, num_experts_per_tok=2, sliding_window=3),
    "each row to every expert": lambda: MixtralConfig(
        **VECTORS, num_local_experts=3, num_experts_per_tok=3, sliding_window=None
    ),
    "experts by shares that do not sum to 1": lambda: Qwen3MoeConfig(
        **VECTORS, num_experts=40, num_experts_per_tok=6, moe_intermediate_size=16, norm_topk_prob=False
    ),
    "sinks, and experts with biases": lambda: GptOssConfig(
        **VECTORS, pad_token_id=None, num_local_experts=6, num_experts_per_tok=2, sliding_window=3
    ),
}
LAYERS = (1, 0)  # whose outputs are shown, in this order
EXPERTS = ("experts", "experts by shares that do not sum to 1", "sinks, and experts with biases")


def native(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> HuggingFaceModel:
    return HuggingFaceModel(build(config, seed=3, spread=0.15, dtype=dtype), None, "native", native_backend)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_library
@pytest.mark.parametrize("name", CONFIGS)
def test_odd_sizes_give_what_the_models_own_modules_give(name: str) -> None:
    stock = HuggingFaceModel(build(CONFIGS[name](), seed=3, spread=0.15), None, "stock", StockBackend)
    both = (run_forwards(model, LAYERS) for model in (native(CONFIGS[name]()), stock))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.std()))


@needs_library
@pytest.mark.parametrize("name", ["nothing fills a unit", "norms behind sums", "experts"])
def test_layers_that_are_shown_change_no_bit_and_are_in_the_order_asked_for(name: str) -> None:
    model = native(CONFIGS[name]())
    plain, shown, (*_, other) = run_forwards(model), run_forwards(model, LAYERS), run_forwards(model, (0,))
    assert all(map(torch.equal, plain, shown[:2]))
    assert shown[3].equal(other) and not shown[2].equal(other)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["nothing fills a unit", "heads wider than the model", "a window of 3", *EXPERTS])
def test_bits_do_not_depend_on_the_number_of_threads(name: str, dtype: torch.dtype, threads: None) -> None:
    """5 threads are more than some layers have units."""
    if built(dtype).library is None:
        pytest.skip(built(dtype).reason)
    results = []
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        results.append(run_forwards(native(CONFIGS[name](), dtype), LAYERS))
    for others in results[1:]:
        assert all(ours.equal(theirs) for ours, theirs in zip(results[0], others, strict=True))


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["nothing fills a unit", "biases", "five to a key head", *EXPERTS])
def test_a_row_has_the_same_bits_among_any_number_of_rows(name: str, dtype: torch.dtype) -> None:
    """Rows go through products in tiles, whose sizes differ with the number of rows, on each kind of processor."""
    if built(dtype).library is None:
        pytest.skip(built(dtype).reason)
    model = native(CONFIGS[name](), dtype)
    cache, tokens = model.new_cache(), torch.randint(101, (233,), generator=torch.Generator().manual_seed(11))
    model.forward([Segment(cache, tokens[:33], chain_shape(33), ())])
    cache.commit(range(33))

    def logits(count: int) -> Tensor:
        output = model.forward([Segment(cache, tokens[33 : 33 + count], chain_shape(count), range(count))])
        cache.rollback(33)
        return output.logits

    most = logits(200)
    for count in (*range(1, 40), *range(94, 101), 191, 193):
        assert logits(count).equal(most[:count]), f"{count} rows"


@needs_library
@pytest.mark.parametrize("name", ["nothing fills a unit", *EXPERTS])
def test_a_node_has_the_bits_of_its_path_alone(name: str) -> None:
    """In trees of any size, behind contexts that fill no vector, beside another request."""
    model, generator = native(CONFIGS[name]()), torch.Generator().manual_seed(5)
    caches = [model.new_cache() for _ in range(3)]
    for cache, length in zip(caches[:2], (37, 3), strict=True):
        context = torch.randint(101, (length,), generator=generator)
        for each in (cache, caches[2]) if length == 37 else (cache,):
            model.forward([Segment(each, context, chain_shape(length), ())])
            each.commit(range(length))
    for size in (2, 5, 9, 14, 31):
        parents = [-1] + [int(torch.randint(node, (), generator=generator)) for node in range(1, size)]
        shape, tokens = TreeShape(tuple(parents)), torch.randint(101, (size,), generator=generator)
        neighbour = Segment(caches[1], tokens[: size // 2], chain_shape(size // 2), ())
        tree = model.forward([neighbour, Segment(caches[0], tokens, shape, range(size))]).logits
        for node in range(size):
            path = shape.path(node)
            alone = Segment(caches[2], tokens[list(path)], chain_shape(len(path)), (len(path) - 1,))
            assert model.forward([alone]).logits[0].equal(tree[node]), f"node {node} of {parents}"
            caches[2].rollback(37)
        caches[0].rollback(37)
        caches[1].rollback(3)


LONG = {"max_position_embeddings": 1024}
LONG_CONFIGS = {
    "llama": lambda: llama(**LONG),
    "four to a key head of 64": lambda: llama(**LONG, num_attention_heads=8, num_key_value_heads=2, head_dim=64),
    "half a pair of vectors": lambda: GlmConfig(
        **VECTORS | LONG | {"head_dim": 80}, pad_token_id=None, rope_parameters=PARTLY | {"partial_rotary_factor": 0.4}
    ),
    "a window of 301": lambda: MistralConfig(**VECTORS | LONG, sliding_window=301),
    "sinks": lambda: GptOssConfig(
        **VECTORS | LONG, pad_token_id=None, num_local_experts=6, num_experts_per_tok=2, sliding_window=301
    ),
}
TREE = TreeShape((-1, 0, 0, 1, 2, 4, 5))  # deeper than what is left of the third chunk


def run_long(model: LanguageModel, bits: bool = True) -> list[Tensor]:
    """Logits of a tree after 765 tokens, of many rows, and of two requests; `bits`: nodes have those of their paths."""
    generator = torch.Generator().manual_seed(9)
    ids, short = torch.randint(101, (765,), generator=generator), model.new_cache()
    cache, nodes = model.new_cache(), torch.randint(101, (len(TREE),), generator=generator)
    for first, end in ((0, 300), (300, 765)):
        model.forward([Segment(cache, ids[first:end], chain_shape(end - first), ())])
        cache.commit(range(end - first))
    outputs = [model.forward([Segment(cache, nodes, TREE, range(len(TREE)))]).logits]
    for node in range(len(TREE)):
        cache.rollback(765)
        path = list(TREE.path(node))
        alone = model.forward([Segment(cache, nodes[path], chain_shape(len(path)), range(len(path)))])
        assert not bits or alone.logits[-1].equal(outputs[0][node]), f"node {node}"
    cache.rollback(765)
    rows = model.forward([Segment(cache, ids[:40], chain_shape(40), range(40))])
    cache.rollback(765)
    model.forward([Segment(short, ids[:500], chain_shape(500), ())])
    short.commit(range(500))
    more = Segment(short, ids[:280], chain_shape(280), range(280))  # with it the other text is the one of more chunks
    alone = model.forward([more]).logits
    short.rollback(500)
    both = model.forward([Segment(cache, ids[:3], chain_shape(3), range(3)), more]).logits
    assert not bits or (both[:3].equal(rows.logits[:3]) and both[3:].equal(alone))
    return [each.double() for each in (*outputs, rows.logits, both)]


@needs_library
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LONG_CONFIGS)
def test_long_contexts_are_cut_into_chunks(name: str, dtype: torch.dtype, coded: bool, threads: None) -> None:
    """Chunks are taken by any thread, and joined in one order: a row's bits depend on what it sees alone."""
    if built(dtype).library is None:
        pytest.skip(built(dtype).reason)

    def model_of(backend: Any) -> HuggingFaceModel:
        made = HuggingFaceModel(build(LONG_CONFIGS[name](), seed=3, spread=0.15, dtype=dtype), None, "long", backend)
        if coded:
            made.quantize_cache()
        return made

    results = []
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        results.append(run_long(model_of(native_backend)))
        assert all(map(torch.equal, results[0], results[-1])), f"{count} threads"
    if dtype is torch.float32 and not coded:
        for ours, theirs in zip(results[0], run_long(model_of(StockBackend), bits=False), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * float(theirs.std()))


@needs_library
@pytest.mark.parametrize("token", [-1, 8192, 2**40])
def test_an_unknown_token_is_refused_and_the_next_forward_runs(token: int) -> None:
    model = embedded("draft", dtype="float32")
    assert isinstance(model._backend, NativeBackend)
    cache = model.new_cache()
    with pytest.raises(ModelError, match="outside 0 to 8191"):
        model.forward([Segment(cache, torch.tensor([5, token]), chain_shape(2), (1,))])
    cache.rollback(0)
    assert model.forward([Segment(cache, torch.tensor([5, 6]), chain_shape(2), (1,))]).logits.isfinite().all()


@needs_library
def test_what_would_read_foreign_memory_is_refused() -> None:
    model, tokens = native(llama()), torch.tensor([5, 6])
    for row in (-1, 2):
        with pytest.raises(ModelError, match="row that needs logits is outside 0 to 1"):
            model.forward([Segment(model.new_cache(), tokens, chain_shape(2), (row,))])
    with pytest.raises(ModelError, match="2 tokens are given for 3 nodes"):
        model.forward([Segment(model.new_cache(), tokens, chain_shape(3), (0,))])
    other = native(llama(head_dim=64))
    foreign = other.new_cache()
    other.forward([Segment(foreign, tokens, chain_shape(2), (0,))])
    with pytest.raises(CacheError, match="cache of another model"):
        model.forward([Segment(foreign, tokens, chain_shape(2), (0,))])


@needs_library
def test_tokens_may_lie_apart_or_be_narrower() -> None:
    model, table = native(llama()), torch.tensor([[5, 9], [6, 9], [7, 9]])
    rows = [
        model.forward([Segment(model.new_cache(), tokens, chain_shape(3), range(3))]).logits
        for tokens in (torch.tensor([5, 6, 7]), table[:, 0], torch.tensor([5, 6, 7], dtype=torch.int32))
    ]
    assert rows[0].equal(rows[1])
    assert rows[0].equal(rows[2])


@needs_library
def test_a_forward_holds_the_trees_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """More different trees in a forward than are remembered, or another thread's: the memory must stay."""
    model, generator = native(llama()), torch.Generator().manual_seed(1)
    monkeypatch.setattr(backend, "_own_slots", functools.lru_cache(maxsize=1)(backend._own_slots.__wrapped__))
    segments = []
    for i in range(40):
        shape = TreeShape((-1, 0, 0, i % 3, (i // 3) % 4, (i // 12) % 5))
        tokens = torch.randint(101, (6,), generator=generator)
        segments.append(Segment(model.new_cache(), tokens, shape, range(6)))
    together = model.forward(segments).logits
    alone = []
    for segment in segments:
        segment.cache.rollback(0)
        alone.append(model.forward([segment]).logits)
    assert together.equal(torch.cat(alone))


@needs_library
def test_scratch_grows_by_doubling() -> None:
    """A context grows by a token a step; new memory at every step would cost more than the step."""
    scratch = Scratch(built(torch.float32).library, torch.float32, 64)
    places = {scratch.of(1, keys, 1).scores for keys in range(1, 3000)}
    assert len(places) <= 4
    assert scratch.of(1, 3000, 1).keys >= 3000 + 32


@needs_library
@pytest.mark.parametrize("change", ["dtype", "size", "odd head"])
def test_models_whose_layers_differ_do_not_fit(change: str) -> None:
    model: Any = build(llama(), seed=0)
    patterns = native(llama())._backend._patterns * 2  # type: ignore[attr-defined]
    assert NativeBackend.fits(llama_of(model, patterns))
    if change == "dtype":
        model.model.layers[1].input_layernorm.to(torch.bfloat16)
    elif change == "size":
        model.model.layers[1].mlp.gate_proj = nn.Linear(48, 96, bias=False)
    else:
        model.model.layers[0].self_attn.head_dim = 33
    assert not NativeBackend.fits(llama_of(model, patterns))


@needs_library
@pytest.mark.parametrize("change", ["a layer without", "a shared expert", "another router", "another slope"])
def test_experts_that_are_not_all_alike_do_not_fit(change: str) -> None:
    sizes = VECTORS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 80}
    kind = "sinks, and experts with biases" if change == "another slope" else "experts"
    config = Qwen3MoeConfig(**sizes, mlp_only_layers=[1]) if change == "a layer without" else CONFIGS[kind]()
    model: Any = build(config, seed=0)
    mlp = model.model.layers[0].mlp
    if change == "a shared expert":
        mlp.shared_expert = nn.Linear(48, 48)
    elif change == "another router":
        mlp.gate.__class__ = type("Louder", (type(mlp.gate),), {})
    elif change == "another slope":
        mlp.experts.alpha = 1.5
    made = HuggingFaceModel(model, None, "native", fastest_backend)
    assert not isinstance(made._backend, NativeBackend)


@needs_library
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_answer_as_generate_does_and_leave_no_second_copy(name: str, tmp_path: Path) -> None:
    """Loaded as users load them, plainly and with a draft."""
    module = build(CONFIGS[name](), seed=3, spread=0.15)
    module.save_pretrained(tmp_path)
    prompt = [5, 9, 11, 3, 60, 2, 11, 3]
    expected = stock_greedy(module, prompt, 24)
    model = load_model(str(tmp_path), dtype="float32")
    assert isinstance(model._backend, NativeBackend)
    assert sum(weight.numel() for weight in model.module.model.layers.parameters()) < 2000, "norms alone"
    params = SamplingParams(max_tokens=24)
    assert list(Engine(model).generate(prompt, params).token_ids) == expected
    assert list(Engine(model, DraftModel(model, 3), controller="fixed").generate(prompt, params).token_ids) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_an_entry_of_a_packed_weight_lies(dtype: torch.dtype) -> None:
    """Entry (17, 3) at block 1, output 1; in float32 as cell 3, in bfloat16 as the second half of cell 1."""
    weight = torch.arange(20 * 6).view(20, 6).to(dtype)
    library = built(dtype).library
    if library is None:
        pytest.skip(f"no native forward: {built(dtype).reason}")
    cells = packed(library, [[weight]])
    assert cells.shape == ((4, 6, 16, 1) if dtype is torch.float32 else (4, 3, 16, 2))
    assert cells[(1, 3, 1, 0) if dtype is torch.float32 else (1, 1, 1, 1)] == weight[17, 3]
    assert cells.transpose(1, 2).reshape(64, 6)[:20].equal(weight)
    assert packed(library, [[weight.t().contiguous().t()]]).equal(cells)
    assert packed(library, [[weight], [weight[:16], weight[16:]]]).equal(torch.cat([cells, cells]))
    large = torch.randn(1040, 2).to(dtype)  # more than a thread packs at a time; gate and up take turns of 16
    rows = torch.stack([large.view(-1, 16, 2), -large.view(-1, 16, 2)], dim=1).view(-1, 2)
    assert packed(library, [[large, -large]], alternate=True).equal(packed(library, [[rows]]))


def test_biases_are_float32_and_fill_whole_units() -> None:
    with_bias, without = nn.Linear(4, 40).to(torch.bfloat16), nn.Linear(4, 30, bias=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        bias = padded_bias([without.bias, with_bias.bias], [30, 40])
    finally:
        torch.set_default_dtype(before)
    assert bias is not None
    assert bias.dtype is torch.float32
    assert bias.shape == (128,)
    assert bias[30:70].equal(with_bias.bias.float())
    assert bias[:30].abs().sum() == bias[70:].abs().sum() == 0
    assert padded_bias([without.bias], [30]) is None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a source that compiles quickly."""
    source = tmp_path / "small.c"
    source.write_text("int truedraft_forward(void) { return 7; }\n")
    monkeypatch.setattr(building, "SOURCE", source)
    monkeypatch.setenv("TRUEDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    built.cache_clear()
    yield tmp_path / "cache" / "native"
    built.cache_clear()


def compiler(path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets CC to a shell script."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CC", str(path))


def again() -> building.Built:
    """What the next process would get."""
    built.cache_clear()
    return built(torch.float32)


def answer(made: building.Built) -> int:
    assert made.library is not None, made.reason
    number: int = made.library.truedraft_forward()
    return number


def test_without_a_compiler_there_is_a_reason_and_the_fused_loop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc -O2")
    assert built(torch.float32) == building.Built(None, "CC names '/nowhere/cc -O2', which is not on this machine")
    assert "float16" in built(torch.float16).reason
    if can_pack(torch.device("cpu"), torch.float32):
        model = HuggingFaceModel(build(llama(), seed=0), None, "llama", fastest_backend)
        assert isinstance(model._backend, FusedBackend)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert "no C compiler (cc, gcc or clang)" in again().reason


@needs_compiler
def test_a_compiler_that_fails_gives_its_message(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path / "broken", "echo 'no room for \377 code' >&2; exit 3", monkeypatch)
    assert "broken failed (no room for" in built(torch.float32).reason
    compiler(tmp_path / "broken", "exit 3", monkeypatch)
    assert "failed (no message)" in again().reason
    compiler(
        tmp_path / "broken",
        'while [ "$1" != -o ] && [ $# -gt 0 ]; do shift; done; echo junk >"${2:-/dev/null}"',
        monkeypatch,
    )
    assert "cannot be compiled or loaded" in again().reason
    (tmp_path / "broken").write_bytes(b"\0neither script nor program")
    assert "cannot be compiled or loaded" in again().reason


@needs_compiler
def test_what_was_compiled_is_kept_until_the_source_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    compiler(
        tmp_path / "logging", f'case "$*" in *--version) ;; *) echo run >>{log} ;; esac; exec cc "$@"', monkeypatch
    )
    assert answer(built(torch.float32)) == 7
    assert answer(again()) == 7
    assert log.read_text().splitlines() == ["run"]
    building.SOURCE.write_text("int truedraft_forward(void) { return 8; }\n")
    assert answer(again()) == 8
    assert len(log.read_text().splitlines()) == 2
    monkeypatch.setenv("CC", f"{tmp_path / 'logging'} -DOTHER")
    assert answer(again()) == 8
    assert len(log.read_text().splitlines()) == 3, "other options, other library"


@needs_compiler
@pytest.mark.parametrize("size", [0, 100, 5000, -8])
def test_a_damaged_library_is_made_again(folder: Path, size: int) -> None:
    """Loading the first half of a library may end the process, so it is not tried."""
    assert answer(built(torch.float32)) == 7
    (kept,) = folder.glob("*.so")
    whole = kept.read_bytes()
    kept.unlink()  # a new file: this process holds the old one in memory
    kept.write_bytes(whole[:size])
    assert answer(again()) == 7
    (kept,) = folder.glob("*.so")
    assert kept.stem.endswith(compiled._checksum(kept))


@needs_compiler
def test_a_cache_that_cannot_be_made_is_done_without(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left behind in the folder for temporary files either."""
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TRUEDRAFT_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(compiled.tempfile, "tempdir", str(tmp_path / "temporary"))
    assert answer(built(torch.float32)) == 7
    assert list((tmp_path / "temporary").iterdir()) == []


@needs_compiler
def test_on_a_full_disk_it_is_compiled_elsewhere_and_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The compiler would fail in a full folder, and the slower loop would run for want of a few kilobytes."""
    monkeypatch.setattr(compiled.shutil, "disk_usage", lambda folder: SimpleNamespace(free=4096))
    with caplog.at_level(logging.WARNING, logger="truedraft"):
        assert [answer(built(torch.float32)) for _ in range(2)] == [7, 7]
    assert list(folder.iterdir()) == []
    (record,) = caplog.records
    assert f"could not be kept in {folder.parent} (No space left on device)" in record.getMessage()


@needs_compiler
def test_only_the_user_can_write_what_is_loaded(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert answer(built(torch.float32)) == 7
    (kept,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(kept.stat().st_mode) == 0o700
    key = kept.stem.rpartition("-")[0]
    assert compiled._load_kept(folder, key, str)
    kept.chmod(0o722)
    assert not compiled._load_kept(folder, key, str)
    if os.getuid() == 0:
        kept.chmod(0o700)
        os.chown(kept, 12345, 12345)
        assert not compiled._load_kept(folder, key, str)
        os.chown(folder, 12345, 12345)
        assert compiled._folder() is None


@needs_compiler
def test_several_may_compile_at_once(folder: Path) -> None:
    """As processes do: each runs its own compiler in a folder of its own, and they share the cache alone."""
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: built.__wrapped__(torch.float32), range(4)))
    assert [answer(each) for each in made] == [7] * 4
    kept = list(folder.iterdir())
    assert kept
    assert all(path.stem.endswith(compiled._checksum(path)) for path in kept), "whole libraries and nothing else"


@needs_compiler
def test_a_process_beside_the_imports_compiles_what_the_first_start_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torch, which takes seconds to import: the library, three forms of weights and `fused.c`, each once."""
    log = tmp_path / "log"
    compiler(
        tmp_path / "quick", f'case "$*" in *--version) exec cc "$@";; esac; echo run >>{log}; cc "$@" -O0', monkeypatch
    )
    monkeypatch.setenv("TRUEDRAFT_CACHE", str(tmp_path / "cache"))
    told = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__'); assert 'torch' not in sys.modules"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", told, str(lazy._BUILD)], check=True, timeout=600)
        assert log.read_text().splitlines() == ["run"] * 5
    library = built.__wrapped__(pick_dtype("auto", torch.device("cpu"))).library
    assert library is not None
    library.need_form(4, Scheme.SHIFTED.value)
    assert log.read_text().splitlines() == ["run"] * 5


@needs_compiler
def test_a_form_that_cannot_be_compiled_is_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(
        tmp_path / "broken", 'case "$*" in *FORM_BITS*) echo "no room" >&2; exit 3;; esac; exec cc "$@"', monkeypatch
    )
    library = built(torch.float32).library
    assert library is not None
    with pytest.raises(ModelError, match=r"weights of 6 bits cannot be compiled or loaded \(.*broken failed \(no room"):
        library.need_form(6, Scheme.HALVES.value)


def test_that_process_is_started_where_there_is_something_to_gain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(
        lazy, "subprocess", SimpleNamespace(DEVNULL=None, Popen=lambda words, **_: started.append(words))
    )
    monkeypatch.setattr(lazy, "_GPU", tmp_path / "nvidiactl")
    lazy.compile_ahead.__wrapped__()
    assert not started, "transformers is imported already"
    monkeypatch.delitem(sys.modules, "transformers")
    lazy.compile_ahead.__wrapped__()
    assert started == [[sys.executable, str(lazy._BUILD)]]
    (tmp_path / "nvidiactl").touch()
    lazy.compile_ahead.__wrapped__()
    assert len(started) == 1, "models run on the GPU"
