"""Hugging Face's `generate` as a peer engine: plain, assisted, with prompt lookup, across tokenizers.

Models are loaded as transformers itself runs them. Its order of filters is temperature, top-k, top-p, min-p
(`GenerationMixin._get_logits_processor`). It draws from torch's global state, so a seed belongs to a call, and
questions with seeds are answered one by one.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from truedraft.core.params import SamplingParams
from truedraft.errors import PeerError
from truedraft.measure.peers.asking import FILTERS, Peer, PeerFacts, Question, Reply
from truedraft.models.base import LanguageModel
from truedraft.models.loading import quiet_transformers, read_model, resolve_source
from truedraft.models.padding import pad_model

LOOKUP_TOKENS = 10  # as in transformers' documentation
_TAKES = (
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "ignore_eos",
    "repetition_penalty", "min_tokens", "logprobs",
)  # fmt: skip


def load_stock(name: str, ours: LanguageModel, pad_to: str | None) -> PreTrainedModel:
    """One of our models as transformers runs it: same weights, dtype and device, its own attention.

    Raises ModelError if it cannot be loaded a second time.
    """
    source = resolve_source(name)
    model = read_model(source, name, ours.dtype)
    model = model if pad_to is None else pad_model(model, pad_to)
    return model.to(ours.device).eval()


@dataclass(frozen=True, slots=True)
class AssistedSetting:
    """The number of tokens that transformers' assistant drafts."""

    words: str
    tokens: int  # drafted in a round, at the start
    schedule: str  # "constant", or "heuristic": two more after full acceptance, else one fewer
    confidence: float  # the assistant stops below this probability; 0 never stops


@dataclass(frozen=True, slots=True)
class Way:
    """A way of calling `generate`; by default without drafts."""

    name: str = "plain"
    options: Mapping[str, Any] = field(default_factory=dict)
    assistant: PreTrainedModel | None = None
    sampling_assistant: PreTrainedModel | None = None
    setting: AssistedSetting | None = None

    @property
    def drafts(self) -> bool:
        return self.assistant is not None or bool(self.options)


def lookup_way(tokens: int = LOOKUP_TOKENS) -> Way:
    """Prompt lookup: drafts are copied from the text."""
    return Way("prompt lookup", {"prompt_lookup_num_tokens": tokens})


def assisted_way(assistant: PreTrainedModel, setting: AssistedSetting) -> Way:
    """Assisted generation: drafts of another model with the same tokenizer."""
    return Way(f"assisted, {setting.words}", {}, assistant, setting=setting)


