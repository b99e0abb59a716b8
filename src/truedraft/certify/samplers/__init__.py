"""Certification of users' rejection samplers: run on worlds with a known exact answer; the fault is named."""

from truedraft.certify.samplers.contract import Sampler, load_sampler
from truedraft.certify.samplers.evidence import DEPENDENT, UNKNOWN
from truedraft.certify.samplers.run import GOAL, certify_sampler

__all__ = ["DEPENDENT", "GOAL", "UNKNOWN", "Sampler", "certify_sampler", "load_sampler"]
