"""Encoder-decoders: answers as of transformers, whatever drafts; the source is read once, and copied from."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from support.pairwise import by_turns
from support.tiny_models import CONTEXT, DRAFTED, PROMPTS, VOCAB, build, drafter_of, encoder_decoder
from truedraft import Engine, SamplingParams
from truedraft.core.noise import KeyedNoise
from truedraft.core.token_view import TokenView
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.drafters import DraftModel, PromptLookup
from truedraft.drafters.base import DraftRequest
from truedraft.engine import BeamSearch
from truedraft.errors import CompositionError, ModelError, OptionError, PromptError, UnsupportedModelError
from truedraft.models.base import Segment
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.sources import Sources

COUNT = 24
_IDS: dict[str, Any] = {"vocab_size": VOCAB, "forced_eos_token_id": None}
_BART: dict[str, Any] = _IDS | {
    "d_model": 48, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64,
    "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,  # tied, a wide random model repeats its last token
}  # fmt: skip
_T5: dict[str, Any] = _IDS | {
    "d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4, "initializer_factor": 1.0
}  # fmt: skip
_STARTS: dict[str, Any] = {"eos_token_id": 2, "decoder_start_token_id": 2, "pad_token_id": 1, "bos_token_id": 0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", _T5 | {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}),
    "t5 gated": ("t5", _T5 | {
        "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False}),
    "mt5": ("mt5", _T5 | {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}),
    "bart": ("bart", _BART | _STARTS),
    "mbart to a language": ("mbart", _BART | _STARTS | {"forced_bos_token_id": 7}),
    "m2m_100": ("m2m_100", _BART | _STARTS),
    "pegasus": ("pegasus", _BART | {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}),
    "marian": ("marian", _BART | {"eos_token_id": 0, "pad_token_id": 96, "decoder_start_token_id": 96}),
    "blenderbot": ("blenderbot", _BART | {"eos_token_id": 2, "bos_token_id": 1, "decoder_start_token_id": 1,
        "pad_token_id": 0}),
}  # fmt: skip
SEEDS = {"bart": 3}  # whose answers wander
WAYS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=COUNT),
    "seeded": SamplingParams(max_tokens=COUNT, temperature=1.0, seed=5),
}


def config(family: str) -> PretrainedConfig:
    kind, sizes = FAMILIES[family]
    made: PretrainedConfig = AutoConfig.for_model(kind, **sizes)
    return made


def stock(family: str, noise: float = 0.0) -> PreTrainedModel:
    """With weights wide enough for answers to wander; with noise on them, a draft that often agrees."""
    model = build(config(family), SEEDS.get(family, 1), encodes=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for name, weight in model.named_parameters():
            if "relative_attention_bias" not in name and weight.dim() > 1:
                weight.data *= (0.3 if "t5" in family else 1.0) / weight.std()
            weight.data += noise * weight.std(unbiased=False) * torch.randn_like(weight)
    return model


@cache
def target(family: str, noise: float = 0.0) -> HuggingFaceModel:
    return encoder_decoder(stock(family, noise), family)


def sources(family: str) -> list[list[int]]:
    """Ragged, as the family's tokenizer would end them."""
    layout = target(family).sources
    assert layout is not None
    special = {layout.start, layout.end, *layout.forced}
    return [[*(token for token in prompt if token not in special), layout.end] for prompt in PROMPTS]


stock_once = cache(stock)


@cache
@torch.inference_mode()
def by_transformers(family: str, source: tuple[int, ...], **options: Any) -> list[int]:
    ids = torch.tensor([source])
    forced = target(family).sources.forced  # type: ignore[union-attr]
    given = {"do_sample": False, "max_new_tokens": COUNT + len(forced), "num_beams": 1} | options
    found = stock_once(family).generate(ids, attention_mask=torch.ones_like(ids), **given)[0].tolist()
    answer: list[int] = found[1 + len(forced) :]
    ends = [place for place, token in enumerate(answer) if token in target(family).eos_token_ids]
    return answer[: ends[0]] if ends else answer


