"""The joint law of several tokens of whole answers, over a vocabulary of three tokens of the user's own model.

The target (and a draft model) is left as it is, but for all logits outside a few ids, which become -inf. Then the law
of the second to fourth token of an answer, which speculative steps decide, can be summed exactly from forwards over
every prefix, and the answers of the pipeline are counted against it. The chi-square statistic sees a deviation in any
direction: the smallest total variation named here is that of the direction which it sees least.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from truedraft.certify.betting import POWER_SIGMAS
from truedraft.certify.clock import Deadline
from truedraft.certify.delegating import ReducedModel
from truedraft.certify.sampling_runs import check_sound
from truedraft.certify.scoring import plain_laws, plain_logits
from truedraft.certify.stack import Stack
from truedraft.core.sampling import SamplingParams
from truedraft.drafters import DraftModel
from truedraft.drafters.base import Drafter
from truedraft.models.base import LanguageModel

_KEPT = 3
_LOOKED_AT = 3
_LENGTH = 1 + _LOOKED_AT
_BATCH = 32
_LEAST_EXPECTED = 20.0
_LEAST_ANSWERS = 256
_PROMPT = 8
_CANDIDATES = 16
_FINALISTS = 3


@dataclass(frozen=True, slots=True)
class JointResult:
    """What came of counting answers.

    Attributes:
        answers: how many.
        cells: of the chi-square test, rare answers counted together.
        statistic: chi-square.
        p_value: of "answers follow the target's joint law".
        accepted: drafted tokens accepted per target call, so that one sees that there was something to judge.
        kept: the ids that stayed possible.
    """

    answers: int
    cells: int
    statistic: float
    p_value: float
    accepted: float
    kept: tuple[int, ...]

    def smallest_detectable(self, false_alarm: float) -> float:
        """The total variation found with probability 0.99 in the direction that is seen least, at this level."""
        freedom = self.cells - 1
        if freedom < 1 or not self.answers:
            return 1.0
        critical = _quantile(freedom, false_alarm)
        # A law off by 2 TV p in every cell has the noncentrality 4 TV^2 N; its statistic is nearly normal.
        least, most = 0.0, 10.0 * critical + 1000.0
        for _ in range(60):
            middle = (least + most) / 2
            reached = freedom + middle - POWER_SIGMAS * math.sqrt(2 * (freedom + 2 * middle))
            least, most = (least, middle) if reached >= critical else (middle, most)
        return min(1.0, math.sqrt(most / (4 * self.answers)))


def joint_result(
    stack: Stack,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    deadline: Deadline,
    tell: Callable[[float], None],
    *,
    first_seed: int = 0,
) -> JointResult | None:
    """Count answers over a reduced vocabulary until the time is over; None where no prompt gives a law with room.

    Args:
        stack: what answers.
        prompts: token ids; their beginnings are used.
        params: the user's options.
        deadline: when to stop, if there are a few hundred answers.
        tell: is told the fraction done.
        first_seed: of the first answer.
    """
    found = _best_world(stack.target, prompts, params)
    if found is None:
        return None
    prompt, kept, law = found
    reduced = stack.but(target=ReducedModel(stack.target, kept), drafter=_reduced(stack.drafter, kept))
    engine = reduced.engine(_BATCH)
    number = {token: place for place, token in enumerate(kept)}
    counts = torch.zeros(law.shape, dtype=torch.int64)
    calls = accepted = impossible = 0
    asked = replace(params, max_tokens=_LENGTH, ignore_eos=True, stop=(), stop_token_ids=())
    for seed in itertools.count(first_seed, _BATCH):
        many = [replace(asked, seed=seed + place) for place in range(_BATCH)]
        for answer in engine.generate([list(prompt)] * _BATCH, many):
            check_sound(answer, stack.drafter.name)
            places = tuple(number.get(token, -1) for token in answer.token_ids[1:])
            if min(places) < 0:
                impossible += 1  # the target forbids all but the kept ids
            else:
                counts[places] += 1
            calls, accepted = calls + answer.stats.target_calls, accepted + answer.stats.accepted_tokens
        tell(deadline.fraction)
        if deadline.over and seed - first_seed >= _LEAST_ANSWERS:
            break
    statistic, cells, p_value = chi_square(counts, law) if not impossible else (math.inf, counts.numel(), 0.0)
    answers = int(counts.sum()) + impossible
    return JointResult(answers, cells, statistic, p_value, accepted / max(1, calls), kept)


def chi_square(counts: Tensor, law: Tensor) -> tuple[float, int, float]:
    """Statistic, cells and p-value of counts under a law, both of one shape; rare cells are counted together.

    A cell is rare below 20 expected answers; where all of these together are, they join the smallest of the others.

    Worked example: of 100 answers under (0.5, 0.5), 60 and 40 give (10^2 + 10^2) / 50 = 4, 2 cells, p-value 0.0455.
    """
    expected = law.double().flatten() * int(counts.sum())
    observed = counts.double().flatten()
    rare = expected < _LEAST_EXPECTED
    if float(observed[expected == 0.0].sum()) > 0:
        return math.inf, len(expected), 0.0  # something impossible was emitted
    pooled = float(expected[rare].sum()), float(observed[rare].sum())
    expected, observed = expected[~rare], observed[~rare]
    if pooled[0] >= _LEAST_EXPECTED or not len(expected):
        expected = torch.cat([expected, torch.tensor([pooled[0]], dtype=torch.float64)])
        observed = torch.cat([observed, torch.tensor([pooled[1]], dtype=torch.float64)])
    else:  # together they are still too rare for the statistic's law to be that of chi-square
        least = int(expected.argmin())
        expected[least] += pooled[0]
        observed[least] += pooled[1]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return statistic, len(expected), _survival(len(expected) - 1, statistic)


def _survival(freedom: int, statistic: float) -> float:
    """P(chi-square > statistic)."""
    if freedom < 1:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _quantile(freedom: int, level: float) -> float:
    """Where P(chi-square > x) = level."""
    low, high = 0.0, 100.0 * freedom + 1000.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _survival(freedom, middle) > level else (low, middle)
    return high


def _reduced(drafter: Drafter, kept: Sequence[int]) -> Drafter:
    """A draft model over the same few ids; other drafters guess as ever, and are accepted less often."""
    if not isinstance(drafter, DraftModel):
        return drafter
    return DraftModel(
        ReducedModel(drafter.model, kept),
        branching=drafter.branching,
        min_probability=drafter.limits.min_probability,
    )


def _best_world(
    target: LanguageModel, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> tuple[list[int], tuple[int, ...], Tensor] | None:
    """The prompt, and the ids, under which the joint law of tokens 2 to 4 has the most cells with mass."""
    beginnings = [list(prompt)[:_PROMPT] for prompt in list(prompts)[:_CANDIDATES]]
    logits = [rows[0].float() for rows in plain_logits(target, [(beginning, [0]) for beginning in beginnings])]
    kept = [tuple(sorted(row.topk(min(_KEPT, len(row))).indices.tolist())) for row in logits]
    evenness = [float(torch.softmax(row[list(ids)], -1).amax()) for row, ids in zip(logits, kept, strict=True)]
    finalists = sorted(range(len(beginnings)), key=lambda i: evenness[i])[:_FINALISTS]
    worlds = []
    for i in finalists:
        law = _joint_law(ReducedModel(target, kept[i]), beginnings[i], kept[i], params)
        worlds.append((float(-(torch.special.xlogy(law, law)).sum()), beginnings[i], kept[i], law))
    _, prompt, ids, law = max(worlds, key=lambda world: world[0])
    return None if float(law.max()) > 1.0 - 1e-3 else (prompt, ids, law)


def _joint_law(target: LanguageModel, prompt: Sequence[int], kept: Sequence[int], params: SamplingParams) -> Tensor:
    """The law `[kept] * 3` of the second to fourth token, summed over the first."""
    size = len(kept)
    prefixes = list(itertools.product(range(size), repeat=_LOOKED_AT))
    texts = [(prompt, [*(kept[place] for place in prefix), kept[0]]) for prefix in prefixes]
    laws = torch.stack([law[:, list(kept)].double().cpu() for law in plain_laws(target, texts, params)])
    laws = (laws / laws.sum(dim=-1, keepdim=True)).view(size, size, size, _LENGTH, size)
    joint = torch.zeros(size, size, size, dtype=torch.float64)
    for first in range(size):
        start = laws[first, 0, 0, 0, first]
        second = laws[first, 0, 0, 1]  # [2nd]
        third = laws[first, :, 0, 2]  # [2nd, 3rd]
        fourth = laws[first, :, :, 3]  # [2nd, 3rd, 4th]
        joint += start * second[:, None, None] * third[:, :, None] * fourth
    return joint
