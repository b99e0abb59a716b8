"""Hugging Face's own `generate` as an engine that is asked: plain, assisted, with prompt lookup, across tokenizers.

Its order of filters is temperature, top-k, top-p, min-p (`GenerationMixin._get_logits_processor`). It draws from
torch's global state, one for a whole call: a seed belongs to a call, so questions with seeds are asked one by one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from truedraft.core.params import SamplingParams
from truedraft.errors import PeerError
from truedraft.models.loading import quiet_transformers
from truedraft.peers.asking import FILTERS, Peer, PeerFacts, Question, Reply
from truedraft.peers.transformers import LOOKUP_TOKENS, AssistedSetting, left_padded, schedule_of, seeded

_TAKES = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "ignore_eos",
    "repetition_penalty", "min_tokens", "logprobs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Way:
    """A way of calling `generate`.

    Attributes:
        name: for reports.
        options: keyword arguments of `generate`.
        assistant: the draft model; None drafts with none.
        sampling_assistant: the draft model of sampled answers, where that is another.
        setting: how much it drafts.
        one_by_one: whether it takes one prompt at a time.
    """

    name: str = "plain"
    options: Mapping[str, Any] = field(default_factory=dict)
    assistant: PreTrainedModel | None = None
    sampling_assistant: PreTrainedModel | None = None
    setting: AssistedSetting | None = None
    one_by_one: bool = False


def plain_way() -> Way:
    """Without drafts; prompts are padded on the left and answered together."""
    return Way()


def lookup_way(tokens: int = LOOKUP_TOKENS) -> Way:
    """Drafts are copied from the text: prompt lookup."""
    return Way("prompt lookup", {"prompt_lookup_num_tokens": tokens}, one_by_one=True)


def assisted_way(assistant: PreTrainedModel, setting: AssistedSetting) -> Way:
    """Drafts of another model with the same tokenizer: assisted generation."""
    return Way(f"assisted, {setting.words}", {}, assistant, setting=setting, one_by_one=True)


def universal_way(
    assistant: PreTrainedModel,
    setting: AssistedSetting,
    tokenizer: PreTrainedTokenizerBase,
    assistant_tokenizer: PreTrainedTokenizerBase,
) -> Way:
    """Drafts of a model with another tokenizer: universal assisted generation, sampled as in arXiv 2502.05202.

    To draft samples, transformers cuts the assistant's LM head down to what both tokenizers have, and a greedy answer
    with the same assistant fails afterwards: so samples get a copy.
    """
    both = {"tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer}
    name = f"universal assisted, {setting.words}"
    return Way(name, both, assistant, copy.deepcopy(assistant), setting, one_by_one=True)


class GeneratePeer(Peer):
    """`generate`, asked.

    Args:
        model: the target, as transformers runs it.
        eos_token_ids: ids that end an answer.
        way: of calling it.
        together: most questions without seeds that one call answers.
        seed: of the calls that answer questions without seeds, so that a run can be repeated.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Sequence[int],
        way: Way | None = None,
        *,
        together: int = 1,
        seed: int = 0,
    ) -> None:
        self._model = model
        self._eos = tuple(eos_token_ids)
        self._way = plain_way() if way is None else way
        self._together = 1 if self._way.one_by_one else together
        self._seed = seed
        self._calls = 0
        self._schedule = None if self._way.setting is None else schedule_of(self._way.setting)
        takes = _TAKES if self._together == 1 else tuple(name for name in _TAKES if name != "seed")
        self.facts = PeerFacts(
            "transformers",
            transformers.__version__,
            FILTERS,
            takes,
            tells_ids=True,
            logprobs="raw",
            more={"way": self._way.name, "together": self._together},
        )

    def ask(self, questions: Sequence[Question]) -> list[Reply | PeerError]:
        """Ask questions; those of equal options without seeds share calls."""
        found: dict[int, Reply | PeerError] = {}
        calls: list[list[int]] = []
        open_calls: dict[SamplingParams, list[int]] = {}
        for number, question in enumerate(questions):
            refused = self.refuses(question.params)
            if refused:
                found[number] = PeerError(f"transformers, {self._way.name}, does not take {refused}")
                continue
            call = open_calls.get(question.params)
            if call is None or len(call) == self._together:
                call = []
                calls.append(call)
            call.append(number)
            open_calls[question.params] = call
        for call in calls:
            found.update(zip(call, self._answers([questions[number] for number in call]), strict=True))
        return [found[number] for number in range(len(questions))]

    def _answers(self, questions: Sequence[Question]) -> list[Reply] | list[PeerError]:
        """Of one call."""
        params = questions[0].params
        ids, mask = left_padded([question.prompt for question in questions], self._model.device)
        if params.seed is None:
            params, self._calls = replace(params, seed=self._seed * 1_000_003 + self._calls), self._calls + 1
        self._model.generation_config = self._configuration(params)
        extra = dict(self._way.options)
        assistant = (None if params.greedy else self._way.sampling_assistant) or self._way.assistant
        if assistant is not None:
            assistant.generation_config = self._schedule
            extra["assistant_model"] = assistant
        try:
            with quiet_transformers(), seeded(params.seed):
                out = self._model.generate(ids, attention_mask=mask, **extra)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            words = f"transformers, {self._way.name}, failed ({type(error).__name__}: {error})"
            return [PeerError(words) for _ in questions]
        rows = out.sequences[:, ids.shape[1] :].tolist()
        logits = None if params.logprobs is None else torch.stack([step.float() for step in out.logits], dim=1)
        return [self._reply(row, None if logits is None else logits[number], params) for number, row in enumerate(rows)]

    def _configuration(self, params: SamplingParams) -> GenerationConfig:
        """Every option is written out: `generate` fills what is unset from the model's own configuration."""
        sampled = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
        if params.min_p:
            sampled["min_p"] = params.min_p
        return GenerationConfig(
            max_new_tokens=params.max_tokens,
            min_new_tokens=params.min_tokens or None,
            do_sample=not params.greedy,
            repetition_penalty=params.repetition_penalty,
            eos_token_id=self._ends(params) or None,
            pad_token_id=(self._eos or (0,))[0],
            return_dict_in_generate=True,
            output_logits=params.logprobs is not None,
            **({} if params.greedy else sampled),
        )

    def _ends(self, params: SamplingParams) -> list[int]:
        return [*(() if params.ignore_eos else self._eos), *params.stop_token_ids]

    def _reply(self, row: Sequence[int], logits: Tensor | None, params: SamplingParams) -> Reply:
        """A row of a call, up to what ended it; behind that stands padding."""
        ends = self._ends(params)
        end = next((place for place, token in enumerate(row) if token in ends), None)
        tokens = tuple(row if end is None else row[:end])
        reason = "length" if end is None else "stop"
        if logits is None or params.logprobs is None:
            return Reply(tokens, finish_reason=reason)
        logprobs = torch.log_softmax(logits[: len(tokens)].double(), dim=-1)
        own = logprobs.gather(-1, torch.tensor(tokens, dtype=torch.long, device=logprobs.device)[:, None])[:, 0]
        best = logprobs.topk(params.logprobs, dim=-1)
        rivals = tuple(
            dict(zip(ids, values, strict=True))
            for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )
        return Reply(tokens, finish_reason=reason, logprobs=tuple(own.tolist()), top_logprobs=rivals)