@pytest.mark.parametrize(("family", "drafted"), by_turns(FAMILIES, DRAFTED, always=["tree"]))
def test_greedy_equals_transformers(family: str, drafted: str) -> None:
    """Alone and in a ragged batch."""
    prompts = sources(family)
    expected = [by_transformers(family, tuple(prompt)) for prompt in prompts]
    assert max(len(set(answer)) for answer in expected) >= 6
    engine = Engine(target(family), drafter_of(drafted, target(family, 0.05)), controller="fixed")
    answers = engine.generate(prompts, WAYS["greedy"])
    assert [answer.token_ids for answer in answers] == expected
    if drafted == "none":  # texts run one by one in a batch, too
        assert engine.generate(prompts[1], WAYS["greedy"]).token_ids == expected[1]
    assert not any(answer.warnings for answer in answers)
    assert not engine.check_idle()
    if drafted in ("chain", "tree"):
        assert sum(answer.stats.accepted_tokens for answer in answers) > 0


@pytest.mark.parametrize(("family", "drafted"), by_turns(["t5", "bart"], DRAFTED[1:], always=["tree"]))
def test_seeded_answers_are_those_of_plain_decoding(family: str, drafted: str) -> None:
    prompts = sources(family)
    plain = Engine(target(family)).generate(prompts, WAYS["seeded"])
    found = Engine(target(family), drafter_of(drafted, target(family, 0.05)), controller="fixed").generate(
        prompts, WAYS["seeded"]
    )
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]


@torch.inference_mode()
@pytest.mark.parametrize("rule", ["speculative", "block"])
@pytest.mark.parametrize("family", ["t5", "marian"])
def test_sampled_tokens_have_the_probabilities_of_transformers(family: str, rule: str) -> None:
    prompts = sources(family)
    params = SamplingParams(max_tokens=COUNT, temperature=1.0, logprobs=0)
    engine = Engine(target(family), DraftModel(target(family, 0.05), 4), rule, controller="fixed", entropy=3)
    for prompt, answer in zip(prompts, engine.generate(prompts, params), strict=True):
        begun = [target(family).sources.start, *answer.token_ids]  # type: ignore[union-attr]
        rows = stock_once(family)(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([begun])).logits[0]
        logs = torch.log_softmax(rows.float(), dim=-1)
        told = [each.logprob for each in answer.logprobs or ()]
        expected = [float(logs[place, token]) for place, token in enumerate(answer.token_ids)]
        assert told == pytest.approx(expected, abs=1e-3)


def test_prompt_lookup_copies_from_what_the_encoder_reads() -> None:
    layout = target("t5").sources
    assert layout is not None
    request = DraftRequest(0, WAYS["greedy"], TokenView([*layout.text([5, 6, 7, 8, 9, layout.end]), 6]))
    lookup = PromptLookup(min_ngram=1)
    lookup.begin(request)
    proposal = lookup.propose([request], [lookup.limits], [KeyedNoise(0, 0, 0)])[0]
    assert list(proposal.tree.host_ids)[:3] == [7, 8, 9]


def test_a_long_source_is_read_in_parts_and_encoded_once() -> None:
    layout = target("t5").sources
    assert layout is not None
    source = [*((11 * place * place + 5 * place) % 90 + 3 for place in range(700)), layout.end]
    encoder, calls = target("t5").module.get_encoder(), []
    hook = encoder.register_forward_hook(lambda *_: calls.append(1))
    try:
        engine = Engine(target("t5"), DraftModel(target("t5", 0.05), 4), controller="fixed")
        found = engine.generate(source, WAYS["greedy"])
    finally:
        hook.remove()
    assert found.token_ids == by_transformers("t5", tuple(source))
    assert len(calls) == 1


def test_samples_of_one_prompt_share_what_the_encoder_read() -> None:
    source = sources("bart")[1]
    params = SamplingParams(max_tokens=COUNT, temperature=1.0, seed=5, n=3)
    engine = Engine(target("bart"), DraftModel(target("bart", 0.05), 4), controller="fixed")
    alone = Engine(target("bart"), prefix_cache_bytes=0)
    assert [each.token_ids for each in engine.generate([source, source], params)] == [
        each.token_ids for each in alone.generate([source, source], params)
    ]
    assert engine.shared_tokens > 0
    assert not engine.check_idle()


def test_little_memory_gives_the_same_answers() -> None:
    prompts = sources("t5")
    plain = Engine(target("t5")).generate(prompts, WAYS["greedy"])
    tight = Engine(target("t5"), DraftModel(target("t5", 0.05), 4), controller="fixed", max_cache_bytes=700_000)
    assert [a.token_ids for a in tight.generate(prompts, WAYS["greedy"])] == [a.token_ids for a in plain]


