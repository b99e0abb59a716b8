"""What a request returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from truedraft.core.logprobs import TokenLogprobs
from truedraft.core.stats import Counters
from truedraft.core.verdict import Origin

FinishReason = Literal["stop", "length", "error", "cancelled"]


@dataclass(frozen=True, slots=True)
class Timing:
    """Times in seconds since the request was submitted; `first_token_s` is the TTFT, None without tokens."""

    first_token_s: float | None
    total_s: float

    @property
    def decode_s(self) -> float:
        return self.total_s - (self.total_s if self.first_token_s is None else self.first_token_s)


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished request.

    Attributes:
        text: the answer, without what ended it; None without a tokenizer.
        token_ids: new tokens, without the one that ended it.
        finish_reason: "stop" (end of text, stop id, stop text), "length" (max_tokens or the model's context), "error"
            (see `error`) or "cancelled".
        stats: counts of this request; under a lossy rule `stats.divergence` is the distance of the emitted tokens'
            distributions from the target's, None for a lossless answer.
        origins: for each of `token_ids`, whether it was drafted and accepted, recovered, or a bonus; the prefill's
            first token is a bonus.
        logprobs: for each of `token_ids`, with `SamplingParams.logprobs`.
        prompt_logprobs: for each token of the prompt except the first, with `SamplingParams.prompt_logprobs`.
        others: the answers of samples 1 to n - 1, if `SamplingParams.n` is above 1.
        seed: reproduces the answer; None for a request without one.
        stop_text: the text of `SamplingParams.stop` that ended it.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Counters
    origins: list[Origin]
    seed: int | None
    prompt_tokens: int
    timing: Timing
    error: str | None = None
    warnings: tuple[str, ...] = ()
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    others: tuple[Answer, ...] = ()
    stop_text: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of an answer that one step added.

    Attributes:
        text: text that can no longer change: no incomplete characters or possible stop texts; "" without a tokenizer.
        token_ids: tokens that no stop text can remove any more; they may come later than their text. All
            pieces joined are the answer's.
        answer: the whole answer, on the last piece only.
    """

    text: str
    token_ids: list[int]
    origins: list[Origin]
    answer: Answer | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
