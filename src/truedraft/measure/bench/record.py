"""The JSON object of a benchmark: its systems, the machine, and the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from truedraft.core.stats import Counters
from truedraft.measure.bench.answers import VocabularyCost
from truedraft.measure.bench.runs import Results
from truedraft.measure.bench.suite import PLAIN
from truedraft.measure.bench.summary import Ratio, Spread, Summary
from truedraft.measure.bench.trees import DraftedTree
from truedraft.options import record_of

_SUMMARY = (
    "name", "ours", "groups", "tokens", "target_calls", "mean_acceptance_length", "acceptance_per_position", "counters",
    "predicted_speedup", "measured_over_predicted", "shares", "mbu", "cpu_s_per_1000_tokens", "empty_answers",
    "unsettled_s",
)  # fmt: skip
_OF_A_ROW = (
    "model", "pad_to", "weights", "note", "rule", "controller", "lossless", "dtype", "device", "threads", "batch",
)  # fmt: skip
_DIVERGENCES = ("mean_total_variation", "mean_kl", "mean_total_variation_greedy", "mean_kl_greedy")
"""Distances of the distributions of emitted tokens from the target's, by `Counters`; None after a lossless rule."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The conditions of a benchmark, with names as typed; its reports repeat them.

    Attributes:
        note: the meaning of a padded target's figures; None for an unpadded target.
        fast_paths: enabled in the target in addition to the plain forward.
        runs: answers of each system to each group.
        must_agree: whether our engines must give the tokens of plain decoding.
        costs_kept: whether a cost curve is from an earlier run, and so from another state of the machine.
    """

    model: str
    note: str | None
    pad_to: str | None
    weights: str | None
    drafters: tuple[str, ...]
    peers: tuple[str, ...]
    rule: str
    dtype: str
    device: str
    threads: int
    fast_paths: tuple[str, ...]
    batch: int
    prompt_set: str
    prompts: int
    runs: int
    sampling: Mapping[str, Any]
    must_agree: bool
    costs_kept: bool
    bandwidth: float | None
    weight_bytes: int | None
    machine: Mapping[str, Any]
    lossless: bool = True
    controller: str = "goodput"

    @property
    def peers_agree(self) -> bool:
        return (self.must_agree or not self.lossless) and not self.sampling.get("temperature", 0.0)

    @property
    def compares_tokens(self) -> bool:
        """Whether identity of our tokens is guaranteed, or only a lossy rule can break it."""
        return self.must_agree or self.peers_agree

    def line(self) -> str:
        where = self.device if self.device != "cpu" else f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        temperature = self.sampling.get("temperature", 0.0)
        how, seed = f"temperature {temperature:g}" if temperature else "greedy", self.sampling.get("seed")
        how += f", seed {seed}" if temperature and seed is not None else ""
        runs = f"{self.runs} run{'s' if self.runs > 1 else ''} each"
        model = self.model if self.pad_to is None else f"{self.model} padded to {self.pad_to}"
        model += "" if self.weights is None else f" with {self.weights} weights"
        prompts = f"{self.prompts} prompt{'s' if self.prompts > 1 else ''} of {self.prompt_set}"
        rule = "" if self.lossless else f"lossy rule {self.rule}"
        controller = f"controller {self.controller}" if self.drafters else ""
        most = f"at most {self.sampling.get('max_tokens')} tokens"
        parts = [self.dtype, where, f"batch {self.batch}", how, rule, controller, prompts, most, runs]
        head = f"{model}, " if self.note is None else f"{model}: {self.note}; "
        return head + ", ".join(filter(None, parts))

    def of_a_row(self) -> dict[str, Any]:
        return record_of(self, *_OF_A_ROW)


def bench_record(
    summaries: Sequence[Summary],
    circumstances: Circumstances,
    costs: Sequence[Mapping[str, float]],
    results: Results,
    differences: Sequence[str] = (),
    trees: Sequence[DraftedTree] = (),
    vocabularies: Sequence[VocabularyCost] = (),
) -> dict[str, Any]:
    """The record; `tokens_per_s` and `speedup` at the top are those of the first drafter that finished a row."""
    ours = [each for each in summaries if each.ours]
    speculative = [each for each in ours if each.name != PLAIN]
    first = next(iter(speculative or ours), None)
    return {
        "command": "bench",
        "tokens_per_s": None if first is None else first.tokens_per_s.median,
        "speedup": None if first is None or first.speedup is None else first.speedup.mean,
        "identical": _identical(ours, circumstances),
        "differences": list(differences),
        "interrupted": results.interrupted,
        "failures": [failure.describe() for failure in results.failures],
        "systems": [_summary_record(each, circumstances) for each in summaries],
        "costs": [dict(point) for point in costs],
        "trees": [tree.as_dict() for tree in trees],
        "vocabularies": [record_of(each) for each in vocabularies],
        **record_of(circumstances),
    }


def _identical(ours: Sequence[Summary], circumstances: Circumstances) -> bool | None:
    verdicts = [_all_identical(each) for each in ours if each.compared_groups and circumstances.must_agree]
    return all(verdicts) if verdicts else None


def _all_identical(summary: Summary) -> bool | None:
    return summary.identical_groups == summary.compared_groups if summary.compared_groups else None


def _summary_record(summary: Summary, circumstances: Circumstances) -> dict[str, Any]:
    must_agree = circumstances.must_agree if summary.ours else circumstances.peers_agree
    reported = must_agree or (summary.ours and circumstances.compares_tokens)
    return {
        **record_of(summary, *_SUMMARY),
        "note": circumstances.note,
        **_spread("tokens_per_s", summary.tokens_per_s),
        **_spread("decode_tokens_per_s", summary.decode_tokens_per_s),
        **_spread("first_token_s", summary.first_token_s),
        "draft_acceptance_rate": None if summary.counters is None else summary.counters.draft_acceptance_rate,
        "speedup": None if summary.speedup is None else summary.speedup.mean,
        "speedup_spread": _ratio(summary.speedup),
        "decode_speedup": None if summary.decode_speedup is None else summary.decode_speedup.mean,
        "identical": _all_identical(summary) if must_agree else None,
        "identical_groups": summary.identical_groups if reported else None,
        "compared_groups": summary.compared_groups if reported else None,
        "lossless": not summary.lossy if summary.ours else None,
        "unsettled_steps": summary.unsettled,
        "decisions": None if summary.decisions is None else summary.decisions.as_dict(),
        **{name: getattr(summary.counters or Counters(), name) for name in _DIVERGENCES},
    }


def _spread(name: str, spread: Spread | None) -> dict[str, Any]:
    if spread is None:
        return {name: None, f"{name}_quartiles": None}
    return {name: spread.median, f"{name}_quartiles": [spread.low, spread.high]}


def _ratio(ratio: Ratio | None) -> dict[str, float] | None:
    if ratio is None:
        return None
    return {"min": ratio.low, "max": ratio.high, "share_faster": ratio.share_faster}
