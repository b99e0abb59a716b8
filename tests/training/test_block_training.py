"""Block drafters in training: each step is what drafting does, loss and gradient are the page's, and whole runs.

Whole runs also of P-EAGLE, whose steps tests/training/test_peagle_training.py has.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.block_reference import BlockReference
from support.eagle_reference import EagleReference, PEagleReference, random_eagle
from support.layer_heads import as_transformers_runs_it, random_head, target
from support.shares import assert_shares_add_up
from support.tiny_models import CONTEXT, VOCAB
from truedraft import Engine, SamplingParams, load_model
from truedraft.drafters import DFlash, DSpark, Eagle3, PEagle
from truedraft.errors import OptionError
from truedraft.kinds.block.module import BlockConfig, DFlashHead, DSparkHead
from truedraft.kinds.block.training import Blocks, DFlashTrainingConfig, DSparkTrainingConfig
from truedraft.kinds.eagle.module import Eagle3Config, PEagleConfig, PEagleHead
from truedraft.kinds.eagle.training import PEagleTrainingConfig
from truedraft.models.lm_head import LmHead
from truedraft.training.chains import ChainObjective
from truedraft.training.evaluate import predicted
from truedraft.training.heads import train_heads
from truedraft.training.loop import Callbacks
from truedraft.training.losses import loss_from_spec
from truedraft.training.texts.answer_writer import WritingConfig
from truedraft.training.texts.prompts import PromptSets
from truedraft.training.texts.self_distillation import SelfDistillationData, WrittenAnswer

PLAIN = BlockConfig(
    48, VOCAB, (0, 1), block=4, mask_id=96, depth=2, heads=4, kv_heads=2, head=16, inner=64, most_positions=CONTEXT
)
MARKOV = replace(
    PLAIN, block=3, from_anchor=True, markov=8, confidence=True, confidence_reads_token=True, draft_vocab=40,
    own_output=True,
)  # fmt: skip
SHAPES = {"DFlash": (DFlashHead, PLAIN), "DSpark": (DSparkHead, MARKOV)}
SHAPES |= {"recurrent": (DSparkHead, replace(MARKOV, markov_kind="rnn", confidence_reads_token=False))}
SIZES = Eagle3Config(48, VOCAB, (0, 1), heads=4, kv_heads=2, head=16, inner=64, reach=3, most_positions=CONTEXT)
MASKED = {"P-EAGLE": (PEagleHead, PEagleConfig(**asdict(SIZES) | {"more_layers": 1, "mask_token": 7}))}
PROMPT, ANSWER = [5, 9, 11, 3], [60, 2, 11, 3, 41, 7]
ANSWERS = [
    WrittenAnswer(prompt, answer, 0.0, False)
    for prompt, answer in ((PROMPT, ANSWER), ([7], [3, 9, 2, 8, 5, 1, 6]), (PROMPT, [5, 7]))
]


def blocks(name: str, anchors: int = 100) -> Blocks:
    packed = target()
    made = random_head(*SHAPES[name]).requires_grad_(True)
    return Blocks(made, LmHead.of(as_transformers_runs_it()), packed, anchors, seed=1)


def text(*answers: WrittenAnswer) -> SelfDistillationData:
    return SelfDistillationData(list(answers), np.zeros((sum(len(each.answer) for each in answers), 48), np.uint16))


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_each_step_is_a_token_of_a_block_whose_tokens_before_are_the_texts(name: str) -> None:
    """Several texts side by side, one of which ends before another and is too short for the last step."""
    made, seen = blocks(name), 0
    reference = BlockReference(as_transformers_runs_it(), made.head)
    for step, each in enumerate(made.steps(ANSWERS)):
        logits, said = made.logits(each.leaving), made.acceptance(each.leaving)
        places = [(answer, at) for answer in ANSWERS for at in range(max(len(answer.prompt), 2) - 1, 99)]
        places = [(whole, at) for whole, at in ((each.prompt + each.answer, at) for each, at in places)]
        places = [(whole, at) for whole, at in places if at < len(whole) - 1]
        for row, chain in enumerate(each.chains.tolist()):
            whole, anchor = places[chain]
            ids = slice(None) if made.head.draft_ids is None else made.head.draft_ids
            path = whole[anchor + 1 : anchor + 1 + step]
            expected, accepted = reference.draft_logits(whole[: anchor + 1], path)
            torch.testing.assert_close(logits[row], expected, rtol=0, atol=5e-5)
            assert said is None or float(said[row]) == pytest.approx(float(accepted), abs=5e-5)
            assert int(each.tokens[row]) == whole[anchor + 1 + step]
            state = reference.model(torch.tensor([whole])).logits[0, anchor + step].log_softmax(-1)
            torch.testing.assert_close(each.target[row], state[ids], rtol=0, atol=5e-5)
            seen += 1
    assert seen == (6 + 6 + 2) + (5 + 5 + 1) + (4 + 4)
    assert not list(made.steps([WrittenAnswer([7], [3], 0.0, True)])), "a text of two tokens has no vector to begin at"


@pytest.mark.parametrize("name", SHAPES)
def test_loss_and_gradient_are_those_of_the_page(name: str) -> None:
    """From three anchors of an answer, the loss of DSpark's paper, by the reference's own graph."""
    made = blocks(name, anchors=3)
    pairs = made.pairs(ANSWERS[0], 7)
    assert len(pairs) == 3 and pairs != made.pairs(ANSWERS[0], 8) and pairs == made.pairs(ANSWERS[0], 7)
    objective = ChainObjective(made, text(*ANSWERS[:1]), loss_from_spec("kl=0.1,tv=1.8"), 0.7)
    loss = objective.accumulate(torch.tensor([[0, 5, 7]]), 1.0)["loss"]
    found = {key: each.grad.clone() for key, each in made.head.named_parameters() if each.grad is not None}
    made.head.zero_grad()
    reference, whole = BlockReference(as_transformers_runs_it(), made.head), PROMPT + ANSWER
    with torch.no_grad():
        targets = reference.model(torch.tensor([whole])).logits[0].log_softmax(-1)
    total, divergence = torch.zeros(()), 0.0
    for step in range(made.head.reach):
        anchors = [pair + 1 for pair in pairs if pair + 1 + step < len(whole) - 1]
        for anchor in anchors:
            logits, said = reference.draft_logits(whole[: anchor + 1], whole[anchor + 1 : anchor + 1 + step])
            q, log_p = logits.log_softmax(-1), targets[anchor + step]
            log_p = log_p if made.head.draft_ids is None else log_p[made.head.draft_ids]
            p = log_p.exp()
            own = 0.1 * (p * (log_p - q)).sum() + 0.9 * (p - q.exp()).abs().sum()
            divergence += 0.7**step * float(own.detach()) / len(anchors)
            if made.head.confidence_head is not None:
                accepted = torch.minimum(p, q.exp()).sum().detach()
                chance = torch.sigmoid(said)
                own = own - accepted * chance.log() - (1 - accepted) * (1 - chance).log()
            total = total + 0.7**step * own / len(anchors)
    total.backward()
    assert loss == pytest.approx(divergence, rel=1e-4)
    for key, each in made.head.named_parameters():
        expected = torch.zeros_like(each) if each.grad is None else each.grad
        torch.testing.assert_close(found.get(key, torch.zeros_like(each)), expected, rtol=2e-3, atol=2e-5)
    assert len(found) == len(list(made.head.parameters()))


@pytest.mark.parametrize("name", SHAPES)
def test_shares_of_processes_add_up(name: str) -> None:
    made = blocks(name, anchors=4)
    objective = ChainObjective(made, text(*ANSWERS), loss_from_spec("kl"), None)
    batch = torch.tensor([[0, 5, 7], [6, 6, 8], [13, 1, 9]])
    assert_shares_add_up(objective, made.head, batch, slice(0, 2), slice(2, 3))


def test_what_cannot_be_trained_is_refused() -> None:
    for options, said in (
        ({"loss": "ce"}, "must compare distributions"),
        ({"anchors": 0}, "anchors"),
        ({"stage": 2}, "1"),
    ):
        with pytest.raises(OptionError, match=said):
            DFlashTrainingConfig(**options)
    with pytest.raises(OptionError, match="markov"):
        DSparkTrainingConfig(markov=0)


CONFIGS: dict[str, Any] = {
    "DFlash": (DFlashTrainingConfig, DFlash, {"anchors": 6}),
    "DSpark": (DSparkTrainingConfig, DSpark, {"anchors": 4, "markov": 8, "markov_kind": "rnn", "by_acceptance": True}),
    "P-EAGLE": (PEagleTrainingConfig, PEagle, {"depth": 2, "own_embedding": True}),
}


@pytest.fixture
def prompts(stream: Any) -> PromptSets:
    pieces = [stream[first : first + 12].tolist() for first in range(0, 900, 30)]
    return PromptSets(pieces[:20], pieces[20:26], pieces[26:], stream[900:1000])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_head_is_trained_measured_and_saved(name: str, learned_folder: Any, prompts: Any, tmp_path: Any) -> None:
    made, drafter, more = CONFIGS[name]
    config = made(
        tokens=400, writing=WritingConfig(answer_tokens=16, batch=8), steps=30, learning_rate=1e-2, length=4,
        positions_per_step=64, evaluate_every=10, layers=(0, 1), draft_vocab=64, **more,
    )  # fmt: skip
    result = train_heads(learned_folder, prompts, tmp_path, config)
    kept, target = config.head.load(tmp_path), load_model(learned_folder)
    assert kept.config.layers == (0, 1) and kept.record.fingerprint == target.fingerprint
    sizes = [each.about.get("num_speculative_tokens", 0) for each in result.report.evaluations]
    assert sizes == [2, 4, 0, 2, 4, 0]
    assert result.report.evaluations[1].stats.accepted_tokens > 10
    assert all(1.0 <= each.about["promised"] <= 5.0 for each in result.report.evaluations)
    assert (tmp_path / "work" / "log.jsonl").read_text().count(f"{config.head.place_word}_4_top_1") >= 3
    prompt = prompts.test[0]
    answer = Engine(target, drafter(kept), controller="fixed").generate([prompt], SamplingParams(max_tokens=16))[0]
    assert answer.token_ids == Engine(target).generate([prompt], SamplingParams(max_tokens=16))[0].token_ids
    assert f"{config.head.kind}:FOLDER" in (tmp_path / "README.md").read_text()
    assert len(list(itertools.chain(tmp_path.glob("*.safetensors")))) == 1


class _StoppedError(Exception):
    pass


@pytest.mark.parametrize("name", ["DSpark", "P-EAGLE"])
def test_an_interrupted_training_goes_on_to_the_same_bits(
    name: str, learned_folder: Any, prompts: Any, tmp_path: Any
) -> None:
    made, _, more = CONFIGS[name]
    few = PromptSets(prompts.train[:6], prompts.tree[:2], prompts.test[:2], prompts.text)

    def weights(folder: Any, steps: Any) -> dict[str, Tensor]:
        config = made(
            tokens=100, writing=WritingConfig(answer_tokens=16, batch=8), steps=4, length=2, positions_per_step=32,
            layers=(0, 1), draft_vocab=64, checkpoint_every_s=0.0, **more,
        )  # fmt: skip
        stops = iter(steps)

        def on_checkpoint(saved: Any) -> None:
            if saved.step == next(stops, None):
                raise _StoppedError

        for _ in range(len(steps)):
            with pytest.raises(_StoppedError):
                train_heads(learned_folder, few, folder, config, callbacks=Callbacks(on_checkpoint=on_checkpoint))
        train_heads(learned_folder, few, folder, config)
        state: dict[str, Tensor] = made.head.load(folder).state_dict()
        return state

    whole, parts = weights(tmp_path / "whole", ()), weights(tmp_path / "parts", (1,))
    assert all(parts[name].equal(each) for name, each in whole.items())


@pytest.mark.parametrize("name", [*SHAPES, "P-EAGLE"])
@pytest.mark.parametrize("shape", [{}, {"nodes": 8, "beams": 3}], ids=["chain", "tree"])
def test_what_is_foretold_greedily_is_what_the_engine_serves(name: str, shape: dict[str, int]) -> None:
    model = target()
    prompts = [PROMPT, [7], [*PROMPT, 8, 1, 30]]
    params = SamplingParams(max_tokens=24)
    answers = Engine(model).generate(prompts, params)
    records = [
        WrittenAnswer(prompt, list(each.token_ids), 0.0, False) for prompt, each in zip(prompts, answers, strict=True)
    ]
    head = random_head(*(SHAPES | MASKED)[name])
    made: Any = {DFlashHead: DFlash, DSparkHead: DSpark, PEagleHead: PEagle}[type(head)]
    found = predicted(model, text(*records), 0.0, made(head, **shape))
    counted = [each.stats for each in Engine(model, made(head, **shape), controller="fixed").generate(prompts, params)]
    calls = sum(each.target_calls for each in counted)
    assert found is not None and found.value == pytest.approx(3 * 23 / calls)


@pytest.mark.parametrize("shape", [{}, {"branching": (3, 1)}], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["DFlash", "recurrent", "EAGLE-3", "P-EAGLE"])
def test_what_is_foretold_of_draws_follows_each_draft_along_the_answer(name: str, shape: dict[str, Any]) -> None:
    """By the page: what the draft behind a place gives to each token, given those before it, against the target's."""
    model = target()
    if name == "EAGLE-3":
        reference: Any = EagleReference(as_transformers_runs_it(), random_eagle(SIZES))
        made: Any = Eagle3(reference.made, **shape)
    elif name == "P-EAGLE":
        reference = PEagleReference(as_transformers_runs_it(), random_head(*MASKED[name]))
        made = PEagle(reference.made, **shape)
    else:
        reference = BlockReference(as_transformers_runs_it(), random_head(*SHAPES[name]))
        made = (DFlash if name == "DFlash" else DSpark)(reference.made, **shape)
    prompts = [PROMPT, [7]]
    answers = Engine(model, entropy=4).generate(prompts, SamplingParams(max_tokens=10, temperature=1.0))
    records = [
        WrittenAnswer(prompt, list(each.token_ids), 1.0, False) for prompt, each in zip(prompts, answers, strict=True)
    ]
    found = predicted(model, text(*records), 1.0, made)
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
    assert found is not None and found.value == pytest.approx(2 * 9 / calls, rel=0.03 if shape else 1e-4)


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


@pytest.mark.parametrize(
    ("kept", "tied", "own"), [(40, True, True), (64, True, False), (0, True, False), (99, False, True)]
)
def test_a_head_over_all_ids_ends_in_the_targets_lm_head(kept: int, tied: bool, own: bool) -> None:
    """So that other engines read it; one over fewer ids has its own, of as many rows."""
    made = DFlashTrainingConfig(draft_vocab=kept, tied=tied).entries(48, 64)
    assert (made["own_output"], made["draft_vocab"]) == (own, 40 if kept == 40 else 0)
