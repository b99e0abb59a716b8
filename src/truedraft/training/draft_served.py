"""The mean acceptance length of a draft model, measured in the very engine that serves it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.drafters.draft_model import DraftModel
from truedraft.models.loading import load_model
from truedraft.planning import TREE_TEMPERATURES
from truedraft.training.acceptance import count_answers

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PROMPTS, _LENGTH = 32, 64


@dataclass(frozen=True, slots=True)
class ServedDraft:
    """What a chain of drafted tokens brought at one temperature.

    Attributes:
        temperature: of the requests.
        num_speculative_tokens: of the chain.
        mean_acceptance_length: emitted tokens per target call, measured.
        draft_acceptance_rate: accepted of the drafted tokens.
        target_calls: that were measured.
        emitted_tokens: by them.
    """

    temperature: float
    num_speculative_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    target_calls: int
    emitted_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def measure_draft(
    target: str | Path, draft: Path, held_out: NDArray[np.uint32], device: str, within_s: float | None = None
) -> list[ServedDraft]:
    """Continue pieces of held-out text, greedily and at temperature 1, with the chain that is the default.

    Args:
        target: a name, or a folder.
        draft: the folder of a draft for it.
        held_out: a stream of ids.
        device: where both run.
        within_s: seconds for all of it; None is as long as it takes.

    Raises:
        UnsupportedModelError: the engine cannot run the target.
        TrainingError: the engine failed.
    """
    model = load_model(target, device=device)
    drafter = DraftModel(load_model(draft, device=device))
    count = min(_PROMPTS, max(1, len(held_out) // _LENGTH))
    starts = [number * len(held_out) // count for number in range(count)]
    prompts = [held_out[start : start + _LENGTH].tolist() for start in starts]
    each_s = None if within_s is None else within_s / len(TREE_TEMPERATURES)
    found = []
    for temperature in TREE_TEMPERATURES.values():
        stats = count_answers(model, drafter, prompts, temperature, each_s)
        rates = (stats.mean_acceptance_length, stats.draft_acceptance_rate)
        found.append(ServedDraft(temperature, drafter.limits.depth, *rates, stats.target_calls, stats.emitted_tokens))
    return found
