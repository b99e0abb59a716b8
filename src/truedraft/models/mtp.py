"""MTP layers (multi-token prediction), which checkpoints contain and transformers ignores at load.

DeepSeek-V3 (arXiv 2412.19437), section 2.2: the normed embedding of a token and the normed vector of the previous token
pass, concatenated, through one matrix, a decoder layer of the model's family, a norm and the model's LM head. The
decoder layer runs as a one-layer model of the family, so all of it is transformers' own.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, PreTrainedModel

from truedraft.errors import ModelError, ModelNotFoundError, TruedraftError, UnsupportedModelError, first_line
from truedraft.files import user_path
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.cache import CachePool
from truedraft.models.checkpoint import SPECULATORS, MtpNames, mtp_layers, tensors_of
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.loading import load_config, packed_backend, quiet_transformers, resolve_source

_COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the model's own
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..+)")
_PUBLISHED = ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # families with layers in `speculators` 0.9
_AGAIN, _NAMED = "fetch the files again", 4  # most tensors that a message names


class _Entry(nn.Module):
    """Replaces the embedding: the layer's input is made of `given`, embeddings and vectors `[rows, width]` each."""

    def __init__(self, norm: Any, config: Any) -> None:
        super().__init__()
        self.of_embedding = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.of_vector = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.fusion = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.given: tuple[Tensor, Tensor] | None = None

    def forward(self, ids: Tensor) -> Tensor:
        """`[1, rows]`, which is not read, to `[1, rows, width]`; rows after those of `given` are zeros."""
        weight: Tensor = self.of_vector.weight
        if self.given is None:
            return weight.new_zeros(1, ids.shape[1], len(weight))
        embedded, vectors = self.given
        entering: Tensor = self.fusion(torch.cat([self.of_embedding(embedded), self.of_vector(vectors)], dim=-1))
        return pad(entering, (0, 0, 0, ids.shape[1] - len(entering)))[None]


class MtpLayer:
    """The first MTP layer of a checkpoint, as a one-layer `model` with its final norm; made by `read_mtp`."""

    def __init__(self, model: PreTrainedModel, *, zeroes_first: bool, context: int) -> None:
        self._entry: Any = model.get_input_embeddings()
        self._zeroes_first = zeroes_first
        self._device = model.device
        self._backend = packed_backend({}, True)(model)
        self.pool: CachePool = self._backend.new_pool(context)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], embedded: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Read pairs of a token's embedding and the vector before it, `[total, width]` each, into the caches.

        Returns the layer's output at the requested rows, `[rows, width]`, before its final norm and after it.
        """
        if self._zeroes_first:
            first = [each.cache.length + depth == 1 for each in segments for depth in each.shape.depths[each.written :]]
            if any(first):
                embedded = embedded.masked_fill(torch.tensor(first, device=embedded.device)[:, None], 0.0)
        self._entry.given = embedded, vectors
        try:
            output = self._backend.forward(segments, self._device, (0,))
        finally:
            self._entry.given = None
        return output.layers[0], output.hidden


def brings_mtp(target: LanguageModel) -> bool:
    """Whether the files of a model contain an MTP layer; no tensor is read."""
    if not isinstance(target, HuggingFaceModel) or not target.module.config.name_or_path:
        return False
    with contextlib.suppress(TruedraftError, OSError):
        return bool(mtp_layers(tensors_of(target.module.config.name_or_path, target.name, _revision(target))))
    return False


def read_mtp(target: LanguageModel, folder: str | None = None) -> MtpLayer:
    """The first MTP layer of a model's own files, or of a folder that `speculators` wrote.

    Raises UnsupportedModelError: the model is not of files, or its family's layer cannot run so; ModelNotFoundError:
    there is no such layer; ModelError: tensors are missing, superfluous or of other shapes; names them.
    """
    if not isinstance(target, HuggingFaceModel) or not (folder or target.module.config.name_or_path):
        raise UnsupportedModelError(f"{target.name} was not loaded from files that could hold MTP layers")
    config = target.module.config
    name, names, found = _layer_in(config.name_or_path, target.name, _revision(target), folder)
    with _running_as(config, name):
        model = _model_of(_config_of_one(config), names, found, name, target.dtype)
        model = model.eval().requires_grad_(False).to(target.device)
        return MtpLayer(model, zeroes_first=names.zeroes_first, context=target.context_length)


def published_mtp(name: str, folder: str | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An MTP layer as `speculators` stores it: the configuration of the target's layers, and the layer's tensors.

    Tensors keep their dtype; those of separate experts are concatenated. `folder` is by default the target's own; the
    target's other weights are not read. Raises what `read_mtp` does, also for several dtypes, and UnsupportedModelError
    for a family of which `speculators` has no layers.
    """
    source = resolve_source(name)
    config = load_config(source, name, None)
    said, names, found = _layer_in(source, name, None, folder)
    text = config.get_text_config(decoder=True)
    if text.model_type not in _PUBLISHED:
        raise UnsupportedModelError(
            f"speculators 0.9 has MTP layers of {', '.join(_PUBLISHED)}, and that of {said!r} is of {text.model_type}; "
            "draft with it here, where its own files hold it: --drafter mtp"
        )
    dtypes = {tensor.dtype for each, tensor in found.items() if each.startswith(names.prefix)}
    if len(dtypes) > 1:
        raise ModelError(f"the MTP layer of {said!r} holds numbers of several kinds ({dtypes}); {_AGAIN}")
    with _running_as(config, said):
        model = _model_of(_config_of_one(config), names, found, said, *dtypes)
    start = f"{model.base_model_prefix}."
    ours = (f"{start}embed_tokens.{part}.weight" for part in ("fusion", "of_embedding", "of_vector"))
    parts, layer = dict(zip((*ours, f"{start}norm.weight"), SPECULATORS.parts, strict=True)), f"{start}layers.0."
    return text.to_diff_dict(), {
        SPECULATORS.prefix + parts.get(each, each.removeprefix(layer)): tensor
        for each, tensor in model.state_dict().items()
        if each in parts or each.startswith(layer)
    }


