"""From a name to a model: folders, number formats, and an error that says what to do for each that is none."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from support import tiny_models
from support.tiny_models import VOCAB, build, stock, stock_greedy
from truedraft import Engine, SamplingParams, TruedraftError, load_model, machine
from truedraft.engine.prompts import encode_prompt
from truedraft.errors import ModelError, ModelNotFoundError, OptionError, UnknownOptionError, UnsupportedModelError
from truedraft.machine import pick_device, pick_dtype
from truedraft.models import HuggingFaceModel, loading
from truedraft.models.architecture import load_causal_lm
from truedraft.models.backends.base import BackendMaker
from truedraft.models.backends.native.build import built
from truedraft.models.backends.sequential import SequentialBackend
from truedraft.models.backends.stock import StockBackend
from truedraft.models.loading import fastest_backend, load_reader

PROMPT = [5, 9, 11, 3, 60]
CPU = torch.device("cpu")
WORDS = 90


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, template: str | None = None) -> None:
    vocab = {"<unk>": 0, "<end>": 1} | {f"w{i}": i for i in range(2, WORDS)}
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if template is not None:
        backend.add_special_tokens(["w7"])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<end>")
    made.chat_template = template
    made.save_pretrained(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(stock("llama"), tmp_path_factory.mktemp("llama"))


def says(error: TruedraftError, *words: str) -> None:
    """One line that holds these words, without anything of a traceback."""
    message = str(error)
    assert "\n" not in message
    # How deep a test's folder lies is not the message's doing.
    assert len(re.sub(r"/\S*/", "/", message)) < 400, message
    for word in words:
        assert word in message


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_a_folder_in_each_dtype(llama: Path, kind: str) -> None:
    model = load_model(llama, dtype=kind, device="cpu")
    assert model.dtype == getattr(torch, kind)
    assert {weight.dtype for weight in model.module.parameters()} == {model.dtype}
    assert (model.name, model.tokenizer, model.vocab_size, model.context_length) == (str(llama), None, VOCAB, 256)
    answer = Engine(model).generate(PROMPT, SamplingParams(max_tokens=24))
    assert len(answer.token_ids) == 24
    assert answer.text is None
    if kind == "float32":
        assert answer.token_ids == stock_greedy(stock("llama"), PROMPT, 24)


def test_a_text_names_a_folder(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(llama.parent)
    assert load_model(llama.name, dtype="float32").name == llama.name
    assert load_model(f"./{llama.name}", dtype="float32").vocab_size == VOCAB


def test_a_folder_with_a_tokenizer(tmp_path: Path) -> None:
    folder = save(stock("llama"), tmp_path / "words")
    save_tokenizer(folder)
    model = load_model(folder, dtype="float32")
    assert model.tokenizer is not None
    assert model.vocab_size == WORDS, "ids beyond the tokenizer are padding"
    assert model.eos_token_ids == (1,)
    answer = Engine(model).generate("w5 w9 w11 w3 w60", SamplingParams(max_tokens=24))
    assert answer.prompt_tokens == 5
    assert answer.text
    assert max(answer.token_ids) < WORDS


@pytest.mark.parametrize("ends", [None, '{"eos_token_id": [3, 4]}'])
@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_how_a_model_reads_is_known_without_its_weights(tmp_path: Path, ends: str | None, has_tokenizer: bool) -> None:
    folder = save(stock("llama"), tmp_path / "words")
    if has_tokenizer:
        save_tokenizer(folder)
    if ends is not None:
        (folder / "generation_config.json").write_text(ends)
    model = load_model(folder, dtype="float32")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    reader = load_reader(str(folder))
    if has_tokenizer and ends is not None:
        assert model.eos_token_ids == (3, 4, 1)
    for name in ("name", "vocab_size", "context_length", "eos_token_ids", "sources"):
        assert getattr(reader, name) == getattr(model, name)
    assert (reader.tokenizer is not None) is has_tokenizer
    prompt = "w5 w9" if has_tokenizer else [5, 9]
    assert encode_prompt(reader, prompt) == encode_prompt(model, prompt)


def test_a_model_whose_reading_cannot_be_known(llama: Path, tmp_path: Path) -> None:
    folder = copy_of(llama, tmp_path / "silent")
    with pytest.raises(ModelNotFoundError):
        load_reader(str(tmp_path / "nowhere"))
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"generation_config.json of .* holds a list"):
        load_reader(str(folder))


@pytest.mark.parametrize("fast", [True, False])
def test_auto_picks_what_is_fast(llama: Path, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_bfloat16", lambda device: fast)
    assert load_model(llama, device="cpu").dtype == (torch.bfloat16 if fast else torch.float32)
    assert pick_dtype("auto", CPU) == (torch.bfloat16 if fast else torch.float32)


def test_auto_takes_bfloat16_where_files_are_and_the_native_forward_runs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without instructions for it, too; other families and files become float32."""
    monkeypatch.setattr(machine, "has_bfloat16", lambda device: False)
    fitting = tiny_models.llama(hidden_size=64, num_attention_heads=2)
    short, natively = torch.bfloat16, built(torch.bfloat16).library is not None
    for number, (model, expected) in enumerate(
        [
            (build(fitting, 0, dtype=short), short if natively else torch.float32),
            (build(fitting, 0), torch.float32),
            (stock("llama", dtype=short), torch.float32),  # of odd sizes
            (stock("gpt2", dtype=short), torch.float32),
        ]
    ):
        folder = tmp_path / str(number)
        model.save_pretrained(folder)
        assert load_model(folder, device="cpu").dtype == expected, number
        assert load_model(folder, device="cpu", fast_paths=False).dtype == torch.float32


