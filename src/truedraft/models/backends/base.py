"""What runs a packed forward: the model's own modules, or a faster loop over the same weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad
from transformers import PreTrainedModel

from truedraft.cache import CachePool
from truedraft.core.top_k import TopK
from truedraft.errors import UnsupportedModelError
from truedraft.models.base import HeadRun, Segment
from truedraft.models.packing import ForwardPlan


class Backend(ABC):
    """Computes a packed forward of one loaded model. One forward runs at a time.

    Attributes:
        fast_paths: what is switched on beyond the plain forward, in words, for reports.
        least_rows: plans are padded to this many tokens and rows, for kernels treat very short products differently
            and a row must not depend on how many share its forward (docs/lossless.md, row invariance).
        any_threads: whether up to 32 rows have the same bits on any number of torch's threads, so that it may be
            changed from one forward to the next. The native forward has threads of its own, and leaves this as it is.
        own_threads: whether forwards run on threads that are not torch's.
        note: what every report on the model must say of how it runs.
        shown_layers: layers whose output can be seen; 0 where the layers run out of sight.
        adapters: that a segment may name.
        input_names: what a prompt may have beside its tokens.
        weight_bytes: of weights that a forward reads; 0 where nothing but the model's own are read.
        rows_vary: whether a row's last bits may hang on the tokens behind it, whatever a few small forwards show.
    """

    fast_paths: tuple[str, ...]
    least_rows: int
    any_threads: bool = False
    own_threads: bool = False
    note: str | None = None
    shown_layers: int = 0
    adapters: tuple[str, ...] = ()
    input_names: frozenset[str] = frozenset()
    weight_bytes: int = 0
    rows_vary: bool = False

    def new_pool(self, limit: int) -> CachePool:
        """Where the model's requests get their caches; called once.

        Args:
            limit: tokens of one request (the model's context).
        """
        return CachePool(limit)

    def forward(self, segments: Sequence[Segment], device: torch.device) -> tuple[Tensor, Tensor]:
        """Reserve room in the segments' caches, lay the segments out, and run them.

        Args:
            segments: the requests' shares of the forward.
            device: of the model.

        Returns:
            Logits `[rows, ids]` of the wanted rows, padded ids of the embedding included, and the vectors
            `[rows, width]` that entered the LM head.
        """
        if any(segment.inputs is not None for segment in segments):
            return self._forward_apart(segments, device)
        plan = ForwardPlan.of(segments, device, self.least_rows)
        logits, hidden = self.run(plan)
        return logits[: plan.wanted], hidden[: plan.wanted]

    def _forward_apart(self, segments: Sequence[Segment], device: torch.device) -> tuple[Tensor, Tensor]:
        """The same where some segments are prompts with images or sound, each of which is read in a forward of its
        own."""
        packed = [segment for segment in segments if segment.inputs is None]
        numbers = [len(segment.rows) for segment in packed]
        rest = self.forward(packed, device) if packed else None
        others = iter([] if rest is None else zip(*(part.split(numbers) for part in rest), strict=True))
        parts = [
            next(others) if segment.inputs is None else self.run_inputs(ForwardPlan.of([segment], device, 1))
            for segment in segments
        ]
        logits, hidden = zip(*parts, strict=True)
        return torch.cat(logits), torch.cat(hidden)

    def forward_showing(
        self, segments: Sequence[Segment], device: torch.device, layers: Sequence[int]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The same, and what each of the layers gives at the wanted rows, `[rows, width]`."""
        if len(segments) > 1 and any(segment.inputs is not None for segment in segments):
            each = [self.forward_showing([segment], device, layers) for segment in segments]
            showing = zip(*(layers_of for _, _, layers_of in each), strict=True)
            return (
                torch.cat([one for one, _, _ in each]),
                torch.cat([one for _, one, _ in each]),
                tuple(torch.cat(layer) for layer in showing),
            )
        plan = ForwardPlan.of(segments, device, self.least_rows if segments[0].inputs is None else 1)
        seen: dict[int, Tensor] = {}
        logits, hidden = self.run_watched(plan, layers, seen)
        shown = tuple(seen[layer].index_select(0, plan.rows)[: plan.wanted] for layer in layers)
        return logits[: plan.wanted], hidden[: plan.wanted], shown

    @abstractmethod
    def run(self, plan: ForwardPlan) -> tuple[Tensor, Tensor]:
        """Run the plan.

        Returns:
            Logits `[rows, ids]` of the plan's rows, padded ids of the embedding included, and the vectors
            `[rows, width]` that entered the LM head; both with the plan's padding.
        """

    def run_inputs(self, plan: ForwardPlan) -> tuple[Tensor, Tensor]:
        """Run a plan of one segment, a whole prompt with what it has beside its tokens; as `run`.

        Raises:
            UnsupportedModelError: this backend reads text alone.
        """
        raise UnsupportedModelError("this forward reads text alone; load the model with fast_paths=False")

    def run_watched(self, plan: ForwardPlan, layers: Sequence[int], seen: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
        """The same as `run`, and put what each of the layers gives, `[total, width]`, into `seen`.

        Raises:
            UnsupportedModelError: this backend shows no layers.
        """
        raise UnsupportedModelError("this forward shows no single layers; load the model with fast_paths=False")

    def quantize(self, bits: int) -> None:
        """Give the linear weights so many bits, 8 or 4; what they were is freed.

        Raises:
            UnsupportedModelError: this backend has no products with such weights of its own.
        """
        raise UnsupportedModelError("its forward has no products with such weights")

    def quantized(self, bits: int) -> Backend:
        """The same with linear weights of so many bits, over the caches of this one; see `LanguageModel.quantized`.

        Only one of the two may run at a time. It says in `weight_bytes` what one forward reads.

        Raises:
            UnsupportedModelError: this backend has no products with such weights.
        """
        raise UnsupportedModelError("its forward has no products with such weights")

    @abstractmethod
    def unembed(self, vectors: Tensor) -> Tensor:
        """What the LM head alone makes of vectors, without what the model does to its logits afterwards.

        Args:
            vectors: `[rows, up to width]`, in the model's dtype; entries behind those that are given are zeros.

        Returns:
            `[rows, ids]`, padded ids of the embedding included. A row does not depend on the others.
        """

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """What the model looks up for tokens `[n]` in its embedding, `table`: `[n, width]`."""
        return embedding(tokens, table)

    def likeliest(self, vectors: Tensor, count: int, vocab: int, factor: float) -> TopK:
        """Of the first `vocab` ids the likeliest `[rows, count]` by `factor` times the logits of `unembed`.

        A row does not depend on the others.
        """
        return TopK.of(self.unembed(vectors)[:, :vocab].float() * factor, count)

    def shared_heads(self, blocks: Sequence[Sequence[nn.Linear]], vocab: int, factor: float) -> HeadRun | None:
        """Residual heads that end in the LM head, where the backend runs them faster than by `likeliest`; else None.

        A row's guesses depend on it alone.

        Args:
            blocks: the linear layers of each head, as many of each, each as wide as it reads; their weights are copied.
            vocab: ids that exist.
            factor: what the model multiplies its logits by.
        """
        return None

    def _whole_rows(self, vectors: Tensor, width: int) -> Tensor:
        """The vectors with zeros up to the LM head's width, and with rows up to `least_rows`."""
        rows, given = vectors.shape
        return pad(vectors, (0, width - given, 0, max(0, self.least_rows - rows)))


BackendMaker: TypeAlias = Callable[[PreTrainedModel], Backend]
"""Makes a backend of a loaded model; it may change the model's modules."""
