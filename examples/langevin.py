"""Langevin dynamics of a cluster of 13 atoms whose forces are costly: pairs and all triples of them, by autograd.

    python examples/langevin.py --out benchmarks/results/processes.jsonl --picture docs/processes_langevin.png

Overdamped dynamics, x' = x + h F(x) + sqrt(2 h T) z, in units of Lennard and Jones: argon's energy of pairs and the
triple-dipole energy of Axilrod and Teller. Drafts need no model: the last force again, its extrapolation, or the forces
of pairs with the last known difference.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from torch import Tensor

from measuring import ZERO, arguments, batch_cost, certificate, compared, finish
from truedraft import pictures
from truedraft.process import Chains, Corrected, Extrapolation, Gaussian, GaussianSteps, LastOutput, speculate

ATOMS, STEP, TEMPERATURE, TRIPLES = 13, 1e-4, 0.2, 0.07
_FIRST, _SECOND = torch.triu_indices(ATOMS, ATOMS, 1)
_PAIR = {(int(i), int(j)): number for number, (i, j) in enumerate(zip(_FIRST, _SECOND, strict=True))}
_SIDES = torch.tensor(
    [(_PAIR[i, j], _PAIR[i, k], _PAIR[j, k]) for i, j, k in itertools.combinations(range(ATOMS), 3)]
).T


def squares(x: Tensor) -> Tensor:
    """Squared distances `[rows, pairs]` of positions `[rows, 3 * atoms]`."""
    atoms = x.view(-1, ATOMS, 3)
    return (atoms[:, _FIRST] - atoms[:, _SECOND]).square().sum(-1)


def energy(x: Tensor) -> Tensor:
    """Of pairs, 4 (r^-12 - r^-6), and of triples, (1 + 3 cos a cos b cos c) / (r_ij r_ik r_jk)^3; `[rows]`."""
    square = squares(x)
    inverse = square.pow(-3)
    a, b, c = (square[:, side] for side in _SIDES)
    product = a * b * c
    angles = (a + b - c) * (a + c - b) * (b + c - a) / (8.0 * product)
    return 4.0 * (inverse * inverse - inverse).sum(-1) + TRIPLES * ((1.0 + 3.0 * angles) * product.pow(-1.5)).sum(-1)


def pair_forces(x: Tensor, steps: Tensor) -> Tensor:
    """The forces of pairs alone, in closed form."""
    atoms = x.view(-1, ATOMS, 3)
    apart = atoms[:, :, None] - atoms[:, None]
    square = apart.square().sum(-1) + torch.eye(ATOMS, dtype=x.dtype) * 1e9
    inverse = square.pow(-3)
    return ((48.0 * inverse * inverse - 24.0 * inverse) / square)[..., None].mul(apart).sum(2).flatten(1)


class Cluster(GaussianSteps):
    """The dynamics; a state is the positions `[3 * atoms]`."""

    def evaluate(self, points: Tensor, steps: Tensor) -> Tensor:
        with torch.enable_grad():
            x = points.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(energy(x).sum(), x)
        return -gradient

    def law(self, states: Tensor, steps: Tensor, outputs: Tensor) -> Gaussian:
        scale = states.new_full((len(states), 1), (2.0 * STEP * TEMPERATURE) ** 0.5)
        return Gaussian(states + STEP * outputs, scale)


def beginning() -> Tensor:
    """One atom and its twelve neighbours in an icosahedron, relaxed for a while `[1, 3 * atoms]`."""
    golden = (1 + 5**0.5) / 2
    corners = [(0.0, 0.0, 0.0)]
    for one, other in itertools.product((-1.0, 1.0), (-golden, golden)):
        corners += [(0.0, one, other), (one, other, 0.0), (other, 0.0, one)]
    x = torch.tensor(corners, dtype=torch.float64).flatten()[None] * (1.09 / (1 + golden**2) ** 0.5)
    return speculate(Cluster(), x, 200, draft=LastOutput(), window=0, seed=99).states


DRAFTS = {
    "last force": LastOutput(),
    "extrapolated force": Extrapolation(0.5),
    "pairs and last difference": Corrected(pair_forces),
}


def picture(options: argparse.Namespace, start: Tensor) -> None:
    """Energies along a plain and a drafted run."""
    lines = {}
    for name, window in (("plain", 0), ("last force, window 8", options.window)):
        run: Chains = speculate(
            Cluster(), start, options.steps, draft=DRAFTS["last force"], window=window, keep_path=True
        )
        assert run.path is not None
        energies = energy(run.path[0])
        every = max(options.steps // 60, 1)
        lines[f"{name}: {run.rounds} calls"] = [(n, -float(energies[n])) for n in range(0, options.steps, every)]
    heading = "A cluster of 13 atoms: the same distribution with fewer calls in sequence"
    pictures.line_chart(lines, (heading, "step", "energy of binding")).savefig(options.picture, dpi=80)


def main() -> None:
    """Run the example."""
    options = arguments("Langevin dynamics of a cluster with costly forces, plain and with drafts.", 600).parse_args()
    torch.set_num_threads(1)
    start, process = beginning(), Cluster()
    record = {
        "example": "langevin",
        "steps": options.steps,
        "window": options.window,
        "batch": batch_cost(process, start, torch.zeros(1, dtype=torch.int64)),
        "ways": compared(process, start, DRAFTS, options),
        "certificate": certificate(process, start.expand(40, -1), min(options.steps, 60), ZERO),
    }
    finish(options, record)
    if options.picture is not None:
        picture(options, start)


if __name__ == "__main__":
    main()
