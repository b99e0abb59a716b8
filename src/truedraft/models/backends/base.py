"""What runs a packed forward: the model's own modules, or a faster loop over the same weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad
from transformers import PreTrainedModel

from truedraft.core.top_k import TopK
from truedraft.errors import UnsupportedModelError
from truedraft.models.base import Choose, ForwardOutput, HeadRun, Segment
from truedraft.models.cache import CachePool
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
        bits: fewest of a linear weight; 0 where they are numbers of the model's dtype.
        failure: why it runs no more, in a sentence; None while it does.
        rows_vary: whether a row's last bits may hang on the tokens behind it, whatever a few small forwards show.
        warmups: forwards so far that took longer than others of their shape will.
        records_chains: whether `forward_chains` can be asked.
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
    bits: int = 0
    failure: str | None = None
    rows_vary: bool = False
    warmups: int = 0
    records_chains: bool = False

    def new_pool(self, limit: int) -> CachePool:
        """Where the model's requests get their caches; called once.

        Args:
            limit: tokens of one request (the model's context).
        """
        return CachePool(limit)

    def forward(self, segments: Sequence[Segment], device: torch.device, layers: Sequence[int] = ()) -> ForwardOutput:
        """Reserve room in the segments' caches, lay the segments out, and run them.

        Args:
            segments: the requests' shares of the forward.
            device: of the model.
            layers: whose output is wanted, too.

        Returns:
            Of the wanted rows; logits of padded ids of the embedding included.
        """
        alone = any(segment.inputs is not None for segment in segments)
        if alone and len(segments) > 1:
            return self._forward_apart(segments, device, layers)
        plan = ForwardPlan.of(segments, device, 1 if alone else self.least_rows)
        seen: dict[int, Tensor] = {}
        if layers:
            logits, hidden = self.run_watched(plan, layers, seen)
        else:
            logits, hidden = self.run_inputs(plan) if alone else self.run(plan)
        shown = tuple(seen[layer] for layer in layers)
        if logits.shape[0] == plan.wanted:  # a view of all takes a microsecond, which a small model feels
            return ForwardOutput(logits, hidden, shown)
        return ForwardOutput(
            logits[: plan.wanted], hidden[: plan.wanted], tuple(layer[: plan.wanted] for layer in shown)
        )

    def _forward_apart(self, segments: Sequence[Segment], device: torch.device, layers: Sequence[int]) -> ForwardOutput:
        """The same where some are prompts with images or sound, each of which is read in a forward of its own."""
        numbers = range(len(segments))
        packed = [number for number in numbers if segments[number].inputs is None]
        groups = [*filter(None, [packed]), *([number] for number in numbers if number not in packed)]
        outputs = [self.forward([segments[number] for number in group], device, layers) for group in groups]
        order = [number for group in groups for number in group]
        counts = [len(segments[number].rows) for number in order]

        def in_order(parts: tuple[Tensor, ...]) -> Tensor:
            rows = dict(zip(order, torch.cat(parts).split(counts), strict=True))
            return torch.cat([rows[number] for number in numbers])

        parts = zip(*((each.logits, each.hidden, *each.layers) for each in outputs), strict=True)
        logits, hidden, *shown = map(in_order, parts)
        return ForwardOutput(logits, hidden, tuple(shown))

    def forward_chains(
        self, segments: Sequence[Segment], levels: int, choose: Choose, numbers: Sequence[Tensor], vocab: int
    ) -> tuple[Tensor, Tensor | None]:
        """See `LanguageModel.forward_chains`; logits are cut to `vocab` ids.

        Raises:
            UnsupportedModelError: this backend records no chains.
        """
        raise UnsupportedModelError("this forward records no chains")

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
        """The same as `run`, and put what each of the layers gives, `[rows, width]` at the plan's rows, into `seen`.

        Raises:
            UnsupportedModelError: this backend shows no layers.
        """
        raise UnsupportedModelError("this forward shows no single layers; load the model with fast_paths=False")

    def shallow(self, layers: int) -> AbstractContextManager[None]:
        """Forwards end behind so many layers meanwhile.

        Raises:
            UnsupportedModelError: this backend always runs all.
        """
        raise UnsupportedModelError("this forward runs all of its layers")

    def quantize(self, bits: int) -> None:
        """Give the linear weights so many bits, 8 or 4; what they were is freed.

        Raises:
            UnsupportedModelError: its forward has no products with such weights, or they are quantised already.
        """
        raise UnsupportedModelError(
            "it does not run by the native forward, which alone has products with such weights; leave --weights out"
        )

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


def decoder_layers(model: PreTrainedModel) -> Sequence[nn.Module]:
    """The model's layers in order; none where they are not one list, as many as its configuration says."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    lists = [part for part in model.base_model.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    return list(lists[0]) if len(lists) == 1 else ()


@contextmanager
def showing(layers: Sequence[nn.Module], chosen: Sequence[int], show: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Inside the block `show` is given what each chosen layer puts out, `[1, tokens, width]`, behind its number."""

    def noted(layer: int, output: Any) -> None:
        show(layer, output if isinstance(output, Tensor) else output[0])

    with ExitStack() as hooks:
        for layer in chosen:
            handle = layers[layer].register_forward_hook(
                lambda module, inputs, output, layer=layer: noted(layer, output)
            )
            hooks.callback(handle.remove)
        yield
