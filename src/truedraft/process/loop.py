"""Runs chains of a process: draft several steps, evaluate the costly function in one call, verify in order."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from truedraft.core.noise import Purpose
from truedraft.errors import OptionError, ProcessError
from truedraft.machine import wait_for
from truedraft.options import check_whole
from truedraft.process.base import Process
from truedraft.process.drafts import Draft, Known
from truedraft.process.noise import RoundNoise, chain_roots
from truedraft.process.windows import Windows


@dataclass(frozen=True, slots=True)
class Seen:
    """Steps of some chains at one depth of a round; `guesses` and `kept` are None if nothing was drafted."""

    chains: Tensor  # [rows]: their numbers
    steps: Tensor  # [rows]: numbers of the steps
    states: Tensor  # before the step
    outputs: Tensor
    guesses: Tensor | None
    kept: Tensor | None  # [rows] bool: whether drafts were accepted
    outcomes: Tensor


@dataclass(slots=True, eq=False)
class Chains:
    """Chains of a process with their counts. `begin` makes new ones.

    Attributes:
        states: `[chains, ...]`.
        at: steps made `[chains]`, int64.
        errors: the exception that ended a chain, or None.
        calls: calls of the costly function with a point of the chain `[chains]`: its sequential depth.
        drafted, accepted: steps `[chains]`.
        rounds: calls of the costly function, one for all chains together.
        trials: further calls, to measure the times of batches.
        path: states by step `[chains, steps + 1, ...]` if requested, zeros after a chain's end.
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
        """Chains that start from states `[chains, ...]`, with noise of a seed.

        Under shared noise a chain that starts from a state of another one, `at` that step and with its seed, continues
        as it did.

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
        return float(self.accepted.sum()) / max(int(self.drafted.sum()), 1)

    @property
    def steps_per_call(self) -> float:
        """Steps of a chain per call of the costly function; 1 for the plain process."""
        return float((self.calls + self.accepted).sum()) / max(int(self.calls.sum()), 1)


def plain_steps(
    process: Process, chains: Chains, active: Tensor, count: int, watch: Callable[[Seen], None] | None
) -> tuple[int, float, float]:
    """Run up to `count` steps of the plain process in place, with one call of the costly function each.

    It stops before a step that fails for any of the active chains. Each must have at least `count` steps left.

    Returns:
        The number of steps made; seconds of the costly function and of everything in one of them, without the first,
        which makes the noise of all.
    """
    states, at = chains.states[active], chains.at[active]
    calls = chains.calls[active] + torch.arange(count, device=at.device)[:, None]
    noise = RoundNoise(chains.roots[active], at, calls, count, _dtype_of(states), frozenset({Purpose.BONUS}))
    made, target_s, first = 0, 0.0, time.perf_counter()
    last: list[tuple[Tensor, Tensor, Tensor]] = []
    for number in range(count):
        here = noise.at(number)
        points = process.points(states, at, here)
        began = time.perf_counter()
        try:
            outputs = process.evaluate(points, at)
        except Exception:
            break
        wait_for(outputs.device)
        target_s += time.perf_counter() - began
        if len(outputs) != len(points):
            break
        outcomes = process.draw(states, at, outputs, here, Purpose.BONUS)
        if torch.isnan(outputs).any() or not process.sound(outcomes).all():
            break
        if watch is not None:
            watch(Seen(active, at, states, outputs, None, None, outcomes))
        last = [*last[-1:], (points, outputs, at)]
        states, at, made = process.moved(states, at, outcomes), at + 1, made + 1
        if chains.path is not None:
            chains.path[active, at] = states
        if made == 1 < count:
            target_s, first = 0.0, time.perf_counter()
    timed = max(made - 1, 1)
    seconds = target_s / timed, (time.perf_counter() - first) / timed
    if made:
        chains.states[active], chains.at[active] = states, at
        chains.calls[active] += made
        chains.rounds += made
        chains.evaluations += made * len(active)
        points, outputs, steps = (torch.stack(each) for each in zip(*last, strict=True))
        if chains.known is None:
            chains.known = Known.nothing(points[0], outputs[0], len(chains.states))
        chains.known.add(active, points, outputs, steps, torch.full_like(at, len(last)))
    return made, *seconds


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

    Under shared noise the same seed gives the same path, with any draft and window. Otherwise it does with the same
    draft and fixed windows, even if the run is resumed; with others another path of the same distribution. Both hold up
    to the rounding of `evaluate`, if rows are not computed identically in batches of all sizes.

    Args:
        chains: initial states `[chains, ...]`, or chains to continue, which are not changed.
        steps: total number of steps at which chains end, counted from 0.
        window: drafted steps per round, 0 for the plain process; None chooses from measured times and acceptance.
        seed: for new chains; continued chains keep theirs.
        rounds: maximum number of calls; None runs to the end.
        watch: callback with every step that was made.

    Returns:
        A chain with a failed step has its error, and remains at its state before that step.

    Raises:
        OptionError: an option is out of range.
    """
    check_whole("steps", steps, least=0)
    windows = Windows() if window is None else window
    if not isinstance(windows, Windows):
        windows = check_whole("window", windows, least=0)
    chains = copy.copy(chains) if isinstance(chains, Chains) else Chains.begin(chains, seed)
    chains.errors = [*chains.errors]
    for name in ("states", "at", "calls", "drafted", "accepted", "path", "known"):
        setattr(chains, name, copy.deepcopy(getattr(chains, name)))
    if keep_path:
        path = chains.states.new_zeros(len(chains.states), steps + 1, *chains.states.shape[1:])
        if chains.path is not None:
            path[:, : chains.path.shape[1]] = chains.path[:, : steps + 1]
        path[torch.arange(len(path)), chains.at.clamp_max(steps)] = chains.states
        chains.path = path
    run = _Run(process, chains, steps, draft, windows, watch)
    left = steps * len(chains.states) if rounds is None else rounds  # calls; each makes a step of a chain or ends one
    while left > 0 and len(active := run.running()):
        left -= run.go_on(active, left)
    return chains


