"""Learned modules on disk: `FOLDER/versions/N`, and `FOLDER/current.json`, which names the served one.

A version is complete before it is named as served, so a process that is killed leaves one that loads.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from torch import nn

from truedraft.errors import CompositionError, ModelError, OptionError, errors_about
from truedraft.files import object_of, take_place, written_whole
from truedraft.models.base import LanguageModel
from truedraft.models.checkpoint import weights_hash
from truedraft.training.online.learnable import Learnable

_POINTER, _VERSIONS = "current.json", "versions"
_KEPT = 4  # versions in addition to the served one


class Versions:
    """The versions of one drafter's module; its origin is version 0 and is not written.

    Raises OptionError for versions of another drafter or target, ModelError if the target's weights cannot be read.
    """

    def __init__(self, folder: Path, learnable: Learnable[Any], target: LanguageModel) -> None:
        self._folder, self._learnable = folder, learnable
        self._about = {"kind": learnable.kind, "origin": weights_hash(learnable.origin), "target": target.fingerprint}
        kept = object_of(folder / _POINTER)
        if kept and (differ := [name for name, each in self._about.items() if kept.get(name) != each]):
            raise OptionError(
                f"{str(folder)!r} holds versions of another {differ[0]} ({kept.get(differ[0])!r}, here it is "
                f"{self._about[differ[0]]!r}); name another folder",
                field="learn_folder",
            )

    def load(self) -> tuple[int, nn.Module] | None:
        """The version served last, None if the origin; OptionError if it is missing, damaged or does not fit."""
        number = object_of(self._folder / _POINTER).get("version", 0)
        if not number:
            return None
        path = self._folder / _VERSIONS / str(number)
        try:
            with errors_about("learn_folder"):
                return int(number), self._learnable.load(path)
        except (ModelError, CompositionError) as error:
            raise OptionError(
                f"{str(path)!r} cannot be served ({error}); remove the folder", field="learn_folder"
            ) from error

    def write(self, module: nn.Module) -> int:
        """Write a version, not yet named as served, and return its number; ModelError if that fails."""
        versions = self._folder / _VERSIONS
        try:
            versions.mkdir(parents=True, exist_ok=True)
            there = sorted(int(each.name) for each in versions.iterdir() if each.name.isdecimal())
            number = max(there, default=0) + 1
            partial = versions / f"{number}.tmp"
            shutil.rmtree(partial, ignore_errors=True)
            self._learnable.save(module, partial)
            for file in partial.iterdir():
                take_place(file, file)  # flushes it to the disk
            take_place(partial, versions / str(number))
            served = object_of(self._folder / _POINTER).get("version", 0)
            for each in there[:-_KEPT]:
                if each != served:
                    shutil.rmtree(versions / str(each), ignore_errors=True)
        except OSError as error:
            raise ModelError(f"cannot write a version into {str(versions)!r} ({error}); make room there") from error
        return number

    def name(self, number: int) -> None:
        """Name a version as the served one, 0 for the origin; ModelError if that fails."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with written_whole(self._folder / _POINTER) as file:
                file.write(json.dumps({"version": number, **self._about}).encode() + b"\n")
        except OSError as error:
            raise ModelError(f"cannot write {str(self._folder / _POINTER)!r} ({error}); make room there") from error
