"""Prompts with images or sound: what `generate` answers to them, drafted for or not."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from support.multimodal_models import FAMILIES, TEXT
from truedraft import Engine, SamplingParams, load_model
from truedraft.core.tree import chain_shape
from truedraft.drafters import DraftModel, PromptLookup
from truedraft.drafters.base import Drafter
from truedraft.errors import ModelError, PromptError, TruedraftError
from truedraft.models import HuggingFaceModel, LanguageModel, MultimodalPrompt, Segment
from truedraft.models.backends.base import Backend
from truedraft.models.backends.sequential import SequentialBackend
from truedraft.models.backends.stock import StockBackend

GREEDY = SamplingParams(max_tokens=20)
PACKED = [name for name in FAMILIES if name != "qwen3_5"]  # whose states one text at a time cannot take back


@cache
def stock(family: str) -> PreTrainedModel:
    return FAMILIES[family].model()


@cache
def loaded(family: str) -> LanguageModel:
    """As a user loads it."""
    with TemporaryDirectory() as folder:
        FAMILIES[family].model().save_pretrained(folder)
        return load_model(folder, dtype="float32")


def generated(family: str, prompt: MultimodalPrompt) -> list[int]:
    ids = torch.tensor([prompt.token_ids])
    answer = stock(family).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, **prompt.inputs
    )
    tokens: list[int] = answer[0, ids.shape[1] :].tolist()
    return tokens


def of_another_image(prompt: MultimodalPrompt) -> MultimodalPrompt:
    inputs = {name: -value if value.is_floating_point() else value for name, value in prompt.inputs.items()}
    return MultimodalPrompt(prompt.token_ids, inputs)


def a_draft() -> Drafter:
    """A model of text alone, with the target's ids."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    return DraftModel(HuggingFaceModel(LlamaForCausalLM(LlamaConfig(**TEXT)), None, "draft"))


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_generate(family: str) -> None:
    """In a batch, and one text at a time."""
    target = loaded(family)
    prompts = [FAMILIES[family].prompt(seed) for seed in range(3)]
    expected = [generated(family, prompt) for prompt in prompts]
    text = list(prompts[0].token_ids[:4])
    plain = Engine(target)
    assert [answer.token_ids for answer in plain.generate(prompts, GREEDY)] == expected
    alone = plain.generate(text, GREEDY).token_ids
    drafted = 0
    for drafter in (PromptLookup(), a_draft()):
        answers = Engine(target, drafter, controller="fixed").generate([*prompts, text], GREEDY)  # type: ignore[list-item]
        assert [answer.token_ids for answer in answers] == [*expected, alone]
        drafted += sum(answer.stats.draft_tokens for answer in answers)
    assert drafted
    if family in PACKED:
        single = HuggingFaceModel(FAMILIES[family].model(), None, family, SequentialBackend)
        answers = Engine(single, PromptLookup(), controller="fixed").generate(prompts, GREEDY)  # type: ignore[arg-type]
        assert [answer.token_ids for answer in answers] == expected


