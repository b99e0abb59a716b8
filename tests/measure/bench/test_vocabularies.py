"""What drafts lose by another tokenizer: the numbers of a report beside sums written down from the two models."""

from __future__ import annotations

import itertools
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).parents[2] / "text"))
from tiny_tokenizers import WIDE, small_llama

from support.pairwise import by_turns
from support.tiny_models import build
from truedraft import SamplingParams
from truedraft.drafters import DraftModel, PromptLookup, ReencodedDraft
from truedraft.measure.bench import AnsweredPrompt, VocabularyCost, vocabulary_costs
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.translated import TranslatedModel
from truedraft.text.tokenizer import Tokenizer

BUILDERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = WIDE | {"llama": small_llama}
PAIRS = [*itertools.permutations(sorted(WIDE), 2), ("byte-level", "llama")]


def llama(size: int, seed: int) -> PreTrainedModel:
    sizes = LlamaConfig(
        vocab_size=size, hidden_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, max_position_embeddings=256, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return build(sizes, seed=seed)


class Side:
    """One of the two models, and what its ids write, worked out from the names of its tokens."""

    def __init__(self, kind: str, seed: int) -> None:
        tokenizer = Tokenizer(BUILDERS[kind](), kind)
        self.stock = llama(tokenizer.vocab_size, seed)
        self.model = HuggingFaceModel(llama(tokenizer.vocab_size, seed), tokenizer, kind)
        self.backend = tokenizer.backend
        names = self.backend.convert_ids_to_tokens(range(tokenizer.vocab_size))
        special = set(self.backend.all_special_ids)
        self.writes = [None if token in special else self._written(kind, names[token]) for token in range(len(names))]

    @staticmethod
    def _written(kind: str, name: str) -> bytes:
        if kind == "word pieces":
            return name[2:].encode() if name.startswith("##") else f" {name}".encode()
        if kind == "byte-level":
            seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
            letters = seen + [byte for byte in range(256) if byte not in seen]
            shown = [*map(chr, seen), *(chr(256 + place) for place in range(256 - len(seen)))]
            return bytes(dict(zip(shown, letters, strict=True))[letter] for letter in name)
        return bytes([int(name[3:5], 16)]) if name.startswith("<0x") else name.replace("▁", " ").encode()

    @torch.inference_mode()
    def probs(self, ids: list[int], temperature: float) -> list[list[float]]:
        logits = self.stock(torch.tensor([ids])).logits[0].double()
        if not temperature:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double().tolist()
        return torch.softmax(logits / temperature, dim=-1).tolist()


def meanings(target: Side, draft: Side) -> dict[int, int]:
    """What ids of the draft are for the target."""
    found = {}
    for own, text in enumerate(draft.writes):
        same = [token for token, other in enumerate(target.writes) if text is not None and other == text]
        if same:
            assert len(same) == 1
            found[own] = same[0]
    if target.backend.unk_token_id is not None and draft.backend.unk_token_id is not None:
        found[draft.backend.unk_token_id] = target.backend.unk_token_id
    if target.backend.bos_token_id is not None and draft.backend.bos_token_id is not None:
        found[draft.backend.bos_token_id] = target.backend.bos_token_id
    if target.backend.eos_token_id is not None and draft.backend.eos_token_id is not None:
        found[draft.backend.eos_token_id] = target.backend.eos_token_id
    return found


def spelled(draft: Side, text: bytes) -> list[int]:
    """The longest token first; of two that write the same the one that is no raw byte."""
    ids = []
    while text:
        fitting = [token for token, written in enumerate(draft.writes) if written and text.startswith(written)]
        if not fitting:
            text = text[1:]
            continue
        names = draft.backend.convert_ids_to_tokens(fitting)
        longest = max(len(draft.writes[token] or b"") for token in fitting)
        best = [
            (name.startswith("<0x"), token)
            for token, name in zip(fitting, names, strict=True)
            if len(draft.writes[token] or b"") == longest
        ]
        ids.append(min(best)[1])
        text = text[longest:]
    return ids


def by_hand(target: Side, draft: Side, prompt: list[int], answer: list[int], temperature: float) -> tuple[float, ...]:
    """Shared part, mass of p on what is not, and sum min(p, q), over the places of an answer."""
    to = meanings(target, draft)
    shared = set(to.values())
    opened = [token for token in draft.backend("").input_ids if token != draft.backend.sep_token_id]
    read, ends = list(opened), []
    for token in [*prompt, *answer[:-1]]:
        text = target.writes[token]
        if text is None:  # the sign for the beginning
            read += [] if opened else [draft.backend.eos_token_id]
        else:
            read += spelled(draft, text) or [draft.backend.eos_token_id or 0]
        ends.append(len(read) - 1)
    p_rows = target.probs([*prompt, *answer[:-1]], temperature)
    raw_rows = draft.probs(read, 1.0)
    unshared, accepted = [], []
    for place in range(len(prompt) - 1, len(prompt) + len(answer) - 1):
        p, raw, q = p_rows[place], raw_rows[ends[place]], defaultdict(float)
        for own, token in to.items():
            q[token] += raw[own]
        best = max(q, key=lambda token: q[token])
        power = 1.0 / temperature if temperature else 0.0
        heat = {token: (mass**power if temperature else float(token == best)) for token, mass in q.items()}
        whole = sum(heat.values())
        unshared.append(sum(mass for token, mass in enumerate(p) if token not in shared))
        accepted.append(sum(min(p[token], mass / whole) for token, mass in heat.items()))
    return len(shared) / len(p_rows[0]), sum(unshared) / len(unshared), sum(accepted) / len(accepted)


def reported(target: Side, draft: Side, asked: list[AnsweredPrompt]) -> VocabularyCost:
    drafter = DraftModel(TranslatedModel(draft.model, target.model))
    (found,) = vocabulary_costs(target.model, {"draft": drafter}, asked)
    return found


@pytest.mark.parametrize(("pair", "temperature"), by_turns(PAIRS, [0.0, 0.7, 1.0]))
def test_a_report_is_what_the_two_models_say(pair: tuple[str, str], temperature: float) -> None:
    target, draft = (Side(name, seed) for seed, name in enumerate(pair, start=1))
    prompt = [token for token in target.backend("the quick fox").input_ids if token != target.backend.sep_token_id]
    words = [token for token, text in enumerate(target.writes) if text]
    answer = random.Random(3).choices(words, k=80)
    params = SamplingParams(temperature=temperature)
    found = reported(target, draft, [AnsweredPrompt(prompt, answer, params)])
    shared, unshared, accepted = by_hand(target, draft, prompt, answer, temperature)
    assert found.places == 80 and found.shared == pytest.approx(shared, abs=1e-12)
    assert found.unshared_mass == pytest.approx(unshared, abs=2e-5)
    assert found.acceptance == pytest.approx(accepted, abs=2e-5)
    assert 0.0 < found.shared < 1.0 and found.unshared_mass > 0.0
    assert found.acceptance <= 1.0 - found.unshared_mass + 1e-9
    assert f"can write {shared:.3f} of the target's tokens" in found.describe()


def test_what_is_looked_at_is_bounded() -> None:
    """Long answers are cut, and texts that the draft has no room for left out."""
    target, draft = Side("byte-level", 1), Side("sentencepiece", 2)
    words = [token for token, text in enumerate(target.writes) if text]
    texts = [random.Random(seed).choices(words, k=240) for seed in range(6)]
    params = SamplingParams(temperature=1.0)
    asked = [AnsweredPrompt(text[:10], text[10:], params) for text in texts]
    assert reported(target, draft, asked).places == 1024
    translated = TranslatedModel(draft.model, target.model)
    translated.context_length = 200
    assert vocabulary_costs(target.model, {"draft": DraftModel(translated)}, asked) == []


def test_drafts_that_write_all_have_no_such_cost() -> None:
    target, draft = Side("byte-level", 1), Side("sentencepiece", 2)
    drafters = {
        "same": DraftModel(Side("byte-level", 3).model),
        "prompt-lookup": PromptLookup(),
        "reencoded": ReencodedDraft(draft.model, target.model),
    }
    assert vocabulary_costs(target.model, drafters, [AnsweredPrompt([5, 6], [7, 8], SamplingParams())]) == []
