"""EAGLE-3 (Li et al., arXiv 2503.01840): a decoder layer on several of the target's layers."""

from __future__ import annotations

from collections.abc import Mapping

from truedraft.drafters.kinds import OF_LEVELS, Kind, head_of

load_head = head_of("eagle")

KINDS: Mapping[str, Kind] = {
    "eagle": Kind(
        "truedraft.kinds.eagle.drafter:Eagle3",
        "DIR",
        OF_LEVELS | {"num_speculative_tokens": "5"},
        "an EAGLE-3 head on vectors of several of the target's layers: a chain of so many tokens, a tree with so many "
        "at each node, cut below those that it gives less than min_probability, or for greedy requests the likeliest "
        "tree of so many nodes, of which beams are open at each level",
        widest={"num_speculative_tokens": "8"},
        parts={"head": "truedraft.kinds.eagle:load_head"},
        head="truedraft.kinds.eagle.module:Eagle3Head",
        trains="truedraft.kinds.eagle.options:TRAINS",
        training="truedraft.kinds.eagle.training:Eagle3TrainingConfig",
        exports="truedraft.kinds.eagle.exporting:EXPORTS",
        variants="truedraft.kinds.eagle.variants:EXAMINED",
        published="truedraft.kinds.eagle.folders:kind_in",
    ),
}
