"""A decoder that reads pairs of an embedding and a vector where others read tokens, as EAGLE-3 heads do."""

from __future__ import annotations

from torch import Tensor

from truedraft.models.backends.native.backend import NativeBackend
from truedraft.models.llama import Llama, RootMeanSquareNorm
from truedraft.models.packing import ForwardPlan


class NativePairs(NativeBackend):
    """Runs such a decoder by decoder.c, from its own weights, which are freed.

    Args:
        llama: one that `fits`. Its first layer's norm is that of embeddings, whose attention reads rows of twice the
            width: embedding and vector, both normed. Its embedding is not read.
        vector_norm: of vectors; its eps is that of the first layer's norm.
        normed_stream: whether the residual stream begins with normed vectors.
        normed_end: whether what a forward gives of each row went through the last norm.
    """

    def __init__(
        self, llama: Llama, vector_norm: RootMeanSquareNorm, *, normed_stream: bool, normed_end: bool
    ) -> None:
        super().__init__(llama)
        self._model.vector_norm = self._weights.keep(vector_norm.weight)
        self._model.normed_stream = normed_stream
        self._shown = [] if normed_end else [self.shown_layers - 1]

    def run_pairs(self, plan: ForwardPlan, embedded: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Run a plan, whose tokens are not looked at.

        Args:
            plan: of the pairs.
            embedded: `[total, width]`: embeddings of the tokens.
            vectors: `[total, width]`: beside them.

        Returns:
            Of the wanted rows the residual stream's end `[rows, width]`, normed or not, and logits `[rows, ids]`.
        """
        seen: dict[int, Tensor] = {}
        logits, hidden = self._run(plan, self._shown, seen, [embedded.contiguous(), vectors.contiguous()])
        return seen.get(self.shown_layers - 1, hidden), logits
