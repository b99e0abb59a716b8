"""A decoder that reads pairs of an embedding and a vector instead of tokens, as EAGLE-3 heads do."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from truedraft.core.top_k import TopK
from truedraft.models.attention import ForwardPlan
from truedraft.models.backends.native.backend import NativeBackend
from truedraft.models.backends.native.memory import LANES
from truedraft.models.llama import Llama
from truedraft.models.packed_linear import release


class NativePairs(NativeBackend):
    """Runs such a decoder by decoder.c, from its own weights, which are freed.

    Args:
        llama: a decoder that `fits`. Its first layer's norm is that of embeddings, and the attention of that layer
            reads rows of twice the width: embedding and vector, both normed. Its embedding is not read. All norms have
            one eps.
        merge: maps the concatenated vectors of several observed layers to one vector.
        part_norms: norms of the observed vectors, of equal widths, in order; empty in most heads.
        vector_norm: of merged vectors.
        normed_stream: whether the residual stream begins with normed vectors.
        normed_end: whether the output vectors are those after the last norm.
    """

    def __init__(
        self,
        llama: Llama,
        merge: nn.Linear,
        part_norms: Sequence[Tensor],
        vector_norm: Tensor,
        *,
        normed_stream: bool,
        normed_end: bool,
    ) -> None:
        super().__init__(llama, max(merge.in_features, 2 * merge.out_features))
        model, weights = self._model, self._weights
        model.merge = weights.linear([merge.weight], None)
        release(merge)
        if part_norms:
            model.part_norms, model.part = weights.keep(torch.cat(list(part_norms))), len(part_norms[0])
        model.vector_norm, model.normed_stream = weights.keep(vector_norm), normed_stream
        self._shown = [] if normed_end else [self.shown_layers - 1]

    def quantize(self, bits: int) -> None:
        super().quantize(bits)
        model, weights = self._model, self._weights
        before = model.merge.weights
        model.merge = weights.quantized(model.merge, bits)
        weights.free({before})

    def run_pairs(self, plan: ForwardPlan, embedded: Tensor, vectors: Tensor, observed: bool) -> tuple[Tensor, Tensor]:
        """Run a plan with embeddings `[total, width]` instead of tokens.

        Vectors `[total, width]` are outputs of this method, or, if `observed`, the target's layers' concatenated.

        Returns:
            At the plan's rows the end of the residual stream `[rows, width]`, normed or not, and logits `[rows, ids]`.
        """
        embedded, vectors = embedded.contiguous(), vectors.contiguous()
        pairs = embedded.data_ptr(), vectors.data_ptr(), observed
        logits, *outputs = self.run(plan, self._shown, pairs)
        return outputs[-1], logits

    def likeliest_of(self, logits: Tensor, count: int) -> TopK:
        rows, vocab = logits.shape
        if vocab % LANES:  # whole vectors are read, also of the last row
            logits = pad(logits, (0, -vocab % LANES))
        values = torch.empty(rows, count, dtype=torch.float32, device="cpu")
        ids = torch.empty(rows, count, dtype=torch.int64, device="cpu")
        numbers = map(ctypes.c_int64, (rows, logits.stride(0), vocab, count))
        read, *written = (ctypes.c_void_p(each.data_ptr()) for each in (logits, values, ids))
        self._library.truedraft_likeliest(read, *numbers, *written)
        return TopK(ids, values)
