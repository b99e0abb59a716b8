"""Heads on vectors of several layers in training: each step is what drafting does, loss and gradient are the page's.

Chains begin at pairs: pair i is of the token at i + 1, and step k of its chain is behind the text up to that token and
the k tokens that follow, which were drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from support.block_reference import BlockReference
from support.dflash2_reference import DFlash2Reference
from support.eagle_reference import EagleReference, PEagleReference
from support.layer_heads import as_transformers_runs_it, random_head, target
from support.shares import assert_shares_add_up
from support.tiny_models import CONTEXT, VOCAB
from truedraft import Engine, SamplingParams
from truedraft.drafters import DFlash, DSpark, Eagle3, PEagle
from truedraft.errors import OptionError
from truedraft.kinds.block.module import BlockConfig, DFlashHead, DSparkHead
from truedraft.kinds.block.training import Blocks, DFlashTrainingConfig
from truedraft.kinds.dflash2.drafter import DFlash2
from truedraft.kinds.dflash2.module import DFlash2Config, DFlash2Head
from truedraft.kinds.dflash2.training import Selections
from truedraft.kinds.eagle.module import Eagle3Config, Eagle3Head, PEagleConfig, PEagleHead
from truedraft.kinds.eagle.training import Eagle3TrainingConfig, Masked, PEagleTrainingConfig, Unrolled
from truedraft.models.lm_head import LmHead
from truedraft.training.chains import ChainObjective, chains_in, likeliest_ids
from truedraft.training.evaluate import predicted
from truedraft.training.losses import ForwardKL, loss_from_spec
from truedraft.training.texts.self_distillation import SelfDistillationData, WrittenAnswer

SIZES: dict[str, Any] = {
    "width": 48, "vocab_size": VOCAB, "layers": (0, 1), "heads": 4, "kv_heads": 2, "head": 16, "inner": 64,
    "most_positions": CONTEXT,
}  # fmt: skip
EAGLE = Eagle3Config(**SIZES, draft_vocab=40, reach=3, fc_norm=True, norm_output=True)
P_EAGLE = PEagleConfig(**SIZES, draft_vocab=40, reach=3, more_layers=1, mask_token=VOCAB - 1)
WIDER = replace(P_EAGLE, own_embedding=True, draft_vocab=0, reach=4, more_layers=2)
PLAIN = BlockConfig(**SIZES, block=4, mask_id=96, depth=2)
MARKOV = replace(
    PLAIN, block=3, from_anchor=True, markov=8, confidence=True, confidence_reads_token=True, draft_vocab=40,
    own_output=True,
)  # fmt: skip
FLASH2 = DFlash2Config(**SIZES, block=4, mask_id=96, depth=2, rank=8, candidates=6)
FLASH2_FEWER = replace(FLASH2, draft_vocab=40, own_output=True)
RECURRENT = replace(MARKOV, markov_kind="rnn", confidence_reads_token=False)
EAGLE_WINDOW = replace(EAGLE, windows=(4,), sink=1)
EAGLE_WINDOW_WHOLE = Eagle3Config(**SIZES, reach=3, windows=(4,), sink=1)
P_EAGLE_WHOLE = PEagleConfig(**SIZES, reach=3, more_layers=1, mask_token=7)
WINDOWS = replace(P_EAGLE, windows=(4, 5))
FLASH_WINDOWS = replace(PLAIN, windows=(4, 0), sink=1)
FLASH2_WINDOWS = replace(FLASH2, windows=(4, 0))
SPARK_WINDOWS = replace(MARKOV, windows=(4, 5), window_causal=True)


class Tried(NamedTuple):
    """A kind of heads: its sizes in training, and those over all ids for predictions."""

    head: Any
    config: Any
    whole: Any
    chains: Any
    reference: Any
    drafter: Any


KINDS = {
    "EAGLE-3": Tried(Eagle3Head, EAGLE, Eagle3Config(**SIZES, reach=3), Unrolled, EagleReference, Eagle3),
    "P-EAGLE": Tried(PEagleHead, P_EAGLE, P_EAGLE_WHOLE, Masked, PEagleReference, PEagle),
    "P-EAGLE, an embedding": Tried(PEagleHead, WIDER, WIDER, Masked, PEagleReference, PEagle),
    "DFlash": Tried(DFlashHead, PLAIN, PLAIN, Blocks, BlockReference, DFlash),
    "DSpark": Tried(DSparkHead, MARKOV, MARKOV, Blocks, BlockReference, DSpark),
    "DSpark, recurrent": Tried(DSparkHead, RECURRENT, RECURRENT, Blocks, BlockReference, DSpark),
    "DFlash 2": Tried(DFlash2Head, FLASH2, FLASH2, Selections, DFlash2Reference, DFlash2),
    "DFlash 2, fewer ids": Tried(DFlash2Head, FLASH2_FEWER, FLASH2, Selections, DFlash2Reference, DFlash2),
    "DFlash 2, windows": Tried(DFlash2Head, FLASH2_WINDOWS, FLASH2_WINDOWS, Selections, DFlash2Reference, DFlash2),
    "EAGLE-3, window": Tried(Eagle3Head, EAGLE_WINDOW, EAGLE_WINDOW_WHOLE, Unrolled, EagleReference, Eagle3),
    "P-EAGLE, windows": Tried(PEagleHead, WINDOWS, replace(WINDOWS, draft_vocab=0), Masked, PEagleReference, PEagle),
    "DFlash, windows": Tried(DFlashHead, FLASH_WINDOWS, FLASH_WINDOWS, Blocks, BlockReference, DFlash),
    "DSpark, causal windows": Tried(DSparkHead, SPARK_WINDOWS, SPARK_WINDOWS, Blocks, BlockReference, DSpark),
}
PROMPT, ANSWER = [5, 9, 11, 3], [60, 2, 11, 3, 41, 7]
ANSWERS = [
    WrittenAnswer(prompt, answer, 0.0, False)
    for prompt, answer in ((PROMPT, ANSWER), ([7], [3, 9, 2, 8, 5, 1, 6]), (PROMPT, [5, 7]))
]


def chains_of(name: str, config: Any = None, anchors: int = 100, kept: float = 0.5) -> Any:
    kind = KINDS[name]
    head = random_head(kind.head, config or kind.config).requires_grad_(True)
    more = {Masked: (kept, 1), Blocks: (anchors, 1), Selections: (anchors, 1), Unrolled: ()}[kind.chains]
    return kind.chains(head, LmHead.of(as_transformers_runs_it()), target(), *more)


def text(*answers: WrittenAnswer) -> SelfDistillationData:
    return SelfDistillationData(list(answers), np.zeros((sum(len(each.answer) for each in answers), 48), np.uint16))


class Page:
    """What the kind's page says of a step, by its reference, and what the target says there."""

    def __init__(self, name: str, head: Any) -> None:
        self.reference = KINDS[name].reference(as_transformers_runs_it(), head)
        self.ids = slice(None) if head.draft_ids is None else head.draft_ids

    def step(self, whole: Sequence[int], pair: int, step: int) -> tuple[Tensor, Tensor | None]:
        """Logits of the draft's ids, and of the probability that the token is accepted."""
        known, path = whole[: pair + 2], whole[pair + 2 : pair + 2 + step]
        if isinstance(self.reference, BlockReference):
            return self.reference.draft_logits(known, path)
        return self.reference.logits(known, path)[self.ids], None

    @torch.no_grad()
    def target(self, whole: Sequence[int], place: int) -> Tensor:
        """Log probabilities of the draft's ids."""
        return self.reference.model(torch.tensor([whole])).logits[0, place].log_softmax(-1)[self.ids]


