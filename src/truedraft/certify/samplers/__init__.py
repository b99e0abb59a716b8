"""Rejection samplers of others, white box: run on worlds whose exact answer is known, and told what is wrong by name."""

from truedraft.certify.samplers.contract import Sampler, load_sampler
from truedraft.certify.samplers.diagnosis import DEPENDENT, UNKNOWN, Diagnosis
from truedraft.certify.samplers.report import as_dict, markdown, verdict
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
    "load_sampler",
    "markdown",
    "verdict",
]
