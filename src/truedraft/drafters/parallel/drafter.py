"""A draft model that drafts in a process of its own, ahead of what it is asked for while the target verifies."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from truedraft.cache import Prefixes, RequestCache
from truedraft.core.budget import Budget, Hint
from truedraft.core.noise import KeyedNoise, Noise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.drafters.base import Drafter, DraftRequest, StepOutcome
from truedraft.drafters.draft_model import DraftModel
from truedraft.drafters.parallel.ahead import AheadWorker, Call, Reply
from truedraft.errors import CompositionError, DrafterError, OptionError
from truedraft.models.base import LanguageModel


@dataclass(slots=True)
class _Sent:
    """What the other process knows of a request.

    Attributes:
        tokens: that it was told.
        drafted: that it drafted behind these the last time.
    """

    tokens: int = 0
    drafted: int = 0


class ParallelDraft(Drafter):
    """Chains of a draft model, drafted by another process, which drafts on while the target verifies.

    What it proposes is what `draft` alone would: same tokens, same distributions, same noise (see
    `truedraft.drafters.parallel.ahead`); only the time differs. Requests that the process cannot serve (whose options
    change logits by what was written, with pictures or sounds, or with noise that is no `KeyedNoise`) are drafted for
    here, by `draft`. So are all, from then on and with a warning, once the process is gone.

    Args:
        draft: drafts chains in this process, of the same model and with the same options.
        worker: drafts in the other one.

    Raises:
        OptionError: `draft` makes trees.
    """

    name: ClassVar[str] = "draft"
    told_late = True
    is_inner = False  # a round's noise is not what it drafts ahead with

    def __init__(self, draft: DraftModel, worker: AheadWorker) -> None:
        if draft.limits.width > 1:
            raise OptionError("async drafts one chain, and branching or chains make trees; leave one of them out")
        self.limits: Budget = draft.limits
        self.model: LanguageModel = draft.model
        self.caches: Mapping[int, RequestCache] = draft.caches
        self.prefixes: Prefixes = draft.prefixes
        self._here = draft
        self._worker = worker
        self._sent: dict[int, _Sent] = {}
        self._last: Reply | None = None
        self._proposals = 0
        self._hits = 0

    @property
    def kinds(self) -> frozenset[DrawKind]:
        return self._here.kinds

    @property
    def cache_bytes(self) -> int:
        """Of both processes, of the other one as it told last."""
        return self._here.cache_bytes + (self._last.cache_bytes if self._last is not None and self._sent else 0)

    def cache_tokens(self, tokens: int) -> int:
        """The most in the cache for a request of so many tokens: a chain, a token, and the chain drafted ahead."""
        return self._here.cache_tokens(tokens) + 1 + self.limits.depth

    @property
    def report(self) -> Mapping[str, float]:
        """Proposals, and what share of them had been drafted ahead; tokens drafted ahead, used or not; processor
        seconds of the other process, and how many of them went into drafting ahead."""
        last = self._last
        if last is None:
            return {}
        return {
            "proposals": self._proposals,
            "ahead_hit_rate": self._hits / self._proposals,
            "ahead_tokens": last.ahead_tokens,
            "process_cpu_s": last.cpu_s,
            "ahead_cpu_s": last.ahead_cpu_s,
        }

    def check(self, target: LanguageModel) -> None:
        """Refuse what the draft refuses, and drafts that the process cannot run ahead.

        Raises:
            CompositionError: says why.
        """
        self._here.check(target)
        model = self.model
        why = None
        if model.device.type != "cpu":
            why = f"runs on {model.device}, and async drafts on the CPU"
        elif model.shared_ids is not None:
            why = "has another tokenizer than the target, and async drafts in the same ids"
        elif model.sources is not None:
            why = "has an encoder, and async drafts with decoders alone"
        elif model.pool is not None and model.pool.carries:
            why = "has layers that carry states, which do not go back; async needs attention alone"
        if why is not None:
            raise CompositionError(f"draft {model.name!r} {why}; leave async out")

    def hint(self, request: DraftRequest) -> Hint:
        hint, sent = self._here.hint(request), self._sent.get(request.id)
        if sent is None:
            return hint
        # As of a draft in this process: all but the last token that it drafted are in its cache.
        return replace(hint, behind=max(len(request.tokens) - sent.tokens - max(sent.drafted - 1, 0), 1))

    def begin(self, request: DraftRequest) -> None:
        """The process is told of a request that it can serve when it is first asked."""
        self._here.begin(request)
        if request.shaping is None and not request.inputs and self._worker.alive:
            self._sent[request.id] = _Sent()

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        """Ask the process, where it knows a request; draft here for others."""
        asked = list(zip(batch, budgets, noise, strict=True))
        calls = {place: call for place, each in enumerate(asked) if (call := self._call(*each)) is not None}
        reply = self._ask(list(calls.values())) if calls else None
        drafted: dict[int, Proposal] = {}
        if reply is not None:
            for place, chain in zip(calls, reply.chains, strict=True):
                drafted[place] = chain.proposal()
                self._sent[batch[place].id].drafted = len(chain.tokens)
        left = [place for place in range(len(batch)) if place not in drafted]
        if left:
            own = self._here.propose(
                [batch[place] for place in left], [budgets[place] for place in left], [noise[place] for place in left]
            )
            drafted |= zip(left, own, strict=True)
        return [drafted[place] for place in range(len(batch))]

    def _call(self, request: DraftRequest, budget: Budget, noise: Noise) -> Call | None:
        """What the process is asked for a request; None where there is nothing to ask it."""
        sent = self._sent.get(request.id)
        cut = self._here.within(budget, request)
        if sent is None or cut.is_zero or type(noise) is not KeyedNoise:
            return None
        tokens = tuple(request.tokens[sent.tokens :])
        sent.tokens += len(tokens)
        return Call(request.id, request.params, tokens, budget, noise.key, self.caches[request.id].limit)

    def _ask(self, calls: Sequence[Call]) -> Reply | None:
        """What the process drafted; None where it is gone.

        Raises:
            DrafterError: its model failed; it may be asked again.
        """
        try:
            reply = self._worker.propose(calls)
        except DrafterError as error:
            if self._worker.alive:
                raise
            self._go_on_here(error)
            return None
        except BaseException:  # it begins anew, and knows of nothing
            self._sent.clear()
            raise
        if reply.failure is not None and (self._last is None or self._last.failure is None):
            warnings.warn(f"nothing was drafted ahead ({reply.failure})", RuntimeWarning, stacklevel=2)
        self._last = reply
        self._proposals += len(calls)
        self._hits += reply.hits
        return reply

    def _go_on_here(self, error: DrafterError) -> None:
        """The process is gone: what it kept is drafted again in this one."""
        self._sent.clear()
        warnings.warn(f"drafter {self.name!r} goes on without async: {error}", RuntimeWarning, stacklevel=2)

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        """The process sees from the next call what became of its chain; what was drafted here is kept here."""
        self._here.observe(batch, outcomes)

    @property
    def holding(self) -> Collection[int]:
        return self.caches.keys() | self._sent.keys()

    def end(self, request: DraftRequest) -> None:
        """Give back what both processes hold for it."""
        self._here.end(request)
        if self._sent.pop(request.id, None) is not None:
            try:
                self._worker.end(request.id)
            except DrafterError as error:
                self._go_on_here(error)
