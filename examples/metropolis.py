"""Bayesian logistic regression by Metropolis-Hastings: proposals of several steps are judged in one call.

    python examples/metropolis.py --out benchmarks/results/processes.jsonl --picture docs/processes_metropolis.png

The data are the 569 tumours of scikit-learn's `load_breast_cancer`, 30 measurements and a constant; the prior is normal
with a deviation of 2. Prefetching (Angelino et al. 1403.7265) asks for the likelihood at the proposals along the branch
that the draft finds likely: that all are rejected, or what the normal density around the mode says of each. The path is
that of the plain process, bit for bit as far as the likelihood's rounding is the same in batches.
"""

from __future__ import annotations

from argparse import Namespace

import torch
from torch import Tensor
from torch.nn import functional

from measuring import arguments, batch_cost, certificate, compared, finish
from truedraft import pictures
from truedraft.process import MetropolisHastings, Stays, Surrogate, speculate

DEVIATION = 2.0


def tumours() -> tuple[Tensor, Tensor]:
    """Measurements `[569, 31]`, standardised, the last being 1, and signs `[569]`: 1 for benign, else -1."""
    from sklearn.datasets import load_breast_cancer

    data, labels = load_breast_cancer(return_X_y=True)
    x = torch.tensor(data, dtype=torch.float64)
    x = (x - x.mean(0)) / x.std(0)
    return torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], dim=1), torch.tensor(2.0 * labels - 1.0)


class Regression(MetropolisHastings):
    """The posterior of the weights.

    Args:
        signed: measurements times signs `[patients, size]`.
        scale: deviations of proposals `[size]`.
    """

    def __init__(self, signed: Tensor, scale: Tensor) -> None:
        super().__init__(scale)
        self.signed = signed

    def log_density(self, thetas: Tensor) -> Tensor:
        fits = functional.logsigmoid(thetas @ self.signed.T).sum(-1)
        return fits - 0.5 * thetas.square().sum(-1) / DEVIATION**2


def mode(signed: Tensor) -> tuple[Tensor, Tensor]:
    """The mode of the posterior `[size]`, by Newton's method, and its curvature there `[size, size]`."""
    theta = torch.zeros(signed.shape[1], dtype=torch.float64)
    for _ in range(30):
        p = torch.sigmoid(-(signed @ theta))
        gradient = signed.T @ p - theta / DEVIATION**2
        curvature = (signed * (p * (1 - p))[:, None]).T @ signed + torch.eye(len(theta)) / DEVIATION**2
        theta = theta + torch.linalg.solve(curvature, gradient)
    return theta, curvature


def picture(options: Namespace, process: Regression, start: Tensor, laplace: Surrogate) -> None:
    """One weight along a plain and a drafted run, which coincide."""
    lines = {}
    for name, window in (("plain", 0), (f"window {options.window}", options.window)):
        run = speculate(process, start, options.steps, draft=laplace, window=window, keep_path=True)
        assert run.path is not None
        every = max(options.steps // 100, 1)
        lines[f"{name}: {run.rounds} calls"] = [
            (n, 5.0 + float(run.path[0, n, 0])) for n in range(0, options.steps, every)
        ]
    heading = "A weight of the regression: the same path with fewer calls in sequence"
    pictures.line_chart(lines, (heading, "step", "weight + 5")).savefig(options.picture, dpi=80)


def main() -> None:
    """Run the example."""
    options = arguments("Metropolis-Hastings with a costly likelihood, plain and with drafts.", 2000).parse_args()
    torch.set_num_threads(1)
    x, signs = tumours()
    signed = x * signs[:, None]
    theta, curvature = mode(signed)
    # Roberts, Gelman and Gilks: 2.4 / sqrt(size) deviations, here of each weight given the others.
    process = Regression(signed, 2.4 / len(theta) ** 0.5 / curvature.diagonal().sqrt())
    laplace = Surrogate(lambda thetas: -0.5 * (((thetas - theta) @ curvature) * (thetas - theta)).sum(-1))
    start = process.initial(theta[None])
    record = {
        "example": "metropolis",
        "steps": options.steps,
        "window": options.window,
        "batch": batch_cost(process, theta[None], torch.zeros(1, dtype=torch.int64)),
        "ways": compared(process, start, {"all rejected": Stays(), "normal around the mode": laplace}, options),
        "certificate": certificate(process, start, min(options.steps, 1000), laplace),
    }
    finish(options, record)
    if options.picture is not None:
        picture(options, process, start, laplace)


if __name__ == "__main__":
    main()
