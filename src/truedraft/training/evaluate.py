"""Quality of a model and of a pair on held-out text, and of a drafter in the serving engine.

Figures on text are means over whole, non-overlapping blocks: each token is predicted once, from its block before it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from truedraft.core.intervals import CONFIDENCE, Interval, ratio_over_prompts
from truedraft.core.params import SamplingParams
from truedraft.core.stats import Counters
from truedraft.drafters.base import Drafter
from truedraft.engine import Engine
from truedraft.errors import DataError, TrainingError
from truedraft.measure import traces_of_answers, walk_along
from truedraft.models.base import LanguageModel
from truedraft.training.workspace import TimeBudget

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from truedraft.training.texts.self_distillation import SelfDistillationData

_AT_ONCE = 4  # prompts answered together with a time limit
_FEWEST = 8  # least answers to estimate how much prompts differ
_LEAST = 0.05  # allowed relative error of a prediction
_CHANCE = 0.01  # of a false report on a sound training
_LEAST_CALLS = 16  # of the target, even if the time is up
_WALKED = 16  # answers with vectors in memory at once
_TOKENS = 128  # of an answer, at most half the context


@dataclass(frozen=True)
class PairReport:
    """How well a draft approximates its target, at temperature 1 and greedily."""

    tokens: int
    alpha: float  # E[sum_x min(p(x), q(x))]: the acceptance rate of single drafted tokens
    greedy_agreement: float  # share of positions with the same likeliest token
    draft_loss: float  # the draft's, in nats per token


def context_of(model: PreTrainedModel) -> int:
    """The context length in a model's configuration; 2,048 tokens where it has none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2048


def mean_loss(
    model: PreTrainedModel, stream: NDArray[np.uint32], *, length: int = 2048, max_tokens: int | None = None
) -> tuple[float, int]:
    """The model's loss along the stream, in nats per token, and the number of tokens."""
    total, count = 0.0, 0
    for block in _blocks(stream, length, max_tokens, model.device):
        total += _loss(_log_probs(model, block), block)
        count += block.shape[1] - 1
    return total / count, count


def evaluate_pair(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    stream: NDArray[np.uint32],
    *,
    length: int = 2048,
    max_tokens: int | None = None,
) -> PairReport:
    """Alpha and greedy agreement along the stream (on the text's own tokens, not the models' answers)."""
    overlap, agreed, loss, count = 0.0, 0, 0.0, 0
    for block in _blocks(stream, length, max_tokens, target.device):
        p, q = _log_probs(target, block), _log_probs(draft, block)  # [length, vocab]
        overlap += float(torch.minimum(p, q).exp().sum())
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        loss += _loss(q, block)
        count += block.shape[1] - 1
    return PairReport(count, overlap / count, agreed / count, loss / count)


def _blocks(
    stream: NDArray[np.uint32], length: int, max_tokens: int | None, device: torch.device
) -> Iterator[torch.Tensor]:
    """Blocks of up to length + 1 tokens that share one token with the next: int64 [1, .]."""
    end = len(stream) if max_tokens is None else min(len(stream), max_tokens + 1)
    if end < 2:
        raise DataError("the held-out text has fewer than two tokens, so nothing can be measured on it: give more text")
    for start in range(0, end - 1, length):
        yield torch.from_numpy(stream[start : min(start + length + 1, end)].astype("int64")).to(device)[None]


@torch.no_grad()
def _log_probs(model: PreTrainedModel, block: torch.Tensor) -> torch.Tensor:
    training = model.training
    model.eval()
    logits = model(input_ids=block[:, :-1], use_cache=False).logits[0]
    model.train(training)
    return functional.log_softmax(logits.float(), dim=-1)


def _loss(log_probs: torch.Tensor, block: torch.Tensor) -> float:
    return -float(log_probs.gather(-1, block[0, 1:, None]).sum())


@dataclass(frozen=True, slots=True)
class EngineRound:
    """One round over the test prompts; `about` has the drafter's sizes and predicted lengths, for JSON."""

    temperature: float
    new_drafter: Callable[[], Drafter]
    about: Mapping[str, Any]


