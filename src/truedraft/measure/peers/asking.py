"""The interface of a peer engine: questions with token ids and options, and its answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from truedraft.core.params import SamplingParams
from truedraft.errors import PeerError

FILTERS = ("temperature", "top_k", "top_p", "min_p")
"""The steps from logits to a distribution, in Hugging Face's order; other engines use other orders."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request, in token ids; with seed None no seed is sent."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer.

    Attributes:
        token_ids: without the token that ended the answer.
        finish_reason: "stop" or "length", or another word of the engine's own.
        unsure: why the ids may not be the drawn ones; "" where the engine returned them itself.
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    finish_reason: str = "length"
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[Mapping[int, float], ...] | None = None
    unsure: str = ""

    def as_dict(self) -> dict[str, Any]:
        top = self.top_logprobs
        return asdict(self) | {"top_logprobs": None if top is None else [[*each.items()] for each in top]}

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Reply:
        """The inverse of `as_dict`.

        Raises:
            KeyError, TypeError, ValueError: the dictionary is invalid.
        """
        top = kept["top_logprobs"]
        return cls(
            tuple(int(token) for token in kept["token_ids"]),
            kept["text"],
            str(kept["finish_reason"]),
            None if kept["logprobs"] is None else tuple(float(value) for value in kept["logprobs"]),
            None if top is None else tuple({int(i): float(p) for i, p in each} for each in top),
            str(kept["unsure"]),
        )


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """Properties of an engine.

    Attributes:
        filters: those of `FILTERS` that it supports, in its order.
        takes: names of `SamplingParams` that it supports; a question with others is refused.
        logprobs: "raw" for the model's own, "processed" after temperature and filters, "" for none.
        more: further values for reports, such as its command.
    """

    name: str
    version: str = ""
    filters: tuple[str, ...] = FILTERS
    takes: Collection[str] = ("max_tokens", "temperature", "top_p", "seed", "stop")
    gives_ids: bool = False
    logprobs: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)


class Peer(ABC):
    """An engine that answers questions."""

    facts: PeerFacts

    @abstractmethod
    def answers(self, questions: Sequence[Question]) -> Iterator[tuple[int, Reply | PeerError]]:
        """Answer questions together; yields the number of each with its answer or error, as it arrives."""

    def ask(self, questions: Sequence[Question]) -> list[Reply | PeerError]:
        found = dict(self.answers(questions))
        return [found[number] for number in range(len(questions))]

    def refuses(self, params: SamplingParams) -> str:
        """Unsupported options of a question, joined by commas; "" for none."""
        plain = SamplingParams()
        refused = (name for name in SamplingParams.__dataclass_fields__ if name not in self.facts.takes)
        return ", ".join(name for name in refused if getattr(params, name) != getattr(plain, name))
