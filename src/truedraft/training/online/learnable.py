"""Modules of a drafter that can learn, and how answers train and test them."""

from __future__ import annotations

import copy
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from truedraft.drafters.base import Drafter
from truedraft.drafters.draft_model import DraftModel
from truedraft.drafters.heads.base import HeadDrafter, refuse_other_target
from truedraft.drafters.heads.head import Head, VectorHead
from truedraft.drafters.kinds import KINDS, dotted
from truedraft.drafters.parallel.drafter import ParallelDraft
from truedraft.drafters.registry import write_draft_ids, write_record
from truedraft.errors import CompositionError
from truedraft.models.architecture import load_causal_lm, save_llama, use_training_attention
from truedraft.models.base import LanguageModel
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.lm_head import LmHead, LogitFinish, refuse_other_logits
from truedraft.models.translated import TranslatedModel
from truedraft.training.chains import ChainLoss, Chains, Texts, chains_at
from truedraft.training.drafts import DraftConfig
from truedraft.training.head_config import HeadLoss, HeadsObjective
from truedraft.training.losses import TargetRows, computed_rows, distillation_gradient
from truedraft.training.online.traffic import Answered, Score
from truedraft.training.texts.data import save_tokenizer
from truedraft.training.texts.self_distillation import CollatedBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ModuleT = TypeVar("ModuleT", bound=nn.Module)
PLACES = 32  # places of an answer that are replayed


class Learnable(ABC, Generic[ModuleT]):
    """How the modules of one drafter, all on the CPU, learn.

    Raises CompositionError if these cannot learn, UnsupportedModelError if the target cannot be learned from.
    """

    origin: ModuleT  # the original module, in the dtype in which it is served
    plural: str  # the name of such modules in messages
    kind: str
    layers: tuple[int, ...] = ()
    reads_prompts: ClassVar[bool] = True
    answers: ClassVar[int]  # number of answers in a training step, each with a span of tokens
    least: int  # least tokens of an answer to learn from
    for_tenants: ClassVar[bool] = True

    @abstractmethod
    def __init__(self, drafter: Any, target: LanguageModel, lm_head: LmHead) -> None: ...

    @abstractmethod
    def learn(
        self, shadow: ModuleT, chosen: Sequence[Answered], known: Sequence[Answered], chance: random.Random
    ) -> int:
        """Add the gradient of a step to `shadow`; returns the number of learned positions."""

    def replayed(self, modules: Sequence[ModuleT], answer: Answered) -> list[Score]:
        """Scores of each module's greedy chains along an answer, from each of its first places.

        Guesses read only the answer's tokens, because a chain is kept as far as it agrees with the answer.
        """
        return [scored(self._kept(each, answer, min(len(answer), PLACES + 1))) for each in modules]

    def _kept(self, module: ModuleT, answer: Answered, end: int) -> Tensor:
        """The number of kept guesses of a module at each place before the last of `end`, for `replayed`."""
        raise NotImplementedError

    @abstractmethod
    def change(self, module: ModuleT) -> Callable[[], None]:
        """A function that switches the drafter to a module, to be called between two steps."""

    @abstractmethod
    def save(self, module: ModuleT, folder: Path) -> None:
        """Write a folder for `--drafter`; ModelError if that fails."""

    @abstractmethod
    def load(self, folder: Path) -> ModuleT:
        """A saved module in its served dtype; ModelError if damaged, CompositionError if for another target."""

    @property
    def dtype(self) -> torch.dtype:
        return next(self.origin.parameters()).dtype


def in_dtype(module: ModuleT, dtype: torch.dtype) -> ModuleT:
    """The module with its weights in a dtype; other tensors, such as rotation angles, stay exact."""
    for weight in module.parameters():
        weight.data = weight.data.to(dtype)
    return module


