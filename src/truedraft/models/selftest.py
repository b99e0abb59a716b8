"""At load, once: the packed forward must give what the model's own forward gives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from truedraft.core.trees import TreeShape, chain_shape
from truedraft.errors import UnsupportedModelError
from truedraft.models.base import LanguageModel, Segment

_CONTEXT = 5
# Below a context of 5: two branches, the second of them two long.
_TREE = TreeShape((-1, 0, 0, 2))
_PATH = (0, 2, 3)
# In units of the spread of the logits. A wrong mask or position gives about 1; bfloat16 rounding up to about 0.1.
_TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.3}


def check_against_stock(model: PreTrainedModel, name: str) -> Callable[[LanguageModel], None]:
    """Run the stock forward now, before attention is redirected; the returned check compares the packed one.

    Args:
        model: still with its own attention.
        name: for the message.

    Returns:
        A function that raises UnsupportedModelError when the packed forward of the same model differs by more
        than rounding.
    """
    vocab = int(model.get_input_embeddings().weight.shape[0])
    ids = torch.arange(1, _CONTEXT + len(_TREE) + 1, device=model.device) * 7919 % vocab
    path = torch.cat([ids[:_CONTEXT], ids[_CONTEXT:][list(_PATH)]])
    with torch.inference_mode():
        stock = model(input_ids=path[None], use_cache=False).logits[0, -1].float()

    def check(packed: LanguageModel) -> None:
        cache = packed.new_cache()
        packed.forward([Segment(cache, ids[:_CONTEXT], chain_shape(_CONTEXT), ())])
        cache.commit(range(_CONTEXT))
        logits = packed.forward([Segment(cache, ids[_CONTEXT:], _TREE, (_PATH[-1],))]).logits[0].float()
        packed.release_cache(cache)
        expected = stock[: logits.shape[0]]
        spread = expected.std().item() or 1.0
        difference = (logits - expected).abs().max().item() / spread
        if not difference <= _TOLERANCE[packed.dtype] and bool(stock.isfinite().all()):
            raise UnsupportedModelError(
                f"{name} gives other logits packed than by itself (difference {difference:.2g} of their spread); "
                "truedraft cannot run this family exactly"
            )

    return check
