"""Sequences continued by a student, for its target to judge: GKD (2306.13649), DistillSpec (2310.08461)."""

from __future__ import annotations

import copy
import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from truedraft.core.params import SamplingParams
from truedraft.engine import Engine
from truedraft.errors import TrainingError
from truedraft.models.huggingface import HuggingFaceModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class OwnText:
    """Lets a student write the second half of a share of the sequences, at temperature 1.

    The choice of sequences and the samples are functions of the seed, the sequence and the weights, so a training that
    resumes, or runs in several processes, has the same text. No gradient passes through the samples.

    Args:
        student: in training; the writer shares its weights.
        share: in [0, 1], the probability of each sequence.
    """

    def __init__(self, student: PreTrainedModel, share: float, seed: int) -> None:
        shared = {id(each): nn.Parameter(each.detach(), requires_grad=False) for each in student.parameters()}
        self._writer = HuggingFaceModel(copy.deepcopy(student, shared), None, "the student")
        self._share, self._seed = share, seed

    @torch.no_grad()
    def __call__(self, batch: Tensor) -> Tensor:
        """The sequences `[sequences, length + 1]`; the last token is never read, and stays.

        Raises:
            TrainingError: the student failed.
        """
        length = batch.shape[1] - 1
        kept = (length + 1) // 2
        keys = {place: zlib.crc32(str(row).encode()) for place, row in enumerate(batch.tolist())}
        chosen = [place for place, key in keys.items() if self._random(key) < self._share]
        if not chosen or kept == length:
            return batch
        engine, batch = Engine(self._writer, controller="fixed", max_batch=len(chosen)), batch.clone()
        params = [
            SamplingParams(max_tokens=length - kept, temperature=1.0, seed=keys[place], ignore_eos=True)
            for place in chosen
        ]
        with torch.autocast(batch.device.type, enabled=False):
            answers = engine.generate(batch[chosen, :kept].tolist(), params)
        if failed := [each.error for each in answers if each.error is not None]:
            raise TrainingError(f"the draft could not write text to learn from: {failed[0]}")
        batch[chosen, kept:length] = torch.tensor([each.token_ids for each in answers], device=batch.device)
        return batch

    def _random(self, key: int) -> float:
        return float(np.random.default_rng((self._seed, key)).random())
