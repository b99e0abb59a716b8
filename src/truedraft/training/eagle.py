"""EAGLE-3 (2503.01840) as the training sees it: its numbers, its training-time test, and what it promises."""

from __future__ import annotations

import bisect
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from truedraft.core.tree import chain_shape
from truedraft.drafters.heads.eagle import Eagle3
from truedraft.errors import DataError, OptionError
from truedraft.heads import Eagle3Config, Eagle3Head
from truedraft.models.base import Segment
from truedraft.models.loading import load_model
from truedraft.options import check_whole
from truedraft.planning import TREE_TEMPERATURES
from truedraft.training.evaluate import EngineRound
from truedraft.training.head_config import Calibrated, HeadTrainingConfig
from truedraft.training.head_objective import heads_optimizer
from truedraft.training.loop import Measurement, Phase, RunFolder, TrainingLoop
from truedraft.training.losses import DistillationLoss, distill, gradient_in_chunks, loss_from_spec
from truedraft.training.options import Eagle3RunOptions, Eagle3SizeOptions
from truedraft.training.texts.self_distillation import SelfDistillationData, WindowSampler

if TYPE_CHECKING:
    from truedraft.heads import Head
    from truedraft.models.base import LanguageModel
    from truedraft.models.lm_head import LmHead

_WHOLE = 1 << 30  # positions of a window: an answer is read in one piece
_HEAD = 64  # entries of a query
_LENGTHS = (2, 4)  # of chains that are measured, beside the one that was trained for


