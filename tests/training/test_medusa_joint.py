"""Stage 2: heads and target together, whole or by adapters, and what it leaves behind."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from training.head_runs import same_weights
from truedraft import Engine, load_model
from truedraft.errors import MissingExtraError
from truedraft.kinds.medusa.drafter import Medusa
from truedraft.kinds.medusa.module import MedusaConfig, MedusaHeads
from truedraft.kinds.medusa.training import MedusaTrainingConfig
from truedraft.models.architecture import load_causal_lm
from truedraft.training import joint
from truedraft.training.head_config import HeadLoss, JointConfig
from truedraft.training.heads import train_heads
from truedraft.training.joint import Backbone, JointObjective, rank_for
from truedraft.training.loop import Callbacks, trained_weights
from truedraft.training.losses import ForwardKL
from truedraft.training.texts.answer_writer import WritingConfig
from truedraft.training.texts.data import load_tokenizer
from truedraft.training.texts.prompts import PromptSets

WHOLE = JointConfig(steps=5, tokens_per_step=64, length=32, lora_rank=0)
CONFIG = MedusaTrainingConfig(
    heads=2, stage=2, tokens=200, writing=WritingConfig(answer_tokens=16, batch=8), steps=4, learning_rate=2e-2,
    positions_per_step=64, window=8, checkpoint_every_s=0.0, joint=WHOLE,
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("short_answers")


@pytest.fixture(scope="module")
def prompts(stream):
    pieces = [stream[first : first + 12].tolist() for first in range(0, 600, 30)]
    return PromptSets(pieces[:12], pieces[12:17], pieces[17:], stream[600:800])


@pytest.fixture(scope="module")
def trained(target_folder, prompts, tmp_path_factory, short_answers):
    out = tmp_path_factory.mktemp("joint")
    return out, train_heads(target_folder, prompts, out, CONFIG)


def test_it_writes_an_ordinary_target_and_heads_for_it(trained, target_folder, prompts):
    out, result = trained
    target = load_model(out / "target")
    checkpoint = MedusaHeads.load(out)
    assert checkpoint.record.fingerprint == target.fingerprint != load_model(target_folder).fingerprint
    assert load_tokenizer(out / "target").get_vocab() == load_tokenizer(target_folder).get_vocab()
    plain = Engine(target).generate(prompts.test[0])
    drafted = Engine(target, Medusa(MedusaHeads.load(out)), controller="fixed").generate(prompts.test[0])
    assert drafted.token_ids == plain.token_ids
    assert MedusaHeads.load(out / "stage-1").record.fingerprint == load_model(target_folder).fingerprint
    assert result.effort.steps == 5


def test_the_report_holds_both_losses_and_both_acceptances(trained, target_folder, prompts):
    _, result = trained
    report = result.joint
    assert report is not None and report.lora_rank == 0 and report.loss_tokens == len(prompts.text) - 1
    for folder, loss in ((target_folder, report.loss_before), (trained[0] / "target", report.loss_after)):
        model = load_causal_lm(folder, dtype="auto").eval()
        ids = torch.tensor(prompts.text.astype("int64"))
        total = 0.0
        for first in range(0, len(ids) - 1, 128):  # the context of the target
            block = ids[first : first + 129]
            logits = model(input_ids=block[None, :-1]).logits[0].float()
            total += functional.cross_entropy(logits, block[1:], reduction="sum").item()
        assert loss == pytest.approx(total / (len(ids) - 1), abs=1e-4)
    record = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert {each["nodes"] for each in record["joint"]["before"]["served"]} == {8, 32} or record["served"]


def test_resumed_after_a_kill_equals_uninterrupted_to_the_bit(trained, target_folder, prompts, tmp_path):
    class KilledError(Exception):
        pass

    trainings = []

    def kill(what, done, total, remark):
        if what == "training" and done == 1:
            trainings.append(total)
        if what == "training" and len(trainings) == 2 and done == 4:
            raise KilledError

    with pytest.raises(KilledError):
        train_heads(target_folder, prompts, tmp_path, CONFIG, callbacks=Callbacks(on_progress=kill))
    train_heads(target_folder, prompts, tmp_path, CONFIG)
    assert load_model(tmp_path / "target").fingerprint == load_model(trained[0] / "target").fingerprint
    assert same_weights(MedusaHeads, trained[0], tmp_path)


def test_gradients_of_both_losses_reach_the_target(target_folder):
    heads = MedusaHeads(MedusaConfig(32, 300, 2))
    backbone = Backbone(target_folder, 0, "cpu")
    batch = torch.randint(0, 300, (2, 17), generator=torch.Generator().manual_seed(1))
    found = {}
    for share in (0.2, 0.4):
        backbone.module.zero_grad()
        of_heads = HeadLoss(heads, backbone.lm_head, ForwardKL(), 0.8)
        JointObjective(backbone, of_heads, share).accumulate(batch, 1.0)
        found[share] = {name: weight.grad.clone() for name, weight in backbone.module.named_parameters()}
    # By hand, at share 0.4: heads see the distribution of the target before, two and three places on.
    backbone.module.zero_grad()
    output = backbone.module.model(input_ids=batch[:, :-1]).last_hidden_state
    before = backbone.logits_before(batch[:, :-1]).float().view(2, 16, 300)
    dist = backbone.module.lm_head(output).log_softmax(-1)
    total = (before.softmax(-1) * (before.log_softmax(-1) - dist)).sum(-1).mean()
    frozen = backbone.module.lm_head.weight.detach()
    for head in range(2):
        guess = (heads.heads[head].blocks(output[:, :14]) @ frozen.T).log_softmax(-1)
        total = total - 0.4 * 0.8**head * (before.softmax(-1)[:, 1 + head : 15 + head] * guess).sum(-1).mean()
    total.backward()
    for name, weight in backbone.module.named_parameters():
        assert torch.allclose(found[0.4][name], weight.grad, atol=2e-5), name
    assert any(not torch.equal(found[0.2][name], found[0.4][name]) for name in found[0.2])


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_adapters_are_trained_saved_alone_and_merged(trained, target_folder, prompts, tmp_path):
    stage_1 = replace(CONFIG, joint=replace(WHOLE, lora_rank=4, steps=3), start_from=trained[0] / "stage-1")
    result = train_heads(target_folder, prompts, tmp_path, stage_1)
    assert result.joint is not None and result.joint.lora_rank == 4
    state = torch.load(tmp_path / "work" / "joint" / "checkpoint.pt", weights_only=True)["model"]
    assert state and all("lora_" in name for name in state if name.startswith("backbone."))
    before, after = (load_causal_lm(folder) for folder in (target_folder, tmp_path / "target"))
    pairs = zip(before.named_parameters(), after.parameters(), strict=True)
    changed = {name for (name, one), other in pairs if not torch.equal(one, other)}
    assert changed and all("proj" in name for name in changed)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_with_adapters_the_target_before_can_still_be_asked(target_folder):
    backbone = Backbone(target_folder, 2, "cpu")
    ids = torch.arange(1, 13)[None]
    before = backbone.logits_before(ids)
    with torch.no_grad():
        for weight in backbone.module.parameters():
            if weight.requires_grad:
                weight.add_(0.3)
    assert torch.equal(backbone.logits_before(ids), before)
    assert not torch.equal(backbone.run(ids)[0], before)
    assert len(trained_weights(backbone.module)) > 2


@pytest.mark.parametrize("rank", [8, None])
def test_a_missing_peft_is_told_before_anything_runs(target_folder, prompts, tmp_path, monkeypatch, rank):
    monkeypatch.setattr(joint, "_WHOLE_PARAMETERS", 1000)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'truedraft\[train\]'"):
        train_heads(target_folder, prompts, tmp_path / "out", replace(CONFIG, joint=replace(WHOLE, lora_rank=rank)))
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert rank_for(15_000_000) == 0 and rank_for(7_000_000_000) == 32
