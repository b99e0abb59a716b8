"""Parts with one thing changed: what is changed is, all else is shared, and the part itself stays as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.tiny_models import PROMPTS, packed
from truedraft import Engine, SamplingParams
from truedraft.core.noise import KeyedNoise
from truedraft.core.proposal import Proposal
from truedraft.core.tree import TokenTree, chain_shape
from truedraft.drafters import DraftModel
from truedraft.models.base import LanguageModel, Segment
from truedraft.testing import MarkovModel, altered, reduced, scaled
from truedraft.verification import SpeculativeSampling
from truedraft.verification.rule import BatchVerdicts


def last_logits(model: LanguageModel, text: list[int]) -> Tensor:
    """`[vocab]`: after a text."""
    cache = model.new_cache()
    try:
        return model.forward([Segment(cache, torch.tensor(text), chain_shape(len(text)), (len(text) - 1,))]).logits[0]
    finally:
        model.release_cache(cache)


def test_a_method_is_another_and_all_else_is_shared() -> None:
    model = MarkovModel.random(4, seed=0)
    forwards = []
    watched = altered(model, forward=lambda segments: forwards.append(len(segments)) or model.forward(segments))
    assert watched.probs is model.probs and watched.pool is model.pool and watched.vocab_size == 4
    assert torch.equal(last_logits(watched, [1, 2]), last_logits(model, [1, 2]))
    assert forwards == [1]


def test_an_attribute_that_there_is_not_is_refused() -> None:
    with pytest.raises(AttributeError, match="forwards"):
        altered(MarkovModel.random(4, seed=0), forwards=lambda segments: None)


@pytest.mark.parametrize("model", [MarkovModel.random(8, seed=1), packed("llama")], ids=["markov", "llama"])
def test_an_engine_answers_with_altered_parts_as_with_the_parts_themselves(model: LanguageModel) -> None:
    params = SamplingParams(max_tokens=12)
    prompt = [token % model.vocab_size for token in PROMPTS[0]]
    expected = Engine(model, DraftModel(model), controller="fixed").generate(prompt, params)
    seen: list[int] = []
    drafter = DraftModel(altered(model))
    watched = altered(drafter, observe=lambda batch, out: seen.append(len(out)) or drafter.observe(batch, out))
    found = Engine(altered(model), watched, altered(SpeculativeSampling()), controller="fixed").generate(prompt, params)
    assert found.token_ids == expected.token_ids and found.stats == expected.stats
    assert seen and not drafter.held.requests


def test_scaled_logits_are_those_of_another_temperature() -> None:
    model = packed("llama")
    assert torch.equal(last_logits(scaled(model, 2.0), PROMPTS[0]), last_logits(model, PROMPTS[0]) * 2.0)


def test_a_reduced_model_gives_only_what_is_kept_also_through_its_lm_head() -> None:
    model, kept = packed("llama"), [3, 5]
    only = reduced(model, kept)
    whole, cut = last_logits(model, PROMPTS[0]), last_logits(only, PROMPTS[0])
    assert torch.equal(cut[kept], whole[kept]) and cut.isfinite().sum() == 2
    vectors = torch.randn(3, model.head_width, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    assert torch.equal(only.unembed(vectors)[:, kept], model.unembed(vectors)[:, kept])
    assert set(only.likeliest(vectors, 2).ids.flatten().tolist()) == set(kept)
    assert only.shared_heads([]) is None


def test_a_rule_that_decides_otherwise_verifies_otherwise() -> None:
    rule = SpeculativeSampling()
    asked: list[int] = []

    def accept(*given) -> BatchVerdicts:  # type: ignore[no-untyped-def]
        asked.append(len(given[0]))
        return rule.accept(*given)

    given = [Proposal.deterministic(TokenTree.chain([1]))], [torch.full((2, 4), 0.25)], [KeyedNoise(1, 0, 0)]
    assert altered(rule, accept=accept).verify(*given) == rule.verify(*given)
    assert asked == [1]


def test_forwards_that_show_layers_have_the_other_logits_too() -> None:
    """Heads that read layers make the engine ask so."""
    model = packed("llama")

    def shown(asked: LanguageModel) -> tuple[Tensor, Tensor]:
        cache = model.new_cache()
        try:
            count = len(PROMPTS[0])
            output = asked.forward_showing([Segment(cache, torch.tensor(PROMPTS[0]), chain_shape(count), (0, 1))], (0,))
            return output.logits, output.layers[0]
        finally:
            model.release_cache(cache)

    logits, layer = shown(model)
    for other, expected in ((scaled(model, 2.0), logits * 2.0), (reduced(model, [3, 5]), logits)):
        found, same = shown(other)
        finite = found.isfinite()
        assert torch.equal(found[finite], expected[finite]) and torch.equal(same, layer)
    assert shown(reduced(model, [3, 5]))[0].isfinite().sum() == 4
