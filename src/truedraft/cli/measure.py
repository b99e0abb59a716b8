"""Plain decoding against speculation on the same prompts: runs, and what follows from them. Prints nothing."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from truedraft.core.counters import Counters
from truedraft.core.sampling import SamplingParams

if TYPE_CHECKING:
    from truedraft.cli.differences import Difference
    from truedraft.engine import Answer, Engine

_NGRAM = 8
_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Side:
    """All runs of one way of decoding on one prompt; they emit the same tokens, so counts are those of the first.

    Attributes:
        answers: one for each run.
    """

    answers: list[Answer] = field(default_factory=list)

    @property
    def stats(self) -> Counters:
        """Counts of one run."""
        return self.answers[0].stats

    @property
    def token_ids(self) -> list[int]:
        """The answer's tokens."""
        return self.answers[0].token_ids

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second from submission to the end, prefill included; the median run."""
        return statistics.median(tokens_per_s(answer) for answer in self.answers)

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first, per second after the first; the median run."""
        return statistics.median(decode_tokens_per_s(answer) for answer in self.answers)

    def as_dict(self) -> dict[str, Any]:
        """For the JSON record."""
        speeds = {"tokens_per_s": self.tokens_per_s, "decode_tokens_per_s": self.decode_tokens_per_s}
        return speeds | counts_dict(self.stats)


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt, decoded both ways.

    Attributes:
        name: the prompt's.
        plain: without a drafter.
        speculative: with it.
        difference: where the tokens part, if they must not and do.
        params: how the answers were drawn.
    """

    name: str
    plain: Side
    speculative: Side
    difference: Difference | None = None
    params: SamplingParams = field(default_factory=SamplingParams)

    @property
    def same_tokens(self) -> bool:
        """Whether all runs of both ways gave the same tokens, and ended alike."""
        runs = (*self.plain.answers, *self.speculative.answers)
        first = runs[0]
        return all((run.token_ids, run.finish_reason) == (first.token_ids, first.finish_reason) for run in runs)

    @property
    def speedup(self) -> float:
        """Tokens per second, speculative over plain; 1 where neither emitted a token."""
        return self.speculative.tokens_per_s / self.plain.tokens_per_s if self.plain.tokens_per_s else 1.0

    @property
    def repeated_8grams(self) -> float | None:
        """Share of the plain answer's 8-grams that occurred before in it; None if it has none."""
        return repeated_ngrams(self.plain.token_ids)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All prompts of a comparison.

    Attributes:
        pairs: at least one.
        must_agree: whether the tokens are promised to be identical (temperature 0, or coupled, and a lossless rule).
        lossless: whether the rule keeps the target's law.
    """

    pairs: Sequence[Pair]
    must_agree: bool
    lossless: bool = True

    @property
    def identical_prompts(self) -> int:
        """How many prompts gave the same tokens both ways."""
        return sum(pair.same_tokens for pair in self.pairs)

    @property
    def identical(self) -> bool | None:
        """Whether all prompts did; None where that is not promised: the law alone is the same, or not even that."""
        return self.identical_prompts == len(self.pairs) if self.must_agree else None

    @property
    def speedups(self) -> list[float]:
        """One for each prompt."""
        return [pair.speedup for pair in self.pairs]

    @property
    def speedup(self) -> float:
        """Geometric mean over the prompts."""
        return statistics.geometric_mean(self.speedups) if min(self.speedups) > 0 else 0.0

    @property
    def share_faster(self) -> float:
        """Share of the prompts that speculation answered faster."""
        return sum(speedup > 1 for speedup in self.speedups) / len(self.pairs)

    @property
    def repeated_8grams(self) -> float | None:
        """Mean over the prompts whose plain answer has an 8-gram."""
        shares = [share for pair in self.pairs if (share := pair.repeated_8grams) is not None]
        return statistics.mean(shares) if shares else None

    def total(self, side: Callable[[Pair], Side]) -> dict[str, Any]:
        """One way of decoding over all prompts: medians of speeds, sums of counts."""
        sides = [side(pair) for pair in self.pairs]
        speeds = {
            "tokens_per_s": statistics.median(each.tokens_per_s for each in sides),
            "decode_tokens_per_s": statistics.median(each.decode_tokens_per_s for each in sides),
        }
        return speeds | counts_dict(sum((each.stats for each in sides), Counters()))


def measure(
    plain: Engine, speculative: Engine, prompt: str | Sequence[int], params: SamplingParams, orders: Iterable[bool]
) -> tuple[Side, Side]:
    """Answer one prompt both ways, once each for each item of `orders`; True lets plain decoding go first."""
    sides = (Side(), Side())
    for plain_first in orders:
        for which in (0, 1) if plain_first else (1, 0):
            sides[which].answers.append((plain, speculative)[which].generate(prompt, params))
    return sides


def warm_up(engines: Iterable[Engine], prompt: str | Sequence[int], params: SamplingParams) -> None:
    """Let first-time costs fall outside the measurement."""
    few = dataclasses.replace(params, max_tokens=min(params.max_tokens, _WARM_UP_TOKENS))
    for engine in engines:
        engine.generate(prompt, few)


def emitted(answer: Answer) -> int:
    """Tokens that the target emitted, the prefill's included; stop tokens are not."""
    return answer.stats.emitted_tokens + answer.stats.prefill_tokens


def tokens_per_s(answer: Answer) -> float:
    """Emitted tokens per second, prefill included."""
    return emitted(answer) / answer.timing.total_s if answer.timing.total_s else 0.0


def decode_tokens_per_s(answer: Answer) -> float:
    """Tokens after the first, per second after the first."""
    return answer.stats.emitted_tokens / answer.timing.decode_s if answer.timing.decode_s else 0.0


def counts_dict(stats: Counters) -> dict[str, Any]:
    """Counts and the rates that follow from them, for the JSON record; divergences are null after a lossless rule."""
    rates = {
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "mean_total_variation": stats.mean_total_variation,
        "mean_kl": stats.mean_kl,
        "mean_total_variation_greedy": stats.mean_total_variation_greedy,
        "mean_kl_greedy": stats.mean_kl_greedy,
    }
    return dataclasses.asdict(stats) | rates


def repeated_ngrams(token_ids: Sequence[int], size: int = _NGRAM) -> float | None:
    """Share of n-grams that occurred before in the same tokens; None where there are none.

    >>> repeated_ngrams([1, 2, 1, 2, 1], size=2)
    0.5
    """
    ngrams = [tuple(token_ids[i : i + size]) for i in range(len(token_ids) - size + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else None
