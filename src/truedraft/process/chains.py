"""Chains of a process: their states and counts, and the steps that a watcher receives."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from truedraft.errors import OptionError
from truedraft.options import check_whole
from truedraft.process.drafts import Known
from truedraft.process.noise import chain_roots


@dataclass(frozen=True, slots=True)
class Seen:
    """The steps of some chains at one depth of a round, as passed to `watch`.

    Attributes:
        chains: their numbers `[rows]`.
        steps: numbers of the steps `[rows]`.
        states: before the step.
        guesses: of the draft; None if nothing was drafted.
        kept: whether drafts were accepted `[rows]`, bool; None if nothing was drafted.
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
    """Chains of a process with their counts. `begin` makes new ones.

    Attributes:
        states: `[chains, ...]`.
        at: steps made `[chains]`, int64.
        errors: the exception that ended a chain, or None.
        calls: number of calls of the costly function with a point of the chain `[chains]`: its sequential depth.
        drafted: number of drafted steps `[chains]`.
        accepted: number of accepted drafted steps `[chains]`.
        rounds: calls of the costly function, one for all chains together.
        evaluations: points evaluated in these calls.
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
        """Chains that start from states `[chains, ...]`.

        Args:
            states: one for each chain.
            seed: of their noise.
            at: number of their first step. Under shared noise a chain that starts from a state of another one, at that
                step and with its seed, continues as it did.

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
        """Fraction of drafted steps that were accepted; 0 if none were drafted."""
        return float(self.accepted.sum()) / max(int(self.drafted.sum()), 1)

    @property
    def steps_per_call(self) -> float:
        """Steps of a chain per call of the costly function; 1 for the plain process."""
        return float((self.calls + self.accepted).sum()) / max(int(self.calls.sum()), 1)
