"""What a model is, whatever it was called and however it was loaded."""

from __future__ import annotations

import hashlib

import torch
from transformers import PreTrainedModel

from truedraft.errors import ModelError
from truedraft.models.packed_linear import PackedLinear
from truedraft.models.padding import is_padded, recorded_fingerprint

_CANONICAL = (torch.float32, torch.bfloat16)


def fingerprint_of(model: PreTrainedModel) -> str:
    """A hash of a model's weights: of their names, shapes and bfloat16 values, tied ones once.

    It is the same for loads of one checkpoint in float32 and bfloat16, on any device, and for a padded model that
    was written by `truedraft export` it is that of the model it was made from. Reads all weights: about a second for
    each gigabyte.

    Returns:
        32 hexadecimal digits of a SHA-256.

    Raises:
        ModelError: the model was padded and does not say from what, or its weights were packed for inference.
    """
    recorded = recorded_fingerprint(model)
    if recorded is not None:
        return recorded
    name = type(model).__name__
    if is_padded(model):
        raise ModelError(
            f"this {name} was padded and does not record what it was padded from; load the model that it was made from"
        )
    if not is_whole(model):
        raise ModelError(f"the weights of this {name} were packed for inference; take its fingerprint before that")
    digest = hashlib.sha256()
    for part, weight in sorted(model.named_parameters()):
        canonical = weight.detach().to(device="cpu", dtype=torch.bfloat16).contiguous()
        digest.update(f"{part} {tuple(canonical.shape)}\n".encode())
        digest.update(canonical.reshape(-1).view(torch.int16).numpy())
    return digest.hexdigest()[:32]


def is_whole(model: PreTrainedModel) -> bool:
    """Whether a model still has all of its weights: fast paths take some over and free them."""
    packed = any(isinstance(module, PackedLinear) for module in model.modules())
    return not packed and all(weight.numel() for weight in model.parameters())


def can_be_read_from(model: PreTrainedModel) -> bool:
    """Whether `fingerprint_of` this very model is that of its checkpoint; in float16 values were rounded further."""
    if recorded_fingerprint(model) is not None:
        return True
    return model.dtype in _CANONICAL and is_whole(model) and not is_padded(model)
