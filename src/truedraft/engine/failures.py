"""Failures that an engine recovers from: counted, logged once with a traceback, warned of once; they fail no answer."""

from __future__ import annotations

import logging
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from truedraft.core import transfers
from truedraft.core.budget import NOTHING_FOUND, Hint
from truedraft.core.proposal import Proposal, check_ids, check_proposal
from truedraft.core.stats import DraftTime
from truedraft.core.tree import TokenTree
from truedraft.drafters.base import CutShortError, Drafter, LostDrawsError, StepOutcome
from truedraft.engine.batch import StepItem
from truedraft.engine.request import Request
from truedraft.errors import DrafterError
from truedraft.models.base import LanguageModel

Found = TypeVar("Found")

_log = logging.getLogger(__name__)
# Without logging handlers Python prints records to standard error, tracebacks too.
logging.getLogger("truedraft").addHandler(logging.NullHandler())


class Failures:
    """The failures of one engine's parts."""

    def __init__(self) -> None:
        self._logged: set[tuple[object, ...]] = set()
        self._warned = False

    def log(self, who: str, error: Exception) -> None:
        """Log a failure once per kind and line, and clear the locals of its frames, which would keep tensors alive."""
        last = traceback.extract_tb(error.__traceback__)[-1:]
        kind = (who, type(error), *((frame.filename, frame.lineno) for frame in last))
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning("%s failed (%s)", who, summary(error), exc_info=error)
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__

    def run_or_split(
        self,
        who: str,
        items: Sequence[StepItem],
        work: Callable[[Sequence[StepItem]], Sequence[Found]],
        give_up: Callable[[Request, Exception], None],
    ) -> list[Found | None]:
        """Call `work` for all items together or, if that fails, for each; one that fails gets None and is given up."""
        try:
            return list(work(items))
        except Exception as error:
            if len(items) == 1:
                give_up(items[0].request, error)
                return [None]
            self.count_retry([item.request for item in items], who, error)
            return [found for item in items for found in self.run_or_split(who, [item], work, give_up)]

    def count_retry(self, requests: Sequence[Request], who: str, error: Exception) -> None:
        self.log(who, error)
        for request in requests:
            request.counters.recoveries += 1
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{who} failed for {len(requests)} requests together ({summary(error)}), so they are tried "
                "separately, which is slow; stats.recoveries counts how often that happens in this engine",
                RuntimeWarning,
                stacklevel=2,
            )


def summary(error: Exception) -> str:
    """An error in one sentence."""
    return f"{type(error).__name__}: {error}"


class GuardedDrafter:
    """Calls one drafter for all requests; one for which it fails continues without it, with a warning."""

    def __init__(self, name: str, number: int, drafter: Drafter, target: LanguageModel, failures: Failures) -> None:
        self.name, self.drafter, self._number = name, drafter, number
        self.spent: DraftTime | None = None
        self._vocab_size = target.vocab_size
        self._on_device = transfers.waits(target.device)  # whether drafted ids may stay there until verification
        self._failures = failures

    def begin(self, request: Request) -> None:
        try:
            self.drafter.begin(request.draft)
        except Exception as error:
            self.give_up(request, error)

    def hint(self, request: Request) -> Hint:
        """Its hint before drafting for a request; an empty one if it cannot draft for it now."""
        if self.name in request.drafting.unavailable:
            return NOTHING_FOUND
        try:
            return self.drafter.hint(request.draft)
        except Exception as error:
            self.give_up(request, error)
            return NOTHING_FOUND

    def propose(self, items: Sequence[StepItem]) -> dict[int, Proposal]:
        """Checked proposals by request id, each within its budget; none for requests for which it fails."""
        self.spent = None
        made = self._failures.run_or_split(self._who, items, self._propose, self.give_up)
        return {item.request.id: each for item, each in zip(items, made, strict=True) if each is not None}

    def _propose(self, items: Sequence[StepItem]) -> list[Proposal]:
        requests, budgets = [item.request for item in items], [item.budget(self.name) for item in items]
        noise = [item.noise.of_member(self._number) for item in items]
        lag = 0 if self._on_device else sum(self.hint(request).behind for request in requests)
        began = time.perf_counter()
        try:
            proposals = self.drafter.propose([request.draft for request in requests], budgets, noise)
        except CutShortError as cut:
            if len(items) > 1:
                raise
            self.give_up(requests[0], cut.__cause__ if isinstance(cut.__cause__, Exception) else cut)
            proposals = [cut.proposal]
        except Exception as error:
            if len(items) == 1:
                LostDrawsError.raise_if_lost(self.name, error, requests[0].params, noise[0])
            raise
        if len(proposals) != len(items):
            raise DrafterError(f"drafter {self.name!r} made {len(proposals)} proposals for {len(items)} requests")
        for proposal, budget, request in zip(proposals, budgets, requests, strict=True):
            check_proposal(self.name, proposal, budget, request.rule.judges, self._vocab_size)
            if not (proposal.tree.on_device and self._on_device):
                self.check_ids(proposal.tree)
        seconds, trees = time.perf_counter() - began, [proposal.tree for proposal in proposals]
        depth, nodes = max(tree.shape.depth for tree in trees), sum(map(len, trees))
        if not self._on_device:
            self.spent = DraftTime(self.name, len(items), depth, nodes, lag, seconds, self.drafter.levels)
        return proposals

    def check_ids(self, tree: TokenTree) -> None:
        check_ids(self.name, tree, self._vocab_size)

    def observe(self, seen: Sequence[tuple[Request, StepOutcome]]) -> None:
        try:
            self.drafter.observe([request.draft for request, _ in seen], [outcome for _, outcome in seen])
        except Exception as error:
            if len(seen) == 1:
                self.give_up(seen[0][0], error)
                return
            self._failures.count_retry([request for request, _ in seen], self._who, error)
            for request, outcome in seen:
                # It is unknown which outcomes it processed, so its state of all of them is rebuilt.
                self.end(request)
                self.begin(request)
                if self.name not in request.drafting.excluded:
                    self.observe([(request, outcome)])

    def end(self, request: Request) -> None:
        try:
            self.drafter.end(request.draft)
            if request.id in self.drafter.held.requests:
                raise DrafterError("it still keeps something for the request")
        except Exception as error:
            self._failures.log(self._who, error)
            request.warnings.append(f"{self._who} failed at the end of the request ({summary(error)})")

    def give_up(self, request: Request, error: Exception) -> None:
        """Let the request continue without it, unless its draws are unknown."""
        if isinstance(error, LostDrawsError):
            raise error
        self._failures.log(self._who, error)
        request.drafting.excluded.add(self.name)
        request.warnings.append(f"{self._who} failed ({summary(error)}); the answer went on undrafted")

    @property
    def _who(self) -> str:
        return f"drafter {self.name!r}"


def invalid_draws(rows: Collection[int], proposal: Proposal) -> DrafterError:
    """The error that explains why draws below some tree rows are not verified."""
    depth = min((0, *proposal.tree.shape.depths)[row] for row in rows) + 1
    return DrafterError(
        f"the probabilities that draws at depth {depth} were made from are no distributions (finite, not negative, "
        "sum 1), or give nothing to the token drawn"
    )