@torch.inference_mode()
@pytest.mark.parametrize("backend", [StockBackend, SequentialBackend])
@pytest.mark.parametrize("family", PACKED)
def test_positions_go_on_behind_the_image(family: str, backend: type[Backend]) -> None:
    """Those of PaliGemma begin at 1, those of Qwen's images have more than one axis."""
    target = HuggingFaceModel(FAMILIES[family].model(), None, family, backend)
    prompt, answer = FAMILIES[family].prompt(0), [7, 11, 13]
    count = len(prompt.token_ids)
    cache = target.new_cache()
    target.forward([Segment(cache, torch.tensor(prompt.token_ids), chain_shape(count), (), inputs=prompt.inputs)])
    cache.commit(range(count))
    found = target.forward([Segment(cache, torch.tensor(answer), chain_shape(3), range(3))]).logits

    def force(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -1e9).index_fill(1, torch.tensor(answer[ids.shape[1] - count]), 0.0)

    expected = stock(family).generate(
        torch.tensor([prompt.token_ids]), attention_mask=torch.ones(1, count, dtype=torch.int64), max_new_tokens=4,
        min_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True,
        logits_processor=[lambda ids, scores: scores if ids.shape[1] - count == 3 else force(ids, scores)],
        **prompt.inputs,
    )  # fmt: skip
    torch.testing.assert_close(found, torch.cat(expected.logits[1:]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_5", "gemma3"])
def test_coupled_answers_do_not_depend_on_drafts(family: str) -> None:
    target = loaded(family)
    prompts = [FAMILIES[family].prompt(seed) for seed in range(3)]
    params = [SamplingParams(max_tokens=20, temperature=1.2, seed=seed) for seed in range(3)]
    expected = [answer.token_ids for answer in Engine(target).generate(prompts, params)]
    drafted = Engine(target, PromptLookup(), controller="fixed").generate(prompts, params)
    assert [answer.token_ids for answer in drafted] == expected
    assert len({tuple(tokens) for tokens in expected}) == 3


@pytest.mark.parametrize(("family", "room"), [("qwen2_vl", 1.6), pytest.param("qwen3_5", 2.2, marks=pytest.mark.slow)])
def test_a_request_that_gave_its_room_back_reads_its_image_again(family: str, room: float) -> None:
    target = loaded.__wrapped__(family)  # whose pool keeps nothing of other tests
    prompts = [FAMILIES[family].prompt(seed) for seed in range(4)]
    params = SamplingParams(max_tokens=450)  # more than is granted at first
    expected = [answer.token_ids for answer in Engine(target).generate(prompts, params)]
    with pytest.raises(TruedraftError, match="bytes of cache") as refused:
        Engine(target, max_cache_bytes=1).generate(prompts[0], params)
    needed = int(str(refused.value).split(" need ")[1].split(" bytes")[0].replace(",", ""))
    engine = Engine(target, PromptLookup(), controller="fixed", max_cache_bytes=int(room * needed))
    answers = engine.generate(prompts, params)
    assert [answer.error for answer in answers] == [None] * 4
    assert [answer.token_ids for answer in answers] == expected
    assert engine.preemptions


def test_single_layers_are_shown_of_images_too() -> None:
    target = loaded("llava")
    seen, blind = FAMILIES["llava"].prompt(0), [5, 9, 11]

    def segments() -> list[Segment]:
        ids = [list(seen.token_ids), blind, blind]
        inputs = [seen.inputs, None, None]
        return [
            Segment(target.new_cache(), torch.tensor(each), chain_shape(len(each)), (0, len(each) - 1), inputs=its)
            for each, its in zip(ids, inputs, strict=True)
        ]

    plain, shown = target.forward(segments()), target.forward_showing(segments(), (1, 0))
    torch.testing.assert_close(shown.logits, plain.logits)
    assert [tuple(layer.shape) for layer in shown.layers] == [(6, 64)] * 2
    alone = target.forward_showing(segments()[:1], (1,))
    torch.testing.assert_close(shown.layers[0][:2], alone.layers[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_read_their_image_once(family: str) -> None:
    """Also beside one with the same text and another image. PaliGemma's windows do not hold within its prompt, so that
    nobody can read its last token alone."""
    target = loaded(family)
    prompt = FAMILIES[family].prompt(0)
    long = MultimodalPrompt((*prompt.token_ids, *range(20, 40)), grown(prompt.inputs, 20))
    other = of_another_image(long)
    alone = [Engine(target, prefix_cache_bytes=0).generate(each, GREEDY).token_ids for each in (long, other, long)]
    engine = Engine(target, PromptLookup(), controller="fixed")
    answers = engine.generate([long, other, long], GREEDY)
    assert [answer.token_ids for answer in answers] == alone
    assert engine.shared_tokens == (0 if family == "paligemma" else len(long.token_ids) - 1)


def grown(inputs: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Kinds of tokens, where there are any, with so many of text behind them."""
    return {
        name: torch.nn.functional.pad(value, (0, count)) if "token_type" in name else value
        for name, value in inputs.items()
    }


def test_a_prompt_that_ends_in_its_image_is_shared_with_nobody() -> None:
    target = loaded("llava")
    prompt = MultimodalPrompt((*range(3, 30), *[150] * 4), FAMILIES["llava"].prompt(0).inputs)
    expected = generated("llava", prompt)
    engine = Engine(target)
    answers = engine.generate([prompt, prompt], GREEDY)
    assert [answer.token_ids for answer in answers] == [expected] * 2
    assert not engine.shared_tokens


@pytest.mark.plants_failures
def test_an_image_that_does_not_fit_its_text_fails_alone() -> None:
    target = loaded("llava")
    good = FAMILIES["llava"].prompt(0)
    short = MultimodalPrompt(tuple(token for token in good.token_ids if token != 150), good.inputs)
    answers = Engine(target).generate([good, short, good], GREEDY)
    assert [answer.error is None for answer in answers] == [True, False, True]
    assert answers[0].token_ids == answers[2].token_ids == generated("llava", good)
    with pytest.raises(ModelError, match=r"[Ii]mage features and image tokens do not match"):
        Engine(target).generate(short, GREEDY)


def test_what_the_model_does_not_take_is_named() -> None:
    with pytest.raises(PromptError, match=r"pixel_values beside its tokens, and 'embedded:target' reads text alone"):
        Engine("embedded:target").generate(FAMILIES["llava"].prompt(0), GREEDY)
    prompt = FAMILIES["qwen2_audio"].prompt(0)
    with pytest.raises(PromptError, match=r"feature_attention_mask beside its tokens.* it takes .*pixel_values"):
        Engine(loaded("llava")).generate(prompt, GREEDY)


IDS = torch.tensor([[5, 150, 6]])
PIXELS = torch.zeros(1, 3, 16, 16)


def test_what_a_processor_did_not_return_is_refused() -> None:
    for encoded, told in (
        ({"pixel_values": PIXELS}, "no tensor of input_ids"),
        ({"input_ids": [[5, 150]], "pixel_values": PIXELS}, "no tensor of input_ids"),
        ({"input_ids": IDS.repeat(2, 1), "pixel_values": PIXELS}, "2 texts"),
        ({"input_ids": IDS, "attention_mask": IDS % 5, "pixel_values": PIXELS}, "padded the text"),
        ({"input_ids": IDS}, "tokens only"),
        ({"input_ids": IDS[:, :1], "pixel_values": PIXELS}, "at least a placeholder"),
        ({"input_ids": IDS, "pixel_values": [[0.0]]}, "'pixel_values' .* is a list"),
    ):
        with pytest.raises(PromptError, match=told):
            MultimodalPrompt.of(encoded)  # type: ignore[arg-type]
