"""From a name to a model, with the fastest backend that fits it and this machine."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    GenerationConfig,
    Mxfp4Config,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

from truedraft.errors import (
    MissingExtraError,
    ModelError,
    ModelNotFoundError,
    OptionError,
    UnknownOptionError,
    UnsupportedModelError,
    first_line,
)
from truedraft.files import SMOLLM2, refuse_lost_model, user_path
from truedraft.machine import DTYPES, dtype_name, in_bytes, keep_rows_alike, pick_device, pick_dtype
from truedraft.models import gguf, quantized_folder
from truedraft.models.adapters import LowRank, merge_adapter, read_adapters
from truedraft.models.attention import AttentionPattern
from truedraft.models.backends.base import Backend, BackendMaker
from truedraft.models.backends.encoder_decoder import EncoderDecoderBackend
from truedraft.models.backends.fused import FusedBackend
from truedraft.models.backends.graphs import GraphBackend
from truedraft.models.backends.native import NativeBackend
from truedraft.models.backends.native.build import built
from truedraft.models.backends.parallel import follow, parallel_backend
from truedraft.models.backends.sequential import CopiedBackend, SequentialBackend, WholeTextBackend
from truedraft.models.backends.stock import StockBackend
from truedraft.models.base import LanguageModel, Reader
from truedraft.models.checkpoint import Checkpoint, file_of, refuse_vast_sizes, without_mtp
from truedraft.models.embedded import SMOLLM2_ON_THE_HUB, embedded_folder, smollm2_file, smollm2_missing
from truedraft.models.huggingface import HuggingFaceModel, context_of, eos_ids
from truedraft.models.llama import Llama
from truedraft.models.mapped import read_in, return_freed_memory
from truedraft.models.packed_linear import can_pack, multiplies_only_packed, pack_weights
from truedraft.models.padding import pad_model, padded_name, padded_size
from truedraft.models.probe import (
    check_against_stock,
    check_codes,
    probe_patterns,
    refuse_hidden_state,
    refuse_later_tokens,
)
from truedraft.models.quantized import dequantize, is_quantized
from truedraft.models.ranks import Ranks, refuse_unsharded
from truedraft.options import BITS, KV_DTYPES
from truedraft.progress import log_stage
from truedraft.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_UNRECORDED = "its forwards are not recorded as CUDA graphs"
# Classes of transformers that generate text. What else they read is left out.
_WRITING: tuple[Mapping[str, Any], ...] = (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)


def load_model(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    revision: str | None = None,
    fast_paths: bool = True,
    pad_to: str | None = None,
    adapter: str | Path | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    weights: str | None = None,
    kv_dtype: str = "auto",
    tensor_parallel: int = 1,
) -> HuggingFaceModel:
    """Load a causal language model, unmodified, and prepare it for packed forwards.

    Args:
        name: "smollm2", a folder, a GGUF file, a name on the Hugging Face hub, "embedded:target" or "embedded:draft".
        dtype: "auto" (what is fast on this device), "float32", "bfloat16" or "float16".
        device: "auto" (CUDA if there is one), "cpu", "cuda" or "cuda:N".
        fast_paths: pack weights and fuse layers where that is faster; results differ by rounding only.
        pad_to: "110M", "500M" or "7B": the same function at the cost of a model of that size, see `pad_model`.
        adapter: a folder written by peft, merged into the weights for all requests.
        adapters: folders of LoRA adapters by their names in requests (`SamplingParams.adapter`).
        weights: "q8" or "q4": quantise linear weights to 8 or 4 bits at load, in groups of 32; None leaves them.
        kv_dtype: "int8" keeps keys and values in 8 bits, scaled by token and head; "auto" in the model's dtype.
        tensor_parallel: processes of this machine that run the model together, each with a part of its weights and
            heads. Rank 0 starts the others unless a launcher did; they run and exit in this call.

    Raises ModelNotFoundError: no such folder or name, or the hub cannot be reached; UnsupportedModelError: not a causal
    language model, or a family that cannot run packed, be padded, or keep keys and values in 8 bits; OptionError: an
    unusable dtype, device or padding size; ModelError: its files cannot be read, or an adapter does not fit it;
    MissingExtraError: an adapter is given and peft is not installed, or a GGUF file and gguf is not.
    """
    log_stage(f"loading {name}")
    if weights is not None and weights not in BITS:
        raise UnknownOptionError.nearest("weights", weights, tuple(BITS))
    if kv_dtype not in KV_DTYPES:
        raise UnknownOptionError.nearest("kv dtype", kv_dtype, KV_DTYPES)
    in_codes = kv_dtype == "int8"
    if tensor_parallel != 1:
        _refuse_together(tensor_parallel, weights=weights, pad_to=pad_to, adapters=adapters, kv_dtype=in_codes)
    loaded = _load(str(name), dtype, device, revision, fast_paths, pad_to, adapter, adapters, tensor_parallel)
    if weights is not None:
        loaded.quantize(BITS[weights])
    if in_codes:
        loaded.quantize_cache()
    return_freed_memory()
    return loaded


def _load(
    name: str,
    dtype: str | torch.dtype,
    device: str | torch.device,
    revision: str | None,
    fast_paths: bool,
    pad_to: str | None,
    adapter: str | Path | None,
    adapters: Mapping[str, str | Path] | None,
    tensor_parallel: int,
) -> HuggingFaceModel:
    place = pick_device(device)
    kind = pick_dtype(dtype, place)
    if pad_to is not None:
        padded_size(pad_to)  # an unknown size is refused before anything is read
    source = resolve_source(name)
    read = partial(read_model, source, name, revision=revision, adapter=adapter, as_stored=True)
    checkpoint = Checkpoint(partial(read, torch.bfloat16, mapped=True), _source_files(source, revision, adapter))
    if tensor_parallel != 1:
        rest = {"fast_paths": fast_paths, "adapter": adapter and str(adapter), "tensor_parallel": tensor_parallel}
        asked = {"name": name, "dtype": dtype_name(kind), "device": str(device), "revision": revision} | rest
        return _load_together(source, place, read, checkpoint, asked)
    keep_rows_alike(place, kind)
    chosen = dtype != "auto" or kind is torch.bfloat16 or place.type != "cpu" or adapters or not fast_paths
    model = None if chosen else _emulated(source, name, revision, read)
    model = read(kind) if model is None else model
    by_codes = is_quantized(model) and place.type == "cpu" and fast_paths and pad_to is None and not adapters
    patterns = _native_patterns(model) if by_codes else None
    if patterns is None:
        _make_numbers(model, name)
    model = model.to(place)
    loras = read_adapters(model, adapters) if adapters else {}
    tokenizer = Tokenizer.load(source, revision=revision)
    backend: BackendMaker = fastest_backend if patterns is None else partial(fastest_backend, patterns=patterns)
    if loras or not fast_paths:
        backend = packed_backend(loras, fast_paths)
    with quiet_transformers():
        if pad_to is not None:
            return _checked(pad_model(model, pad_to), tokenizer, padded_name(name, pad_to), backend, checkpoint)
        try:
            return _checked(model, tokenizer, name, backend, checkpoint)
        except UnsupportedModelError as reason:
            if loras:
                raise
            why = reason
        run = partial(run_alone, tokenizer=tokenizer, name=name, reason=why, checkpoint=checkpoint)
        if model.config.is_encoder_decoder:
            return run(model, kind=EncoderDecoderBackend, fast_paths=fast_paths)
        del model
        # Read again for each attempt: a failed one may have taken the weights from their modules.
        for backend_kind in (SequentialBackend, CopiedBackend):
            with contextlib.suppress(UnsupportedModelError):
                return run(read(kind).to(place), kind=backend_kind, fast_paths=fast_paths)
        return run(read(kind).to(place), kind=WholeTextBackend, fast_paths=fast_paths)


def _make_numbers(model: PreTrainedModel, name: str) -> None:
    """Dequantise a model, and warn of the memory that this takes."""
    if is_quantized(model) or getattr(model, "quantized_by", None) is not None:
        size = sum(weight.numel() for weight in model.parameters()) * model.dtype.itemsize
        _log.warning(
            "%s: its quantised weights are made %s at load, for no forward here runs their codes: they take %s of "
            "memory",
            *(name, dtype_name(model.dtype), in_bytes(size)),
        )
    dequantize(model)


def _emulated(
    source: str, name: str, revision: str | None, read: Callable[[torch.dtype], PreTrainedModel]
) -> PreTrainedModel | None:
    """The model in bfloat16 (half the bytes of float32) if stored so and the native forward can run it, else None."""
    config = load_config(source, name, revision)
    stored = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    quantized = gguf.is_one(source) or quantized_folder.method_of(config) is not None
    if quantized or stored is not torch.bfloat16 or built(torch.bfloat16).library is None:
        return None
    model = read(torch.bfloat16)
    return None if _native_patterns(model) is None else model


def _refuse_together(count: int, **options: Any) -> None:
    if count < 1:
        raise OptionError(f"must be 1 or more, got {count}", field="tensor_parallel")
    if (option := next((each for each, given in options.items() if given), None)) is not None:
        raise OptionError(f"is for one process, and tensor_parallel is {count}; leave one of them out", field=option)


def _load_together(
    source: str,
    place: torch.device,
    read: Callable[[torch.dtype], PreTrainedModel],
    checkpoint: Checkpoint,
    asked: dict[str, Any],
) -> HuggingFaceModel:
    """A model in several processes, each of which gets the arguments of `load_model` that were asked for."""
    name, count, revision, kind = asked["name"], asked["tensor_parallel"], asked["revision"], DTYPES[asked["dtype"]]
    config = load_config(source, name, revision)
    method = "GGUF" if gguf.is_one(source) else quantized_folder.method_of(config)
    if method is not None:
        which = f"those of {name!r} are quantised by {method}; name the model that it was made from, in bfloat16"
        raise OptionError(f"takes weights that are not quantised, and {which}", field="tensor_parallel")
    refuse_unsharded(config, name, count)
    devices = 1 if ":" in str(place) else torch.cuda.device_count()
    if place.type == "cuda" and devices < count:
        needed = f"takes a CUDA device for each process, {count} in all"
        raise OptionError(f"{needed}, and device {asked['device']!r} gives {devices}", field="tensor_parallel")
    ranks = Ranks.start(count, asked | {"device": place.type})
    place = torch.device("cuda", ranks.rank) if place.type == "cuda" else place
    keep_rows_alike(place, kind)
    model = read(kind)
    backend = parallel_backend(ranks, place, name, asked["fast_paths"])
    with quiet_transformers():
        if ranks.rank:
            follow(backend(model), ranks, place, context_of(config.get_text_config())[0])
            sys.exit(0)
        tokenizer = Tokenizer.load(source, revision=revision)
        return _checked(model, tokenizer, name, backend, checkpoint)


def load_reader(name: str) -> Reader:
    """Load the tokenizer, the context length and the EOS ids of a model, without its weights.

    Raises ModelNotFoundError: there is no such name; ModelError: its files cannot be read, or name no number of ids.
    """
    source = resolve_source(name)
    config = load_config(source, name, None).get_text_config()
    refuse_broken_generation_config(source, name, None)
    generation = None
    with contextlib.suppress(OSError):  # there is none
        generation = GenerationConfig.from_pretrained(source)
    reader = Reader()
    reader.name, reader.tokenizer = name, Tokenizer.load(source)
    reported = [getattr(config, "vocab_size", None), None if reader.tokenizer is None else reader.tokenizer.vocab_size]
    sizes = [size for size in reported if size is not None]
    if not sizes:
        raise ModelError(f"no config.json or tokenizer of {name!r} says how many token ids there are; fetch both again")
    reader.vocab_size = min(sizes)
    reader.context_length, _ = context_of(config)
    reader.eos_token_ids, _ = eos_ids(generation, config, reader.tokenizer)
    return reader


def _checked(
    model: PreTrainedModel,
    tokenizer: Tokenizer | None,
    name: str,
    backend: BackendMaker,
    checkpoint: Checkpoint | None,
    refusals: Sequence[Callable[[LanguageModel], None]] = (),
) -> HuggingFaceModel:
    """A model with a backend, compared with its own forward and passed to all `refusals`."""
    if model.config.is_encoder_decoder and not refusals:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder, which runs neither packed nor with unmerged adapters; merge them"
        )
    check = check_codes(model, name) if is_quantized(model) else check_against_stock(model, name)
    try:
        loaded = HuggingFaceModel(model, tokenizer, name, backend, checkpoint)
        for refuse in (*refusals, check):
            refuse(loaded)
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{name} ({type(model).__name__}) does not run {'so' if refusals else 'packed'} ({first_line(error)})"
        ) from error
    return loaded


def run_alone(
    model: PreTrainedModel,
    tokenizer: Tokenizer | None,
    name: str,
    reason: UnsupportedModelError,
    kind: type[SequentialBackend] = SequentialBackend,
    fast_paths: bool = True,
    checkpoint: Checkpoint | None = None,
) -> HuggingFaceModel:
    """Run a model that cannot run packed, one text at a time, with its own attention; or raise the `reason`."""

    def backend(model: PreTrainedModel) -> Backend:
        fast = _pack(model, fast_paths)
        made = kind(model, str(reason))
        made.fast_paths = fast
        return made

    try:
        return _checked(model, tokenizer, name, backend, checkpoint, (refuse_hidden_state, refuse_later_tokens))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{reason}; nor does it run one text at a time: {error}") from error


def fastest_backend(model: PreTrainedModel, patterns: Sequence[AttentionPattern] | None = None) -> Backend:
    """The native forward if it fits, else the fused loop, else the model's own modules with packed weights.

    On CUDA recorded forwards if they fit, else the model's own modules. `patterns` None probes them.
    """
    patterns = probe_patterns(model) if patterns is None else patterns
    llama = Llama.of(model, patterns)
    if model.device.type == "cuda":
        misfit = GraphBackend.misfit(llama)
        if llama is not None and misfit is None:
            return GraphBackend(llama)
        backend = packed_backend({}, True)(model, patterns)
        backend.note = f"{_UNRECORDED}: {misfit}"
        return backend
    if llama is not None:
        if NativeBackend.fits(llama):
            return NativeBackend(llama)
        if FusedBackend.fits(llama):
            return FusedBackend(llama)
    return packed_backend({}, True)(model, patterns)


def _native_patterns(model: PreTrainedModel) -> Sequence[AttentionPattern] | None:
    """The model's attention patterns if the native forward can run it (quantised codes, bfloat16), else None."""
    patterns = probe_patterns(model)
    llama = Llama.of(model, patterns)
    return patterns if llama is not None and NativeBackend.fits(llama) else None


