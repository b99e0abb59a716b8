"""Small forwards at load that find out how a model has to be run.

`probe_patterns`: which positions each attention call may see. A short forward runs with a mask function that records
its arguments and an attention function that records which mask it received and returns zeros. So the gradients of the
last row's logits by all other embeddings must be exactly zero, else there is a convolution or a recurrent state.

`check_against_stock`: whether the packed forward gives the logits of the model's own forward, up to rounding. How far
rounding moves them is measured: its own forward is run again with every module's output moved at random by up to one
unit in the last place (Monte Carlo arithmetic). Over about 90 families and three scales of random weights, a correct
packed forward stayed within 1.3 times the largest such move. A wrong mask or position exceeds it unless a model's
weights are so small that attention hardly moves its logits.
"""

from __future__ import annotations

import inspect
import itertools
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import embedding, linear
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from truedraft.core.tree import TreeShape, chain_shape
from truedraft.errors import UnsupportedModelError, first_line
from truedraft.models.attention import AttentionPattern, Chunk, Full, Window
from truedraft.models.backends.encoder_decoder import Encoded
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.cache import RequestCache
from truedraft.models.quantized import is_quantized, quantized_of
from truedraft.models.recurrence import cache_keyword, carries_states, carrying_modules, without_states
from truedraft.models.sources import Sources

_NAME = "truedraft-probe"
# Patterns wider than this are taken as full; longer contexts are not supported anyway.
_FAR = 2**18
_TOKENS = 8
_ATTENTION_ONLY = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_WITHIN_A_TOKEN = {"mlp", "moe", "dense", "sparse"}
_LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
_HARMLESS = {
    *("position_ids", "use_cache", "logits_to_keep", "sliding_window", "softcap", "s_aux", "is_causal", "dropout"),
    "scaling",
}

_CONTEXT = 5
# After a context of 5: two branches, the second of length two.
_TREE = TreeShape((-1, 0, 0, 2))
# The texts by which transformers computes the tree: its two paths, the first padded; and where in them each node is.
_TEXTS = ((0, 1, 1), (0, 2, 3))
_PLACES = ((0, _CONTEXT), (0, _CONTEXT + 1), (1, _CONTEXT + 1), (1, _CONTEXT + 2))
# Rows of the compared forwards: kernels differ for one, two, three and four rows, and some for many.
_COUNTS = (64, 8, 1, 7)
_DRAWS = 4
# Times the largest move by rounding, measured over a few draws.
_ALLOWED = 2.0
# In float32 the order of sums matters too, and moved outputs do not show it: relative to the spread of the logits.
_FLOOR = {torch.float32: 1e-3, torch.float64: 1e-3}

# For models with quantised weights: tokens, ids that are compared, and the allowed difference relative to the spread.
_CODES_TOKENS, _SOME_IDS, _ALLOWED_BY_CODES = 20, 1024, 0.1

MaskFunction = Callable[..., Any]


class _Recorder:
    def __init__(self) -> None:
        self.functions: dict[int, MaskFunction] = {}
        self.masks: list[Tensor] = []  # kept alive, so that their ids stay unique
        self.seen: list[MaskFunction | None] = []

    def make_mask(self, *, q_length: int, kv_length: int, mask_function: MaskFunction, **_: Any) -> Tensor:
        mask = torch.zeros(1, 1, q_length, kv_length)
        self.masks.append(mask)
        self.functions[id(mask)] = mask_function
        return mask

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        given = {name for name, value in kwargs.items() if value is not None and not name.startswith("output_")}
        if unknown := sorted(given - _HARMLESS):
            raise UnsupportedModelError(
                f"{type(module).__name__} passes {', '.join(unknown)} to its attention, which truedraft cannot run "
                "packed; use another model"
            )
        self.seen.append(self.functions.get(id(attention_mask)))
        heads, count = query.shape[1:3]
        return query.new_zeros(query.shape[0], count, heads, value.shape[-1]), None


