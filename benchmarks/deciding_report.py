"""What `make bench-deciding` found: tables as Markdown, each bar with whether it holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deciding_cells import BATCHES, ROWS, SIZES, Cell, Kept, all_cells
from deciding_sets import MIX, SETS
from turns import median_interval

Record = Mapping[str, Any]
Records = Sequence[Record]
_LEAST_EVER, _LEAST_SURE, _LEAST_POOLED = 0.97, 0.98, 0.99  # of row a
_LEAST_OF_BEST = 0.95  # of row b
_MIX_GAIN, _HEURISTIC_LOSS = 1.05, 0.98  # of row c


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing that must hold.

    Attributes:
        words: what.
        holds: None where nothing was measured, or only a part and nothing against it yet.
        found: the numbers behind it.
    """

    words: str
    holds: bool | None
    found: str

    @property
    def mark(self) -> str:
        return {True: "holds", False: "**fails**", None: "open"}[self.holds]


def bars(kept: Kept) -> list[Bar]:
    rows = {row: [record for record in kept.cells.values() if record["row"] == row] for row in ROWS}
    found = [*_bars_of_default(rows["a"], rows["sweep"]), _bar_of_best(rows["b"])]
    return [*found, *_bars_of_heuristic(rows["c"]), _bar_of_tokens(kept)]


def _verdict(row: str, records: Records, fails: Callable[[Record], bool], cells: Sequence[Cell] = ()) -> bool | None:
    """False if one fails, True if all are measured and none does."""
    if any(fails(record) for record in records):
        return False
    wanted = len(cells or [cell for cell in all_cells() if cell.row == row])
    return True if records and len(records) >= wanted else None


def _least(records: Records) -> str:
    if not records:
        return "not measured"
    worst = min(records, key=lambda record: record["ratio"])
    return f"least {worst['ratio']:.3f}{_interval(worst)}, {_place(worst)}; {len(records)} cells"


def _bars_of_default(default: Records, swept: Records) -> list[Bar]:
    surely = [record for record in default if record["high"] is not None and record["high"] < _LEAST_SURE]
    names = ", ".join(_place(record) for record in surely) or "none"
    even = cells_without_gain(default, swept)
    ratios = [ratio for record in even for ratio in record["ratios"]]
    pooled, known = _pooled(ratios), len(default) == len(swept) == len(SIZES) * len(SETS) * len(BATCHES)
    middle = statistics.median([record["ratio"] for record in even]) if even else 0.0
    told = "no such cell measured"
    if pooled:
        told = f"{pooled[0]:.3f} ({pooled[1]:.3f} to {pooled[2]:.3f}) over {len(ratios)} turns of {len(even)} cells; "
        told += f"the median of the cells' estimates is {middle:.3f}"
    holds = pooled[0] >= _LEAST_POOLED if pooled else None
    return [
        Bar(
            f"a: no estimate below {_LEAST_EVER}",
            _verdict("a", default, lambda record: record["ratio"] < _LEAST_EVER),
            _least(default),
        ),
        Bar(
            f"a: none significantly below {_LEAST_SURE}",
            _verdict("a", default, lambda record: record in surely),
            f"significantly below: {names}",
        ),
        Bar(
            f"a: pooled median at least {_LEAST_POOLED} where no swept configuration exceeds 1",
            holds if known or holds is False else None,
            told,
        ),
    ]


def cells_without_gain(default: Records, swept: Records) -> list[Record]:
    """Cells of row a in whose sweep no configuration exceeded 1."""
    gains = {(record["size"], record["set"], record["batch"]): max(record["speedups"].values()) for record in swept}
    return [record for record in default if gains.get((record["size"], record["set"], record["batch"]), 2.0) <= 1.0]


def _pooled(ratios: Sequence[float]) -> tuple[float, float, float] | None:
    return (statistics.median(ratios), *median_interval(ratios)) if ratios else None


def _bar_of_best(records: Records) -> Bar:
    words = f"b: at least {_LEAST_OF_BEST} of the best fixed configuration, each set and size"
    return Bar(words, _verdict("b", records, lambda record: record["ratio"] < _LEAST_OF_BEST), _least(records))


def _bars_of_heuristic(records: Records) -> list[Bar]:
    on_mix = [record for record in records if record["set"] == MIX]
    cells = [cell for cell in all_cells() if cell.row == "c" and cell.set == MIX]
    gain = _verdict("c", on_mix, lambda record: record["ratio"] < _MIX_GAIN, cells)
    never = _verdict("c", records, lambda record: record["ratio"] < _HEURISTIC_LOSS)
    return [
        Bar(f"c: at least {_MIX_GAIN} of the heuristic on {MIX}", gain, _least(on_mix)),
        Bar(f"c: never below {_HEURISTIC_LOSS} of the heuristic", never, _least(records)),
    ]