@pytest.mark.parametrize("dropping", [False, True])
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_each_step_is_what_the_page_drafts_behind_a_text_that_was_read_so_far(name: str, dropping: bool) -> None:
    """Several texts side by side, one of which ends before another and is too short for the last step."""
    made = chains_of(name, anchors=3 if dropping else 100)
    page, reach, seen = Page(name, made.head), made.head.reach, [0] * made.head.reach
    chosen = [made.pairs(each, 3) if dropping else chains_in(each, reach) for each in ANSWERS]
    begun = [(each, pair) for each, own in zip(ANSWERS, chosen, strict=True) for pair in own]
    for step, each in enumerate(made.steps(ANSWERS, chosen if dropping else None)):
        logits, said = made.logits(each.leaving), made.acceptance(each.leaving)
        for row, chain in enumerate(each.chains.tolist()):
            answer, pair = begun[chain]
            whole = [*answer.prompt, *answer.answer]
            expected, accepted = page.step(whole, pair, step)
            torch.testing.assert_close(logits[row], expected, rtol=0, atol=2e-5)
            assert said is None or float(said[row]) == pytest.approx(float(accepted), abs=5e-5)
            assert int(each.tokens[row]) == whole[pair + 2 + step]
            torch.testing.assert_close(each.target[row], page.target(whole, pair + 1 + step), rtol=0, atol=2e-5)
            seen[step] += 1
    assert seen == [sum(steps > step for own in chosen for steps in own.values()) for step in range(reach)]
    assert dropping or seen == [14, 11, 8, 6][:reach]
    assert not list(made.steps([WrittenAnswer([7], [3], 0.0, True)])), "a text of two tokens has no vector to begin at"