_MOST_PLAIN, _MOST_NUMBERS = 512, 1 << 20  # plain steps with noise made at once, and numbers of it


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    process: Process
    chains: Chains
    steps: int
    draft: Draft
    windows: int | Windows
    watch: Callable[[Seen], None] | None

    def running(self) -> Tensor:
        well = torch.tensor([error is None for error in self.chains.errors], device=self.chains.at.device)
        return torch.nonzero(well & (self.chains.at < self.steps))[:, 0]

    def go_on(self, active: Tensor, most: int) -> int:
        began, windows, chains = time.perf_counter(), self.windows, self.chains
        remaining = self.steps - chains.at[active]
        longest = int(remaining.max())
        window = self._chosen(windows, active, longest) if isinstance(windows, Windows) else windows
        chosen = time.perf_counter()
        if not window:
            at_once = max(1, min(_MOST_PLAIN, _MOST_NUMBERS // max(chains.states[0].numel() * len(active), 1)))
            together = windows.together if isinstance(windows, Windows) else at_once
            count = min(together, at_once, int(remaining.min()), most)
            made, target_s, step_s = plain_steps(self.process, chains, active, count, self.watch)
            if made:
                if isinstance(windows, Windows):
                    seconds = chosen - began, 0.0, target_s, step_s
                    windows.observe([0], [0], len(active), seconds, together=made)
                return made
        depth, accepted, draft_s, target_s = _Round(self, active).run(min(window, longest - 1))
        if isinstance(windows, Windows):
            seconds = (chosen - began, draft_s, target_s, time.perf_counter() - chosen)
            windows.observe(depth.tolist(), accepted.tolist(), int((depth + 1).sum()), seconds, together=1)
        return 1

    def _chosen(self, windows: Windows, active: Tensor, remaining: int) -> int:
        if not windows.times.covers(len(active)):
            process, chains, count = self.process, self.chains, len(active)
            states, at = chains.states[active], chains.at[active]
            noise = RoundNoise(chains.roots[active], at, at, 1, _dtype_of(states)).at(0)
            points = process.points(states, at, noise)

            def measure(number: int) -> float:
                which = torch.arange(number, device=points.device) % count
                trial, steps = points[which], at[which]
                began = time.perf_counter()
                wait_for(process.evaluate(trial, steps).device)
                return time.perf_counter() - began

            try:
                chains.trials += windows.times.begin(measure, count, min(windows.most, remaining - 1))
            except Exception:  # a step that fails is found by the round itself
                return 0
        return windows.choose(len(active), remaining)


def _dtype_of(states: Tensor) -> torch.dtype:
    return states.dtype if states.is_floating_point() else torch.float64


class _Round:
    def __init__(self, run: _Run, active: Tensor) -> None:
        self._process, self._chains, self._draft, self._watch = run.process, run.chains, run.draft, run.watch
        self._active = active
        self._begun = run.chains.at[active]
        self._remaining = run.steps - self._begun
        known = run.chains.known
        self._known = None if known is None else known.of(active)
        self._states = [run.chains.states[active]]  # by depth, drafted ones after the first
        self._points: list[Tensor] = []
        self._guesses: list[Tensor] = []
        self._drafted: list[Tensor] = []

    def run(self, window: int) -> tuple[Tensor, Tensor, float, float]:
        """Run the round; returns drafted and accepted steps `[chains]`, and seconds of drafting and of `evaluate`."""
        began = time.perf_counter()
        depth = self._propose(0 if self._known is None and self._draft.needs else window)
        drafted = time.perf_counter()
        outputs, index = self._evaluate()
        evaluated = time.perf_counter()
        accepted = self._judge(outputs, index)
        chains, active = self._chains, self._active
        chains.calls[active] += 1
        chains.drafted[active] += depth
        chains.accepted[active] += accepted
        chains.rounds += 1
        return depth, accepted, drafted - began, evaluated - drafted

    def _propose(self, window: int) -> Tensor:
        process, chains, begun = self._process, self._chains, self._begun
        depth = (self._remaining - 1).clamp_max(window)
        if self._known is not None:
            depth = torch.where(self._known.count < self._draft.needs, 0, depth)
        roots, calls = chains.roots[self._active], chains.calls[self._active]
        self._noise = noise = RoundNoise(roots, begun, calls, window + 1, _dtype_of(self._states[0]))
        self._points.append(process.points(self._states[0], begun, noise.at(0)))
        for place in range(window if len(depth) and int(depth.max()) else 0):
            steps, here = begun + place, noise.at(place)
            known = self._known or Known.nothing(self._points[0], self._points[0], len(begun))
            guess = self._draft.guess(self._states[-1], self._points[-1], steps, known)
            # A NaN guess ends the draft before anything is drawn from it.
            if (none := torch.isnan(guess)).any():
                fine = ~none.flatten(1).any(-1)
                depth = torch.where(fine, depth, depth.clamp_max(place))
                if not (depth > place).any():
                    break
                guess = torch.where(fine.view(-1, *[1] * (guess.dim() - 1)), guess, 0.0)
            self._guesses.append(guess)
            self._drafted.append(process.draw(self._states[-1], steps, guess, here, Purpose.DRAFT))
            self._states.append(process.moved(self._states[-1], steps, self._drafted[-1]))
            self._points.append(process.points(self._states[-1], steps + 1, noise.at(place + 1)))
        self._depth = depth
        return depth

    def _evaluate(self) -> tuple[Tensor, Tensor]:
        """Outputs of the costly function, and their row by point and chain `[depth + 1, chains]`, -1 for none."""
        deepest = int(self._depth.max())
        valid = self._depth >= torch.arange(deepest + 1, device=self._depth.device)[:, None]
        rows = torch.where(valid, torch.cumsum(valid.flatten(), 0).view_as(valid) - 1, -1)
        points = torch.stack(self._points[: deepest + 1])[valid]
        steps = (self._begun + torch.arange(deepest + 1, device=self._depth.device)[:, None])[valid]
        self._chains.evaluations += len(points)
        try:
            outputs = self._process.evaluate(points, steps)
        except Exception:
            return self._evaluate_one_by_one(points, steps, rows)
        wait_for(outputs.device)  # verification waits for it anyway, and the times must be separate
        if len(outputs) != len(points):
            raise ProcessError(
                f"evaluate of {type(self._process).__name__} gave {len(outputs)} rows for {len(points)} points; it "
                "must give one for each"
            )
        return outputs, rows

    def _evaluate_one_by_one(self, points: Tensor, steps: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs up to each chain's first point that raises; a chain ends if that is its current state's. A draft that
        led there is still verified, because acceptance must not depend on what follows.
        """
        found: list[Tensor] = []
        left = torch.full_like(rows, -1)
        for chain in range(len(self._active)):
            for place in range(int(self._depth[chain]) + 1):
                row = int(rows[place, chain])
                self._chains.trials += 1
                try:
                    found.append(self._process.evaluate(points[row : row + 1], steps[row : row + 1]))
                except Exception as error:
                    if not place:
                        self._chains.errors[int(self._active[chain])] = error
                    break
                left[place, chain] = len(found) - 1
        return torch.cat(found) if found else points[:0], left

    def _judge(self, outputs: Tensor, index: Tensor) -> Tensor:
        """Verify the drafts and move the chains, by one more step if all are accepted; returns the accepted steps."""
        process, depth = self._process, len(index) - 1
        found = index >= 0  # [depth + 1, chains], as all below
        if not found.any():
            return torch.zeros_like(self._depth)
        outputs = outputs[index.clamp_min(0)]
        each = torch.arange(len(self._active), device=index.device)
        places = torch.arange(depth + 1, device=index.device)[:, None]
        steps, states = self._begun + places, torch.stack(self._states[: depth + 1])
        accepted, kept = torch.zeros_like(self._depth), None
        outcomes, guesses = [], None
        if depth:
            guesses, drafted = torch.stack(self._guesses[:depth]), torch.stack(self._drafted[:depth])
            given = states[:-1], steps[:-1], outputs[:-1], guesses, drafted
            kept, judged = process.judge_window(*given, self._noise)
            kept = kept & found[:-1] & (self._depth > places[:-1])
            accepted = kept.long().cumprod(0).sum(0)
            outcomes = [*judged]
            after = process.moved(*(part.flatten(0, 1) for part in (*given[:2], judged)))
            states = torch.cat([states[:1], after.unflatten(0, kept.shape)])  # drafted states may hold guesses
        ends = found[accepted, each]
        more = torch.nonzero(ends & (accepted == self._depth))[:, 0]
        where = accepted[more], more
        drawn = process.draw(states[where], steps[where], outputs[where], self._noise.of(*where), Purpose.BONUS)
        made_of = torch.stack([*outcomes, drawn.new_zeros(len(each), *drawn.shape[1:])])
        made_of[where] = drawn
        made = self._sound(outputs, made_of, accepted + ends)
        self._move(states, steps, outputs, made_of, made)
        for place in range(int(made.max()) if self._watch is not None else 0):
            for has_draft in (True, False):
                some = torch.nonzero((made > place) & ((self._depth > place) == has_draft))[:, 0]
                if self._watch is not None and len(some):
                    of = (place, some)
                    guess = guesses[of] if has_draft and guesses is not None else None
                    stays = kept[of] if has_draft and kept is not None else None
                    self._watch(Seen(self._active[some], steps[of], states[of], outputs[of], guess, stays, made_of[of]))
        return torch.minimum(accepted, made)

    def _sound(self, outputs: Tensor, outcomes: Tensor, made: Tensor) -> Tensor:
        """Number of steps `[chains]` before the first without a valid state, which ends its chain."""
        sound = self._process.sound(outcomes.flatten(0, 1)).view(outcomes.shape[:2])
        sound = sound & ~torch.isnan(outputs).flatten(2).any(-1)
        if sound.all():
            return made
        good = torch.minimum(sound.long().cumprod(0).sum(0), made)
        for chain in torch.nonzero(good < made)[:, 0].tolist():
            step, number = int(self._begun[chain] + good[chain]), int(self._active[chain])
            self._chains.errors[number] = ProcessError(
                f"step {step} of chain {number} gave NaN, an infinite state or no outcome; look at what evaluate gives "
                "at its state"
            )
        return good

    def _move(self, states: Tensor, steps: Tensor, outputs: Tensor, outcomes: Tensor, made: Tensor) -> None:
        """Move each chain by its first `made` `[chains]` steps of those of the round, `[depth, chains, ...]` each."""
        chains, ids = self._chains, self._active
        given = (part.flatten(0, 1) for part in (states, steps, outcomes))
        after = self._process.moved(*given).unflatten(0, steps.shape)
        points = torch.stack(self._points[: len(after)])
        if chains.known is None:
            chains.known = Known.nothing(points[0], outputs[0], len(chains.states))
        chains.known.add(ids, points, outputs, steps, made)
        reached = torch.cat([states[:1], after])
        chains.states[ids] = reached[made, torch.arange(len(ids), device=ids.device)]
        chains.at[ids] = self._begun + made
        if chains.path is not None:
            place, chain = torch.nonzero(made > torch.arange(len(after), device=ids.device)[:, None], as_tuple=True)
            chains.path[ids[chain], steps[place, chain] + 1] = after[place, chain]
