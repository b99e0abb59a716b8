"""Which body a model gets: the fastest that fits it and this machine."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from truedraft.models.bodies import Body
from truedraft.models.fused import FusedBody
from truedraft.models.graphs import GraphBody
from truedraft.models.native import NativeBody
from truedraft.models.packed_linear import can_pack, multiplies_packed_alone, pack_linears
from truedraft.models.patterns import AttentionPattern
from truedraft.models.stock import StockBody


def fastest_body(model: PreTrainedModel, patterns: Sequence[AttentionPattern]) -> Body:
    """The native forward where it fits, else the fused loop, else the model's own modules with packed weights.

    On a CUDA device recorded forwards where they fit, else the model's own modules, as in dtypes that cannot be
    packed. What was measured: docs/performance.md.
    """
    if model.device.type == "cuda" and GraphBody.fits(model, patterns):
        return GraphBody(model, patterns)
    if NativeBody.fits(model, patterns):
        return NativeBody(model, patterns)
    if FusedBody.fits(model, patterns):
        return FusedBody(model, patterns)
    packed = pack_linears(model) if can_pack(model.device, model.dtype) else 0
    body = StockBody(model, patterns)  # after packing: it watches the LM head
    if packed:
        body.fast_paths = ("packed weights",)
    if packed and multiplies_packed_alone(model):
        body.least_rows = 4  # a row more costs nothing there, and from two on all have the same bits, in float32 too
        body.any_threads = True
    return body
