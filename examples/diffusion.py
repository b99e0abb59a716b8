"""A diffusion sampler of handwritten digits: its network, trained here in 90 seconds, is asked 1000 times in sequence.

    python examples/diffusion.py --out benchmarks/results/processes.jsonl --picture docs/processes_diffusion.png

Ho et al. 2006.11239 on the 8 x 8 digits of scikit-learn: x' = N(c_0 x_0 + c_1 x, beta), x_0 being what the network
predicts; the last step has no noise. Drafts: the last prediction again, its extrapolation (neither needs a model), or a
network of a hundredth of the size. What a network predicts moves less from step to step than the noise it predicts.
"""

from __future__ import annotations

import itertools
import time
from argparse import Namespace

import torch
from torch import Tensor, nn

from measuring import arguments, batch_cost, certificate, compared, finish
from truedraft import pictures
from truedraft.process import Cheaper, Extrapolation, Gaussian, GaussianSteps, LastOutput, speculate

STEPS = 1000
BETAS = torch.linspace(1e-4, 0.02, STEPS, dtype=torch.float64)
LEFT = torch.cumprod(1.0 - BETAS, 0)  # alpha bar
_BEFORE = torch.cat([LEFT.new_ones(1), LEFT[:-1]])
# By t: what the image and x weigh in the mean of the next x, and its deviation.
OF_IMAGE = _BEFORE.sqrt() * BETAS / (1.0 - LEFT)
OF_X = (1.0 - BETAS).sqrt() * (1.0 - _BEFORE) / (1.0 - LEFT)
DEVIATION = torch.cat([LEFT.new_zeros(1), BETAS[1:].sqrt()])


class Network(nn.Module):
    """Predicts the noise in x `[rows, 64]` at a noise level.

    Args:
        width: of its two hidden layers.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [64 + 32, width, width, 64]
        layers = [each for a, b in itertools.pairwise(sizes) for each in (nn.Linear(a, b), nn.SiLU())]
        self.layers = nn.Sequential(*layers[:-1])
        self.register_buffer("frequencies", torch.exp(torch.linspace(0.0, 6.0, 16)))

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        """Predict, for levels `[rows]` in [0, 1)."""
        angles = level[:, None] * self.frequencies
        return self.layers(torch.cat([x, angles.sin(), angles.cos()], dim=1))


def digits() -> Tensor:
    """All 1797 images `[images, 64]`, from -1 to 1."""
    from sklearn.datasets import load_digits

    return torch.tensor(load_digits().data, dtype=torch.float32) / 8.0 - 1.0


def trained(width: int, seconds: float) -> Network:
    """A network that was trained for a while."""
    torch.manual_seed(0)
    data, network, began = digits(), Network(width), time.perf_counter()
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    left = LEFT.float()
    while (spent := time.perf_counter() - began) < seconds:
        optimizer.param_groups[0]["lr"] = 1e-3 * max(1.0 - spent / seconds, 0.02)
        x, t = data[torch.randint(len(data), (256,))], torch.randint(STEPS, (256,))
        z, level = torch.randn_like(x), left[t][:, None]
        loss = (network(level.sqrt() * x + (1.0 - level).sqrt() * z, t / STEPS) - z).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"a network of width {width}: loss {loss.item():.3f} after {seconds:.0f} s")
    return network.eval()


@torch.no_grad()
def predicted(network: Network, x: Tensor, steps: Tensor) -> Tensor:
    """The image x_0 `[rows, 64]` that a network sees in x at steps of the sampler, which begin at the most noise."""
    t = STEPS - 1 - steps
    level = LEFT[t][:, None]
    noise = network(x.float(), (t / STEPS).float()).double()
    return ((x - (1.0 - level).sqrt() * noise) / level.sqrt()).clamp(-1.5, 1.5)


class Sampler(GaussianSteps):
    """The sampler; a state is an image with noise `[64]`, and `evaluate` asks the network."""

    def __init__(self, network: Network) -> None:
        self.network = network

    def evaluate(self, points: Tensor, steps: Tensor) -> Tensor:
        return predicted(self.network, points, steps)

    def law(self, states: Tensor, steps: Tensor, outputs: Tensor) -> Gaussian:
        t = (STEPS - 1 - steps)[:, None]
        return Gaussian(OF_IMAGE[t] * outputs + OF_X[t] * states, DEVIATION[t])


def picture(options: Namespace, sampler: Sampler, drafts: dict[str, LastOutput]) -> None:
    """Images of the plain process and of drafted ones."""
    figure, axes = pictures.new_figure(4.2)
    axes.remove()
    start = noise(12)
    for row, (name, draft) in enumerate(drafts.items()):
        chains = speculate(sampler, start, STEPS, draft=draft, window=options.window if row else 0, seed=3)
        for column, image in enumerate(chains.states.view(-1, 8, 8)):
            place = figure.add_subplot(len(drafts), len(start), row * len(start) + column + 1)
            place.imshow(-image, cmap="gray")
            place.set(xticks=[], yticks=[])
            if not column:
                place.set_ylabel(f"{name}\n{chains.steps_per_call:.1f} steps a call", fontsize=7)
    figure.suptitle("Digits by a diffusion sampler, plain and with drafts", fontsize=12, fontweight="bold")
    figure.savefig(options.picture, dpi=100)


FAR = Cheaper(lambda points, steps: torch.full_like(points, 60.0))
"""A bad draft: what is wrong with a coupling shows where drafts are rejected."""


def noise(chains: int) -> Tensor:
    """Where chains begin `[chains, 64]`."""
    return torch.randn(chains, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def main() -> None:
    """Run the example."""
    parser = arguments("A diffusion sampler of digits, plain and with drafts.", STEPS)
    parser.add_argument("--width", type=int, default=1536, help="of the network (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=90.0, help="of training (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sampler, small = Sampler(trained(options.width, options.seconds)), trained(96, options.seconds / 4)
    drafts = {
        "last prediction": LastOutput(),
        "extrapolated prediction": Extrapolation(0.3),
        "small network": Cheaper(lambda points, steps: predicted(small, points, steps)),
    }
    record = {
        "example": "diffusion",
        "steps": options.steps,
        "window": options.window,
        "batch": batch_cost(sampler, noise(1), torch.full((1,), 500)),
        "ways": compared(sampler, noise(1), drafts, options),
        "certificate": certificate(sampler, noise(16), min(options.steps, 200), FAR),
    }
    finish(options, record)
    if options.picture is not None:
        picture(options, sampler, {"plain": drafts["last prediction"], **drafts})


if __name__ == "__main__":
    main()
