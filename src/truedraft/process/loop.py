"""Runs chains of a process: draft some steps ahead, ask the costly function at all of them at once, judge in order."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from truedraft.core.noise import Purpose
from truedraft.errors import OptionError, ProcessError
from truedraft.options import check_whole
from truedraft.process.base import Process
from truedraft.process.drafts import Draft, Known
from truedraft.process.noise import RoundNoise, chain_roots
from truedraft.process.windows import Windows


@dataclass(frozen=True, slots=True)
class Seen:
    """The steps that some chains made at one depth of a round, as `watch` is shown them.

    Attributes:
        chains: their numbers `[rows]`.
        steps: of each.
        states: before.
        outputs: of the costly function.
        guesses: of the draft; None where nothing was drafted.
        kept: whether drafts stayed `[rows]`, bool; None likewise.
        outcomes: of the step.
    """

    chains: Tensor
    steps: Tensor
    states: Tensor
    outputs: Tensor
    guesses: Tensor | None
    kept: Tensor | None
    outcomes: Tensor


@dataclass(slots=True, eq=False)
class Chains:
    """Chains of a process, where they stand, and what they took. `begin` makes new ones.

    Attributes:
        states: `[chains, ...]`.
        at: steps made `[chains]`, int64.
        errors: what ended a chain; None of one that is well.
        calls: of the costly function in which each took part `[chains]`: its sequential depth.
        drafted: steps drafted for each `[chains]`.
        accepted: of these `[chains]`.
        rounds: calls of the costly function, one for all chains together.
        evaluations: points that it was asked at in these.
        trials: calls beyond these, to measure what batches take.
        path: states by step `[chains, steps + 1, ...]` where they were asked for, zeros behind a chain's end.
    """

    states: Tensor
    at: Tensor
    errors: list[Exception | None]
    calls: Tensor
    drafted: Tensor
    accepted: Tensor
    roots: Tensor
    rounds: int = 0
    evaluations: int = 0
    trials: int = 0
    path: Tensor | None = None
    known: Known | None = field(default=None, repr=False)

    @classmethod
    def begin(cls, states: Tensor, seed: int = 0, at: int = 0) -> Chains:
        """Chains that start from states `[chains, ...]`.

        Args:
            states: one for each chain.
            seed: of their noise.
            at: the number of their first step. Under shared noise a chain that begins from a state of another one, at
                that step and with its seed, goes on as it did.

        Raises:
            OptionError: no states, or a negative step.
        """
        check_whole("at", at, least=0)
        if not states.dim() or not len(states):
            raise OptionError(
                f"must be one row or more, one for each chain, got shape {tuple(states.shape)}", field="states"
            )
        zeros = torch.zeros(len(states), dtype=torch.int64, device=states.device)
        roots = chain_roots(seed, len(states), states.device)
        return cls(states.clone(), zeros + at, [None] * len(states), zeros, zeros.clone(), zeros.clone(), roots)

    @property
    def acceptance_rate(self) -> float:
        """Drafted steps that stayed, a fraction; 0 where none were drafted."""
        return float(self.accepted.sum()) / max(int(self.drafted.sum()), 1)

    @property
    def steps_per_call(self) -> float:
        """Steps that a chain made in one call of the costly function; the plain process makes 1."""
        return float((self.calls + self.accepted).sum()) / max(int(self.calls.sum()), 1)


def speculate(
    process: Process,
    chains: Tensor | Chains,
    steps: int,
    *,
    draft: Draft,
    window: int | Windows | None = None,
    seed: int = 0,
    rounds: int | None = None,
    keep_path: bool = False,
    watch: Callable[[Seen], None] | None = None,
) -> Chains:
    """Run chains up to a number of steps; their distribution is that of the plain process.

    Seeds. Under shared noise the same seed gives the same path, with any draft and window or none. Else it gives the
    same path with the same draft and fixed windows, also where the run is broken off and resumed; with other drafts or
    measured windows it gives another path of the same distribution. Both up to the rounding of `evaluate`, where rows
    are not computed alike in batches of all sizes.

    Args:
        process: the process.
        chains: states to begin from `[chains, ...]`, or chains to go on with, which stay as they are.
        steps: at which chains end, counted from 0.
        draft: guesses the costly function.
        window: steps drafted in each round, 0 for the plain process; None chooses by what calls take and what becomes
            of drafts.
        seed: of new chains; those that go on keep theirs.
        rounds: calls after which to stop early; None goes on to the end.
        keep_path: whether all states are kept.
        watch: is shown every step that was made.

    Returns:
        The chains, and what they took. One whose step failed has its error, and stands where it was.

    Raises:
        OptionError: an option is out of range.
    """
    check_whole("steps", steps, least=0)
    windows: int | Windows
    if window is None or isinstance(window, Windows):
        windows = window or Windows()
    else:
        windows = check_whole("window", window, least=0)
    chains = copy.copy(chains) if isinstance(chains, Chains) else Chains.begin(chains, seed)
    for name in ("states", "at", "calls", "drafted", "accepted", "errors", "path", "known"):
        setattr(chains, name, copy.deepcopy(getattr(chains, name)))
    if keep_path:
        path = chains.states.new_zeros(len(chains.states), steps + 1, *chains.states.shape[1:])
        if chains.path is not None:
            path[:, : chains.path.shape[1]] = chains.path[:, : steps + 1]
        path[torch.arange(len(path)), chains.at.clamp_max(steps)] = chains.states
        chains.path = path
    made = 0
    while rounds is None or made < rounds:
        well = torch.tensor([error is None for error in chains.errors], device=chains.at.device)
        active = torch.nonzero(well & (chains.at < steps))[:, 0]
        if not len(active):
            break
        _Round(process, chains, active, steps, draft, watch).run(windows)
        made += 1
    return chains


class _Round:
    """One call of the costly function, and the steps that it decides."""

    def __init__(
        self,
        process: Process,
        chains: Chains,
        active: Tensor,
        steps: int,
        draft: Draft,
        watch: Callable[[Seen], None] | None,
    ) -> None:
        self._process = process
        self._chains = chains
        self._active = active
        self._begun = chains.at[active]
        self._remaining = steps - self._begun
        self._draft = draft
        self._watch = watch
        known = chains.known
        self._known = None if known is None else known.of(active)
        self._states = [chains.states[active]]  # by depth, drafted ones behind the first
        self._points: list[Tensor] = []
        self._guesses: list[Tensor] = []
        self._drafted: list[Tensor] = []

    def run(self, windows: int | Windows) -> None:
        began = time.perf_counter()
        if isinstance(windows, Windows):
            window = self._chosen(windows)
        else:
            window = min(windows, int(self._remaining.max()) - 1)
        if self._known is None and self._draft.needs:
            window = 0
        chosen = time.perf_counter()
        depth = self._propose(window)
        drafted = time.perf_counter()
        outputs, rows = self._ask()
        asked = time.perf_counter()
        accepted = self._judge(outputs, rows)
        chains, active = self._chains, self._active
        chains.calls[active] += 1
        chains.drafted[active] += depth
        chains.accepted[active] += accepted
        chains.rounds += 1
        if isinstance(windows, Windows):
            seconds = (chosen - began, drafted - chosen, asked - drafted, time.perf_counter() - chosen)
            windows.observe(depth.tolist(), accepted.tolist(), int((depth + 1).sum()), seconds)

    def _chosen(self, windows: Windows) -> int:
        remaining, times = int(self._remaining.max()), windows.times
        if not times.covers(len(self._active)):
            states, count = self._states[0], len(self._active)
            noise = RoundNoise(self._chains.roots[self._active], self._begun, self._begun, 1, states.dtype).at(0)
            points = self._process.points(states, self._begun, noise)

            def ask(number: int) -> float:
                which = torch.arange(number, device=points.device) % count
                trial, steps = points[which], self._begun[which]
                began = time.perf_counter()
                self._process.evaluate(trial, steps)
                return time.perf_counter() - began

            try:
                self._chains.trials += times.begin(ask, count, min(windows.most, remaining - 1))
            except Exception:  # of a chain whose step fails, which the round itself will find
                return 0
        return windows.choose(len(self._active), remaining)

    def _propose(self, window: int) -> Tensor:
        """Draft up to so many steps; how many of each chain `[chains]`."""
        process, chains, begun = self._process, self._chains, self._begun
        depth = (self._remaining - 1).clamp_max(window)
        if self._known is not None:
            depth = torch.where(self._known.count < self._draft.needs, 0, depth)
        roots, calls = chains.roots[self._active], chains.calls[self._active]
        dtype = self._states[0].dtype if self._states[0].is_floating_point() else torch.float64
        self._noise = noise = RoundNoise(roots, begun, calls, window + 1, dtype)
        self._points.append(process.points(self._states[0], begun, noise.at(0)))
        for place in range(window if len(depth) and int(depth.max()) else 0):
            steps, here = begun + place, noise.at(place)
            known = self._known or Known.nothing(self._points[0], self._points[0], len(begun))
            guess = self._draft.guess(self._states[-1], self._points[-1], steps, known)
            # A guess that is none ends the draft before anything is drawn from it.
            fine = ~torch.isnan(guess).flatten(1).any(-1)
            depth = torch.where(fine, depth, depth.clamp_max(place))
            if not int((depth > place).sum()):
                break
            guess = torch.where(fine.view(-1, *[1] * (guess.dim() - 1)), guess, 0.0)
            self._guesses.append(guess)
            self._drafted.append(process.draw(self._states[-1], steps, guess, here, Purpose.DRAFT))
            self._states.append(process.moved(self._states[-1], steps, self._drafted[-1]))
            self._points.append(process.points(self._states[-1], steps + 1, noise.at(place + 1)))
        self._depth = depth
        return depth

    def _ask(self) -> tuple[Tensor, list[Tensor]]:
        """Ask the costly function at all points at once.

        Returns:
            Its outputs, and by depth where each chain's stands among them `[chains]`, -1 where there is none.
        """
        asked = [self._depth >= place for place in range(int(self._depth.max()) + 1)]
        numbers = torch.cumsum(torch.stack(asked).flatten(), 0).view(len(asked), -1) - 1
        rows = [torch.where(here, number, -1) for here, number in zip(asked, numbers, strict=True)]
        points = torch.cat([self._points[place][here] for place, here in enumerate(asked)])
        steps = torch.cat([self._begun[here] + place for place, here in enumerate(asked)])
        self._chains.evaluations += len(points)
        try:
            outputs = self._process.evaluate(points, steps)
        except Exception:
            return self._ask_one_by_one(points, steps, rows)
        if len(outputs) != len(points):
            raise ProcessError(
                f"evaluate of {type(self._process).__name__} gave {len(outputs)} rows for {len(points)} points; it "
                "must give one for each"
            )
        return outputs, rows

    def _ask_one_by_one(self, points: Tensor, steps: Tensor, rows: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The outputs up to each chain's first point that raises; a chain ends if that is where it stands.

        The draft that led to a point that raises is judged all the same: whether it stays must not hang on what comes
        of it. If it does, the next round begins there.
        """
        found: list[Tensor] = []
        left = [torch.full_like(row, -1) for row in rows]
        for chain in range(len(self._active)):
            for place in range(int(self._depth[chain]) + 1):
                row = int(rows[place][chain])
                self._chains.trials += 1
                try:
                    found.append(self._process.evaluate(points[row : row + 1], steps[row : row + 1]))
                except Exception as error:
                    if not place:
                        self._chains.errors[int(self._active[chain])] = error
                    break
                left[place][chain] = len(found) - 1
        return torch.cat(found) if found else points[:0], left

    def _judge(self, outputs: Tensor, rows: list[Tensor]) -> Tensor:
        """Decide step by step which drafts stay, and move the chains; accepted steps of each `[chains]`."""
        accepted = torch.zeros_like(self._depth)
        running = torch.arange(len(self._active), device=accepted.device)
        for place, row in enumerate(rows):
            running = running[row[running] >= 0]
            drafted = self._depth[running] > place
            going = [running[:0]]
            for some, judged in ((running[drafted], True), (running[~drafted], False)):
                if len(some):
                    kept = self._step(place, some, outputs[row[some]], judged)
                    accepted[kept] += judged
                    going += [kept] if judged else []
            running = torch.cat(going)
        return accepted

    def _step(self, place: int, running: Tensor, outputs: Tensor, judged: bool) -> Tensor:
        """Make one step of some chains of the round; those whose draft stayed."""
        process, chains = self._process, self._chains
        ids, steps = self._active[running], self._begun[running] + place
        states, noise = chains.states[ids], self._noise.at(place, running)
        guesses = kept = None
        if judged:
            guesses, drafted = self._guesses[place][running], self._drafted[place][running]
            kept, outcomes = process.judge(states, steps, outputs, guesses, drafted, noise)
        else:
            outcomes = process.draw(states, steps, outputs, noise, Purpose.BONUS)
        sound = process.sound(outcomes) & ~torch.isnan(outputs).flatten(1).any(-1)
        if not sound.all():
            for chain, step in zip(ids[~sound].tolist(), steps[~sound].tolist(), strict=True):
                chains.errors[chain] = ProcessError(
                    f"step {step} of chain {chain} gave NaN, an infinite state or no outcome; look at what evaluate "
                    "gives at its state"
                )
            ids, steps, states, outputs, outcomes, running = (
                each[sound] for each in (ids, steps, states, outputs, outcomes, running)
            )
            guesses, kept = (None if each is None else each[sound] for each in (guesses, kept))
        if self._watch is not None:
            self._watch(Seen(ids, steps, states, outputs, guesses, kept, outcomes))
        points = self._points[place][running]
        if chains.known is None:
            chains.known = Known.nothing(points, outputs, len(chains.states))
        chains.known.add(ids, points, outputs, steps)
        chains.states[ids] = process.moved(states, steps, outcomes)
        chains.at[ids] = steps + 1
        if chains.path is not None:
            chains.path[ids, steps + 1] = chains.states[ids]
        return running if kept is None else running[kept]