BY_PLACE = [(name, 0.7) for name in KINDS if "DFlash 2" not in name]  # its own is of two parts


@pytest.mark.parametrize(("name", "decay"), [*BY_PLACE, ("EAGLE-3", None), ("P-EAGLE", None), ("DSpark", None)])
def test_loss_and_gradient_are_those_of_the_page(name: str, decay: float | None) -> None:
    """By the reference's own graph, of two answers; without a decay a token weighs as much as the draft comes to it."""
    made, spec = chains_of(name, anchors=3), "kl=0.1,tv=1.8"
    chosen = [made.pairs(answer, number) for answer, number in zip(ANSWERS[::2], (7, 9), strict=True)]
    batch = torch.tensor([[0, 5, 7], [13, 1, 9]])
    loss = ChainObjective(made, text(*ANSWERS), loss_from_spec(spec), decay).accumulate(batch, 1.0)["loss"]
    found = {key: each.grad.clone() for key, each in made.head.named_parameters() if each.grad is not None}
    made.head.zero_grad()
    page, total, divergence = Page(name, made.head), torch.zeros(()), 0.0
    counts = [sum(steps > step for own in chosen for steps in own.values()) for step in range(made.head.reach)]
    for answer, own in zip(ANSWERS[::2], chosen, strict=True):
        whole = [*answer.prompt, *answer.answer]
        for pair, steps in own.items():
            alive = 1.0
            for step in range(steps):
                logits, said = page.step(whole, pair, step)
                q, log_p = logits.log_softmax(-1), page.target(whole, pair + 1 + step)
                p = log_p.exp()
                learned = 0.1 * (p * (log_p - q)).sum() + 0.9 * (p - q.exp()).abs().sum()
                divergence += (decay or 1.0) ** step * float(learned.detach()) / counts[step]
                accepted = torch.minimum(p, q.exp()).sum().detach()
                if said is not None:
                    chance = torch.sigmoid(said)
                    learned = learned - accepted * chance.log() - (1 - accepted) * (1 - chance).log()
                total = total + (alive if decay is None else decay**step) * learned / counts[step]
                alive *= float(accepted)
    total.backward()
    assert loss == pytest.approx(divergence, rel=1e-4)
    for key, each in made.head.named_parameters():
        expected = torch.zeros_like(each) if each.grad is None else each.grad
        torch.testing.assert_close(found.get(key, torch.zeros_like(each)), expected, rtol=2e-3, atol=2e-5)
    assert len(found) == len(list(made.head.parameters()))


@pytest.mark.parametrize(
    ("name", "decay"), [("EAGLE-3", 0.8), ("P-EAGLE", None), ("DSpark, recurrent", 0.8), ("DFlash 2, windows", None)]
)
def test_shares_of_processes_add_up(name: str, decay: float | None) -> None:
    """Of answers that have other numbers of chains at each step, one of them none at the last."""
    made = chains_of(name, anchors=4)
    objective = ChainObjective(made, text(*ANSWERS), ForwardKL(), decay)
    batch = torch.tensor([[0, 5, 7], [6, 6, 8], [13, 1, 9]])
    assert_shares_add_up(objective, made.head, batch, slice(0, 2), slice(2, 3))


def test_answers_without_a_chain_teach_nothing() -> None:
    """One token behind a prompt of one."""
    made, records = chains_of("EAGLE-3"), [WrittenAnswer([7], [token], 0.0, False) for token in (3, 5)]
    objective = ChainObjective(made, text(*records), ForwardKL(), 0.8)
    assert objective.accumulate(torch.tensor([[0, 1, 0], [1, 1, 1]]), 1.0)["loss"] == 0.0
    assert all(weight.grad is None for weight in made.head.parameters())