@torch.inference_mode()
@pytest.mark.parametrize("path", [(0,), (0, 1), (0, 2), (0, 2, 3)])
def test_the_cache_behind_a_verdict_is_that_of_its_tokens(path: tuple[int, ...]) -> None:
    model = target("bart")
    layout = model.sources
    assert layout is not None
    text = layout.text([5, 6, 7, layout.end])
    drafted = torch.tensor([9, 10, 11, 12])
    cache, fresh = model.new_cache(), model.new_cache()
    model.forward([Segment(cache, torch.tensor(text), chain_shape(len(text)), (), prompt=len(text))])
    cache.commit(range(len(text)))
    model.forward([Segment(cache, drafted, TreeShape((-1, 0, 0, 2)), range(4))])
    cache.commit(path)
    whole = [*text, *(int(drafted[node]) for node in path)]
    model.forward([Segment(fresh, torch.tensor(whole), chain_shape(len(whole)), (), prompt=len(whole))])
    fresh.commit(range(len(whole)))
    assert cache.length == fresh.length == len(whole) and cache.family.memory == 4
    for ours, theirs in zip(cache.entries(), fresh.entries(), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.allclose(one, other, atol=1e-5)
    cache.rollback(2)
    assert cache.family.memory == 0 and cache.family.source[:2] == [5, 6]


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_beams_are_those_of_transformers(family: str) -> None:
    for source in sources(family)[:2]:
        found = BeamSearch(target(family), target(family, 0.05), num_beams=3).generate(source, COUNT)
        ends = target(family).eos_token_ids
        tokens = [token for token in found.beams[0].token_ids if token not in ends]
        assert tokens == by_transformers(family, tuple(source), num_beams=3)


def test_a_repetition_penalty_looks_at_the_answer_alone() -> None:
    source = sources("t5")[1]
    found = Engine(target("t5")).generate(source, SamplingParams(max_tokens=COUNT, repetition_penalty=1.7))
    assert found.token_ids == by_transformers("t5", tuple(source), repetition_penalty=1.7)


@pytest.mark.parametrize(("start", "end"), [(0, 1), (2, 2)])
def test_where_a_source_ends(start: int, end: int) -> None:
    layout = Sources(start, end, (9,), 8)
    text = layout.text([5, 6, end])
    assert text == [5, 6, end, start, 9]
    assert layout.length(text) == 3 and layout.length(text[:3]) is None
    assert layout.length([*text, 7, start, end, start]) == 3
    assert layout.length(layout.opening) == 4
    assert layout.text([*text, 8], continues=True) == [*text, 8]
    with pytest.raises(PromptError, match="cannot tell where the encoder's ends"):
        layout.text(text)
    with pytest.raises(PromptError, match="9 tokens, and the encoder reads at most 8"):
        layout.text([5] * 8 + [end])


def test_what_cannot_be_asked_for() -> None:
    engine = Engine(target("bart"))
    with pytest.raises(PromptError, match="ends in token id 6; end it with 2"):
        engine.generate([5, 6], WAYS["greedy"])
    with pytest.raises(OptionError, match="prompt_logprobs"):
        engine.generate([5, 2], SamplingParams(prompt_logprobs=1))
    with pytest.raises(PromptError, match="encoder reads at most 256"):
        engine.generate([*[5] * 300, 2], WAYS["greedy"])
    long = engine.generate([5, 2], SamplingParams(max_tokens=1000, ignore_eos=True))
    assert long.finish_reason == "length" and len(long.token_ids) == CONTEXT - 1  # behind the decoder's start
    with pytest.raises(ModelError, match="between what the encoder reads and what the decoder writes"):
        target("bart").forward([Segment(target("bart").new_cache(), torch.tensor([5, 6]), chain_shape(2), (1,))])


def test_a_draft_of_another_kind_is_refused() -> None:
    with pytest.raises(CompositionError, match="do not begin as its own do"):
        Engine(target("bart"), DraftModel(target("t5"), 4))
    model = stock("t5")
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
    model.config.bos_token_id = model.generation_config.bos_token_id = None
    with pytest.raises(UnsupportedModelError, match="decoder_start_token_id; add it"):
        encoder_decoder(model, "t5")
