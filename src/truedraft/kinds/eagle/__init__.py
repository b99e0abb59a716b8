"""EAGLE-3 (Li et al., arXiv 2503.01840), and P-EAGLE (arXiv 2602.01469), which drafts in one forward."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from truedraft.drafters.kinds import OF_LEVELS, Kind

_kind = partial(Kind.of_heads, __name__, widest={"num_speculative_tokens": "8"})

KINDS: Mapping[str, Kind] = {
    "eagle": _kind(
        *("eagle", "Eagle3", "Eagle3Head", "Eagle3TrainingConfig"),
        OF_LEVELS | {"num_speculative_tokens": "5"},
        "an EAGLE-3 head on vectors of several of the target's layers: a chain of so many tokens, a tree with so many "
        "at each node, cut below those that it gives less than min_probability, or for greedy requests the likeliest "
        "tree of so many nodes, of which beams are open at each level",
    ),
    "p-eagle": _kind(
        *("p-eagle", "PEagle", "PEagleHead", "PEagleTrainingConfig"),
        OF_LEVELS | {"num_speculative_tokens": "8"},
        "a P-EAGLE head, which guesses all tokens in one forward, without DIR the one trained for the target; options "
        "are those of eagle",
    ),
}