def packed_backend(adapters: Mapping[str, Mapping[str, LowRank]], fast_paths: bool) -> Callable[..., Backend]:
    """Make a backend of the model's own modules, with adapters and, with fast paths, packed weights."""

    def made(model: PreTrainedModel, patterns: Sequence[AttentionPattern] | None = None) -> Backend:
        known = probe_patterns(model) if patterns is None else patterns  # before anything is packed
        fast = _pack(model, fast_paths)
        backend = StockBackend(model, known, adapters)
        backend.fast_paths = fast
        if fast and multiplies_only_packed(model):
            backend.least_rows = 4  # another row costs nothing there, and from two on all have the same bits
            backend.any_threads = model.dtype is torch.float32  # see FusedBackend
        if adapters and model.device.type == "cuda":
            backend.note = f"{_UNRECORDED}: adapters stand beside its weights"
        return backend

    return made


def _pack(model: PreTrainedModel, fast_paths: bool) -> tuple[str, ...]:
    """Pack the weights where that is faster, before a backend hooks the LM head; returns the names of fast paths."""
    packs = fast_paths and can_pack(model.device, model.dtype) and pack_weights(model) > 0
    return ("packed weights",) if packs else ()


def resolve_source(name: str) -> str:
    """The folder of an embedded name, of smollm2 or of a GGUF file; folders and hub names are returned unchanged.

    Raises ModelNotFoundError: no such folder, or one without a model; UnknownOptionError: no such embedded model.
    """
    if name.startswith("embedded:"):
        return str(embedded_folder(name.removeprefix("embedded:")))
    if name == SMOLLM2:
        installed = smollm2_file()
        return SMOLLM2_ON_THE_HUB if installed is None else str(gguf.folder_of(installed))
    path = user_path(name, ModelNotFoundError)
    files = gguf.models_in(path) if path.is_dir() and not (path / "config.json").is_file() else []
    refuse_lost_model(name)
    if (path.suffix == ".gguf" and path.is_file()) or len(files) == 1:
        return str(gguf.folder_of(files[0] if files else path))
    if files:
        named = ", ".join(each.name for each in files)
        raise ModelNotFoundError(f"{name!r} is a folder with {len(files)} GGUF files; name one of them: {named}")
    if path.is_dir():
        return str(path)
    if path.exists():
        raise ModelNotFoundError(f"{name!r} is a file; name the folder that holds config.json and the weights")
    return name


