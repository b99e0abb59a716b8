"""The background learner of an engine: a thread of the lowest priority, with a bounded share of its time."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from truedraft.core.budget import Budget, Hint
from truedraft.core.noise import Noise
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.drafters.base import Drafter, DraftRequest, StepOutcome
from truedraft.drafters.heads.base import HeadDrafter
from truedraft.drafters.heads.head import Head
from truedraft.drafters.held import Held
from truedraft.drafters.portfolio import with_members
from truedraft.engine import Engine
from truedraft.engine.learner import LearnerStatus
from truedraft.errors import CompositionError, OptionError, UnsupportedModelError
from truedraft.files import user_path
from truedraft.models.base import LanguageModel
from truedraft.options import check_positive, check_whole
from truedraft.training.online.learnable import Learnable, learnable_kind
from truedraft.training.online.student import Student, Versions
from truedraft.training.online.traffic import Answered, Recorder, Traffic


class Tenants(Drafter):
    """Drafts for each request with the heads of its scope, or else with the original ones of `base`."""

    def __init__(self, base: HeadDrafter[Any, Any]) -> None:
        self.base = base
        self.name = base.name  # type: ignore[misc]
        self.limits, self.features, self.trees, self.branching = base.limits, base.features, base, base.branching
        self.ranks, self.levels = base.ranks, base.levels
        self.observes_lazily = base.observes_lazily
        self._own: dict[Hashable, HeadDrafter[Any, Any]] = {}
        self._drafts: dict[int, HeadDrafter[Any, Any]] = {}  # by request
        self.held = Held(
            noted=[self._drafts],
            request_bytes=base.held.request_bytes,
            token_bytes=base.held.token_bytes,
            heads=base.held.heads,  # tenants' heads are in the same place
            tokens=lambda: sum(each.held.tokens() for each in {*self._drafts.values()}),
        )

    def take(self, scope: Hashable, head: Head | None) -> None:
        """Use a scope's own heads from the next `begin` on; None: the common heads."""
        if head is None:
            self._own.pop(scope, None)
        else:
            self._own[scope] = self.base.with_head(head)

    def _groups(self, batch: Sequence[DraftRequest]) -> list[tuple[HeadDrafter[Any, Any], list[int]]]:
        found: dict[int, tuple[HeadDrafter[Any, Any], list[int]]] = {}
        for place, request in enumerate(batch):
            drafter = self._drafts[request.id]
            found.setdefault(id(drafter), (drafter, []))[1].append(place)
        return list(found.values())

    @property
    def warmups(self) -> int:
        return sum(each.warmups for each in {self.base, *self._own.values(), *self._drafts.values()})

    @property
    def kinds(self) -> frozenset[DrawKind]:
        return self.base.kinds

    def kinds_for(self, judged: frozenset[DrawKind]) -> frozenset[DrawKind]:
        return self.base.kinds_for(judged)

    def hint(self, request: DraftRequest) -> Hint:
        return self._drafts[request.id].hint(request) if request.id in self._drafts else self.base.hint(request)

    @property
    def report(self) -> Mapping[str, float]:
        return self.base.report

    def check(self, target: LanguageModel) -> None:
        self.base.check(target)

    def begin(self, request: DraftRequest) -> None:
        drafter = self._drafts[request.id] = self._own.get(request.scope, self.base)
        drafter.begin(request)

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        proposals = [Proposal.empty()] * len(batch)
        for drafter, places in self._groups(batch):
            own = [batch[i] for i in places], [budgets[i] for i in places], [noise[i] for i in places]
            made = drafter.propose(*own)
            for place, proposal in zip(places, made, strict=True):
                proposals[place] = proposal
        return proposals

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        for drafter, places in self._groups(batch):
            drafter.observe([batch[place] for place in places], [outcomes[place] for place in places])

    def end(self, request: DraftRequest) -> None:
        drafter = self._drafts.pop(request.id, None)
        if drafter is not None:
            drafter.end(request)


_log = logging.getLogger("truedraft.training.online")

_LOWEST = 19  # the lowest priority
_IDLE_S, _FULL_S = 0.5, 0.2  # between checks for work, or for free capacity
_MOST_TENANTS = 16
_LEAST_ANSWERS = 8  # of a tenant before it gets heads of its own
_ALL = None
_CANNOT = (
    "heads that were trained, and draft models in this process with the target's tokenizer, do; draft with these, or "
    "leave the learner out"
)

Result = TypeVar("Result")


