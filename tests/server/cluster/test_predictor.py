"""Rows of prompts answered: by the class alone, as Ray's workers call it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from truedraft import Engine, SamplingParams, load_model
from truedraft.errors import DataError
from truedraft.server.cluster.predictor import Predictor

TEXTS = ["import os", "x = ", "class Stack:"]


def column(*values: Any) -> Any:
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor("embedded:target", "prompt-lookup", params={"max_tokens": 6})


def test_rows_get_the_answers_of_the_engine_with_their_own_options(predictor: Predictor) -> None:
    temperatures, seeds = np.array([0.0, 1.0, 1.0]), np.array([0, 3, 4])
    found = predictor({"prompt": column(*TEXTS), "temperature": temperatures, "seed": seeds, "id": [7, 8, 9]})
    engine = Engine(load_model("embedded:target"))
    for row, text in enumerate(TEXTS):
        alone = engine.generate(text, SamplingParams(6, float(temperatures[row]), seed=int(seeds[row])))
        assert (found["answer"][row], found["answer_ids"][row].tolist()) == (alone.text, alone.token_ids)
    assert list(found["finish_reason"]) == ["length"] * 3 and list(found["error"]) == [""] * 3
    assert found["id"] == [7, 8, 9]


def test_a_row_that_fails_stays_a_row_with_its_error(predictor: Predictor) -> None:
    rows = {"prompt": column("import os", "", None, [5, 6, 1 << 40], [5, 6]), "max_tokens": [4, 4, 4, 4, 0]}
    found = predictor(rows)
    assert list(found["finish_reason"]) == ["length"] + ["error"] * 4
    assert [bool(each) for each in found["error"]] == [False] + [True] * 4 and found["answer"][0]
    assert "prompt is empty" in found["error"][1] and "max_tokens" in found["error"][4]


def test_token_ids_are_prompts_too_and_a_missing_column_is_named(predictor: Predictor) -> None:
    ids = load_model("embedded:target").tokenizer.encode("import os")  # type: ignore[union-attr]
    found = predictor({"prompt": column(np.array(ids), "import os")})
    assert found["answer"][0] == found["answer"][1]
    with pytest.raises(DataError, match="no column 'prompt' of prompts; there are id, text"):
        predictor({"text": column("x"), "id": [1]})


def test_a_chat_needs_a_template() -> None:
    chatting = Predictor("embedded:target", "prompt-lookup", chat=True)
    assert "template" in chatting({"prompt": column("hello")})["error"][0]
