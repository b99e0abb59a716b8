"""One speculative step for a batch: draft, one target forward, verify, commit."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from truedraft.core.stats import RequestStep, Settling, StepRecord
from truedraft.core.verdict import Origin, Verdict
from truedraft.drafters.base import Features, StepOutcome
from truedraft.engine.batch import Batch, StepItem
from truedraft.engine.drafting import Drafting
from truedraft.engine.request import Request
from truedraft.engine.verifier import Verifier
from truedraft.errors import InvalidLogitsError, OptionError, TruedraftError
from truedraft.models.base import ForwardOutput, LanguageModel, Segment


class Step:
    """Runs steps of a target. On a device the host synchronizes once per step."""

    def __init__(
        self, target: LanguageModel, drafting: Drafting, verifier: Verifier, features: Features | None
    ) -> None:
        self._target = target
        self._drafting = drafting
        self._verifier = verifier
        self._features = features
        self._layers = () if features is None else features.layers

    def run(self, batch: Batch) -> StepRecord:
        clock, settling = StepClock(self._target.device), Settling(self._target, self._drafting)
        self._drafting.decide(batch)
        clock.lap()
        self._drafting.propose(batch)
        clock.lap()
        output = batch.whole_rows(self._forward(batch.segments(self._target, self._features)))
        clock.lap()
        self._verifier.verify(batch, output)
        clock.lap()
        steps = self._commit(batch)
        self._drafting.observe(batch, output)
        record = StepRecord(steps, *clock.seconds(), drafting=self._drafting.spent, settled=settling.settled)
        self._drafting.record(batch, record)
        return record

    def _forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        return self._target.forward_showing(segments, self._layers) if self._layers else self._target.forward(segments)

    def _commit(self, batch: Batch) -> tuple[RequestStep, ...]:
        steps: list[RequestStep] = []
        for item in batch:
            shape = item.proposal.tree.shape
            step = RequestStep(
                item.request.id,
                item.context,
                item.fed + (len(shape) if item.kept is None else len(item.kept)),
                item.prefill,
                decision=item.decision,
                greedy=item.request.params.greedy,
            )
            path, tokens = self._emit(item, item.verdict, step) if item.verdict is not None else ((), ())
            assert item.request.cache is not None
            item.request.cache.commit([*range(item.fed), *item.fed_nodes(path)])
            item.request.count(step)
            steps.append(step)
            item.outcome = StepOutcome(item.proposal, path, tokens, partial=not item.judged)
        return tuple(steps)

    def _emit(self, item: StepItem, verdict: Verdict, step: RequestStep) -> tuple[tuple[int, ...], tuple[int, ...]]:
        request, shape = item.request, item.proposal.tree.shape
        tokens, ended_by_id = request.emit(verdict, item.logprobs)
        step.nodes, step.depth, step.listed_tokens = len(shape), shape.depth, shape.listed
        step.emitted = len(tokens)
        step.accepted = min(len(tokens), len(verdict.path))
        step.rejected = verdict.final is Origin.RECOVERED and len(tokens) > len(verdict.path)
        step.stop_tokens = int(ended_by_id)
        step.shares = item.drafted.shares(verdict.path[: step.accepted], step.rejected)
        if item.broken and request.finish_reason is None:
            request.fail(self._broken(request, banned=item.banned))
        return verdict.path[: step.accepted], tokens

    def _broken(self, request: Request, *, banned: bool) -> TruedraftError:
        count = len(request.tokens) - request.prompt_tokens
        form = None if request.shaping is None else request.shaping.form
        if not banned:
            return InvalidLogitsError(
                f"the target {self._target.name!r} gave NaN or infinite logits after {count} tokens of its answer; "
                "check its weights, or load it in float32"
            )
        if form is not None and (problem := form.problem()):
            return OptionError(
                f"is too ambiguous or takes too much after {count} tokens of the answer: {problem}; make it "
                "simpler, or less ambiguous",
                field="structured",
            )
        return OptionError(
            f"the options leave no token that may follow after {count} tokens of the answer; loosen allowed_token_ids, "
            "bad_words or min_tokens, or the form"
        )


class StepClock:
    """Times the parts of one step, on a CUDA device by events, which the host reads after the step's one
    synchronization; without one the seconds are the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] | None = [] if device.type == "cuda" else None
        self._marks: list[float] = []
        self.lap()

    def lap(self) -> None:
        if self._events is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        self._marks.append(time.perf_counter())

    def seconds(self) -> tuple[float, float, float, float, float]:
        """Seconds of drafting, forward, verdicts, the whole step so far, and deciding."""
        began, decided, drafted, forwarded, verified = self._marks
        draft_s, target_s = drafted - decided, forwarded - drafted
        if self._events is not None and self._events[3].query():
            _, first, second, third, _ = self._events
            draft_s, target_s = first.elapsed_time(second) / 1e3, second.elapsed_time(third) / 1e3
        verify_s = max(verified - decided - draft_s - target_s, 0.0)
        return draft_s, target_s, verify_s, time.perf_counter() - began, decided - began
