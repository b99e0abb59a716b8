"""The embedded pair: a target and a draft trained on CPython's standard library."""
