"""Losslessness as something a user can check: exact laws, equal answers, statistics, and controls that must fail."""
