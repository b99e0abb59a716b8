"""What the examples share: plain and drafted runs in turns, their certificate, one line of results, a picture."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from truedraft.certify.processes import FAULTS, certify_process, planted
from truedraft.machine import this_machine
from truedraft.process import Chains, Cheaper, Draft, Process, Windows, speculate

PLAIN = "plain"
ZERO: Draft = Cheaper(lambda points, steps: 0.0 * points)
"""A bad draft: what is wrong with a coupling shows where drafts are rejected."""


def arguments(what: str, steps: int) -> argparse.ArgumentParser:
    """The options of an example.

    Args:
        what: it is, in a sentence.
        steps: of each run where nothing else is asked for.
    """
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--steps", type=int, default=steps, help="of each run (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=7, help="runs of each way (default: %(default)s)")
    parser.add_argument("--window", type=int, default=8, help="of fixed windows (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file that a line of results is added to")
    parser.add_argument("--picture", type=Path, help="file to draw to, .png or .svg")
    return parser


def compared(
    process: Process, states: Tensor, drafts: Mapping[str, Draft], options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Runs of each draft, by fixed windows and by chosen ones, each behind one of the plain process, in turns.

    Returns:
        For each way medians over turns, each held against the plain run before it, and the least and the most of these:
        of seven, an interval that holds the median with a probability of 0.98.
    """
    ways: dict[str, tuple[Draft, Callable[[], int | Windows]]] = {}
    for name, draft in drafts.items():
        ways[name] = draft, lambda: options.window
        ways[f"{name}, chosen window"] = draft, lambda: Windows(2 * options.window)

    def run(draft: Draft, window: int | Windows, turn: int) -> Run:
        wall, cpu = time.perf_counter(), time.process_time()
        chains = speculate(process, states, options.steps, draft=draft, window=window, seed=turn)
        assert not any(chains.errors), chains.errors
        return Run(chains, time.perf_counter() - wall, time.process_time() - cpu)

    pairs: dict[str, list[tuple[Run, Run]]] = {name: [] for name in (PLAIN, *ways)}
    for turn in range(options.turns):
        for name, (draft, window) in ways.items():
            plain = run(draft, 0, turn)
            pairs[name].append((plain, run(draft, window(), turn)))
            pairs[PLAIN].append((plain, plain))
    return {name: summary(each) for name, each in pairs.items()}


class Run(NamedTuple):
    """One run, and what it took by the clock and of the processor."""

    chains: Chains
    wall_s: float
    cpu_s: float

    @property
    def calls(self) -> int:
        """Of the costly function, one behind another, those that measured it included."""
        return self.chains.rounds + self.chains.trials


def summary(pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    """What some runs took beside the plain ones before them."""
    own = [each for _, each in pairs]
    return {
        "sequential_calls": statistics.median(each.calls for each in own),
        "evaluations": statistics.median(each.chains.evaluations for each in own),
        "acceptance_rate": statistics.median(each.chains.acceptance_rate for each in own),
        "seconds": statistics.median(each.wall_s for each in own),
        "fewer_calls": spread([before.calls / each.calls for before, each in pairs]),
        "speedup": spread([before.wall_s / each.wall_s for before, each in pairs]),
        "cpu_speedup": spread([before.cpu_s / each.cpu_s for before, each in pairs]),
    }


def spread(values: list[float]) -> dict[str, float]:
    """The median, the least and the most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def batch_cost(process: Process, points: Tensor, steps: Tensor) -> dict[str, float]:
    """Seconds of a call by its points, over those of a call for one: the least of five."""
    seconds = {}
    for count in (1, 2, 4, 8, 16):
        rows = torch.arange(count) % len(points)
        trials = []
        for _ in range(5):
            began = time.perf_counter()
            process.evaluate(points[rows], steps[rows])
            trials.append(time.perf_counter() - began)
        seconds[count] = min(trials)
    return {"call_ms": 1e3 * seconds[1], **{f"of_{count}": seconds[count] / seconds[1] for count in seconds}}


def certificate(process: Process, states: Tensor, steps: int, draft: Draft) -> dict[str, Any]:
    """That steps follow the target, and which broken couplings were found by the same tests."""
    report = certify_process(process, states, steps, draft=draft, windows=(2, 6))
    found = {}
    for name, faults in FAULTS.items():
        for fault in faults:
            if issubclass(type(process), fault.__mro__[1]) and name != "covariances taken as equal":
                broken = certify_process(planted(process, fault), states, steps, draft=draft, windows=(2, 6))
                found[name] = broken.certainly_fails
    return {
        "steps": report.steps,
        "accepted": report.accepted,
        "p_value": report.p_value,
        "same_path": report.same_path,
        "holds": report.holds,
        "faults_found": found,
    }


def finish(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Print a table of the ways, and add the line of results."""
    record["machine"] = this_machine()
    print(f"{'':38}{'calls':>8}{'fewer':>8}{'seconds':>9}{'speed-up':>9}  [least, most]  {'of CPU':>7}  [least, most]")
    for name, own in record["ways"].items():
        fewer, speedup, cpu = own["fewer_calls"], own["speedup"], own["cpu_speedup"]
        print(
            f"{name:38}{own['sequential_calls']:8.0f}{fewer['median']:8.2f}{own['seconds']:9.3f}"
            f"{speedup['median']:9.2f}  [{speedup['least']:.2f}, {speedup['most']:.2f}]"
            f"{cpu['median']:9.2f}  [{cpu['least']:.2f}, {cpu['most']:.2f}]"
        )
    print(json.dumps(record["certificate"]))
    if options.out is not None:
        with options.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
