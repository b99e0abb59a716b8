"""Drafters: they guess the next tokens; the target decides. Also what one written by hand is made of.

Each name loads on first use, so that the words for drafters load alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from truedraft.core.budget import Budget
    from truedraft.core.noise import Noise, Purpose
    from truedraft.core.probs import draw
    from truedraft.core.proposal import Draw, DrawKind, Proposal
    from truedraft.core.tree import TokenTree
    from truedraft.drafters.base import Drafter, DraftRequest, Features, NoDrafter, StepOutcome
    from truedraft.drafters.cascade import Cascade
    from truedraft.drafters.draft_model import DraftModel
    from truedraft.drafters.heads.medusa import Medusa
    from truedraft.drafters.heads.redrafter import Redrafter
    from truedraft.drafters.lookahead import Lookahead
    from truedraft.drafters.ngram import NgramDrafter
    from truedraft.drafters.parallel import ParallelDraft
    from truedraft.drafters.portfolio import Portfolio
    from truedraft.drafters.prompt_lookup import PromptLookup
    from truedraft.drafters.reencoded import ReencodedDraft
    from truedraft.drafters.registry import find_drafters
    from truedraft.drafters.self_draft import SelfDraft
    from truedraft.drafters.specs import from_spec
    from truedraft.drafters.suffix import SuffixDrafter

_HOMES = {
    "Budget": "core.budget",
    "Cascade": "drafters.cascade",
    "DraftModel": "drafters.draft_model",
    "DraftRequest": "drafters.base",
    "Drafter": "drafters.base",
    "Draw": "core.proposal",
    "DrawKind": "core.proposal",
    "Features": "drafters.base",
    "Lookahead": "drafters.lookahead",
    "Medusa": "drafters.heads.medusa",
    "NgramDrafter": "drafters.ngram",
    "NoDrafter": "drafters.base",
    "Noise": "core.noise",
    "ParallelDraft": "drafters.parallel",
    "Portfolio": "drafters.portfolio",
    "PromptLookup": "drafters.prompt_lookup",
    "Proposal": "core.proposal",
    "Purpose": "core.noise",
    "Redrafter": "drafters.heads.redrafter",
    "ReencodedDraft": "drafters.reencoded",
    "SelfDraft": "drafters.self_draft",
    "StepOutcome": "drafters.base",
    "SuffixDrafter": "drafters.suffix",
    "TokenTree": "core.tree",
    "draw": "core.probs",
    "find_drafters": "drafters.registry",
    "from_spec": "drafters.specs",
}

__all__ = [
    "Budget",
    "Cascade",
    "DraftModel",
    "DraftRequest",
    "Drafter",
    "Draw",
    "DrawKind",
    "Features",
    "Lookahead",
    "Medusa",
    "NgramDrafter",
    "NoDrafter",
    "Noise",
    "ParallelDraft",
    "Portfolio",
    "PromptLookup",
    "Proposal",
    "Purpose",
    "Redrafter",
    "ReencodedDraft",
    "SelfDraft",
    "StepOutcome",
    "SuffixDrafter",
    "TokenTree",
    "draw",
    "find_drafters",
    "from_spec",
]


def __getattr__(name: str) -> object:
    """Load a public name from its home on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'truedraft.drafters' has no attribute {name!r}")
    return getattr(importlib.import_module(f"truedraft.{_HOMES[name]}"), name)
