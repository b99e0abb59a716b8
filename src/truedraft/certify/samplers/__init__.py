"""Others' rejection samplers, white box: run on worlds whose exact answer is known; what is wrong is named."""

from truedraft.certify.samplers.contract import Sampler, load_sampler
from truedraft.certify.samplers.diagnosis import DEPENDENT, UNKNOWN
from truedraft.certify.samplers.run import DEVIATES, GOAL, NOTICED, certify_sampler

__all__ = ["DEPENDENT", "DEVIATES", "GOAL", "NOTICED", "UNKNOWN", "Sampler", "certify_sampler", "load_sampler"]