def _source_files(source: str, revision: str | None, adapter: str | Path | None) -> list[Path]:
    found: list[Path] = []
    if gguf.is_one(source):
        found = gguf.files_of(source)
    else:
        with contextlib.suppress(OSError):  # reading such a name raises its own error
            config = file_of(source, "config.json", revision)
            found = [] if config is None else list(Path(config).parent.iterdir())
    return found if adapter is None else [*found, *user_path(adapter, ModelError).glob("*")]


def read_model(
    source: str,  # from `resolve_source`
    name: str,
    dtype: torch.dtype,
    revision: str | None = None,
    adapter: str | Path | None = None,  # folder of an adapter to merge into the weights
    *,
    as_stored: bool = False,  # leave matrices `quantized` if possible, unless an adapter is merged
    mapped: bool = False,  # leave weights in their files, for callers that read each once and soon
) -> PreTrainedModel:
    """The model as transformers loads it, on the CPU, with exactly its weights.

    Missing weights would be filled with random numbers and superfluous ones ignored, so both are refused. Raises
    ModelNotFoundError: there is no such name; UnsupportedModelError: it is no causal language model, or quantised;
    ModelError: its files cannot be read, do not fit the configuration, or the adapter does not fit it.
    """
    config = load_config(source, name, revision)
    method = quantized_folder.method_of(config)
    if method is not None and method not in {*quantized_folder.READ_HERE, *quantized_folder.BY_TRANSFORMERS}:
        raise UnsupportedModelError(
            f"the weights of {name!r} are quantised by {method}, which truedraft does not read; name the model that it "
            "was made from, in bfloat16 or float32, or one by GPTQ, AWQ or compressed-tensors"
        )
    kind = _class_of(config, name)
    refuse_broken_generation_config(source, name, revision)
    model = _load_weights(kind, source, config, name, dtype, revision)
    if not mapped:
        read_in(model)
    if adapter is not None or not as_stored:
        dequantize(model)
    return model if adapter is None else merge_adapter(model, adapter)


