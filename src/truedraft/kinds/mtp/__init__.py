"""Multi-token prediction (MTP): layers in a target's checkpoint that predict further tokens."""

from __future__ import annotations

from collections.abc import Mapping

from truedraft.drafters.kinds import OF_LEVELS, Kind

KINDS: Mapping[str, Kind] = {
    "mtp": Kind(
        "truedraft.kinds.mtp.drafter:Mtp",
        "DIR",
        OF_LEVELS | {"num_speculative_tokens": "3"},
        "the layer in the target's checkpoint that predicts a token further, or one of speculators in DIR; "
        "its output is fed back for further tokens, and options are those of eagle",
        widest={"num_speculative_tokens": "6"},
        head="truedraft.kinds.mtp.module:MtpHead",
        exports="truedraft.kinds.mtp.module:EXPORTS",
        published="truedraft.kinds.mtp.module:kind_in",
    ),
}
