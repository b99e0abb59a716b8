"""A draft model that drafts in another process, ahead of the next step, while the target verifies."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

from truedraft.core.budget import Budget, Hint
from truedraft.core.noise import KeyedNoise, Noise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.drafters.base import Drafter, DraftRequest, StepOutcome
from truedraft.drafters.draft_model import DraftModel
from truedraft.drafters.held import Held
from truedraft.drafters.parallel.ahead import Call, Reply
from truedraft.drafters.parallel.process import DraftProcess
from truedraft.errors import CompositionError, DrafterError, OptionError
from truedraft.models.base import LanguageModel


class ParallelDraft(Drafter):
    """Drafts chains with a draft model in another process, which drafts ahead while the target verifies.

    Proposals are the same as those of `draft`; only the time differs. `draft` itself serves requests with
    context-dependent logits options, with pictures or sounds, or with noise that is not a `KeyedNoise`, and all
    requests after the process ended, with a warning. Raises `OptionError` if `draft` makes trees.
    `worker` drafts in the other process, with the same model and options.
    """

    name = "draft"
    observes_lazily = True

    def __init__(self, draft: DraftModel, worker: DraftProcess) -> None:
        if draft.limits.width > 1:
            raise OptionError("async drafts one chain, and branching or chains make trees; leave one of them out")
        self.limits: Budget = draft.limits
        self.model: LanguageModel = draft.model
        self._here = draft
        self._worker = worker
        self._sent: dict[int, int] = {}  # number of tokens of each request sent to the process
        # A cache holds at most a chain, a token, and the chain drafted ahead.
        self.held = Held([each.ahead(1 + self.limits.depth) for each in draft.held.models], [self._sent])
        self._last: Reply | None = None
        self._proposals = 0
        self._hits = 0

    @property
    def kinds(self) -> frozenset[DrawKind]:
        return self._here.kinds

    @property
    def report(self) -> Mapping[str, float]:
        """Proposals, the share of them drafted ahead, and tokens drafted ahead, used or not."""
        if self._last is None:
            return {}
        hit_rate, tokens = self._hits / self._proposals, self._last.ahead_tokens
        return {"proposals": self._proposals, "ahead_hit_rate": hit_rate, "ahead_tokens": tokens}

    def check(self, target: LanguageModel) -> None:
        """Raise `CompositionError` where `draft` does, and for draft models that cannot draft ahead."""
        self._here.check(target)
        model = self.model
        why = None
        if model.device.type != "cpu":
            why = f"runs on {model.device}, and async drafts on the CPU"
        elif model.shared_ids is not None:
            why = "has another tokenizer than the target, and async drafts in the same ids"
        elif model.sources is not None:
            why = "has an encoder, and async drafts only with decoders"
        elif model.pool is not None and model.pool.carries:
            why = "has layers that carry states, which cannot be rolled back; async needs attention layers only"
        if why is not None:
            raise CompositionError(f"draft {model.name!r} {why}; leave async out")

    def hint(self, request: DraftRequest) -> Hint:
        hint, sent = self._here.hint(request), self._sent.get(request.id)
        if sent is None:
            return hint
        # Drafted tokens are in its cache.
        return replace(hint, behind=max(len(request.tokens) - sent - self.limits.depth, 1), confident=False)

    def begin(self, request: DraftRequest) -> None:
        self._here.begin(request)
        if request.shaping is None and not request.inputs and self._worker.alive:
            self._sent[request.id] = 0

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        requests = list(zip(batch, budgets, noise, strict=True))
        calls = {place: call for place, each in enumerate(requests) if (call := self._call(*each)) is not None}
        drafted = dict(zip(calls, self._ask(list(calls.values())), strict=False)) if calls else {}
        left = [place for place in range(len(batch)) if place not in drafted]
        if left:
            own = self._here.propose(
                [batch[place] for place in left], [budgets[place] for place in left], [noise[place] for place in left]
            )
            drafted |= zip(left, own, strict=True)
        return [drafted[place] for place in range(len(batch))]

    def _call(self, request: DraftRequest, budget: Budget, noise: Noise) -> Call | None:
        """None if the process does not serve the request, or nothing can be drafted."""
        sent = self._sent.get(request.id)
        if sent is None or self._here.within(budget, request).is_zero or type(noise) is not KeyedNoise:
            return None
        tokens = tuple(request.tokens[sent:])
        self._sent[request.id] += len(tokens)
        return Call(request.id, request.params, tokens, budget, noise.key, self._here.caches[request.id].limit)

    def _ask(self, calls: Sequence[Call]) -> list[Proposal]:
        try:
            reply = self._last = self._worker.propose(calls)
        except DrafterError as error:
            self._go_on_here(error)
            return []
        self._proposals += len(calls)
        self._hits += reply.hits
        self.held.beside = reply.cache_bytes
        return reply.chains

    def _go_on_here(self, error: DrafterError) -> None:
        self._sent.clear()
        self.held.beside = 0
        warnings.warn(f"drafter {self.name!r} goes on without async: {error}", RuntimeWarning, stacklevel=2)

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        self._here.observe(batch, outcomes)

    def end(self, request: DraftRequest) -> None:
        self._here.end(request)
        if self._sent.pop(request.id, None) is not None:
            try:
                self._worker.end(request.id)
            except DrafterError as error:
                self._go_on_here(error)
            if not self._sent:
                self.held.beside = 0
