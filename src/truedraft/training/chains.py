"""Training of heads on vectors of several layers, along chains of steps: configuration, loss, and predictions."""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from truedraft.core.tree import chain_shape
from truedraft.drafters.heads.levels import LevelDrafter
from truedraft.errors import DataError, OptionError
from truedraft.measure import TREE_TEMPERATURES
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.llama import RotaryTable
from truedraft.models.lm_head import LmHead
from truedraft.models.loading import load_model
from truedraft.options import check_whole
from truedraft.training.evaluate import EngineRound, predicted
from truedraft.training.head_config import Calibrated, HeadTrainingConfig, OnWork, Split
from truedraft.training.loop import TrainingLoop
from truedraft.training.losses import DistillationLoss, distill, gradient_in_chunks, loss_from_spec
from truedraft.training.options import ChainRunOptions, LayerHeadOptions
from truedraft.training.report import HeadResult, Rows, size_of
from truedraft.training.texts.data import ids_by_frequency
from truedraft.training.texts.self_distillation import SelfDistillationData, WindowSampler, WrittenAnswer

_WHOLE = 1 << 30  # positions of a window: an answer is read in one piece
_HEAD = 64  # entries of a query
_TOGETHER = 16_384  # tokens of texts read together on a GPU, padding included
_NODES = 16  # of measured trees
_LENGTHS = (2, 4)  # of measured chains, in addition to the trained length