def agrees(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether the argmax of each row of logits `[rows, ids]`, the lowest of equal ids, is its label; -1 never is."""
    largest = logits.amax(-1)
    found = (logits.gather(1, labels.clamp_min(0)[:, None])[:, 0] == largest) & (labels >= 0)
    tied = logits[found] == largest[found, None]  # of few rows, because these passes cost as much as the product
    lower = torch.arange(logits.shape[1], device=logits.device) < labels[found, None]
    found[found.clone()] = ~(tied & lower).any(-1)
    return found


def scored(kept: Tensor) -> Score:
    """The score of an answer, from the number of kept guesses at each place, for chains after the target's token.

    Worked example: after token 0 two guesses of three agree, so tokens 1 and 2 are kept and the call gives token 3.
    """
    counts, at, calls = kept.tolist(), 0, 0
    while at < len(counts):
        at, calls = at + 1 + counts[at], calls + 1
    return Score(len(counts), calls, sum(counts))


def narrowed(lm_head: LmHead, ids: Tensor | None) -> LmHead:
    """An LM head over only some ids of the vocabulary; None is all.

    For a large vocabulary a step over all ids costs many times as much, for almost the same gradient: the target's mass
    is on few ids.
    """
    if ids is None:
        return lm_head
    bias = None if lm_head.bias is None else lm_head.bias[ids]
    return LmHead(lm_head.weight[ids], bias, lm_head.finish, lm_head.embedding)


HeadT = TypeVar("HeadT", bound=Head)
_IDS, _OTHERS = 8192, 2048  # a larger vocabulary is narrowed to the traffic's ids and so many others
_WINDOW = 8  # positions of a span for heads that read one vector
_ROWS = 128  # with logits in memory at once
_CHAINS = 32  # of a span, one after each token, for heads that read layers


class LearnableHeads(Learnable[HeadT]):
    """Common base of all kinds of heads."""

    def __init__(self, drafter: HeadDrafter[HeadT, Any], target: LanguageModel, lm_head: LmHead) -> None:
        self._drafter, self._target, self._lm_head = drafter, target, lm_head
        self.kind, self.plural = drafter.head.kind, drafter.head.plural
        self._config: Any = dotted(KINDS[self.kind].training)()
        some_only = getattr(drafter.head, "draft_ids", None) is not None
        own = {each.out_features for each in drafter.head.outputs if each is not None and not some_only}
        if own - {len(lm_head.weight)}:
            raise CompositionError(
                f"these {self.plural} guess among {max(own)} ids, and {target.name} has {len(lm_head.weight)}; they "
                "draft, but do not learn"
            )
        self.origin = self._placed(drafter.head)

    def _placed(self, head: HeadT) -> HeadT:
        return copy.deepcopy(head).to("cpu", self._lm_head.weight.dtype).eval().requires_grad_(False)

    def change(self, module: HeadT) -> Callable[[], None]:
        return partial(self._drafter.take, module)

    def save(self, module: HeadT, folder: Path) -> None:
        target, known = self._target, self.origin.record
        record = replace(known, target_name=target.name, fingerprint=target.fingerprint, sample=target.sample)
        short = self.dtype in (torch.bfloat16, torch.float16)
        module.save(folder, record, dtype=self.dtype if short else torch.float32)

    def load(self, folder: Path) -> HeadT:
        head = type(self.origin).load(folder)
        refuse_other_target(head, self._target)
        return self._placed(head.with_record(self.origin.record))


class LearnableVectorHeads(LearnableHeads[VectorHead]):
    """Heads that read the vector from which the last token was drawn."""

    reads_prompts = False
    answers = 16

    @property
    def least(self) -> int:  # type: ignore[override]
        return self.origin.reach + 2

    def learn(
        self, shadow: VectorHead, chosen: Sequence[Answered], known: Sequence[Answered], chance: random.Random
    ) -> int:
        batch = self._batch(chosen, shadow.reach, chance)
        own = any(output is not None for output in shadow.outputs)
        ids = None if own else some_ids(known, len(self._lm_head.weight), chance)
        lm_head, goal = narrowed(self._lm_head, ids), self._config.distillation_loss
        labels = batch.tokens if ids is None else torch.searchsorted(ids, batch.tokens)  # all of them are among the ids

        def target(batch: CollatedBatch, rows: slice) -> TargetRows:
            return computed_rows(labels[rows], lambda: lm_head(batch.hidden[rows]), goal)

        loss, feed = HeadLoss(shadow, lm_head, goal, self._config.place_decay), self._config.feed(shadow, self._lm_head)
        HeadsObjective(loss, lambda _: batch, feed, target).accumulate(batch.places, 1.0)
        return len(batch.places)

    def _batch(self, chosen: Sequence[Answered], reach: int, chance: random.Random) -> CollatedBatch:
        tokens, vectors, places, end = [], [], [], 0
        for each in chosen:
            count = min(_WINDOW, len(each) - reach)
            first = chance.randrange(len(each) - reach - count + 1)
            rows = slice(first, first + count + reach)
            tokens.append(each.tokens[rows])
            vectors.append(each.vectors[rows].to("cpu"))
            places.append(torch.arange(end, end + count))
            end += count + reach
        return CollatedBatch(torch.cat(vectors), torch.cat(tokens), torch.cat(places), np.arange(end))

    @torch.no_grad()
    def replayed(self, modules: Sequence[VectorHead], answer: Answered) -> list[Score]:
        """As for all modules; they are of one size, and together take fewer passes over a large LM head."""
        tokens = answer.tokens[: PLACES + 1]
        places, reach = len(tokens) - 1, modules[0].reach
        if places < 1:
            return [Score(0, 0, 0)] * len(modules)
        like = next(modules[0].parameters())
        hidden = answer.vectors[:places].to(like.device, like.dtype)
        padded = torch.cat([tokens, tokens.new_full((reach,), -1)])  # no guess agrees there
        embedded = self._lm_head.embed(padded[torch.arange(places)[:, None] + torch.arange(reach)].clamp_min(0).T)
        vectors = torch.stack([head.unroll(hidden, embedded) for head in modules])  # [heads, reach, places, exit width]
        kept = torch.zeros(len(modules), places, dtype=torch.int64)
        alive = torch.ones(len(modules), places, dtype=torch.bool)
        for place in range(reach):
            labels = padded[1 + place : 1 + place + places].expand(len(modules), -1)
            alive &= labels >= 0
            separate = modules[0].outputs[place] is not None  # otherwise all use the target's, in one product
            for number, head in enumerate(modules if separate else modules[:1]):
                some_heads = slice(number, number + 1) if separate else slice(None)
                own = torch.zeros_like(alive)
                own[some_heads] = alive[some_heads]
                rows = zip(vectors[:, place][own].split(_ROWS), labels[own].split(_ROWS), strict=True)
                alive[own] = torch.cat(
                    [agrees(head.place_logits(place, some[0], self._lm_head), some[1]) for some in rows]
                )
            kept += alive
        return [scored(each) for each in kept]


def some_ids(known: Sequence[Answered], vocab: int, chance: random.Random) -> Tensor | None:
    """Ids of a training step, ascending: those of the traffic and some others; None is all, of a small vocabulary."""
    if vocab <= _IDS:
        return None
    others = torch.tensor([chance.randrange(vocab) for _ in range(_OTHERS)])
    return torch.cat([*(each.tokens for each in known), others]).unique()


class LearnableLayerHeads(LearnableHeads[Head]):
    """Heads with layers of their own, which read several of the target's."""

    answers = 4
    least = 2

    def __init__(self, drafter: HeadDrafter[Head, Any], target: LanguageModel, lm_head: LmHead) -> None:
        super().__init__(drafter, target, lm_head)
        config: Any = self.origin.config
        self.layers = config.layers

    def _chains(self, head: Head) -> Chains:
        chains: Chains = self._config.chains(head, self._lm_head, self._target)
        return chains

    def learn(self, shadow: Head, chosen: Sequence[Answered], known: Sequence[Answered], chance: random.Random) -> int:
        chains, config, reach = self._chains(shadow), self._config, shadow.reach
        spans, pairs = [], []
        for each in chosen:
            first = chance.randrange(max(len(each) - _CHAINS, 1))
            places = range(first, min(first + _CHAINS, len(each) - 1))
            end = min(places.stop + reach, len(each))
            spans.append((each, first + 1, end))
            pairs.append(_pairs(each, places, end, reach))
        counts = chains_at(pairs, reach)
        loss = ChainLoss(chains, config.distillation_loss, None if config.by_acceptance else config.place_decay)
        loss.accumulate(chains.along(self._texts(chains, spans), pairs), counts, 1.0)
        return counts[0]

    @torch.no_grad()
    def _texts(self, chains: Chains, spans: Sequence[tuple[Answered, int, int]]) -> Texts:
        """Prompts and answers up to their second place, with the target's distributions from the first."""
        texts = [torch.cat([each.prompt, each.tokens[:end]]) for each, _, end in spans]
        starts = list(itertools.accumulate(map(len, texts), initial=0))
        rows, about = np.zeros(starts[-1], np.int64), []
        for start, (each, first, end) in zip(starts, spans, strict=False):
            about.append(start + len(each.prompt) - 1 + np.arange(first, end))
        rows[np.concatenate(about)] = np.arange(sum(map(len, about)))
        vectors = torch.cat([each.vectors[first:end] for each, first, end in spans]).to("cpu")
        log_probs, ids = functional.log_softmax(self._lm_head(vectors).float(), -1), chains.head.draft_ids
        known = log_probs if ids is None else log_probs[:, ids]
        like, layers = next(chains.head.parameters()), []
        for number in self.layers:
            # The rows of a text end with one for its last token, which is never read.
            own = [each.layers[number][: len(each.prompt) + end - 1].to(like) for each, _, end in spans]
            layers.append(torch.cat([functional.pad(each, (0, 0, 0, 1)) for each in own]))
        return Texts(torch.cat(texts), starts, layers, known, rows)

    @torch.no_grad()
    def _kept(self, module: Head, answer: Answered, end: int) -> Tensor:
        kept, alive = torch.zeros(end - 1, dtype=torch.int64), torch.ones(end - 1, dtype=torch.bool)
        if end > 1:
            chains, pairs = self._chains(module), _pairs(answer, range(end - 1), end, module.reach)
            for step in chains.along(self._texts(chains, [(answer, end - 1, end)]), [pairs]):
                found = torch.zeros_like(alive)
                found[step.chains] = agrees(chains.logits(step.leaving), chains.ids(step.tokens))
                alive &= found
                kept += alive
        return kept


def _pairs(answer: Answered, places: Sequence[int], end: int, reach: int) -> dict[int, int]:
    """Pairs with chains after the answer's tokens at `places`, with steps up to the token before `end`, as `chains_in`.

    Worked example: after a prompt of 4 the answer's token 0 is at 4, so its pair is 3, which is about the token at 5;
    with an answer of 3 and a reach of 3 the pairs are 3 with two steps and 4 with one.
    """
    first = len(answer.prompt) - 1
    return {first + place: min(reach, end - 1 - place) for place in places}


_SPAN, _CONTEXT = 32, 256  # learned tokens of an answer, and most tokens read before them
_CHECKED_TOKENS = 4


class LearnableDrafts(Learnable[Any]):
    """Draft models, trained with the loss of `truedraft train draft`.

    A quantised draft is trained in floating point, and served with 4 bits again where any weight had 4, else with 8.
    """

    kind, plural = "draft", "draft models"
    answers, least = 4, 2
    for_tenants = False

    def __init__(self, drafter: DraftModel | ParallelDraft, target: LanguageModel, lm_head: LmHead) -> None:
        model = drafter.model
        if not isinstance(drafter, DraftModel):
            raise CompositionError("it drafts in another process, whose weights stay; leave async out")
        if isinstance(model, TranslatedModel):
            raise CompositionError(
                "its tokenizer is not the target's, whose distributions are of other ids; draft with a model that was "
                "trained on the target's tokenizer"
            )
        if not isinstance(model, HuggingFaceModel) or model.sources or model.input_names or model.adapters:
            raise CompositionError(f"{model.name} is no causal model of text alone, without adapters; leave it out")
        if model.device.type != "cpu":
            raise CompositionError(
                f"{model.name} runs on {model.device}, and only drafts on the CPU learn; leave it out"
            )
        self._drafter, self._target, self._lm_head, self._model = drafter, target, lm_head, model
        self._first = copy.copy(model)  # with its present weights
        self._loss = DraftConfig().loss
        module = model.whole_module()
        self._finish = LogitFinish.of(module)
        ids = torch.arange(1, 2 * _CHECKED_TOKENS + 1) * 7919 % model.vocab_size
        answer = Answered(ids[_CHECKED_TOKENS:], torch.empty(0), prompt=ids[:_CHECKED_TOKENS])
        with torch.no_grad():
            given = module(input_ids=ids[None], use_cache=False).logits[0, _CHECKED_TOKENS - 1 : -1]
            made = self._logits(module, answer, 0, _CHECKED_TOKENS, None)
        refuse_other_logits(made, given[:, : target.vocab_size], model.name)
        use_training_attention(module)
        self.origin = in_dtype(module, model.dtype)

    def _logits(
        self,
        module: PreTrainedModel,
        answer: Answered,
        first: int,
        end: int,
        ids: Tensor | None,
        most: int | None = None,
    ) -> Tensor:
        """Logits `[end - first, ids]` at places of an answer, after at most `most` other tokens."""
        text = torch.cat([answer.prompt, answer.tokens[: end - 1]])
        text = text if most is None else text[-(most + end - first) :]
        found = module.get_decoder()(input_ids=text[None], use_cache=False).last_hidden_state[0, first - end :]
        head: Any = module.get_output_embeddings()
        rows = slice(len(self._lm_head.weight)) if ids is None else ids
        bias = None if head.bias is None else head.bias[rows]
        return self._finish(functional.linear(found, head.weight[rows], bias))

    def learn(
        self, shadow: PreTrainedModel, chosen: Sequence[Answered], known: Sequence[Answered], chance: random.Random
    ) -> int:
        ids = some_ids(known, len(self._lm_head.weight), chance)
        lm_head = narrowed(self._lm_head, ids)
        spans = []
        for each in chosen:
            first = chance.randrange(max(len(each) - _SPAN, 0) + 1)
            spans.append((each, first, min(first + _SPAN, len(each))))
        total = sum(end - first for _, first, end in spans)
        for each, first, end in spans:
            logits = self._logits(shadow, each, first, end, ids, _CONTEXT)
            with torch.no_grad():
                target = lm_head(each.vectors[first:end].to("cpu"))
            labels = torch.zeros(end - first, dtype=torch.int64)  # the loss compares only distributions
            gradient, _ = distillation_gradient(logits, target, labels, self._loss, (end - first) / total)
            logits.backward(gradient)
        return total

    @torch.no_grad()
    def _kept(self, module: PreTrainedModel, answer: Answered, end: int) -> Tensor:
        """Guesses read only the answer's tokens, so all chains are found in one forward.

        Worked example: of the tokens after the first it guesses three right, one wrong and one right. With chains of
        two, after these places 2, 2, 1, 0 and 1 guesses are kept.
        """
        kept, run = torch.zeros(end - 1, dtype=torch.int64), 0
        if end > 1:
            right = agrees(self._logits(module, answer, 1, end, None), answer.tokens[1:end]).tolist()
            for place in reversed(range(end - 1)):
                run = run + 1 if right[place] else 0
                kept[place] = min(run, self._drafter.limits.depth)
        return kept

    def change(self, module: PreTrainedModel) -> Callable[[], None]:
        twin = self._first if module is self.origin else self._model.with_weights(copy.deepcopy(module))

        def changed() -> None:
            self._model.take_weights(twin)
            self._drafter.narrow()
            self._drafter.prefixes.trim(0)  # they are from other weights

        return changed

    def save(self, module: PreTrainedModel, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_llama(module, folder, dtype=self.dtype)
        if self._model.tokenizer is not None:
            save_tokenizer(self._model.tokenizer.backend, folder)
        if self._drafter.ids is not None:
            write_draft_ids(folder, self._drafter.ids.tolist())
        write_record(folder, "draft", self._target.name, self._target.fingerprint, {}, self._target.sample)

    def load(self, folder: Path) -> PreTrainedModel:
        module = load_causal_lm(folder, dtype=self.dtype)
        if _shapes(module) != _shapes(self.origin):
            raise CompositionError(f"the draft in {str(folder)!r} has other sizes than {self._model.name}; remove it")
        return module.eval().requires_grad_(False)


def _shapes(module: PreTrainedModel) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in module.named_parameters()}


def learnable_kind(drafter: Drafter) -> type[Learnable[Any]] | None:
    """How a drafter learns; None for one that has no weights, or heads without a training."""
    if isinstance(drafter, DraftModel | ParallelDraft):
        return LearnableDrafts
    if not isinstance(drafter, HeadDrafter) or not getattr(KINDS.get(drafter.head.kind), "training", ""):
        return None
    return LearnableLayerHeads if drafter.head.reads_layers else LearnableVectorHeads