class Learner:
    """Trains an engine's drafter on its answers in a thread, and swaps the drafter's modules between steps.

    As OSD (2310.07177), with tests: a quarter of the answers is never trained on, and a trained copy is promoted where
    replay of these shows more tokens per call, by bets that are wrong with probability `level`, and where it is no
    worse on older ones. It is rolled back where later answers show the opposite. Answers stay only in memory. One
    learner is for one engine.

    Args:
        folder: of promoted versions; the last is loaded at the start. None writes nothing.
        share: of wall time for this thread's processor time; nothing is done while the engine is full.
        keep_s: seconds after which an answer is dropped.
        per_tenant: train separate modules for each scope of requests, only from its own answers and used only for it;
            at most 16 scopes.
        level: probability of a promotion without a gain, and of a rollback without cause.
        processor: the calling thread's processor time in seconds.

    Raises OptionError for a share out of (0, 1], or another number that cannot be used.
    """

    def __init__(
        self,
        folder: Path | str | None = None,
        *,
        share: float = 0.05,
        keep_s: float = 86400.0,
        per_tenant: bool = False,
        most_bytes: int = 256 << 20,
        most_tokens: int = 1_000_000,
        level: float = 0.01,
        rate: float = 1e-3,
        clock: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        for name, value in (("learn_share", share), ("level", level)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= 1.0:
                raise OptionError(f"must lie in (0, 1], got {value!r}", field=name)
        check_positive("learn_keep_s", keep_s)
        check_positive("rate", rate)
        self._folder = None if folder is None else user_path(folder, OptionError)
        self._share, self._keep_s, self._level, self._rate = share, keep_s, level, rate
        self._per_tenant = per_tenant
        parts = _MOST_TENANTS if per_tenant else 1
        self._most_bytes = check_whole("most_bytes", most_bytes, 1) // parts
        self._most_tokens = check_whole("most_tokens", most_tokens, 1) // parts
        self._clock, self._processor = clock, processor
        self._guard = threading.Lock()  # for the fields below
        self._traffic: dict[Hashable, Traffic] = {}
        self._changes: list[tuple[str, Callable[[], None]]] = []
        self._students: dict[tuple[Hashable, str], Student | None] = {}  # None: has failed and learns no more
        self._able: dict[str, Learnable[Any]] = {}
        self._tenants: dict[str, Tenants] = {}  # drafters with tenants' modules
        self._spent_s = 0.0
        self._died = False
        self._began_s = clock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, engine: Engine) -> tuple[Drafter, Drafter]:
        """Start to learn from an engine, see `EngineLearner`.

        Raises CompositionError if no drafter can learn or the learner has an engine already, OptionError for a folder
        of another drafter or target.
        """
        if self._able:
            raise CompositionError("this learner learns beside another engine already; make one for each")
        try:
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or error
            raise OptionError(f"{str(self._folder)!r} cannot be made ({reason})", field="learn_folder") from error
        self._able = _able(engine, self._per_tenant)
        self._target, self._engine = engine.target, weakref.ref(engine)
        recorder = Recorder(
            self._take,
            engine.target.head_width,
            sorted({layer for each in self._able.values() for layer in each.layers}),
            any(each.reads_prompts for each in self._able.values()),
        )
        if self._per_tenant:
            members: Mapping[str, Any] = engine.drafter.members
            self._tenants = {name: Tenants(members[name]) for name in self._able}
            return with_members(engine.drafter, {**members, **self._tenants}), recorder
        self._traffic[_ALL] = self._new_traffic()
        for name in self._able:
            self._students[_ALL, name] = self._new_student(_ALL, name)
        return engine.drafter, recorder

    def changes(self) -> Sequence[tuple[str, Callable[[], None]]]:
        """See `EngineLearner`; the first step of the engine starts the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="truedraft-learner", daemon=True)
            self._thread.start()
        if not self._changes:
            return ()
        with self._guard:
            changes, self._changes = self._changes, []
        return changes

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._guard:
            self._traffic.clear()
            self._students.clear()

    def _take(self, scope: Hashable, answer: Answered) -> None:
        key = scope if self._per_tenant else _ALL
        with self._guard:
            if key not in self._traffic and (self._closed.is_set() or len(self._traffic) >= _MOST_TENANTS):
                return
            traffic = self._traffic.setdefault(key, self._new_traffic())
        answer.since_s = self._clock()
        traffic.add(answer)

    def _new_traffic(self) -> Traffic:
        return Traffic(self._most_bytes, self._most_tokens, self._keep_s)

    def _new_student(self, scope: Hashable, name: str) -> Student:
        learnable, versions, found = self._able[name], None, None
        if self._folder is not None:
            folder = self._folder / name
            if self._per_tenant:
                folder = folder / "tenants" / hashlib.sha256(repr(scope).encode()).hexdigest()[:16]
            versions = Versions(folder, learnable, self._target)
            found = versions.load()
        number, module = (0, learnable.origin) if found is None else found
        serve = functools.partial(self._serve, scope, name)
        if found is not None:
            serve(module)
        return Student(module, learnable, self._traffic[scope], self._level, self._rate, serve, versions, number)

    def _serve(self, scope: Hashable, name: str, module: Any) -> None:
        """Serve a module from the next step on; None, for a tenant, serves the original one."""
        tenants = self._tenants.get(name)
        change = self._able[name].change(module) if tenants is None else functools.partial(tenants.take, scope, module)
        with self._guard:
            self._changes.append((name, change))

    def _meet(self) -> None:
        """Create heads for tenants with enough answers, and drop those of tenants without any left."""
        with self._guard:
            known = list(self._traffic.items())
        for scope, traffic in known:
            for name in self._able:
                if (scope, name) not in self._students and traffic.count >= _LEAST_ANSWERS:
                    self._students[scope, name] = self._or_none(name, functools.partial(self._new_student, scope, name))
            if traffic.is_empty:
                with self._guard:
                    self._traffic.pop(scope)
                for name in self._able:
                    if self._students.pop((scope, name), None) is not None:
                        self._serve(scope, name, None)

    def _run(self) -> None:
        try:
            _lower_priority()
            while not self._closed.is_set() and self._engine() is not None:
                self._closed.wait(self.turn())
        except Exception:
            self._died = True
            _log.exception("the thread that learns has ended; what is drafted with stays, and learns no more")

    def turn(self) -> float:
        """Do a small part of the work, within the share of time or one part more; returns seconds to rest."""
        began_s, before_s = self._clock(), self._processor()
        with self._guard:
            known = list(self._traffic.values())
        for traffic in known:
            traffic.forget(began_s)
        if self._per_tenant:
            self._meet()
        engine = self._engine()
        rest_s = _FULL_S
        if engine is not None and not engine.is_full:
            rest_s = 0.0 if self._work() else _IDLE_S
        del engine
        spent_s = self._processor() - before_s
        self._spent_s += spent_s
        return max(rest_s, spent_s / self._share - (self._clock() - began_s), 0.0)

    def _work(self) -> bool:
        """Work for one student, in rotation; returns whether there was any."""
        for key, student in list(self._students.items()):
            if student is None:
                continue
            self._students[key] = self._students.pop(key)  # the others have their turn before it
            worked = self._or_none(key[1], student.work)
            if worked is None:
                self._students[key] = None
            elif worked:
                return True
        return False

    def _or_none(self, name: str, work: Callable[[], Result]) -> Result | None:
        """The result of some work; None where it fails: the served module stays, and learns no more."""
        try:
            return work()
        except Exception:
            _log.exception("heads of the drafter %r learn no more", name)
            return None

    @property
    def status(self) -> LearnerStatus:
        all_ = list(self._students.values())
        students = [each for each in all_ if each is not None]
        failed = max(len(all_), 1) if self._died else len(all_) - len(students)
        gains = [(None, None), *(each.gain for each in students if each.gain is not None)]
        with self._guard:
            n_bytes = sum(each.n_bytes for each in self._traffic.values())
        return LearnerStatus(
            sum(each.promotions for each in students),
            sum(each.rollbacks for each in students),
            sum(each.trials for each in students),
            max((each.served.version for each in students), default=0),
            self._spent_s / max(self._clock() - self._began_s, 1e-9),
            n_bytes,
            *gains[-1],
            sum(each.unwritten for each in students) + failed,
        )


def _able(engine: Engine, per_tenant: bool) -> dict[str, Learnable[Any]]:
    members, lm_head = engine.drafter.members, functools.cache(engine.target.lm_head)
    able: dict[str, Learnable[Any]] = {}
    reasons = []
    for name, member in members.items():
        kind = learnable_kind(member)
        if kind is None:
            continue
        try:
            if per_tenant and not kind.for_tenants:
                raise CompositionError("it learns for all clients together; leave learning for each tenant out")
            able[name] = kind(member, engine.target, lm_head())
        except (CompositionError, UnsupportedModelError) as error:
            reasons.append(f"{name!r}: {error}")
    if not able:
        raise CompositionError(
            f"nothing of what drafts here ({', '.join(members) or engine.drafter.name}) can learn while it serves"
            + (f" ({'; '.join(reasons)})" if reasons else f": {_CANNOT}")
        )
    if reasons:
        _log.warning("some of what drafts does not learn: %s", "; ".join(reasons))
    return able


def _lower_priority() -> None:
    """Let the calling thread compute on one core only, and with the lowest priority."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Threads that start later would inherit it, so it is restored.
    other = threading.Thread(target=torch.set_num_threads, args=(threads,))
    other.start()
    other.join()
    with contextlib.suppress(OSError, AttributeError):  # other systems apply it to the process, or lack it
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
