"""What a model and a pair of models are worth on held-out text, and a drafter in the very engine that serves it.

Figures on text are means over the labels of whole, non-overlapping blocks: each token is predicted once, from the
tokens of its block before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from truedraft.core.params import SamplingParams
from truedraft.core.stats import Counters
from truedraft.drafters.base import Drafter
from truedraft.engine import Engine
from truedraft.errors import DataError, TrainingError
from truedraft.models.base import LanguageModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

_AT_ONCE = 4  # prompts that are answered together where there is little time
_TOKENS = 128  # of an answer, half the context at the most


@dataclass(frozen=True)
class PairReport:
    """How well a draft stands in for its target, at temperature 1 and greedily."""

    tokens: int
    alpha: float  # E[sum_x min(p(x), q(x))]: the share of single drafted tokens that would be accepted
    greedy_agreement: float  # the share of positions where both have the same likeliest token
    draft_loss: float  # nats per token, of the draft alone

    def as_dict(self) -> dict[str, float]:
        """The fields, for JSON."""
        return asdict(self)


def context_of(model: PreTrainedModel) -> int:
    """The longest text that a model names; 2,048 tokens where it names none."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2048


def mean_loss(
    model: PreTrainedModel, stream: NDArray[np.uint32], *, length: int = 2048, max_tokens: int | None = None
) -> tuple[float, int]:
    """The model's loss along the stream, in nats per token, and the number of tokens."""
    total, count = 0.0, 0
    for block in _blocks(stream, length, max_tokens, model.device):
        total -= float(_label_log_probabilities(_log_probs(model, block), block).sum())
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
    """Alpha and greedy agreement along the stream (the text's own tokens, not the models' answers)."""
    overlap, agreed, loss, count = 0.0, 0, 0.0, 0
    for block in _blocks(stream, length, max_tokens, target.device):
        p, q = _log_probs(target, block), _log_probs(draft, block)  # [length, vocab]
        overlap += float(torch.minimum(p, q).exp().sum())
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        loss -= float(_label_log_probabilities(q, block).sum())
        count += block.shape[1] - 1
    return PairReport(count, overlap / count, agreed / count, loss / count)


def _blocks(
    stream: NDArray[np.uint32], length: int, max_tokens: int | None, device: torch.device
) -> Iterator[torch.Tensor]:
    """Consecutive blocks of up to length + 1 tokens that share one token with the next: int64 [1, .]."""
    end = len(stream) if max_tokens is None else min(len(stream), max_tokens + 1)
    if end < 2:
        raise DataError("the held-out text has fewer than two tokens, so nothing can be measured on it: give more text")
    for start in range(0, end - 1, length):
        yield torch.from_numpy(stream[start : min(start + length + 1, end)].astype("int64")).to(device)[None]


@torch.no_grad()
def _log_probs(model: PreTrainedModel, block: torch.Tensor) -> torch.Tensor:
    """Log-probabilities at temperature 1, float32: [length, vocab]."""
    training = model.training
    model.eval()
    logits = model(input_ids=block[:, :-1], use_cache=False).logits[0]
    model.train(training)
    return functional.log_softmax(logits.float(), dim=-1)


def _label_log_probabilities(log_probs: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    return log_probs.gather(-1, block[0, 1:, None]).squeeze(-1)  # [length]


@dataclass(frozen=True, slots=True)
class EngineRound:
    """What one round over the prompts of a test measures.

    Attributes:
        temperature: of the requests.
        new_drafter: makes the drafter that answers them, and holds a copy of its heads while it does.
        about: what is said of the drafter, for JSON: its sizes, and what they are expected to bring.
    """

    temperature: float
    new_drafter: Callable[[], Drafter]
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EngineEvaluation:
    """What a drafter brought at one temperature, measured in the engine.

    Attributes:
        temperature: of the requests.
        about: as of the round.
        stats: counted over all answers.
    """

    temperature: float
    about: Mapping[str, Any]
    stats: Counters

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        stats = self.stats
        counted = {"target_calls": stats.target_calls, "emitted_tokens": stats.emitted_tokens}
        length = {"mean_acceptance_length": stats.mean_acceptance_length}
        return {"temperature": self.temperature, **self.about, **length, **counted}


def measure_in_engine(
    target: LanguageModel,
    rounds: Sequence[EngineRound],
    prompts: Sequence[Sequence[int]],
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    within_s: float | None = None,
) -> list[EngineEvaluation]:
    """Answer the prompts in every round.

    Args:
        target: the drafters'.
        rounds: what is measured.
        prompts: that nothing was trained or fitted on.
        on_progress: called with the number of finished rounds, and of all.
        within_s: seconds for all rounds, of which each takes an equal part; None is as long as they take.

    Raises:
        TrainingError: the engine failed.
        CompositionError: a drafter does not fit the target.
    """
    found, each_s = [], None if within_s is None else within_s / len(rounds)
    for number, each in enumerate(rounds):
        on_progress(number, len(rounds))
        stats = count_answers(target, each.new_drafter(), prompts, each.temperature, each_s)
        found.append(EngineEvaluation(each.temperature, each.about, stats))
    on_progress(len(rounds), len(rounds))
    return found


def count_answers(
    target: LanguageModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    within_s: float | None = None,
) -> Counters:
    """Answer prompts with a drafter, losslessly, and count.

    Args:
        target: the drafter's.
        drafter: that was trained.
        prompts: token ids; one that leaves no room in the target's context keeps its last tokens.
        temperature: of the requests.
        within_s: seconds after which no further prompts are answered; None answers all of them.

    Raises:
        TrainingError: the engine failed.
        CompositionError: the drafter does not fit the target.
    """
    max_tokens = min(_TOKENS, target.context_length // 2)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    most = target.context_length - max_tokens
    fitting = [list(prompt)[-most:] for prompt in prompts]
    at_once = max(1, len(fitting)) if within_s is None else _AT_ONCE
    engine, stats, began = Engine(target, drafter, controller="fixed", entropy=0), Counters(), time.monotonic()
    for first in range(0, len(fitting), at_once):
        if within_s is not None and first and time.monotonic() - began >= within_s:
            break
        for answer in engine.generate(fitting[first : first + at_once], params):
            if answer.error is not None or answer.warnings:
                raise TrainingError(f"an answer with what was trained failed: {answer.error or answer.warnings[0]}")
            stats = stats + answer.stats
    return stats
