"""Evidence against "tokens follow the target", valid at any stopping time: e-processes over streams and over counts.

For sets S_1, S_2, ... of tokens, each fixed before its token is seen, let X_i = 1 if token i is in S_i, and p_i the
target's probability of S_i after the text before it. If the tokens follow the target, then for every l

    product over i of exp(l X_i) / (1 + p_i (exp(l) - 1))

is a martingale that starts at 1: the likelihood ratio of an excess (l > 0) or a lack (l < 0) of the event. So is the
mean over several l, the e-process. By Ville's inequality it ever reaches 1/a with probability at most a, whatever the
distributions, the number of tokens and the stopping time: 1 over it is a p-value, without any approximation. If token i
may be off by rounding, |true p_i - p_i| <= e, ratios for p_i + e (or p_i - e) keep that true.

Counts of outcomes are compared in the same way with a known distribution p: for any other distribution r, fixed
beforehand, the product over outcomes of r(outcome) / p(outcome) is a martingale. Averaged over Dirichlet priors around
p it has a closed form in the counts, and finds a deviation in any direction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from truedraft.certify.sampling import Scored

ALARM, CERTAIN = 1e3, 1e6
"""Evidence at which a check fails, and at which a deviation that repeats in another run is certain."""
_TILTS = tuple(sign * 2.0**power for sign in (1, -1) for power in range(3, -8, -1))
_SUMMING = 2e-5  # largest error of a sum of float32 probabilities
ENOUGH = 0.06  # total variation that must be detectable: controls must be three times as large, and few exceed 0.2
POWER = 0.99  # probability with which a smallest detectable deviation is found
POWER_SIGMAS = 2.3263478740408408  # of the normal distribution, for POWER
_ROUNDS = 8
_RANDOM_SETS = 32
_RECENT = 16
_UNLIKELY = 0.02
_MOST_PLACES = 8


@dataclass(frozen=True, slots=True)
class TestResult:
    """Result of one test."""

    name: str
    tokens: int
    expected: float  # sum of the event's probabilities
    observed: int  # tokens with the event
    variance: float  # sum of p_i (1 - p_i)
    p_value: float
    allowance: float = 0.0  # largest error of a token's distribution by rounding (total variation)

    @property
    def excess(self) -> float:
        """Observed minus expected probability of the event, a fraction; negative if it is too rare."""
        return (self.observed - self.expected) / self.tokens if self.tokens else 0.0

    def smallest_detectable(self, false_alarm: float) -> float:
        """The excess found at level `false_alarm` with probability `POWER`, by the normal approximation."""
        if not self.tokens:
            return 1.0
        target = math.log(len(_TILTS) / false_alarm)
        needed = min(target / tilt + tilt * self.variance / 2 for tilt in _TILTS if tilt > 0)
        excess, variance = 0.0, self.variance
        for _ in range(_ROUNDS):
            excess = (needed + POWER_SIGMAS * math.sqrt(variance)) / self.tokens
            # Changed probabilities have another variance: p (1 - p) grows at most by the excess, and never beyond 1/4.
            variance = max(self.variance, min(self.tokens / 4, self.variance + excess * self.tokens))
        return min(1.0, excess + self.allowance)

    def least_excess(self, sigmas: float) -> float:
        """Lower bound of the distribution's error: the excess, moved by `sigmas` standard deviations toward 0."""
        if not self.tokens:
            return 0.0
        # For rare tokens the observed count has a larger variance than the expected one.
        spread = math.sqrt(max(self.variance, self.observed))
        return max(0.0, abs(self.excess) - sigmas * spread / self.tokens)


class EProcess:
    """Combined evidence of several e-processes: their weighted mean is an e-process, too.

    Attributes:
        most: the logarithm of the maximum of the mean so far, to which Ville's inequality applies.
        reached: those of `ALARM` and `CERTAIN` that were reached, with the count by then.
    """

    def __init__(self, **shares: float) -> None:
        self._shares = shares
        self.most = 0.0
        self.reached: dict[float, Any] = {}

    def mean(self, logs: Mapping[str, float]) -> float:
        weighed = [math.log(share) + logs[name] for name, share in self._shares.items()]
        return log_mean(torch.tensor(weighed, dtype=torch.float64)) + math.log(
            len(weighed) / sum(self._shares.values())
        )

    def see(self, logs: Mapping[str, float], counted: Any) -> None:
        self.most = max(self.most, self.mean(logs))
        for level in (ALARM, CERTAIN):
            if self.most >= math.log(level):
                self.reached.setdefault(level, counted)

    def share(self, name: str) -> float:
        return self._shares[name] / sum(self._shares.values())

    @property
    def log10(self) -> float:
        return self.most / math.log(10.0)


