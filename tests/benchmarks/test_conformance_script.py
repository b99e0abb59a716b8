"""A family of each mechanism through the script behind `make conformance`, a few cells each; one that is refused."""

from __future__ import annotations

import json

import pytest

import conformance

CELLS = [
    conformance.Cell("none", "speculative", "greedy", 8),
    conformance.Cell("prompt-lookup", "speculative", "seeded", 8),
    conformance.Cell("draft", "block", "sampled", 8),
    conformance.Cell("draft tree", "speculative", "greedy", 1),
]
MECHANISMS = {
    "llama": "packed (native)",
    "mixtral": "packed (native)",
    "mistral": "packed (fused)",
    "olmoe": "packed (stock)",
    "qwen3_next": "packed (stock, carried states)",
    "bailing_hybrid": "packed (stock, carried states)",  # with float32 parameters in a bfloat16 model
    "whisper": "packed (stock)",  # that gives logits of all rows, whatever it is asked for
    "gpt_neo": "one text at a time",
    "hy_v4": "one text at a time",  # whose LM head is kept in float32 beside bfloat16
    "emu3": "packed (stock)",  # that also sees
    "zaya": "packed (stock, carried states)",  # whose attention is given what carries them
    "inkling2_text": "one text at a time, behind copies of its cache",
    "openai-gpt": "the whole text at every step",
    "t5, encoder-decoder": "encoder-decoder, one text at a time",
}


@pytest.fixture(autouse=True)
def _few_and_short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "COUNT", 10)
    monkeypatch.setattr(conformance, "PROMPTS", conformance.PROMPTS[:5])


@pytest.fixture(scope="module")
def shapes() -> dict[str, object]:
    found: dict[str, object] = json.loads(conformance.SHAPES.read_text())
    return found


TESTED = {"llama", "qwen3_next", "whisper", "gpt_neo", "zaya", "inkling2_text", "mixtral", "hy_v4"}
"""For whose mechanisms there are tests in tests/models and tests/families."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] if name in TESTED else []) for name in MECHANISMS]
)
def test_a_family_of_each_mechanism_is_exact(
    family: str, shapes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "bailing_hybrid":  # what is its own shows in bfloat16
        monkeypatch.setattr(conformance, "DTYPES", ("bfloat16",))
    for line in conformance.examine(family, CELLS, shapes):
        assert line["outcome"] == "exact", line
        assert line["cells"] == len(CELLS) and line["distinct"] > 4
        if line["dtype"] == "float32":
            assert line["mechanism"] == MECHANISMS[family] or line["mechanism"].startswith("packed (")


def test_what_is_refused_says_why_and_no_tables_break(shapes: dict[str, object]) -> None:
    lines = conformance.examine("xlnet", CELLS, shapes)
    assert conformance.examine("xlnet", CELLS, shapes, end=0.0) == []
    assert {line["outcome"] for line in lines} <= {"refused", "not built"}
    assert all(line["reason"] and "\n" not in line["reason"] for line in lines)
    assert "| xlnet |" in conformance.report(lines)


def test_pairs_of_values_meet_in_the_short_form() -> None:
    """But those that no cell of the full form holds."""

    def pairs(cells: list[conformance.Cell]) -> set[tuple[object, ...]]:
        columns = [(cell.drafter, cell.rule, cell.way, cell.batch) for cell in cells]
        return {(i, row[i], j, row[j]) for row in columns for i in range(4) for j in range(i + 1, 4)}

    assert pairs(conformance.PAIRWISE) == pairs(conformance.EVERY)