def _layer_in(
    source: str, name: str, revision: str | None, folder: str | None
) -> tuple[str, MtpNames, dict[str, Tensor]]:
    if folder is not None:
        path, name = user_path(folder, ModelNotFoundError), folder
        if not path.is_dir():
            raise ModelNotFoundError(f"there is no folder {folder!r} with an MTP layer; check the path")
        source, revision = str(path), None
    places = tensors_of(source, name, revision)
    layers = mtp_layers(places)
    if not layers:
        raise ModelNotFoundError(
            f"the files of {name!r} hold no MTP layer (mtp.*, or after the last layer one with eh_proj); name a model "
            "that has one, or a folder of speculators' MTPDraftModel"
        )
    prefixes = tuple(each.prefix for each in layers)
    return name, layers[0], {each: place.read() for each, place in places.items() if each.startswith(prefixes)}


@contextlib.contextmanager
def _running_as(config: Any, name: str) -> Iterator[None]:
    try:
        yield
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"the MTP layer of {name!r} does not run as a layer of {config.model_type} ({first_line(error)})"
        ) from error


def _revision(target: HuggingFaceModel) -> str | None:
    return getattr(target.module.config, "_commit_hash", None)


def _config_of_one(whole: Any) -> Any:
    config = copy.deepcopy(whole.get_text_config(decoder=True))
    types = {"layer_types": ("mtp_layer_types", "full_attention"), "mlp_layer_types": ("mtp_mlp_layer_types", None)}
    for name, (own, usual) in types.items():
        given = getattr(config, name, None)
        if given:
            setattr(config, name, list(getattr(config, own, None) or [usual or given[-1]])[:1])
    config.num_hidden_layers = 1
    for name, value in (("first_k_dense_replace", 0), ("mlp_only_layers", [])):
        if hasattr(config, name):
            setattr(config, name, value)
    config.vocab_size, config.pad_token_id, config.tie_word_embeddings = 1, None, False
    config.__dict__.pop("quantization_config", None)
    return config


def _model_of(config: Any, names: MtpNames, found: dict[str, Tensor], name: str, dtype: torch.dtype) -> PreTrainedModel:
    own = {each: tensor for each, tensor in found.items() if each.startswith(names.prefix)}
    for each in _COPIES:
        own.pop(names.prefix + each, None)
    parts = [names.prefix + part for part in names.parts]
    known = {*parts, *(each for each in own if names.of_layer(each) is not None or names.is_further(each))}
    _refuse(name, {*parts, *_expected_experts(own)} - own.keys(), own.keys() - known)
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config))
    start = f"{kind.base_model_prefix}."
    given = {part: own.pop(names.prefix + part) for part in names.parts}
    row = torch.zeros(1, config.hidden_size, dtype=dtype)
    state = {f"{start}embed_tokens.weight": row, "lm_head.weight": row.clone()}
    state |= {f"{start}norm.weight": given[names.final]}
    state |= {f"{start}layers.0.{inner}": tensor for each, tensor in own.items() if (inner := names.of_layer(each))}
    with quiet_transformers():
        model, report = kind.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )

    def theirs(ours: str) -> str:
        of_layer = ours.replace(f"{start}layers.0.", names.prefix + names.layer)
        return of_layer.replace(f"{start}norm.weight", names.prefix + names.final)

    entry = _Entry(type(model.get_decoder().norm), config).to(dtype)
    others = [theirs(each[0]) for each in report["mismatched_keys"]]
    for part, module in zip(names.parts, (entry.fusion, entry.of_embedding, entry.of_vector), strict=False):
        if given[part].shape != module.weight.shape:
            others.append(names.prefix + part)
        module.weight.data = given[part].to(dtype)
    _refuse(name, map(theirs, report["missing_keys"]), map(theirs, report["unexpected_keys"]), others)
    model.set_input_embeddings(entry)
    return model


def _expected_experts(names: Iterable[str]) -> list[str]:
    matches = [match for name in names if (match := _EXPERT.fullmatch(name))]
    starts, numbers, ends = ({match[group] for match in matches} for group in (1, 2, 3))
    return list(map("".join, product(starts, numbers, ends)))


def _refuse(name: str, missing: Iterable[str], superfluous: Iterable[str], others: Iterable[str] = ()) -> None:
    for said, which, expected in (
        ("lack", sorted(missing), "these"),
        ("hold", sorted(superfluous), "none of that name"),
        ("have in another shape", sorted(others), "those"),
    ):
        if which:
            more = f" and {len(which) - _NAMED} more" if len(which) > _NAMED else ""
            raise ModelError(
                f"the files of {name!r} {said} {', '.join(which[:_NAMED])}{more}, and an MTP layer of its sizes has "
                f"{expected}; {_AGAIN}"
            )
