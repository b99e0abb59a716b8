"""What engine and drafters need of a language model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from truedraft.core.top_k import TopK
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.errors import ModelError, PromptError, UnsupportedModelError
from truedraft.models.cache import CachePool, RequestCache
from truedraft.models.processor import Processor
from truedraft.models.sources import Sources
from truedraft.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from truedraft.models.lm_head import LmHead

Choose: TypeAlias = Callable[..., tuple[Tensor, Tensor | None]]
"""Chooses a token of each row from logits `[rows, vocab]` and some numbers `[rows]`: ids `[rows]`, and distributions
`[rows, vocab]` that they were drawn from, if any. It waits for nothing, and its ids exist whatever the logits are."""

HeadRun: TypeAlias = Callable[[Tensor, int, int], TopK]
"""For vectors `[rows, head_width]`, so many heads and ranks: the likeliest ids `[heads, rows, ranks]`."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's share of a packed forward.

    Attributes:
        cache: holds the tokens before these; the forward writes behind them and does not commit.
        tokens: `[new]`, int64: a part of a prompt, the last committed token and a tree below it, or one more level
            of a tree. On the host or on the model's device; the model brings host tokens up.
        shape: how all uncommitted tokens hang together, those of earlier forwards first; -1 is the last committed.
        rows: which of the new tokens need logits, rising.
        written: uncommitted tokens that earlier forwards wrote; the new ones are the rest of `shape`.
        prompt: so many of the new ones, from the first, are a prompt's: layers that carry states read these in pieces,
            and all others one by one, so that a token's bits do not hang on who shares its forward.
        adapter: one of the model's, which adds to its weights for these tokens.
        inputs: what a prompt has beside its tokens, by name; the tokens are then the whole prompt, and the cache is
            empty. A sound may be given with parts of a prompt, too, until an encoder has heard it.
    """

    cache: RequestCache
    tokens: Tensor
    shape: TreeShape
    rows: Sequence[int]
    written: int = 0
    prompt: int = 0
    adapter: str | None = None
    inputs: Mapping[str, Tensor] | None = None


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a packed forward gives, the segments' rows one behind another.

    Attributes:
        logits: `[rows, vocab]` in the model's dtype, padded ids cut off.
        hidden: `[rows, width]`: the vectors that enter the LM head, after the final norm.
        layers: `[rows, width]` of each layer that was asked for: what it gives to the next.
    """

    logits: Tensor
    hidden: Tensor
    layers: tuple[Tensor, ...] = ()


class Reader:
    """How a language model reads texts and ends them: what is known of it without its weights.

    Attributes:
        name: what the user called it.
        tokenizer: None when ids go in and out.
        vocab_size: ids that exist, padding of the embedding not counted.
        context_length: most tokens of one request.
        eos_token_ids: ids that end an answer.
        sources: how its texts are laid out; None without an encoder.
    """

    name: str
    tokenizer: Tokenizer | None
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    sources: Sources | None = None

    def source_tokens(self, tokens: Sequence[int]) -> int:
        """How many of a text's first tokens an encoder reads; options about texts look at what follows."""
        return 0 if self.sources is None else self.sources.length(tokens) or 0

    def most_tokens(self, tokens: Sequence[int]) -> int:
        """Of a request that begins so, prompt and answer together."""
        return self.context_length if self.sources is None else self.source_tokens(tokens) + self.sources.limit


