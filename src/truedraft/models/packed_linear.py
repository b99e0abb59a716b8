"""Linear layers and experts with weights that oneDNN lays out for its kernels once, instead of at every call.

In bfloat16 this is 1.5 to 2 times faster at few rows; in float32 the stock product of 2 to 32 rows becomes slow and
this one does not (benchmarks/LOG.md). A packed weight cannot be copied or saved; the original can be freed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

# oneDNN chooses the layout for a number of rows; with 8, unlike 1, a row's bits do not depend on their number.
_ROWS = 8
_PACKED_DTYPES = (torch.bfloat16, torch.float32)
LEAST_ROWS = 4
"""Products are padded to this many rows: kernels treat very short ones differently, and rows must not depend on it."""


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights of this dtype can be packed on this device."""
    if device.type != "cpu" or dtype not in _PACKED_DTYPES or not torch.backends.mkldnn.is_available():
        return False
    return dtype is not torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is exactly of this class and has no hooks, so that its computation is known."""
    return type(module) is kind and not module._forward_hooks and not module._forward_pre_hooks


class PackedLinear(nn.Module):
    """`x W^T + b` with a packed weight `[out, in]`, bfloat16 or float32, on the CPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
        self.bias = None if bias is None else bias.detach().clone()
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._product_and_sum = torch.ops.mkldnn._linear_pointwise.binary

    @cached_property
    def weight(self) -> Tensor:
        """`[out, in]`, unpacked on first use and then kept; some routers read it."""
        return self.unpacked()

    def unpacked(self) -> Tensor:
        return self._weight.to_dense()

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x, self._weight, self.bias, "none", [], "")

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual + x W^T + b`, summed in float32 and rounded once; `residual` is `[..., out]`."""
        return self._product_and_sum(x, residual, self._weight, self.bias, "add")


def filled(x: Tensor) -> Tensor:
    """`[rows, width]` padded with zeros to `LEAST_ROWS` rows, so that a row's bits do not depend on their number."""
    return x if len(x) >= LEAST_ROWS else pad(x, (0, 0, 0, LEAST_ROWS - len(x)))


def joined(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Concatenated weights and biases of several layers with the same input; 0 where a layer has no bias."""
    first = layers[0].weight.detach()
    weight = first if len(layers) == 1 else torch.cat([layer.weight.detach() for layer in layers])
    if all(layer.bias is None for layer in layers):
        return weight, None
    biases = [first.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach() for layer in layers]
    return weight, torch.cat(biases)


def fuse(layers: Sequence[nn.Linear]) -> PackedLinear:
    """One packed layer in place of several with the same input; their weights are freed."""
    fused = PackedLinear(*joined(layers))
    for layer in layers:
        release(layer)
    return fused


def release(layer: nn.Module) -> None:
    """Free the weights of a layer after something else has taken them over."""
    for name, weight in list(layer.named_parameters(recurse=False)):
        setattr(layer, name, None if name == "bias" else nn.Parameter(weight.new_empty(0), requires_grad=False))


class PackedExperts(nn.Module):
    """Transformers' experts with packed weights, which are freed in `experts`; the router is outside.

    An expert's rows are multiplied together, at least two of them, and summed in the order of the router's choices. So
    a row's bits do not depend on the other rows, which none of transformers' own implementations promises.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self._experts = experts
        self.num_experts: int = experts.num_experts
        self._up = self._packed("gate_up_proj" if experts.has_gate else "up_proj")
        self._down = self._packed("down_proj")
        release(experts)

    def _packed(self, name: str) -> list[PackedLinear]:
        weights = getattr(self._experts, name).detach()
        biases = getattr(self._experts, f"{name}_bias") if self._experts.has_bias else [None] * len(weights)
        turned = weights.transpose(1, 2) if self._experts.is_transposed else weights
        return [PackedLinear(weight, bias) for weight, bias in zip(turned, biases, strict=True)]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sums of the experts' outputs, `[rows, width]`; experts and factors are `[rows, k]`.

        Worked example: rows 0, 1, 2 use experts (4, 0), (0, 1), (4, 1). In order of experts their indices among all six
        are 1 2 | 3 5 | 0 4: expert 0 reads rows 0 and 1.
        """
        rows, chosen = top_k_index.shape
        places = top_k_index.flatten().argsort(stable=True)
        counts = top_k_index.flatten().bincount(minlength=self.num_experts).tolist()
        given = hidden_states.new_empty(rows, chosen, self._down[0].out_features)
        flat = given.flatten(0, 1)
        for number, own in enumerate(places.split(counts)):
            if len(own):
                flat[own] = self._run(number, hidden_states[own // chosen])
        weighted = given * top_k_weights[..., None]
        total = weighted[:, 0].float()
        for place in range(1, chosen):
            total += weighted[:, place]
        return total.to(hidden_states.dtype)

    def _run(self, number: int, x: Tensor) -> Tensor:
        count = len(x)
        inner = self._up[number](x if count > 1 else x.expand(2, -1))
        inner = self._experts._apply_gate(inner) if self._experts.has_gate else self._experts.act_fn(inner)
        out = self._down[number](inner)
        if getattr(self._experts, "has_post_expert_norm", False):
            out = self._experts.post_expert_norm(out)
        return out[:count]


def is_experts(module: Any) -> bool:
    """Whether a module is an unmodified, unsharded block of experts with interchangeable implementations."""
    names = {name for name, _ in module.named_parameters(recurse=False)}
    return (
        all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "num_experts", "_apply_gate"))
        and hasattr(type(module).forward, "__wrapped__")
        and is_plain(module, type(module))
        and names <= {f"{name}{end}" for name in ("gate_up_proj", "up_proj", "down_proj") for end in ("", "_bias")}
        and {"down_proj", "gate_up_proj" if module.has_gate else "up_proj"} <= names
        and not getattr(module, "_is_expert_parallel", False)
    )


def pack_weights(model: PreTrainedModel) -> int:
    """Replace the linear layers and experts of any model, in memory, by packed ones; returns how many.

    Only layers of exactly the class `nn.Linear` are replaced. A weight that is used elsewhere stays: an LM head that is
    tied to the embedding gets a packed copy.
    """
    head = model.get_output_embeddings()
    uses = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            packed: nn.Module | None = None
            if is_plain(child, nn.Linear):
                if uses[id(child.weight)] == 1:
                    packed = fuse([child])
                elif child is head:
                    packed = PackedLinear(child.weight, child.bias)
            elif is_experts(child) and all(uses[id(weight)] == 1 for weight in child.parameters()):
                packed = PackedExperts(child)
            if packed is not None:
                setattr(parent, name, packed)
                count += 1
    return count


def multiplies_only_packed(model: nn.Module) -> bool:
    """Whether all weights that vectors are multiplied by are packed; only embeddings, norms and biases are not."""
    return all(
        isinstance(module, nn.Embedding) or all(weight.dim() < 2 for weight in module.parameters(recurse=False))
        for module in model.modules()
    )
