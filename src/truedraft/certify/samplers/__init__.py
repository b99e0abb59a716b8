"""Others' rejection samplers, white box: run on worlds whose exact answer is known; what is wrong is named."""

from truedraft.certify.samplers.contract import Sampler, load_sampler
from truedraft.certify.samplers.diagnosis import DEPENDENT, UNKNOWN, Diagnosis
from truedraft.certify.samplers.report import (
    as_dict,
    headings,
    markdown,
    place_headings,
    place_rows,
    sentences,
    verdict,
    world_rows,
)
from truedraft.certify.samplers.run import DEVIATES, GOAL, NOTICED, SamplerCertificate, certify_sampler

__all__ = [
    "DEPENDENT",
    "DEVIATES",
    "GOAL",
    "NOTICED",
    "UNKNOWN",
    "Diagnosis",
    "Sampler",
    "SamplerCertificate",
    "as_dict",
    "certify_sampler",
    "headings",
    "load_sampler",
    "markdown",
    "place_headings",
    "place_rows",
    "sentences",
    "verdict",
    "world_rows",
]
