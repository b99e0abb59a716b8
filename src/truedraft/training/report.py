"""Results of trainings: model cards, made only from measured numbers, and trackers that accelerate supports."""

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
from truedraft.errors import MissingExtraError, TruedraftError, UnknownOptionError
from truedraft.files import SMOLLM2, parameters_in
from truedraft.machine import describe_machine
from truedraft.models import gguf
from truedraft.models.embedded import SMOLLM2_ON_THE_HUB
from truedraft.models.loading import resolve_source
from truedraft.training.evaluate import EngineEvaluation, PairReport
from truedraft.training.loop import StepRecord, typed_command
from truedraft.training.workspace import duration, write_whole

Rows: TypeAlias = Sequence[Sequence[str]]  # a table for display; the first row is its heading
_PROJECT = "truedraft"
FOLDER = "tracker"  # folder for trackers that write files, in the folder of the training


@dataclass(frozen=True)
class Effort:
    """Updates of a training, positions in them (repeated ones count each time), and seconds of the updates."""

    written_tokens: int
    steps: int
    positions: int
    elapsed_s: float


@dataclass(frozen=True)
class HeadReport:
    """The quality of heads after a stage."""

    facts: Mapping[str, Any]  # measured on held-out text, different for each kind; saved with the heads
    evaluations: Sequence[EngineEvaluation]  # acceptance in the engine, on prompts not used for training or fitting
    promised_on: str = ""  # a description of the held-out text of the predictions
    promised_by: int = 0  # number of its tokens at one temperature

    @property
    def departures(self) -> list[str]:
        """A sentence for each round with a measurement that differs from its prediction by more than chance."""
        found = [each for each in self.evaluations if each.departs(self.promised_by, len(self.evaluations))]
        return [
            f"at temperature {each.temperature:g} with {size_of(each.about)} {each.about['promised']:.2f} tokens per "
            f"target call were promised and {each.stats.mean_acceptance_length:.2f} served"
            for each in found
        ]

    def as_dict(self) -> dict[str, Any]:
        served = [each.as_dict() for each in self.evaluations]
        return {**self.facts, "served": served, "departures": self.departures, PROMISED_ON: self.promised_on}


@dataclass(frozen=True)
class JointReport:
    """The results of stage 2; losses are means over `loss_tokens` held-out tokens, in nats.

    `lora_rank` is 0 where all weights were trained; `before` is the old heads with the old target.
    """

    target: Path
    lora_rank: int
    loss_before: float
    loss_after: float
    loss_tokens: int
    before: HeadReport

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"target": str(self.target), "before": self.before.as_dict()}


@dataclass(frozen=True)
class HeadResult:
    """Trained heads: their folder, report and effort; `joint` is of stage 2."""

    folder: Path
    report: HeadReport
    effort: Effort
    joint: JointReport | None = None

    @property
    def evaluations(self) -> Sequence[EngineEvaluation]:
        return self.report.evaluations

    def as_dict(self) -> dict[str, Any]:
        joint = {} if self.joint is None else {"joint": self.joint.as_dict()}
        return asdict(self.effort) | self.report.as_dict() | joint


@dataclass(frozen=True)
class Card:
    """A model card: title, summary and facts, as a table under a front matter for model hubs."""

    title: str
    summary: str
    facts: Mapping[str, str]
    license: str = "apache-2.0"
    notes: str = ""
    base_model: str | None = None
    tags: tuple[str, ...] = ()
    library: str = "transformers"

    def text(self) -> str:
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
        """Write README.md into the folder; TrainingError if that fails."""
        write_whole(folder / "README.md", self.text())


def write_card(
    folder: Path,
    target: str,
    title: str,
    summary: str,
    facts: Mapping[str, str],
    measured: Mapping[str, str],
    tag: str,
    *,
    library: str = "truedraft",
    notes: str = "",
) -> None:
    """Write the card of a drafter that was trained for a target; TrainingError if that fails."""
    name = base_name(target)
    Card(
        title=f"{title} for {name}",
        summary=summary,
        facts={**facts, "finished": time.strftime("%Y-%m-%d"), **measured},
        license=licence_of(target) or "other",
        notes=notes + made_by(target),
        base_model=name,
        tags=("speculative-decoding", tag, "truedraft"),
        library=library,
    ).write(folder)


def write_head_card(result: HeadResult, kind: str, target: str, data: str, device: str) -> None:
    """Write the card of trained heads, with `data` for the source of prompts; TrainingError if that fails."""
    known, effort = KINDS.get(kind), result.effort
    own = "" if result.joint is None else " The target was trained with them: it is in `target`."
    rows = training_facts(
        parameters=sum(map(parameters_in, result.folder.glob("*.safetensors"))),
        data=f"{effort.written_tokens:,} tokens that the target wrote, prompted with {data}",
        steps=effort.steps,
        tokens=effort.positions,
        elapsed_s=effort.elapsed_s,
        machine=describe_machine(device),
    )
    write_card(
        result.folder,
        target,
        kind if known is None or not known.trains else str(dotted(known.trains).title),
        f"Guess the next tokens of {base_name(target)}, which verifies them (speculative decoding): "
        f"`--drafter {kind}:FOLDER`. Trained with truedraft.{own}",
        rows,
        evaluation_facts(result.report.evaluations),
        kind,
        notes="Acceptance was measured in the engine, on prompts that nothing was trained on.\n\n",
    )