@dataclass(frozen=True)
class Eagle3TrainingConfig(Eagle3SizeOptions, Eagle3RunOptions, HeadTrainingConfig):
    """All numbers of a training of an EAGLE-3 head.

    Raises:
        OptionError: a value out of its range.
    """

    head: ClassVar[type[Head]] = Eagle3Head
    decisive: ClassVar[frozenset[str]] = HeadTrainingConfig.decisive | {
        "length", "layers", "inner", "kv_heads", "draft_vocab", "loss", "fc_norm", "norm_output",
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("length", self.length, 1)
        check_whole("draft_vocab", self.draft_vocab, 0)
        if not self.distillation_loss.reads_target or "ce" in self.loss:
            raise OptionError("must compare distributions, for the draft may not have a text's token", field="loss")
        if self.stage != 1:
            raise OptionError("must be 1: the target of an EAGLE-3 head stays as it is", field="stage")

    @property
    def distillation_loss(self) -> DistillationLoss:
        return loss_from_spec(self.loss)

    def sizes(self, width: int, vocab_size: int) -> Eagle3Config:
        heads = max(1, width // _HEAD)
        return Eagle3Config(
            width=width,
            vocab_size=vocab_size,
            layers=self.layers,
            heads=heads,
            kv_heads=heads if self.kv_heads is None else self.kv_heads,
            head=_HEAD if width >= _HEAD else width,
            inner=8 * width // 3 if self.inner is None else self.inner,
            draft_vocab=min(self.draft_vocab, vocab_size) if self.draft_vocab < vocab_size else 0,
            reach=self.length,
            fc_norm=self.fc_norm,
            norm_output=self.norm_output,
            own_output=not self.tied or self.draft_vocab > 0,
        )

    def loop(
        self,
        head: Any,
        lm_head: LmHead,
        target: str,
        texts: tuple[SelfDistillationData, SelfDistillationData],
        fingerprint: str,
        folder: Path,
        on_progress: Callable[[str, int, int], None],
    ) -> TrainingLoop:
        """The loop that trains a head on whole answers; the target computes its vectors anew each time."""
        del on_progress
        text, held_out = texts
        model = load_model(target, device=self.device)
        head.config = head.config.at_usual_layers(model.shown_layers)
        if head.draft_ids is not None:
            head.draft_ids.copy_(likeliest_ids(text, len(head.draft_ids)))
            head.start_from(lm_head.weight.float().to(self.device))
        sampler = WindowSampler(text, 1, _WHOLE, self.seed)
        mean = max(1, sampler.positions // len(sampler.windows))
        answers = max(1, self.positions_per_step // mean)
        schedule = self.schedule(max(1, len(sampler.windows) * self.windows_per_step // answers))
        more = {"target": fingerprint, "text_sha256": hashlib.sha256(text.tokens.tobytes()).hexdigest()}
        run = RunFolder(folder, self.identity(schedule, self.decisive, **more), self.device, self.checkpoint_every_s)
        unrolled = Unrolled(head, lm_head, model)
        return TrainingLoop(
            head,
            heads_optimizer(head, self.optimizer),
            Eagle3Objective(unrolled, text, self.distillation_loss, self.place_decay),
            [Phase(schedule.total_steps, sampler, answers, answers)],
            schedule,
            run,
            Measurement(self.evaluate_every, lambda: accuracies(unrolled, held_out, self.evaluated_positions)),
        )

    def calibrate(
        self,
        head: Any,
        lm_head: LmHead,
        target: LanguageModel,
        text: SelfDistillationData,
        on_progress: Callable[[str, int, int], None],
    ) -> Calibrated:
        """What chains of several lengths promise by held-out answers, and what the engine is to measure."""
        del on_progress
        unrolled = Unrolled(head.float(), lm_head, target)
        survival = {kind: survivals(unrolled, text, each) for kind, each in TREE_TEMPERATURES.items()}
        facts = {"survival": survival, "accuracy": dict(accuracies(unrolled, text, len(text.tokens)))}
        served = head.to(torch.bfloat16)
        rounds = [
            EngineRound(
                temperature,
                functools.partial(Eagle3, served, num_speculative_tokens=length),
                {"num_speculative_tokens": length, "promised": 1.0 + sum(survival[kind][:length])},
            )
            for kind, temperature in TREE_TEMPERATURES.items()
            for length in sorted({*(each for each in _LENGTHS if each < self.length), self.length})
        ]
        return Calibrated(facts, rounds)


def likeliest_ids(text: SelfDistillationData, count: int) -> Tensor:
    """The ids that a text has most often, filled up by the lowest others: int64 `[count]`, rising."""
    counted = np.bincount(text.tokens)
    order = sorted(range(max(count, len(counted))), key=lambda id_: (-counted[id_] if id_ < len(counted) else 0, id_))
    return torch.tensor(sorted(order[:count]))


def _chains(prompt: int, answer: int, step: int) -> int:
    """Places of an answer from which as many tokens behind the next are known: rows of a step of `Unrolled`.

    Worked example: behind a prompt of 4, an answer of 6 tokens has 6, 5 and 4 rows at its first three steps.
    """
    return max(prompt + answer - 2 - step - max(prompt - 2, 0), 0)


class Unrolled:
    """A head that reads an answer of its target, and then its own vectors for some steps: training-time test.

    At step k (from 0) the pair at index i is of what stands for the vector at position i + k and the text's token at
    i + k + 1; it is about the token behind that. It sees pairs 0 to i of step 0, and those of its own index at later
    steps: what is there in decoding, where a chain of k tokens was drafted behind position i (2503.01840, section 3.2).

    Args:
        head: in training, in float32.
        lm_head: of the target.
        model: the target.
    """

    def __init__(self, head: Eagle3Head, lm_head: LmHead, model: LanguageModel) -> None:
        self.head, self.lm_head, self._model = head, lm_head, model
        self._table = head.rotary(next(head.parameters()).detach())

    def steps(self, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each step what enters the output `[rows, width]`, the target's log probabilities of the draft's ids
        `[rows, ids]`, and the tokens `[rows]` that the text goes on with; of chains that begin in the answer.
        """
        head, config = self.head, self.head.config
        tokens = torch.tensor([*prompt, *answer], device=self._model.device)
        vectors, logits = self._seen(tokens)
        self._table.reach(len(tokens) + config.reach + config.rope_start)
        embedded = self.lm_head.embed(tokens[1:]) if head.embed_tokens is None else head.embed_tokens(tokens[1:])
        embedded = embedded.to(vectors[0].dtype)
        x = head.fuse([each[:-1] for each in vectors])
        first = max(len(prompt) - 2, 0)  # the index whose first step is about the answer's first token
        target = functional.log_softmax(logits[first + 1 : -1].float(), -1)
        known = target if head.draft_ids is None else target[:, head.draft_ids]
        seen = _Seen(config.heads // config.kv_heads, config.head)
        for step in range(config.reach):
            count = len(tokens) - 1 - step
            positions = torch.arange(count, device=tokens.device) + step + config.rope_start
            x = head.step(x[:count], embedded[step:], self._table.at(positions), seen)
            if not _chains(len(prompt), len(answer), step):
                return
            yield head.leaving(x)[first : count - 1], known[step:], tokens[first + step + 2 :]

    def logits(self, vectors: Tensor) -> Tensor:
        """`[rows, ids]` of the draft."""
        return self.lm_head(vectors) if self.head.lm_head is None else self.head.lm_head(vectors)

    def ids(self, tokens: Tensor) -> Tensor:
        """The draft's ids of the target's tokens; -1 where it has none."""
        if self.head.draft_ids is None:
            return tokens
        places = torch.searchsorted(self.head.draft_ids, tokens).clamp_max(len(self.head.draft_ids) - 1)
        return torch.where(self.head.draft_ids[places] == tokens, places, -1)

    def _seen(self, tokens: Tensor) -> tuple[list[Tensor], Tensor]:
        """What the target shows of a text: vectors `[tokens, width]` of each layer, and logits `[tokens, vocab]`."""
        with torch.inference_mode():
            cache, count = self._model.new_cache(), len(tokens)
            segment = Segment(cache, tokens, chain_shape(count), range(count), prompt=count)
            output = self._model.forward_showing([segment], self.head.config.layers)
            self._model.release_cache(cache)
        dtype = next(self.head.parameters()).dtype
        return [each.clone().to(dtype) for each in output.layers], output.logits.clone()


class _Seen:
    """Attention of the steps, one after another, over what they gave so far."""

    def __init__(self, shared: int, head: int) -> None:
        self._shared, self._scale = shared, 1.0 / math.sqrt(head)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`[rows, heads, head]` and twice `[rows, kv_heads, head]` to `[rows, heads * head]`."""
        rows = len(query)
        self._keys.append(key.repeat_interleave(self._shared, 1))
        self._values.append(value.repeat_interleave(self._shared, 1))
        keys, values = [each[:rows] for each in self._keys], [each[:rows] for each in self._values]
        scores = torch.einsum("qhd,khd->hqk", query, keys[0])
        hidden = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
        own = [torch.einsum("qhd,qhd->hq", query, each)[..., None] for each in keys[1:]]
        weights = torch.cat([scores.masked_fill(hidden, -torch.inf), *own], -1).mul(self._scale).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights[..., :rows], values[0])
        for step, each in enumerate(values[1:]):
            mixed = mixed + weights[..., rows + step].T[..., None] * each
        return mixed.flatten(1)


class Eagle3Objective:
    """sum_k decay^k loss_k over the steps of training-time test, with loss_k the mean over the answers' tokens.

    Args:
        unrolled: the head in training.
        text: what the target wrote.
        loss: between the distributions, over the draft's ids.
        decay: by how much each step counts less than the one before.
    """

    def __init__(self, unrolled: Unrolled, text: SelfDistillationData, loss: DistillationLoss, decay: float) -> None:
        self._unrolled, self._text, self._loss, self._decay = unrolled, text, loss, decay

    def accumulate(self, batch: Tensor, scale: float) -> dict[str, float]:
        """Add `scale` times the gradient of the mean loss over some answers, given by their windows `[count, 2]`."""
        head = self._unrolled.head
        starts, records = self._text.starts, self._text.records
        answers = [records[bisect.bisect_right(starts, first) - 1] for first, _ in batch.tolist()]
        sizes = [(len(each.prompt), len(each.answer)) for each in answers]
        counts = [sum(_chains(*size, step) for size in sizes) for step in range(head.reach)]
        sums = [0.0] * head.reach
        for record in answers:
            leaving: list[Tensor] = []
            gradients: list[Tensor] = []
            for step, (vectors, target, _) in enumerate(self._unrolled.steps(record.prompt, record.answer)):
                weight = self._decay**step * scale / counts[step]

                def losses(
                    some: list[Tensor], rows: slice, step: int = step, target: Tensor = target, weight: float = weight
                ) -> Iterator[Tensor]:
                    logits = self._unrolled.logits(some[0])
                    among = functional.log_softmax(target[rows], -1)  # of the draft's ids alone
                    loss = distill(logits, among, torch.zeros(len(logits)), self._loss).sum()
                    sums[step] += float(loss.detach())
                    yield loss * weight

                gradients.append(gradient_in_chunks(vectors[None], losses)[0])
                leaving.append(vectors)
            torch.autograd.backward(leaving, gradients)
        means = [total / max(count, 1) for total, count in zip(sums, counts, strict=True)]
        total = sum(self._decay**step * mean for step, mean in enumerate(means))
        return {"loss": total} | {f"{head.place_word}_{step}": mean for step, mean in enumerate(means, start=1)}


@torch.no_grad()
def accuracies(unrolled: Unrolled, text: SelfDistillationData, positions: int) -> Mapping[str, float]:
    """`step_K_top_1` of each step, K from 1: shares of a text's tokens, about so many of them, that it guesses.

    Raises:
        DataError: there are no answers that are long enough.
    """
    head = unrolled.head
    right, seen = [0] * head.reach, [0] * head.reach
    every = max(1, len(text.tokens) // positions)
    for record in text.records[::every]:
        for step, (vectors, _, tokens) in enumerate(unrolled.steps(record.prompt, record.answer)):
            right[step] += int((unrolled.logits(vectors).argmax(-1) == unrolled.ids(tokens)).sum())
            seen[step] += len(tokens)
    if not all(seen):
        raise DataError("the target's answers to the held-out prompts are too short: let it write more")
    return {f"{head.place_word}_{step}_top_1": right[step - 1] / seen[step - 1] for step in range(1, head.reach + 1)}


@torch.no_grad()
def survivals(unrolled: Unrolled, text: SelfDistillationData, temperature: float) -> list[float]:
    """The share of places in answers at a temperature at which the first 1, 2, ... drafted tokens are accepted.

    Greedy these are hits in a row; else products of sum min(p, q) along the text, which the target drew itself.
    """
    head = unrolled.head
    sums, places = [0.0] * head.reach, 0
    for record in text.records:
        if record.temperature != temperature:
            continue
        alive: Tensor | None = None
        for step, (vectors, target, tokens) in enumerate(unrolled.steps(record.prompt, record.answer)):
            logits = unrolled.logits(vectors).float()
            if temperature:
                accepted = torch.minimum(target.exp(), logits.softmax(-1)).sum(-1)
            else:
                accepted = (logits.argmax(-1) == unrolled.ids(tokens)).float()
            alive = accepted if alive is None else alive[: len(accepted)] * accepted
            sums[step] += float(alive.sum())
            places += len(tokens) if step == 0 else 0
    return [each / max(places, 1) for each in sums]
