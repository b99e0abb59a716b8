"""Drafters: they guess the next tokens; the target decides. Also what one written by hand is made of."""

from truedraft.core.budget import Budget
from truedraft.core.laws import draw
from truedraft.core.noise import Noise, Purpose
from truedraft.core.proposals import Draw, DrawKind, Proposal
from truedraft.core.trees import TokenTree
from truedraft.drafters.base import Drafter, DraftRequest, StepOutcome
from truedraft.drafters.draft_model import DraftModel
from truedraft.drafters.medusa import Medusa
from truedraft.drafters.none import NoDrafter
from truedraft.drafters.prompt_lookup import PromptLookup
from truedraft.drafters.redrafter import Redrafter
from truedraft.drafters.specs import from_spec

__all__ = [
    "Budget",
    "DraftModel",
    "DraftRequest",
    "Drafter",
    "Draw",
    "DrawKind",
    "Medusa",
    "NoDrafter",
    "Noise",
    "PromptLookup",
    "Proposal",
    "Purpose",
    "Redrafter",
    "StepOutcome",
    "TokenTree",
    "draw",
    "from_spec",
]
