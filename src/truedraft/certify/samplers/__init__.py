"""Certification of users' rejection samplers: run on worlds with a known exact answer; the fault is named."""

from truedraft.certify.samplers.contract import Sampler, load_sampler
from truedraft.certify.samplers.run import DEPENDENT, GOAL, UNKNOWN, certify_sampler

__all__ = ["DEPENDENT", "GOAL", "UNKNOWN", "Sampler", "certify_sampler", "load_sampler"]
