"""The engine: prompts in, answers out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack, cast, overload

import torch

from truedraft.core.budget import Speculation
from truedraft.core.noise import GOLDEN, mix
from truedraft.core.params import SamplingParams
from truedraft.core.stats import Counters, StepRecord
from truedraft.core.theory import TargetCost
from truedraft.drafters.base import Drafter, NoDrafter
from truedraft.drafters.specs import from_spec
from truedraft.engine.answer import Answer, Piece, Timing
from truedraft.engine.batch import Batch
from truedraft.engine.drafting import Drafting
from truedraft.engine.failures import Failures, summary
from truedraft.engine.learner import EngineLearner
from truedraft.engine.loop import FairLock, Loop
from truedraft.engine.memory import GPU_MEMORY_UTILIZATION, CacheMemory
from truedraft.engine.policy import Controller, Goodput, RunningTimes, StepCosts
from truedraft.engine.policy.specs import controller_from_spec
from truedraft.engine.prompts import (
    Chat,
    ChatOptions,
    Forms,
    Messages,
    ParamsOfEach,
    Prompt,
    Prompts,
    chats_of,
    encode,
    is_messages,
    is_one,
    new_request,
    params_of_each,
)
from truedraft.engine.ready import make_ready
from truedraft.engine.request import Request
from truedraft.engine.scheduler import Scheduler, reading_on
from truedraft.engine.sharing import PrefixSharing
from truedraft.engine.step import Step
from truedraft.engine.verifier import Verifier
from truedraft.errors import CacheError, CompositionError, ModelError, OptionError, PromptError, TruedraftError
from truedraft.models.base import LanguageModel
from truedraft.models.loading import load_model
from truedraft.models.multimodal import MultimodalPrompt
from truedraft.options import check_whole
from truedraft.progress import Progress, unwatched
from truedraft.verification import CoupledSampling, Rule, SpeculativeSampling
from truedraft.verification.specs import rule_from_spec


class Engine:
    """Continuous batching with speculative decoding; without a drafter it is plain decoding by the same code.

    Args:
        target: the model that decides the answers; a name or a folder is loaded by `load_model`.
        drafter: drafts tokens; None never does. A text is parsed like `--drafter`, such as "prompt-lookup".
        rule: verifies drafts; None is lossless speculative sampling. A text is parsed like `--rule`.
        controller: decides which drafter drafts how much; None maximizes expected tokens per second (`Goodput`). A text
            is parsed like `--controller`, such as "fixed", which always uses the first drafter's own limits.
        max_batch: most requests in one step.
        prefix_cache_bytes: for prefixes kept for later requests; None keeps none but lets running requests share
            prefixes, 0 disables sharing.
        max_cache_bytes: limit for keys and values and other state of drafters; None is no limit, on a GPU that of
            `gpu_memory_utilization`. When memory is short, drafters release theirs, requests wait, and a running one
            may be preempted, which later continues exactly where it was.
        gpu_memory_utilization: used if `max_cache_bytes` is None and the target is on a GPU: share of its total memory
            that may be in use, including weights, other processes and 1.5 GiB of workspace. The rest is reserved for
            keys and values immediately, up to what `max_batch` full contexts need.
        coupled_rule: verifies greedy and seeded requests under a lossless rule; None compares each drafted token with
            the target's choice, the only correct rule. `truedraft certify` injects faults here.
        entropy: for tests and certificates: fixes the noise of requests without a seed, by the order in which they are
            submitted or prepared; None draws it from the operating system. Engines that share a drafter which learns
            from answers need different values, because it has seen the draws of the same noise.
        learner: trains drafters in the background, such as `truedraft.training.online.Learner`.

    One thread at a time steps the engine. `generate`, `stream`, `submit` and `cancel` are thread-safe.

    Attributes:
        costs: measured cost of the target's steps on this machine, for controllers that weigh costs.
        preemptions: number of times that a running request was preempted.
        listeners: each is called after each step, in the stepping thread, with the step's record and timings.

    Raises:
        CompositionError: the drafter does not fit the target, or the rule cannot verify its draws.
        OptionError: a part has a wrong type, a text cannot be parsed, or a number is too small.
        ModelError: a target or draft given by name cannot be loaded.
    """

    def __init__(
        self,
        target: LanguageModel | str | Path,
        drafter: Drafter | str | None = None,
        rule: Rule | str | None = None,
        controller: Controller | str | None = None,
        *,
        max_batch: int = 32,
        max_cache_bytes: int | None = None,
        gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
        prefix_cache_bytes: int | None = None,
        coupled_rule: Rule | None = None,
        entropy: int | None = None,
        learner: EngineLearner | None = None,
    ) -> None:
        target = load_model(target) if isinstance(target, str | Path) else target
        _check_kind("target", target, LanguageModel, ", or a name or folder")
        drafter = from_spec(drafter, target) if isinstance(drafter, str) else drafter
        rule = rule_from_spec(rule) if isinstance(rule, str) else rule
        self.target = target
        self.drafter = drafter if drafter is not None else NoDrafter()
        self.rule = rule if rule is not None else SpeculativeSampling()
        controller = controller_from_spec(controller) if isinstance(controller, str) else controller or Goodput()
        coupled = coupled_rule if coupled_rule is not None else CoupledSampling()
        _check_kind("drafter", self.drafter, Drafter, ", such as DraftModel(model), or its words")
        _check_kind("rule", self.rule, Rule, ", or its words")
        _check_kind("controller", controller, Controller, ", or its words")
        _check_kind("coupled_rule", coupled, Rule)
        check_whole("max_batch", max_batch, 1)
        self.drafter.check(self.target)
        for member in self.drafter.members.values():
            _check_layers(member, self.target)
        self.rule.check(self.drafter.kinds_for(self.rule.judges), self.drafter.name)
        self.learner, watcher = learner, None
        if learner is not None:
            self.drafter, watcher = learner.begin(self)
        members = self.drafter.members
        self._sharing = PrefixSharing(self.target, members, prefix_cache_bytes)
        stores = list(zip(self._sharing.stores, self._sharing.pools, strict=True))
        self._memory = CacheMemory(target, members, max_cache_bytes, stores, gpu_memory_utilization, max_batch)
        self.listeners: list[Callable[[StepRecord], None]] = []
        self.preemptions = 0
        self._failures = Failures()
        self.controller = controller
        self.costs = StepCosts(self.target)
        self._times = RunningTimes(self.costs, self.drafter.members)
        controller.begin(self._times)
        self._drafting = Drafting(self.drafter, controller, self.target, self._failures, watcher)
        self._verifier = Verifier(self.rule, coupled, self._drafting)
        self._step = Step(self.target, self._drafting, self._verifier, self._drafting.features)
        self._scheduler = Scheduler(max_batch, reading_on(target.device, self._drafting.features))
        tokenizer = target.tokenizer
        self.forms = None if tokenizer is None else Forms(tokenizer, target.vocab_size, target.eos_token_ids)
        self._lock = FairLock()  # for the threads that step
        self._loop = Loop(self.step, self._lock)
        self._leaving: deque[Request] = deque()  # cancelled but not closed
        self._open: dict[int, Request] = {}  # started but not closed
        self.entropy = None if entropy is None else check_whole("entropy", entropy, 0)
        self._unseeded = itertools.count()  # numbers of requests without a seed

    def __repr__(self) -> str:
        parts = f"drafter {self.drafter.name}, rule {self.rule.spec}, controller {type(self.controller).__name__}"
        return f"<Engine of {self.target!r}, {parts}, at most {self.max_batch} requests at once>"

    @property
    def max_batch(self) -> int:
        return self._scheduler.max_batch

    @property
    def is_full(self) -> bool:
        """Whether requests wait, or no further one could run."""
        return bool(self._scheduler.waiting) or len(self._scheduler.running) >= self._scheduler.max_batch

    @property
    def max_cache_bytes(self) -> int | None:
        return self._memory.limit

    @property
    def shared_tokens(self) -> int:
        """Prompt tokens of all requests so far that were copied from requests with the same prefix."""
        return self._sharing.copied_tokens

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values and other drafter state, free buffers included; exact between steps."""
        return self._memory.used(list(self._scheduler.running))

    @property
    def cache_tokens(self) -> int:
        """Tokens of the target that fit into `max_cache_bytes`; without a limit, those of `max_batch` full contexts."""
        return self._memory.room(self.max_batch)

    @property
    def cache_usage(self) -> float:
        """Share of `cache_tokens` of running requests, from 0 to 1; reclaimable memory counts as free."""
        return self._memory.share_taken(list(self._scheduler.running), self.max_batch)

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting)

    def forwards(self) -> TargetCost | None:
        """V of the target, measured now if it has not been; None for an engine that never drafts.

        Raises:
            TruedraftError: the target failed.
        """
        return None if self.drafter.limits.is_zero else self.costs.forwards()

    def measure(self, params: SamplingParams | None = None) -> None:
        """Measure now what a controller that weighs costs would measure at the first request with such `params`.

        Raises:
            TruedraftError: target or drafter failed, or this was called from inside a step.
        """
        if not self._weighs_costs:
            return
        with self._between_steps():
            self._times.measure((params or SamplingParams()).greedy)
            self._memory.settle(self._scheduler.running)

    def make_ready(self, tokens: int = 2048, progress: Progress = unwatched) -> None:
        """Warm up: record the forwards that steps will run, and measure costs.

        On a GPU, recording a shape of forward takes 50 to 100 ms. Here dummy requests run the shapes of 1, 2, 4, ...
        `max_batch` requests with drafts up to the drafters' limits, after texts of up to 256, 512, ... `tokens` tokens;
        others are recorded when they recur. On a CPU nothing is recorded, and costs are measured between steps and by
        `measure_ahead`. Requests, counters and listeners are not affected.

        Raises:
            OptionError: `tokens` is no whole number of 1 or more.
            TruedraftError: target or drafter failed, or this was called from inside a step.
        """
        check_whole("tokens", tokens, least=1)
        drafters = list(self.drafter.members.values())
        with self._between_steps():
            self._times.rest()
            # Room is needed for short texts in addition to the longest one, and for the draft model's own text.
            tokens = max(1, min(tokens, self.cache_tokens // 2))
            make_ready(self.target, drafters, self._drafting.features, self.max_batch, tokens, progress)
            self._memory.settle(self._scheduler.running)
        if self.target.warmups or any(each.warmups for each in drafters):
            for params in (SamplingParams(), SamplingParams(temperature=1.0)):
                self.measure(params)

    def measure_ahead(self) -> bool:
        """Measure one more cost that a controller weighs, while the engine is idle; returns whether more remain. Memory
        is held until none remain, or until the next step.

        Raises:
            TruedraftError: this was called from inside a step.
        """
        if not self._weighs_costs:
            return False
        with self._between_steps(), self.target.stepping():
            more = self._times.measure_one()
            if not more:
                self._times.rest()
                self._memory.settle(self._scheduler.running)
        return more

    @property
    def _weighs_costs(self) -> bool:
        return self.controller.weighs_costs and not self.drafter.limits.is_zero

    @contextlib.contextmanager
    def _between_steps(self) -> Iterator[None]:
        try:
            with self._lock, torch.inference_mode():
                yield
        finally:
            self._settle()

    @overload
    def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Answer: ...
    @overload
    def generate(self, prompt: Prompts, params: ParamsOfEach = None) -> list[Answer]: ...

    def generate(self, prompt: Prompt | Sequence[Prompt], params: ParamsOfEach = None) -> Answer | list[Answer]:
        """Answer one prompt, or several at once.

        Several prompts give a list, in which a failed request has the finish reason "error".

        Raises:
            TruedraftError: a single prompt failed.
        """
        prepared = self._prepare_each(prompt, params)
        requests = self._enqueue_all(prepared)
        try:
            self._loop.run_until(lambda: all(request.finish_reason is not None for request in requests))
        finally:
            self._end(requests)
        return _answers_of(prompt, prepared)

    @overload
    def chat(self, messages: Messages, params: SamplingParams | None = None, **how: Unpack[ChatOptions]) -> Answer: ...
    @overload
    def chat(
        self, messages: Sequence[Messages], params: ParamsOfEach = None, **how: Unpack[ChatOptions]
    ) -> list[Answer]: ...

    def chat(
        self, messages: Messages | Sequence[Messages], params: ParamsOfEach = None, **how: Unpack[ChatOptions]
    ) -> Answer | list[Answer]:
        """Answer a conversation, or several at once, with the model's chat template; otherwise like `generate`. `how`
        are options of the template, see `truedraft.text.tokenizer.ChatOptions`.

        Raises:
            PromptError: these are no messages.
            TruedraftError: a single conversation failed.
        """
        return self.generate(cast("list[Chat]", chats_of(messages, how)), params)  # or one

    @overload
    async def agenerate(self, prompt: Prompt, params: SamplingParams | None = None) -> Answer: ...
    @overload
    async def agenerate(self, prompt: Prompts, params: ParamsOfEach = None) -> list[Answer]: ...

    async def agenerate(self, prompt: Prompt | Sequence[Prompt], params: ParamsOfEach = None) -> Answer | list[Answer]:
        """`generate` for `asyncio`: steps run in a thread, and cancelling the task cancels its requests."""
        prepared = await asyncio.to_thread(self._prepare_each, prompt, params)
        requests = self._enqueue_all(prepared)
        try:
            await self._loop.until(lambda: all(request.closed for request in requests))
        finally:
            for request in requests:
                self.cancel(request)
        return _answers_of(prompt, prepared)

    def _prepare_each(self, prompt: Prompt | Sequence[Prompt], params: ParamsOfEach) -> list[list[Request] | Answer]:
        if is_one(prompt):
            if params is not None and not isinstance(params, SamplingParams):
                raise PromptError(f"one prompt takes one SamplingParams, got a {type(params).__name__}")
            return [self._prepare_samples(cast("Prompt", prompt), params)]
        prompts = cast("Sequence[Prompt]", prompt)
        found: list[list[Request] | Answer] = []
        for one, its in zip(prompts, params_of_each(len(prompts), params), strict=True):
            try:
                found.append(self._prepare_samples(one, its))
            except TruedraftError as error:
                text = None if self.target.tokenizer is None else ""
                seed = its.seed if isinstance(its, SamplingParams) else None
                found.append(Answer(text, [], "error", Counters(), [], seed, 0, Timing(None, 0.0), str(error)))
        return found

    def _prepare_samples(self, prompt: Prompt, params: SamplingParams | None) -> list[Request]:
        count = params.n if isinstance(params, SamplingParams) else 1
        return [self.prepare(prompt, params, sample=sample) for sample in range(count)]

    def _enqueue_all(self, prepared: Sequence[list[Request] | Answer]) -> list[Request]:
        requests = [request for samples in prepared if isinstance(samples, list) for request in samples]
        for request in requests:
            self.enqueue(request)
        return requests

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        scope: Hashable = None,
        **how: Unpack[ChatOptions],
    ) -> Iterator[Piece]:
        """Answer one prompt, or the messages of one chat, piece by piece; leaving the loop early cancels the request.

        The last piece carries the whole answer. `scope` is as for `submit`, `how` as for `chat`.

        Raises:
            OptionError: several samples are requested; call `submit` for each, and read their pieces.
            TruedraftError: the request failed.
        """
        return self._pieces(self._prepare_stream(prompt, params, scope, how))

    async def astream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        scope: Hashable = None,
        **how: Unpack[ChatOptions],
    ) -> AsyncGenerator[Piece]:
        """`stream` for `async for`; cancelling the task or leaving the loop cancels the request."""
        piece: Piece | None = None
        request = await asyncio.to_thread(self._prepare_stream, prompt, params, scope, how)
        self.enqueue(request)
        try:
            while piece is None or piece.answer is None:
                await self._loop.until(lambda: bool(request.pieces))
                while request.pieces:
                    piece = request.take_piece()
                    yield piece
        finally:
            self.cancel(request)

    def _prepare_stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None, scope: Hashable, how: ChatOptions
    ) -> Request:
        if isinstance(params, SamplingParams) and params.n > 1:
            raise OptionError(
                f"must be 1 for a stream, got {params.n}; call submit for each sample and read its pieces", field="n"
            )
        inputs = chats_of(prompt, how) if how or is_messages(prompt) else prompt
        return self.prepare(cast("Prompt", inputs), params, scope=scope)

    def _pieces(self, request: Request) -> Iterator[Piece]:
        piece: Piece | None = None
        self.enqueue(request)
        try:
            while piece is None or piece.answer is None:
                self._loop.run_until(lambda: bool(request.pieces) or request.finish_reason is not None)
                if request.finish_reason is not None:
                    self._end([request])
                while request.pieces:
                    piece = request.take_piece()
                    yield piece
        finally:
            self.cancel(request)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sample: int = 0,
        speculation: Speculation | None = None,
        rule: Rule | None = None,
        scope: Hashable = None,
    ) -> Request:
        """Queue a request, which runs from the next step with room for it; does not block. Someone must call `step`, or
        wait in `generate` or `stream`, until `request.pieces[-1].answer` is present and `request.closed` is true.

        Args:
            sample: which of its `n` answers this request is for; each is drawn with its own noise.
            speculation: restricts drafting; None allows all that the engine drafts.
            rule: verifies its drafts in place of the engine's rule.
            scope: prefixes are shared only among requests of the same scope, such as those of one client.

        Raises:
            PromptError: the prompt is empty, too long, has ids that do not exist, or needs more than all memory.
            OptionError: the options cannot be used.
            IncompatibleRuleError: the rule cannot verify the draws of the engine's drafters.
        """
        request = self.prepare(prompt, params, sample=sample, speculation=speculation, rule=rule, scope=scope)
        self.enqueue(request)
        return request

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sample: int = 0,
        speculation: Speculation | None = None,
        rule: Rule | None = None,
        scope: Hashable = None,
        shown: Mapping[int, str] | None = None,
    ) -> Request:
        """Return a checked request for `enqueue`; like `submit`. `shown` names special tokens to be shown, by id."""
        params = params if params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise OptionError(f"sampling options are a SamplingParams, got {type(params).__name__}")
        if rule is not None:
            rule.check(self.drafter.kinds_for(rule.judges), self.drafter.name)
        ids = encode(self.target, prompt)
        check_whole("sample", sample, least=0)
        try:
            hash(scope)
        except TypeError as error:
            raise OptionError(f"must be hashable, as a text is, got a {type(scope).__name__}", field="scope") from error
        judge = self._verifier.rule_for(params, rule)
        pictures = prompt if isinstance(prompt, MultimodalPrompt) else None
        request = new_request(
            self.target, ids, params, judge, sample=sample, scope=scope, prompt=pictures, forms=self.forms, shown=shown
        )
        self._drafting.limit(request, speculation)
        self._memory.refuse(request)
        entropy = self.entropy
        if params.seed is None:  # its noise is unique within this engine
            request.noise_seed = (
                secrets.randbits(64) if entropy is None else mix(mix(GOLDEN, entropy), next(self._unseeded))
            )
        return request

    def enqueue(self, request: Request) -> None:
        """Queue a request that `prepare` made. Thread-safe."""
        request.engine = weakref.ref(self)
        self._scheduler.add(request)

    def cancel(self, request: Request) -> None:
        """End a request of this engine and release its cache. A finished request remains as it is.

        Does not block; thread-safe, also during a step. If a step is running, the request ends after the step and keeps
        its tokens; otherwise immediately. Its answer then has the finish reason "cancelled".

        Raises:
            PromptError: the request was not submitted to this engine.
        """
        self._check_own(request)
        self._leaving.append(request)
        self._settle()

    def _check_own(self, request: Request) -> None:
        if not isinstance(request, Request) or request.engine is None or request.engine() is not self:
            raise PromptError("this is no request of this engine; give it what its own submit returned")

    def _settle(self) -> None:
        """Close cancelled requests, unless another thread is stepping, which then does it; finalizers call it."""
        while self._leaving and self._lock.try_now():
            try:
                self._close_cancelled()
            finally:
                self._lock.give_back()

    def _close_cancelled(self) -> None:
        while self._leaving:
            request = self._leaving.popleft()
            if not request.closed:
                request.finish_reason = request.finish_reason or "cancelled"
                self._close(request)

    def step(self) -> bool:
        """Run one step for all running requests, in this thread; returns whether any request is left.

        Several threads may call it; they are served in order of arrival.

        Raises:
            TruedraftError: called from inside a step, as by a listener.
        """
        with self._between_steps(), self.target.stepping():
            self._close_cancelled()
            self._step_all()
        return not self._scheduler.idle

    def _step_all(self) -> None:
        for name, change in () if self.learner is None else self.learner.changes():
            self._drafting.renew(name, change, self._scheduler.running)
        self._admit()
        batch = self._scheduler.next()
        try:
            if len(batch):
                self._run(batch)
        finally:
            # Also after Ctrl-C in the middle of a step: a finished request must not run again.
            for item in batch:
                if item.request.finish_reason is not None and not item.request.closed:
                    self._close(item.request)
        if self._scheduler.idle:
            self.check_idle()

    def _admit(self) -> None:
        """Admit requests, for which drafters may have to release memory; they get it back when there is room again."""
        grown, out = self._memory.grow(self._scheduler.running)
        for request in out:
            self._or_fail(request, self._preempt)
        admitted = self._scheduler.admit(self._memory.fits)
        taken, free = self._memory.share(self._scheduler.running, admitted)
        for each in taken:
            self._drafting.release_cache(each.request, each.drafter)
        self._memory.trim()
        for request in grown:
            self._or_fail(request, self._memory.bound)
        for request in admitted:
            self._or_fail(request, self._start)
        for request in list(self._scheduler.running):
            self._or_fail(request, self._sharing.go_on)
        for each in free:
            if not each.request.closed:
                self._drafting.restore_cache(each.request, each.drafter)
                self._memory.bound_drafter(each.request, each.drafter)

    def _start(self, request: Request) -> None:
        self._open[request.id] = request
        request.cache = self.target.new_cache()
        self._drafting.begin(request)
        self._memory.bound(request)
        self._sharing.begin(request, self._scheduler.running)

    def _or_fail(self, request: Request, work: Callable[[Request], None]) -> None:
        try:
            work(request)
        except Exception as error:
            self._failures.log("a request", error)
            request.fail(_as_ours(error))
            self._close(request)

    def pause(self, request: Request) -> bool:
        """Preempt a request and remove it, running or waiting, until it is passed to `enqueue` again.

        It then continues exactly where it was. Blocks until a running step ends; returns False for a finished request.

        Raises:
            PromptError: the request was not submitted to this engine.
            TruedraftError: called from inside a step.
        """
        self._check_own(request)
        with self._between_steps():
            self._close_cancelled()
            if request.cache is not None:
                self._or_fail(request, self._preempt)
            if not request.closed:
                self._scheduler.remove(request)
                self._open.pop(request.id, None)
        return not request.closed

    def _preempt(self, request: Request) -> None:
        assert request.cache is not None
        self._drafting.end(request)
        self._sharing.end(request)
        self.target.release_cache(request.cache)
        request.put_back()
        self._scheduler.put_back(request)
        self._memory.released()
        self.preemptions += 1

    def _run(self, batch: Batch) -> None:
        """Run a step. If it fails, try each half, so that only the broken requests fail."""
        try:
            record = self._step.run(batch)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) and self._scheduler.reading.read_less(batch.prompt_tokens):
                self._failures.log(f"a step that read {batch.prompt_tokens} tokens of prompts", error)
                self._memory.give_back()
                return  # the next step reads fewer, from the last committed token
            requests = [item.request for item in batch if item.request.finish_reason is None]
            if len(batch) == 1:
                for request in requests:
                    self._failures.log("the step", error)
                    request.fail(_as_ours(error))
                    self._close(request)  # immediately, because the next one may lack memory too
                self._memory.give_back()
                return
            self._failures.count_retry(requests, "the step", error)
            for half in batch.halves():
                self._run(half)
            return
        self._scheduler.reading.observe(record)
        measured = self._times.go_on(record.total_s)
        if measured and self._memory.limit is not None and self.cache_bytes > self._memory.limit:
            self._times.rest()  # measurements get only the memory that requests leave
        self._memory.settle(self._scheduler.running)
        for listener in self.listeners:
            listener(record)

    def give_back(self) -> None:
        """Release free buffers to the system; cached prefixes are kept."""
        with self._between_steps():
            self._memory.give_back()

    def check_idle(self) -> list[str]:
        """Leaks of requests while none runs or waits: an empty list, unless the engine has a bug."""
        self._times.rest()
        for request in [request for request in self._open.values() if request.finish_reason is not None]:
            self._close(request)
        lost = [f"request {number} is neither over nor running" for number in self._open]
        if pages := self._memory.lost_pages:
            lost.append(f"{pages} pages of keys and values are held for no request")
        if lost:
            self._failures.log("the check of an idle engine", CacheError(f"{'; '.join(lost)}; please report it"))
        return lost

    def _close(self, request: Request) -> None:
        self._scheduler.remove(request)
        try:
            if request.cache is not None:
                self._drafting.explain(request)
                self._drafting.end(request)
                self._sharing.end(request)
        except Exception as error:
            self._failures.log("the end of a request", error)
        finally:
            if request.cache is not None:
                self.target.release_cache(request.cache)
                request.cache = None
                self._memory.released()
                self._memory.settle(self._scheduler.running)
            self._open.pop(request.id, None)
            request.finish()
            request.closed = True  # last, because other threads then read the answer

    def _end(self, requests: Sequence[Request]) -> None:
        left = [request for request in requests if not request.closed]
        for request in left:
            self.cancel(request)
        if left and not self._lock.mine:
            with self._between_steps():
                self._close_cancelled()


