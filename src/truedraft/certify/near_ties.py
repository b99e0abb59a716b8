"""Where two answers part that must be equal: a near tie that rounding may decide either way, or a fault.

Both answers followed the same text up to the place where they part. The logits there are known, so it is known by how
much they would have to move for the other token to be chosen: the *margin*. For greedy requests that is the difference
of the two logits; for coupled ones the difference of log p + G, times the temperature. If rounding moves each logit by
at most r, it moves a margin by at most 2 r.

Worked example: the logits of the two best tokens are 9.71 and 9.70, so the margin is 0.01. Shapes of plain decoding
give logits there that differ by up to 0.006. A margin below 0.012 is a near tie, so this is one. With 0.004 in place of
0.006 it is a fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from truedraft.certify.rounding import Rounding, compare_shapes
from truedraft.core.budget import Budget
from truedraft.core.laws import law_from_logits, most_likely
from truedraft.core.noise import KeyedNoise
from truedraft.core.sampling import SamplingParams
from truedraft.engine import Answer
from truedraft.models.base import LanguageModel
from truedraft.verification.coupled import coupled_choice

_NEAR = 16
"""Places up to the one in question over which rounding is measured; one place alone shows too few roundings."""
_HALVINGS = 60


@dataclass(frozen=True, slots=True)
class Parting:
    """The first place where two answers to one request differ.

    Attributes:
        prompt: number of the request's prompt.
        position: tokens of the answers that are equal before it.
        expected: token of the reference there; None where it had ended.
        found: token of the other answer there; None where it had ended.
        texts: what the two look like.
        best: the two tokens with the largest logits there, and these logits.
        margin: how far logits must move apart for the other token to be chosen; infinite where no move would do.
        rounding: measured there; None where the place was not looked at.
        fault: whether rounding does not explain it.
        reason: why, in one sentence.
    """

    prompt: int
    position: int
    expected: int | None
    found: int | None
    texts: tuple[str, str]
    best: tuple[tuple[int, float], ...]
    margin: float
    rounding: Rounding | None
    fault: bool
    reason: str

    def describe(self) -> str:
        """In one line."""
        best = " and ".join(f"{token} ({logit:.5g})" for token, logit in self.best)
        return (
            f"prompt {self.prompt}, token {self.position}: {self.texts[1]} in place of {self.texts[0]}"
            f"{f'; the two best there are {best}' if best else ''}; "
            f"{'fault' if self.fault else 'near tie'}: {self.reason}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For the JSON record; an infinite margin is None."""
        rounding = self.rounding
        return {
            "prompt": self.prompt,
            "position": self.position,
            "expected": {"id": self.expected, "text": self.texts[0]},
            "found": {"id": self.found, "text": self.texts[1]},
            "best": [{"id": token, "logit": logit} for token, logit in self.best],
            "margin": self.margin if math.isfinite(self.margin) else None,
            "rounding": None if rounding is None else rounding.largest_difference,
            "rounding_plain": None if rounding is None else rounding.plain_difference,
            "rounding_drafted": None if rounding is None else rounding.drafted_difference,
            "fault": self.fault,
            "reason": self.reason,
        }


def same_answer(expected: Answer, found: Answer) -> bool:
    """Whether two answers have the same tokens and ended for the same reason."""
    return expected.token_ids == found.token_ids and expected.finish_reason == found.finish_reason


