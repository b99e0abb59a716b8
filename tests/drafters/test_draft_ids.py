"""A draft model that guesses among some ids alone: its law, its proposals, and the ids that a folder records."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.certified import assert_certified
from truedraft import SamplingParams, load_model
from truedraft.certify.checks import Stack
from truedraft.core.noise import KeyedNoise
from truedraft.core.shaping import Shaping
from truedraft.drafters import DraftModel, DraftRequest, from_spec
from truedraft.drafters.registry import IDS, read_draft_ids, write_draft_ids
from truedraft.errors import ModelError, OptionError
from truedraft.models.base import ForwardOutput, Segment
from truedraft.models.embedded import embedded_folder
from truedraft.testing import MarkovModel
from truedraft.verification import SpeculativeSampling

VOCAB, IDS_OF_DRAFT = 6, torch.tensor([4, 1, 2])
TARGET = MarkovModel.random(VOCAB, seed=4, context_length=200)


class Narrowing(MarkovModel):
    """A draft whose forward can leave logits out."""

    ids: Tensor | None = None

    def narrowed(self, ids: Tensor) -> Narrowing:
        twin = copy.copy(self)
        twin.ids = ids
        return twin

    def forward(self, segments: list[Segment]) -> ForwardOutput:  # type: ignore[override]
        output = super().forward(segments)
        return output if self.ids is None else ForwardOutput(output.logits[:, self.ids], output.hidden)


def draft() -> Narrowing:
    return Narrowing.random(VOCAB, seed=5, context_length=200)


@pytest.mark.parametrize("options", [{}, {"branching": (2, 2)}, {"chains": 2}], ids=str)
def test_answers_are_certified(monkeypatch: pytest.MonkeyPatch, options: dict) -> None:
    stack = Stack(TARGET, DraftModel(draft(), 3, ids=IDS_OF_DRAFT, **options), SpeculativeSampling())
    assert_certified(monkeypatch, stack, [[1, 2], [0], [5, 3]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_its_proposals_are_of_its_ids_with_the_rest_of_the_distribution_spread_over_them(temperature: float) -> None:
    model = draft()
    drafter = DraftModel(model, 4, ids=IDS_OF_DRAFT)
    for seed in range(20):
        request = DraftRequest(seed, SamplingParams(temperature=temperature, max_tokens=24), [1, 0])
        drafter.begin(request)
        (proposal,) = drafter.propose([request], [drafter.limits], [KeyedNoise(seed, 2, 0)])
        drafter.end(request)
        proposal.check()
        assert set(proposal.tree.host_ids) <= set(IDS_OF_DRAFT.tolist())
        text = list(request.tokens)
        for place, token in enumerate(proposal.tree.host_ids):
            some = torch.zeros(VOCAB, dtype=torch.float64)
            some[IDS_OF_DRAFT] = model.probs_after(text)[IDS_OF_DRAFT]
            if proposal.probs is None:
                assert token == int(some.argmax())
            else:
                assert torch.allclose(proposal.probs[place].double(), some / some.sum())
            text.append(token)


def test_beside_a_request_with_penalties_distributions_are_whole() -> None:
    """The other one drafts further by itself, and its levels are of one width all the same."""
    model = draft()
    drafter = DraftModel(model, 4, ids=IDS_OF_DRAFT)
    params = SamplingParams(temperature=1.0, max_tokens=24)
    shaped = SamplingParams(temperature=1.0, max_tokens=24, frequency_penalty=0.5)
    text = [1, 0]
    requests = [
        DraftRequest(0, shaped, text, shaping=Shaping(shaped, list(text), 2, (), (), VOCAB)),
        DraftRequest(1, params, text),
    ]
    for request in requests:
        drafter.begin(request)
    noise = [KeyedNoise(number, 2, 0) for number in range(2)]
    budgets = [drafter.limits.cut(1), drafter.limits]
    first, second = drafter.propose(requests, budgets, noise)
    alone = DraftModel(draft(), 4, ids=IDS_OF_DRAFT)
    alone.begin(requests[1])
    (expected,) = alone.propose(requests[1:], budgets[1:], noise[1:])
    assert len(first.tree) == 1 and second.tree.host_ids == expected.tree.host_ids
    assert second.probs is not None and expected.probs is not None
    assert torch.allclose(second.probs, expected.probs)


def test_a_model_that_cannot_leave_logits_out_guesses_among_all() -> None:
    model = MarkovModel.random(VOCAB, seed=4)
    drafter = DraftModel(model, 4, ids=IDS_OF_DRAFT)
    request = DraftRequest(0, SamplingParams(), [1, 0])
    drafter.begin(request)
    (proposal,) = drafter.propose([request], [drafter.limits], [KeyedNoise(0, 2, 0)])
    assert proposal.tree.host_ids[0] == int(model.probs_after([1, 0]).argmax())


def test_a_folder_records_them_and_the_words_cut_them(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(embedded_folder("draft"), folder)
    target = load_model("embedded:target")
    assert getattr(from_spec(f"draft:{folder}", target), "ids") is None  # noqa: B009
    write_draft_ids(folder, [9, 3, 200, 5])
    for words, expected in (("", [9, 3, 200, 5]), (",draft_vocab=2", [9, 3]), (",draft_vocab=0", None)):
        ids = getattr(from_spec(f"draft:{folder}{words}", target), "ids")  # noqa: B009
        assert (None if ids is None else ids.tolist()) == expected
    with pytest.raises(OptionError, match=r"draft_vocab must be 0 \(all ids\) or more, got -1"):
        from_spec(f"draft:{folder},draft_vocab=-1", target)


@pytest.mark.parametrize("content", ["", "[1]", '{"ids": []}', '{"ids": [1, 1]}', '{"ids": [7]}', '{"ids": ["a"]}'])
def test_a_broken_record_is_refused_in_one_sentence(content: str, tmp_path: Path) -> None:
    assert read_draft_ids(tmp_path, 7) is None
    (tmp_path / IDS).write_text(content)
    with pytest.raises(ModelError, match="does not name different ids below 7; remove it"):
        read_draft_ids(tmp_path, 7)


def test_with_all_ids_none_are_left_out(tmp_path: Path) -> None:
    write_draft_ids(tmp_path, [2, 0, 1])
    assert read_draft_ids(tmp_path, 3) is None
    assert read_draft_ids(tmp_path, 4) == [2, 0, 1]
