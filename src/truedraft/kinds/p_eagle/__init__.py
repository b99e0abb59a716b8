"""P-EAGLE: EAGLE-3's head, which guesses all tokens of a draft in one forward."""

from __future__ import annotations

from collections.abc import Mapping

from truedraft.drafters.kinds import OF_LEVELS, Kind, head_of

load_head = head_of("p-eagle")

KINDS: Mapping[str, Kind] = {
    "p-eagle": Kind(
        "truedraft.kinds.p_eagle.drafter:PEagle",
        "DIR",
        OF_LEVELS | {"num_speculative_tokens": "8"},
        "a P-EAGLE head, which guesses all tokens in one forward, without DIR the one trained for the target; options "
        "are those of eagle",
        widest={"num_speculative_tokens": "8"},
        parts={"head": "truedraft.kinds.p_eagle:load_head"},
        head="truedraft.kinds.p_eagle.module:PEagleHead",
        trains="truedraft.kinds.p_eagle.options:TRAINS",
        training="truedraft.kinds.p_eagle.training:PEagleTrainingConfig",
        exports="truedraft.kinds.eagle.exporting:P_EAGLE",
        variants="truedraft.kinds.p_eagle.variants:EXAMINED",
        published="truedraft.kinds.eagle.folders:kind_in",
    ),
}