class LanguageModel(Reader, ABC):
    """A causal language model that runs many token trees in one forward.

    Attributes:
        device: where its tensors live.
        dtype: of its weights.
        fast_paths: what is switched on beyond the plain forward, in words, for reports.
        parameters: weights; 0 where there are none.
        weight_bytes: bytes of weights that one forward reads.
        note: what every report on the model must say, such as that it was padded.
        head_width: entries of `ForwardOutput.hidden` that heads read: all, or for a padded model those of the model
            that it was made from, behind which there are zeros; 0 where heads cannot read them.
        shown_layers: layers whose output `forward_showing` gives; 0 where it gives none.
        adapters: that a segment may name.
        shared_ids: ids that it can write at all, of a draft that has another tokenizer than its target; None: all.
        input_names: what a prompt may have beside its tokens, such as `pixel_values`; none for models of text alone.
        placeholders: ids of tokens that this takes the place of.
        pool: where its caches come from, and wait for the next request; None where none are kept.
        failure: why it cannot run, in a sentence, where its weights are made late and could not be, or a process that
            runs a part of it has ended; None while it can.
        warmups: forwards so far that took longer than others of their shape will, as those that record a CUDA graph.
        records_chains: whether `forward_chains` can be asked.
    """

    device: torch.device
    dtype: torch.dtype
    fast_paths: tuple[str, ...] = ()
    parameters: int = 0
    weight_bytes: int = 0
    note: str | None = None
    head_width: int = 0
    shown_layers: int = 0
    adapters: tuple[str, ...] = ()
    shared_ids: Tensor | None = None
    input_names: frozenset[str] = frozenset()
    placeholders: frozenset[int] = frozenset()
    pool: CachePool | None = None
    failure: str | None = None
    warmups: int = 0
    records_chains: bool = False

    def __repr__(self) -> str:
        size = f"{self.parameters / 1e6:.2f} M parameters, " if self.parameters else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"<{type(self).__name__} {self.name!r}: {size}{dtype} on {self.device}, context {self.context_length}>"

    @property
    def fingerprint(self) -> str:
        """A hash of the weights, the same for every dtype, device and padding; computed when it is asked for.

        Raises:
            ModelError: there are no weights to read.
        """
        raise UnsupportedModelError(f"{self.name} has no weights that a fingerprint could be taken of")

    @property
    def sample(self) -> str | None:
        """A hash of a few rows of each weight, which is found at once; None where there are none to read."""
        return None

    @property
    def processor(self) -> Processor:
        """What makes prompts of texts with pictures.

        Raises:
            PromptError: the model does not see.
            ModelError: it comes without one.
            MissingExtraError: Pillow is not installed.
        """
        raise PromptError(f"{self.name!r} takes no pictures; give text alone, or name a model that sees")

    def new_cache(self) -> RequestCache:
        """An empty cache for one request."""
        assert self.pool is not None
        return self.pool.acquire()

    def release_cache(self, cache: RequestCache) -> None:
        """Take back a cache that is no longer used."""
        assert self.pool is not None
        self.pool.release(cache)

    @property
    def opening(self) -> tuple[int, ...]:
        """What a text that is made up has to begin with; empty without an encoder."""
        return () if self.sources is None else self.sources.opening

    @property
    def opening_inputs(self) -> Mapping[str, Tensor] | None:
        """What stands beside the tokens of `opening`, where an encoder hears."""
        return None if self.sources is None else self.sources.opening_inputs or None

    def begun_cache(self) -> RequestCache:
        """A cache that holds `opening`, so that any tokens may follow."""
        cache, ids = self.new_cache(), self.opening
        if ids:
            shape = chain_shape(len(ids))
            tokens = torch.tensor(ids, device=self.device)
            self.forward([Segment(cache, tokens, shape, (), prompt=len(ids), inputs=self.opening_inputs)])
            cache.commit(range(len(ids)))
        return cache

    @contextmanager
    def trying(self) -> Iterator[RequestCache]:
        """A cache that holds `opening`, to see what a few tokens behind it give; it is given back then."""
        cache = self.begun_cache()
        try:
            yield cache
        finally:
            self.release_cache(cache)

    def most_drafted(self, tokens: Sequence[int]) -> int:
        """Tokens of its own that it may write behind a text, one below another: the last of them it never reads."""
        return self.most_tokens(tokens) - len(tokens) + 1

    @abstractmethod
    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        """One packed forward. A row's logits depend on its own context and ancestors only.

        Raises:
            ModelError: the model failed.
        """

    def forward_showing(self, segments: Sequence[Segment], layers: Sequence[int]) -> ForwardOutput:
        """The same forward, with the output of some layers, given by numbers below `shown_layers`.

        Raises:
            UnsupportedModelError: the model shows none.
        """
        raise UnsupportedModelError(f"{self.name} shows no vectors of single layers; load it with fast_paths=False")

    def forward_chains(
        self, segments: Sequence[Segment], levels: int, choose: Choose, numbers: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Several forwards in one: behind each segment a chain of tokens is chosen, each by what is there before it.

        All tokens but the last of each chain are written behind the segment's, as further uncommitted ones.

        Args:
            segments: chains, one for each request, with logits wanted at the last token.
            levels: tokens to choose behind each.
            choose: a function of its arguments alone, at the top of a module: recordings are told apart by it.
            numbers: `[requests, levels]` each, which it is given beside the logits.

        Returns:
            Ids `[requests, levels]`, and the distributions `[requests, levels, vocab]`; both on the device.

        Raises:
            UnsupportedModelError: the model records no chains.
        """
        raise UnsupportedModelError(f"{self.name} records no chains; draft level by level")

    def quantized(self, bits: int) -> LanguageModel:
        """This model with linear weights of so many bits, to draft for itself.

        Its forwards read what this model committed to its caches, and write behind it; who runs them must not commit,
        for this model would compute other keys and values. Forwards of the two wait for each other. The weights are
        made, beside this model's own, when they are first used.

        Args:
            bits: 8 or 4.

        Raises:
            OptionError: neither 8 nor 4 bits.
            UnsupportedModelError: there are no products with such weights for it; says why.
        """
        raise UnsupportedModelError(f"{self.name} has no weights that could be quantised")

    def check_room(self) -> None:
        """Refuse where weights that are still to be made find no room in the memory that is free now, or could not be
        made before.

        Raises:
            ModelError: says how much they take and how much is free.
        """
        if self.failure is not None:
            raise ModelError(self.failure)

    def stepping(self) -> AbstractContextManager[None]:
        """Held while an engine steps: what is computed between forwards keeps out of their way."""
        return nullcontext()

    def unembed(self, vectors: Tensor) -> Tensor:
        """What the LM head makes of vectors, as if the model's layers had made them.

        Args:
            vectors: `[rows, head_width]`, in the model's dtype.

        Returns:
            Logits `[rows, vocab_size]`; a row does not depend on the others.

        Raises:
            UnsupportedModelError: the model has no LM head that could be used alone.
        """
        raise UnsupportedModelError(f"{self.name} has no LM head that heads could share")

    def lm_head(self) -> LmHead:
        """A copy of the LM head on the CPU, with gradients through the vectors, also of packed and quantised weights.

        Raises:
            UnsupportedModelError: as `unembed`.
        """
        raise UnsupportedModelError(f"{self.name} has no LM head that heads could learn with")

    def likeliest(self, vectors: Tensor, count: int) -> TopK:
        """The `count` likeliest ids by the logits of `unembed`, `[rows, count]`; a row does not depend on the others.

        Raises:
            UnsupportedModelError: as `unembed`.
        """
        return TopK.of(self.unembed(vectors), count)

    def shared_heads(self, blocks: Sequence[Sequence[nn.Linear]]) -> HeadRun | None:
        """Residual heads x + SiLU(W x + b) that end in the LM head, where the model has a faster way than `likeliest`.

        Args:
            blocks: the linear layers of each head, as many of each, `head_width` wide; their weights are copied.

        Returns:
            What gives the likeliest ids by the first heads; None where there is no faster way.
        """
        return None

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings `[rows, head_width]` of ids `[rows]`, as they lie in the model's table.

        Raises:
            UnsupportedModelError: the model has no such table, or one of another width than heads read.
        """
        raise UnsupportedModelError(f"{self.name} has no embedding that heads could read")

    def finish_logits(self, logits: Tensor) -> Tensor:
        """What the model does to the product of its LM head (a factor, a soft cap), for a product of any shape."""
        return logits
