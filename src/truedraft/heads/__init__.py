"""Modules that read the vector which enters the target's LM head, used by drafting and by training alike."""

from truedraft.heads.checkpoint import MedusaCheckpoint, load_medusa, save_medusa
from truedraft.heads.medusa import MedusaConfig, MedusaHeads
from truedraft.heads.redrafter import RedrafterConfig, RedrafterHead
from truedraft.heads.redrafter_checkpoint import RedrafterCheckpoint, load_redrafter, save_redrafter

__all__ = [
    "MedusaCheckpoint",
    "MedusaConfig",
    "MedusaHeads",
    "RedrafterCheckpoint",
    "RedrafterConfig",
    "RedrafterHead",
    "load_medusa",
    "load_redrafter",
    "save_medusa",
    "save_redrafter",
]