def load_config(source: str, name: str, revision: str | None) -> Any:
    """The configuration of a resolved source.

    Raises ModelNotFoundError: there is no such name; UnsupportedModelError: it needs remote code; ModelError: its
    config.json cannot be read, or names larger sizes than its weights have.
    """
    try:
        refuse_vast_sizes(PretrainedConfig.get_config_dict(source, revision=revision)[0], source, name, revision)
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        if "custom code" in str(error):
            raise UnsupportedModelError(
                f"{name!r} is made by code that comes with it, and such remote code is not run here; use a model of a "
                "family that transformers has itself"
            ) from error
        if Path(source).is_dir():
            raise ModelError(f"cannot read the configuration of {name!r}: {first_line(error)}") from error
        if name == SMOLLM2:
            raise ModelNotFoundError(
                f"{name} is not installed, and the Hugging Face hub did not give {source} ({first_line(error)}); run "
                f"{smollm2_missing()}"
            ) from error
        raise ModelNotFoundError(
            f"found no model {name!r}: there is no such folder, and the Hugging Face hub did not give it "
            f"({first_line(error)})"
        ) from error


def _load_weights(
    kind: Any, source: str, config: Any, name: str, dtype: torch.dtype, revision: str | None
) -> PreTrainedModel:
    if gguf.is_read_here(source):
        return gguf.load_weights(Path(source), config, name, dtype)
    method = quantized_folder.method_of(config)
    given = gguf.place_of(source) | {"revision": revision}
    if method is None:
        return _load_by_transformers(kind, config, name, dtype, given)
    if method in quantized_folder.BY_TRANSFORMERS:
        if method == "mxfp4":
            given["quantization_config"] = Mxfp4Config(dequantize=True)
        model = _load_by_transformers(kind, config, name, dtype, given)
        quantized_folder.make_numbers(model)
    else:
        folder = quantized_folder.QuantizedFolder(source, config, name, revision)
        config = copy.deepcopy(config)
        del config.quantization_config
        found = folder.by_codes(config, dtype) if kind is AutoModelForCausalLM else None
        if found is None:
            with torch.device("meta"):
                kind = type(kind.from_config(config)) if hasattr(kind, "from_config") else kind
            given = {"pretrained_model_name_or_path": None, "state_dict": folder.numbers(dtype)}
            found = _load_by_transformers(kind, config, name, dtype, given)
        model = found
        model.config.name_or_path = source
        with contextlib.suppress(OSError):  # there is none
            model.generation_config = GenerationConfig.from_pretrained(source, revision=revision)
    model.quantized_by = method
    return model


