"""Reports a training to a tracker that accelerate supports: TensorBoard, Weights & Biases, MLflow and others."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.errors import MissingExtraError, UnknownOptionError
from truedraft.training.loop import StepRecord, typed_command

if TYPE_CHECKING:
    from truedraft.training.evaluate import EngineEvaluation

_PROJECT = "truedraft"
FOLDER = "tracker"
"""Folder for trackers that write files, in the folder of the training."""


class Tracker:
    """Reports losses, rates and accuracies to a tracker at each step, and the predicted and measured lengths at the
    end.

    Raises:
        MissingExtraError: accelerate is not installed, or the tracker's package.
        UnknownOptionError: accelerate has no such tracker.
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
        self._behind, self._last = 0, -1

    def step(self, record: StepRecord) -> None:
        """Report a step; steps of a second stage follow those of the first."""
        if record.step <= self._last - self._behind:
            self._behind = self._last + 1
        self._last = record.step + self._behind
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
        """Start the tracker with the first values, so that a refused training leaves nothing on disk."""
        if self._accelerator is None:
            from accelerate import Accelerator

            self._accelerator = Accelerator(cpu=self._on_cpu, log_with=self._name, project_dir=str(self._folder))
            self._accelerator.init_trackers(_PROJECT, {"command": " ".join(typed_command())})
        self._accelerator.log(values, step=step)
