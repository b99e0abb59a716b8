"""A recurrent head, as the training sees it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from truedraft.heads import HeadRecord, RedrafterHead
from truedraft.models.loading import load_model
from truedraft.planning import replay_beams
from truedraft.training.feeding import SelfFeed, TextFeed
from truedraft.training.head_job import TRAIN_TEXT
from truedraft.training.head_kind import LoadedHeads, Trained
from truedraft.training.head_loop import Course
from truedraft.training.held_out import HeldOutAccuracy
from truedraft.training.kept_laws import keep_laws
from truedraft.training.lessons import ComputedLaws, StoredLaws, Teacher, goal_of
from truedraft.training.redrafter_config import RedrafterTrainingConfig
from truedraft.training.redrafter_results import TrainedRedrafter
from truedraft.training.redrafter_served import measure_redrafter
from truedraft.training.redrafter_trainee import RedrafterTrainee

if TYPE_CHECKING:
    from truedraft.models.lm_head import LmHead
    from truedraft.training.head_job import HeadJob
    from truedraft.training.self_text import SelfText


@dataclass(frozen=True)
class RedrafterKind:
    """See `HeadKind`.

    Attributes:
        config: what decides the head.
    """

    config: RedrafterTrainingConfig

    def new(self, lm_head: LmHead) -> RedrafterTrainee:
        """A head that starts as the target's LM head where it can, its recurrence drawn by the seed."""
        vocab, width = lm_head.weight.shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)
            head = RedrafterHead(self.config.sizes(width, vocab))
        head.start_from(lm_head.weight.float().cpu())
        return RedrafterTrainee(head.to(self.config.device), lm_head)

    def load(self, folder: Path) -> LoadedHeads:
        """See `HeadKind.load`."""
        found = RedrafterHead.load(folder)
        return LoadedHeads(found, found.config, found.record.target_name, found.record.fingerprint)

    def course(self, trainee: RedrafterTrainee, text: SelfText, job: HeadJob[Any], folder: Path) -> Course:
        """Teacher-forced or self-fed, towards laws that are computed or stored."""
        config, lm_head = self.config, trainee.lm_head
        teacher: Teacher = ComputedLaws(lm_head, goal_of(config.divergence))
        if config.laws == "stored":
            laws = keep_laws(text, lm_head, folder, TRAIN_TEXT, on_progress=job.following("storing laws"))
            teacher = StoredLaws(laws, config.divergence)
        feed = SelfFeed(trainee, config.self_fed, config.seed) if config.self_fed else TextFeed(trainee.reach)
        return Course(trainee, feed, teacher)

    def judge(self, trainee: RedrafterTrainee, trained: Trained) -> TrainedRedrafter:
        """Save a trained head, and measure it in the engine."""
        job, facts = trained.job, trained.effort.as_dict()
        trainee.module.save(trained.out, HeadRecord(trained.target, trained.fingerprint, facts=facts))
        accuracy = HeldOutAccuracy.on(trainee, trained.held_out, len(trained.held_out.tokens))()
        model = load_model(trained.target, device=self.config.device)
        head = RedrafterHead.load(trained.out)
        replayed = replay_beams(model, head, trained.held_out, on_progress=job.following("replaying beams"))
        served = measure_redrafter(
            model, head, replayed, job.prompts.test, on_progress=job.following("measuring"), within_s=job.within_s
        )
        found = TrainedRedrafter(accuracy, replayed, served, job.prompts.promised_on)
        record = HeadRecord(trained.target, trained.fingerprint, facts=facts | found.as_dict())
        trainee.module.save(trained.out, record)
        return found
