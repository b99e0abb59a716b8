"""The table of docs/options.md: each cell is proven here, or refused with its reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.option_table import (
    ANSWERS,
    LIKE_TRANSFORMERS,
    OPTIONS,
    columns,
    drafters,
    engine_of,
    refusal,
    sampled_p_value,
    tokens_of,
)
from engine.test_form_law import table_forms

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "options.json"
PAGE = ROOT / "docs" / "options.md"
COMPOSED = [column for column in columns() if refusal(*column) is None]
REFUSED = {column: why for column in columns() if (why := refusal(*column)) is not None}
FALSE_ALARM = 1e-6


@pytest.fixture(autouse=True)
def _forms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with table_forms(monkeypatch):
        yield


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("way", ["greedy", "seeded"])
def test_tokens_are_those_of_plain_decoding(option: str, way: str) -> None:
    plain = tokens_of(engine_of("none", "speculative"), option, way)
    for drafter, rule in COMPOSED:
        assert tokens_of(engine_of(drafter, rule), option, way) == plain, (drafter, rule)


def test_what_does_not_go_together_is_refused_with_its_reason() -> None:
    assert {drafter for drafter, _ in REFUSED} == {"draft, tree", "redrafter, sampled"}
    assert all(rule == "block" and "block" in why for (_, rule), why in REFUSED.items())


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, dict[str, float]]]:
    """P-values by option and column; where all options ran (`make results-options`), results and page are written."""
    values: dict[str, dict[str, float]] = {}
    yield values
    if set(values) == set(OPTIONS):
        refused = {f"{drafter} / {rule}": why for (drafter, rule), why in REFUSED.items()}
        record = {"answers": ANSWERS, "false_alarm": FALSE_ALARM, "p_values": values, "refused": refused}
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")
        PAGE.write_text(page(record))


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_sampled_answers_follow_their_law(option: str, found: dict[str, dict[str, float]]) -> None:
    """All columns. False alarms: once in a million runs of each cell."""
    cells = {f"{drafter} / {rule}": sampled_p_value(engine_of(drafter, rule), option) for drafter, rule in COMPOSED}
    assert min(cells.values()) > FALSE_ALARM, cells
    found[option] = cells


def test_the_page_is_what_was_found() -> None:
    record = json.loads(RESULTS.read_text())
    assert set(record["p_values"]) == set(OPTIONS)
    assert all(min(cells.values()) > FALSE_ALARM for cells in record["p_values"].values())
    assert set(record["refused"]) == {f"{drafter} / {rule}" for drafter, rule in REFUSED}
    assert PAGE.read_text() == page(record)


def page(record: dict[str, object]) -> str:
    """docs/options.md."""
    names = list(drafters())
    refused = record["refused"]
    assert isinstance(refused, dict)
    head = "| option | as transformers' | " + " | ".join(names) + " |"
    lines = [head, "|" + "---|" * (len(names) + 2)]
    for option in OPTIONS:
        cells = []
        for name in names:
            rules = [rule for rule in ("speculative", "block") if f"{name} / {rule}" not in refused]
            cells.append("= ~" if len(rules) == 2 else "= ~ ¹")
        same = "yes" if option in LIKE_TRANSFORMERS else "-"
        lines.append(f"| `{option}` | {same} | " + " | ".join(cells) + " |")
    reasons = "\n".join(f"- {column}: {why}." for column, why in refused.items())
    return TEXT.format(table="\n".join(lines), reasons=reasons, answers=record["answers"])


TEXT = """# Options, drafters and rules

This page says which sampling options stay exact with which drafters, under the rules `speculative` and `block`. Tests
make it (`make results-options`): each cell is proven on a language model of four tokens whose distributions can be
written down, and drafters that are right at times and wrong at others.

- **=** At temperature 0, and with a seed at temperature 1.2, the tokens, finish reasons and logprobs are those of plain
  decoding by the same engine, bit for bit.
- **~** Sampled at temperature 1.2, {answers} answers of two tokens follow the exact distribution that the option
  defines: a chi-square test whose false alarms come once in a million runs of a cell.
- **as transformers'**: what the option does to logits is held, number by number, to transformers' own processor.
- **¹** Under `speculative`; with `block` this drafter is refused when it is composed:

{reasons}

{table}

Lossy rules (`typical`, `speculative,lenience=L`) obey the same bans, biases and penalties, because they judge by the
same changed distributions; [Lossless](lossless.md#lossy-rules) says what they give up. Refused whatever drafts: a
`seed` with a lossy rule above temperature 0, `structured` with `ignore_eos`, `n` above 1 in `Engine.stream` (ask for
each sample by `submit`), and options about ids that the model does not have.
"""
