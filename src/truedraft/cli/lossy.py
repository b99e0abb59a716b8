"""How lossy rules are marked, and how far their answers are from the target's law, in words."""

from __future__ import annotations

from truedraft.core.counters import Counters
from truedraft.core.sampling import SamplingParams
from truedraft.errors import OptionError


def check_rule(spec: str, params: SamplingParams) -> None:
    """Refuse a promise that the rule cannot keep, before anything is loaded.

    Raises:
        OptionError: there is no such rule; or coupled tokens, which are the target's own, with a lossy one.
    """
    from truedraft.verification.specs import rule_from_spec

    if not rule_from_spec(spec).lossless and params.coupled:
        raise OptionError(
            f"--coupled promises the target's own tokens and --rule {spec} is lossy; leave one of them out"
        )


def divergence_words(stats: Counters) -> str:
    """How far the laws of the emitted tokens were from the target's, beside greedy decoding; "" where they were not."""
    means = stats.mean_total_variation, stats.mean_kl, stats.mean_total_variation_greedy, stats.mean_kl_greedy
    distance, kl, greedy_distance, greedy_kl = means
    if distance is None or kl is None or greedy_distance is None or greedy_kl is None:
        return ""
    return (
        f"total variation {distance:.3f}, KL {kl:.3f} nats a token "
        f"(greedy decoding there: {greedy_distance:.3f}, {greedy_kl:.3f})"
    )