def log_mean(logs: Tensor) -> float:
    """The logarithm of the mean of e-values, from their logarithms."""
    return float(torch.logsumexp(logs.flatten(), dim=0)) - math.log(logs.numel())


class EventTests:
    """Several tests over one stream of tokens.

    Args:
        allowance: e, the largest error of a token's distribution by rounding (total variation). If it is a mean over
            tokens and not a bound for each, the p-values hold to first order in l.
        log_ratio: largest error of each log-probability; an event's odds are then off by at most twice as much.
    """

    def __init__(self, names: Sequence[str], allowance: float = 0.0, log_ratio: float = 0.0) -> None:
        self._names = list(names)
        self._allowance = allowance + _SUMMING
        self._odds = 2.0 * log_ratio
        self._lost = 0.0
        self._logs = torch.zeros(len(_TILTS), len(self._names), dtype=torch.float64)  # of the martingales
        self._sums = torch.zeros(4, len(self._names), dtype=torch.float64)  # tokens, expected, observed, variance

    def add(self, probs: Tensor, hits: Tensor, lost: float = 0.0) -> None:
        """Update with more tokens.

        `probs` `[tokens, tests]`, float64, are the target's probabilities of each token's event, negative if a test
        does not cover the token; `hits`, bool, whether the event occurred; `lost` is a further error of the
        distribution here.
        """
        self._lost = max(self._lost, lost)
        about = probs >= 0.0
        p, x = probs.clamp(0.0, 1.0), (hits & about).double()
        for row, tilt in enumerate(_TILTS):
            moved = p if not self._odds else p / (p + (1.0 - p) * math.exp(-math.copysign(self._odds, tilt)))
            allowed = (moved + math.copysign(self._allowance + lost, tilt)).clamp_(0.0, 1.0)
            ratio = tilt * x - torch.log1p(allowed * math.expm1(tilt))
            self._logs[row] += (ratio * about).sum(dim=0)
        p = p * about
        self._sums += torch.stack([about.double().sum(0), p.sum(0), x.sum(0), (p * (1.0 - p)).sum(0)])

    def log_evidence(self) -> Tensor:
        return torch.logsumexp(self._logs, dim=0) - math.log(len(_TILTS))

    def results(self) -> list[TestResult]:
        logs = self.log_evidence()
        # Odds that change by a factor of e^d change no probability by more than d / 4.
        allowance = self._allowance + self._odds / 4.0 + self._lost
        found = []
        for name, log, (tokens, expected, observed, variance) in zip(
            self._names, logs.tolist(), self._sums.T.tolist(), strict=True
        ):
            p_value = math.exp(-max(log, 0.0))
            found.append(TestResult(name, int(tokens), expected, int(observed), variance, p_value, allowance))
        return found


class TokenTests:
    """Tests of the tokens of answers, one for each of `Events`; `allowance` and `log_ratio` are as in `EventTests`."""

    def __init__(self, vocab: int, batch: int = 1, allowance: float = 0.0, log_ratio: float = 0.0) -> None:
        self._events = Events(vocab, batch)
        self._tests = EventTests(self._events.names, allowance, log_ratio)
        self.tokens = self.impossible = self.judged = 0

    def add(self, scored: Scored, where: Tensor | None = None, lost: float = 0.0) -> None:
        """Test an answer's tokens; `where` `[tokens]`, bool, selects some without use of their values."""
        if not len(scored.tokens):
            return
        chances, hits = self._events.measure(scored)
        where = torch.ones(len(chances), dtype=torch.bool) if where is None else where
        self._tests.add(chances.masked_fill(~where[:, None], -1.0), hits, lost)
        own = [float(scored.probs[i, token]) for i, token in enumerate(scored.tokens)]
        self.impossible += own.count(0.0)
        self.tokens += int(where.sum())
        self.judged += sum(one.q is not None or bool(one.candidates) for one in scored.decisions)

    def results(self) -> list[TestResult]:
        return self._tests.results()

    def log_evidence(self) -> float:
        return log_mean(self._tests.log_evidence())

    def smallest_detectable(self, false_alarm: float) -> float:
        """The largest detectable deviation of the tests over all tokens; tests of parts detect less."""
        results = self.results()
        whole = [test for test in results if test.tokens == self.tokens]
        return max(test.smallest_detectable(false_alarm / len(results)) for test in whole)


