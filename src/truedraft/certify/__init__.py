"""Losslessness as something a user can check: exact laws, equal answers, statistics, and controls that must fail."""

from truedraft.certify.certificate import Certificate, certify
from truedraft.certify.findings import Finding, Part, Status
from truedraft.certify.report import markdown, verdict
from truedraft.certify.stack import Stack

__all__ = ["Certificate", "Finding", "Part", "Stack", "Status", "certify", "markdown", "verdict"]
