"""From the words of a benchmark to its contestants: one target, engines around it, and peers on the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from truedraft.bench.contestants import PLAIN, Contestant, OurEngine
from truedraft.bench.peers import PeerSetup, peer_contestants
from truedraft.drafters.base import Drafter
from truedraft.drafters.draft_model import DraftModel
from truedraft.drafters.specs import from_spec
from truedraft.engine import Engine
from truedraft.models.base import LanguageModel
from truedraft.models.dtypes import has_bfloat16
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.loading import load_model
from truedraft.verification.specs import rule_from_spec

if TYPE_CHECKING:
    import torch

_LEAST_BATCH = 32  # the engine's own limit; a larger batch raises it
_NO_DRAFTER = "none"


@dataclass(frozen=True, slots=True)
class LineupSetup:
    """What is to be measured, as it was typed.

    Attributes:
        model: the target.
        drafters: words for drafters; "none" adds nothing to plain decoding, which always takes part.
        peers: names of other libraries.
        rule: word for the rule.
        dtype: of all models.
        device: of all models.
        batch: prompts answered together.
        pad_to: size that the target is padded to, or None.
        fast_paths: whether our models may be packed and fused.
    """

    model: str
    drafters: tuple[str, ...] = ("auto",)
    peers: tuple[str, ...] = ()
    rule: str = "speculative"
    dtype: str = "auto"
    device: str = "auto"
    batch: int = 1
    pad_to: str | None = None
    fast_paths: bool = True


@dataclass(slots=True)
class Lineup:
    """Who takes part.

    Attributes:
        target: of our engines.
        lossless: whether the rule keeps the target's law.
        ours: our engines, plain decoding first.
        peers: contestants of other libraries.
        best_of: titles, each with the contestants of which only the best is shown.
        notes: what readers of a report should know, a sentence each.
        batch: prompts answered together.
    """

    target: HuggingFaceModel
    lossless: bool
    ours: list[OurEngine]
    peers: list[Contestant] = field(default_factory=list)
    best_of: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    batch: int = 1

    @property
    def contestants(self) -> list[Contestant]:
        """All of them, plain decoding first."""
        return [*self.ours, *self.peers]

    def redraft(self, contestant: OurEngine, drafter: Drafter) -> None:
        """Let one of our engines draft with another drafter.

        Raises:
            CompositionError: the drafter does not fit.
        """
        contestant.engine = Engine(self.target, drafter, contestant.engine.rule, max_batch=_room(self.batch))


def load_lineup(setup: LineupSetup) -> Lineup:
    """Load the target once for our engines, and once more for each peer.

    Raises:
        TruedraftError: something does not exist, cannot be loaded, or does not fit.
    """
    rule = rule_from_spec(setup.rule)
    target = load_model(
        setup.model, dtype=setup.dtype, device=setup.device, pad_to=setup.pad_to, fast_paths=setup.fast_paths
    )
    room = _room(setup.batch)
    ours = [OurEngine(PLAIN, Engine(target, max_batch=room))]
    for spec in setup.drafters:
        if spec == _NO_DRAFTER:
            continue
        drafter = from_spec(spec, target)
        name = _short_name(drafter.name if spec == "auto" else spec, [each.name for each in ours])
        ours.append(OurEngine(name, Engine(target, drafter, rule_from_spec(setup.rule), max_batch=room)))
    notes = _dtype_notes(setup.dtype, target.dtype, target.device)
    lineup = Lineup(target, rule.lossless, ours, notes=notes, batch=setup.batch)
    for peer in setup.peers:
        brought = peer_contestants(peer, _peer_setup(setup, lineup))
        lineup.peers += brought.contestants
        lineup.best_of |= brought.best_of
        lineup.notes += brought.notes
    return lineup


def _room(batch: int) -> int:
    """Requests that an engine must have room for."""
    return max(_LEAST_BATCH, batch)


def draft_model(engine: Engine) -> LanguageModel | None:
    """The draft model of an engine, if that is what drafts."""
    return engine.drafter.model if isinstance(engine.drafter, DraftModel) else None


def _peer_setup(setup: LineupSetup, lineup: Lineup) -> PeerSetup:
    """Peers draft with the first draft model among the drafters."""
    drafts = (draft_model(each.engine) for each in lineup.ours)
    draft = next((model for model in drafts if model is not None), None)
    return PeerSetup(lineup.target, setup.model, setup.pad_to, draft, setup.batch)


def _short_name(spec: str, taken: Sequence[str]) -> str:
    """The word with the last part of its path, which is enough for a table; the whole word where that is taken."""
    head, comma, options = spec.partition(",")
    kind, colon, path = head.partition(":")
    short = f"{kind}{colon}{Path(path).name if '/' in path else path}{comma}{options}"
    name = spec if short in taken else short
    return name if name not in taken else f"{name} ({taken.count(name) + 1})"


def _dtype_notes(asked: str, dtype: torch.dtype, device: torch.device) -> list[str]:
    """What to know where the CPU has no instructions for bfloat16."""
    if device.type != "cpu" or has_bfloat16(device):
        return []
    if asked == "auto":
        return [f"this CPU has no bfloat16 instructions, so {str(dtype).removeprefix('torch.')} is used"]
    if str(dtype) == "torch.bfloat16":
        return ["this CPU has no bfloat16 instructions, so bfloat16 is emulated, and slower than float32"]
    return []
