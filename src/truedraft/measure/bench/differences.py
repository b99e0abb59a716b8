"""The first difference of two answers that must be equal, and the margin of the target's choice there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from truedraft.measure import outputs_along
from truedraft.models.base import LanguageModel


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token at the place of the difference, with the target's logit by plain forwards; `id` is None after the end."""

    id: int | None
    text: str
    logit: float | None

    def describe(self) -> str:
        return self.text if self.logit is None else f"{self.text} (logit {self.logit:.4f})"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two answers to one prompt differ.

    Attributes:
        position: number of equal tokens before it.
        best: the two likeliest tokens there.
        margin: between the logits of these two; a small one is a near tie.
    """

    position: int
    plain: Candidate
    speculative: Candidate
    best: tuple[Candidate, Candidate]
    margin: float

    def describe(self) -> str:
        first, second = self.best
        return (
            f"differs at token {self.position}: plain {self.plain.describe()}, speculative "
            f"{self.speculative.describe()}; the two best there are {first.describe()} and {second.describe()}, "
            f"margin {self.margin:.4f}"
        )


def find_difference(
    target: LanguageModel, prompt: Sequence[int], plain: Sequence[int], speculative: Sequence[int]
) -> Difference | None:
    """Find the first place where two answers differ; None if they are equal."""
    if list(plain) == list(speculative):
        return None
    shortest = min(len(plain), len(speculative))
    position = next((i for i in range(shortest) if plain[i] != speculative[i]), shortest)
    before = [*prompt, *plain[:position]]
    *_, last = outputs_along(target, before, len(prompt) - 1)
    logits: list[float] = last.logits[-1].float().tolist()
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:2]
    return Difference(
        position,
        _candidate(target, logits, plain, position),
        _candidate(target, logits, speculative, position),
        (_candidate(target, logits, order, 0), _candidate(target, logits, order, 1)),
        logits[order[0]] - logits[order[1]],
    )


def _candidate(target: LanguageModel, logits: Sequence[float], tokens: Sequence[int], place: int) -> Candidate:
    if place >= len(tokens):
        return Candidate(None, "(end)", None)
    token = tokens[place]
    text = repr(target.tokenizer.decode([token])) if target.tokenizer is not None else str(token)
    return Candidate(token, text, logits[token])