def universal_way(
    assistant: PreTrainedModel,
    setting: AssistedSetting,
    tokenizer: PreTrainedTokenizerBase,
    assistant_tokenizer: PreTrainedTokenizerBase,
) -> Way:
    """Universal assisted generation: drafts of a model with another tokenizer, sampled as in arXiv 2502.05202.

    To draft samples, transformers reduces the assistant's LM head to the tokens that both tokenizers have, after which
    a greedy answer with the same assistant fails: so samples get a copy.
    """
    both = {"tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer}
    return Way(f"universal assisted, {setting.words}", both, assistant, copy.deepcopy(assistant), setting)


class Generate(Peer):
    """`generate` as a peer, with at most `together` questions without seeds in one call; they are left-padded.

    `seed` is of these calls, so that a run can be repeated.
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
        self.model = model
        self.way = way or Way()
        self._eos = tuple(eos_token_ids)
        self._together = 1 if self.way.drafts else together
        self._seed = seed
        self._calls = 0
        # One object for all calls: with the heuristic schedule, generate keeps its state in it.
        self._schedule = (
            None
            if (setting := self.way.setting) is None
            else GenerationConfig(
                num_assistant_tokens=setting.tokens,
                num_assistant_tokens_schedule=setting.schedule,
                assistant_confidence_threshold=setting.confidence,
            )
        )
        takes = _TAKES if self._together == 1 else tuple(name for name in _TAKES if name != "seed")
        more = {"way": self.way.name, "together": self._together}
        version = transformers.__version__
        self.facts = PeerFacts("transformers", version, FILTERS, takes, gives_ids=True, logprobs="raw", more=more)

    def answers(self, questions: Sequence[Question]) -> Iterator[tuple[int, Reply | PeerError]]:
        alike: dict[SamplingParams, list[int]] = {}
        for number, question in enumerate(questions):
            if refused := self.refuses(question.params):
                yield number, PeerError(f"transformers, {self.way.name}, does not take {refused}")
            else:
                alike.setdefault(question.params, []).append(number)
        size = self._together
        calls = [each[first : first + size] for each in alike.values() for first in range(0, len(each), size)]
        for call in sorted(calls):
            params = questions[call[0]].params
            if params.seed is None:
                params, self._calls = replace(params, seed=self._seed * 1_000_003 + self._calls), self._calls + 1
            try:
                replies: Sequence[Reply | PeerError] = self.call([questions[each].prompt for each in call], params)
            except PeerError as error:
                replies = [error] * len(call)
            yield from zip(call, replies, strict=True)

    def call(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, on_tokens: Callable[[int], None] | None = None
    ) -> list[Reply]:
        """Call `generate` once; without a seed it draws from torch's current state.

        `on_tokens` is called when new tokens arrive, with their number for each prompt; a draft may give several.

        Raises PeerError if it failed.
        """
        texts = [torch.tensor(prompt, device=self.model.device) for prompt in prompts]
        masks = [torch.ones_like(text) for text in texts]
        ids, mask = (pad_sequence(each, batch_first=True, padding_side="left") for each in (texts, masks))
        self.model.generation_config = self._configuration(params)
        extra = dict(self.way.options)
        assistant = (None if params.greedy else self.way.sampling_assistant) or self.way.assistant
        if assistant is not None:
            assistant.generation_config = self._schedule
            extra["assistant_model"] = assistant
        streamer = None if on_tokens is None else _Streamer(on_tokens)
        try:
            with quiet_transformers(), _seeded(params.seed):
                out = self.model.generate(ids, attention_mask=mask, streamer=streamer, **extra)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            raise PeerError(f"transformers, {self.way.name}, failed ({type(error).__name__}: {error})") from error
        rows = out.sequences[:, ids.shape[1] :].tolist()
        logits = None if params.logprobs is None else torch.stack([step.float() for step in out.logits], dim=1)
        return [self._reply(row, None if logits is None else logits[number], params) for number, row in enumerate(rows)]

    def _configuration(self, params: SamplingParams) -> GenerationConfig:
        """Set every option, because `generate` takes unset ones from the model's own configuration."""
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
        ends = self._ends(params)
        end = next((place for place, token in enumerate(row) if token in ends), None)
        tokens = tuple(row if end is None else row[:end])
        reason = "length" if end is None else "stop"
        if logits is None or params.logprobs is None:
            return Reply(tokens, finish_reason=reason)
        logprobs = torch.log_softmax(logits[: len(tokens)].double(), dim=-1)
        own = logprobs.gather(-1, torch.tensor(tokens, dtype=torch.long, device=logprobs.device)[:, None])[:, 0]
        best = logprobs.topk(params.logprobs, dim=-1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        rivals = tuple(dict(zip(ids, values, strict=True)) for ids, values in pairs)
        return Reply(tokens, finish_reason=reason, logprobs=tuple(own.tolist()), top_logprobs=rivals)


class _Streamer(BaseStreamer):
    def __init__(self, on_tokens: Callable[[int], None]) -> None:
        self._on_tokens = on_tokens
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """Takes the prompt, then a row of drafted tokens, or one token for each prompt."""
        if self._prompt_seen:
            self._on_tokens(value.shape[1] if value.ndim > 1 else 1)
        self._prompt_seen = True

    def end(self) -> None: ...


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    with torch.random.fork_rng():
        if seed is not None:
            torch.manual_seed(seed % (1 << 63))
        yield
