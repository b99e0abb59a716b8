"""One request repeated in several ways: by itself, in a batch, streamed, after a cancel, with other budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from truedraft.certify.checks import Check, Context, Deadline, Finding, OutOfTimeError, Part, Stack, Status, numbered
from truedraft.certify.equality import Comparison, enough_prompts
from truedraft.certify.rounding import measure_rounding
from truedraft.core.budget import NO_DRAFT
from truedraft.core.params import SamplingParams
from truedraft.engine import Answer, Engine, Piece, Request
from truedraft.engine.policy import Controller, Decision, FixedBudget, RequestView

_LEAST_TOGETHER = 3  # a request and two neighbours, even if the user's batch is smaller
_BUDGETS = "with other budgets"
_DECISIONS = 64.0
Way = Callable[[Sequence[int], SamplingParams, int], Answer]  # from a prompt, its options and its number to the answer


class Invariance(Check):
    """Repeats requests with the same noise in several ways, and compares tokens and finish reasons.

    Greedy and seeded answers must also be the same with other budgets. Tokens of a sampled request without a seed may
    change with its budgets, because another draw then decides; its distribution may not, which the statistics test. So
    the budgets of such requests depend only on their own steps, whatever the stack's controller is, and each request
    gets the first noise of its own engine. Divergences of greedy and seeded requests are near ties or faults. Others
    have no margin; if rows are not bitwise equal, their divergences are counted against a bound on the effect of
    rounding.

    At least three requests run together, without stop texts. The time may be exceeded several times until one prompt
    was run in all ways.
    """

    part = Part.INVARIANCE
    share = 0.08

    def run(self, context: Context) -> list[Finding]:
        together = max(context.batch, _LEAST_TOGETHER)
        repeated = _Repetitions(
            replace(
                context,
                prompts=enough_prompts(context.prompts, together),
                params=replace(context.params, stop=()),
                batch=together,
            )
        )
        context.one_by_one(range(len(context.prompts)), repeated.compare)
        context.tell(1.0)
        return repeated.findings()


class AlternatingBudget(Controller):
    """Cycles through no draft, one token and the drafter's own limits, by the request's own number of target calls."""

    def decide(self, views: Sequence[RequestView]) -> list[Decision]:
        decisions = []
        for view in views:
            (drafter, limits), *_ = view.limits.items()
            budget = (NO_DRAFT, limits.cut(1), limits)[view.counters.target_calls % 3]
            decisions.append(Decision(drafter, budget))
        return decisions


class _Repetitions:
    def __init__(self, context: Context) -> None:
        self._prompts = [list(prompt) for prompt in context.prompts]
        self._batch, self._params, self._seconds = context.batch, context.params, context.seconds
        lossless = context.stack.rule.lossless
        self._has_margins = self._params.seeded or (self._params.greedy and lossless)
        self._stack = context.stack if self._has_margins else context.stack.but(controller=None)
        self._limits = self._stack.drafter.limits
        self._ways: dict[str, Way] = {
            "streamed": self._streamed,
            "cancelled and asked again": self._cancelled,
            f"in a batch of {self._batch}": self._with_neighbours,
        }
        if self._has_margins:
            controllers = {
                "without drafting": FixedBudget(NO_DRAFT),
                "one drafted token at most on a path": FixedBudget(self._limits.cut(1)),
                "drafting now and then": AlternatingBudget(),
            }
            for name, controller in controllers.items():
                self._ways[name] = partial(self._single, self._stack.but(controller=controller))
        self._comparisons = {name: Comparison() for name in self._ways}
        self._texts: list[list[int]] = []
        self._largest: float | None = None  # difference between logits of one text, once measured
        self._deadline = Deadline(math.inf)

    def compare(self, number: int, deadline: Deadline) -> None:
        self._deadline = deadline
        prompt = self._prompts[number]
        own = numbered(self._params, number)
        expected = self._single(self._stack, prompt, own, number)
        self._texts.append([*prompt, *expected.token_ids])
        context = Context(self._stack, [prompt], own, self._batch)
        for name, way in self._ways.items():
            found = way(prompt, own, number)
            self._comparisons[name].add(expected, found, context, number, has_margins=self._has_margins)

    def _engine(self, stack: Stack, batch: int, number: int) -> Engine:
        return stack.engine(batch, stack.entropy + number)

    def _single(self, stack: Stack, prompt: Sequence[int], own: SamplingParams, number: int) -> Answer:
        engine = self._engine(stack, 1, number)
        request = _prepared(engine, prompt, own)
        with _queue(engine) as queue:
            queue(request)
            return self._deadline.answer(engine, request)

    def _neighbours(self, number: int, engine: Engine, which: Sequence[int], queue: Callable[[Request], None]) -> None:
        others = _other_options(self._params, lossless=self._stack.rule.lossless)
        for place in which:
            options = replace(
                others[(place + number) % len(others)],
                max_tokens=max(1, self._params.max_tokens * (2 + place % 4) // 3),
            )
            queue(_prepared(engine, self._prompts[(number + 1 + place) % len(self._prompts)], options))

    def _with_neighbours(self, prompt: Sequence[int], own: SamplingParams, number: int) -> Answer:
        """Some neighbours run before the request, others come later."""
        half, engine = self._batch // 2, self._engine(self._stack, self._batch, number)
        request = _prepared(engine, prompt, own)
        with _queue(engine) as queue:
            self._neighbours(number, engine, range(half), queue)
            self._deadline.step(engine)
            self._deadline.step(engine)
            queue(request)
            self._deadline.step(engine)
            self._neighbours(number, engine, range(half, self._batch - 1), queue)
            return self._deadline.answer(engine, request)

    def _streamed(self, prompt: Sequence[int], own: SamplingParams, number: int) -> Answer:
        """The pieces must also concatenate to the answer that comes with the last of them."""
        pieces: list[Piece] = []
        for piece in self._engine(self._stack, 1, number).stream(list(prompt), own, scope=object()):
            pieces.append(piece)
            if self._deadline.over:
                break
        answer = pieces[-1].answer
        if answer is None:  # the last piece carries it
            raise OutOfTimeError
        tokens = [token for piece in pieces for token in piece.token_ids]
        if answer.text is not None and "".join(piece.text for piece in pieces) != answer.text:
            return replace(answer, finish_reason="error", error="the pieces' texts are not the answer's")
        return replace(answer, token_ids=tokens)

    def _cancelled(self, prompt: Sequence[int], own: SamplingParams, number: int) -> Answer:
        engine = self._engine(self._stack, self._batch, number)
        again, first = (_prepared(engine, prompt, own) for _ in range(2))
        with _queue(engine) as queue:
            self._neighbours(number, engine, range(self._batch - 1), queue)
            queue(first)
            while first.finish_reason is None and first.emitted < own.max_tokens // 2:
                self._deadline.step(engine)
            engine.cancel(first)
            queue(again)
            return self._deadline.answer(engine, again)

    def findings(self) -> list[Finding]:
        found = []
        for name, comparison in self._comparisons.items():
            counted = comparison.untraced > 0 and not comparison.faults
            explained = self._explained(comparison.compared) if counted else 0.0
            others = "those of single requests"
            found.append(comparison.finding(Part.INVARIANCE, name, self._stack, others, explained=explained))
        if not self._has_margins:
            sentence = "Different budgets may change the tokens of requests without a seed, but not their distribution."
            if not self._stack.rule.lossless:
                sentence = f"The rule {self._stack.rule.spec!r} is lossy: its distribution depends on what is drafted."
            found.append(Finding(Part.INVARIANCE, _BUDGETS, Status.DOES_NOT_APPLY, sentence))
        return found

    def _explained(self, tokens: int) -> float:
        """Largest number of divergences of sampled answers that rounding explains; 0 if rows are bitwise equal.

        If logits move by r, each probability moves by a factor of at most exp(2 r / temperature), so each of a token's
        decisions changes with a probability near 2 r / temperature. Adding six standard deviations and three gives a
        false alarm below 1e-6.
        """
        drafts = [member.model for member in self._stack.drafter.members.values()]
        models = [model for model in (self._stack.target, *drafts) if model is not None]
        if self._largest is None:
            texts = sorted(self._texts, key=len)[-2:]
            how = self._batch, self._params, self._limits
            measured = [measure_rounding(each, texts, *how, seconds=self._seconds) for each in models]
            self._largest = max(rounding.largest_difference for rounding in measured)
        expected = tokens * _DECISIONS * 2.0 * self._largest / (self._params.temperature or 1.0)
        return expected + 6.0 * math.sqrt(expected) + 3.0 if expected else 0.0


def _other_options(params: SamplingParams, *, lossless: bool) -> list[SamplingParams]:
    """Options of a request's neighbours; under a lossy rule none has a seed."""
    seed = numbered(replace(params, seed=params.seed or 0), 1_000_003).seed if lossless else None
    warm = 1.5 if params.greedy else 2.0 * params.temperature
    return [
        SamplingParams(temperature=warm),
        SamplingParams(),
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=0.7, seed=seed),
        SamplingParams(temperature=0.9, top_p=0.5, min_p=0.05),
    ]


def _prepared(engine: Engine, prompt: Sequence[int], own: SamplingParams) -> Request:
    """A request with its own scope, so that learning drafters have not seen the answers that it is compared with."""
    return engine.prepare(list(prompt), own, scope=object())


@contextmanager
def _queue(engine: Engine) -> Iterator[Callable[[Request], None]]:
    """A function that queues requests, which are cancelled at the end."""
    with ExitStack() as end:

        def queue(request: Request) -> None:
            engine.enqueue(request)
            end.callback(engine.cancel, request)

        yield queue