def probe_patterns(model: nn.Module) -> list[AttentionPattern]:
    """The pattern of each attention call, in order; UnsupportedModelError for other mixing, masks or patterns."""
    name = type(model).__name__
    _refuse_scaled_queries(model, name)
    carrying = carrying_modules(model)
    if not carrying:
        _refuse_other_layers(model, name)
    recorder = _Recorder()
    before = _attention_names(model.config)
    AttentionInterface.register(_NAME, recorder.attend)
    AttentionMaskInterface.register(_NAME, recorder.make_mask)
    try:
        model.set_attn_implementation(_NAME)  # type: ignore[operator]
        if model.config._attn_implementation != _NAME and not carrying:  # type: ignore[union-attr]
            raise UnsupportedModelError(
                f"{name} does not use transformers' attention registry, so texts cannot share a forward"
            )
        with without_states(carrying):
            mixes = _mixes_without_attention(model)
    finally:
        model.set_attn_implementation(before)  # type: ignore[operator]
    if mixes:
        parents = [each for each in model.modules() if any(isinstance(part, _CONVOLUTIONS) for part in each.children())]
        where = f" (in {', '.join(sorted({type(each).__name__ for each in parents}))})" if parents else ""
        raise UnsupportedModelError(
            f"{name} lets tokens see each other outside its attention{where}: that is a convolution or a recurrent "
            "state, which speculation cannot take back; use a model with attention layers only"
        )
    if not recorder.seen and not carrying:
        raise UnsupportedModelError(f"{name} never called its attention function; truedraft cannot run it")
    return [_classify(function, name) for function in recorder.seen]


def _attention_names(config: Any) -> dict[str, Any]:
    """The attention of a model and of its parts, except parts that are no model (Dbrx's `attn_config`)."""
    parts = ((key, getattr(config, key)) for key in config.sub_configs)
    names = {key: own for key, part in parts if part is not None and (own := _attention_names(part))}
    return ({} if config._attn_implementation is None else {"": config._attn_implementation}) | names


def _refuse_scaled_queries(model: nn.Module, name: str) -> None:
    """Llama 4 scales queries of layers without rotary positions by their index in the pack, not by their position."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    if getattr(config, "attn_temperature_tuning", False) and 0 in (getattr(config, "no_rope_layers", None) or ()):
        raise UnsupportedModelError(
            f"{name} scales its queries by their place in the batch (attn_temperature_tuning), so packed its answers "
            "would depend on their neighbours"
        )


def _refuse_other_layers(model: nn.Module, name: str) -> None:
    """Refuse layers that the configuration itself names as something else than attention, before any forward."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    kinds = next((found for place in _LAYER_KINDS if (found := getattr(config, place, None))), ())
    others = sorted({str(kind) for kind in kinds} - _ATTENTION_ONLY - _WITHIN_A_TOKEN)
    if others:
        raise UnsupportedModelError(
            f"{name} has layers of the kind {', '.join(map(repr, others))}, which keep a state of their own (a "
            "convolution, a recurrence or an index), and speculation cannot take that back; use a model with attention "
            "layers only"
        )