def _load_by_transformers(
    kind: Any, config: Any, name: str, dtype: torch.dtype, given: Mapping[str, Any]
) -> PreTrainedModel:
    try:
        with quiet_transformers():
            model, report = kind.from_pretrained(
                config=config, dtype=dtype, trust_remote_code=False, output_loading_info=True, **given
            )
    except ImportError as error:
        raise MissingExtraError(
            f"the weights of {name!r} need a package that is not installed ({first_line(error)}); install it"
        ) from error
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # an invalid pickle, or one that names code, raises errors of many kinds
        raise ModelError(f"cannot load the weights of {name!r}: {first_line(error)}") from error
    missing, superfluous = sorted(report["missing_keys"]), without_mtp(sorted(report["unexpected_keys"]))
    if superfluous and not missing:  # the family's ignored keys are not among them
        raise ModelError(
            f"the weights of {name!r} hold {len(superfluous)} tensor(s) that its config.json does not have, the "
            f"first {superfluous[0]!r}; fetch the files again, or mend config.json (has it too few layers?)"
        )
    if missing:
        raise ModelError(
            f"the weights of {name!r} lack {len(missing)} of the tensors that its config.json has, the first "
            f"{missing[0]!r}; fetch the files again, or mend config.json"
        )
    return model


def refuse_broken_generation_config(source: str, name: str, revision: str | None) -> None:
    """Raise ModelError for a generation_config.json that transformers would ignore, and with it the EOS ids."""
    found = file_of(source, "generation_config.json", revision)
    try:
        read = {} if found is None else json.loads(Path(found).read_text(encoding="utf-8"))
        if not isinstance(read, dict):
            raise TypeError(f"it holds a {type(read).__name__} in place of an object")
        ends = read.get("eos_token_id")
        if not all(type(end) is int for end in (ends if isinstance(ends, list) else [0 if ends is None else ends])):
            raise TypeError(f"eos_token_id is {ends!r}, which is neither an id nor a list of ids")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelError(
            f"generation_config.json of {name!r} cannot be used ({first_line(error)}); it says what ends an answer: "
            "fetch it again, or remove it to use config.json and the tokenizer"
        ) from error


def _class_of(config: Any, name: str) -> Any:
    """The class that loads a model: its own if it is multimodal or transformers has no causal class for it."""
    kind, architectures = config.model_type, config.architectures or []
    if config.is_encoder_decoder:
        if kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
            return AutoModelForSeq2SeqLM
        if kind in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES:
            return AutoModelForSpeechSeq2Seq
        raise UnsupportedModelError(
            f"{name!r} is an encoder-decoder ({kind}) that reads something else than text and sound; name one that "
            "writes text for these"
        )
    causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not architectures and not causal:
        raise UnsupportedModelError(f"{name!r} is of type {kind!r}, which transformers cannot load as causal")
    named = [each for table in _WRITING for each in table.values()]
    writers = {each for some in named for each in ([some] if isinstance(some, str) else some)}
    if architectures and not writers.intersection(architectures):
        raise UnsupportedModelError(
            f"{name!r} is a {architectures[0]}, not a causal language model; name a model that continues text"
        )
    if causal and not (architectures and architectures[0].endswith("ForConditionalGeneration")):
        return AutoModelForCausalLM
    return getattr(transformers, architectures[0])


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off transformers' progress bars and warnings while it loads or saves."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
