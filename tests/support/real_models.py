"""Real models, which `make test` and `make test-slow` fetch from the package index; nothing of them is committed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from support.codes import logits
from support.embedded_models import shared_model
from truedraft import Engine, SamplingParams, load_model
from truedraft.files import SMOLLM2
from truedraft.models.embedded import smollm2_missing
from truedraft.models.huggingface import HuggingFaceModel

GEMMA = Path(__file__).parents[2] / ".models" / "gemma-3-270m-q4_k_m.gguf"
"""Where `make test-slow` puts Gemma 3 270M, whose terms are its own."""


def needs_smollm2() -> None:
    """Skips a test where the model is not installed."""
    if (missing := smollm2_missing()) is not None:
        pytest.skip(f"smollm2 is not installed, which make test does where a package index can be reached: {missing}")


def smollm2_here() -> HuggingFaceModel:
    """SmolLM2-135M-Instruct as it is taken by its word, one for all tests of a process."""
    needs_smollm2()
    return shared_model(SMOLLM2)


def assert_answers_as_transformers(
    file: Path, prompts: Sequence[Sequence[int]], max_tokens: int, most_kl: float
) -> None:
    """The weights that transformers reads from a file answer the same in float32, and their codes nearly.

    Args:
        file: GGUF.
        prompts: as token ids.
        max_tokens: of an answer.
        most_kl: mean KL in nats from the distributions of those weights to the ones of their codes, which read inputs
            of 8 bits.
    """
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    numbers, codes = (load_model(file, dtype="float32", fast_paths=fast) for fast in (False, True))
    for prompt in prompts:
        answer = Engine(numbers).generate(list(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        text = [*prompt, *answer.token_ids]
        with torch.inference_mode():
            expected = reference(torch.tensor([text[:-1]])).logits[0]
        assert expected[len(prompt) - 1 :].argmax(-1).tolist() == answer.token_ids
        wanted, found = (each.log_softmax(-1) for each in (expected, logits(codes, text[:-1])))
        kl = (wanted.exp() * (wanted - found)).sum(-1)
        assert 0 < kl.mean() < most_kl
