"""Benchmarks one can believe: workloads, paired runs, peers, tables, plots, one JSON line last."""
