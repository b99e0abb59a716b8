"""EAGLE-3 heads in training: each step of training-time test is what drafting does, the gradient, and a whole run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from support.eagle_reference import EagleReference, random_eagle
from support.layer_heads import as_transformers_runs_it
from support.shares import assert_shares_add_up
from support.tiny_models import CONTEXT, VOCAB
from truedraft import Engine, SamplingParams
from truedraft.drafters import Eagle3
from truedraft.kinds.eagle.module import Eagle3Config
from truedraft.kinds.eagle.training import Unrolled
from truedraft.models.backends.stock import StockBackend
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.lm_head import LmHead
from truedraft.training.chains import ChainObjective, likeliest_ids
from truedraft.training.evaluate import predicted
from truedraft.training.losses import ForwardKL
from truedraft.training.texts.self_distillation import SelfDistillationData, WrittenAnswer

SIZES = Eagle3Config(
    48, VOCAB, (0, 1), heads=4, kv_heads=2, head=16, inner=64, draft_vocab=40, reach=3, fc_norm=True, norm_output=True,
    most_positions=CONTEXT,
)  # fmt: skip
PROMPT, ANSWER = [5, 9, 11, 3], [60, 2, 11, 3, 41, 7]


def unrolled(config: Eagle3Config = SIZES) -> Unrolled:
    model = as_transformers_runs_it()
    packed = HuggingFaceModel(as_transformers_runs_it(), None, "tiny", StockBackend)
    return Unrolled(random_eagle(config).requires_grad_(True), LmHead.of(model), packed)


def text(*answers: list[int]) -> SelfDistillationData:
    records = [WrittenAnswer(PROMPT, answer, float(place % 2), False) for place, answer in enumerate(answers)]
    return SelfDistillationData(records, np.zeros((sum(map(len, answers)), 48), dtype=np.uint16))


@torch.no_grad()
def test_each_step_is_a_chain_that_was_drafted_that_far() -> None:
    """At index i and step k: behind the text up to token i + 1, the k tokens that follow it were drafted."""
    made, tokens = unrolled(), [*PROMPT, *ANSWER]
    reference = EagleReference(as_transformers_runs_it(), made.head)
    states = as_transformers_runs_it()(torch.tensor([tokens])).logits[0].log_softmax(-1)
    seen = 0
    for step, each in enumerate(made.steps([WrittenAnswer(PROMPT, ANSWER, 0.0, False)])):
        for row, (logits, label) in enumerate(zip(made.logits(each.leaving), each.tokens.tolist(), strict=True)):
            index = len(PROMPT) - 2 + row
            path = tokens[index + 2 : index + 2 + step]
            expected = reference.logits(tokens[: index + 2], path)[made.head.draft_ids]
            torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
            assert label == tokens[index + 2 + step]
            torch.testing.assert_close(
                each.target[row], states[index + 1 + step][made.head.draft_ids], rtol=0, atol=2e-5
            )
            seen += 1
    assert seen == 6 + 5 + 4


@torch.no_grad()
def test_texts_side_by_side_are_as_one_by_one() -> None:
    """Though one ends before another, and one is too short for the last step."""
    made = unrolled()
    answers = [
        WrittenAnswer(prompt, answer, 0.0, False)
        for prompt, answer in ((PROMPT, ANSWER), ([7], [3, 9, 2, 8, 4, 1, 6]), (PROMPT, [5, 6]))
    ]
    together = list(made.steps(answers))
    alone = [list(made.steps([each])) for each in answers]
    assert [len(steps) for steps in alone] == [3, 3, 2]
    for step, whole in enumerate(together):
        own = [steps[step] for steps in alone if len(steps) > step]
        for name in ("leaving", "target", "tokens"):
            parts = torch.cat([getattr(each, name) for each in own])
            torch.testing.assert_close(getattr(whole, name), parts, rtol=0, atol=2e-5)
    assert together[2].chains.tolist() == [0, 1, 2, 3, 6, 7, 8, 9]  # of 6, 6 and 2 rows at first


def test_answers_without_a_chain_teach_nothing() -> None:
    """One token behind a prompt of one."""
    made, records = unrolled(), [WrittenAnswer([7], [token], 0.0, False) for token in (3, 5)]
    data = SelfDistillationData(records, np.zeros((2, 48), dtype=np.uint16))
    objective = ChainObjective(made, data, ForwardKL(), 0.8)
    assert objective.accumulate(torch.tensor([[0, 1, 0], [1, 1, 1]]), 1.0)["loss"] == 0.0
    assert all(weight.grad is None for weight in made.head.parameters())


def test_the_gradient_is_that_of_the_loss() -> None:
    """Along a direction, by differences, for all weights, of two answers that are not equally long."""
    made = unrolled()
    objective = ChainObjective(made, text(ANSWER, ANSWER[:4]), ForwardKL(), 0.8)
    batch = torch.tensor([[0, 5, 0], [6, 3, 1]])
    objective.accumulate(batch, 1.0)
    weights, generator = [*made.head.parameters()], torch.Generator().manual_seed(1)
    directions = [torch.randn(weight.shape, generator=generator) for weight in weights]
    along = sum(float((w.grad * d).sum()) for w, d in zip(weights, directions, strict=True) if w.grad is not None)

    def moved(by: float) -> float:
        with torch.no_grad():
            for weight, direction in zip(weights, directions, strict=True):
                weight += by * direction
        return objective.accumulate(batch, 0.0)["loss"]

    size = 3e-4
    difference = (moved(size) - moved(-2 * size)) / (2 * size)
    moved(size)
    assert along == pytest.approx(difference, rel=0.01)
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in weights)


@pytest.mark.parametrize("decay", [0.8, None])
def test_shares_of_processes_add_up(decay: float | None) -> None:
    """Of answers that have other numbers of chains at each step, one of them none at the last."""
    made = unrolled()
    objective = ChainObjective(made, text(ANSWER, ANSWER[:4], ANSWER[:2]), ForwardKL(), decay)
    batch = torch.tensor([[0, 5, 0], [6, 3, 1], [10, 1, 2]])
    assert_shares_add_up(objective, made.head, batch, slice(0, 1), slice(1, 3))


def test_tokens_weigh_as_much_as_it_is_likely_that_the_draft_comes_to_them() -> None:
    """Along a text, of two answers: the products of what is accepted before, by a chain at a time."""
    made, batch, answers = unrolled(), torch.tensor([[0, 5, 0], [6, 3, 1]]), (ANSWER, ANSWER[:4])
    ChainObjective(made, text(*answers), ForwardKL(), None).accumulate(batch, 1.0)
    found = {name: weight.grad.clone() for name, weight in made.head.named_parameters() if weight.grad is not None}
    made.head.zero_grad()
    total = torch.zeros(())
    for answer in answers:
        chains: dict[int, float] = {}
        for step, each in enumerate(made.steps([WrittenAnswer(PROMPT, answer, 0.0, False)])):
            student = made.logits(each.leaving).log_softmax(-1)
            for row, chain in enumerate(each.chains.tolist()):
                own, target = student[row], each.target[row]
                loss = (target.exp() * (target - own)).sum()
                total = total + chains.get(chain, 1.0) * loss / (10, 8, 6)[step]
                chains[chain] = chains.get(chain, 1.0) * float(torch.minimum(own, target).exp().sum())
    total.backward()
    for name, weight in made.head.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("shape", [{"num_speculative_tokens": 3}, {"nodes": 8, "beams": 3}], ids=["chain", "tree"])
def test_what_is_foretold_greedily_is_what_the_engine_serves(shape: dict[str, int]) -> None:
    """Of answers that the target gives itself, to prompts of several lengths."""
    target = HuggingFaceModel(as_transformers_runs_it(), None, "tiny", StockBackend)
    prompts = [PROMPT, [7], [*PROMPT, 8, 1, 30]]
    answers = Engine(target).generate(prompts, SamplingParams(max_tokens=24))
    records = [
        WrittenAnswer(prompt, list(answer.token_ids), 0.0, False)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    kept = SelfDistillationData(records, np.zeros((0, 48), dtype=np.uint16))
    head = random_eagle(replace(SIZES, draft_vocab=0))
    found = predicted(target, kept, 0.0, Eagle3(head, **shape))
    engine = Engine(target, Eagle3(head, **shape), controller="fixed")
    counted = [each.stats for each in engine.generate(prompts, SamplingParams(max_tokens=24))]
    calls = sum(each.target_calls for each in counted)
    assert found is not None and found.value == pytest.approx(3 * 23 / calls)
    assert predicted(target, kept, 1.0, Eagle3(head, **shape)) is None


def test_the_likeliest_ids_are_filled_up_by_the_lowest() -> None:
    assert likeliest_ids(text([7, 7, 3, 9, 9, 9]), 2).tolist() == [7, 9]
    assert likeliest_ids(text([7, 7, 3]), 5).tolist() == [0, 1, 2, 3, 7]
