"""`load_model` with `kv_dtype` or `weights` in fewer bits: what these are, that rows and answers stay, and refusals."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from support.backends import graph_backend
from support.codes import assert_given_by_codes, in_eight_bits, logits
from support.gguf_files import write
from support.rows import assert_rows_are_alike
from support.tiny_models import VECTORS, build
from support.verdicts import read
from truedraft import Engine, SamplingParams, load_model
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.drafters import from_spec, specs
from truedraft.errors import OptionError, UnknownOptionError, UnsupportedModelError
from truedraft.models import HuggingFaceModel, Segment
from truedraft.models.backends.native.build import built
from truedraft.models.backends.native.memory import Weights
from truedraft.models.cache import Buffers, RequestCache
from truedraft.models.cache.buffers import SCALE_BYTES, decoded, encoded

SIZES = VECTORS | {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2
}  # fmt: skip
FAMILIES = [
    pytest.param(LlamaConfig(**SIZES), id="llama"),
    pytest.param(LlamaConfig(**SIZES | {"head_dim": 96, "num_key_value_heads": 4}), id="llama-96"),
    pytest.param(Qwen3Config(**SIZES | {"head_dim": 64, "num_attention_heads": 6}), id="qwen3-64"),
    pytest.param(MistralConfig(**SIZES, sliding_window=40), id="mistral-windowed"),
]
IDS = torch.arange(1, 150) * 37 % 101
NATIVE = pytest.mark.skipif(built(torch.float32).library is None, reason=built(torch.float32).reason)
WAYS = [pytest.param(True, id="native", marks=NATIVE), pytest.param(False, id="stock")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(LlamaConfig(**SIZES), tmp_path)


def folder_of(config: PretrainedConfig, folder: Path) -> Path:
    build(config, seed=3, spread=0.15).save_pretrained(folder / "model")
    return folder / "model"


def stored(cache: RequestCache) -> list[tuple[Tensor, Tensor]]:
    assert isinstance(cache.storage, Buffers)
    return [Buffers.entry(cache.storage, call, cache.length) for call in range(cache.storage.calls)]


def assert_same_codes(left: RequestCache, right: RequestCache) -> None:
    assert left.length == right.length
    for ours, theirs in zip(stored(left), stored(right), strict=True):
        assert ours[0].dtype is torch.int8 and ours[0].equal(theirs[0]) and ours[1].equal(theirs[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_come_back_within_half_a_step(dtype: torch.dtype) -> None:
    numbers = (torch.randn(3, 50, 32, generator=torch.Generator().manual_seed(1)) * 7).to(dtype)
    numbers[0, 0], numbers[1, 1, 1:] = 0.0, 0.0
    codes = encoded(numbers)
    assert codes.shape == (3, 50, 32 + SCALE_BYTES) and codes.dtype is torch.int8
    back = decoded(codes, torch.float32)
    step = numbers.float().abs().amax(-1, keepdim=True) / 127
    assert ((back - numbers.float()).abs() <= step * 0.5001).all() and codes[..., :32].abs().max() == 127
    assert back[0, 0].equal(torch.zeros(32)) and back[1, 1, 0].isclose(numbers[1, 1, 0].float())
    numbers[2, 3, 4], numbers[2, 4, 4] = torch.nan, torch.inf
    assert not decoded(encoded(numbers), dtype)[2, 3:5].isfinite().any()


@NATIVE
@pytest.mark.parametrize("config", FAMILIES)
def test_the_kernels_read_the_codes_that_the_modules_do(config: PretrainedConfig, tmp_path: Path) -> None:
    """Codes of the first layer are equal bit for bit, and logits nearer than those of another cache."""
    folder = folder_of(config, tmp_path)
    whole, native = (load_model(folder, dtype="float32", kv_dtype=each) for each in ("auto", "int8"))
    modules = load_model(folder, dtype="float32", kv_dtype="int8", fast_paths=False)
    assert native.fast_paths[0] == "native forward" and not modules.fast_paths
    exact, expected, found = (logits(model, IDS) for model in (whole, modules, native))
    apart = (found - expected).std()
    assert 0.0 < 10 * apart < (found - exact).std() < 0.1 * exact.std()
    first = [encoded(entries[0, : len(IDS)]) for entries in read(whole, IDS.tolist())[0].entries()[0]]
    keys, values = stored(read(native, IDS.tolist())[0])[0]
    assert keys[0].equal(first[0]) and values[0].equal(first[1])


@pytest.mark.parametrize("fast", WAYS)
def test_memory_is_that_of_codes_and_scales(folder: Path, fast: bool) -> None:
    model = load_model(folder, dtype="float32", kv_dtype="int8", fast_paths=fast)
    cache = read(model, IDS.tolist())[0]
    assert cache.n_bytes == cache.capacity * 2 * 2 * 2 * (32 + SCALE_BYTES)
    model.pool.measure(cache)
    assert model.pool.position_bytes == 2 * 2 * 2 * (32 + SCALE_BYTES)
    assert "its keys and values are kept in 8 bits" in (model.note or "")
    before = model.pool.kept_bytes
    model.release_cache(cache)
    assert model.pool.kept_bytes == before + cache.n_bytes


@pytest.mark.parametrize("fast", WAYS)
def test_commits_and_copies_move_codes(folder: Path, fast: bool) -> None:
    """A path of a tree, a prefix of another request and a rollback leave what a chain from the start does."""
    model = load_model(folder, dtype="bfloat16" if fast else "float32", kv_dtype="int8", fast_paths=fast)
    plain = read(model, IDS.tolist())[0]
    drafted = read(model, IDS[:-2].tolist())[0]
    tree = torch.tensor([5, int(IDS[-2]), 6, int(IDS[-1])])
    model.forward([Segment(drafted, tree, TreeShape((-1, -1, 0, 1)), range(4))])
    drafted.commit([1, 3])
    copied = model.new_cache()
    copied.extend([(plain.part(0, 100, lasting=True), 0, 70), (plain.part(70, 120, lasting=False), 0, 50)])
    shared = [each[:, :120] for each in stored(plain)[1]]
    assert all(ours.equal(theirs) for ours, theirs in zip(stored(copied)[1], shared, strict=True))
    model.forward([Segment(copied, IDS[120:], chain_shape(len(IDS) - 120), ())])
    copied.commit(range(len(IDS) - 120))
    if model.equality == "bit for bit":
        assert_same_codes(drafted, plain)
        assert_same_codes(copied, plain)
    else:
        assert all(k.allclose(o) for (k, _), (o, _) in zip(copied.entries(), plain.entries(), strict=True))


PROMPTS = [[*IDS[:80].tolist(), each] for each in range(4)]
DRAFTERS = ("prompt-lookup,min_ngram=1", "draft", "draft,branching=2-2", "self:int4")


def answers(engine: Engine, params: SamplingParams) -> Sequence[Sequence[int]]:
    return [answer.token_ids for answer in engine.generate(PROMPTS, params)]


@NATIVE
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("spec", DRAFTERS)
def test_drafted_answers_are_those_of_plain_decoding(folder: Path, spec: str, temperature: float) -> None:
    """Of requests that begin alike, which share what is computed, at once and later."""
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=7)
    target = load_model(folder, kv_dtype="int8")
    assert target.equality == "bit for bit"
    plain = answers(Engine(target, prefix_cache_bytes=0, max_batch=1), params)
    spec = spec.replace("draft", f"draft:{folder}") + (",kv_dtype=int8" if spec.startswith("draft") else "")
    drafter = from_spec(spec, target)
    assert all(own.model.kv_dtype == "int8" for own in drafter.held.models)
    engine = Engine(target, drafter, controller="fixed")
    assert answers(engine, params) == plain
    copied = engine.shared_tokens
    assert copied > 0
    assert answers(engine, params) == plain and engine.shared_tokens > copied


@NATIVE
def test_a_preempted_request_continues_with_equal_codes(folder: Path) -> None:
    params, target = SamplingParams(max_tokens=340, ignore_eos=True), load_model(folder, kv_dtype="int8")
    whole = Engine(target, max_cache_bytes=1 << 30)
    begun = 4 * target.pool.bytes_for_one(80 + 256)  # what four requests are granted first
    small = Engine(target, from_spec("prompt-lookup", target), controller="fixed", max_cache_bytes=begun)
    assert answers(small, params) == answers(whole, params)
    assert small.preemptions > 0 == whole.preemptions


def test_a_draft_has_a_type_of_its_own(folder: Path) -> None:
    target = load_model(folder)
    (own,) = from_spec(f"draft:{folder},kv_dtype=int8", target).held.models
    assert (target.kv_dtype, own.model.kv_dtype) == ("auto", "int8")
    with pytest.raises(UnknownOptionError, match="unknown kv dtype 'int7'; did you mean 'int8'"):
        from_spec(f"draft:{folder},kv_dtype=int7", target)


def test_what_cannot_read_codes_is_refused_in_one_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownOptionError, match="unknown kv dtype 'fp8'; valid: auto, int8"):
        load_model(folder, kv_dtype="fp8")
    with pytest.raises(OptionError, match="kv_dtype is for one process, and tensor_parallel is 2; leave one"):
        load_model(folder, kv_dtype="int8", tensor_parallel=2)
    states = MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, state_size=4)
    alone = BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=2)
    for config in (states, alone):
        model = folder_of(config, tmp_path / config.model_type)
        with pytest.raises(UnsupportedModelError, match=r"cannot keep keys and .* no states, read these; leave --kv-"):
            load_model(model, kv_dtype="int8")
    pages = HuggingFaceModel(build(LlamaConfig(**SIZES), seed=3), None, "pages", graph_backend)
    with pytest.raises(UnsupportedModelError, match="only forwards that run packed on a CPU"):
        pages.quantize_cache()


def test_a_family_that_only_its_own_modules_run_keeps_codes_too(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=101, n_embd=64, n_layer=2, n_head=4, n_positions=256, eos_token_id=None)
    folder = folder_of(config, tmp_path)
    exact, found = (logits(load_model(folder, dtype="float32", kv_dtype=each), IDS) for each in ("auto", "int8"))
    assert 0.0 < (found - exact).std() < 0.1 * exact.std()


TIED, UNTIED = LlamaConfig(**SIZES, tie_word_embeddings=True), Qwen2Config(**SIZES, tie_word_embeddings=False)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    return folder_of(TIED, tmp_path)


def quantize_and_back(module: nn.Module, bits: int) -> None:
    """Give every linear layer the numbers of its weight in so many bits, and inputs of 8 bits; ties are kept."""
    library = built(torch.float32).library
    for layer in (each for each in module.modules() if isinstance(each, nn.Linear)):
        weights = Weights(library)
        linear = weights.quantized(weights.linear([layer.weight], None), bits)
        numbers = torch.zeros(layer.weight.shape)
        library.truedraft_decode(ctypes.byref(linear), ctypes.c_void_p(numbers.data_ptr()))
        layer.weight.data = numbers
        layer.register_forward_pre_hook(lambda _, given: (in_eight_bits(given[0]),))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("config", [TIED, UNTIED])
@NATIVE
def test_answers_are_those_of_the_weights_in_fewer_bits(config: PretrainedConfig, bits: int, tmp_path: Path) -> None:
    folder = folder_of(config, tmp_path)
    model = load_model(folder, dtype="float32", weights=f"q{bits}")
    numbers = load_model(folder, dtype="float32", fast_paths=False)
    exact = logits(numbers, IDS)
    quantize_and_back(numbers.module, bits)
    expected, found = logits(numbers, IDS), logits(model, IDS)
    assert_given_by_codes(found, expected)
    apart = (found - expected).std(-1) / expected.std(-1)
    assert (found - exact).std() > 10 * apart.median() * expected.std()
    assert model.embed(IDS[:5]).equal(numbers.embed(IDS[:5]))
    assert model.equality == "bit for bit"


@NATIVE
def test_memory_is_that_of_the_fewer_bits_and_all_is_said(tied: Path) -> None:
    plain, model = (load_model(tied, dtype="float32", weights=weights) for weights in (None, "q8"))
    assert model.weight_bytes < 0.35 * plain.weight_bytes
    path, words = model.fast_paths
    assert path == "native forward" and words.startswith("weights of 8 bits")  # then what the processor lacks
    assert model.name == plain.name
    assert model.fingerprint == plain.fingerprint
    held = {
        weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in model.module.parameters()
    }
    assert sum(held.values()) < 0.02 * plain.weight_bytes, "what they were is freed"


@pytest.mark.parametrize("weights", ["q8", "q4"])
@NATIVE
def test_a_row_has_the_same_bits_in_any_company(weights: str, tied: Path) -> None:
    assert_rows_are_alike(load_model(tied, weights=weights))


@NATIVE
def test_experts_may_have_fewer_bits(tmp_path: Path) -> None:
    config = MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2)
    folder = folder_of(config, tmp_path)
    exact, near = (logits(load_model(folder, dtype="float32", weights=weights), IDS) for weights in (None, "q8"))
    assert 0.0 < (near - exact).std() < 0.1 * exact.std()


@NATIVE
def test_a_target_of_four_bits_needs_no_copy_of_four_bits(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "_LEAST_OWN_BYTES", 0)
    said: list[str] = []
    wide, narrow = (load_model(tied, weights=weights) for weights in ("q8", "q4"))
    assert set(from_spec("auto", wide, tell=said.append).members) == {"self", "prompt-lookup"}
    assert set(from_spec("auto", narrow, tell=said.append).members) == {"prompt-lookup"}
    assert not said, "nobody asked for one"
    with pytest.raises(UnsupportedModelError, match="its own are quantised, and such a copy has 100% of their bytes"):
        from_spec("self:int4", narrow)
    with pytest.raises(UnsupportedModelError, match=r"such a copy has 1\d\d% of their bytes"):
        from_spec("self:int8", narrow)
    draft = wide.quantized(4)
    assert 0.0 < (logits(draft, IDS) - logits(wide, IDS)).std() < 0.6 * logits(wide, IDS).std()


@NATIVE
def test_what_cannot_be_quantised_is_refused_in_one_sentence(tied: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownOptionError, match=r"^unknown weights 'q6'; did you mean 'q8'\? valid: q4, q8|q4"):
        load_model(tied, weights="q6")
    with pytest.raises(UnsupportedModelError, match=r"cannot be given weights of 8 bits: .*leave --weights out$"):
        load_model(tied, weights="q8", fast_paths=False)
    file = write(tmp_path / "model.gguf", "llama", {"": "Q4_1"})
    with pytest.raises(
        UnsupportedModelError, match=r"cannot be given weights of 4 bits: its own are quantised already; leave"
    ):
        load_model(file, weights="q4")