class _WithoutProducts(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear:
            return args[0].new_zeros(*args[0].shape[:-1], len(args[1]))
        return func(*args, **(kwargs or {}))


@torch.inference_mode(False)
def _mixes_without_attention(model: nn.Module) -> bool:
    embedded: list[Tensor] = []

    def watch(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        # Replaces embeddings: that of a padding id is zero, which would hide products with it.
        numbers = torch.arange(output.numel(), dtype=torch.float32, device=output.device).cos()
        embedded.append(numbers.view_as(output).to(output.dtype).requires_grad_())
        return embedded[-1].clone()  # some families scale it in place

    device = next(model.parameters()).device
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device=device)
    places = torch.arange(_TOKENS, device=device)
    if is_quantized(model):
        # There are no weights to multiply by yet, and only families with known layers keep their codes.
        with _WithoutProducts():
            model(input_ids=ids, position_ids=places[None], use_cache=False, logits_to_keep=1)
        return False
    hook = model.get_input_embeddings().register_forward_hook(watch)  # type: ignore[operator]
    # Rows are given by a tensor, as in packed forwards: some families cut their masks to an integer.
    given = {"input_ids": ids, "position_ids": places[None], "use_cache": False, "logits_to_keep": places}
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    # Gradients do not pass through tensors that were made in inference mode.
    copies = {name: tensor.clone() for name, tensor in tensors if tensor.is_inference()}
    try:
        with torch.enable_grad():
            logits = functional_call(model, copies, kwargs=given).logits
            if not embedded:
                raise UnsupportedModelError(f"{type(model).__name__} does not look its tokens up in its own embedding")
            weights = torch.linspace(1.0, 2.0, logits.shape[-1], device=device)
            last = (logits[0, -1].float() * weights).sum()
            gradients = torch.autograd.grad(last, embedded, allow_unused=True, materialize_grads=True)
    finally:
        hook.remove()
    return any(bool((gradient[:, :-1] != 0).any()) for gradient in gradients)


def _classify(function: MaskFunction | None, name: str) -> AttentionPattern:
    if function is None:
        raise UnsupportedModelError(f"{name} calls attention without a causal mask; truedraft cannot run it")
    if _allows(function, 0, 1):
        raise UnsupportedModelError(f"{name} lets tokens see later ones: it is an encoder, not a causal language model")
    low, next_low = _lowest(function, _FAR), _lowest(function, _FAR + 1)
    if low == next_low == 0:
        return Full()
    if next_low == low + 1:
        return Window(_FAR - low + 1)
    if low == next_low:
        return Chunk(low - _lowest(function, low - 1))
    raise UnsupportedModelError(f"{name} uses an attention pattern that is neither full, a window nor chunks")


def _lowest(function: MaskFunction, query: int) -> int:
    """The lowest key that `query` may see; allowed keys are assumed contiguous up to the query."""
    return bisect_left(range(query), True, key=lambda key: _allows(function, query, key))


def _allows(function: MaskFunction, query: int, key: int) -> bool:
    index = [torch.tensor(value) for value in (0, 0, query, key)]
    with _EndlessText():
        return bool(function(*index))


class _EndlessText(TorchFunctionMode):
    """Masks that look up tokens (which image does it belong to?) get the probe's last token for all later positions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[1], tuple):
            table, places = args
            args = (table, tuple(place.clamp(max=size - 1) for place, size in zip(places, table.shape, strict=False)))
        return func(*args, **(kwargs or {}))


def some_ids(count: int, vocab_size: int, device: torch.device) -> Tensor:
    """Token ids for a forward that tests a model: `[count]`, different ones if there are as many."""
    return torch.arange(1, count + 1, device=device) * 7919 % vocab_size


def check_against_stock(model: PreTrainedModel, name: str) -> Callable[[LanguageModel], None]:
    """Run the stock forward before attention is redirected; it and the returned check raise UnsupportedModelError."""
    ids = some_ids(_CONTEXT + len(_TREE), len(model.get_input_embeddings().weight), model.device)
    texts = torch.stack([torch.cat([ids[:_CONTEXT], ids[_CONTEXT:][list(path)]]) for path in _TEXTS])
    sources = Sources.of(model, _FAR) if model.config.is_encoder_decoder else None
    if sources is not None:
        opening = torch.tensor(sources.opening, device=model.device)
        texts = torch.cat([opening.expand(len(texts), -1), texts], dim=1)
    with torch.inference_mode():
        stock = _by_itself(model, texts, name)  # [texts, tokens, vocab]
        # Where a router nearly ties, rounding makes a jump at that position only.
        moved = range(len(texts)) if any("expert" in name for name, _ in model.named_modules()) else [-1]
        draws = texts[list(moved)].repeat_interleave(_DRAWS, 0)
        error = (_with_rounding(model, draws).float() - stock[list(moved)].repeat_interleave(_DRAWS, 0)).abs()
        rounding = error.max()
        if carries_states(model):
            # Recurrences have another formula for one token than for many, with another order of sums.
            steps = torch.cat([_by_steps(model, text[None]) for text in texts])  # RWKV takes several texts for one
            rounding = torch.maximum(rounding, (steps - stock[:, _CONTEXT:]).abs().max())
            stock[:, _CONTEXT:] = steps
    expected = torch.stack([stock[text, place - _CONTEXT - len(_TEXTS[text])] for text, place in _PLACES])
    allowed = max(_ALLOWED * rounding.item(), _FLOOR.get(model.dtype, 0.0) * expected.std().item())

    def check(packed: LanguageModel) -> None:
        with packed.trying() as cache:
            packed.forward([Segment(cache, ids[:_CONTEXT], chain_shape(_CONTEXT), (), prompt=_CONTEXT)])
            cache.commit(range(_CONTEXT))
            logits = packed.forward([Segment(cache, ids[_CONTEXT:], _TREE, range(len(_TREE)))]).logits.float()
            logits = logits.to(expected.device)
        difference = (logits - expected[:, : logits.shape[1]]).abs().max().item()
        if not difference <= allowed and bool(expected.isfinite().all()):
            kind = model.config.model_type
            decoders = {*MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES}
            cause = f": it is the decoder of an encoder-decoder ({kind}), which counts positions itself"
            raise UnsupportedModelError(
                f"{name} gives other logits packed than by itself (they differ by {difference:.2g}; rounding explains "
                f"{allowed:.2g}){cause if kind in decoders else ''}; truedraft cannot run this family exactly"
            )

    return check


class _Dequantizing(TorchFunctionMode):
    """Linear layers and embeddings dequantise their weights for each call; the LM head only its first ids."""

    def __init__(self, head: Tensor) -> None:
        super().__init__()
        self._head = head

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stored = quantized_of(args[1]) if func in (linear, embedding) else None
        if stored is None:
            return func(*args, **(kwargs or {}))
        if func is embedding:
            return stored.rows(args[0].flatten()).dequantized().to(args[1].dtype).view(*args[0].shape, -1)
        rows = slice(_SOME_IDS) if args[1] is self._head else slice(None)
        return linear(args[0], stored.rows(rows).dequantized().to(args[1].dtype), *args[2:], **(kwargs or {}))


def check_codes(model: PreTrainedModel, name: str) -> Callable[[LanguageModel], None]:
    """`check_against_stock` for a model with quantised weights: its first layers, one of each kind and at least two.

    The model's own modules run them with weights that are dequantised for each call. The native forward also quantises
    the inputs of products, which moves logits by a hundredth of their spread.
    """
    decoder: Any = model.base_model
    kinds = list(getattr(model.config, "layer_types", None) or [""])
    count = min(max(2, *(kinds.index(kind) + 1 for kind in kinds)), len(decoder.layers))
    ids = some_ids(_CODES_TOKENS, len(model.get_input_embeddings().weight), torch.device("cpu"))
    layers = decoder.layers
    decoder.layers = layers[:count]
    try:
        with torch.inference_mode(), _Dequantizing(model.get_output_embeddings().weight):
            expected = model(input_ids=ids[None], use_cache=False).logits[0, :, :_SOME_IDS].float()
    finally:
        decoder.layers = layers

    def check(packed: LanguageModel) -> None:
        with packed.trying() as cache, packed.shallow(count):  # type: ignore[attr-defined]
            logits = packed.forward([Segment(cache, ids, chain_shape(len(ids)), range(len(ids)))]).logits
        error = ((logits[:, :_SOME_IDS].float() - expected).std(-1) / expected.std(-1)).median().item()
        if not error <= _ALLOWED_BY_CODES:
            raise UnsupportedModelError(
                f"{name} gives other logits by its codes than by their numbers (they differ by {error:.0%} of their "
                f"spread after {count} layers); load it with fast_paths=False"
            )

    return check


def _chain_logits(model: LanguageModel, cache: RequestCache, tokens: Tensor, rows: int) -> Tensor:
    return model.forward([Segment(cache, tokens, chain_shape(len(tokens)), range(rows))]).logits.clone()


def refuse_hidden_state(model: LanguageModel) -> None:
    """Raise UnsupportedModelError for a model that keeps a state of a rejected draft outside its cache."""
    ids = some_ids(_CONTEXT + len(_TREE), model.vocab_size, model.device)
    seen: list[Tensor] = []
    for drafts in ((1,), (0, 1)):  # the second one by itself, and after the first one
        with model.trying() as cache:
            model.forward([Segment(cache, ids[:_CONTEXT], chain_shape(_CONTEXT), ())])
            cache.commit(range(_CONTEXT))
            length = cache.length
            for draft in drafts:
                logits = _chain_logits(model, cache, ids[_CONTEXT:][[draft, draft + 2]], 2)
                cache.rollback(length)
            seen.append(logits)
    if not seen[0].equal(seen[1]):
        raise UnsupportedModelError(
            f"{model.name} keeps a state of what it read outside of its cache, and speculation cannot take that "
            "back; use another model"
        )


def refuse_later_tokens(model: LanguageModel) -> None:
    """Raise UnsupportedModelError for a model with rows that see later tokens, as in an encoder."""
    ids = some_ids(_CONTEXT + 1, model.vocab_size, model.device)
    seen: list[Tensor] = []
    for last in (0, 1):
        with model.trying() as cache:
            tokens = torch.cat([ids[:_CONTEXT], ids[last : last + 1]])
            seen.append(_chain_logits(model, cache, tokens, _CONTEXT).float())
    if float((seen[0] - seen[1]).abs().max()) > 0.05 * float(seen[0].std()):
        raise UnsupportedModelError(
            f"{model.name} lets tokens see later ones: it is an encoder, not a causal language model"
        )


def rows_depend_on_their_number(model: LanguageModel) -> bool:
    """Whether a row's bits depend on other rows, tested on a few counts; then answers equal up to near ties."""
    ids = some_ids(_COUNTS[0], model.vocab_size, model.device)
    seen: list[Tensor] = []
    for most in _COUNTS:
        with model.trying() as cache:
            count = min(most, model.context_length - cache.length)
            seen.append(_chain_logits(model, cache, ids[:count], count))
    return not all(logits.equal(seen[0][: len(logits)]) for logits in seen)


def _with_rounding(model: PreTrainedModel, texts: Tensor) -> Tensor:
    """The model's logits with the outputs of all innermost modules moved by up to one unit in the last place."""
    generator = torch.Generator(texts.device).manual_seed(0)

    def move(_: nn.Module, __: Any, output: Any) -> Tensor | None:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        exact = torch.float64 if output.dtype in (torch.float32, torch.float64) else torch.float32
        moves = torch.rand(output.shape, generator=generator, dtype=exact, device=output.device).mul_(2.0).sub_(1.0)
        return (output.to(exact) * (1.0 + torch.finfo(output.dtype).eps * moves)).to(output.dtype)

    innermost = [module for module in model.modules() if next(module.children(), None) is None]
    hooks = [module.register_forward_hook(move) for module in innermost]
    try:
        logits: Tensor = model(**_as_generated(model, texts)).logits
    finally:
        for hook in hooks:
            hook.remove()
    return logits


def _by_steps(model: PreTrainedModel, text: Tensor) -> Tensor:
    output = model(input_ids=text[:, :_CONTEXT], use_cache=True)
    kept = _kept(output)
    if not kept:  # Recurrent Gemma uses the cache that `generate` passes, and does not return it
        kept = {cache_keyword(model) or "": DynamicCache(config=model.config)}
        model(input_ids=text[:, :_CONTEXT], use_cache=True, **kept)
    logits: list[Tensor] = []
    for place in range(_CONTEXT, text.shape[1]):
        given = _as_generated(model, text[:, place : place + 1]) | {"use_cache": True} | kept
        if "position_ids" in given:
            given["position_ids"] = torch.full((1, 1), place, device=text.device)
        output = model(**given)
        kept = _kept(output) or kept
        logits.append(output.logits.float())
    return torch.cat(logits, dim=1)


def _kept(output: Any) -> dict[str, Any]:
    return {name: output[name] for name in ("cache", "past_key_values", "cache_params", "state") if name in output}


def _as_generated(model: PreTrainedModel, texts: Tensor) -> dict[str, Any]:
    """The arguments that `generate` passes for whole texts: positions from 0, and one source for all texts."""
    if model.config.is_encoder_decoder:
        sources = Sources.of(model, _FAR)
        length = sources.length(texts[0].tolist())
        source: dict[str, Any] = {"input_ids": texts[:, :length]}
        if sources.sound is not None:  # once for all texts, because an encoder may take seconds
            vectors = model.get_encoder()(**sources.opening_inputs)[0]
            source = {"encoder_outputs": Encoded(last_hidden_state=vectors.expand(len(texts), -1, -1))}
        return {**source, "decoder_input_ids": texts[:, length:], "use_cache": False}
    given: dict[str, Any] = {"input_ids": texts, "use_cache": False}
    if "position_ids" in inspect.signature(type(model).forward).parameters:
        given["position_ids"] = torch.arange(texts.shape[1], device=texts.device).expand_as(texts)
    return given


def _by_itself(model: PreTrainedModel, texts: Tensor, name: str) -> Tensor:
    try:
        logits: Tensor = model(**_as_generated(model, texts)).logits
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{name} ({type(model).__name__}) cannot be run by transformers itself on token ids only "
            f"({type(error).__name__}: {first_line(error)}); check its config.json"
        ) from error
    return logits.float()
