"""Heads with decoder layers by decoder.c: pairs as EAGLE-3 reads them, and blocks as DFlash guesses them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from truedraft.models.attention import ForwardPlan
from truedraft.models.backends.native.backend import NativeBackend, OwnSlots
from truedraft.models.backends.native.memory import LANES, UNIT, CLinear
from truedraft.models.llama import Llama
from truedraft.models.packed_linear import release

_MOST_TAPS = 8  # of decoder.c


class NativePairs(NativeBackend):
    """Runs such a decoder by decoder.c, from its own weights, which are freed.

    `llama` is a decoder that `fits`. Its first layer's norm is that of embeddings, and the attention of that layer
    reads rows of twice the width: embedding and vector, both normed. Its embedding is not read. All norms have one eps.
    `merge` maps the concatenated vectors of several observed layers, normed by `part_norms` (of equal widths; empty in
    most heads), to one vector, which `vector_norm` norms. If `normed_stream`, the residual stream begins with normed
    vectors; if `normed_end`, the output vectors are those after the last norm.
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
        Returns at the plan's rows the end of the residual stream `[rows, width]`, normed or not, and logits `[rows,
        ids]`.
        """
        embedded, vectors = embedded.contiguous(), vectors.contiguous()
        pairs = embedded.data_ptr(), vectors.data_ptr(), observed
        logits, *outputs = self._run(plan, self._shown, pairs)
        return outputs[-1], logits


class NativeBlocks(NativeBackend):
    """Runs the layers of a block drafter by decoder.c, from their own weights, which are freed.

    `llama` is a decoder that `fits`; its LM head is not used. `merge` and `context_norm` make what it sees of a text;
    all norms have one eps. Two `convs` of each layer, around attention and MLP, have learned kernels `[2, taps, width]`
    and a linear layer that corrects them (DFlash 2).
    """

    def __init__(
        self,
        llama: Llama,
        merge: nn.Linear,
        context_norm: Tensor,
        block: int,
        convs: Sequence[tuple[Tensor, nn.Linear]],
    ) -> None:
        corrections = max((-(-each.out_features // UNIT) * UNIT for _, each in convs), default=0)
        super().__init__(llama, max(merge.in_features, llama.inner + UNIT + corrections))
        model, weights = self._model, self._weights
        model.lm_head, self._vocab = CLinear(), 0
        model.merge, model.vector_norm = weights.linear([merge.weight], None), weights.keep(context_norm)
        release(merge)
        model.block, model.taps = block, convs[0][0].shape[1] if convs else 0
        for number, (kernel, corrected) in enumerate(convs):
            layer, part = model.layer[number // 2], ("attention", "mlp")[number % 2]
            setattr(layer, f"{part}_kernel", weights.keep(kernel))
            setattr(layer, f"{part}_conv", weights.linear([corrected.weight], None))
            release(corrected)
        self._read = self._library.truedraft_context
        self._read.restype = None

    @staticmethod
    def fits_convs(convs: Sequence[tuple[Tensor, nn.Linear]]) -> bool:
        """Whether decoder.c supports them: few taps, and whole vectors of entries that share corrections."""
        taps = [kernel.shape[1] for kernel, _ in convs]
        shared = [2 * kernel.shape[1] * kernel.shape[2] // each.out_features for kernel, each in convs]
        return max(taps, default=1) <= _MOST_TAPS and all(entries % LANES == 0 for entries in shared)

    def quantize(self, bits: int) -> None:
        super().quantize(bits)
        model, weights = self._model, self._weights
        before = {model.merge.weights}
        model.merge = weights.quantized(model.merge, bits)
        for number in range(model.layers if model.taps else 0):
            layer = model.layer[number]
            before |= {layer.attention_conv.weights, layer.mlp_conv.weights}
            layer.attention_conv = weights.quantized(layer.attention_conv, bits)
            layer.mlp_conv = weights.quantized(layer.mlp_conv, bits)
        weights.free(before)

    def read(self, plan: ForwardPlan, vectors: Tensor) -> None:
        """Write keys and values of texts' next positions, from `[total, layers * width]`; nothing is committed."""
        vectors = vectors.contiguous()
        with self._batch(plan, (), vectors, (None, vectors.data_ptr(), True)) as (batch, scratch, threads):
            self._read(ctypes.byref(self._model), ctypes.byref(batch), ctypes.byref(scratch), threads)

    def run_blocks(self, plan: ForwardPlan, embedded: Tensor) -> Tensor:
        """Normed outputs `[rows, width]` at a plan's rows, of blocks with embeddings `[total, width]`.

        Each segment is a block, with rows that see all of it and what their anchor sees of the text.
        """
        embedded = embedded.contiguous()
        return self._run(plan, (), (embedded.data_ptr(), None, False), block_slots(self._model.block))[1]

    def _first_visible(self, plan: ForwardPlan) -> Tensor:
        found = super()._first_visible(plan)
        if found.dim() > 1:
            for part in plan.segments:
                rows = slice(part.start, part.start + part.count)
                found[:, rows] = found[:, part.start, None]
        return found


@lru_cache
def block_slots(block: int) -> OwnSlots:
    """What rows of a block see of it. Worked example: of two rows, starts 0, 2, 4 into 0, 1, 0, 1."""
    slots = torch.arange(block, dtype=torch.int32, device="cpu")
    return torch.arange(block + 1, dtype=torch.int32, device="cpu") * block, slots.repeat(block)
