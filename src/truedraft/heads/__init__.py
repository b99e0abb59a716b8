"""Modules that read vectors of the target, used by drafting and by training alike."""

from truedraft.heads.base import Head, HeadRecord, VectorHead
from truedraft.heads.block import BlockConfig, BlockHead, DFlashHead, DSparkHead
from truedraft.heads.eagle import Eagle3Config, Eagle3Head
from truedraft.heads.medusa import MedusaConfig, MedusaHeads, MedusaRunner
from truedraft.heads.published import published_tree
from truedraft.heads.redrafter import RedrafterConfig, RedrafterHead, RedrafterRunner

__all__ = [
    "BlockConfig",
    "BlockHead",
    "DFlashHead",
    "DSparkHead",
    "Eagle3Config",
    "Eagle3Head",
    "Head",
    "HeadRecord",
    "MedusaConfig",
    "MedusaHeads",
    "MedusaRunner",
    "RedrafterConfig",
    "RedrafterHead",
    "RedrafterRunner",
    "VectorHead",
    "published_tree",
]