def test_masks_are_kept_by_their_depth_and_end_with_the_text() -> None:
    """Of 50 places; each is kept at a depth only where it is at all before that, and others in the next pass."""
    answer = WrittenAnswer(PROMPT, [5] * 50, 0.0, False)
    made = chains_of("P-EAGLE", replace(P_EAGLE, reach=6), kept=0.6)
    pairs = made.pairs(answer, 3)
    assert [sum(steps > step for steps in pairs.values()) for step in range(3)] == [50, 30, 18]
    assert sorted(pairs) == [*chains_in(answer, 6)] and [*pairs.values()] == sorted(pairs.values(), reverse=True)
    assert all(steps <= 52 - pair for pair, steps in pairs.items())
    assert 9 <= sum(steps > 5 for steps in pairs.values()) <= 10, "a fifth, but for those at the end"
    assert pairs == made.pairs(answer, 3) and pairs != made.pairs(answer, 4)
    assert chains_of("P-EAGLE", kept=1.0).pairs(answer, 3) == chains_in(answer, 3)
    made = chains_of("DFlash", anchors=3)
    pairs = made.pairs(ANSWERS[0], 7)  # anchors of blocks are drawn anew, too
    assert len(pairs) == 3 and pairs != made.pairs(ANSWERS[0], 8) and pairs == made.pairs(ANSWERS[0], 7)


def test_a_window_is_of_all_layers_of_a_head() -> None:
    for kind, layers in ((Eagle3TrainingConfig, 1), (PEagleTrainingConfig, 4), (DFlashTrainingConfig, 2)):
        config = kind(sliding_window=64, sink=4).sizes(64, VOCAB)
        assert (config.windows, config.sink) == ((64,) * layers, 4)
        assert kind().sizes(64, VOCAB).windows == ()
    with pytest.raises(OptionError, match="more than the 5 tokens that are drafted, got 5"):
        Eagle3TrainingConfig(sliding_window=5).sizes(64, VOCAB)
    with pytest.raises(OptionError, match="how many first tokens layers with a window see, got 4"):
        Eagle3TrainingConfig(sink=4).sizes(64, VOCAB)


def test_an_embedding_of_its_own_begins_as_the_targets() -> None:
    lm_head = LmHead.of(as_transformers_runs_it())
    config = PEagleTrainingConfig(own_embedding=True, layers=(0, 1), draft_vocab=40)
    head = config.new_head(lm_head)
    assert head.embed_tokens.weight.equal(lm_head.embedding.float()) and head.embed_tokens.weight.requires_grad
    assert float(head.mask_hidden.detach().abs().min()) > 0.0


def answered(prompts: list[list[int]], params: SamplingParams) -> list[WrittenAnswer]:
    answers = zip(prompts, Engine(target(), entropy=4).generate(prompts, params), strict=True)
    return [WrittenAnswer(prompt, list(each.token_ids), params.temperature, False) for prompt, each in answers]


TREES = [(name, {"nodes": 8, "beams": 3}) for name in ("EAGLE-3", "P-EAGLE", "DFlash", "DSpark, recurrent", "DFlash 2")]


@pytest.mark.parametrize(("name", "shape"), [*((name, {}) for name in KINDS), *TREES])
def test_what_is_foretold_greedily_is_what_the_engine_serves(name: str, shape: dict[str, int]) -> None:
    model, kind, params = target(), KINDS[name], SamplingParams(max_tokens=24)
    prompts = [PROMPT, [7], [*PROMPT, 8, 1, 30]]
    records = answered(prompts, params)
    head = random_head(kind.head, kind.whole)
    made = kind.drafter(head, **shape)
    whole = made.limits.nodes
    (found,) = predicted(model, text(*records), 0.0, made, [whole])
    assert predicted(model, text(*records), 1.0, kind.drafter(head, **shape), [whole]) == []
    engine = Engine(model, kind.drafter(head, **shape), controller="fixed")
    calls = sum(each.stats.target_calls for each in engine.generate(prompts, params))
    assert found.value == pytest.approx(3 * 23 / calls)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", KINDS)
