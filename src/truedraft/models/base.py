"""The interface of a language model that the engine and drafters use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from truedraft.core.budget import Budget
from truedraft.core.top_k import TopK
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.errors import ModelError, PromptError, UnsupportedModelError
from truedraft.models.cache import CachePool, RequestCache
from truedraft.models.multimodal import Processor
from truedraft.models.sources import Sources
from truedraft.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from truedraft.models.lm_head import LmHead

Choose: TypeAlias = Callable[..., tuple[Tensor, Tensor | None]]
"""From logits `[rows, vocab]` and some numbers `[rows]`: a valid id for each row, and the distributions `[rows, vocab]`
they were drawn from, if any, without synchronisation with the device."""

HeadRun: TypeAlias = Callable[[Tensor, int, int], TopK]
"""For vectors `[rows, head_width]` and numbers of heads and ranks: the likeliest ids `[heads, rows, ranks]`."""


DrawnChain: TypeAlias = tuple[Sequence[int], Tensor | None, Sequence[float]]
"""Drawn tokens, their distributions `[drawn, vocab]` (None: one-hot), and their probabilities if the budget looks."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's share of a packed forward."""

    cache: RequestCache  # holds the tokens before these; the forward writes after them and does not commit
    tokens: Tensor  # [new], int64, on the host or the device: of a prompt, the last committed token and a tree, a level
    shape: TreeShape  # of all uncommitted tokens, those of earlier forwards first; -1 is the last committed
    rows: Sequence[int]  # which of the new tokens need logits, ascending
    written: int = 0  # uncommitted tokens that earlier forwards wrote; the new ones are the rest of `shape`
    # First new tokens of a prompt. Layers with states read these in pieces and others one by one, so that a token's
    # bits do not depend on the rest of the forward.
    prompt: int = 0
    adapter: str | None = None
    # Non-text inputs by name; the tokens are then the whole prompt, and the cache is empty. Audio may also be given
    # with parts of a prompt, until an encoder has read it.
    inputs: Mapping[str, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """The output of a packed forward, the segments' rows concatenated."""

    logits: Tensor  # [rows, vocab], without padded ids
    hidden: Tensor  # [rows, width]: the input of the LM head, after the final norm
    layers: tuple[Tensor, ...] = ()  # [rows, width] for each requested layer: its output


class Reader:
    """How a language model tokenises and ends texts: what is known without its weights."""

    name: str
    tokenizer: Tokenizer | None  # None if prompts and answers are ids
    vocab_size: int  # ids, without padding of the embedding
    context_length: int  # most tokens of one request
    eos_token_ids: tuple[int, ...]
    sources: Sources | None = None  # layout of its texts; None without an encoder

    def source_tokens(self, tokens: Sequence[int]) -> int:
        """How many of a text's first tokens an encoder reads; options about texts apply to the rest."""
        return 0 if self.sources is None else self.sources.length(tokens) or 0

    def most_tokens(self, tokens: Sequence[int]) -> int:
        return self.context_length if self.sources is None else self.source_tokens(tokens) + self.sources.limit


class LanguageModel(Reader, ABC):
    """A causal language model that runs many token trees in one forward."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: str = "auto"  # dtype of keys and values, "int8" or "auto", which is the model's own
    fast_paths: tuple[str, ...] = ()  # names of the optimisations in use, for reports
    parameters: int = 0  # number of weights
    weight_bytes: int = 0  # that one forward reads
    note: str | None = None  # what every report on the model must say, such as that it was padded
    head_width: int = 0  # entries of `ForwardOutput.hidden` that heads read: all, or a padded model's nonzero; 0: none
    shown_layers: int = 0  # layers with output in `forward_showing`; 0 if it is not supported
    adapters: tuple[str, ...] = ()
    shared_ids: Tensor | None = None  # that a draft with another tokenizer can write; None: all
    input_names: frozenset[str] = frozenset()  # non-text inputs of a prompt, such as `pixel_values`
    placeholders: frozenset[int] = frozenset()  # ids of tokens that these inputs replace
    pool: CachePool | None = None  # of its caches; None if none are kept
    failure: str | None = None  # why it cannot run, in a sentence; None while it can
    warmups: int = 0  # forwards so far that took longer than later ones of their shape, such as CUDA graph captures
    records_chains: bool = False
    draws_chains: bool = False

    def __repr__(self) -> str:
        size = f"{self.parameters / 1e6:.2f} M parameters, " if self.parameters else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"<{type(self).__name__} {self.name!r}: {size}{dtype} on {self.device}, context {self.context_length}>"

    @property
    def fingerprint(self) -> str:
        """A hash of the weights, equal for every dtype, device and padding; ModelError if there are none to read."""
        raise UnsupportedModelError(f"{self.name} has no weights that a fingerprint could be taken of")

    @property
    def sample(self) -> str | None:
        """A hash of a few rows of each weight, which is fast to compute; None if there are none to read."""
        return None

    @property
    def processor(self) -> Processor:
        """Makes prompts of texts with images.

        Raises PromptError: the model reads no images; ModelError: it comes without a processor; MissingExtraError:
        Pillow is not installed.
        """
        raise PromptError(f"{self.name!r} takes no pictures; give text alone, or name a model that sees")

    def new_cache(self) -> RequestCache:
        assert self.pool is not None
        return self.pool.acquire()

    def release_cache(self, cache: RequestCache) -> None:
        assert self.pool is not None
        self.pool.release(cache)

    @property
    def opening(self) -> tuple[int, ...]:
        """Tokens that a synthetic text must begin with; none without an encoder. Its audio is `opening_inputs`."""
        return () if self.sources is None else self.sources.opening

    @property
    def opening_inputs(self) -> Mapping[str, Tensor] | None:
        return None if self.sources is None else self.sources.opening_inputs or None

    def begun_cache(self) -> RequestCache:
        cache, ids = self.new_cache(), self.opening
        if ids:
            shape = chain_shape(len(ids))
            tokens = torch.tensor(ids, device=self.device)
            self.forward([Segment(cache, tokens, shape, (), prompt=len(ids), inputs=self.opening_inputs)])
            cache.commit(range(len(ids)))
        return cache

    @contextmanager
    def trying(self) -> Iterator[RequestCache]:
        """A cache that holds `opening`, for trial forwards, until the end of the context."""
        cache = self.begun_cache()
        try:
            yield cache
        finally:
            self.release_cache(cache)

    def most_drafted(self, tokens: Sequence[int]) -> int:
        """Largest depth of a draft that it may write after a text, with the last token never read."""
        return self.most_tokens(tokens) - len(tokens) + 1

    @abstractmethod
    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        """Run one packed forward; ModelError if it failed. A row's logits depend on its context and ancestors only."""

    def forward_showing(self, segments: Sequence[Segment], layers: Sequence[int]) -> ForwardOutput:
        """`forward` with the outputs of `layers`, below `shown_layers`; UnsupportedModelError if there are none."""
        raise UnsupportedModelError(f"{self.name} shows no vectors of single layers; load it with fast_paths=False")

    def forward_chains(
        self, segments: Sequence[Segment], levels: int, choose: Choose, numbers: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Several forwards in one: after each segment a chain of tokens is chosen, each after the previous one.

        All tokens but the last of each chain are written after the segment's, as further uncommitted ones.

        Args:
            segments: chains, one for each request, with logits of the last token.
            choose: a module-level function that depends on its arguments only: recordings are keyed by it.
            numbers: `[requests, levels]` each, for `choose`.

        Returns ids `[requests, levels]` and distributions `[requests, levels, vocab]`, on the device.
        """
        raise UnsupportedModelError(f"{self.name} records no chains; draft level by level")

    def draft_chain(self, segment: Segment, budget: Budget, numbers: Sequence[Sequence[float]]) -> DrawnChain:
        """Draw a chain after a segment's last token, each token before the forward that reads it, in one call.

        Drawing stops as the budget says, and where logits have no distribution. All tokens but the last drawn one are
        written after the segment's, which are committed.

        Args:
            numbers: a temperature and a number in [0, 1) for each level, `[2, levels]`; none for the likeliest tokens.

        Raises UnsupportedModelError: the model does not draw chains (`draws_chains`).
        """
        raise UnsupportedModelError(f"{self.name} draws no chains; draft level by level")

    def quantized(self, bits: int) -> LanguageModel:
        """This model with linear weights of 8 or 4 bits, made on first use, as a drafter for itself.

        Its forwards read what this model committed to its caches and write after it. The caller must not commit,
        because this model would compute other keys and values. Forwards of the two wait for each other.

        Raises OptionError: neither 8 nor 4 bits; UnsupportedModelError: there are no products with such weights for it.
        """
        raise UnsupportedModelError(f"{self.name} has no weights that could be quantised")

    def narrowed(self, ids: Tensor) -> LanguageModel:
        """This model with logits `[rows, len(ids)]` of some ids alone, in their order; it shares weights and caches.

        Forwards of the two wait for each other. Raises UnsupportedModelError: its forward computes those of all ids.
        """
        raise UnsupportedModelError(f"{self.name} computes logits of all ids")

    def check_room(self) -> None:
        """Raise ModelError if weights still to be made failed before, or do not fit into the free memory."""
        if self.failure is not None:
            raise ModelError(self.failure)

    def stepping(self) -> AbstractContextManager[None]:
        """Held while an engine steps: computations between forwards do not compete with them."""
        return nullcontext()

    def unembed(self, vectors: Tensor) -> Tensor:
        """Logits `[rows, vocab_size]` of vectors `[rows, head_width]`, row by row; or UnsupportedModelError."""
        raise UnsupportedModelError(f"{self.name} has no LM head that heads could share")

    def lm_head(self) -> LmHead:
        """A copy of the LM head on the CPU, with gradients through the vectors; raises as `unembed`."""
        raise UnsupportedModelError(f"{self.name} has no LM head that heads could learn with")

    def likeliest(self, vectors: Tensor, count: int) -> TopK:
        """The `count` likeliest ids by the logits of `unembed`, `[rows, count]`, row by row; see `unembed`."""
        return TopK.of(self.unembed(vectors), count)

    def shared_heads(self, blocks: Sequence[Sequence[nn.Linear]]) -> HeadRun | None:
        """A faster `likeliest` for heads x + SiLU(W x + b), of equally many layers, which are copied; or None."""
        return None

    def embed(self, tokens: Tensor) -> Tensor:
        """The table's embeddings `[rows, head_width]` of ids `[rows]`; UnsupportedModelError without such a table."""
        raise UnsupportedModelError(f"{self.name} has no embedding that heads could read")

    def finish_logits(self, logits: Tensor) -> Tensor:
        return logits
