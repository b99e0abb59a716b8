"""Encoder-decoders of text and sound: answers as of transformers, whatever drafts; a source is read once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, GenerationMixin, PreTrainedModel

from support.pairwise import by_turns
from support.tiny_models import CONTEXT, DRAFTED, PROMPTS, VOCAB, build, drafter_of, encoder_decoder
from support.verdicts import assert_same_entries, read, verdicts
from truedraft import Engine, SamplingParams, load_model
from truedraft.core.noise import KeyedNoise
from truedraft.core.token_view import TokenView
from truedraft.core.tree import TreeShape, chain_shape
from truedraft.drafters import DraftModel, PromptLookup
from truedraft.drafters.base import DraftRequest
from truedraft.engine import BeamSearch
from truedraft.engine.policy.measuring import Effort, measure_drafter, measure_target
from truedraft.engine.policy.sizes import ratio_of_steps
from truedraft.errors import CompositionError, ModelError, OptionError, PromptError, UnsupportedModelError
from truedraft.models import HuggingFaceModel, MultimodalPrompt, Segment
from truedraft.models.sources import Sound, Sources

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
_SOUND_IDS: dict[str, Any] = {
    "vocab_size": VOCAB, "decoder_start_token_id": 3, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
_SOUND_SIZES: dict[str, Any] = _SOUND_IDS | {
    "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_target_positions": 128,
}  # fmt: skip
SOUNDS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {  # class, sizes, the sound's form
    "whisper": ("Whisper", _SOUND_SIZES | {"num_mel_bins": 8, "max_source_positions": 20}, (8, 40)),
    # The token with which its decoder begins ends texts, too. Its positions leave padding out, which no model writes.
    "speech_to_text": (
        "Speech2Text",
        _SOUND_SIZES | {"decoder_start_token_id": 2, "pad_token_id": 1,
            "input_feat_per_channel": 8, "conv_channels": 32, "num_conv_layers": 2,
            "conv_kernel_sizes": [5, 5], "max_source_positions": 200},
        (61, 8),
    ),
    "moonshine": (
        "Moonshine",
        _SOUND_IDS | {"hidden_size": 48, "intermediate_size": 64, "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
            "max_position_embeddings": 128},
        (5000,),
    ),
}  # fmt: skip
BEGUN = {"whisper": (3, 7, 9), "speech_to_text": (2, 7), "moonshine": ()}
SEEDS = {"bart": 3}  # whose answers wander
GREEDY = SamplingParams(max_tokens=COUNT)


def stock(family: str, noise: float = 0.0, **sizes: Any) -> PreTrainedModel:
    """With weights wide enough for answers to wander; with noise on them, a draft that often agrees."""
    if family in SOUNDS:
        name, own, _ = SOUNDS[family]
        kind = getattr(transformers, f"{name}ForConditionalGeneration")
        seed, spread, kept = 2 if family == "whisper" else 1, 0.5, "positions"
    else:
        word, own = FAMILIES[family]
        kind, seed = None, SEEDS.get(family, 1)
        spread, kept = 0.3 if "t5" in family else 1.0, "relative_attention_bias"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind is None:
            model: PreTrainedModel = build(AutoConfig.for_model(word, **own), seed, encodes=True)
            torch.manual_seed(1)
        else:
            model = kind(kind.config_class(**own | sizes)).eval()
        for part, weight in model.named_parameters():
            if weight.dim() > 1 and kept not in part and (kind is None or weight.dim() == 2):
                weight.data *= spread / weight.std()
            weight.data += noise * weight.std(unbiased=False) * torch.randn_like(weight)
    return model


stock_once = cache(stock)


@cache
def target(family: str, noise: float = 0.0) -> HuggingFaceModel:
    return encoder_decoder(stock(family, noise), family)


def sources(family: str) -> list[list[int]]:
    """Ragged, as the family's tokenizer would end them."""
    layout = target(family).sources
    assert layout is not None
    special = {layout.start, layout.end, *layout.forced}
    return [[*(token for token in prompt if token not in special), layout.end] for prompt in PROMPTS]