def base_name(target: str) -> str:
    """A target's model name: a hub name unchanged, a folder by its own name."""
    name = SMOLLM2_ON_THE_HUB if target == SMOLLM2 else target.replace(":", "-")
    return Path(name).resolve().name if name.count("/") != 1 or Path(name).is_dir() else name


def licence_of(target: str) -> str | None:
    """The licence in a target's own files, as hubs name it; None where they name none."""
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
    """The target's licence and the command of this process, for a card."""
    licence = licence_of(target)
    terms = "which its files do not name" if licence is None else licence
    command = shlex.join(word for word in typed_command() if word != "--resume")
    return (
        f"It learned from {base_name(target)}, and is under the licence of that: {terms}.\n\nMade by\n\n    {command}"
    )


def evaluation_facts(evaluations: Iterable[EngineEvaluation | Mapping[str, Any]]) -> dict[str, str]:
    """Rows with the engine's measurements, which may be records of them."""
    rows: dict[str, str] = {}
    for each in evaluations:
        found = each if isinstance(each, Mapping) else each.as_dict()
        trees = f", {found['trees']} trees" if "trees" in found else ""
        promised = f" (promised {found['promised']:.2f})" if found.get("promised") is not None else ""
        name = f"tokens per target call, temperature {found['temperature']:g}, {size_of(found)}{trees}"
        rows[name] = f"{found['mean_acceptance_length']:.2f}{promised}"
    return rows


def size_of(about: Mapping[str, Any]) -> str:
    """A drafter's size as text."""
    return f"{about['nodes']} nodes" if "nodes" in about else f"{about['num_speculative_tokens']} drafted tokens"


def training_facts(
    *, parameters: int, data: str, steps: int, tokens: int, elapsed_s: float, machine: str
) -> dict[str, str]:
    """The rows that every card has; the time is only that of the training steps."""
    return {
        "parameters": f"{parameters:,}",
        "data": data,
        "steps": f"{steps:,}",
        "tokens seen in training": f"{tokens:,}",
        "training time": duration(elapsed_s),
        "machine": machine,
    }


def pair_facts(report: PairReport) -> dict[str, str]:
    """The rows of a draft: its quality on held-out text."""
    return {
        "held-out tokens": f"{report.tokens:,}",
        "alpha = E[sum min(p, q)] at temperature 1": f"{report.alpha:.4f}",
        "greedy agreement with the target": f"{report.greedy_agreement:.4f}",
        "validation loss (nats per token)": f"{report.draft_loss:.4f}",
    }


class Tracker:
    """Reports the steps of a training, and the predicted and measured lengths, to a tracker.

    Raises MissingExtraError without accelerate or the tracker's package, UnknownOptionError for an unknown tracker.
    """

    def __init__(self, name: str, folder: Path, device: str) -> None:
        try:
            from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
            from accelerate.utils import LoggerType
        except ImportError as error:
            raise MissingExtraError("--tracker needs accelerate: pip install 'truedraft[train]'") from error
        if name not in LOGGER_TYPE_TO_CLASS:
            raise UnknownOptionError.nearest("tracker", name, map(str, LOGGER_TYPE_TO_CLASS))
        if name in LoggerType.list() and name not in map(str, get_available_trackers()):
            raise MissingExtraError(f"--tracker {name} needs its package, which is not installed: pip install {name}")
        self._name, self._folder, self._on_cpu = name, folder / FOLDER, device.startswith("cpu")
        self._accelerator: Any = None
        self._offset, self._last = 0, -1

    def step(self, record: StepRecord) -> None:
        if record.step <= self._last - self._offset:
            self._offset = self._last + 1
        self._last = record.step + self._offset
        values = {"learning_rate": record.learning_rate, "gradient_norm": record.gradient_norm}
        self._log(values | {"tokens": record.tokens} | record.values, self._last)

    def finish(self, evaluations: Iterable[EngineEvaluation]) -> None:
        values: dict[str, float] = {}
        for each in evaluations:
            words = [f"{name}_{value}" for name, value in each.about.items() if name != "promised"]
            size = "/".join([f"temperature_{each.temperature:g}", "_".join(words)])
            values[f"served/{size}"] = each.stats.mean_acceptance_length
            if each.about.get("promised") is not None:
                values[f"promised/{size}"] = each.about["promised"]
        self._log(values, self._last + 1)
        self._accelerator.end_training()

    def _log(self, values: dict[str, Any], step: int) -> None:
        """Starts the tracker with the first values, so that a refused training leaves nothing on disk."""
        if self._accelerator is None:
            from accelerate import Accelerator

            self._accelerator = Accelerator(cpu=self._on_cpu, log_with=self._name, project_dir=str(self._folder))
            self._accelerator.init_trackers(_PROJECT, {"command": " ".join(typed_command())})
        self._accelerator.log(values, step=step)
