"""Draft models that learn: copies of the draft model, trained and tested along the target's answers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from truedraft.drafters.base import Drafter
from truedraft.drafters.draft_model import DraftModel
from truedraft.drafters.parallel.drafter import ParallelDraft
from truedraft.drafters.registry import write_record
from truedraft.errors import CompositionError
from truedraft.models.architecture import load_causal_lm, save_llama, use_training_attention
from truedraft.models.base import LanguageModel
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.lm_head import LmHead, LogitFinish, refuse_other_logits
from truedraft.models.translated import TranslatedModel
from truedraft.training.drafts import DraftConfig
from truedraft.training.losses import distillation_gradient
from truedraft.training.online.heads import some_ids
from truedraft.training.online.learnable import PLACES, Learnable, Narrowed, agrees, in_dtype, scored
from truedraft.training.online.traffic import Answered, Score
from truedraft.training.texts.tokenizer import save_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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

    @classmethod
    def takes(cls, drafter: Drafter) -> bool:
        return isinstance(drafter, DraftModel | ParallelDraft)

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
        narrowed = Narrowed.of(self._lm_head, self._loss, ids)
        spans = []
        for each in chosen:
            first = chance.randrange(max(len(each) - _SPAN, 0) + 1)
            spans.append((each, first, min(first + _SPAN, len(each))))
        total = sum(end - first for _, first, end in spans)
        for each, first, end in spans:
            logits = self._logits(shadow, each, first, end, ids, _CONTEXT)
            with torch.no_grad():
                target = narrowed.lm_head(each.vectors[first:end].to("cpu"))
            labels = torch.zeros(end - first, dtype=torch.int64)  # the loss compares only distributions
            gradient, _ = distillation_gradient(logits, target, labels, self._loss, (end - first) / total)
            logits.backward(gradient)
        return total

    def replayed(self, modules: Sequence[PreTrainedModel], answer: Answered) -> list[Score]:
        return [self._replayed(each, answer) for each in modules]

    @torch.no_grad()
    def _replayed(self, module: PreTrainedModel, answer: Answered) -> Score:
        """Guesses read only the answer's tokens, so all chains are found in one forward.

        Worked example: of the tokens after the first it guesses three right, one wrong and one right. With chains of
        two, after these places 2, 2, 1, 0 and 1 guesses are kept.
        """
        end = min(len(answer), PLACES + 1)
        kept = torch.zeros(end - 1, dtype=torch.int64)
        if end > 1:
            run = 0
            right = agrees(self._logits(module, answer, 1, end, None), answer.tokens[1:end]).tolist()
            for place in reversed(range(end - 1)):
                run = run + 1 if right[place] else 0
                kept[place] = min(run, self._drafter.limits.depth)
        return scored(kept)

    def change(self, module: PreTrainedModel) -> Callable[[], None]:
        twin = self._first if module is self.origin else self._model.with_weights(copy.deepcopy(module))

        def changed() -> None:
            self._model.take_weights(twin)
            self._drafter.prefixes.trim(0)  # they are from other weights

        return changed

    def save(self, module: PreTrainedModel, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        save_llama(module, folder, dtype=self.dtype)
        if self._model.tokenizer is not None:
            save_tokenizer(self._model.tokenizer.backend, folder)
        write_record(folder, "draft", self._target.name, self._target.fingerprint, {}, self._target.sample)

    def load(self, folder: Path) -> PreTrainedModel:
        module = load_causal_lm(folder, dtype=self.dtype)
        if _shapes(module) != _shapes(self.origin):
            raise CompositionError(f"the draft in {str(folder)!r} has other sizes than {self._model.name}; remove it")
        return module.eval().requires_grad_(False)


def _shapes(module: PreTrainedModel) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in module.named_parameters()}
