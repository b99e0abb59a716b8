"""EAGLE-3 (Li et al., arXiv 2503.01840), and P-EAGLE (arXiv 2602.01469), which drafts in one forward."""

from __future__ import annotations

from collections.abc import Mapping

from truedraft.drafters.kinds import OF_LEVELS, Kind

_KIND_IN = "truedraft.kinds.eagle.folders:kind_in"

KINDS: Mapping[str, Kind] = {
    "eagle": Kind(
        "truedraft.kinds.eagle.drafter:Eagle3",
        "DIR",
        OF_LEVELS | {"num_speculative_tokens": "5"},
        "an EAGLE-3 head on vectors of several of the target's layers: a chain of so many tokens, a tree with so many "
        "at each node, cut below those that it gives less than min_probability, or for greedy requests the likeliest "
        "tree of so many nodes, of which beams are open at each level",
        widest={"num_speculative_tokens": "8"},
        head="truedraft.kinds.eagle.module:Eagle3Head",
        trains="truedraft.kinds.eagle.options:EAGLE",
        training="truedraft.kinds.eagle.training:Eagle3TrainingConfig",
        exports="truedraft.kinds.eagle.folders:EAGLE",
        variants="truedraft.kinds.eagle.variants:EAGLE",
        published=_KIND_IN,
    ),
    "p-eagle": Kind(
        "truedraft.kinds.eagle.drafter:PEagle",
        "DIR",
        OF_LEVELS | {"num_speculative_tokens": "8"},
        "a P-EAGLE head, which guesses all tokens in one forward, without DIR the one trained for the target; options "
        "are those of eagle",
        widest={"num_speculative_tokens": "8"},
        head="truedraft.kinds.eagle.module:PEagleHead",
        trains="truedraft.kinds.eagle.options:P_EAGLE",
        training="truedraft.kinds.eagle.training:PEagleTrainingConfig",
        exports="truedraft.kinds.eagle.folders:P_EAGLE",
        variants="truedraft.kinds.eagle.variants:P_EAGLE",
        published=_KIND_IN,
    ),
}