def sound(family: str, seed: int, cut: int = 0) -> dict[str, Tensor]:
    form = list(SOUNDS[family][2])
    if family != "whisper":
        form[0] -= cut
    made = torch.randn(1, *form, generator=torch.Generator().manual_seed(seed + 3))
    return {stock_once(family).main_input_name: made}


def prompts_of(family: str) -> list[Any]:
    """Ragged, where lengths are free."""
    if family not in SOUNDS:
        return sources(family)
    return [MultimodalPrompt.heard(sound(family, seed, seed * 7), BEGUN[family]) for seed in range(3)]


@torch.inference_mode()
def by_transformers(family: str, prompt: Sequence[int] | MultimodalPrompt, **options: Any) -> list[int]:
    """By the general `generate`: Whisper's own adds timestamps, fallbacks and suppressed tokens."""
    model, layout = stock_once(family), target(family).sources
    assert layout is not None
    given: dict[str, Any] = {"do_sample": False, "num_beams": 1, "max_new_tokens": COUNT} | options
    if isinstance(prompt, MultimodalPrompt):
        begun = len(prompt.token_ids or (layout.start,))
        given |= {**prompt.inputs, "decoder_input_ids": torch.tensor([prompt.token_ids or (layout.start,)])}
        found = GenerationMixin.generate(model, **given)[0].tolist()
    else:
        ids, begun = torch.tensor([list(prompt)]), 1 + len(layout.forced)
        given["max_new_tokens"] += len(layout.forced)
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **given)[0].tolist()
    answer: list[int] = found[begun:]
    ends = [place for place, token in enumerate(answer) if token in target(family).eos_token_ids]
    return answer[: ends[0]] if ends else answer


@pytest.mark.parametrize(("family", "drafted"), by_turns([*FAMILIES, *SOUNDS], DRAFTED, always=["tree"]))
def test_greedy_equals_transformers(family: str, drafted: str) -> None:
    """Alone and in a ragged batch."""
    prompts = prompts_of(family)
    expected = [by_transformers(family, prompt) for prompt in prompts]
    assert max(len(set(answer)) for answer in expected) >= 6
    assert len({tuple(answer) for answer in expected}) == 3 or family in FAMILIES
    draft = target(family, 0.01 if family in SOUNDS else 0.05)
    engine = Engine(target(family), drafter_of(drafted, draft), controller="fixed")
    answers = engine.generate(prompts, GREEDY)
    assert [answer.token_ids for answer in answers] == expected
    if drafted == "none":  # texts run one by one in a batch, too
        assert engine.generate(prompts[1], GREEDY).token_ids == expected[1]
    assert not any(answer.warnings for answer in answers)
    assert not engine.check_idle()
    if drafted in ("chain", "tree"):
        assert sum(answer.stats.accepted_tokens for answer in answers) > (10 if family in SOUNDS else 0)


@pytest.mark.parametrize(("family", "drafted"), by_turns(["t5", "bart", "whisper"], DRAFTED[1:], always=["tree"]))
def test_seeded_answers_are_those_of_plain_decoding(family: str, drafted: str) -> None:
    params = [SamplingParams(max_tokens=COUNT, temperature=1.0, seed=seed) for seed in range(3)]
    prompts, draft = prompts_of(family)[:3], target(family, 0.01 if family in SOUNDS else 0.05)
    plain = Engine(target(family)).generate(prompts, params)
    found = Engine(target(family), drafter_of(drafted, draft), controller="fixed").generate(prompts, params)
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
    request = DraftRequest(0, GREEDY, TokenView([*layout.text([5, 6, 7, 8, 9, layout.end]), 6]))
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
        found = engine.generate(source, GREEDY)
    finally:
        hook.remove()
    assert found.token_ids == by_transformers("t5", source)
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