def test_auto_without_the_probes_of_torch_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, probe, raising=False)
    assert pick_dtype("auto", CPU) == torch.float32


def test_auto_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto") == torch.device("cuda")


def test_unusable_dtypes_and_devices(llama: Path) -> None:
    for given, words in (
        ({"dtype": "bfloat"}, ("unknown dtype 'bfloat'; did you mean 'bfloat16'?", "auto, bfloat16, float16, float32")),
        ({"dtype": "fp32"}, ("unknown dtype 'fp32'", "valid: auto")),
        ({"device": "cud"}, ("unknown device 'cud'; did you mean 'cuda'?", "valid: auto, cpu, cuda")),
        ({"device": "tpu"}, ("unknown device 'tpu'; did you mean 'cpu'?",)),
        ({"device": "cuda:99"}, ("'cuda:99' is not on this machine",)),
        ({"device": "cuda:first"}, ("'cuda:first' is not of the form cpu, cuda or cuda:N",)),
    ):
        with pytest.raises(OptionError) as caught:
            load_model(llama, **given)  # type: ignore[arg-type]
        says(caught.value, *words)
        assert isinstance(caught.value, UnknownOptionError) == ("cuda:" not in str(given))


def test_paths_that_are_no_model(llama: Path, tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "nowhere", ("there is no folder", "nowhere", "check the path")),
        (tmp_path, ("folder without config.json",)),
        (llama / "config.json", ("is a file; name the folder",)),
    ):
        with pytest.raises(ModelNotFoundError) as caught:
            load_model(path)
        says(caught.value, *words)


@pytest.mark.parametrize("name", ["gpt2-that-nobody-made", "nobody/made-this-model", "not a name!", "embedded:targt"])
def test_a_name_that_cannot_be_found(name: str) -> None:
    """Offline, as all tests run, a hub name that was never fetched cannot be found either."""
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(TruedraftError) as caught:
        load_model(name)
    assert isinstance(caught.value, ModelNotFoundError) or name.startswith("embedded:")
    says(caught.value, name.removeprefix("embedded:"))


def copy_of(llama: Path, folder: Path) -> Path:
    return Path(shutil.copytree(llama, folder))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "size", [{"num_hidden_layers": 10**9}, {"vocab_size": 10**12}, {"head_dim": 10**10}, {"num_hidden_layers": 1e12}]
)
@pytest.mark.parametrize("read", [partial(load_model, dtype="float32"), load_reader])
def test_sizes_that_no_weight_has_are_refused_before_anything_is_made(
    read: Callable[[str], Any], size: dict[str, Any], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_of(llama, tmp_path / "vast")
    edit_config(folder, **size)
    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("it was made"))
    with pytest.raises(ModelError) as caught:
        read(str(folder))
    says(
        caught.value, f"says {next(iter(size))} {next(iter(size.values()))}, and its weights are", "tensors of at most"
    )


