"""Modules that read the vector which enters the target's LM head, used by drafting and by training alike."""

from truedraft.heads.base import Head, HeadRecord
from truedraft.heads.medusa import MedusaConfig, MedusaHeads, MedusaRunner
from truedraft.heads.published import published_tree
from truedraft.heads.redrafter import RedrafterConfig, RedrafterHead, RedrafterRunner

__all__ = [
    "Head",
    "HeadRecord",
    "MedusaConfig",
    "MedusaHeads",
    "MedusaRunner",
    "RedrafterConfig",
    "RedrafterHead",
    "RedrafterRunner",
    "published_tree",
]