def test_the_cache_behind_a_verdict_is_that_of_its_tokens() -> None:
    model = target("bart")
    layout = model.sources
    assert layout is not None
    text = layout.text([5, 6, 7, layout.end])
    for after, logits, ids in verdicts(model, text, TreeShape((-1, 0, 0, 2)), drafted=[9, 10, 11, 12]):
        fresh, expected = read(model, ids)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert_same_entries(after, fresh, 1e-5)
        assert after.family.memory == 4
        after.rollback(2)
        assert after.family.memory == 0 and after.family.source[:2] == [5, 6]


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_beams_are_those_of_transformers(family: str) -> None:
    for source in sources(family)[:2]:
        found = BeamSearch(target(family), target(family, 0.05), num_beams=3).generate(source, COUNT)
        ends = target(family).eos_token_ids
        tokens = [token for token in found.beams[0].token_ids if token not in ends]
        assert tokens == by_transformers(family, source, num_beams=3)


def test_a_repetition_penalty_looks_at_the_answer_alone() -> None:
    source = sources("t5")[1]
    found = Engine(target("t5")).generate(source, SamplingParams(max_tokens=COUNT, repetition_penalty=1.7))
    assert found.token_ids == by_transformers("t5", source, repetition_penalty=1.7)


@pytest.mark.parametrize(("start", "end"), [(0, 1), (2, 2)])
def test_where_a_source_ends(start: int, end: int) -> None:
    layout = Sources(start, end, (9,), 8)
    text = layout.text([5, 6, end])
    assert text == [5, 6, end, start, 9]
    assert layout.length(text) == 3 and layout.length(text[:3]) is None
    assert layout.length([*text, 7, start, end, start]) == 3
    assert layout.length(layout.opening) == 4
    assert layout.text([*text, 8], continues=True) == [*text, 8]
    with pytest.raises(PromptError, match="which begins the decoder's text"):
        layout.text(text)
    with pytest.raises(PromptError, match="9 tokens, and the encoder reads at most 8"):
        layout.text([5] * 8 + [end])


def test_what_cannot_be_asked_for() -> None:
    engine = Engine(target("bart"))
    with pytest.raises(PromptError, match="ends in token id 6; end it with 2"):
        engine.generate([5, 6], GREEDY)
    with pytest.raises(OptionError, match="prompt_logprobs"):
        engine.generate([5, 2], SamplingParams(prompt_logprobs=1))
    with pytest.raises(PromptError, match="encoder reads at most 256"):
        engine.generate([*[5] * 300, 2], GREEDY)
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


@pytest.mark.parametrize("family", SOUNDS)
def test_a_draft_hears_the_same_sound(family: str) -> None:
    """The target's own twin guesses all that it says, which it could not without the sound."""
    twin = encoder_decoder(stock(family), "twin")
    engine = Engine(target(family), DraftModel(twin, 4), controller="fixed")
    for answer in engine.generate(prompts_of(family), SamplingParams(max_tokens=COUNT, ignore_eos=True)):
        assert 1 not in answer.token_ids
        assert answer.stats.accepted_tokens == answer.stats.draft_tokens > 10


def test_the_default_beginning_is_the_models_own() -> None:
    heard = sound("whisper", 0)
    answer = Engine(target("whisper")).generate(MultimodalPrompt.heard(heard), GREEDY)
    assert answer.token_ids == by_transformers("whisper", MultimodalPrompt.heard(heard))
    # The text before, as for the second half minute of a speech, begins with another token.
    later = MultimodalPrompt.heard(heard, (5, 6, 3, 8))
    assert Engine(target("whisper")).generate(later, GREEDY).token_ids == by_transformers("whisper", later)


def test_the_encoder_hears_once_for_all_samples() -> None:
    model = target("whisper")
    heard: list[int] = []
    model.module.get_encoder().register_forward_hook(lambda *_: heard.append(1))
    params = SamplingParams(max_tokens=COUNT, temperature=1.0, seed=3, n=3)
    engine = Engine(model)
    answer = engine.generate(prompts_of("whisper")[0], params)
    assert len(heard) == 1
    assert len({tuple(each.token_ids) for each in (answer, *answer.others)}) == 3
    engine.generate([prompts_of("whisper")[1], prompts_of("whisper")[2]], GREEDY)
    assert len(heard) == 3


