"""The contract of an engine that is asked from outside: questions with token ids and options, and what it answered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from truedraft.core.params import SamplingParams
from truedraft.errors import PeerError

FILTERS = ("temperature", "top_k", "top_p", "min_p")
"""What makes a distribution of logits, in the order of Hugging Face; other engines have other orders."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request.

    Attributes:
        prompt: token ids.
        params: how it is to be answered; where the seed is None none is sent.
    """

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer.

    Attributes:
        token_ids: of the answer, the token that ended it left out.
        text: of the answer; None where the engine gives none.
        finish_reason: "stop" or "length", or another word of the engine's own.
        logprobs: of each token, natural logarithms, as the engine says; None where it does not.
        top_logprobs: of each token its likeliest rivals, by id; None where it does not say.
        unsure: why the ids may not be those that were drawn; "" where the engine told them itself.
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    finish_reason: str = "length"
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[Mapping[int, float], ...] | None = None
    unsure: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For a file of JSON lines."""
        top = None if self.top_logprobs is None else [[[i, p] for i, p in each.items()] for each in self.top_logprobs]
        logprobs = None if self.logprobs is None else list(self.logprobs)
        return {
            "token_ids": list(self.token_ids), "text": self.text, "finish_reason": self.finish_reason,
            "logprobs": logprobs, "top_logprobs": top, "unsure": self.unsure,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Reply:
        """What `as_dict` made.

        Raises:
            KeyError, TypeError, ValueError: it is no such thing.
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
    """What is known of an engine before it is asked.

    Attributes:
        name: of the engine, as "vllm".
        version: of it, if it tells.
        filters: the order in which it makes a distribution of logits, of `FILTERS`; those missing it does not know.
        takes: names of `SamplingParams` that it understands; a question with others is refused.
        tells_ids: whether it answers token ids.
        logprobs: "raw" where it gives the model's own, "processed" behind temperature and filters, "" for none.
        more: what else is to be reported, as its command.
    """

    name: str
    version: str = ""
    filters: tuple[str, ...] = FILTERS
    takes: Collection[str] = ("max_tokens", "temperature", "top_p", "seed", "stop")
    tells_ids: bool = False
    logprobs: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)


class Peer(ABC):
    """An engine that answers.

    Attributes:
        facts: about it.
    """

    facts: PeerFacts

    @abstractmethod
    def answers(self, questions: Sequence[Question]) -> Iterator[tuple[int, Reply | PeerError]]:
        """Ask questions together, so that the engine may batch them; yields each answer as it comes.

        With each comes the number of its question. One that could not be answered is an error in its place, so that
        the others are kept. Who keeps answers as they come loses none to an interrupt.
        """

    def ask(self, questions: Sequence[Question]) -> list[Reply | PeerError]:
        """The same, all of them in the order of the questions."""
        found = dict(self.answers(questions))
        return [found[number] for number in range(len(questions))]

    def refuses(self, params: SamplingParams) -> str:
        """Options of a question that the engine does not take, joined by commas; "" where it takes all."""
        plain = SamplingParams()
        changed = [
            name for name in SamplingParams.__dataclass_fields__ if getattr(params, name) != getattr(plain, name)
        ]
        return ", ".join(name for name in changed if name not in self.facts.takes)
