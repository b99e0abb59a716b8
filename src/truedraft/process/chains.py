"""Chains of a process: where they stand, what they took, and what a watcher is shown of them."""

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
