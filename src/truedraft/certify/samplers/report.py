"""A sampler's certificate in words, as a page and as a record."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from truedraft.certify.checks import Status
from truedraft.certify.samplers.run import GOAL, SamplerCertificate


def verdict(certificate: SamplerCertificate) -> str:
    """The whole in one line."""
    name, found = certificate.name, certificate.diagnosis
    least = certificate.smallest_detectable
    if certificate.status is Status.HOLDS:
        return f"{name} is LOSSLESS as far as was tested: a total variation of {least:.3f} would have been found"
    if certificate.status is Status.FAILS and found is not None:
        return f"{name} DEVIATES from the target, measured as lossy: {found.fault} ({found.detail})"
    if found is not None:
        return (
            f"not enough evidence: {name} deviated once, and that did not repeat in the time given; give more --minutes"
        )
    return (
        f"not enough evidence: {name} shows no deviation, but one of up to {least:.3f} would not have been found, and "
        f"{GOAL:g} should be; give more --minutes"
    )


def sentences(certificate: SamplerCertificate) -> Iterator[str]:
    """What came of it, one thing after another."""
    for number, run in enumerate(certificate.runs, 1):
        words = [f"run {number}: e-value 1e{run.log10_e:.1f} after {run.rows} rows, {run.tokens} tokens"]
        for level, rows in run.rows_to.items():
            reached = f"after {rows} rows, {run.tokens_to[level]} tokens" if rows is not None else "not reached"
            words.append(f"{level} {reached}")
        yield "; ".join(words)
    yield (
        f"{certificate.accepted:.3f} drafted tokens kept for each row; speculative sampling keeps "
        f"{certificate.accepted_by_rule:.3f}, token by token"
    )
    found = certificate.diagnosis
    if found is not None:
        yield (
            f"likeliest: {found.fault}, {found.detail}; the next is {found.next_fault!r}, less likely by a factor of "
            f"1e{found.log10_over_next:.1f}"
        )
        yield from found.notes


def headings() -> tuple[str, ...]:
    """Of the table of worlds."""
    return ("world", "rows", "log10 e", "total variation", "by chance", "smallest detectable")


def world_rows(certificate: SamplerCertificate) -> Iterator[tuple[str, ...]]:
    """Of the table of worlds."""
    for each in certificate.worlds:
        numbers = (each.total_variation, each.by_chance, each.smallest_detectable)
        yield (each.name, str(each.rows), f"{each.log10_e:.1f}", *(f"{number:.4f}" for number in numbers))


def place_headings() -> tuple[str, ...]:
    """Of the table of places."""
    return ("place", "its worst world", "rows", "total variation", "by chance")


def place_rows(certificate: SamplerCertificate) -> Iterator[tuple[str, ...]]:
    """Of the table of places."""
    for each in certificate.places:
        yield (each.name, each.world, str(each.rows), f"{each.total_variation:.4f}", f"{each.by_chance:.4f}")


def as_dict(certificate: SamplerCertificate) -> dict[str, Any]:
    """For the JSON record."""
    record = dataclasses.asdict(certificate)
    return record | {
        "status": certificate.status.value,
        "lossless": certificate.status is Status.HOLDS,
        "smallest_detectable": certificate.smallest_detectable,
        "verdict": verdict(certificate),
    }


def markdown(certificate: SamplerCertificate, circumstances: Mapping[str, Any]) -> str:
    """A page.

    Args:
        certificate: what came out.
        circumstances: machine, versions and the like; shown as they are.
    """
    lines = ["# Certificate of a sampler", "", f"**{verdict(certificate)}**", ""]
    lines += [f"- {line}" for line in sentences(certificate)]
    lines += ["", *_table(headings(), world_rows(certificate)), ""]
    lines += _table(place_headings(), place_rows(certificate))
    lines += ["", *_table(("", ""), ((name, str(value)) for name, value in circumstances.items()))]
    return "\n".join([*lines, ""])


def _table(titles: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> list[str]:
    cells = [titles, ("---",) * len(titles), *rows]
    return [f"| {' | '.join(each.replace('|', ' ') for each in row)} |" for row in cells]
