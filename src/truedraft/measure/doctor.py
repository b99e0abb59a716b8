"""The doctor: a drafter is replayed on its target's own answers and compared with variants of common mistakes.

Each variant drafts chains along the same answers. Acceptance is known without sampling, so the two are compared prompt
by prompt by flipping the signs of the differences (`sign_flips`), with Holm's correction. A variant that is
significantly and enough better replaces the given drafter, and the others are tried again. A sound drafter is called
faulty with a probability of at most 1 %: later rounds are run only after a first fault was found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from truedraft.core.intervals import Interval, Numbers, ratio_over_prompts, resampled, sign_flips
from truedraft.core.params import SamplingParams
from truedraft.core.theory import holm
from truedraft.drafters.heads.head import Head
from truedraft.errors import DataError, TruedraftError
from truedraft.measure.traces import outputs_along, trace_answers
from truedraft.measure.variants import Case, Examined, Variant, after_prompt
from truedraft.measure.walks import walk_along
from truedraft.options import record_of

TOKENS = 64  # tokens of an answer
LEAST_PROMPTS = 12  # with fewer no variant of several can be called better
_FALSE_ALARM = 0.01
_LEAST_SHARE, _LEAST_TOKENS = 0.05, 0.02  # smallest relevant gain: share of accepted tokens, accepted tokens per place
_MOST_FAULTS = 3
_HARDLY = 1.1  # tokens per call below which a drafter gains next to nothing
_BELOW_CARD = 0.9
_AS_GOOD = 0.9  # share of the largest gain
_NEAR = 64  # ids that are about as frequent
_AS_OTHERS = 0.9  # share of the loss with exchanged ids above which the ids carry no information for a draft

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Replayed:
    """Result of decoding answers with a drafter's chains."""

    accepted: Numbers  # `[prompts]`, summed over the positions of an answer
    places: Numbers  # `[prompts]`: tokens of the calls
    calls: Numbers  # `[prompts]`: target calls after the prompt's
    survival: tuple[float, ...]  # share of positions at which the first 1, 2, ... drafted tokens are accepted

    @property
    def tokens_per_call(self) -> Interval:
        return ratio_over_prompts(self.places.tolist(), self.calls.tolist())

    @property
    def mean_accepted(self) -> float:
        return float(self.accepted.sum() / max(self.places.sum(), 1))