class Events:
    """Sets of tokens for tests of a stream of emitted tokens.

    A set may depend on everything before its token (text, distributions, the draft's information), never on the token
    or on what a drafter *drew*. Under coupled noise a tree, and so the depth of an accepted path, is cut by the same
    noise that decides its tokens: then neither is allowed. Each of the first 8 places of a batch is also tested by
    itself.
    """

    def __init__(self, vocab: int, batch: int) -> None:
        generator = torch.Generator().manual_seed(0)
        members = torch.rand(_RANDOM_SETS, vocab, generator=generator).argsort(dim=-1) < vocab // 2
        self._members = members.T.float().contiguous()  # [vocab, sets]
        self._places = range(min(batch, _MOST_PLACES) if batch > 1 else 0)
        self._general = [
            *(f"random half {number}" for number in range(_RANDOM_SETS)),
            "the likeliest token",
            "unlikely tokens",
            "later ids",
            "recent tokens",
            "the last token",
            "what the draft overrates",
            "the draft's first guess",
            "later ids of what the draft underrates",
        ]
        self._by_depth = ["the likeliest token", "unlikely tokens", "later ids", "the last token", "random half 0"]
        self._by_place = ["random half 0", "the likeliest token", "unlikely tokens"]

    @property
    def names(self) -> list[str]:
        deep = [
            f"{name}, {where}" for where in ("first of a step", "behind accepted tokens") for name in self._by_depth
        ]
        places = [f"{name}, place {place}" for place in self._places for name in self._by_place]
        return [*self._general, *deep, *places]

    def measure(self, scored: Scored) -> tuple[Tensor, Tensor]:
        """Probabilities `[tokens, tests]`, float64, of each set (-1 where a test covers no token), and hits, bool."""
        probs = scored.probs
        tokens = torch.as_tensor(list(scored.tokens), device=probs.device)
        sets = [*self._fixed(probs, tokens), *self._of_probs(probs, tokens), *self._of_text(scored)]
        sets += self._of_draft(scored)
        chances = torch.stack([chance.double().cpu() for chance, _ in sets], dim=1)
        hits = torch.stack([hit.cpu() for _, hit in sets], dim=1)
        return self._with_strata(chances, hits, scored)

    def _fixed(self, probs: Tensor, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        members = self._members.to(probs.device)
        chances, hits = probs.float() @ members, members[tokens] > 0.5
        return list(zip(chances.unbind(1), hits.unbind(1), strict=True))

    def _of_probs(self, probs: Tensor, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
        best, which = probs.max(dim=-1)
        own = probs.gather(-1, tokens[:, None])[:, 0]
        unlikely = (probs * (probs < _UNLIKELY)).sum(dim=-1)
        below = probs.double().cumsum(dim=-1)
        half = (below < 0.5).sum(dim=-1, keepdim=True).clamp_max(probs.shape[-1] - 1)  # id at which half is reached
        later = 1.0 - below.gather(-1, half)[:, 0]
        return [(best, tokens == which), (unlikely, own < _UNLIKELY), (later, tokens > half[:, 0])]

    def _of_text(self, scored: Scored) -> list[tuple[Tensor, Tensor]]:
        text = [*scored.before, *scored.tokens]
        first = len(scored.before)
        recent, last, hits = [], [], []
        for i, token in enumerate(scored.tokens):
            known = sorted(set(text[max(0, first + i - _RECENT) : first + i]))
            recent.append(scored.probs[i, known].sum())
            last.append(scored.probs[i, text[first + i - 1]])
            hits.append((token in known, token == text[first + i - 1]))
        seen = torch.tensor(hits).view(-1, 2)
        return [(torch.stack(recent), seen[:, 0]), (torch.stack(last), seen[:, 1])]

    def _of_draft(self, scored: Scored) -> list[tuple[Tensor, Tensor]]:
        """Tokens that the draft overrates, the most likely of it, and a half of those that it underrates."""
        chances = torch.full((3, len(scored.tokens)), -1.0, dtype=torch.float64)
        hits = torch.zeros(3, len(scored.tokens), dtype=torch.bool)
        for i, decision in enumerate(scored.decisions):
            q = self._draft_probs(scored, i)
            if q is not None:
                p, token = scored.probs[i], int(scored.tokens[i])
                over = q > p
                first = decision.candidates[0] if decision.candidates else int(q.argmax())
                # A recovered token comes from the residual, by a number that must not have been used for acceptance.
                left = (p - q).clamp_min_(0.0)
                before = left.cumsum(dim=-1) - left
                later = (2.0 * before >= left.sum()) & (p > q)
                for row, members in enumerate((over, later)):
                    chances[2 * row, i], hits[2 * row, i] = float((p * members).sum()), bool(members[token])
                chances[1, i], hits[1, i] = float(p[first]), token == first
        return list(zip(chances, hits, strict=True))

    def _draft_probs(self, scored: Scored, place: int) -> Tensor | None:
        decision, p = scored.decisions[place], scored.probs[place]
        if scored.coupled:
            return None
        if decision.q is not None:
            return decision.q.to(p)
        if not decision.candidates:
            return None
        chosen = torch.zeros_like(p)
        chosen[list(decision.candidates)] = 1.0
        return chosen

    def _with_strata(self, chances: Tensor, hits: Tensor, scored: Scored) -> tuple[Tensor, Tensor]:
        deep = torch.tensor([decision.depth > 0 for decision in scored.decisions])
        strata = [(self._by_depth, part & (not scored.coupled)) for part in (~deep, deep)]
        own = scored.place % max(len(self._places), 1)
        strata += [(self._by_place, torch.full_like(deep, place == own)) for place in self._places]
        all_chances, all_hits = [chances], [hits]
        for names, here in strata:
            columns = [self._general.index(name) for name in names]
            all_chances.append(chances[:, columns].masked_fill(~here[:, None], -1.0))
            all_hits.append(hits[:, columns])
        return torch.cat(all_chances, dim=1), torch.cat(all_hits, dim=1)


FLOOR = 2.0**-22  # minimum probability of a cell: of the size of a rounding of float32
_CONCENTRATIONS = (4.0, 32.0, 256.0, 2048.0, 16384.0)
_ELSEWHERE = 0.05  # the share of a prior that is uniform over cells, including those without probability
_MISSED = 4  # expected number of samples without detection when measuring power
_HALVINGS = 9


def log_dirichlet(counts: Tensor, probs: Tensor) -> float:
    """The logarithm of the averaged likelihood ratio of counts `[cells]` against a distribution `[cells]`, float64.

    The prior is a mean of Dirichlet distributions with parameters c b, b nearly `probs`, for several c. With n rows,
    n_i of them in cell i, one c gives

        Gamma(c) / Gamma(c + n) times the product over i of Gamma(c b_i + n_i) / (Gamma(c b_i) p_i^n_i).

    Where p is 0, `FLOOR` replaces it, which only makes the ratio smaller if p is right.
    """
    return float(log_dirichlets(counts[None], probs)[0])


def log_dirichlets(counts: Tensor, probs: Tensor) -> Tensor:
    """`log_dirichlet` of several counts `[samples, cells]`: `[samples]`."""
    base = (1.0 - _ELSEWHERE) * probs + _ELSEWHERE / len(probs)
    rows = counts.sum(-1)
    against = counts @ probs.clamp_min(FLOOR).log()
    logs = []
    for c in _CONCENTRATIONS:
        prior = c * base
        inside = (torch.lgamma(prior + counts) - torch.lgamma(prior)).sum(-1)
        logs.append(math.lgamma(c) - torch.lgamma(rows + c) + inside - against)
    return torch.logsumexp(torch.stack(logs), 0) - math.log(len(logs))


def total_variation(counts: Tensor, probs: Tensor) -> float:
    """Between frequencies `[cells]` and probabilities `[cells]`."""
    return float((counts / counts.sum().clamp_min(1.0) - probs).abs().sum()) / 2.0


def variation_by_chance(rows: int, probs: Tensor) -> float:
    """Mean total variation between `rows` draws and their distribution, by the normal approximation."""
    return float((2.0 * probs * (1.0 - probs) / (math.pi * max(rows, 1))).sqrt().sum()) / 2.0


def smallest_detectable(probs: Tensor, rows: int, log_needed: float, power: float = 0.9) -> float:
    """The least total variation that `rows` draws detect with probability about `power`, for any kind of fault.

    Mass is moved from one half of the outcomes to the other, which is the hardest to detect; the same test, which needs
    an e-value of `exp(log_needed)`, judges samples of the result.
    """
    low, high = 1e-4, 1.0
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if _found(probs, middle, rows, log_needed, round(_MISSED / (1.0 - power))) >= power:
            high = middle
        else:
            low = middle
    return high


def _found(probs: Tensor, variation: float, rows: int, log_needed: float, samples: int) -> float:
    planted = _moved(probs, variation)
    counts = np.random.default_rng(0).multinomial(rows, planted.numpy() / float(planted.sum()), samples)
    return float((log_dirichlets(torch.from_numpy(counts).double(), probs) >= log_needed).double().mean())


def _moved(probs: Tensor, variation: float) -> Tensor:
    """A distribution at this distance: about half of the mass loses some to the other half, or to empty cells."""
    order = probs.argsort(descending=True)
    gains = torch.zeros_like(probs, dtype=torch.bool)
    mass = 0.0
    for cell in order.tolist():
        if mass + float(probs[cell]) <= 0.5 or (mass == 0.0 and float(probs[cell]) < 1.0):
            gains[cell] = True
            mass += float(probs[cell])
    if not 0.0 < mass < 1.0:  # only one outcome
        gains, mass = probs == 0.0, 0.0
    share = probs / mass if mass > 0.0 else gains.double() / gains.sum()
    variation = min(variation, 1.0 - mass)
    left = probs * ~gains
    return torch.where(gains, probs + variation * share, probs - variation * left / left.sum()).clamp_min(0.0)
