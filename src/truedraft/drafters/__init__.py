"""Drafters: they guess the next tokens; the target decides."""

from truedraft.drafters.base import Drafter, DraftRequest, StepOutcome
from truedraft.drafters.draft_model import DraftModel
from truedraft.drafters.medusa import Medusa
from truedraft.drafters.none import NoDrafter
from truedraft.drafters.prompt_lookup import PromptLookup
from truedraft.drafters.redrafter import Redrafter
from truedraft.drafters.specs import from_spec

__all__ = [
    "DraftModel",
    "DraftRequest",
    "Drafter",
    "Medusa",
    "NoDrafter",
    "PromptLookup",
    "Redrafter",
    "StepOutcome",
    "from_spec",
]
