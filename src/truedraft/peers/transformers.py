"""Hugging Face's own `generate`: plain, assisted and with prompt lookup, on the same weights.

The model is loaded a second time, as transformers itself runs it: its own attention and its own cache. Nothing of
ours is switched on in it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from truedraft.core.params import SamplingParams
from truedraft.errors import ModelError
from truedraft.models.base import LanguageModel
from truedraft.models.loading import load_config, load_weights, quiet_transformers, resolve_source
from truedraft.peers.base import Outcome, PeerSetup, PeerSystems, System

LOOKUP_TOKENS = 10  # what transformers' documentation uses
ASSISTED = "transformers assisted"


@dataclass(frozen=True, slots=True)
class AssistedSetting:
    """How many tokens transformers' assistant drafts.

    Attributes:
        words: for reports.
        tokens: drafted in a round, at the start.
        schedule: "constant", or "heuristic": two more after full acceptance, else one less.
        confidence: the assistant stops below this probability; 0 never does.
    """

    words: str
    tokens: int
    schedule: str
    confidence: float


# The same length as our draft's default, transformers' own adaptation, and what it does when nothing is set.
ASSISTED_SETTINGS = (
    AssistedSetting("4 tokens", 4, "constant", 0.0),
    AssistedSetting("heuristic from 5", 5, "heuristic", 0.0),
    AssistedSetting("its defaults", 20, "constant", 0.4),
)


def transformers_systems(setup: PeerSetup) -> PeerSystems:
    """Plain generation; with one prompt at a time also prompt lookup and, with a draft, assisted generation.

    Raises:
        ModelError: the model cannot be loaded a second time.
    """
    model = load_stock(setup.model, setup.target, setup.pad_to)
    eos = setup.target.eos_token_ids
    systems: list[System] = [StockGenerate("transformers", model, eos)]
    if setup.batch > 1:
        note = (
            "transformers' assisted generation and prompt lookup take one prompt at a time, so they are left out at "
            f"batch {setup.batch}"
        )
        return PeerSystems(systems, {}, (note,))
    lookup = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    systems.append(StockGenerate("transformers lookup", model, eos, options=lookup))
    if setup.draft is None:
        note = "transformers' assisted generation is left out: no draft model is among the drafters"
        return PeerSystems(systems, {}, (note,))
    assistant = load_stock(setup.draft.name, setup.draft, None)
    assisted = [
        StockGenerate(f"{ASSISTED}, {setting.words}", model, eos, assistant=assistant, setting=setting)
        for setting in ASSISTED_SETTINGS
    ]
    return PeerSystems([*systems, *assisted], {ASSISTED: tuple(each.name for each in assisted)})


def load_stock(name: str, ours: LanguageModel, pad_to: str | None) -> PreTrainedModel:
    """The same weights as one of our models, as transformers runs them: same dtype, same device, own attention."""
    source = resolve_source(name)
    model = load_weights(source, load_config(source, name, None), name, ours.dtype, None)
    if pad_to is not None:
        from truedraft.models.padding import pad_model

        model = pad_model(model, pad_to)
    return model.to(ours.device).eval()


class StockGenerate(System):
    """One way of calling `generate`.

    Target calls are counted by a hook. A call that judges a draft is a target call; the first call of assisted
    generation already does, so its mean acceptance length counts that call and all tokens.

    Args:
        name: for reports.
        model: the target.
        eos_token_ids: ids that end an answer.
        assistant: the draft model of assisted generation.
        setting: how much it drafts.
        options: more keyword arguments of `generate`.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        eos_token_ids: Sequence[int],
        *,
        assistant: PreTrainedModel | None = None,
        setting: AssistedSetting | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.name = name
        self._model = model
        self._eos = tuple(eos_token_ids)
        self._assistant = assistant
        # One object for all calls: with the heuristic schedule, generate keeps in it what it learnt.
        self._schedule = None if setting is None else schedule_of(setting)
        self._options = options or {}

    @property
    def _drafts(self) -> bool:
        return self._assistant is not None or bool(self._options)

    def answer(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Outcome:
        """Answer prompts in one call, padded on the left."""
        ids, mask = left_padded(prompts, self._model.device)
        clock = _Clock()
        self._configure(params)
        extra = self._options | ({} if self._assistant is None else {"assistant_model": self._assistant})
        try:
            with quiet_transformers(), seeded(params.seed), _counting(self._model, self._assistant) as calls:
                out = self._model.generate(ids, attention_mask=mask, streamer=clock, **extra)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ModelError(f"transformers failed ({type(error).__name__}: {error})") from error
        answers = tuple(self._until_end(row, params) for row in out[:, ids.shape[1] :].tolist())
        tokens = sum(map(len, answers))
        first = clock.first_s
        later = max(calls.target - 1, 0)
        judged = calls.target if self._drafts else later
        emitted = tokens if self._drafts else tokens - len(answers)
        return Outcome(
            token_ids=answers,
            first_token_s=(first,) * len(answers),
            prefill_s=first or 0.0,
            forwards=later,
            draft_forwards=calls.draft,
            context_tokens=later * (sum(map(len, prompts)) + tokens // 2),  # answers grow from none to all tokens
            target_calls=judged * len(answers) if self._drafts else emitted,
            mean_acceptance_length=(emitted / judged if judged else 0.0) if self._drafts else 1.0,
            first_tokens=clock.first_tokens,
        )

    def _configure(self, params: SamplingParams) -> None:
        """Write the options where generate reads them: it fills what is unset from the model's own configuration."""
        eos = None if params.ignore_eos else list(self._eos) or None
        sampled = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
        if params.min_p:
            sampled["min_p"] = params.min_p
        self._model.generation_config = GenerationConfig(
            max_new_tokens=params.max_tokens,
            do_sample=not params.greedy,
            eos_token_id=eos,
            pad_token_id=(self._eos or (0,))[0],
            **({} if params.greedy else sampled),
        )
        if self._assistant is not None:
            self._assistant.generation_config = self._schedule

    def _until_end(self, tokens: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
        """Tokens before the one that ends the answer, as our engine counts them."""
        ends = () if params.ignore_eos else self._eos
        end = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
        return tuple(tokens[:end])


def schedule_of(setting: AssistedSetting) -> GenerationConfig:
    """What an assistant's configuration says of drafting."""
    return GenerationConfig(
        num_assistant_tokens=setting.tokens,
        num_assistant_tokens_schedule=setting.schedule,
        assistant_confidence_threshold=setting.confidence,
    )


class _Clock(BaseStreamer):
    """Notes when the first new tokens came, and how many for each prompt: with a draft there may be several."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._prompt_seen = False
        self.first_s: float | None = None
        self.first_tokens = 1

    def put(self, value: Tensor) -> None:
        """The prompt comes first, then new tokens as they are chosen."""
        if not self._prompt_seen:
            self._prompt_seen = True
        elif self.first_s is None:
            self.first_s = time.perf_counter() - self._started
            # One row of drafted tokens, or one token for each prompt of a batch.
            self.first_tokens = value.shape[1] if value.ndim > 1 else 1

    def end(self) -> None:
        """Nothing is held back."""


@dataclass(slots=True)
class _Calls:
    """Forwards that were made."""

    target: int = 0
    draft: int = 0


@contextlib.contextmanager
def _counting(model: PreTrainedModel, assistant: PreTrainedModel | None) -> Iterator[_Calls]:
    calls = _Calls()

    def of_target(*_: Any) -> None:
        calls.target += 1

    def of_draft(*_: Any) -> None:
        calls.draft += 1

    handles = [model.register_forward_pre_hook(of_target)]
    if assistant is not None:
        handles.append(assistant.register_forward_pre_hook(of_draft))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """transformers draws from torch's global state, which is as before afterwards."""
    with torch.random.fork_rng():
        if seed is not None:
            torch.manual_seed(seed % (1 << 63))
        yield


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and their mask, `[prompts, longest]`; what lies left of a prompt is masked."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask
