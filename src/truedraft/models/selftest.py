"""At load, once: the packed forward must give what the model's own forward gives, up to rounding.

How far rounding moves this model's logits is measured, not assumed: its own forward is run again with every module's
output moved at random by up to one unit in the last place (Monte Carlo arithmetic). Over about 90 families and three
scales of random weights, a right packed forward stayed within 1.3 times the largest move that was seen so. A wrong mask
or position lies beyond it unless a model's weights are so small that attention hardly moves its logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from truedraft.core.trees import TreeShape, chain_shape
from truedraft.errors import UnsupportedModelError
from truedraft.models.base import LanguageModel, Segment

_CONTEXT = 5
# Below a context of 5: two branches, the second of them two long.
_TREE = TreeShape((-1, 0, 0, 2))
# The texts in which transformers sees the tree: its two paths, the first padded; and where in them each node is.
_TEXTS = ((0, 1, 1), (0, 2, 3))
_PLACES = ((0, _CONTEXT), (0, _CONTEXT + 1), (1, _CONTEXT + 1), (1, _CONTEXT + 2))
_COUNTS = (8, 1, 7)  # rows of forwards that are compared: kernels take ones, twos and threes, and fours apart
_DRAWS = 4
# Of the largest move by rounding, measured over a few draws.
_ALLOWED = 2.0
# In float32 sums of other order count too, which the moves of outputs do not show: of the spread of the logits.
_FLOOR = {torch.float32: 1e-3, torch.float64: 1e-3}


def check_against_stock(model: PreTrainedModel, name: str) -> Callable[[LanguageModel], None]:
    """Run the stock forward now, before attention is redirected; the returned check compares the packed one.

    Args:
        model: still with its own attention.
        name: for the message.

    Returns:
        A function that raises UnsupportedModelError when the packed forward of the same model differs by more
        than rounding.

    Raises:
        UnsupportedModelError: the model counts positions from its padding id, so it cannot be told them.
    """
    _refuse_padding_positions(model, name)
    vocab = int(model.get_input_embeddings().weight.shape[0])
    ids = torch.arange(1, _CONTEXT + len(_TREE) + 1, device=model.device) * 7919 % vocab
    texts = torch.stack([torch.cat([ids[:_CONTEXT], ids[_CONTEXT:][list(path)]]) for path in _TEXTS])
    with torch.inference_mode():
        stock = _by_itself(model, texts, name)  # [texts, tokens, vocab]
        rounding = (_with_rounding(model, texts[-1:].repeat(_DRAWS, 1)).float() - stock[-1:]).abs().max()
    expected = torch.stack([stock[text, place] for text, place in _PLACES])
    allowed = max(_ALLOWED * rounding.item(), _FLOOR.get(model.dtype, 0.0) * expected.std().item())

    def check(packed: LanguageModel) -> None:
        cache = packed.new_cache()
        packed.forward([Segment(cache, ids[:_CONTEXT], chain_shape(_CONTEXT), ())])
        cache.commit(range(_CONTEXT))
        logits = packed.forward([Segment(cache, ids[_CONTEXT:], _TREE, range(len(_TREE)))]).logits.float()
        packed.release_cache(cache)
        difference = (logits - expected[:, : logits.shape[1]]).abs().max().item()
        if not difference <= allowed and bool(expected.isfinite().all()):
            raise UnsupportedModelError(
                f"{name} gives other logits packed than by itself (they differ by {difference:.2g}; rounding explains "
                f"{allowed:.2g}){_cause(model)}; truedraft cannot run this family exactly"
            )

    return check


def rows_depend_on_their_number(model: LanguageModel) -> bool:
    """Whether a row's logits have other bits when other rows share its forward, seen on a few rows of each number.

    Then answers with a drafter equal plain decoding's up to near ties, not bit for bit.
    """
    ids = torch.arange(1, _COUNTS[0] + 1, device=model.device) * 7919 % model.vocab_size
    seen: list[Tensor] = []
    for count in _COUNTS:
        cache = model.new_cache()
        seen.append(model.forward([Segment(cache, ids[:count], chain_shape(count), range(count))]).logits.clone())
        model.release_cache(cache)
    return not all(logits.equal(seen[0][: len(logits)]) for logits in seen)


def _with_rounding(model: PreTrainedModel, texts: Tensor) -> Tensor:
    """The model's logits with the outputs of all its innermost modules moved by up to one unit in the last place."""
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
        logits: Tensor = model(input_ids=texts, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return logits


def _refuse_padding_positions(model: PreTrainedModel, name: str) -> None:
    """RoBERTa and its kin count positions from their padding id on, and cannot run without one."""
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise UnsupportedModelError(
            f"{name} ({type(model).__name__}) counts the positions of its tokens from an offset, behind its padding id "
            f"(pad_token_id is {model.config.pad_token_id}); truedraft numbers tokens from 0 and cannot run it exactly"
        )


def _by_itself(model: PreTrainedModel, texts: Tensor, name: str) -> Tensor:
    """The model's own logits in float32."""
    try:
        logits: Tensor = model(input_ids=texts, use_cache=False).logits
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{name} ({type(model).__name__}) cannot be run by transformers itself on token ids alone "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0]}); check its config.json"
        ) from error
    return logits.float()


def _cause(model: PreTrainedModel) -> str:
    """What is known to make a family differ, in words; empty where it is something else."""
    kind = model.config.model_type
    if kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES or kind in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES:
        return f": it is the decoder of an encoder-decoder ({kind}), which counts positions itself"
    return ""
