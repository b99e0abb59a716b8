"""Losslessness as something a user can check: exact sums, equal answers, statistics, and controls that must fail."""

from truedraft.certify.certificate import MARKS, Certificate, by_part, certify, markdown, meaning, verdict
from truedraft.certify.checks import Finding, Part, Stack, Status

__all__ = [
    "MARKS",
    "Certificate",
    "Finding",
    "Part",
    "Stack",
    "Status",
    "by_part",
    "certify",
    "markdown",
    "meaning",
    "verdict",
]
