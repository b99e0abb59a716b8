"""P-EAGLE heads in training: each step is what drafting does, loss and gradient are the page's, few masks stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.eagle_reference import PEagleReference, random_eagle
from support.layer_heads import as_transformers_runs_it, target
from support.shares import assert_shares_add_up
from support.tiny_models import CONTEXT, VOCAB
from training.test_block_training import ANSWER, ANSWERS, PROMPT, text
from truedraft.errors import OptionError
from truedraft.kinds.eagle.module import PEagleConfig, PEagleHead
from truedraft.kinds.eagle.training import Masked, PEagleTrainingConfig
from truedraft.models.lm_head import LmHead
from truedraft.training.chains import ChainObjective, chains_in
from truedraft.training.losses import ForwardKL
from truedraft.training.texts.self_distillation import WrittenAnswer

SIZES = PEagleConfig(
    48, VOCAB, (0, 1), heads=4, kv_heads=2, head=16, inner=64, draft_vocab=40, reach=3, most_positions=CONTEXT,
    more_layers=1, mask_token=VOCAB - 1,
)  # fmt: skip
WIDER = replace(SIZES, own_embedding=True, draft_vocab=0, reach=4, more_layers=2)


def masked(config: PEagleConfig = SIZES, kept: float = 0.5) -> Masked:
    head = random_eagle(config, PEagleHead).requires_grad_(True)
    assert isinstance(head, PEagleHead)
    return Masked(head, LmHead.of(as_transformers_runs_it()), target(), kept, seed=1)


@pytest.mark.parametrize("config", [SIZES, WIDER], ids=["fewer ids", "an embedding"])
@pytest.mark.parametrize("dropping", [True, False])
@torch.no_grad()
def test_each_step_is_a_mask_behind_a_text_that_was_read_so_far(config: PEagleConfig, dropping: bool) -> None:
    """Several texts side by side, one of which ends before another and is too short for the last step."""
    made, seen = masked(config), [0] * config.reach
    reference = PEagleReference(as_transformers_runs_it(), made.head)
    chosen = [made.pairs(each, 3) if dropping else chains_in(each, config.reach) for each in ANSWERS]
    begun = [(each, pair) for each, own in zip(ANSWERS, chosen, strict=True) for pair in own]
    ids = slice(None) if made.head.draft_ids is None else made.head.draft_ids
    for step, each in enumerate(made.steps(ANSWERS, chosen if dropping else None)):
        for row, chain in enumerate(each.chains.tolist()):
            answer, pair = begun[chain]
            whole = [*answer.prompt, *answer.answer]
            expected = reference.ahead(whole[: pair + 2], step + 1)[step][ids]
            torch.testing.assert_close(made.logits(each.leaving)[row], expected, rtol=0, atol=5e-5)
            assert int(each.tokens[row]) == whole[pair + 2 + step]
            logits = reference.model(torch.tensor([whole])).logits[0, pair + 1 + step]
            torch.testing.assert_close(each.target[row], logits.log_softmax(-1)[ids], rtol=0, atol=5e-5)
            seen[step] += 1
    whole_counts = [14, 11, 8, 6][: config.reach]
    assert seen[0] == 14 and all(a <= b for a, b in zip(seen, whole_counts, strict=True))
    assert (seen == whole_counts) != dropping


def test_loss_and_gradient_are_those_of_the_page() -> None:
    """By the reference's own graph, of one answer whose masks are dropped."""
    made = masked(WIDER)
    pairs, whole = made.pairs(ANSWERS[0], 7), PROMPT + ANSWER
    loss = ChainObjective(made, text(*ANSWERS[:1]), ForwardKL(), 0.7).accumulate(torch.tensor([[0, 5, 7]]), 1.0)["loss"]
    found = {name: each.grad.clone() for name, each in made.head.named_parameters() if each.grad is not None}
    made.head.zero_grad()
    reference, total = PEagleReference(as_transformers_runs_it(), made.head), torch.zeros(())
    with torch.no_grad():
        targets = reference.model(torch.tensor([whole])).logits[0].log_softmax(-1)
    for pair, steps in pairs.items():
        for step, logits in enumerate(reference.ahead(whole[: pair + 2], steps)):
            log_p = targets[pair + 1 + step]
            own = (log_p.exp() * (log_p - logits.log_softmax(-1))).sum()
            total = total + 0.7**step * own / sum(each > step for each in pairs.values())
    total.backward()
    assert loss == pytest.approx(float(total.detach()), rel=1e-4)
    for name, each in made.head.named_parameters():
        torch.testing.assert_close(found[name], each.grad, rtol=2e-3, atol=2e-5)


def test_masks_are_kept_by_their_depth_and_end_with_the_text() -> None:
    """Of 50 places; each is kept at a depth only where it is at all before that, and others in the next pass."""
    made, answer = masked(replace(SIZES, reach=6), kept=0.6), WrittenAnswer(PROMPT, [5] * 50, 0.0, False)
    pairs = made.pairs(answer, 3)
    assert [sum(steps > step for steps in pairs.values()) for step in range(3)] == [50, 30, 18]
    assert sorted(pairs) == [*chains_in(answer, 6)] and [*pairs.values()] == sorted(pairs.values(), reverse=True)
    assert all(steps <= 52 - pair for pair, steps in pairs.items())
    assert 9 <= sum(steps > 5 for steps in pairs.values()) <= 10, "a fifth, but for those at the end"
    assert pairs == made.pairs(answer, 3) and pairs != made.pairs(answer, 4)
    assert masked(kept=1.0).pairs(answer, 3) == chains_in(answer, 3)


@pytest.mark.parametrize("decay", [0.8, None])
def test_shares_of_processes_add_up(decay: float | None) -> None:
    made = masked()
    objective = ChainObjective(made, text(*ANSWERS), ForwardKL(), decay)
    batch = torch.tensor([[0, 5, 7], [6, 6, 8], [13, 1, 9]])
    assert_shares_add_up(objective, made.head, batch, slice(0, 2), slice(2, 3))


def test_what_cannot_be_trained_is_refused() -> None:
    for options, said in (
        ({"loss": "ce"}, "must compare distributions"),
        ({"stage": 2}, "must be 1: the target of a P-EAGLE head"),
        ({"kept": 0.0}, r"must lie in \(0, 1\], got 0"),
        ({"depth": 0}, "depth"),
    ):
        with pytest.raises(OptionError, match=said):
            PEagleTrainingConfig(**options)


def test_an_embedding_of_its_own_begins_as_the_targets() -> None:
    lm_head = LmHead.of(as_transformers_runs_it())
    config = PEagleTrainingConfig(own_embedding=True, layers=(0, 1), draft_vocab=40)
    head = config.new_head(lm_head)
    assert head.embed_tokens.weight.equal(lm_head.embedding.float()) and head.embed_tokens.weight.requires_grad
    assert float(head.mask_hidden.detach().abs().min()) > 0.0
