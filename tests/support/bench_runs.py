"""What benchmarks say of themselves, and summaries of their systems."""

from __future__ import annotations

from truedraft.core.stats import Counters
from truedraft.measure.bench.report import Circumstances
from truedraft.measure.bench.summary import Ratio, Spread, Summary


def summary(name: str, speed: float, length: float = 1.0, drafts: bool = False) -> Summary:
    """A system of ours at some tokens per second, a tenth of which is plain decoding's."""
    counters = Counters(accepted_per_position=[8, 4], tried_per_position=[10, 8]) if drafts else None
    spread, ratio = Spread(speed, speed * 0.9, speed * 1.2), Ratio(speed / 10, 0.5, 2.0, 0.5)
    return Summary(name, True, 1, 5, spread, spread, spread, 4, length, counters, ratio, ratio, *[None] * 4, 1.0, 1, 1)


def circumstances() -> Circumstances:
    return Circumstances(
        model="embedded:target", note="cost of a 500 M model, text of a 16 M model", pad_to="500M", weights=None,
        drafters=("draft",), peers=(), rule="speculative", dtype="bfloat16", device="cpu", threads=2,
        fast_paths=("packed weights",), batch=1, prompt_set="heldout", prompts=2, runs=1,
        sampling={"temperature": 0.0, "max_tokens": 5, "seed": 7}, must_agree=True, costs_kept=False, bandwidth=4e10,
        weight_bytes=10**9, machine={"cpu": "a CPU", "cores": 2, "torch": "2"},
    )  # fmt: skip
