"""Draft models that learn: in which form what was promoted serves, what of the old one is left, and which cannot."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from support.gguf_files import write
from support.parallel_drafting import beside, tiny_llama
from support.tiny_models import FAMILIES, packed, stock
from support.two_domains import Unthreaded, drafter_of, learning, prompts, trained, two_domains, untrained
from truedraft import Engine, SamplingParams, load_model
from truedraft.core.tree import chain_shape
from truedraft.drafters import DraftModel, from_spec
from truedraft.drafters.registry import read_draft_ids
from truedraft.errors import CompositionError
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.translated import TranslatedModel
from truedraft.training.online.learnable import LearnableDrafts
from truedraft.training.online.student import Candidate
from truedraft.training.online.traffic import Answered

GREEDY = SamplingParams(max_tokens=16)
PROMPT = [3, 9, 2, 30, 7]


def logits(model: LanguageModel) -> Tensor:
    """Along a text."""
    ids, cache = torch.arange(3, 40), model.new_cache()
    with torch.inference_mode():
        found = model.forward([Segment(cache, ids, chain_shape(len(ids)), range(len(ids)))]).logits.clone()
    model.release_cache(cache)
    return found


def moved(module: Any) -> Candidate:
    """Another module of the same shapes."""
    other, generator = copy.deepcopy(module), torch.Generator().manual_seed(0)
    for weight in other.parameters():
        weight.data += weight.std() * torch.randn(weight.shape, generator=generator).to(weight.dtype)
    return Candidate(other)


@pytest.mark.parametrize("weights", [None, "q4"])
def test_what_is_promoted_serves_in_the_form_of_the_first_and_lies_as_a_folder(
    weights: str | None, tmp_path: Path
) -> None:
    target, draft = load_model("embedded:target"), load_model("embedded:draft", weights=weights)
    first, form = logits(draft), (draft.fast_paths, draft.weight_bytes)
    learner = Unthreaded(tmp_path)
    ids = torch.arange(90, 5, -1)
    drafter = DraftModel(draft, 3, ids=ids)
    engine = Engine(target, drafter, controller="fixed", learner=learner)
    plain = Engine(load_model("embedded:target")).generate(PROMPT, GREEDY).token_ids
    learner.student._promote(moved(learner.student.origin.module))
    assert torch.equal(logits(draft), first)
    assert engine.generate(PROMPT, GREEDY).token_ids == plain
    folder = tmp_path / "draft" / "versions" / "1"
    loaded = load_model(folder, weights=weights)
    assert torch.equal(logits(draft), logits(loaded)) and not torch.equal(logits(draft), first)
    assert (draft.fast_paths, draft.weight_bytes) == form
    assert torch.equal(logits(drafter._guessing), logits(loaded)[:, ids.flip(0)])
    assert read_draft_ids(folder, target.vocab_size) == ids.tolist(), "the most frequent first, as they were"
    from_spec(f"draft:{folder}", target)  # with the target's tokenizer

    again = load_model("embedded:draft", weights=weights)
    restarted = Engine(target, DraftModel(again, 3), controller="fixed", learner=Unthreaded(tmp_path))
    assert restarted.generate(PROMPT, GREEDY).token_ids == plain and torch.equal(logits(again), logits(loaded))

    learner.student._roll_back(learner.student.origin)
    assert engine.generate(PROMPT, GREEDY).token_ids == plain and torch.equal(logits(draft), first)


def test_a_draft_of_a_gguf_file_learns_in_numbers_and_serves_with_few_bits(tmp_path: Path) -> None:
    file = str(write(tmp_path / "tiny.gguf", "llama", {"attn_v": "Q6_K", "": "Q4_K"}))
    draft = load_model(file)
    learnable = LearnableDrafts(DraftModel(draft, 3), draft, draft.lm_head())
    module = learnable.origin
    assert all(weight.dtype is draft.dtype for weight in module.parameters())
    with torch.no_grad():
        made = module(input_ids=torch.arange(3, 40)[None], use_cache=False).logits[0].float()
    expected = logits(draft).float()
    assert (made - expected).std() < 0.1 * expected.std()  # its inputs have 8 bits there
    learnable.change(moved(module).module)()
    assert draft._backend.bits == 4
    learnable.change(module)()
    assert torch.equal(logits(draft).float(), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_of_every_family_learn_and_serve_their_weights(family: str) -> None:
    draft, target = HuggingFaceModel(stock(family), None, family), packed("llama")
    before, learnable = logits(draft), LearnableDrafts(DraftModel(draft, 3), target, target.lm_head())
    answer = Answered(torch.arange(20), torch.randn(20, target.head_width), prompt=torch.arange(50, 56))
    shadow = copy.deepcopy(learnable.origin).requires_grad_(True)
    assert learnable.learn(shadow, [answer], [answer], random.Random(0)) == 20
    assert all(weight.grad is not None for weight in shadow.parameters())
    learnable.change(copy.deepcopy(learnable.origin))()
    assert torch.equal(logits(draft), before)
    learnable.change(moved(learnable.origin).module)()
    assert not torch.equal(logits(draft), before)


def test_behind_a_swap_nothing_is_left_of_what_the_old_one_read() -> None:
    """Prompts that both read in part, whose keys and values are kept: as many calls as with a draft that began anew."""
    target, old, new = two_domains(), untrained(LlamaForCausalLM, 1), trained(LlamaForCausalLM)
    asked, params = [each * 25 for each in prompts(0, 4)], SamplingParams(max_tokens=40)
    learner = Unthreaded()
    engine = Engine(target, drafter_of(old), controller="fixed", learner=learner, prefix_cache_bytes=1 << 20)
    before = engine.generate(asked, params)
    assert isinstance(engine.drafter, DraftModel) and engine.drafter.prefixes.n_bytes > 0
    learner._serve(None, "draft", new)
    after = engine.generate(asked, params)
    fresh = learning(new, None).generate(asked, params)
    assert [each.stats.target_calls for each in after] == [each.stats.target_calls for each in fresh]
    assert sum(each.stats.target_calls for each in before) > 1.5 * sum(each.stats.target_calls for each in after)


def test_the_gradient_is_that_of_whole_texts() -> None:
    """Of the loss over all tokens of an answer, by transformers' own logits of the whole text."""
    head = untrained(LlamaForCausalLM)
    learnable = LearnableDrafts(drafter_of(head), two_domains(), two_domains().lm_head())
    seen: list[Any] = []
    learner = Unthreaded()
    learner._take = lambda scope, answer: seen.append(answer)  # type: ignore[method-assign]
    learning(head, learner).generate(prompts(0, 3), SamplingParams(max_tokens=20, temperature=1.0))
    shadow, whole = (copy.deepcopy(learnable.origin).requires_grad_(True) for _ in range(2))
    assert learnable.learn(shadow, seen, seen, SimpleNamespace(randrange=lambda _: 0)) == 60  # type: ignore[arg-type]
    total = torch.zeros(())
    for each in seen:
        text = torch.cat([each.prompt, each.tokens])
        student = whole(input_ids=text[None, :-1], use_cache=False).logits[0, len(each.prompt) - 1 :].log_softmax(-1)
        probs = torch.stack([two_domains().probs_after(text[:end].tolist()) for end in range(4, 24)]).float()
        kl = (probs * (probs.log() - student)).sum(-1)
        total = total + (0.5 * kl + 0.25 * (probs - student.exp()).abs().sum(-1)).sum() / 60
    total.backward()
    for own, expected in zip(shadow.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, rtol=1e-4, atol=1e-6)


def test_which_cannot_is_said_in_a_sentence() -> None:
    target = two_domains()
    with pytest.raises(CompositionError, match="it learns for all clients together; leave learning for each tenant"):
        learning(untrained(LlamaForCausalLM), Unthreaded(per_tenant=True))
    parallel, _ = beside(tiny_llama())
    with pytest.raises(CompositionError, match="drafts in another process, whose weights stay; leave async out"):
        LearnableDrafts(parallel, target, target.lm_head())
    foreign = object.__new__(TranslatedModel)
    foreign.name = "other"
    for model, message in (
        (foreign, "its tokenizer is not the target's"),
        (two_domains(), "is no causal model of text alone"),
    ):
        drafter = drafter_of(untrained(LlamaForCausalLM))
        drafter.model = model
        with pytest.raises(CompositionError, match=message):
            LearnableDrafts(drafter, target, target.lm_head())
    packed: Any = drafter_of(untrained(LlamaForCausalLM))
    packed.model.module.cut_into = 2
    with pytest.raises(CompositionError, match=r"can learn while it serves \('draft': the weights of tiny were padded"):
        Engine(target, packed, learner=Unthreaded())
