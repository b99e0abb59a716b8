"""What a certificate says of errors planted in drafted rows' logits: docs/certify.md names them.

Where plain rows are equal bit for bit drafted rows are allowed nothing, elsewhere what plain rows show, here some 1e-6.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import LlamaConfig

from certify.planted_faults import drafted_error
from support.tiny_models import PROMPTS, VOCAB, build
from support.virtual_time import VirtualTime
from truedraft import SamplingParams
from truedraft.certify import Report, certify
from truedraft.certify.checks import Context, Stack
from truedraft.certify.equality import Equality, EqualityInFloat32
from truedraft.drafters import DraftModel
from truedraft.machine import has_bfloat16
from truedraft.models.backends.native.build import built
from truedraft.models.backends.stock import StockBackend
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.loading import fastest_backend
from truedraft.verification import SpeculativeSampling

HALF, WHOLE = torch.bfloat16, torch.float32
ERRORS = (0.0, 0.1, 0.3)
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 96}
"""That the native forward takes where it can be compiled."""


@cache
def target(backend: str, dtype: torch.dtype) -> HuggingFaceModel:
    lacks_half = dtype is HALF and not has_bfloat16(torch.device("cpu"))
    if backend == "native" and (built(dtype).library is None or lacks_half):
        pytest.skip("the native forward cannot be compiled here")
    config = LlamaConfig(**SIZES, vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=128, eos_token_id=None)
    model = build(config, seed=2, dtype=dtype)
    found = HuggingFaceModel(model, None, backend, StockBackend if backend == "stock" else fastest_backend)
    assert ("native forward" in found.fast_paths) == (backend == "native")
    return found


def stack(backend: str, dtype: torch.dtype, error: float) -> Stack:
    """Its drafts are right, but that it drafts at a node a sibling beside: chains, trees and rejected rows occur."""
    right = target(backend, dtype)
    off = drafted_error(right, error) if error else right
    return Stack(off, DraftModel(target("stock", WHOLE), branching=(2, 1)), SpeculativeSampling())


def certificate_of_answers(own: Stack, temperature: float, in_float32: Stack | None) -> Report:
    """Made of greedy answers and what rounding is measured to be alone: what errors of logits are looked for by."""
    params = SamplingParams(max_tokens=6, temperature=temperature)
    context = Context(own, [PROMPTS[0]], params, 2)
    findings = Equality().run(context)
    if in_float32 is not None:
        findings += EqualityInFloat32(lambda: in_float32).run(context)
    return Report("", findings, "")


CASES: list[tuple[str, torch.dtype, float, float | None, str]] = [
    *(("stock", HALF, error, None, "rounding, bfloat16" if error else "") for error in ERRORS),
    *(("native", HALF, error, None, "rounding, bfloat16" if error else "") for error in ERRORS),
    *(("native", WHOLE, error, None, "rounding, float32" if error else "") for error in (0.0, 1e-4, 0.3)),
    *(("stock", WHOLE, error, None, "rounding, float32" if error else "") for error in (0.0, 1e-3, 0.3)),
    ("stock", WHOLE, 5e-7, None, ""),  # less than rounding: nobody can tell the two apart
    ("stock", HALF, 0.0, 0.0, ""),
    ("stock", HALF, 0.0, 0.1, "rounding, float32"),
    ("stock", HALF, 0.3, 0.0, "rounding, bfloat16"),
    ("stock", HALF, 0.3, 0.3, "rounding, bfloat16"),
]


@pytest.mark.parametrize(
    ("backend", "dtype", "error", "float32", "failing", "temperature"),
    [
        pytest.param(*case, temperature, marks=[pytest.mark.slow] if (place + temperature) % 2 else [])
        for place, case in enumerate(CASES)
        for temperature in (0.0, 1.0)
    ],
)
def test_what_is_said_of_an_error_in_drafted_rows(
    backend: str, dtype: torch.dtype, temperature: float, error: float, float32: float | None, failing: str
) -> None:
    """In bfloat16 the float32 check, on or off, changes nothing about what is found in bfloat16 itself."""
    whole = None if float32 is None else stack("stock", WHOLE, float32)
    found = certificate_of_answers(stack(backend, dtype, error), temperature, whole)
    assert found.issued == (not failing) and not found.undecided, found.verdict
    assert not failing or failing in [each.name for each in found.failures]


@pytest.mark.parametrize(("temperature", "error"), [(0.0, 0.3), pytest.param(1.0, 0.1, marks=pytest.mark.slow)])
def test_a_whole_certificate_is_refused(temperature: float, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two cases of the report that brought this: bfloat16 alone, without the float32 check."""
    VirtualTime(monkeypatch, step_s=0.04)
    params = SamplingParams(max_tokens=8, temperature=temperature)
    found = certify(stack("stock", HALF, error), [PROMPTS[0]], params, seconds=1.0)
    assert not found.issued
    (own,) = [each for each in found.failures if each.name == "rounding, bfloat16"]
    assert "bitwise equal in 7 shapes of plain decoding" in own.summary and "that is no rounding" in own.summary
