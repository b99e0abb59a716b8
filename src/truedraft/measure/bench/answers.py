"""Answers compared with the target's distributions: where two that must be equal differ, and what a draft cannot write.

A token drawn from q is accepted with probability sum min(p, q). The rejection probability, 1 - sum min(p, q), is the
sum of the mass of p on tokens that the draft cannot write, and of max(0, p - q) on the others. Both are means over
the places of the target's own answers; for greedy distributions they are shares of places.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from truedraft.core.params import SamplingParams
from truedraft.core.probs import overlap, probs_from_logits
from truedraft.drafters.base import Drafter
from truedraft.errors import TruedraftError
from truedraft.measure import outputs_along
from truedraft.measure.bench.runs import Group, Row
from truedraft.measure.bench.suite import PLAIN
from truedraft.models.base import LanguageModel

_PLACES = 1024


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
    """The first place where two answers to one prompt differ; `position` is the number of equal tokens before it."""

    position: int
    plain: Candidate
    speculative: Candidate
    best: tuple[Candidate, Candidate]
    margin: float

    def describe(self) -> str:
        plain, speculative, *best = (each.describe() for each in (self.plain, self.speculative, *self.best))
        return (
            f"differs at token {self.position}: plain {plain}, speculative {speculative}; the two best there are "
            f"{' and '.join(best)}, margin {self.margin:.4f}"
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
    best = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:2]

    def candidate(token: int | None) -> Candidate:
        if token is None:
            return Candidate(None, "(end)", None)
        text = repr(target.tokenizer.decode([token])) if target.tokenizer is not None else str(token)
        return Candidate(token, text, logits[token])

    ours, theirs = (each[position] if position < len(each) else None for each in (plain, speculative))
    margin = logits[best[0]] - logits[best[1]]
    return Difference(position, candidate(ours), candidate(theirs), (candidate(best[0]), candidate(best[1])), margin)


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """A prompt and the target's answer, in token ids."""

    prompt: Sequence[int]
    answer: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class VocabularyCost:
    """The acceptance of one draft with another tokenizer."""

    drafter: str
    shared: float  # the fraction of the target's ids that it can write
    places: int
    unshared_mass: float  # the target's probability of ids that the draft cannot write, mean over the places
    acceptance: float  # sum min(p, q), mean over the places

    def describe(self) -> str:
        return (
            f"{self.drafter} can write {self.shared:.3f} of the target's tokens, for the tokenizers differ: over "
            f"{self.places:,} places of the target's answers {self.unshared_mass:.3f} of its probability is on the "
            f"others, which bounds the acceptance rate of a drafted token by {1.0 - self.unshared_mass:.3f}; this "
            f"draft's is {self.acceptance:.3f}"
        )


def answered_prompts(groups: Sequence[Group], rows: Sequence[Row]) -> list[AnsweredPrompt]:
    """Plain decoding's answers, each prompt once, where no option changes logits before they are a distribution."""
    by_names = {group.names: group for group in groups if not group.params.shapes_logits}
    plain = {row.prompts: row for row in rows if row.system == PLAIN and row.prompts in by_names}
    return [
        AnsweredPrompt(prompt, answer, by_names[names].params)
        for names, row in plain.items()
        for prompt, answer in zip(by_names[names].prompts, row.output.token_ids, strict=True)
    ]


def vocabulary_costs(
    target: LanguageModel, drafters: Mapping[str, Drafter], answered: Sequence[AnsweredPrompt]
) -> list[VocabularyCost]:
    """The costs of drafters that cannot write all of the target's tokens, on the first 1,024 places.

    A failure is only a warning, because this follows a measurement that must not be lost.
    """
    costs = []
    for name, drafter in drafters.items():
        draft = drafter.model
        if draft is None or draft.shared_ids is None:
            continue
        try:
            found = [_at_places(target, draft, each) for each in _first(draft, answered)]
        except TruedraftError as error:
            warnings.warn(f"what the tokenizer of {name!r} costs is unknown: {error}", stacklevel=2)
            continue
        if found:
            means = torch.cat(found, dim=1)  # [2, places]
            shared = len(draft.shared_ids) / target.vocab_size
            costs.append(VocabularyCost(name, shared, means.shape[1], *means.mean(dim=1).tolist()))
    return costs


def _first(draft: LanguageModel, answered: Sequence[AnsweredPrompt]) -> Iterator[AnsweredPrompt]:
    left = _PLACES
    for each in answered:
        answer = each.answer[:left]
        text = [*each.prompt, *answer]
        if answer and draft.most_tokens(text) >= len(text):
            left -= len(answer)
            yield dataclasses.replace(each, answer=answer)


def _at_places(target: LanguageModel, draft: LanguageModel, answered: AnsweredPrompt) -> Tensor:
    """`[2, places]`, float64: the target's mass on tokens that the draft cannot write, and sum min(p, q)."""
    unshared = torch.ones(target.vocab_size, dtype=torch.float64)
    unshared[draft.shared_ids] = 0.0
    found = []
    ids, first = [*answered.prompt, *answered.answer[:-1]], len(answered.prompt) - 1
    theirs, ours = outputs_along(target, ids, first, answered.params.adapter), outputs_along(draft, ids, first)
    for outputs in zip(theirs, ours, strict=True):
        p, q = (probs_from_logits(each.logits.double().cpu(), answered.params) for each in outputs)
        q = q.nan_to_num(0.0)  # without any mass nothing is proposed
        found.append(torch.stack([p @ unshared, overlap(p, q)]))
    return torch.cat(found, dim=1)
