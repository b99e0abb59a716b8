"""A model's LM head as a function, with the scale, soft cap or bias of its family, checked on real vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel

from truedraft.errors import UnsupportedModelError
from truedraft.models.packed_linear import PackedLinear

_CHECKED_TOKENS = 4
# Allowed rounding of one product, relative to the spread of the logits, and to their largest magnitude.
_OF_SPREAD = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
_OF_LARGEST = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 0.03}


@dataclass(frozen=True, slots=True)
class LogitFinish:
    """Finishes an LM head's product: times a factor, then c tanh(x / c) for a cap c. Both keep the order."""

    factor: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> LogitFinish:
        config = model.config.get_text_config()
        factor = 1.0
        for name in ("logit_scale", "lm_head_multiplier"):
            given = getattr(config, name, None)
            factor *= float(given) if isinstance(given, int | float) else 1.0
        factor /= float(getattr(config, "logits_scaling", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return cls(factor, float(cap) if cap else None)

    def __call__(self, logits: Tensor) -> Tensor:
        if self.factor != 1.0:
            logits = logits * self.factor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def lm_head_width(head: Any) -> int:
    """Entries of an LM head's input vector."""
    return int(head.in_features) if hasattr(head, "in_features") else int(head.weight.shape[1])


def lm_head_dtype(head: Any) -> torch.dtype:
    """The dtype of an LM head's weight, which some bfloat16 families keep in float32."""
    return head.dtype if isinstance(head, PackedLinear) else head.weight.dtype


def refuse_other_logits(made: Tensor, given: Tensor, name: str) -> None:
    """Raise UnsupportedModelError where logits `made` by the separate LM head differ by more than rounding."""
    made, expected = made.float(), given.float()
    spread, largest = expected.std().item(), expected.abs().max().item()
    allowed = _OF_SPREAD[given.dtype] * spread + _OF_LARGEST[given.dtype] * largest
    difference = (made - expected).abs().max().item()
    if not difference <= allowed and bool(expected.isfinite().all()):
        raise UnsupportedModelError(
            f"the logits of {name} are not what its LM head makes of the vector that enters it (they differ by "
            f"{difference:.2g}, with a spread of {spread:.2g}), so heads cannot share it; use another kind of drafter"
        )


class LmHead:
    """The LM head of a loaded model, with gradients through the vectors; its weights are frozen.

    `weight` and `embedding` `[vocab, width]` are the model's own, in many families one tensor; `bias` is `[vocab]`.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, finish: LogitFinish, embedding: Tensor | None = None
    ) -> None:
        self.weight = weight.detach()
        self.embedding = self.weight if embedding is None else embedding.detach()
        self.bias = None if bias is None else bias.detach()
        self.finish = finish

    @classmethod
    def of(cls, model: PreTrainedModel) -> LmHead:
        """A model's LM head; UnsupportedModelError if packed, or if logits are more than head, factor and soft cap."""
        name = type(model).__name__
        module = model.get_output_embeddings()
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Linear) or weight is None or weight.numel() == 0:
            raise UnsupportedModelError(
                f"the LM head of this {name} is not a linear layer with its own weights (packed for inference?); "
                "give the model as transformers loads it"
            )
        head = cls(weight, module.bias, LogitFinish.of(model), model.get_input_embeddings().weight)
        head._check(model, module, name)
        return head

    @torch.no_grad()
    def _check(self, model: PreTrainedModel, module: nn.Module, name: str) -> None:
        entered: list[Tensor] = []
        hook = module.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0].detach()))
        ids = torch.arange(1, _CHECKED_TOKENS + 1, device=model.device) * 7919 % self.weight.shape[0]
        training = model.training
        try:
            logits = model.eval()(input_ids=ids[None], use_cache=False).logits[0]
        finally:
            hook.remove()
            model.train(training)
        refuse_other_logits(self(entered[0].reshape(_CHECKED_TOKENS, -1)), logits, name)

    def __call__(self, vectors: Tensor) -> Tensor:
        """Logits `[..., vocab]` for vectors `[..., width]`, in the weights' dtype, or in autocast's if it is on."""
        if not torch.is_autocast_enabled(vectors.device.type):
            vectors = vectors.to(self.weight.dtype)
        return self.finish(linear(vectors, self.weight, self.bias))

    def embed(self, tokens: Tensor) -> Tensor:
        return embedding(tokens, self.embedding)
