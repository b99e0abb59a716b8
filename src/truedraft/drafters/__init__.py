"""Drafters guess the next tokens; the target decides. Names load on first use, to keep parsing light."""

from __future__ import annotations

from typing import TYPE_CHECKING

from truedraft.lazy import loads

if TYPE_CHECKING:
    from truedraft.core.budget import Budget as Budget
    from truedraft.core.noise import Noise as Noise
    from truedraft.core.noise import Purpose as Purpose
    from truedraft.core.probs import draw as draw
    from truedraft.core.proposal import Draw as Draw
    from truedraft.core.proposal import DrawKind as DrawKind
    from truedraft.core.proposal import Proposal as Proposal
    from truedraft.core.tree import TokenTree as TokenTree
    from truedraft.drafters.base import CutShortError as CutShortError
    from truedraft.drafters.base import Drafter as Drafter
    from truedraft.drafters.base import DraftRequest as DraftRequest
    from truedraft.drafters.base import Features as Features
    from truedraft.drafters.base import NoDrafter as NoDrafter
    from truedraft.drafters.base import StepOutcome as StepOutcome
    from truedraft.drafters.cascade import Cascade as Cascade
    from truedraft.drafters.draft_model import DraftModel as DraftModel
    from truedraft.drafters.lookahead import Lookahead as Lookahead
    from truedraft.drafters.ngram import NgramDrafter as NgramDrafter
    from truedraft.drafters.parallel import ParallelDraft as ParallelDraft
    from truedraft.drafters.portfolio import Portfolio as Portfolio
    from truedraft.drafters.prompt_lookup import PromptLookup as PromptLookup
    from truedraft.drafters.reencoded import ReencodedDraft as ReencodedDraft
    from truedraft.drafters.registry import find_drafters as find_drafters
    from truedraft.drafters.self_draft import SelfDraft as SelfDraft
    from truedraft.drafters.specs import from_spec as from_spec
    from truedraft.drafters.suffix import SuffixDrafter as SuffixDrafter
    from truedraft.kinds.block.drafter import DFlash as DFlash
    from truedraft.kinds.block.drafter import DSpark as DSpark
    from truedraft.kinds.eagle.drafter import Eagle3 as Eagle3
    from truedraft.kinds.eagle.drafter import PEagle as PEagle
    from truedraft.kinds.medusa.drafter import Medusa as Medusa
    from truedraft.kinds.mtp.drafter import Mtp as Mtp
    from truedraft.kinds.redrafter.drafter import Redrafter as Redrafter

_MODULES = {
    "truedraft.core.budget": ("Budget",),
    "truedraft.core.noise": ("Noise", "Purpose"),
    "truedraft.core.probs": ("draw",),
    "truedraft.core.proposal": ("Draw", "DrawKind", "Proposal"),
    "truedraft.core.tree": ("TokenTree",),
    "truedraft.drafters.base": ("CutShortError", "Drafter", "DraftRequest", "Features", "NoDrafter", "StepOutcome"),
    "truedraft.drafters.cascade": ("Cascade",),
    "truedraft.drafters.draft_model": ("DraftModel",),
    "truedraft.kinds.block.drafter": ("DFlash", "DSpark"),
    "truedraft.kinds.eagle.drafter": ("Eagle3", "PEagle"),
    "truedraft.kinds.medusa.drafter": ("Medusa",),
    "truedraft.kinds.mtp.drafter": ("Mtp",),
    "truedraft.kinds.redrafter.drafter": ("Redrafter",),
    "truedraft.drafters.lookahead": ("Lookahead",),
    "truedraft.drafters.ngram": ("NgramDrafter",),
    "truedraft.drafters.parallel": ("ParallelDraft",),
    "truedraft.drafters.portfolio": ("Portfolio",),
    "truedraft.drafters.prompt_lookup": ("PromptLookup",),
    "truedraft.drafters.reencoded": ("ReencodedDraft",),
    "truedraft.drafters.registry": ("find_drafters",),
    "truedraft.drafters.self_draft": ("SelfDraft",),
    "truedraft.drafters.specs": ("from_spec",),
    "truedraft.drafters.suffix": ("SuffixDrafter",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = list(_HOMES)
__getattr__ = loads(__name__, _HOMES)
