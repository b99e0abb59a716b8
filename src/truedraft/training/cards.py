"""Model cards: the README.md of a trained folder, made from measured numbers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from truedraft.training.evaluate import PairReport


@dataclass(frozen=True)
class Card:
    """A title, a sentence, and facts; written as a table under a front matter that model hubs read."""

    title: str
    summary: str
    facts: Mapping[str, str]
    license: str = "apache-2.0"
    notes: str = ""

    def text(self) -> str:
        """The card in Markdown."""
        rows = "\n".join(f"| {name} | {value} |" for name, value in self.facts.items())
        front = f"---\nlicense: {self.license}\npipeline_tag: text-generation\nlibrary_name: transformers\n---\n"
        notes = f"\n{self.notes.strip()}\n" if self.notes else ""
        return f"{front}\n# {self.title}\n\n{self.summary}\n\n| | |\n|---|---|\n{rows}\n{notes}"

    def write(self, folder: Path) -> None:
        """Write README.md into the folder."""
        (folder / "README.md").write_text(self.text(), encoding="utf-8")


def training_facts(
    *, parameters: int, data: str, steps: int, tokens: int, elapsed_s: float, machine: str
) -> dict[str, str]:
    """The rows that every card has; the time is that of the training steps alone."""
    return {
        "parameters": f"{parameters:,}",
        "data": data,
        "steps": f"{steps:,}",
        "tokens seen in training": f"{tokens:,}",
        "training time": f"{elapsed_s / 60:.0f} minutes" if elapsed_s >= 90 else f"{elapsed_s:.1f} seconds",
        "machine": machine,
    }


def pair_facts(report: PairReport) -> dict[str, str]:
    """The rows of a draft: what it is worth to its target on held-out text."""
    return {
        "held-out tokens": f"{report.tokens:,}",
        "alpha = E[sum min(p, q)] at temperature 1": f"{report.alpha:.4f}",
        "greedy agreement with the target": f"{report.greedy_agreement:.4f}",
        "validation loss (nats per token)": f"{report.draft_loss:.4f}",
    }
