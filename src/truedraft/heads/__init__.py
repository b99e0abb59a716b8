"""Modules that read the vector which enters the target's LM head, used by drafting and by training alike."""

from truedraft.heads.checkpoint import MedusaCheckpoint, load_medusa, save_medusa
from truedraft.heads.medusa import MedusaConfig, MedusaHeads

__all__ = ["MedusaCheckpoint", "MedusaConfig", "MedusaHeads", "load_medusa", "save_medusa"]
