"""The part of a model's weights in each of several processes, by transformers' plan for its family.

`colwise` layers have a part of their outputs in each process, `rowwise` ones a part of their inputs, with summed
results. Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053), section 3.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from truedraft.errors import OptionError, UnsupportedModelError
from truedraft.models.ranks import Ranks

_OUTPUTS = {"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"}
_INPUTS = {"rowwise", "rowwise_split_input", "rowwise_rep"}
_WHOLE_OUTPUTS = {"colwise_gather_output", "colwise_rep"}
_WHOLE_INPUTS = {"rowwise_split_input", "rowwise_rep"}
_SUMMED = _INPUTS | {"moe_tp_experts", "all_reduce"}
# Unsharded in every process: lookups are fast, and the other style sums gradients.
_UNSHARDED = {"embedding_rowwise", "embedding_colwise", "replicated_with_grad_allreduce", "replicate", "mla_kv_a_proj"}


def refuse_unsharded(config: Any, name: str, count: int) -> None:
    """Raise UnsupportedModelError for a model without a plan, OptionError for heads that `count` does not divide."""
    text = config.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None) or {}
    if config.is_encoder_decoder or not _INPUTS.intersection(plan.values()):
        raise UnsupportedModelError(
            f"transformers has no tensor parallel plan for the layers of {name!r} ({config.model_type}); leave "
            "--tensor-parallel out"
        )
    heads = text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", None) or heads
    if heads % count or keys % count:
        most = gcd(heads, keys)
        fitting = [str(each) for each in range(2, most + 1) if most % each == 0]
        raise OptionError(
            f"is {count}, and {name!r} has {heads} attention heads and {keys} key heads, which cannot be shared so; "
            + (f"take {' or '.join(fitting)}" if fitting else "leave it out"),
            field="tensor_parallel",
        )


def shard(model: PreTrainedModel, name: str, ranks: Ranks) -> Callable[[], None]:
    """Cut a whole model's weights down to this process's part, in memory; its config records the number of parts.

    Returns:
        A function that makes its modules join their parts; call it after packing, which its hooks would prevent.

    Raises:
        UnsupportedModelError: the plan has an unsupported style, or a width cannot be cut into equal parts.
    """
    plan = model.tp_plan
    unknown = sorted(set(plan.values()) - _OUTPUTS - _SUMMED - _UNSHARDED)
    if unknown:
        raise UnsupportedModelError(
            f"the tensor parallel plan of {name!r} has the style {unknown[0]!r}, which is not run here; leave "
            "--tensor-parallel out"
        )
    joins: dict[str, str] = {}
    for path, module in model.named_modules():
        style = plan.get(_generic(path))
        if style in _SUMMED and not isinstance(module, nn.Linear):
            joins[path] = style
        for own, weight in list(module.named_parameters(recurse=False)):
            how = plan.get(_generic(f"{path}.{own}"), style)
            if how not in _INPUTS | _OUTPUTS:
                continue
            axis = weight.dim() - 1 if how in _INPUTS else max(weight.dim() - 2, 0)  # of [..., out, in] or [out]
            packed = 2 if how == "packed_colwise" else 1
            if how in _INPUTS and own == "bias":
                part = None if ranks.rank else weight.detach()  # added in one process only
            elif weight.shape[axis] % (packed * ranks.count) == 0:
                part = _part(weight.detach(), axis, packed, ranks)
            elif how in _WHOLE_OUTPUTS | _WHOLE_INPUTS:
                break  # not cut
            else:
                raise UnsupportedModelError(
                    f"{path} of {name!r} is {weight.shape[axis] // packed} wide, which {ranks.count} processes cannot "
                    "share; take another --tensor-parallel"
                )
            setattr(module, own, None if part is None else nn.Parameter(part, requires_grad=False))
            if isinstance(module, nn.Linear):
                joins[path] = how
                module.out_features, module.in_features = module.weight.shape
    model.cut_into = ranks.count

    def join() -> None:
        for path, style in joins.items():
            module = model.get_submodule(path)
            if style in _WHOLE_INPUTS:
                module.register_forward_pre_hook(lambda _, inputs: (_part(inputs[0], -1, 1, ranks), *inputs[1:]))
            if style in _SUMMED:
                module.register_forward_hook(lambda module, inputs, output: ranks.added(output))
            elif style in _WHOLE_OUTPUTS:
                module.register_forward_hook(
                    lambda module, inputs, output: torch.cat([*ranks.gathered(output)], dim=-1)
                )

    return join


def _generic(path: str) -> str:
    """A path in the form of plans.

    >>> _generic("model.layers.11.mlp.fc1")
    'model.layers.*.mlp.fc1'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _part(whole: Tensor, axis: int, packed: int, ranks: Ranks) -> Tensor:
    """This process's part of a tensor: of each of `packed` concatenated tensors along the axis.

    Worked example: of `[a0 a1 b0 b1]`, two packed, the first of two processes has `[a0 b0]`.
    """
    axis %= whole.dim()
    pieces = whole.unflatten(axis, (packed, ranks.count, -1))
    return pieces.select(axis + 1, ranks.rank).flatten(axis, axis + 1).clone()
