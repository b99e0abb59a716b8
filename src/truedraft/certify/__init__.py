"""Certificates of losslessness for users: exact sums, equal answers, statistics, and controls that must fail."""

from truedraft.certify.certificate import certify
from truedraft.certify.checks import Finding, Part, Stack, Status
from truedraft.certify.equality import EqualityInFloat32
from truedraft.certify.report import MARKS, Report, by_part, xml_text

__all__ = [
    "MARKS",
    "EqualityInFloat32",
    "Finding",
    "Part",
    "Report",
    "Stack",
    "Status",
    "by_part",
    "certify",
    "xml_text",
]
