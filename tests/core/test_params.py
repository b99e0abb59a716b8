"""Sampling parameters: each bad value is refused by an error that names the option and the value."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest

from truedraft.core.params import SamplingParams
from truedraft.errors import OptionError, TruedraftError

BAD = [
    *(("max_tokens", value) for value in (0, -3, 2.0, True, "many", None)),
    *(("temperature", value) for value in (-0.1, math.nan, math.inf)),
    *(("top_k", value) for value in (-1, 1.5, True)),
    *(("top_p", value) for value in (0.0, -0.5, 1.0000001, math.nan)),
    *(("min_p", value) for value in (-1e-9, 1.1, math.nan)),
    *(("seed", value) for value in (-1, 1.0, False, "7")),
]
WRONG_TYPES = [
    ("temperature", "hot"), ("temperature", None), ("top_p", "0.9"), ("min_p", None), ("stop_token_ids", 5),
    ("stop", None), ("stop", 5), ("ignore_eos", "no"), ("ignore_eos", 0), ("ignore_eos", 1), ("ignore_eos", None),
]  # fmt: skip


@pytest.mark.parametrize(("option", "value"), [*BAD, *WRONG_TYPES], ids=str)
def test_bad_values_are_named(option: str, value: object) -> None:
    with pytest.raises(OptionError, match=re.escape(repr(value))) as caught:
        SamplingParams(**{option: value})
    assert caught.value.field == option
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, TruedraftError)


GOOD = [
    {"max_tokens": 1}, {"temperature": 0}, {"temperature": 5.5}, {"temperature": -0.0},
    {"temperature": 1e-300}, {"top_k": 10**6}, {"top_p": 1.0}, {"top_p": 1e-9},
    {"min_p": 1.0}, {"min_p": 0.0}, {"seed": 0}, {"seed": 2**64 - 1}, {"stop": ()}, {"stop_token_ids": (0, 5)},
]  # fmt: skip


@pytest.mark.parametrize("good", GOOD, ids=str)
def test_good_values_stay(good: dict) -> None:
    (option, value), params = next(iter(good.items())), SamplingParams(**good)
    assert getattr(params, option) == value
    assert params.greedy == (params.temperature == 0.0)


def test_defaults_are_those_of_the_design() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        "max_tokens": 128,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": (),
        "min_tokens": 0,
        "bad_words": (),
        "allowed_token_ids": (),
        "logprobs": None,
        "prompt_logprobs": None,
        "logprobs_mode": "raw",
        "n": 1,
        "structured": None,
        "reasoning": None,
        "prediction": None,
        "adapter": None,
    }


def test_stops_are_kept_as_tuples() -> None:
    assert SamplingParams(stop="\n").stop == ("\n",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)
    for empty in ("", ["a", ""]):
        with pytest.raises(OptionError, match="stop holds an empty text"):
            SamplingParams(stop=empty)


def test_params_are_frozen_and_equal_by_value() -> None:
    params = SamplingParams(stop=["a"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3
    assert params == SamplingParams(stop=("a",))
    assert hash(params) == hash(SamplingParams(stop=("a",)))


def test_numbers_of_numpy_are_numbers() -> None:
    given = SamplingParams(
        max_tokens=np.int64(3),
        temperature=np.float32(0.5),
        top_k=np.uint8(4),
        seed=np.int32(7),
        ignore_eos=np.True_,
        stop_token_ids=[np.int64(1)],
    )
    plain = SamplingParams(max_tokens=3, temperature=0.5, top_k=4, seed=7, ignore_eos=True, stop_token_ids=(1,))
    assert given == plain
    assert repr(given) == repr(plain)  # they are kept as Python's own
    with pytest.raises(OptionError, match="max_tokens"):
        SamplingParams(max_tokens=np.float64(3.0))
    with pytest.raises(OptionError, match="top_k"):
        SamplingParams(top_k=np.True_)
