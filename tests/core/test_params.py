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
    ("max_tokens", 0),
    ("max_tokens", -3),
    ("max_tokens", 2.0),
    ("max_tokens", True),
    ("max_tokens", "many"),
    ("max_tokens", None),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_k", True),
    ("top_p", 0.0),
    ("top_p", -0.5),
    ("top_p", 1.0000001),
    ("top_p", math.nan),
    ("min_p", -1e-9),
    ("min_p", 1.1),
    ("min_p", math.nan),
    ("seed", -1),
    ("seed", 1.0),
    ("seed", False),
    ("seed", "7"),
]
WRONG_TYPES = [
    ("temperature", "hot"),
    ("temperature", None),
    ("top_p", "0.9"),
    ("min_p", None),
    ("stop_token_ids", 5),
    ("stop", None),
    ("stop", 5),
]


@pytest.mark.parametrize(("option", "value"), BAD, ids=str)
def test_bad_values_are_named(option: str, value: object) -> None:
    with pytest.raises(OptionError, match=rf"{option} .*{re.escape(repr(value))}"):
        SamplingParams(**{option: value})


@pytest.mark.parametrize(("option", "value"), WRONG_TYPES, ids=str)
def test_values_of_a_wrong_type_are_named_too(option: str, value: object) -> None:
    with pytest.raises(OptionError, match=option):
        SamplingParams(**{option: value})


def test_an_option_error_is_a_value_error_and_ours() -> None:
    with pytest.raises(ValueError, match="top_p") as caught:
        SamplingParams(top_p=2.0)
    assert isinstance(caught.value, TruedraftError)


@pytest.mark.parametrize(
    "good",
    [
        {"max_tokens": 1},
        {"temperature": 0},
        {"temperature": 5.5},
        {"top_k": 10**6},
        {"top_p": 1.0},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"min_p": 0.0},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"stop": ()},
        {"stop_token_ids": (0, 5)},
    ],
    ids=str,
)
def test_good_values_stay(good: dict) -> None:
    (option, value), params = next(iter(good.items())), SamplingParams(**good)
    assert getattr(params, option) == value


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


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert SamplingParams(temperature=-0.0).greedy
    assert not SamplingParams(temperature=1e-300).greedy


def test_params_are_frozen_and_equal_by_value() -> None:
    params = SamplingParams(stop=["a"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3
    assert params == SamplingParams(stop=("a",))
    assert hash(params) == hash(SamplingParams(stop=("a",)))


@pytest.mark.parametrize("value", ["no", "false", 0, 1, None, []])
def test_what_is_true_or_false_is_a_boolean(value: object) -> None:
    with pytest.raises(OptionError, match=f"ignore_eos must be True or False, got {value!r}".replace("[", r"\[")):
        SamplingParams(ignore_eos=value)  # type: ignore[arg-type]


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
