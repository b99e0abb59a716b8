"""Encoder-decoders that hear: answers as of transformers, the sound heard once, drafts that hear it, too."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from support.pairwise import by_turns
from support.tiny_models import DRAFTED, VOCAB, drafter_of, encoder_decoder
from truedraft import Engine, SamplingParams, load_model
from truedraft.core.tree import chain_shape
from truedraft.drafters import DraftModel
from truedraft.engine.policy.measuring import Effort, measure_drafter, measure_target
from truedraft.engine.policy.sizes import ratio_of_steps
from truedraft.errors import CompositionError, ModelError, PromptError, UnsupportedModelError
from truedraft.models import HuggingFaceModel, MultimodalPrompt
from truedraft.models.base import Segment
from truedraft.models.sources import Sound

COUNT = 24
GREEDY = SamplingParams(max_tokens=COUNT)
_IDS: dict[str, Any] = {
    "vocab_size": VOCAB, "decoder_start_token_id": 3, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
_SIZES: dict[str, Any] = _IDS | {
    "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_target_positions": 128,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {  # class, sizes, the sound's form
    "whisper": ("Whisper", _SIZES | {"num_mel_bins": 8, "max_source_positions": 20}, (8, 40)),
    # The token with which its decoder begins ends texts, too. Its positions leave padding out, which no model writes.
    "speech_to_text": (
        "Speech2Text",
        _SIZES | {"decoder_start_token_id": 2, "pad_token_id": 1,
            "input_feat_per_channel": 8, "conv_channels": 32, "num_conv_layers": 2,
            "conv_kernel_sizes": [5, 5], "max_source_positions": 200},
        (61, 8),
    ),
    "moonshine": (
        "Moonshine",
        _IDS | {"hidden_size": 48, "intermediate_size": 64, "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
            "max_position_embeddings": 128},
        (5000,),
    ),
}  # fmt: skip
BEGUN = {"whisper": (3, 7, 9), "speech_to_text": (2, 7), "moonshine": ()}


def stock(family: str, noise: float = 0.0, **sizes: Any) -> PreTrainedModel:
    """With weights wide enough for answers to wander; with noise on them, a draft that often agrees."""
    name, own, _ = FAMILIES[family]
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2 if family == "whisper" else 1)
        model: PreTrainedModel = kind(kind.config_class(**own | sizes)).eval()
        for part, weight in model.named_parameters():
            if weight.dim() == 2 and "positions" not in part:
                weight.data *= 0.5 / weight.std()
            weight.data += noise * weight.std(unbiased=False) * torch.randn_like(weight)
    return model


stock_once = cache(stock)


@cache
def target(family: str, noise: float = 0.0) -> HuggingFaceModel:
    return encoder_decoder(stock(family, noise), family)


def sound(family: str, seed: int, cut: int = 0) -> dict[str, Tensor]:
    form = list(FAMILIES[family][2])
    if family != "whisper":
        form[0] -= cut
    made = torch.randn(1, *form, generator=torch.Generator().manual_seed(seed + 3))
    return {stock_once(family).main_input_name: made}


def sounds(family: str) -> list[dict[str, Tensor]]:
    """Ragged, where lengths are free."""
    return [sound(family, seed, seed * 7) for seed in range(3)]


def prompts(family: str) -> list[MultimodalPrompt]:
    return [MultimodalPrompt.heard(each, BEGUN[family]) for each in sounds(family)]


@torch.inference_mode()
def by_transformers(family: str, heard: dict[str, Tensor], begun: tuple[int, ...]) -> list[int]:
    """By the general `generate`: Whisper's own adds timestamps, fallbacks and suppressed tokens, where asked."""
    model = stock_once(family)
    ids = torch.tensor([begun or (model.generation_config.decoder_start_token_id,)])
    found = GenerationMixin.generate(model, **heard, decoder_input_ids=ids, do_sample=False, max_new_tokens=COUNT)
    answer: list[int] = found[0, ids.shape[1] :].tolist()
    ends = [place for place, token in enumerate(answer) if token in target(family).eos_token_ids]
    return answer[: ends[0]] if ends else answer


@pytest.mark.parametrize(("family", "drafted"), by_turns(FAMILIES, DRAFTED, always=["tree"]))
def test_greedy_equals_transformers(family: str, drafted: str) -> None:
    """Alone and in a ragged batch."""
    expected = [by_transformers(family, each, BEGUN[family]) for each in sounds(family)]
    assert max(len(set(answer)) for answer in expected) >= 6
    assert len({tuple(answer) for answer in expected}) == 3
    engine = Engine(target(family), drafter_of(drafted, target(family, 0.01)), controller="fixed")
    answers = engine.generate(prompts(family), GREEDY)
    assert [answer.token_ids for answer in answers] == expected
    if drafted == "none":  # texts run one by one in a batch, too
        assert engine.generate(prompts(family)[1], GREEDY).token_ids == expected[1]
    assert not any(answer.warnings for answer in answers)
    assert not engine.check_idle()
    if drafted in ("chain", "tree"):
        assert sum(answer.stats.accepted_tokens for answer in answers) > 10


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_hears_the_same_sound(family: str) -> None:
    """The target's own twin guesses all that it says, which it could not without the sound."""
    twin = encoder_decoder(stock(family), "twin")
    engine = Engine(target(family), DraftModel(twin, 4), controller="fixed")
    for answer in engine.generate(prompts(family), SamplingParams(max_tokens=COUNT, ignore_eos=True)):
        assert 1 not in answer.token_ids
        assert answer.stats.accepted_tokens == answer.stats.draft_tokens > 10