@dataclass(frozen=True)
class EngineEvaluation:
    """A drafter's counters of each answer at one temperature, measured in the engine."""

    temperature: float
    about: Mapping[str, Any]
    answers: Sequence[Counters]

    @cached_property
    def stats(self) -> Counters:
        return functools.reduce(operator.add, self.answers, Counters())

    @cached_property
    def tokens_per_call(self) -> Interval | None:
        counted = [(each.emitted_tokens + each.stop_tokens, each.target_calls) for each in self.answers]
        tokens, calls = zip(*counted, strict=True) if counted else ((), ())
        return ratio_over_prompts(tokens, calls) if sum(calls) else None

    def as_dict(self) -> dict[str, Any]:
        stats, found = self.stats, self.tokens_per_call
        return {
            "temperature": self.temperature,
            **self.about,
            "mean_acceptance_length": stats.mean_acceptance_length,
            **({} if found is None else {"interval": [found.low, found.high]}),
            "target_calls": stats.target_calls,
            "emitted_tokens": stats.emitted_tokens,
        }

    def departs(self, tokens: int, rounds: int) -> bool:
        """Whether prediction and measurement differ by more than a twentieth and than chance explains.

        Some of `rounds` compared rounds does in one of a hundred sound trainings. A prediction from `tokens` is
        assumed to vary as the measurement does, and at least as a count of so many accepted tokens.
        """
        promised, served = self.about.get("promised"), self.tokens_per_call
        if promised is None or served is None or len(self.answers) < _FEWEST:
            return False
        deviation = (served.high - served.low) / (2 * _deviations((1 - CONFIDENCE) / 2))
        clustered = deviation * math.sqrt(self.stats.emitted_tokens / max(1, tokens))
        counted = math.sqrt(max(promised - 1.0, 0.0) * promised / max(1, tokens))  # accepted tokens a call, by calls
        spread = math.hypot(deviation, max(clustered, counted))
        return bool(abs(promised - served.value) > max(spread * _deviations(_CHANCE / 2 / rounds), _LEAST * promised))


def _deviations(chance: float) -> float:
    """The number of standard deviations that a normal variable exceeds with this probability; 1.96 for 0.025."""
    return -NormalDist().inv_cdf(chance)


def measure_in_engine(
    target: LanguageModel,
    rounds: Sequence[EngineRound],
    prompts: Sequence[Sequence[int]],
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    budget: TimeBudget | None = None,
) -> list[EngineEvaluation]:
    """Answer the prompts in every round; the remaining budget is divided equally among the rounds.

    Raises TrainingError if the engine fails, CompositionError if a drafter does not fit the target.
    """
    found, budget = [], budget or TimeBudget()
    for number, each in enumerate(rounds):
        on_progress(number, len(rounds))
        is_over = budget.within(budget.left_s() / (len(rounds) - number))
        at_once = _AT_ONCE if budget.limited else len(prompts)
        answers = _answer(target, each.new_drafter(), prompts, each.temperature, is_over, at_once)
        found.append(EngineEvaluation(each.temperature, each.about, answers))
    on_progress(len(rounds), len(rounds))
    return found


def predicted(
    target: LanguageModel, text: SelfDistillationData, temperature: float, drafter: Drafter, budgets: Sequence[int]
) -> list[Interval]:
    """Tokens per target call along the answers at a temperature, by budget; empty where none has a second token.

    The drafter must not run elsewhere during the call. Raises CompositionError if it does not fit the target,
    OptionError if its acceptance cannot be predicted.
    """
    drafter.check(target)
    records = [each for each in text.records if each.temperature == temperature and len(each.answer) > 1]
    chosen = [(each.prompt, each.answer, each.stopped) for each in records]
    params = SamplingParams(max_tokens=target.context_length, temperature=temperature)
    tokens, calls = list[float](), list[Sequence[float]]()
    for first in range(0, len(chosen), _WALKED):
        traces = traces_of_answers(target, chosen[first : first + _WALKED], params, [drafter])
        for walk in walk_along(drafter, target, traces):
            tokens.append(float(walk.tokens))
            calls.append(walk.steps(budgets).calls.tolist())
    return [ratio_over_prompts(tokens, each) for each in zip(*calls, strict=True)]


def _answer(
    target: LanguageModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    time_is_up: Callable[[], bool],
    at_once: int,
) -> list[Counters]:
    """The counters of answers to the last tokens of prompts, with those that run when the time is up as they are."""
    max_tokens = min(_TOKENS, target.context_length // 2)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    most = target.context_length - max_tokens
    fitting = [list(prompt)[-most:] for prompt in prompts]
    engine, found = Engine(target, drafter, controller="fixed", entropy=0), list[Counters]()
    for first in range(0, len(fitting), max(1, at_once)):
        requests = [engine.submit(prompt, params) for prompt in fitting[first : first + at_once]]
        is_over = False
        while not is_over and engine.step():
            calls = sum(each.target_calls for each in [*found, *(request.counters for request in requests)])
            is_over = calls >= _LEAST_CALLS and time_is_up()
        for each in requests:
            engine.cancel(each)
            if each.error is not None or each.warnings:
                raise TrainingError(f"an answer with what was trained failed: {each.error or each.warnings[0]}")
            found.append(each.counters)
        if is_over:
            break
    return found
