"""Speculation for any process with a costly step function: fewer sequential calls, the same distribution."""

from truedraft.process.base import (
    DiscreteSteps,
    GaussianSteps,
    MetropolisHastings,
    Process,
    SharedNoise,
    Stays,
    Surrogate,
)
from truedraft.process.drafts import Cheaper, Corrected, Draft, Extrapolation, Known, LastOutput
from truedraft.process.loop import Chains, Seen, speculate
from truedraft.process.noise import StepNoise
from truedraft.process.rules import Gaussian
from truedraft.process.windows import Windows

__all__ = [
    "Chains",
    "Cheaper",
    "Corrected",
    "DiscreteSteps",
    "Draft",
    "Extrapolation",
    "Gaussian",
    "GaussianSteps",
    "Known",
    "LastOutput",
    "MetropolisHastings",
    "Process",
    "Seen",
    "SharedNoise",
    "Stays",
    "StepNoise",
    "Surrogate",
    "Windows",
    "speculate",
]
