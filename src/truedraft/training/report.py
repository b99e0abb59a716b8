"""What trainings give back, and the model cards of trained folders, made from measured numbers only."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from truedraft.drafters.heads.calibration import PROMISED_ON
from truedraft.drafters.kinds import KINDS, dotted
from truedraft.errors import TruedraftError
from truedraft.files import parameters_in
from truedraft.machine import describe_machine
from truedraft.models import gguf
from truedraft.models.loading import resolve_source
from truedraft.models.smollm2 import ON_THE_HUB, WORD
from truedraft.training.evaluate import EngineEvaluation, PairReport
from truedraft.training.loop import typed_command
from truedraft.training.workspace import duration, write_whole

Rows: TypeAlias = Sequence[Sequence[str]]
"""A table for people; the first row is its heading."""


@dataclass(frozen=True)
class Effort:
    """What a training took.

    Attributes:
        written_tokens: that the target wrote to be trained on.
        steps: updates of the last stage.
        positions: that they saw, counted as often as they were seen.
        elapsed_s: of those steps.
    """

    written_tokens: int
    steps: int
    positions: int
    elapsed_s: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class HeadReport:
    """What heads are worth after a stage.

    Attributes:
        facts: found on held-out text, which differs from kind to kind; kept with the heads.
        evaluations: acceptance, measured in the engine on prompts that nothing was trained or fitted on.
        promised_on: the held-out text, in words; what drafters expect of their sizes was found on it.
        promised_by: tokens of it at one temperature.
    """

    facts: Mapping[str, Any]
    evaluations: Sequence[EngineEvaluation]
    promised_on: str = ""
    promised_by: int = 0

    @property
    def departures(self) -> list[str]:
        """For each round that did not serve what was promised, by more than chance among prompts, a sentence."""
        found = [each for each in self.evaluations if each.departs(self.promised_by, len(self.evaluations))]
        return [
            f"at temperature {each.temperature:g} with {size_of(each.about)} {each.about['promised']:.2f} tokens per "
            f"target call were promised and {each.stats.mean_acceptance_length:.2f} served"
            for each in found
        ]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        served = [each.as_dict() for each in self.evaluations]
        return {**self.facts, "served": served, "departures": self.departures, PROMISED_ON: self.promised_on}


@dataclass(frozen=True)
class JointReport:
    """What stage 2 did.

    Attributes:
        target: the folder of the new target.
        lora_rank: of the adapters that were merged into it; 0 where all weights were trained.
        loss_before: of the target on held-out text before, in nats per token.
        loss_after: the same of the new target.
        loss_tokens: how many tokens that is the mean of.
        before: the heads before, with the target before.
    """

    target: Path
    lora_rank: int
    loss_before: float
    loss_after: float
    loss_tokens: int
    before: HeadReport

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return vars(self) | {"target": str(self.target), "before": self.before.as_dict()}


@dataclass(frozen=True)
class HeadResult:
    """Trained heads: where they lie, what they are worth, and what it took.

    Attributes:
        folder: with the heads.
        report: what they are worth.
        effort: what it took.
        joint: of stage 2; None after stage 1.
    """

    folder: Path
    report: HeadReport
    effort: Effort
    joint: JointReport | None = None

    @property
    def evaluations(self) -> Sequence[EngineEvaluation]:
        """Acceptance, measured in the engine."""
        return self.report.evaluations

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        joint = {} if self.joint is None else {"joint": self.joint.as_dict()}
        return self.effort.as_dict() | self.report.as_dict() | joint


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


def _title(kind: str) -> str:
    """What cards call drafters of a kind."""
    known = KINDS.get(kind)
    return kind if known is None or not known.trains else str(dotted(known.trains).title)


def write_head_card(result: HeadResult, kind: str, target: str, data: str, device: str) -> None:
    """Write the card of trained heads.

    Args:
        result: of the training.
        kind: as `--drafter` names it.
        target: that they were trained for.
        data: what the prompts were cut from, in words.
        device: where they were trained.

    Raises:
        TrainingError: it cannot be written.
    """
    own = "" if result.joint is None else " The target was trained with them: it lies in `target`."
    effort = result.effort
    rows = training_facts(
        parameters=sum(map(parameters_in, result.folder.glob("*.safetensors"))),
        data=f"{effort.written_tokens:,} tokens that the target wrote, asked with {data}",
        steps=effort.steps,
        tokens=effort.positions,
        elapsed_s=effort.elapsed_s,
        machine=describe_machine(device),
    )
    measured = evaluation_facts(each.as_dict() for each in result.report.evaluations)
    Card(
        title=f"{_title(kind)} for {base_name(target)}",
        summary=f"Guess the next tokens of {base_name(target)}, which verifies them (speculative decoding): "
        f"`--drafter {kind}:FOLDER`. Trained with truedraft.{own}",
        facts=rows | {"finished": time.strftime("%Y-%m-%d")} | measured,
        license=licence_of(target) or "other",
        notes=f"Acceptance was measured in the engine, on prompts that nothing was trained on.\n\n{made_by(target)}",
        base_model=base_name(target),
        tags=("speculative-decoding", kind, "truedraft"),
        library="truedraft",
    ).write(result.folder)


def base_name(target: str) -> str:
    """A target as hubs name models: a name of a hub as it is, a folder by its own name."""
    name = ON_THE_HUB if target == WORD else target.replace(":", "-")
    return Path(name).resolve().name if name.count("/") != 1 or Path(name).is_dir() else name


def licence_of(target: str) -> str | None:
    """The licence that a target's own files name, as hubs call it; None where they name none."""
    from huggingface_hub import try_to_load_from_cache

    try:
        source = resolve_source(target)
        if gguf.is_one(source):
            return gguf.licence_of(source)
        card = Path(source) / "README.md" if Path(source).is_dir() else try_to_load_from_cache(source, "README.md")
        text = Path(card).read_text(encoding="utf-8") if isinstance(card, str | Path) else ""
    except (OSError, ValueError, TruedraftError):
        return None
    front = text.split("---")[1] if text.startswith("---") else ""
    found = re.search(r"^license: *([\w.-]+)", front, re.MULTILINE)
    return None if found is None else found[1]


def made_by(target: str) -> str:
    """Whose licence it is under, and the command of this process, for a card."""
    licence = licence_of(target)
    told = "which its files do not name" if licence is None else licence
    command = shlex.join(word for word in typed_command() if word != "--resume")
    return f"It learned from {base_name(target)}, and is under the licence of that: {told}.\n\nMade by\n\n    {command}"


def evaluation_facts(evaluations: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Rows of what the engine measured."""
    return dict(map(_evaluation_row, evaluations))


def _evaluation_row(found: Mapping[str, Any]) -> tuple[str, str]:
    """What the engine measured of drafts of one kind and size."""
    trees = f", {found['trees']} trees" if "trees" in found else ""
    promised = f" (promised {found['promised']:.2f})" if found.get("promised") is not None else ""
    name = f"tokens per target call, temperature {found['temperature']:g}, {size_of(found)}{trees}"
    return name, f"{found['mean_acceptance_length']:.2f}{promised}"


def size_of(about: Mapping[str, Any]) -> str:
    """Of a drafter, in words."""
    return f"{about['nodes']} nodes" if "nodes" in about else f"{about['num_speculative_tokens']} drafted tokens"


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
