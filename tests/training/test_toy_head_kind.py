"""A new kind of heads takes one file: this one trains, saves, loads and drafts with a linear head for one position."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from truedraft import Engine, SamplingParams, load_model
from truedraft.core.budget import Budget
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.tree import TokenTree, chain_shape
from truedraft.drafters.heads.base import HeadDrafter
from truedraft.drafters.heads.head import Head, HeadRecord, VectorHead
from truedraft.errors import CompositionError, ModelError
from truedraft.kinds.medusa.module import MedusaHeads
from truedraft.models.base import LanguageModel
from truedraft.training.evaluate import EngineRound
from truedraft.training.head_config import Calibrated, HeadTrainingConfig
from truedraft.training.heads import train_heads
from truedraft.training.losses import DistillationLoss, ForwardKL
from truedraft.training.texts.answer_writer import WritingConfig
from truedraft.training.texts.prompts import PromptSets

# --- the kind: sizes, a module, a drafter, and what decides its training ---


@dataclass(frozen=True)
class LinearConfig:
    width: int
    vocab_size: int


class LinearHead(VectorHead):
    """h -> W h + h guesses the token after the next, through the target's own LM head."""

    kind: ClassVar[str] = "linear"
    noun: ClassVar[str] = "a linear head"
    plural: ClassVar[str] = "linear heads"
    place_word: ClassVar[str] = "place"
    sizes: ClassVar[type[Any]] = LinearConfig
    reach: ClassVar[int] = 1
    reads_tokens: ClassVar[bool] = False

    def __init__(self, config: LinearConfig) -> None:
        super().__init__(config)
        self.linear = nn.Linear(config.width, config.width)

    @property
    def outputs(self) -> Sequence[nn.Linear | None]:
        return [None]

    def start_from(self, weight: Tensor) -> None:
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(hidden)

    def unroll(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return self(hidden)[None]


class LinearDrafter(HeadDrafter[LinearHead, LinearHead]):
    """Proposes the likeliest token of the head."""

    name: ClassVar[str] = "linear"
    limits = Budget(1, 1, 1)
    kinds = frozenset({DrawKind.DETERMINISTIC})

    def _runner_for(self, target: LanguageModel) -> LinearHead:
        return self.head.to(target.device, target.dtype)

    @torch.inference_mode()
    def propose(self, batch, budgets, noise) -> list[Proposal]:
        head, target = self._running
        found = []
        for request, budget in zip(batch, budgets, strict=True):
            vector = self._vectors.get(request.id)
            if vector is None or budget.is_zero:
                found.append(Proposal.empty())
                continue
            ids = target.unembed(head(vector[None].to(target.dtype))).argmax(dim=-1)
            found.append(Proposal.deterministic(TokenTree(ids, chain_shape(1))))
        return found


@dataclass(frozen=True)
class LinearTrainingConfig(HeadTrainingConfig):
    head: ClassVar[type[Head]] = LinearHead

    def sizes(self, width: int, vocab_size: int) -> LinearConfig:
        return LinearConfig(width, vocab_size)

    @property
    def distillation_loss(self) -> DistillationLoss:
        return ForwardKL()

    def calibrate(self, head, lm_head, target, text, on_progress) -> Calibrated:
        chain = {"num_speculative_tokens": 1}
        return Calibrated({"seen": len(text.tokens)}, [EngineRound(0.0, functools.partial(LinearDrafter, head), chain)])


# --- what it does ---

CONFIG = LinearTrainingConfig(
    tokens=400,
    writing=WritingConfig(answer_tokens=16, batch=8),
    steps=40,
    learning_rate=2e-2,
    positions_per_step=64,
    evaluate_every=20,
)


@pytest.fixture(scope="module")
def prompts(stream) -> PromptSets:
    pieces = [stream[first : first + 12].tolist() for first in range(0, 900, 30)]
    return PromptSets(pieces[:20], pieces[20:26], pieces[26:], stream[900:1000])


@pytest.fixture(scope="module")
def trained(learned_folder, prompts, tmp_path_factory):
    out = tmp_path_factory.mktemp("linear")
    return out, train_heads(learned_folder, prompts, out, CONFIG)


def test_it_is_trained_measured_and_saved(trained, learned_folder):
    out, result = trained
    kept = LinearHead.load(out)
    assert kept.record.fingerprint == load_model(learned_folder).fingerprint
    assert kept.record.facts["served"] == [each.as_dict() for each in result.report.evaluations]
    assert kept.record.facts["seen"] > 0 and result.effort.steps == 40
    assert kept.linear.weight.abs().sum() > 0 and "linear:FOLDER" in (out / "README.md").read_text()
    assert result.report.evaluations[0].stats.accepted_tokens > 10


def test_it_drafts_and_changes_no_answer(trained, learned_folder, prompts):
    target = load_model(learned_folder)
    engine = Engine(target, LinearDrafter(LinearHead.load(trained[0])), controller="fixed")
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=32, temperature=temperature, seed=3)
        answer = engine.generate(prompts.test[0], params)
        assert answer.token_ids == Engine(target).generate(prompts.test[0], params).token_ids
        assert answer.stats.draft_tokens > 0 and not answer.warnings


def test_other_kinds_and_other_targets_are_told_apart(trained, learned_folder, tmp_path: Path):
    with pytest.raises(ModelError, match="holds a linear head, not Medusa heads; use linear:"):
        MedusaHeads.load(trained[0])
    head = LinearHead.load(trained[0])
    head.save(tmp_path, HeadRecord("another", "0" * 32))
    with pytest.raises(CompositionError, match=r"these linear heads were trained for another .* and the target is"):
        Engine(load_model(learned_folder), LinearDrafter(LinearHead.load(tmp_path)), controller="fixed")
