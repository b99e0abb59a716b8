"""Hugging Face's `generate` as systems under test: plain, with prompt lookup and assisted, on the same weights."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch.nn import Module

from truedraft.core.params import SamplingParams
from truedraft.measure.bench.runs import System, SystemOutput
from truedraft.measure.peers.transformers import AssistedSetting, Generate, Way, assisted_way, load_stock, lookup_way
from truedraft.models.base import LanguageModel
from truedraft.options import ModelOptions

ASSISTED = "transformers assisted"
# The length of our draft's default, transformers' own adaptation, and its default behaviour.
_SETTINGS = (
    AssistedSetting("4 tokens", 4, "constant", 0.0),
    AssistedSetting("heuristic from 5", 5, "heuristic", 0.0),
    AssistedSetting("its defaults", 20, "constant", 0.4),
)


def generate_systems(
    target: LanguageModel, loaded: ModelOptions, draft: LanguageModel | None, batch: int
) -> tuple[list[System], str]:
    """Plain generation; with one prompt at a time also prompt lookup and, with a draft, assisted generation.

    Returns:
        The systems, and a sentence on systems left out; "" where there are none.

    Raises:
        ModelError: a model cannot be loaded a second time.
    """
    model = load_stock(loaded.model, target, loaded.pad_to)

    ways, left_out = {"transformers": Way()}, ""
    if batch > 1:
        left_out = (
            "transformers' assisted generation and prompt lookup take one prompt at a time, so they are left out at "
            f"batch {batch}"
        )
    else:
        ways["transformers lookup"] = lookup_way()
        if draft is None:
            left_out = "transformers' assisted generation is left out: no draft model is among the drafters"
        else:
            assistant = load_stock(draft.name, draft, None)
            ways |= {f"{ASSISTED}, {setting.words}": assisted_way(assistant, setting) for setting in _SETTINGS}
    return [GenerateSystem(name, Generate(model, target.eos_token_ids, way)) for name, way in ways.items()], left_out


class GenerateSystem(System):
    """One way of calling `generate`.

    Target calls are counted by a hook, calls that verify a draft included. The first call of assisted generation
    already verifies one, so its mean acceptance length includes it.
    """

    def __init__(self, name: str, engine: Generate) -> None:
        self.name = name
        self.engine = engine

    def answer(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> SystemOutput:
        drafts, started = self.engine.way.drafts, time.perf_counter()
        came: list[tuple[float, int]] = []  # seconds until tokens arrived, and how many for each prompt
        with _counting(self.engine.model) as target, _counting(self.engine.way.assistant) as draft:
            replies = self.engine.call(
                prompts, params, lambda count: came.append((time.perf_counter() - started, count))
            )
        answers = tuple(reply.token_ids for reply in replies)
        tokens = sum(map(len, answers))
        first, first_tokens = came[0] if came else (None, 1)
        later = max(len(target) - 1, 0)
        judged = len(target) if drafts else later
        emitted = tokens if drafts else tokens - len(answers)
        return SystemOutput(
            token_ids=answers,
            first_token_s=(first,) * len(answers),
            prefill_s=first or 0.0,
            forwards=later,
            draft_forwards=len(draft),
            context_tokens=later * (sum(map(len, prompts)) + tokens // 2),  # answers grow from none to all tokens
            target_calls=judged * len(answers) if drafts else emitted,
            mean_acceptance_length=(emitted / judged if judged else 0.0) if drafts else 1.0,
            first_tokens=first_tokens,
        )


@contextlib.contextmanager
def _counting(model: Module | None) -> Iterator[list[None]]:
    calls: list[None] = []

    def count(*_: Any) -> None:
        calls.append(None)

    handle = None if model is None else model.register_forward_pre_hook(count)
    try:
        yield calls
    finally:
        if handle is not None:
            handle.remove()