def test_sizes_are_held_to_pickled_weights_too(llama: Path, tmp_path: Path) -> None:
    folder = copy_of(llama, tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert load_model(folder, dtype="float32").vocab_size == VOCAB
    edit_config(folder, num_hidden_layers=10**9)
    with pytest.raises(ModelError, match="says num_hidden_layers 1000000000, and its weights are"):
        load_model(folder, dtype="float32")


class Code:
    """What runs code where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self._mark,)


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b"PK\x03\x04", pickle.dumps([1, 2]), None])
def test_pickled_weights_that_are_none_or_hold_code(content: bytes | None, llama: Path, tmp_path: Path) -> None:
    folder = copy_of(llama, tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    mark = tmp_path / "ran"
    if content is None:
        torch.save({"model.norm.weight": Code(mark)}, folder / "pytorch_model.bin")
    else:
        (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load_model(folder, dtype="float32")
    says(caught.value, "cannot load the weights of", "pickled")
    assert not mark.exists()


Change = Callable[[Path], object]
BERT = BertConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)


def config(**changes: Any) -> Change:
    return partial(edit_config, **changes)


def content(file: str, text: str | bytes | slice) -> Change:
    """Replaces a file, or keeps a part of it."""

    def change(folder: Path) -> None:
        path = folder / file
        path.write_bytes(
            text.encode() if isinstance(text, str) else text if isinstance(text, bytes) else path.read_bytes()[text]
        )

    return change


def another(kind: type[PreTrainedModel], of: Any = BERT, **changes: Any) -> Change:
    def change(folder: Path) -> None:
        save(kind(of), folder)
        edit_config(folder, **changes)

    return change


def with_code(folder: Path) -> None:
    (folder / "own.py").write_text("raise SystemExit('ran')\n")
    edit_config(folder, model_type="own-type", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})


NO_CONFIG = ("", "{", "[1, 2]", "{}", '{"model_type": "no-such-type"}', f'{{"model_type": "llama", "a": {DEEP}}}')
WEIGHTS = "model.safetensors"
# transformers would go on without a broken generation_config.json, and answers would not end where they should.
ENDS = (
    ('{"eos_token_id"', "cannot be used"),
    ("[]", "holds a list"),
    (DEEP, "cannot be used"),
    ('{"eos_token_id": "end"}', "eos_token_id is 'end'"),
    ('{"eos_token_id": [3, true]}', "eos_token_id is [3, True]"),
)
REFUSED: list[tuple[Change, type[ModelError], tuple[str, ...]]] = [
    *((content("config.json", text), ModelError, ()) for text in NO_CONFIG),
    *((content("generation_config.json", text), ModelError, ("generation_config", what)) for text, what in ENDS),
    (with_code, UnsupportedModelError, ("remote code is not run",)),
    (content(WEIGHTS, ""), ModelError, ("cannot load the weights of",)),
    (content(WEIGHTS, "not safetensors at all"), ModelError, ("cannot load the weights of",)),
    (content(WEIGHTS, slice(0, -1000)), ModelError, ("cannot load the weights of",)),
    (lambda folder: (folder / WEIGHTS).unlink(), ModelError, ("cannot load the weights of",)),
    (config(intermediate_size=32), ModelError, ("cannot load the weights of",)),
    # transformers would fill missing layers with random numbers, and leave superfluous ones out.
    (config(num_hidden_layers=3), ModelError, ("lack", "'model.layers.2.")),
    (config(num_hidden_layers=1), ModelError, ("does not have", "'model.layers.1.", "too few layers?")),
    (config(quantization_config={"quant_method": "hqq"}), UnsupportedModelError, ("quantised by hqq", "does not read")),
    (another(BertModel), UnsupportedModelError, ("BertModel", "not a causal language model")),
    (another(BertForMaskedLM), UnsupportedModelError, ("BertForMaskedLM", "not a causal language model")),
    # It is loaded as a causal one, and its mask shows that it is none.
    (another(BertForMaskedLM, architectures=...), UnsupportedModelError, ("it is an encoder",)),
    (another(LlamaForSequenceClassification, stock("llama").config), UnsupportedModelError, ("not a causal",)),
]


def test_folders_that_cannot_be_loaded(llama: Path, tmp_path: Path) -> None:
    for number, (change, error, words) in enumerate(REFUSED):
        folder = copy_of(llama, tmp_path / f"unfit{number}")
        change(folder)
        with pytest.raises(error) as caught:
            load_model(folder, dtype="float32")
        says(caught.value, folder.name, *words)


def test_tensors_of_no_use_are_no_fault(llama: Path, tmp_path: Path) -> None:
    """Older checkpoints hold rotary frequencies, and causal masks, which families declare to be ignored."""
    folder = copy_of(llama, tmp_path / "old")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}, folder / "model.safetensors")
    assert load_model(folder, dtype="float32").vocab_size == VOCAB
    gpt2 = save(stock("gpt2"), tmp_path / "gpt2")
    weights = load_file(gpt2 / "model.safetensors")
    save_file(weights | {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8)}, gpt2 / "model.safetensors")
    assert load_model(gpt2, dtype="float32").vocab_size == VOCAB


CHAT = "{% for m in messages %}{{ m.role }} {{ m.content }} w7 {% endfor %}"


@pytest.mark.parametrize("template", [None, CHAT])
def test_what_tokenizer_and_template_end_an_answer_by_ends_it_too(
    tmp_path: Path, template: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A generation configuration that lacks the end of a turn let answers run past it."""
    folder = save(stock("llama"), tmp_path / "words")
    save_tokenizer(folder, template)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    model = load_model(folder, dtype="float32")
    ends = (3, 4, 1) if template is None else (3, 4, 1, 7)
    assert load_reader(str(folder)).eos_token_ids == model.eos_token_ids == ends
    told = "'<end>' too" if template is None else "'<end>', 'w7' too"
    assert f"answers end at {told}" in str(model.note)
    assert [told in each for each in caplog.messages] == [True]
    answer = Engine(model).generate(PROMPT, SamplingParams(max_tokens=8, allowed_token_ids=ends[-1:]))
    assert (answer.token_ids, answer.finish_reason) == ([], "stop")


def test_an_encoder_decoder(tmp_path: Path) -> None:
    config = T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )  # fmt: skip
    folder = save(T5ForConditionalGeneration(config), tmp_path / "t5")
    assert "an encoder-decoder" in str(load_model(folder, dtype="float32").note)
    with pytest.raises(UnsupportedModelError) as caught:
        load_causal_lm(folder)
    says(caught.value, "encoder-decoder (t5)", "causal models", "draft:FOLDER")
    edit_config(folder, decoder_start_token_id=..., bos_token_id=...)
    (folder / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(folder, dtype="float32")
    says(caught.value, "decoder_start_token_id", "add it")


def test_loading_says_nothing(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No bars and no warnings of the libraries below on the user's screen."""
    load_model(llama, dtype="float32")
    assert tuple(capfd.readouterr()) == ("", "")


@pytest.mark.parametrize("fast_paths", [True, False])
def test_a_checkpoint_in_many_files(llama: Path, tmp_path: Path, fast_paths: bool) -> None:
    whole = load_model(llama, dtype="float32", fast_paths=fast_paths)
    stock("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    sharded = load_model(tmp_path, dtype="float32", fast_paths=fast_paths)
    assert sharded.fingerprint == whole.fingerprint
    answers = [Engine(model).generate(PROMPT, SamplingParams(max_tokens=16)).token_ids for model in (sharded, whole)]
    assert answers[0] == answers[1]
    next(iter(sorted(tmp_path.glob("*.safetensors")))).unlink()
    with pytest.raises(ModelError) as refused:
        load_model(tmp_path, dtype="float32")
    says(refused.value, "cannot load the weights")


@pytest.mark.parametrize("backend", [StockBackend, fastest_backend])
def test_a_model_that_transformers_placed(llama: Path, backend: BackendMaker) -> None:
    """As by `device_map="auto"`, on one device."""
    pytest.importorskip("accelerate")
    placed = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32, device_map="auto")
    target = HuggingFaceModel(placed, None, "placed", backend)
    assert target.device == placed.device
    answer = Engine(target, "prompt-lookup", controller="fixed").generate(PROMPT, SamplingParams(max_tokens=16))
    assert answer.token_ids == stock_greedy(stock("llama"), PROMPT, 16)


def test_a_head_in_float32_beside_bfloat16_runs_one_text_at_a_time(llama: Path) -> None:
    """The vectors that enter it are of another dtype than its weights, as some families keep it."""
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    head = model.get_output_embeddings().float()
    head.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    target = HuggingFaceModel(model, None, "mixed", SequentialBackend)
    expected = stock_greedy(model, PROMPT, 12)
    answer = Engine(target, "prompt-lookup", controller="fixed").generate(PROMPT, SamplingParams(max_tokens=12))
    assert answer.token_ids == expected


@pytest.mark.parametrize("raised", [RuntimeError, KeyError])
def test_what_stumbles_packed_runs_one_text_at_a_time(
    llama: Path, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumbles(*_: object) -> None:
        raise raised("made for a mask")

    monkeypatch.setattr(loading, "fastest_backend", stumbles)
    target = load_model(llama, dtype="float32")
    assert "one text at a time" in (target.note or "")
    assert "made for a mask" in (target.note or "")
    answer = Engine(target).generate(PROMPT, SamplingParams(max_tokens=8))
    assert answer.token_ids == stock_greedy(stock("llama"), PROMPT, 8)


def test_want_of_memory_is_no_reason_to_run_otherwise(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(loading, "fastest_backend", full)
    with pytest.raises(torch.OutOfMemoryError):
        load_model(llama, dtype="float32")
