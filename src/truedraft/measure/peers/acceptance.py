"""Acceptance of a running server's drafts, from its metrics: ours, vLLM's and SGLang's."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from truedraft.errors import PeerError
from truedraft.measure.peers.calling import Caller

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? +(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SIGMAS = 1.96


@dataclass(frozen=True)
class ServedAcceptance:
    """Acceptance of all drafts since the server was started; `reported` is the server's own tokens per target call."""

    drafts: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    by_position: tuple[float, ...] = ()
    by_drafter: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    reported: float | None = None

    @property
    def tokens_per_call(self) -> tuple[float, float, float]:
        """Mean tokens of a call with a draft, and its 95 % confidence interval.

        With s_k the share of drafts with k or more accepted tokens, E[a] = sum s_k and E[a^2] = sum (2k - 1) s_k, for
        independent drafts.
        """
        if not self.drafts:
            return (self.reported or math.nan,) * 3
        mean = self.accepted / self.drafts
        shares = [each / self.drafts for each in self.by_position]
        second = sum((2 * place + 1) * share for place, share in enumerate(shares)) if shares else mean * (1 + 2 * mean)
        error = _SIGMAS * math.sqrt(max(second - mean**2, 0.0) / self.drafts)
        return 1.0 + mean, 1.0 + mean - error, 1.0 + mean + error


def served_acceptance(caller: Caller) -> ServedAcceptance:
    """Read the metrics of a server.

    Raises:
        PeerError: it has none, or they count no drafts.
    """
    sums, positions = defaultdict[str, float](float), defaultdict[int, float](float)
    drafters: dict[str, list[float]] = {}
    text = caller.text("/metrics")
    twice = "truedraft:spec_decode" in text  # whose counters also have vLLM's prefix
    for name, labels, value in _samples(text):
        prefix, _, kind = name.removesuffix("_total").partition(":")
        if twice and prefix == "vllm":
            continue
        if kind == "spec_decode_num_accepted_tokens_per_pos" and labels.get("position", "").isdecimal():
            positions[int(labels["position"])] += value
        elif kind in ("drafter_draft_tokens", "drafter_accepted_tokens"):
            drafters.setdefault(labels.get("drafter", ""), [0.0, 0.0])[kind == "drafter_accepted_tokens"] += value
        else:
            sums[kind] = value if kind == "spec_accept_length" else sums[kind] + value
    drafts, reported = sums.get("spec_decode_num_drafts", 0.0), sums.get("spec_accept_length")
    if not drafts and not reported:
        raise PeerError(
            f"the metrics of {caller.url} count no drafts; let it answer something with a drafter first, and see that "
            "its metrics are on"
        )
    return ServedAcceptance(
        drafts,
        sums.get("spec_decode_num_draft_tokens", 0.0),
        sums.get("spec_decode_num_accepted_tokens", 0.0),
        tuple(count for _, count in sorted(positions.items())),
        {name: (drafted, accepted) for name, (drafted, accepted) in drafters.items()},
        reported,
    )


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for name, labels, value in _LINE.findall(text):
        try:
            yield name, dict(_LABEL.findall(labels)), float(value)
        except ValueError:
            continue
