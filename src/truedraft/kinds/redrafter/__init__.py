"""ReDrafter (Zhang et al., arXiv 2403.09919): one recurrent head, with beams that are merged into a tree."""

from __future__ import annotations

from collections.abc import Mapping

from truedraft.drafters.kinds import Kind

KINDS: Mapping[str, Kind] = {
    "redrafter": Kind.of_heads(
        *(__name__, "redrafter", "Redrafter", "RedrafterHead", "RedrafterTrainingConfig"),
        {"beams": "8", "length": "4", "nodes": "16", "sampled": "true"},
        "one recurrent head on that vector, without DIR the one trained for the target: beams, "
        "merged and cut to the likeliest nodes, in sizes that pay here, or as you say; from temperature 0.8 on they "
        "are drawn, at every one with sampled=true and at none with sampled=false",
        widest={"beams": "4", "nodes": "16"},
    ),
}