@dataclass(frozen=True)
class Trial:
    """A variant compared with the given drafter; `gain` in tokens per call, `p_value` corrected for their number."""

    variant: Variant
    tokens_per_call: Interval | None = None
    gain: Interval | None = None
    p_value: float = 1.0
    better: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Fault:
    """A fault; `gain` in tokens per call, None without a variant; `mends`: the fix changes the head or draft model."""

    name: str
    meaning: str
    fix: str
    gain: Interval | None = None
    mends: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found."""

    noun: str
    faults: tuple[Fault, ...]  # the worst first
    trials: tuple[Trial, ...]  # variants of the given drafter, the best first; those that could not be tried last
    given: Mapping[float, Replayed]
    best: Mapping[float, Replayed]  # the replay with all faults fixed, by temperature
    promised: Mapping[float, float]
    prompts: int
    part: Any = field(repr=False)

    @property
    def sentence(self) -> str:
        expected = {temperature: each.tokens_per_call for temperature, each in self.best.items()}
        now = " and ".join(
            f"{each.value:.2f} [{each.low:.2f}, {each.high:.2f}] tokens per call at temperature {temperature:g}"
            for temperature, each in expected.items()
        )
        if self.faults:
            message = "; ".join(f"{each.meaning}: {each.fix}" for each in self.faults)
            after = any(each.mends or each.gain is not None for each in self.faults)
            return f"{message}. {'Then' if after else 'As it is,'} expect {now} on these prompts"
        message, card = f"sound: no variant is better; expect {now} on these prompts", self.promised.get(0.0)
        if expected[0.0].high < _HARDLY:
            return (
                f"{message}; it drafts hardly anything, and none of the usual faults explains it: train it longer, or "
                "for this target"
            )
        if card is not None and expected[0.0].high < _BELOW_CARD * card:
            message += f"; its card promises {card:.2f} on the text that it was measured on, which these are not like"
        return message

    def as_dict(self) -> dict[str, Any]:
        given, best = (
            {f"{temperature:g}": record_of(each.tokens_per_call) for temperature, each in cases.items()}
            for cases in (self.given, self.best)
        )
        tried = ("tokens_per_call", "gain", "p_value", "better", "reason")
        return {
            "kind": self.noun,
            "sound": not self.faults,
            "diagnosis": self.sentence,
            **record_of(self, "faults", "prompts"),
            "given": given,
            "best": best,
            "survival_given": list(self.given[0.0].survival),
            "survival": list(self.best[0.0].survival),
            "promised": {f"{temperature:g}": each for temperature, each in self.promised.items()},
            "tokens": int(self.given[0.0].places.sum()),
            "variants": [record_of(each, *tried) | {"name": each.variant.name} for each in self.trials],
        }


@dataclass(frozen=True)
class Prompt:
    """A prompt for the target."""

    name: str
    given: str | tuple[int, ...]
    ids: tuple[int, ...]


def examine(
    kind: Examined,
    case: Case,
    prompts: Sequence[Prompt],
    *,
    tokens: int = TOKENS,
    promised: Mapping[float, float] | None = None,
    progress: Progress = lambda done, total, remark: None,
) -> Diagnosis:
    """Say whether a drafter is read as it was trained, and how much it gains.

    `promised` are tokens per call on its card, by temperature. Raises DataError for too few prompts, CompositionError
    if the drafter does not fit the target.
    """
    fits = [each for each in prompts if len(each.ids) + tokens < case.target.context_length]
    if len(fits) < LEAST_PROMPTS:
        raise DataError(
            f"a diagnosis needs {LEAST_PROMPTS} prompts or more that leave room for {tokens} tokens, got {len(fits)}; "
            "give more or shorter ones"
        )
    case.chain(case.part).check(case.target)
    bar = _Bar(progress, len(kind.variants) + 3)
    bar.show("the target answers")
    given = {0.0: _answered(case, fits, tokens, 0.0)}
    bar.show("the target answers at temperature 1")
    given[1.0] = _answered(case, fits, tokens, 1.0)
    trials, faults, best = _repaired(kind.variants, given, bar)
    bar.show("what to expect")
    replayed = {temperature: replay(each) for temperature, each in best.items()}
    as_given = replayed if best is given else {temperature: replay(each) for temperature, each in given.items()}
    progress(bar.total, bar.total, "")
    known = [Fault(each.name, each.meaning, each.fix(case), mends=True) for each in case.mended]
    return Diagnosis(
        kind.noun,
        (*known, *_seen_at_once(given[0.0], as_given[0.0]), *faults),
        tuple(sorted(trials, key=_gain, reverse=True)),
        as_given,
        replayed,
        promised or {},
        len(fits),
        best[0.0].part,
    )


@dataclass
class _Bar:
    progress: Progress
    total: int
    done: int = 0

    def show(self, remark: str) -> None:
        self.progress(min(self.done, self.total - 1), self.total, remark)
        self.done += 1


Cases = Mapping[float, Case]  # a case for each temperature of its answers


def _repaired(variants: Sequence[Variant], given: Cases, bar: _Bar) -> tuple[list[Trial], list[Fault], Cases]:
    faults: list[Fault] = []
    first: list[Trial] = []
    best, left = given, list(variants)
    for _ in range(_MOST_FAULTS):
        trials, better = _tried(left, best[0.0], bar)
        first = first or trials
        if not (found := [each for each in trials if each.better]):
            break
        least = _AS_GOOD * max(map(_gain, found))
        worst = next(each for each in found if _gain(each) >= least)  # the first of those that gain about as much
        variant, before = worst.variant, best[0.0].part
        best = {0.0: better[variant.name], 1.0: variant.make(best[1.0]).better}
        mends = best[0.0].part is not before
        faults.append(Fault(variant.name, variant.meaning, variant.fix(best[0.0]), worst.gain, mends))
        left.remove(variant)
        bar.total += len(left)
    return first, faults, best


def promised_by(figures: Mapping[str, Any], length: int) -> dict[float, float]:
    """Tokens per call by temperature on a card, for chains of the length that the doctor drafts."""
    served = figures.get("served")
    return {
        float(each["temperature"]): float(each["mean_acceptance_length"])
        for each in (served if isinstance(served, list) else ())
        if isinstance(each, dict) and each.get("num_speculative_tokens") == length
    }


def _answered(case: Case, prompts: Sequence[Prompt], tokens: int, temperature: float) -> Case:
    params = SamplingParams(max_tokens=tokens, temperature=temperature)
    requests = [(each.name, list(each.ids), params) for each in prompts]
    pairs = [
        (each.given, after_prompt(case, trace.prompt, trace))
        for each, trace in zip(prompts, trace_answers(case.target, requests), strict=True)
        if trace.places
    ]
    if len(pairs) < LEAST_PROMPTS:
        raise DataError(f"only {len(pairs)} answers have two tokens or more; give prompts with longer answers")
    return replace(case, prompts=tuple(each for each, _ in pairs), traces=tuple(trace for _, trace in pairs))


def replay(case: Case) -> Replayed:
    """Decode a case's answers with its drafter's chains; TruedraftError if it does not fit the target, or failed."""
    drafter = case.chain(case.part)
    drafter.check(case.read_target)
    walks, depth = walk_along(drafter, case.read_target, case.seen()), drafter.limits.depth
    steps = [each.steps([drafter.limits.nodes]) for each in walks]
    by_depth = np.concatenate([np.pad(each.reach[0], ((0, 0), (0, depth)))[:, :depth] for each in steps])
    return Replayed(
        np.array([each.reach.sum() for each in steps]),
        np.array([each.tokens for each in walks], np.float64),
        np.array([each.calls[0] for each in steps]),
        tuple(by_depth.mean(axis=0).tolist()),
    )


def _tried(variants: Sequence[Variant], case: Case, bar: _Bar) -> tuple[list[Trial], dict[str, Case]]:
    found: list[Trial] = []
    untried: list[Trial] = []
    better: dict[str, Case] = {}
    own = replay(case)
    for each in variants:
        bar.show(each.name)
        try:
            pair = each.make(case)
            baseline = own if pair.given is case else replay(pair.given)
            changed = replay(pair.changed)
        except TruedraftError as error:
            untried.append(Trial(each, reason=" ".join(str(error).split())))
            continue
        more = (changed.accepted - baseline.accepted).reshape(-1, len(case.traces)).sum(axis=0)
        gain = tokens_gained(changed.places, changed.calls, baseline.calls)
        least = max(_LEAST_TOKENS, _LEAST_SHARE * baseline.mean_accepted)
        matters = changed.mean_accepted - baseline.mean_accepted >= least
        found.append(Trial(each, changed.tokens_per_call, gain, sign_flips(more), matters))
        better[each.name] = pair.better
    corrected = holm([each.p_value for each in found])
    found = [
        replace(each, p_value=p_value, better=each.better and p_value < _FALSE_ALARM)
        for each, p_value in zip(found, corrected, strict=True)
    ]
    return [*found, *untried], better


def tokens_gained(tokens: Numbers, calls: Numbers, before: Numbers) -> Interval:
    """Gain in tokens per call on the same prompts, by tokens emitted and target calls, now and before, per prompt."""
    return resampled([tokens, calls, before], lambda sums: sums[0] / sums[1] - sums[0] / sums[2])


def _gain(trial: Trial) -> float:
    return -math.inf if trial.gain is None else trial.gain.value


def _seen_at_once(case: Case, replayed: Replayed) -> list[Fault]:
    """Weights that are not finite, and a draft model that reads other ids. A weak draft may know little more than token
    frequencies, so one that is sometimes accepted and does better than chance reads the right ids.
    """
    overflow = "numbers that are none"
    if isinstance(case.part, Head):
        broken = [name for name, each in case.part.state_dict().items() if not each.isfinite().all()]
        message = f"{', '.join(broken)} hold numbers that are infinite or none, as an overflow of float16 leaves them"
        return [Fault(overflow, message, "save the weights again in bfloat16 or float32")] if broken else []
    if case.part.shared_ids is not None:
        return []  # it reads its own ids
    own, ids = _losses(case), torch.arange(case.target.vocab_size)
    if not np.isfinite(own).all():
        message = "it gives numbers that are none, as an overflow of float16 does"
        return [Fault(overflow, message, "load it in bfloat16 or float32")]
    generator = torch.Generator().manual_seed(0)
    near = torch.cat([each[torch.randperm(len(each), generator=generator)] for each in ids.split(_NEAR)])
    others = _losses(case, near)
    mean, exchanged, chance = own.mean(), others.mean(), math.log(case.target.vocab_size)
    known = mean < _AS_OTHERS * exchanged and sign_flips(others - own) < _FALSE_ALARM
    if mean < chance and (known or replayed.tokens_per_call.low >= _HARDLY):
        return []
    message = (
        f"it knows the target's answers hardly better ({mean:.1f} nats a token) than with their ids exchanged "
        f"({exchanged:.1f}; chance {chance:.1f}), so its ids mean other tokens: it was trained with another tokenizer "
        "than its folder has"
    )
    return [Fault("other ids", message, "put the tokenizer that it was trained with into its folder")]


def _losses(case: Case, exchanged: Tensor | None = None) -> Numbers:
    found = []
    for trace in case.traces:
        ids = torch.tensor((*trace.prompt, *trace.tokens))
        ids = ids if exchanged is None else exchanged[ids]
        outputs = outputs_along(case.part, ids.tolist(), len(trace.prompt))
        log_probs = torch.cat([each.logits.float().log_softmax(-1).cpu() for each in outputs])[:-1]
        found.append(-float(log_probs.gather(1, ids[len(trace.prompt) + 1 :, None]).mean()))
    return np.array(found)
