"""A language model that stands before another one, to change one thing about it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn

from truedraft.cache import RequestCache
from truedraft.models.base import ForwardOutput, HeadRun, LanguageModel, Segment
from truedraft.models.ranking import Likeliest


class DelegatingModel(LanguageModel):
    """Does all as the inner model does; subclasses change what they are for.

    Args:
        inner: the model behind.
    """

    def __init__(self, inner: LanguageModel) -> None:
        self.inner = inner
        self.name = inner.name
        self.tokenizer = inner.tokenizer
        self.vocab_size = inner.vocab_size
        self.context_length = inner.context_length
        self.eos_token_ids = inner.eos_token_ids
        self.device = inner.device
        self.dtype = inner.dtype
        self.fast_paths = inner.fast_paths
        self.parameters = inner.parameters
        self.weight_bytes = inner.weight_bytes
        self.note = inner.note
        self.head_width = inner.head_width

    @property
    def fingerprint(self) -> str:
        """That of the inner model."""
        return self.inner.fingerprint

    def new_cache(self) -> RequestCache:
        """One of the inner model's."""
        return self.inner.new_cache()

    def release_cache(self, cache: RequestCache) -> None:
        """Give it back to the inner model."""
        self.inner.release_cache(cache)

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        """As the inner model."""
        return self.inner.forward(segments)

    def stepping(self) -> AbstractContextManager[None]:
        """As the inner model."""
        return self.inner.stepping()

    def unembed(self, vectors: Tensor) -> Tensor:
        """As the inner model."""
        return self.inner.unembed(vectors)

    def likeliest(self, vectors: Tensor, count: int) -> Likeliest:
        """As the inner model."""
        return self.inner.likeliest(vectors, count)

    def shared_heads(self, blocks: Sequence[Sequence[nn.Linear]]) -> HeadRun | None:
        """As the inner model."""
        return self.inner.shared_heads(blocks)

    def embed(self, tokens: Tensor) -> Tensor:
        """As the inner model."""
        return self.inner.embed(tokens)

    def finish_logits(self, logits: Tensor) -> Tensor:
        """As the inner model."""
        return self.inner.finish_logits(logits)


class ScaledModel(DelegatingModel):
    """Logits times a factor: the same model at another temperature, as a draft that errs in a known way.

    Args:
        inner: the model behind.
        factor: of its logits.
    """

    def __init__(self, inner: LanguageModel, factor: float) -> None:
        super().__init__(inner)
        self._factor = factor

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        """As the inner model, with scaled logits."""
        output = self.inner.forward(segments)
        return ForwardOutput(output.logits.float() * self._factor, output.hidden)


class ReducedModel(DelegatingModel):
    """A model that gives all its probability to a few tokens, so that the joint law of several tokens can be summed.

    Args:
        inner: the model behind.
        kept: the ids that stay possible.
    """

    def __init__(self, inner: LanguageModel, kept: Sequence[int]) -> None:
        super().__init__(inner)
        self._kept = list(kept)

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        """As the inner model, with -inf for all other ids."""
        output = self.inner.forward(segments)
        return ForwardOutput(self._reduced(output.logits), output.hidden)

    def unembed(self, vectors: Tensor) -> Tensor:
        """As the inner model, with -inf for all other ids."""
        return self._reduced(self.inner.unembed(vectors))

    def likeliest(self, vectors: Tensor, count: int) -> Likeliest:
        """Of the reduced logits."""
        return Likeliest.of(self.unembed(vectors), count)

    def shared_heads(self, blocks: Sequence[Sequence[nn.Linear]]) -> HeadRun | None:
        """None: a faster way would not know which ids are kept."""
        return None

    def _reduced(self, logits: Tensor) -> Tensor:
        reduced = logits.new_full(logits.shape, float("-inf"))
        reduced[:, self._kept] = logits[:, self._kept]
        return reduced
