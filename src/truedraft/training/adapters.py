"""LoRA adapters by `peft`, for targets too large to train whole."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from truedraft.errors import MissingExtraError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_WHOLE_PARAMETERS = 300_000_000  # up to here all weights are trained: their gradients and moments take under 6 GB
_RANK = 32


def rank_for(parameters: int) -> int:
    """The rank of adapters for a model of so many weights; 0 where all of them are trained."""
    return 0 if parameters <= _WHOLE_PARAMETERS else _RANK


def check_adapters() -> None:
    """Refuse to start what needs adapters where nothing makes them.

    Raises:
        MissingExtraError: peft is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError(
            "training a large target needs LoRA adapters by peft, which is not installed; "
            "`pip install 'truedraft[train]'` brings it, or train all weights with a LoRA rank of 0"
        )


def with_adapters(model: PreTrainedModel, rank: int) -> Any:
    """The model with adapters of this rank at all of its linear layers but the LM head; only they are trained.

    Raises:
        MissingExtraError: peft is not installed.
    """
    check_adapters()
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config)


@contextmanager
def adapters_off(model: Any) -> Iterator[None]:
    """Run the model as it was before training."""
    with model.disable_adapter():
        yield


def merged(model: Any) -> nn.Module:
    """The model with its adapters added to its weights; the adapters are gone."""
    found: nn.Module = model.merge_and_unload()
    return found