def test_loading_hears_three_times_at_most() -> None:
    """Twice for the model's own logits, once for ours: that of a large Whisper takes seconds."""
    model = stock("whisper")
    heard: list[int] = []
    model.get_encoder().register_forward_hook(lambda *_: heard.append(1))
    loaded = encoder_decoder(model, "whisper")
    assert loaded.equality
    assert len(heard) <= 3


def test_as_a_user_loads_it(tmp_path: Path) -> None:
    stock("whisper").save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype="float32")
    assert "hears a sound once" in (model.note or "")
    answers = Engine(model, "prompt-lookup").generate(prompts_of("whisper"), GREEDY)
    assert [each.token_ids for each in answers] == [by_transformers("whisper", each) for each in prompts_of("whisper")]


def test_costs_are_measured_with_a_sound_that_is_made_up() -> None:
    cost = measure_target(target("whisper"), effort=Effort(0.2, 1, 1))
    drafted = measure_drafter(DraftModel(target("whisper", 0.01), 2), target("whisper"), effort=Effort(0.2, 1, 2))
    assert drafted.points
    assert ratio_of_steps(Engine(target("whisper")), cost)


def heard(*shape: int, begun: tuple[int, ...] = (), name: str = "input_features") -> MultimodalPrompt:
    return MultimodalPrompt.heard({name: torch.zeros(shape)}, begun)


@pytest.mark.parametrize(
    ("family", "prompt", "told"),
    [
        ("whisper", heard(1, 8, 30), "30 moments, and the encoder always reads 40"),
        ("whisper", heard(2, 8, 40), r"shape \(2, 8, 40\), and the encoder reads one sound of 1 x 8 bands x moments"),
        ("whisper", heard(1, 16, 40), r"shape \(1, 16, 40\)"),
        ("whisper", heard(8, 40), r"shape \(8, 40\)"),
        ("moonshine", heard(1, 100, name="input_values"), "input_values has 100 moments, which is too short"),
        *(
            ("whisper", text, r"'whisper' hears and reads no text; from Python give a MultimodalPrompt.heard")
            for text in ("text", [5, 6, 7])
        ),
        (
            "whisper",
            MultimodalPrompt((5, 6), {"pixel_values": torch.zeros(1, 8, 40)}),
            "pixel_values beside its tokens, and 'whisper' takes none",
        ),
        ("whisper", heard(1, 8, 40, begun=(2, 3)), "begins with token id 2, the placeholder"),
        ("whisper", heard(1, 8, 40, begun=(97,)), "token id 97 is outside"),
    ],
)
def test_what_is_no_sound_that_it_hears_is_refused(family: str, prompt: Any, told: str) -> None:
    with pytest.raises(PromptError, match=told):
        Engine(target(family)).generate(prompt, GREEDY)
    with pytest.raises(PromptError, match="padded the sound"):
        MultimodalPrompt.heard({"input_features": torch.zeros(1, 8, 40), "attention_mask": torch.tensor([[1, 0]])})


def test_a_draft_that_hears_something_else_is_refused() -> None:
    draft = encoder_decoder(stock("whisper", num_mel_bins=4), "narrow")
    told = "'narrow' hears input_features of 4 x 40, and target 'whisper' is given input_features of 8 x 40"
    with pytest.raises(CompositionError, match=told):
        Engine(target("whisper"), DraftModel(draft))
    with pytest.raises(CompositionError, match=r"'whisper' hears input_features of 8 x 40, and target .* given text"):
        Engine("embedded:target", DraftModel(target("whisper")))


def test_an_encoder_of_unknown_length_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="does not say how many vectors its encoder makes"):
        Sound.of(_Silent())  # type: ignore[arg-type]


class _Silent(torch.nn.Module):
    def get_encoder(self) -> torch.nn.Module:
        return torch.nn.Conv1d(3, 3, 1)


def test_a_text_without_its_sound_fails() -> None:
    model = target("whisper")
    tokens = torch.tensor(model.opening)
    with pytest.raises(ModelError, match="began without any"):
        model.forward([Segment(model.new_cache(), tokens, chain_shape(len(tokens)), ())])
