"""Certification of other engines over their interface, from token ids or text."""

from truedraft.certify.e_process import ALARM, CERTAIN
from truedraft.certify.engines.run import certify_engine, compare_engines
from truedraft.certify.engines.under_test import TOKENS

__all__ = ["ALARM", "CERTAIN", "TOKENS", "certify_engine", "compare_engines"]
