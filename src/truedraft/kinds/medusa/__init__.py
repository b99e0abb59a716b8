"""Medusa (Cai et al., arXiv 2401.10774): heads on the target's last hidden state, one per token further ahead."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.drafters.kinds import Kind, folder_of
from truedraft.errors import OptionError

if TYPE_CHECKING:
    from truedraft.core.rank_tree import RankTree
    from truedraft.models.base import LanguageModel


def medusa(
    path: str | None,
    target: LanguageModel,
    nodes: int | None = None,
    branching: Sequence[int] | None = None,
    tree: str | None = None,
) -> Any:
    """Medusa heads at a path: trees chosen at each step, or one fixed tree."""
    from truedraft.core.rank_tree import RankTree
    from truedraft.drafters.heads.calibration import GREEDY, SAMPLED
    from truedraft.kinds.medusa.drafter import Medusa
    from truedraft.kinds.medusa.guess_trees import fixed_trees
    from truedraft.kinds.medusa.module import MedusaHeads

    if branching is not None and tree is not None:
        raise OptionError("drafter 'medusa' takes branching or tree, not both")
    heads = MedusaHeads.load(folder_of("medusa", path, target))
    if branching is None and tree is None:
        return Medusa(heads, nodes=nodes)
    if tree == "counted":
        return Medusa(heads, fixed_trees(heads.record.trees), nodes=nodes)
    ranks = RankTree.cartesian(branching or ()) if tree is None else _listed(tree)
    trees = fixed_trees({GREEDY: ranks, SAMPLED: ranks})
    return Medusa(heads, trees, nodes=len(ranks) if nodes is None else nodes)


def _listed(file: str) -> RankTree:
    from truedraft.core.rank_tree import RankTree

    try:
        paths = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: an unknown home folder, or recursive lists
        raise OptionError(f"cannot read the tree {file!r} ({error}); give a JSON list of rank paths") from error
    whole = isinstance(paths, list) and all(
        isinstance(path, list) and all(type(rank) is int for rank in path) for path in paths
    )
    if not whole or not paths:
        raise OptionError(f"the tree {file!r} is no list of rank paths; write for example [[0], [0, 0], [1]]")
    return RankTree.listed(paths)


KINDS: Mapping[str, Kind] = {
    "medusa": Kind(
        "truedraft.kinds.medusa:medusa",
        "DIR",
        {"nodes": "16", "branching": "4-3-2", "tree": "counted|FILE"},
        "heads on the target's last vector, without DIR those trained for the target: at each "
        "step a tree of as many nodes as pay here, or as you say; or the same tree at all steps, of so many ranks at "
        "each depth, the one that was counted in training, or a JSON list of rank paths as [[0], [0, 0], [1]]",
        widest={"nodes": "48"},
        head="truedraft.kinds.medusa.module:MedusaHeads",
        trains="truedraft.kinds.medusa.options:TRAINS",
        training="truedraft.kinds.medusa.training:MedusaTrainingConfig",
        exports="truedraft.kinds.medusa.exporting:EXPORTS",
        variants="truedraft.kinds.medusa.variants:EXAMINED",
        published="truedraft.kinds.medusa.folders:kind_in",
    ),
}