def test_shorter_chains_are_foretold_along_with_the_longest(name: str, temperature: float) -> None:
    model, kind = target(), KINDS[name]
    head = random_head(kind.head, kind.whole)
    records = text(*answered([PROMPT, [7]], SamplingParams(max_tokens=24, temperature=temperature)))
    lengths = [1, 2, kind.drafter(head).limits.depth]
    found = predicted(model, records, temperature, kind.drafter(head, num_speculative_tokens=lengths[-1]), lengths)
    for length, each in zip(lengths, found, strict=True):
        alone = predicted(model, records, temperature, kind.drafter(head, num_speculative_tokens=length), [length])
        assert each.value == pytest.approx(alone[0].value, rel=1e-9)


@pytest.mark.parametrize("shape", [{}, {"branching": (3, 1)}], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["DFlash", "DSpark, recurrent", "EAGLE-3", "P-EAGLE", "DFlash 2"])
def test_what_is_foretold_of_draws_follows_each_draft_along_the_answer(name: str, shape: dict[str, Any]) -> None:
    """By the page: what the draft behind a place gives to each token, given those before it, against the target's."""
    model, kind = target(), KINDS[name]
    reference: Any = kind.reference(as_transformers_runs_it(), random_head(kind.head, kind.whole))
    made: Any = kind.drafter(reference.made, **shape)
    records = answered([PROMPT, [7]], SamplingParams(max_tokens=10, temperature=1.0))
    (found,) = predicted(model, text(*records), 1.0, made, [made.limits.nodes])
    calls = 0.0
    for prompt, answer in ((each.prompt, each.answer) for each in records):
        whole, places = [*prompt, *answer], len(answer) - 1
        with torch.no_grad():
            dists = reference.model(torch.tensor([whole])).logits[0].double().softmax(-1)
        starts = np.zeros(places + 10)
        starts[0] = 1.0
        for place in range(places):
            at, alive = len(prompt) + place, [1.0]
            for depth in range(min(made.limits.depth, places - place)):
                with torch.no_grad():
                    logits = reference.logits(whole[: at + 1], whole[at + 1 : at + 1 + depth])
                q, p, token = logits.double().softmax(-1), dists[at + depth], whole[at + 1 + depth]
                width = made.branching[depth]
                alive.append(
                    alive[-1] * (float((q / p)[token].clamp_max(1.0)) if width == 1 else _tried(p, q, token, width))
                )
            for count, survives in enumerate(alive):
                ends = survives - (alive[count + 1] if count + 1 < len(alive) else 0.0)
                starts[place + count + 1] += starts[place] * ends
            calls += starts[place]
    assert found.value == pytest.approx(2 * 9 / calls, rel=0.03 if shape else 1e-4)


def _tried(p: Tensor, q: Tensor, token: int, draws: int) -> float:
    """That a token of the target's is one of some draws without replacement, as the mean over many."""
    random, hits = np.random.default_rng(1), 0.0
    for _ in range(400):
        left, rest, reach = p.clone(), q.clone(), 1.0
        for _ in range(draws):
            hits += reach * float(torch.minimum(left, rest)[token])
            rejects = (rest - left).clamp_min(0.0)
            reach *= float(rejects.sum())
            gone = int(random.choice(len(p), p=(rejects / rejects.sum()).numpy()))
            left = (left - rest).clamp_min(0.0)
            left = left / left.sum()
            rest[gone] = 0.0
            rest = rest / rest.sum()
    return hits / 400 / float(p[token])


def test_a_head_over_all_ids_ends_in_the_targets_lm_head() -> None:
    """So that other engines read it; one over fewer ids has its own, of as many rows: the likeliest, and others."""
    for kept, tied, own in ((40, True, True), (64, True, False), (0, True, False), (99, False, True)):
        made = DFlashTrainingConfig(draft_vocab=kept, tied=tied).entries(48, 64)
        assert (made["own_output"], made["draft_vocab"]) == (own, 40 if kept == 40 else 0)
    assert likeliest_ids(text(WrittenAnswer(PROMPT, [7, 7, 3, 9, 9, 9], 0.0, False)), 2).tolist() == [7, 9]
    assert likeliest_ids(text(WrittenAnswer(PROMPT, [7, 7, 3], 0.0, False)), 5).tolist() == [0, 1, 2, 3, 7]
