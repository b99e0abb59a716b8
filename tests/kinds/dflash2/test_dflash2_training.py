"""Training of DFlash 2: its loss by the reference's own graph, and what it brings."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.layer_heads import as_transformers_runs_it, random_head, target
from training.test_chain_training import ANSWERS, FLASH2, FLASH2_FEWER, Page, text
from truedraft import Engine, SamplingParams, load_model
from truedraft.engine.prompts import encode_prompt
from truedraft.errors import OptionError
from truedraft.kinds.dflash2.drafter import DFlash2
from truedraft.kinds.dflash2.module import DFlash2Config, DFlash2Head
from truedraft.kinds.dflash2.training import DFlash2TrainingConfig, Selections, with_tokens
from truedraft.models.lm_head import LmHead
from truedraft.training import chains
from truedraft.training.chains import ChainObjective
from truedraft.training.heads import lm_head_of
from truedraft.training.losses import ForwardKL
from truedraft.training.texts.self_distillation import WrittenAnswer

WEIGHT = 0.6
STEPS = 40


def selecting(page: Any, whole: list[int], pair: int, step: int, teaches: bool) -> tuple[Tensor, Tensor, bool]:
    """The LM head's logits, the cross-entropy of the true token among the candidates, and whether it was one.

    There is none of a token that the draft does not have.
    """
    known, before, true = whole[: pair + 2], whole[pair + 1 + step], whole[pair + 2 + step]
    x = page.reference.block(known)[step]
    scores, read = page.reference.scores(x), x if teaches else x.detach()
    if (ids := page.reference.made.draft_ids) is not None:
        if true not in ids.tolist():
            return scores, torch.zeros(()), True
        true = ids.tolist().index(true)
    best = scores.topk(FLASH2.candidates).indices.tolist()
    among = best if true in best else [*best[:-1], true]
    own = scores if teaches else scores.detach()
    edges = torch.stack([own[each] + page.reference.edge(read, before, each) for each in among])
    return scores, -edges.log_softmax(0)[among.index(true)], true in best


@pytest.mark.parametrize("config", [FLASH2, FLASH2_FEWER], ids=["all ids", "fewer ids"])
@pytest.mark.parametrize("teaches", [True, False])
@pytest.mark.parametrize("decay", [0.7, None])
def test_loss_and_gradient_are_those_of_the_page(decay: float | None, teaches: bool, config: DFlash2Config) -> None:
    """Without a decay a token weighs as much as the draft comes to it, by the distributions that are served."""
    head = random_head(DFlash2Head, config).requires_grad_(True)
    made = Selections(head, LmHead.of(as_transformers_runs_it()), target(), 3, 1, WEIGHT, teaches=teaches)
    chosen = [made.pairs(answer, number) for answer, number in zip(ANSWERS[::2], (7, 9), strict=True)]
    batch = torch.tensor([[0, 5, 7], [13, 1, 9]])
    loss = ChainObjective(made, text(*ANSWERS), ForwardKL(), decay).accumulate(batch, 1.0)["loss"]
    found = {key: each.grad.clone() for key, each in head.named_parameters() if each.grad is not None}
    head.zero_grad()
    page, total, summed, missed = Page("DFlash 2", head), torch.zeros(()), 0.0, 0
    counts = [sum(steps > step for own in chosen for steps in own.values()) for step in range(head.reach)]
    for answer, own in zip(ANSWERS[::2], chosen, strict=True):
        whole = [*answer.prompt, *answer.answer]
        for pair, steps in own.items():
            alive = 1.0
            for step in range(steps):
                log_p = page.target(whole, pair + 1 + step)
                scores, selector, among = selecting(page, whole, pair, step, teaches)
                learned = (log_p.exp() * (log_p - scores.log_softmax(-1))).sum() + WEIGHT * selector
                summed += (decay or 1.0) ** step * float(learned.detach()) / counts[step]
                total = total + (alive if decay is None else decay**step) * learned / counts[step]
                served = page.step(whole, pair, step)[0].detach().softmax(-1)
                alive *= float(torch.minimum(log_p.exp(), served).sum())
                missed += not among
    total.backward()
    assert missed and loss == pytest.approx(summed, rel=1e-4)
    for key, each in head.named_parameters():
        expected = torch.zeros_like(each) if each.grad is None else each.grad
        torch.testing.assert_close(found.get(key, torch.zeros_like(each)), expected, rtol=2e-3, atol=2e-5)
    assert len(found) == len(list(head.parameters()))


def test_a_true_token_that_is_no_candidate_takes_the_place_of_the_last() -> None:
    ids, places = with_tokens(torch.tensor([[7, 3, 9], [7, 3, 9]]), torch.tensor([3, 5]))
    assert ids.tolist() == [[7, 3, 9], [7, 3, 5]] and places.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"draft_vocab": -1}, "draft_vocab"),
        ({"taps": 0}, "taps"),
        ({"selector_weight": -1.0}, "must be 0 or more, got -1.0"),
    ],
)
def test_senseless_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        DFlash2TrainingConfig(**options)


@pytest.mark.slow
def test_a_short_training_on_the_embedded_target_brings_acceptance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a few answers, which it then drafts; without training next to nothing is accepted."""
    model = load_model("embedded:target", dtype="float32")
    monkeypatch.setattr(chains, "load_model", lambda *_, **__: model)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    asked = [list(encode_prompt(model, text)) for text in ("import os\n", "def main(", "class Stack:\n")]
    answers = [list(each.token_ids) for each in Engine(model).generate(asked, params)]
    records = [WrittenAnswer(*each, 0.0, False) for each in zip(asked, answers, strict=True)]
    config = DFlash2TrainingConfig(
        layers=(2, 5), length=3, depth=1, inner=128, rank=16, anchors=24, positions_per_step=72, steps=STEPS,
        learning_rate=5e-3,
    )  # fmt: skip
    lm_head, words = lm_head_of("embedded:target", "cpu"), text(*records)
    loop = config.loop(config.new_head(lm_head), lm_head, "", (words, words), "print", tmp_path, lambda *_: None)

    def accepted() -> int:
        drafts = DFlash2(copy.deepcopy(loop.model).eval().requires_grad_(False))  # type: ignore[arg-type]
        given = Engine(model, drafts, controller="fixed").generate(asked, params)
        assert [list(each.token_ids) for each in given] == answers
        return sum(each.stats.accepted_tokens for each in given)

    before, losses = accepted(), list[float]()
    loop.run(on_step=lambda record: losses.append(record.values["loss"]))
    assert losses[-1] < losses[0] / 5
    assert accepted() > before + 20
