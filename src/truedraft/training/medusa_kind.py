"""Medusa heads, as the training sees them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.heads import HeadRecord, MedusaConfig, MedusaHeads
from truedraft.models.loading import load_model
from truedraft.planning import count_trees
from truedraft.training.feeding import TextFeed
from truedraft.training.head_kind import LoadedHeads, Trained
from truedraft.training.head_loop import Course
from truedraft.training.lessons import ComputedLaws
from truedraft.training.medusa_config import MedusaTrainingConfig
from truedraft.training.medusa_results import TrainedHeads
from truedraft.training.medusa_trainee import MedusaTrainee
from truedraft.training.served import measure_served

if TYPE_CHECKING:
    from truedraft.models.lm_head import LmHead
    from truedraft.training.head_job import HeadJob
    from truedraft.training.self_text import SelfText


@dataclass(frozen=True)
class MedusaKind:
    """See `HeadKind`.

    Attributes:
        config: what decides the heads.
    """

    config: MedusaTrainingConfig

    def new(self, lm_head: LmHead) -> MedusaTrainee:
        """Heads that all start as the target's LM head."""
        config, (vocab, width) = self.config, lm_head.weight.shape
        heads = MedusaHeads(MedusaConfig(width, vocab, config.heads, config.layers, config.tied, config.reads_token))
        heads.start_from(lm_head.weight.float().cpu())
        return MedusaTrainee(heads.to(config.device), lm_head)

    def load(self, folder: Path) -> LoadedHeads:
        """See `HeadKind.load`."""
        found = MedusaHeads.load(folder)
        return LoadedHeads(found, found.config, found.record.target_name, found.record.fingerprint)

    def course(self, trainee: MedusaTrainee, text: SelfText, job: HeadJob[Any], folder: Path) -> Course:
        """Teacher-forced, towards the target's tokens and laws."""
        del text, job, folder
        return Course(trainee, TextFeed(trainee.reach), ComputedLaws(trainee.lm_head, self.config.goal))

    def judge(self, trainee: MedusaTrainee, trained: Trained) -> TrainedHeads:
        """Count the trees of trained heads, save both, and measure them in the engine."""
        job, heads, facts = trained.job, trainee.module, trained.effort.as_dict()
        job.on_progress("choosing trees", 0, 1, "")
        counted = count_trees(heads, trainee.lm_head, trained.held_out)
        job.on_progress("choosing trees", 1, 1, "")
        trees = {kind: each.tree for kind, each in counted.items()}
        heads.save(trained.out, HeadRecord(trained.target, trained.fingerprint, trees, facts))
        model = load_model(trained.target, device=self.config.device)
        saved = MedusaHeads.load(trained.out)
        served = measure_served(
            model, saved, counted, job.prompts.test, on_progress=job.following("measuring"), within_s=job.within_s
        )
        found = TrainedHeads(counted, served, job.prompts.promised_on)
        heads.save(trained.out, HeadRecord(trained.target, trained.fingerprint, trees, facts | found.as_dict()))
        return found