@dataclass(frozen=True)
class ChainTrainingConfig(LayerHeadOptions, ChainRunOptions, HeadTrainingConfig):
    """A training of a head on several layers' vectors, along chains; OptionError for a value out of range."""

    drafter: ClassVar[type[LevelDrafter[Any, Any]]]
    decisive: ClassVar[frozenset[str]] = HeadTrainingConfig.decisive | {
        "length", "layers", "inner", "kv_heads", "draft_vocab", "sliding_window", "sink", "loss", "by_acceptance",
    }  # fmt: skip

    @classmethod
    def describe(cls, result: HeadResult) -> Iterator[str | Rows]:
        head = result.report
        shares = " / ".join(f"{share:.2f}" for share in head.facts["accuracy"].values())
        yield f"right at each step, given the tokens before it: {shares}"
        yield f"promised: on {head.promised_on}; other text brings more or less"
        rows: list[Sequence[str]] = [("temperature", "drafts", "tokens per target call", "promised")]
        for each in head.evaluations:
            promised = each.about["promised"]
            found = f"{each.stats.mean_acceptance_length:.2f}", "-" if promised is None else f"{promised:.2f}"
            rows.append((f"{each.temperature:g}", size_of(each.about), *found))
        yield rows

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("length", self.length, 1)
        check_whole("draft_vocab", self.draft_vocab, 0)
        check_whole("sliding_window", self.sliding_window, 0)
        check_whole("sink", self.sink, 0)
        if not self.distillation_loss.reads_target or "ce" in self.loss:
            raise OptionError("must compare distributions, for the draft may not have a text's token", field="loss")
        if self.stage != 1:
            raise OptionError(f"must be 1: the target of {self.head.noun} stays as it is", field="stage")

    @property
    def distillation_loss(self) -> DistillationLoss:
        return loss_from_spec(self.loss)

    def entries(self, width: int, vocab_size: int) -> dict[str, Any]:
        heads, fewer = max(1, width // _HEAD), 0 < self.draft_vocab < vocab_size
        return {
            "width": width,
            "vocab_size": vocab_size,
            "layers": self.layers,
            "heads": heads,
            "kv_heads": heads if self.kv_heads is None else self.kv_heads,
            "head": _HEAD if width >= _HEAD else width,
            "inner": 8 * width // 3 if self.inner is None else self.inner,
            "draft_vocab": self.draft_vocab if fewer else 0,
            "own_output": not self.tied or fewer,
            "windows": (self.sliding_window,) if self.sliding_window else (),
            "sink": self.sink,
        }

    @abstractmethod
    def chains(self, head: Any, lm_head: LmHead, model: LanguageModel) -> Chains:
        """The head along texts, in training."""

    def loop(
        self, head: Any, lm_head: LmHead, target: str, texts: Split, fingerprint: str, folder: Path, on_progress: OnWork
    ) -> TrainingLoop:
        text, held_out = texts
        model = load_model(target, device=self.device)
        head.config = head.config.at_usual_layers(model.shown_layers)
        if wrong := [each for each in head.config.layers if not 0 <= each < model.shown_layers]:
            last = model.shown_layers - 1
            raise OptionError(f"must be 0 to {last} for this target, got {wrong[0]}", field="layers")
        if self.start_from is None and head.draft_ids is not None:
            head.draft_ids.copy_(likeliest_ids(text, len(head.draft_ids)))
            head.start_from(lm_head.weight.float().to(self.device))
        sampler = _NumberedAnswers(text, 1, _WHOLE, self.seed)
        mean = max(1, sampler.positions // len(sampler.windows))
        answers = max(1, self.positions_per_step // mean)
        schedule = self.schedule(max(1, len(sampler.windows) * self.windows_per_step // answers))
        unrolled = self.chains(head, lm_head, model)
        decay = None if self.by_acceptance else self.place_decay
        objective = ChainObjective(unrolled, text, self.distillation_loss, decay)
        accuracy = partial(accuracies, unrolled, held_out, self.evaluated_positions)
        return self.loop_of(head, objective, sampler, answers, schedule, text, fingerprint, folder, accuracy)

    def calibrate(
        self, head: Any, lm_head: LmHead, target: LanguageModel, text: SelfDistillationData, on_progress: OnWork
    ) -> Calibrated:
        """Rounds to measure: chains of several lengths and trees, with predictions from held-out answers."""
        unrolled = self.chains(head.float(), lm_head, target)
        facts = {"accuracy": dict(accuracies(unrolled, text, len(text.tokens)))}
        served = head.to(torch.bfloat16)
        lengths = sorted({*(each for each in _LENGTHS if each < self.length), self.length})
        rounds = []
        for number, temperature in enumerate(TREE_TEMPERATURES.values()):
            on_progress("predicting", number, len(TREE_TEMPERATURES))
            longest = self.drafter(served, num_speculative_tokens=self.length)
            found = predicted(target, text, temperature, longest, lengths)
            for length, promised in itertools.zip_longest(lengths, found):
                chain = partial(self.drafter, served, num_speculative_tokens=length)
                about = {"num_speculative_tokens": length, "promised": promised.value if promised else None}
                rounds.append(EngineRound(temperature, chain, about))
            tree = partial(self.drafter, served, num_speculative_tokens=self.length, nodes=_NODES)
            rounds.append(EngineRound(temperature, tree, {"nodes": _NODES}))
        return Calibrated(facts, rounds)


class _NumberedAnswers(WindowSampler):
    """Whole answers, each with its number in the run: `[count, 3]`."""

    def batch(self, first: int, count: int) -> Tensor:
        return torch.cat([super().batch(first, count), torch.arange(first, first + count)[:, None]], 1)


def likeliest_ids(text: SelfDistillationData, count: int) -> Tensor:
    """The most frequent ids of a text, with the lowest others if there are too few: int64 `[count]`, ascending."""
    return torch.tensor(sorted(ids_by_frequency(text.tokens, count)[:count]))


def chains_in(answer: WrittenAnswer, reach: int) -> dict[int, int]:
    """Indices of the pairs of a text after which chains begin, with the number of steps of each, at most `reach`.

    Worked example: after a prompt of 4, an answer of 6 tokens has pairs 2 to 7, of which 2 to 5 have three steps, 6 has
    two and 7 one: pair 2 is of the token at 3, the last of the prompt, and about that at 4, the answer's first.
    """
    first, end = max(len(answer.prompt) - 2, 0), len(answer.prompt) + len(answer.answer) - 2
    return {pair: min(reach, end - pair) for pair in range(first, end)}


@dataclass(frozen=True)
class UnrolledStep:
    """One step of `Chains`."""

    leaving: Tensor  # `[rows, width]`: the inputs of the output layer
    target: Tensor  # `[rows, ids]`: log probabilities of the draft's ids; for a reduced vocabulary they do not sum to 1
    tokens: Tensor  # `[rows]`: the texts' next tokens
    chains: Tensor  # `[rows]`: the row of each chain in the first step

    def at(self, rows: slice) -> UnrolledStep:
        return UnrolledStep(self.leaving[rows], self.target[rows], self.tokens[rows], self.chains[rows])


class Chains(ABC):
    """A head in float32 that reads answers of its target, and predicts as many tokens at each place as in decoding."""

    def __init__(self, head: Any, lm_head: LmHead, model: LanguageModel) -> None:
        self.head, self.lm_head, self._model = head, lm_head, model
        self._table: RotaryTable = head.rotary(next(head.parameters()).detach())

    def steps(
        self, answers: Sequence[WrittenAnswer], pairs: Sequence[Mapping[int, int]] | None = None
    ) -> Iterator[UnrolledStep]:
        """The steps of chains in the concatenated answers; `pairs` selects chains, None all of `chains_in`."""
        chosen = [chains_in(each, self.head.reach) for each in answers] if pairs is None else pairs
        if any(chosen):
            yield from self.along(self._read(answers), chosen)

    @abstractmethod
    def along(self, texts: Texts, chosen: Sequence[Mapping[int, int]]) -> Iterator[UnrolledStep]:
        """The steps of at least one chain in texts that the target has read."""

    def pairs(self, answer: WrittenAnswer, number: int) -> Mapping[int, int]:
        """Those of `chains_in` that answer `number` of a training learns, the longest first."""
        return chains_in(answer, self.head.reach)

    def acceptance(self, leaving: Tensor) -> Tensor | None:
        """Logits `[rows]` of acceptance probabilities; None where the head predicts none."""
        return None

    def logits(self, vectors: Tensor) -> Tensor:
        return self.lm_head(vectors) if self.head.lm_head is None else self.head.lm_head(vectors)

    def loss(self, vectors: Tensor, step: UnrolledStep, loss: DistillationLoss) -> tuple[Tensor, Tensor]:
        """The loss of rows of a step `[rows]`, and the logits that are served, `[rows, ids]`."""
        logits = self.logits(vectors)
        labels = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        return distill(logits, step.target, labels, loss), logits

    def ids(self, tokens: Tensor) -> Tensor:
        """The draft's ids of the target's tokens; -1 where it has none."""
        if self.head.draft_ids is None:
            return tokens
        places = torch.searchsorted(self.head.draft_ids, tokens).clamp_max(len(self.head.draft_ids) - 1)
        return torch.where(self.head.draft_ids[places] == tokens, places, -1)

    def _read(self, answers: Sequence[WrittenAnswer]) -> Texts:
        texts = [torch.tensor([*each.prompt, *each.answer], device=self._model.device) for each in answers]
        # As in serving, which autocast would change.
        with torch.inference_mode(), torch.autocast(self._model.device.type, enabled=False):
            segments = [
                Segment(self._model.new_cache(), text, chain_shape(len(text)), range(len(text)), prompt=len(text))
                for text in texts
            ]
            output = self._model.forward_showing(segments, self.head.config.layers)
            for each in segments:
                self._model.release_cache(each.cache)
        dtype = next(self.head.parameters()).dtype
        vectors, logits = [each.clone().to(dtype) for each in output.layers], output.logits.clone()
        starts = list(itertools.accumulate(map(len, texts), initial=0))
        spans = zip(starts, answers, strict=False)
        about = np.array([start + pair + 1 for start, answer in spans for pair in chains_in(answer, 1)])
        target = functional.log_softmax(logits[torch.as_tensor(about, device=logits.device)].float(), -1)
        rows = np.zeros(starts[-1], np.int64)
        rows[about] = np.arange(len(about))
        known = target if self.head.draft_ids is None else target[:, self.head.draft_ids]
        return Texts(torch.cat(texts), starts, vectors, known, rows)


@dataclass(frozen=True)
class Texts:
    """Concatenated texts that the target has read."""

    tokens: Tensor
    starts: Sequence[int]  # the start of each text, and the end of the last
    vectors: Sequence[Tensor]  # `[tokens, width]` of each layer
    known: Tensor  # `[places, ids]`: the target's log probabilities of the draft's ids at the places of chains
    rows: np.ndarray[Any, np.dtype[np.int64]]  # the row in `known` of each token

    @property
    def counts(self) -> list[int]:
        return [end - start for start, end in itertools.pairwise(self.starts)]

    def behind(self, places: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]) -> tuple[Tensor, Tensor]:
        """The target's log probabilities after the tokens at `places`, and the next tokens."""
        at = torch.as_tensor(self.rows[places], device=self.known.device)
        return self.known[at], self.tokens[torch.as_tensor(places, device=at.device) + 1]


@dataclass(frozen=True)
class ChainLoss:
    """sum_k decay^k loss_k over the steps of training-time test, with loss_k the mean over the answers' tokens.

    `decay` None weights each token by the probability that all tokens before it in its chain are accepted, the product
    of their sum min(p, q), without a gradient.
    """

    chains: Chains
    loss: DistillationLoss
    decay: float | None

    def accumulate(self, steps: Iterable[UnrolledStep], counts: Sequence[int], scale: float) -> Tensor:
        """Add `scale` times the gradient of the means over `counts` tokens; returns the sum of losses of each step."""
        device = next(self.chains.head.parameters()).device
        sums, alive = torch.zeros(len(counts), device=device), torch.ones(0, device=device)
        leaving: list[Tensor] = []
        gradients: list[Tensor] = []
        for step, each in enumerate(steps):
            alive = alive if step else torch.ones(len(each.chains), device=device)
            weights = alive[each.chains] if self.decay is None else self.decay**step
            weights = torch.as_tensor(weights, device=device).expand(len(each.chains))
            gradient, losses, accepted = self._learn(each, weights * (scale / counts[step]))
            sums[step] += losses
            alive[each.chains] *= accepted
            gradients.append(gradient)
            leaving.append(each.leaving)
        torch.autograd.backward(leaving, gradients)
        return sums

    def _learn(self, step: UnrolledStep, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient of weighted losses in `leaving`, sum of losses, acceptance probabilities `[rows]` or 1."""
        sums, accepted = torch.zeros((), device=weights.device), torch.ones_like(weights)

        def losses(some: list[Tensor], rows: slice) -> Iterator[Tensor]:
            here = step.at(rows)
            loss, logits = self.chains.loss(some[0], here, self.loss)
            sums.add_(loss.detach().sum())
            said = self.chains.acceptance(some[0])
            if self.decay is None or said is not None:
                student = functional.log_softmax(logits.detach().float(), -1)
                accepted[rows] = torch.minimum(here.target, student).exp().sum(-1)
            if said is not None:
                known = accepted[rows].clamp(0.0, 1.0)
                loss = loss + functional.binary_cross_entropy_with_logits(said.float(), known, reduction="none")
            yield (loss * weights[rows]).sum()

        return gradient_in_chunks(step.leaving[None], losses)[0], sums, accepted


@dataclass(frozen=True)
class ChainObjective:
    """`ChainLoss` on answers that the target reads."""

    unrolled: Chains
    text: SelfDistillationData
    loss: DistillationLoss
    decay: float | None

    def accumulate(self, batch: Tensor, scale: float, own: slice | None = None) -> dict[str, float]:
        starts, records = self.text.starts, self.text.records
        texts = []
        for first, _, number in batch.tolist():
            answer = records[bisect.bisect_right(starts, first) - 1]
            texts.append((answer, self.unrolled.pairs(answer, number)))
        head = self.unrolled.head
        counts = chains_at([pairs for _, pairs in texts], head.reach)
        sums = torch.zeros(head.reach, device=next(head.parameters()).device)
        loss = ChainLoss(self.unrolled, self.loss, self.decay)
        for group in read_together(texts if own is None else texts[own], sums.device):
            steps = self.unrolled.steps([each for each, _ in group], [pairs for _, pairs in group])
            sums += loss.accumulate(steps, counts, scale)
        means = [total / max(count, 1) for total, count in zip(sums.tolist(), counts, strict=True)]
        total = sum((self.decay or 1.0) ** step * mean for step, mean in enumerate(means))
        return {"loss": total} | {f"{head.place_word}_{step}": mean for step, mean in enumerate(means, start=1)}


def chains_at(chosen: Sequence[Mapping[int, int]], reach: int) -> list[int]:
    """The number of chains at each step, for chains of the given lengths."""
    lengths = np.array([steps for own in chosen for steps in own.values()])
    return [int((lengths > step).sum()) for step in range(reach)]


Chosen: TypeAlias = tuple[WrittenAnswer, Mapping[int, int]]
"""An answer, and where chains begin in it, with their lengths."""


def read_together(texts: Sequence[Chosen], device: torch.device) -> list[list[Chosen]]:
    """Answers in groups of similar length; one by one on a CPU, where batches gain nothing."""
    groups: list[list[Chosen]] = []
    for each in sorted(texts, key=lambda each: len(each[0].prompt) + len(each[0].answer)):
        width = len(each[0].prompt) + len(each[0].answer)
        if groups and device.type != "cpu" and width * (len(groups[-1]) + 1) <= _TOGETHER:
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


@torch.no_grad()
def accuracies(unrolled: Chains, text: SelfDistillationData, positions: int) -> Mapping[str, float]:
    """`step_K_top_1` of each step, K from 1, on about `positions` tokens; DataError if no answer is long enough."""
    head = unrolled.head
    right, seen = [0] * head.reach, [0] * head.reach
    every = max(1, len(text.tokens) // positions)
    for record in text.records[::every]:
        for step, made in enumerate(unrolled.steps([record])):
            right[step] += int((unrolled.logits(made.leaving).argmax(-1) == unrolled.ids(made.tokens)).sum())
            seen[step] += len(made.tokens)
    if not all(seen):
        raise DataError("the target's answers to the held-out prompts are too short: let it write more")
    return {f"{head.place_word}_{step}_top_1": right[step - 1] / seen[step - 1] for step in range(1, head.reach + 1)}