def _bar_of_tokens(kept: Kept) -> Bar:
    compared = sum(record.get("greedy_compared", 0) for record in kept.cells.values())
    different = [record for record in kept.cells.values() if record.get("greedy_different", 0)]
    told = f"{compared} pairs compared, {sum(each['greedy_different'] for each in different)} different"
    told += "".join(f"; {each['cell']}: {each['greedy_different']}" for each in different)
    return Bar("greedy answers are identical", None if not compared else not different, told)


def markdown(kept: Kept) -> str:
    wanted = all_cells()
    missed = [record for record in kept.cells.values() if record["status"] == "missed"]
    far = [record for record in kept.cells.values() if record["status"] == "far above"]
    parts = [
        f"Version {kept.key}: {len(kept.cells)} of {len(wanted)} cells measured, {len(missed)} of them missed (their "
        f"half-width is still above 0.02, marked ~), {len(far)} ended early, far above their bar with a half-width of "
        "2 % of their ratio (marked ^). Ratios of times per emitted token, prompts included; the first round of each "
        "cell warmed up and is dropped.",
        _where(kept),
        _table(["bar", "", "found"], [[bar.words, bar.mark, bar.found] for bar in bars(kept)]),
    ]
    for row, words in ROWS.items():
        records = {record["cell"]: record for record in kept.cells.values() if record["row"] == row}
        if records:
            parts.append(f"**{row}: {words}**\n\n" + _row_table(row, records))
    return "\n\n".join(part for part in parts if part)


def _where(kept: Kept) -> str:
    said = [f"{each['machine']['cpu']}, {each['threads']} threads, {each['dtype']}" for each in kept.sittings]
    return f"Measured in {len(said)} sittings on: {'; '.join(dict.fromkeys(said))}." if said else ""


def _row_table(row: str, records: Mapping[str, Record]) -> str:
    if row == "sweep":
        lines = [[_place(each), each["best"], _speedups(each)] for each in records.values()]
        return f"{_table(['cell', 'best', 'speed-ups'], lines)}\n\n{_families(list(records.values()))}"
    whole = _ratio_table(row, records, lambda record: record)
    behind = _ratio_table(row, records, lambda record: record["decoding"])
    return f"{whole}\n\nThe same answers behind their prompts, which are read alike by both:\n\n{behind}"


def _ratio_table(row: str, records: Mapping[str, Record], part: Callable[[Record], Record]) -> str:
    cells = [cell for cell in all_cells() if cell.row == row]
    columns = list(dict.fromkeys(_column(cell) for cell in cells))
    lines = []
    for name in dict.fromkeys(cell.set for cell in cells):
        own = {_column(cell): records.get(cell.name) for cell in cells if cell.set == name}
        lines.append([name, *(_ratio_words(own.get(column), part) for column in columns)])
    return _table(["set", *columns], lines)


def _column(cell: Cell) -> str:
    return f"{cell.size}, batch {cell.batch}"


def _ratio_words(record: Record | None, part: Callable[[Record], Record]) -> str:
    if record is None:
        return "-"
    mark = {"missed": "~", "far above": "^"}.get(record["status"], "")
    words = f"{part(record)['ratio']:.3f}{mark}{_interval(part(record))}"
    return words + (f" over {record['over']}" if record["row"] == "b" else "")


def _interval(record: Record) -> str:
    return "" if record["low"] is None else f" ({record['low']:.3f} to {record['high']:.3f})"


def _speedups(record: Record) -> str:
    found = sorted(record["speedups"].items(), key=lambda each: -each[1])
    return ", ".join(f"{words.replace('num_speculative_tokens=', '')} {value:.2f}" for words, value in found)


def _families(records: Records) -> str:
    """Which drafter when: of each kind the best length on each set, from the set that it serves least to the most."""
    kinds = list(dict.fromkeys(words.partition(",")[0] for each in records for words in each["speedups"]))
    places = list(dict.fromkeys((each["size"], each["batch"]) for each in records))
    lines = []
    for size, batch in places:
        own = [each["speedups"] for each in records if (each["size"], each["batch"]) == (size, batch)]
        lines.append([f"{size}, {batch}", *(_family([_of_kind(each, kind) for each in own]) for kind in kinds)])
    head = [f"{kind}, best length of each set" for kind in kinds]
    return f"By kind, over {len(SETS)} sets:\n\n{_table(['size, requests', *head], lines)}"


def _of_kind(speedups: Mapping[str, float], kind: str) -> Mapping[str, float]:
    return {words: value for words, value in speedups.items() if words.partition(",")[0] == kind}


def _family(sets: Sequence[Mapping[str, float]]) -> str:
    best = [max(each.items(), key=lambda pair: pair[1]) for each in sets if each]
    if not best:
        return "-"
    values = [value for _, value in best]
    lengths = sorted({words.rpartition("=")[2] for words, _ in best}, key=lambda each: (len(each), each))
    shown = lengths[0] if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    return f"{min(values):.2f} to {max(values):.2f} with {shown}"


def _place(record: Record) -> str:
    return str(record["cell"]).partition(" | ")[2].replace(" | ", ", ")


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [list(head), ["---"] * len(head), *map(list, lines)]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows)
