"""Medusa (Cai et al., arXiv 2401.10774): heads on the target's last hidden state, one per token further ahead."""

from __future__ import annotations

from collections.abc import Mapping

from truedraft.drafters.kinds import Kind

KINDS: Mapping[str, Kind] = {
    "medusa": Kind.of_heads(
        *(__name__, "medusa", "medusa", "MedusaHeads", "MedusaTrainingConfig"),
        {"nodes": "16", "branching": "4-3-2", "tree": "counted|FILE"},
        "heads on the target's last vector, without DIR those trained for the target: at each "
        "step a tree of as many nodes as pay here, or as you say; or the same tree at all steps, of so many ranks at "
        "each depth, the one that was counted in training, or a JSON list of rank paths as [[0], [0, 0], [1]]",
        widest={"nodes": "48"},
    ),
}