def parting_of(
    target: LanguageModel,
    prompts: Sequence[Sequence[int]],
    number: int,
    params: SamplingParams,
    answers: tuple[Answer, Answer],
    batch: int,
    limits: Budget,
) -> Parting | None:
    """Find and judge the first place where an answer leaves the one it must equal.

    Args:
        target: the model that decides; it must decode plainly as it did for the reference.
        prompts: token ids of all prompts.
        number: which of them this is.
        params: options of the request, greedy or coupled and seeded, without stop texts.
        answers: the reference, and the other one.
        batch: requests of a step where the other answer came about.
        limits: of the drafter.

    Returns:
        None if the answers are equal.
    """
    expected, found = answers
    if same_answer(expected, found):
        return None
    place = _first_difference(expected.token_ids, found.token_ids)
    prompt = list(prompts[number])
    ids = _token_at(expected, place), _token_at(found, place)
    texts = _shown(target, expected, ids[0]), _shown(target, found, ids[1])

    def parting(best: tuple[tuple[int, float], ...], margin: float, rounding: Rounding | None, why: str) -> Parting:
        return Parting(number, place, *ids, texts, best, margin, rounding, why != "", why or _near(margin, rounding))

    failed = next((answer for answer in answers if answer.error is not None), None)
    if failed is not None:
        return parting((), math.inf, None, f"the request failed ({failed.error})")
    before = [*prompt, *expected.token_ids[:place]]
    if any(token is None and answer.finish_reason != "stop" for token, answer in zip(ids, answers, strict=True)):
        return parting((), math.inf, None, "no token was chosen there, so no logits decided where the answer ends")
    near = max(len(prompt), len(before) - _NEAR + 1)
    logits, rounding = compare_shapes(target, [*before, 0], len(prompt), near, batch, params, limits)
    row = logits[-1]
    order = row.double().topk(min(2, len(row)))
    best = tuple(zip(order.indices.tolist(), order.values.tolist(), strict=True))
    choose = _chooser(params, len(before), row)
    wanted = [_stops(target, params) if token is None else {token} for token in ids]
    margin = max(lead_needed(row, choose, tokens) for tokens in wanted)
    return parting(best, margin, rounding, _fault(margin, rounding))


def lead_needed(row: Tensor, choose: Callable[[Tensor], int], tokens: Collection[int]) -> float:
    """The least lead over all others that must be added to the logits of some tokens until one of them is chosen.

    Args:
        row: logits `[vocab]`.
        choose: from logits `[vocab]` in float64 to the token that they give.
        tokens: ids.

    Returns:
        0 if one of them is chosen as it is; infinite where no lead would do. Found by halving, so that it is right
        also where top-k, top-p or min-p keep a token out.
    """
    logits = row.double()
    places = torch.tensor(sorted(tokens), dtype=torch.int64, device=row.device)
    if not len(places) or not logits[places].isfinite().any():
        return math.inf

    def enough(lead: float) -> bool:
        raised = logits.clone()
        raised[places] += lead
        return choose(raised) in tokens

    finite = logits[logits.isfinite()]
    low, high = 0.0, 2.0 * float(finite.max() - finite.min()) + 1.0
    if enough(low):
        return 0.0
    while not enough(high):  # Gumbel noise is multiplied by the temperature, which has no bound
        high *= 4.0
        if high > 1e9:
            return math.inf
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _chooser(params: SamplingParams, position: int, row: Tensor) -> Callable[[Tensor], int]:
    """What a greedy or coupled request makes of logits at a position."""
    if params.greedy:
        return lambda logits: int(most_likely(logits[None]))
    noise = KeyedNoise(params.seed or 0, position, 0)
    gumbel = noise.gumbel(0, len(row), row.device)
    return lambda logits: int(coupled_choice(law_from_logits(logits[None], params), gumbel))


def _fault(margin: float, rounding: Rounding) -> str:
    """Why rounding does not explain a margin; "" if it does."""
    allowed = rounding.largest_difference
    if rounding.bitwise:
        return f"the margin is {margin:.4g}, and {rounding.describe()}"
    if not rounding.is_rounding:
        return f"the margin is {margin:.4g}, and {rounding.describe()}"
    if margin > 2.0 * allowed:
        return (
            f"the margin {margin:.4g} is above {2.0 * allowed:.4g}, twice the largest difference of logits that was "
            "measured there"
        )
    return ""


def _near(margin: float, rounding: Rounding | None) -> str:
    assert rounding is not None  # without it there is no near tie
    allowed = rounding.largest_difference
    return (
        f"the margin {margin:.4g} is not above {2.0 * allowed:.4g}: rounding moves a logit there by up to "
        f"{allowed:.4g}, and a margin by twice that"
    )


def _first_difference(expected: Sequence[int], found: Sequence[int]) -> int:
    shortest = min(len(expected), len(found))
    return next((i for i in range(shortest) if expected[i] != found[i]), shortest)


def _token_at(answer: Answer, place: int) -> int | None:
    return answer.token_ids[place] if place < len(answer.token_ids) else None


def _stops(target: LanguageModel, params: SamplingParams) -> set[int]:
    """Ids that end an answer."""
    return set(params.stop_token_ids) | (set() if params.ignore_eos else set(target.eos_token_ids))


def _shown(target: LanguageModel, answer: Answer, token: int | None) -> str:
    if token is None:
        return f"the end ({answer.finish_reason})"
    return str(token) if target.tokenizer is None else f"{token} {target.tokenizer.decode([token])!r}"