@pytest.mark.parametrize("drafted", DRAFTED[1:])
@pytest.mark.parametrize("family", ["whisper"])
def test_seeded_answers_are_those_of_plain_decoding(family: str, drafted: str) -> None:
    params = [SamplingParams(max_tokens=COUNT, temperature=1.0, seed=seed) for seed in range(3)]
    plain = Engine(target(family)).generate(prompts(family), params)
    found = Engine(target(family), drafter_of(drafted, target(family, 0.01)), controller="fixed").generate(
        prompts(family), params
    )
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in plain]


def test_the_default_beginning_is_the_models_own() -> None:
    heard = sound("whisper", 0)
    answer = Engine(target("whisper")).generate(MultimodalPrompt.heard(heard), GREEDY)
    assert answer.token_ids == by_transformers("whisper", heard, ())
    # The text before, as for the second half minute of a speech, begins with another token.
    answer = Engine(target("whisper")).generate(MultimodalPrompt.heard(heard, (5, 6, 3, 8)), GREEDY)
    assert answer.token_ids == by_transformers("whisper", heard, (5, 6, 3, 8))


def test_the_encoder_hears_once_for_all_samples() -> None:
    model = target("whisper")
    heard: list[int] = []
    model.module.get_encoder().register_forward_hook(lambda *_: heard.append(1))
    params = SamplingParams(max_tokens=COUNT, temperature=1.0, seed=3, n=3)
    engine = Engine(model)
    answer = engine.generate(prompts("whisper")[0], params)
    assert len(heard) == 1
    assert len({tuple(each.token_ids) for each in (answer, *answer.others)}) == 3
    engine.generate([prompts("whisper")[1], prompts("whisper")[2]], GREEDY)
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
    answers = Engine(model, "prompt-lookup").generate(prompts("whisper"), GREEDY)
    assert [answer.token_ids for answer in answers] == [
        by_transformers("whisper", each, BEGUN["whisper"]) for each in sounds("whisper")
    ]


def test_costs_are_measured_with_a_sound_that_is_made_up() -> None:
    cost = measure_target(target("whisper"), effort=Effort(0.2, 1, 1))
    drafted = measure_drafter(DraftModel(target("whisper", 0.01), 2), target("whisper"), effort=Effort(0.2, 1, 2))
    assert drafted.points
    assert ratio_of_steps(Engine(target("whisper")), cost)


FEATURES = torch.zeros(1, 8, 40)


@pytest.mark.parametrize(
    ("features", "told"),
    [
        (torch.zeros(1, 8, 30), "30 moments, and the encoder reads 40 whatever"),
        (torch.zeros(2, 8, 40), r"shape \(2, 8, 40\), and the encoder reads one sound of 1 x 8 bands x moments"),
        (torch.zeros(1, 16, 40), r"shape \(1, 16, 40\)"),
        (torch.zeros(8, 40), r"shape \(8, 40\)"),
    ],
)
def test_a_sound_of_another_form_is_refused(features: Tensor, told: str) -> None:
    with pytest.raises(PromptError, match=told):
        Engine(target("whisper")).generate(MultimodalPrompt.heard({"input_features": features}), GREEDY)


def test_a_sound_that_is_too_short_is_refused() -> None:
    with pytest.raises(PromptError, match="input_values has 100 moments, which is too short"):
        Engine(target("moonshine")).generate(MultimodalPrompt.heard({"input_values": torch.zeros(1, 100)}), GREEDY)


def test_what_is_no_sound_is_refused() -> None:
    engine = Engine(target("whisper"))
    for prompt in ("text", [5, 6, 7]):
        with pytest.raises(
            PromptError, match=r"'whisper' hears and reads no text; from Python give a MultimodalPrompt.heard"
        ):
            engine.generate(prompt, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="pixel_values beside its tokens, and 'whisper' takes none"):
        engine.generate(MultimodalPrompt((5, 6), {"pixel_values": FEATURES}), GREEDY)
    with pytest.raises(PromptError, match="begins with token id 2, the placeholder"):
        engine.generate(MultimodalPrompt.heard({"input_features": FEATURES}, (2, 3)), GREEDY)
    with pytest.raises(PromptError, match="token id 97 is outside"):
        engine.generate(MultimodalPrompt.heard({"input_features": FEATURES}, (97,)), GREEDY)
    with pytest.raises(PromptError, match="padded the sound"):
        MultimodalPrompt.heard({"input_features": FEATURES, "attention_mask": torch.tensor([[1, 0]])})


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
    with pytest.raises(ModelError, match="begun without a sound"):
        model.forward([Segment(model.new_cache(), tokens, chain_shape(len(tokens)), ())])
