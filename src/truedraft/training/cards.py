"""Model cards: the README.md of a trained folder, made from measured numbers only."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from truedraft.training.budget import duration
from truedraft.training.disk import write_whole
from truedraft.training.machine import describe_machine
from truedraft.training.records import typed_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from truedraft.training.evaluate import PairReport
    from truedraft.training.head_job import HeadJob

_TITLES = {"medusa": "Medusa heads", "redrafter": "A recurrent head (ReDrafter)"}


@dataclass(frozen=True)
class Card:
    """A title, a sentence, and facts; written as a table under a front matter that model hubs read.

    Attributes:
        title: of the page.
        summary: what it is.
        facts: rows of the table.
        license: as hubs name it.
        notes: below the table.
        base_model: the target that it drafts for, as hubs name models; None says nothing.
        tags: that it is found by.
        library: that loads it.
    """

    title: str
    summary: str
    facts: Mapping[str, str]
    license: str = "apache-2.0"
    notes: str = ""
    base_model: str | None = None
    tags: tuple[str, ...] = ()
    library: str = "transformers"

    def text(self) -> str:
        """The card in Markdown."""
        rows = "\n".join(f"| {name} | {value} |" for name, value in self.facts.items())
        front = [f"license: {self.license}", "pipeline_tag: text-generation", f"library_name: {self.library}"]
        if self.base_model is not None:
            front.append(f"base_model: {json.dumps(self.base_model)}")
        if self.tags:
            front += ["tags:", *(f"- {tag}" for tag in self.tags)]
        notes = f"\n{self.notes.strip()}\n" if self.notes else ""
        head = "\n".join(("---", *front, "---", "", f"# {self.title}", "", self.summary))
        return f"{head}\n\n| | |\n|---|---|\n{rows}\n{notes}"

    def write(self, folder: Path) -> None:
        """Write README.md into the folder.

        Raises:
            TrainingError: it cannot be written.
        """
        write_whole(folder / "README.md", self.text())


def write_head_card(job: HeadJob[Any], kind: str, folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the card of trained heads.

    Args:
        job: what they were trained from.
        kind: "medusa" or "redrafter", as `--drafter` names it.
        folder: of the heads.
        facts: what it took and what was measured, as the training gives it back.

    Raises:
        TrainingError: it cannot be written.
    """
    own = " The target was trained with them: it lies in `target`." if "joint" in facts else ""
    rows = training_facts(
        parameters=_parameters(folder),
        data=f"{facts['written_tokens']:,} tokens that the target wrote, asked with pieces of {job.data}",
        steps=facts["steps"],
        tokens=facts["positions"],
        elapsed_s=facts["elapsed_s"],
        machine=describe_machine(job.config.device),
    )
    rows |= {"finished": time.strftime("%Y-%m-%d")} | served_facts(facts["served"])
    Card(
        title=f"{_TITLES[kind]} for {base_name(job.target)}",
        summary=f"Guess the next tokens of {base_name(job.target)}, which verifies them (speculative decoding): "
        f"`--drafter {kind}:FOLDER`. Trained with truedraft.{own}",
        facts=rows,
        license="other",
        notes=f"Acceptance was measured in the engine, on prompts that nothing was trained on.\n\n{made_by()}",
        base_model=base_name(job.target),
        tags=("speculative-decoding", kind, "truedraft"),
        library="truedraft",
    ).write(folder)


def base_name(target: str) -> str:
    """A target as hubs name models: a name of a hub as it is, a folder by its own name."""
    name = target.replace(":", "-")
    return Path(name).resolve().name if name.count("/") != 1 or Path(name).is_dir() else name


def made_by() -> str:
    """The command of this process, for a card."""
    return f"Made by\n\n    {shlex.join(word for word in typed_command() if word != '--resume')}"


def served_facts(served: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Rows of what the engine measured."""
    return dict(map(_served_row, served))


def _served_row(served: Mapping[str, Any]) -> tuple[str, str]:
    """What the engine measured of drafts of one kind and size."""
    trees = f", {served['trees']} trees" if "trees" in served else ""
    size = f"{served['nodes']} nodes" if "nodes" in served else f"{served['num_speculative_tokens']} drafted tokens"
    promised = f" (promised {served['promised']:.2f})" if served.get("promised") is not None else ""
    name = f"tokens per target call, temperature {served['temperature']:g}, {size}{trees}"
    return name, f"{served['mean_acceptance_length']:.2f}{promised}"


def _parameters(folder: Path) -> int:
    found = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found += sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118  (no mapping)
    return found


def training_facts(
    *, parameters: int, data: str, steps: int, tokens: int, elapsed_s: float, machine: str
) -> dict[str, str]:
    """The rows that every card has; the time is that of the training steps alone."""
    return {
        "parameters": f"{parameters:,}",
        "data": data,
        "steps": f"{steps:,}",
        "tokens seen in training": f"{tokens:,}",
        "training time": duration(elapsed_s),
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
