"""A smaller language model as drafter: chains and sampled trees, one packed forward per level for the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.budget import Budget, Hint, check_nodes, nodes_of
from truedraft.core.noise import Noise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.tree import chain_shape
from truedraft.drafters.base import Drafter, DraftRequest, StepOutcome
from truedraft.drafters.draws import DraftIds
from truedraft.drafters.held import Held, ModelCaches
from truedraft.drafters.tree_builder import SiblingChains, TreeBuilder, draw_chains, draw_level, judged_if_it_fails
from truedraft.errors import CompositionError, OptionError, UnsupportedModelError, VocabularyMismatchError
from truedraft.models.base import Choose, LanguageModel, Segment
from truedraft.models.cache import FEW, PrefixCache, RequestCache, bounded

_PREFILL_TOKENS = 512


class DraftModel(Drafter):
    """Drafts with a smaller model that shares the target's tokenizer (Leviathan et al. 2211.17192).

    A level of the tree is one packed forward for all requests. With several chains, sampled requests get chains drawn
    in parallel (`SiblingChains`), and others the likeliest first tokens with a chain below each. On a device, the host
    waits once per level of a tree with several draws per node, or with `min_probability`, and else not at all. Raises
    `OptionError` for an option out of range.

    Args:
        num_speculative_tokens: length of a chain; ignored when `branching` is given.
        branching: draws at each node of depth 0, 1, ...; (3, 2, 1) makes 3 + 6 + 6 nodes at most.
        min_probability: draft no further below a token to which the draft gave less than this; the token stays.
        context: most tokens of a text that it sees and keeps, the first and the last ones (`BoundedContext`).
        ids: distinct ids `[guessed]`, int64, among which it guesses, if its forward can compute their logits alone
            (FR-Spec, Zhao et al. 2502.14856); None is all of them.
    """

    name = "draft"
    observes_lazily = True

    def __init__(
        self,
        model: LanguageModel,
        num_speculative_tokens: int = 4,
        branching: Sequence[int] | None = None,
        min_probability: float = 0.0,
        chains: int = 1,
        context: int | None = None,
        ids: Tensor | None = None,
    ) -> None:
        check_nodes("num_speculative_tokens", num_speculative_tokens)
        check_nodes("chains", chains)
        if branching is not None and chains > 1:
            raise OptionError("a draft model takes branching or chains, not both; branching=3-1-1 is 3 chains of 3")
        single = (chains, *(1,) * (num_speculative_tokens - 1))
        self.branching = tuple(branching) if branching is not None else single
        self.chains = chains
        self.limits = Budget(
            len(self.branching), max(self.branching, default=0), nodes_of(self.branching), min_probability
        )
        self.model: LanguageModel = model
        self.ids = ids
        self.narrow()
        self.caches: dict[int, RequestCache] = {}
        self.prefixes = PrefixCache()
        drops = model.pool is not None and model.pool.drops
        self.context = context
        self._bounds = bounded(context, drops=drops, name=model.name)
        self.held = Held([ModelCaches(model, self.caches, self.prefixes, self.limits.nodes, context=context)])
        self._reads_inputs = model.opening_inputs is not None

    def resized(self, **sizes: Any) -> DraftModel:
        least, context = self.limits.min_probability, self.context
        return DraftModel(self.model, min_probability=least, context=context, ids=self.ids, **sizes)

    def narrow(self) -> None:
        """Compute logits of `ids` alone from now on; call it again when the model's weights have changed."""
        self._guessing: LanguageModel = self.model
        self._ids: DraftIds | None = None
        self.guessed: int | None = None  # public, for costs are kept by it
        if self.ids is not None:
            with contextlib.suppress(UnsupportedModelError):
                ids = self.ids.sort().values  # of equal logits the lowest id is taken
                self._guessing, self._ids = self.model.narrowed(ids), DraftIds(ids, self.model.vocab_size)
                self.guessed = len(self.ids)

    @property
    def kinds(self) -> frozenset[DrawKind]:
        """Independent draws with one draw per node or with several chains; otherwise without replacement."""
        independent = self.limits.width == 1 or self.chains > 1
        return frozenset({DrawKind.INDEPENDENT if independent else DrawKind.WITHOUT_REPLACEMENT})

    def check(self, target: LanguageModel) -> None:
        """Raise `VocabularyMismatchError` for a target with another tokenizer; sizes of vocabularies may differ."""
        ours, theirs = self.model.tokenizer, target.tokenizer
        if ours is not None and theirs is not None and not ours.same_vocabulary(theirs):
            raise VocabularyMismatchError(
                f"draft {self.model.name!r} and target {target.name!r} have different tokenizers "
                f"({theirs.difference(ours)}); give DraftModel(TranslatedModel(draft, target)), or a draft trained on "
                "the target's tokenizer"
            )
        target_shapes, own_shapes = _shapes(target), _shapes(self.model)
        if own_shapes and own_shapes != target_shapes:
            raise CompositionError(
                f"draft {self.model.name!r} hears {_described(own_shapes)}, and target {target.name!r} is given "
                f"{_described(target_shapes) if target_shapes else 'text'}; use a draft that hears the same"
            )
        if self.model.sources is not None and self.model.opening != target.opening:
            raise CompositionError(
                f"draft {self.model.name!r} is an encoder-decoder, and the texts of target {target.name!r} do not "
                "begin as its own do; use a draft of the target's kind"
            )
        if self.model.vocab_size != target.vocab_size:
            without = next((each.name for each in (self.model, target) if each.tokenizer is None), None)
            detail = "" if without is None else f", and {without!r} comes without a tokenizer that says what they mean"
            raise VocabularyMismatchError(
                f"draft {self.model.name!r} has {self.model.vocab_size} token ids and target {target.name!r} has "
                f"{target.vocab_size}{detail}; use a draft trained on the target's tokenizer"
            )

    def hint(self, request: DraftRequest) -> Hint:
        lag = len(request.tokens) - self.caches[request.id].length
        return Hint(behind=lag, confident=self.limits.width == 1 and not transfers.waits(self.model.device))

    def begin(self, request: DraftRequest) -> None:
        self.caches[request.id] = cache = self.model.new_cache()
        if self._bounds is not None:
            cache.bound(self._bounds, partial(self.prefixes.keep, request.id))
        self.prefixes.join(request.id, cache, request.tokens, request.scope)

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        within = [self.within(budget, request) for request, budget in zip(batch, budgets, strict=True)]
        builders = [self._builder(*each) for each in zip(batch, within, noise, strict=True)]
        level = [builder for builder in builders if not builder.budget.is_zero]
        for builder in level:
            # A step that failed half-way may have left more in the cache than was committed.
            builder.cache.rollback(min(builder.cache.length, len(builder.request.tokens) - 1))
        self._share([builder.request for builder in level])
        if self.model.records_chains:
            level = draw_chains(level, self.model.device, self._run_chains, TreeBuilder.chain_numbers)
        draws_chains = self._guessing.draws_chains and not self._reads_inputs
        if len(level) == 1 and draws_chains and (numbers := level[0].host_numbers()) is not None:
            self._draft_chain(level.pop(), numbers)
        logits = self._catch_up([builder.request for builder in level]) if level else None
        with judged_if_it_fails(builders):
            while logits is not None:
                level = draw_level(level, logits, self._ids)
                segments = [builder.segment() for builder in level]
                logits = self._guessing.forward(segments).logits if level else None
        return [builder.proposal() for builder in builders]

    def _draft_chain(self, chain: TreeBuilder, numbers: Sequence[Sequence[float]]) -> None:
        self._read_before([chain.request], _PREFILL_TOKENS)
        (segment,) = self._segments([chain.request], whole=True)
        tokens, probs, confidence = self._guessing.draft_chain(segment, chain.budget, numbers)
        chain.take_chain(torch.tensor(tokens), probs, confidence)

    def _run_chains(
        self, choose: Choose, chains: Sequence[TreeBuilder], levels: int, numbers: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        batch = [chain.request for chain in chains]
        self._read_before(batch, FEW)
        segments = self._segments(batch, whole=True)
        drafted = self.model.forward_chains(segments, levels, choose, numbers)
        for segment in segments:
            segment.cache.commit(range(len(segment.shape)))
            segment.cache.reserve(levels - 1)  # written after it, for `observe` to keep
        return drafted

    def _builder(self, request: DraftRequest, budget: Budget, noise: Noise) -> TreeBuilder:
        cache, device = self.caches[request.id], self.model.device
        if self.chains > 1 and not (request.params.greedy or request.params.seeded):
            return SiblingChains(cache, request, budget, noise, self.chains, device)
        return TreeBuilder(cache, request, budget, noise, self.branching, device, ranks=self.ranks)

    def within(self, budget: Budget, request: DraftRequest) -> Budget:
        return budget.within(self.limits).cut(self.model.most_drafted(request.tokens))

    def _missed(self, request: DraftRequest) -> int:
        return len(request.tokens) - self.caches[request.id].length

    def _share(self, batch: Sequence[DraftRequest]) -> None:
        """Copy shared prefixes from other requests; of several new requests with a common prefix one reads it first."""
        readers: list[DraftRequest] = []
        followers: list[DraftRequest] = []
        for request in batch:
            if self._missed(request) <= FEW:
                continue
            if self.prefixes.leader(request.id, [each.id for each in readers]) is not None:
                followers.append(request)
            else:
                self.prefixes.fill(request.id)
                readers.append(request)
        while followers and any(self._missed(each) > 1 for each in readers):  # last tokens are read in `_catch_up`
            self._read(readers, whole=False)
        for request in followers:
            self.prefixes.fill(request.id)

    def _catch_up(self, batch: Sequence[DraftRequest]) -> Tensor:
        """Read the unread committed tokens, two after full acceptance; logits `[requests, vocab]` at the last."""
        self._read_before(batch, _PREFILL_TOKENS)
        return self._read(batch, whole=True)

    def _read_before(self, batch: Sequence[DraftRequest], most: int) -> None:
        """Read texts up to where one forward can read the rest of each, at most `most` tokens."""
        while any(self._missed(each) > min(most, self._room(each)) for each in batch):
            self._read(batch, whole=False)

    def _room(self, request: DraftRequest) -> int:
        return self.caches[request.id].make_room(self._missed(request))

    def _read(self, batch: Sequence[DraftRequest], *, whole: bool) -> Tensor:
        segments = self._segments(batch, whole=whole)
        output = self._guessing.forward(segments)
        for segment in segments:
            segment.cache.commit(range(len(segment.shape)))
        return output.logits

    def _segments(self, batch: Sequence[DraftRequest], *, whole: bool) -> list[Segment]:
        segments = []
        for request in batch:
            cache = self.caches[request.id]
            ids = request.tokens[cache.length : len(request.tokens) - (not whole)][:_PREFILL_TOKENS]
            ids = ids[: cache.make_room(len(ids))]
            if ids:
                inputs = request.inputs if self._reads_inputs and not cache.family.memory else None
                rows = (len(ids) - 1,) if whole else ()
                prompt = len(ids) if len(ids) > FEW else 0  # a draft need not be bitwise reproducible
                shape = chain_shape(len(ids))
                segments.append(Segment(cache, torch.tensor(ids), shape, rows, prompt=prompt, inputs=inputs))
        return segments

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        """Keep the accepted path of the draft's own tree; its last level was never fed, so it cannot be kept."""
        for request, outcome in zip(batch, outcomes, strict=True):
            cache = self.caches[request.id]
            cache.commit([node for node in outcome.path if node < cache.uncommitted])

    def caught_up(self, batch: Sequence[DraftRequest]) -> list[RequestCache]:
        """Read all but the last few tokens of each text, at least one, before anything is drafted after it."""
        for each in batch:
            cache = self.caches[each.id]
            cache.rollback(min(cache.length, len(each.tokens) - 1))
        self._share(batch)
        while any(self._missed(each) > (FEW if self.caches[each.id].length else 1) for each in batch):
            self._read(batch, whole=False)
        return [self.caches[request.id] for request in batch]

    def rewind(self, request: DraftRequest) -> None:
        cache = self.caches[request.id]
        cache.rollback(min(cache.length, len(request.tokens)))

    def end(self, request: DraftRequest) -> None:
        cache = self.caches.pop(request.id, None)
        if cache is not None:
            try:
                self.prefixes.keep(request.id)
            finally:
                self.prefixes.leave(request.id)
                self.model.release_cache(cache)


def _shapes(model: LanguageModel) -> dict[str, tuple[int, ...]]:
    """Shapes of an audio input, without the batch; {} if it takes none."""
    return {name: tuple(sound.shape[1:]) for name, sound in (model.opening_inputs or {}).items()}


def _described(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} of {' x '.join(map(str, shape))}" for name, shape in shapes.items())