def _answers_of(prompt: Prompt | Sequence[Prompt], prepared: Sequence[list[Request] | Answer]) -> Answer | list[Answer]:
    found: list[Answer] = []
    for samples in prepared:
        if isinstance(samples, Answer):
            found.append(samples)
            continue
        error = next((request.error for request in samples if request.error is not None), None)
        if error is not None and is_one(prompt):
            raise error
        first, *others = [answer for each in samples if (answer := each.pieces[-1].answer) is not None]
        found.append(replace(first, others=tuple(others)) if others else first)
    return found[0] if is_one(prompt) else found


def _check_layers(drafter: Drafter, target: LanguageModel) -> None:
    features = drafter.features
    if features is not None and not all(0 <= layer < target.shown_layers for layer in features.layers):
        shown = f"shows those of layers 0 to {target.shown_layers - 1}" if target.shown_layers else "shows none"
        raise CompositionError(
            f"drafter {drafter.name!r} reads vectors of layers {', '.join(map(str, features.layers))}, and the forward "
            f"of {target.name!r} {shown}; load the target with fast_paths=False if it has these layers"
        )


def _check_kind(what: str, given: object, kind: type, words: str = "") -> None:
    if not isinstance(given, kind):
        name = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise OptionError(f"{what} must be a {kind.__name__}{words}, got {name}")


def _as_ours(error: Exception) -> TruedraftError:
    if isinstance(error, TruedraftError):
        return error
    ours = ModelError(f"the target failed ({summary(error)})")
    ours.__cause__ = error
    return ours
