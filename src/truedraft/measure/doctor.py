"""The doctor: a drafter replayed on its target's own answers, beside the variants that people get wrong.

Each variant drafts chains along the same answers. What it accepts at each place is known without chance, so the two
are compared prompt by prompt: by flipping the signs of the differences (`sign_flips`), corrected for the number of
variants by Holm. A variant is called better where that is significant and the gain is large enough to matter. Then it
takes the place of what was given, and the others are tried again beside it, for a drafter may have several faults. A
sound drafter is accused with a probability of 1 % at most: behind the first round it is not sound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from truedraft.core.params import SamplingParams
from truedraft.core.theory import holm
from truedraft.drafters.heads.head import Head
from truedraft.errors import DataError, TruedraftError
from truedraft.measure.cases import Case, Variant, behind
from truedraft.measure.predictions import Interval, difference_over_prompts, ratio_over_prompts, sign_flips
from truedraft.measure.traces import outputs_along, trace_answers
from truedraft.measure.variants import Examined
from truedraft.measure.walks import Numbers, walk_along

TOKENS = 64
"""Of an answer."""
LEAST_PROMPTS = 12
"""With fewer no variant of several can be called better."""
_FALSE_ALARM = 0.01
_LEAST_SHARE, _LEAST_TOKENS = 0.05, 0.02  # of what is accepted, and accepted tokens of a place: less does not matter
_MOST_FAULTS = 3
_HARDLY = 1.1  # tokens per call below which a drafter brings next to nothing
_BELOW_CARD = 0.9
_AS_GOOD = 0.9  # of the largest gain
_NEAR = 64  # ids that are about as frequent
_AS_OTHERS = 0.9  # of the loss with other ids, from where on its own ids mean nothing to a draft

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Replayed:
    """What decoding answers with a drafter's chains comes to.

    Attributes:
        accepted: `[prompts]`: sums over the places of an answer of the tokens that would be accepted there.
        places: `[prompts]`: places of an answer.
        calls: `[prompts]`: target calls behind the prompt's.
        survival: the share of places at which the first 1, 2, ... drafted tokens are accepted.
    """

    accepted: Numbers
    places: Numbers
    calls: Numbers
    survival: tuple[float, ...]

    @property
    def tokens_per_call(self) -> Interval:
        """By resampling prompts."""
        return ratio_over_prompts(self.places.tolist(), self.calls.tolist())

    @property
    def mean_accepted(self) -> float:
        """Tokens that are accepted at a place."""
        return float(self.accepted.sum() / max(self.places.sum(), 1))


@dataclass(frozen=True)
class Trial:
    """A variant beside the drafter as it was given, or as it was better before.

    Attributes:
        variant: that was tried.
        tokens_per_call: of the variant; None where it could not be tried.
        gain: what it brings more on the same texts, in tokens per call.
        p_value: corrected for the number of variants.
        better: whether it is, significantly and by enough to matter.
        reason: why it was not tried.
    """

    variant: Variant
    tokens_per_call: Interval | None = None
    gain: Interval | None = None
    p_value: float = 1.0
    better: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Fault:
    """What is wrong with a drafter.

    Attributes:
        name: of it.
        meaning: in a sentence.
        fix: what to do.
        gain: in tokens per call; None where it was seen otherwise than by a variant.
        mends: whether another head or draft model is better.
    """

    name: str
    meaning: str
    fix: str
    gain: Interval | None = None
    mends: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found.

    Attributes:
        noun: what the drafter is.
        faults: the worst first; of a sound drafter none.
        trials: of the drafter as it was given, the best first; those that could not be tried last.
        given: what it brings, by temperature.
        best: likewise, with all faults that variants name mended.
        promised: what its card promises, by temperature; empty where it promises nothing.
        prompts: that were answered.
        part: the best head or draft model.
    """

    noun: str
    faults: tuple[Fault, ...]
    trials: tuple[Trial, ...]
    given: Mapping[float, Replayed]
    best: Mapping[float, Replayed]
    promised: Mapping[float, float]
    prompts: int
    part: Any = field(repr=False)

    @property
    def sentence(self) -> str:
        """The diagnosis."""
        expected = {temperature: each.tokens_per_call for temperature, each in self.best.items()}
        now = " and ".join(
            f"{each.value:.2f} [{each.low:.2f}, {each.high:.2f}] tokens per call at temperature {temperature:g}"
            for temperature, each in expected.items()
        )
        if self.faults:
            told = "; ".join(f"{each.meaning}: {each.fix}" for each in self.faults)
            after = any(each.mends or each.gain is not None for each in self.faults)
            return f"{told}. {'Then' if after else 'As it is,'} expect {now} on these prompts"
        told = f"sound: no variant is better; expect {now} on these prompts"
        found = expected[0.0]
        if found.high < _HARDLY:
            told += "; it drafts hardly anything, and none of the usual faults explains it: train it longer, or for "
            return told + "this target"
        card = self.promised.get(0.0)
        if card is not None and found.high < _BELOW_CARD * card:
            told += f"; its card promises {card:.2f} on the text that it was measured on, which these are not like"
        return told

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        given, best = (
            {f"{temperature:g}": asdict(each.tokens_per_call) for temperature, each in cases.items()}
            for cases in (self.given, self.best)
        )
        return {
            "kind": self.noun,
            "sound": not self.faults,
            "diagnosis": self.sentence,
            "faults": [asdict(each) for each in self.faults],
            "given": given,
            "best": best,
            "survival_given": list(self.given[0.0].survival),
            "survival": list(self.best[0.0].survival),
            "promised": {f"{temperature:g}": each for temperature, each in self.promised.items()},
            "prompts": self.prompts,
            "tokens": int(self.given[0.0].places.sum()),
            "variants": [
                {name: value for name, value in asdict(each).items() if name != "variant"} | {"name": each.variant.name}
                for each in self.trials
            ],
        }


@dataclass(frozen=True)
class Prompt:
    """What the target answers.

    Attributes:
        name: for messages.
        given: text or ids, as a user has them.
        ids: as the target reads them.
    """

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
    """Say whether a drafter is read as it was trained, and what it brings.

    Args:
        kind: of the drafter.
        case: the drafter and its target, without traces.
        prompts: what the target answers.
        tokens: of an answer.
        promised: what the drafter's card promises, by temperature.
        progress: called with what is done, of how much, and what is being done.

    Raises:
        DataError: there are too few prompts.
        CompositionError: the drafter does not fit the target.
    """
    fits = [each for each in prompts if len(each.ids) + tokens < case.target.context_length]
    if len(fits) < LEAST_PROMPTS:
        raise DataError(
            f"a diagnosis needs {LEAST_PROMPTS} prompts or more that leave room for {tokens} tokens, got {len(fits)}; "
            "give more or shorter ones"
        )
    case.chain(case.part).check(case.target)
    bar = _Bar(progress, len(kind.variants) + 3)
    bar.tell("the target answers")
    given = {0.0: _answered(case, fits, tokens, 0.0)}
    bar.tell("the target answers at temperature 1")
    given[1.0] = _answered(case, fits, tokens, 1.0)
    trials, faults, best = _mended(kind.variants, given, bar)
    bar.tell("what to expect")
    replayed = {temperature: replay(each) for temperature, each in best.items()}
    as_given = replayed if best is given else {temperature: replay(each) for temperature, each in given.items()}
    bar.end()
    return Diagnosis(
        kind.noun,
        (*_known(case), *_seen_at_once(given[0.0], as_given[0.0]), *faults),
        tuple(sorted(trials, key=_gain, reverse=True)),
        as_given,
        replayed,
        promised or {},
        len(fits),
        best[0.0].part,
    )


@dataclass
class _Bar:
    """How far an examination is."""

    progress: Progress
    total: int
    done: int = 0

    def tell(self, remark: str) -> None:
        self.progress(min(self.done, self.total - 1), self.total, remark)
        self.done += 1

    def end(self) -> None:
        self.progress(self.total, self.total, "")


Cases = Mapping[float, Case]
"""A case by the temperature of its answers."""


def _mended(variants: Sequence[Variant], given: Cases, bar: _Bar) -> tuple[list[Trial], list[Fault], Cases]:
    """The trials beside what was given; the faults that variants name, the worst first; and what is left then.

    A variant that is better takes the place of what was given, and the others are tried again.
    """
    faults: list[Fault] = []
    first: list[Trial] = []
    best, left = given, list(variants)
    for _ in range(_MOST_FAULTS):
        trials, better = _tried(left, best[0.0], bar)
        first = first or trials
        found = [each for each in trials if each.better]
        if not found:
            break
        least = _AS_GOOD * max(map(_gain, found))
        worst = next(each for each in found if _gain(each) >= least)  # of those that explain as much the first
        variant, before = worst.variant, best[0.0].part
        best = {0.0: better[variant.name], 1.0: variant.make(best[1.0]).better}
        mends = best[0.0].part is not before
        faults.append(Fault(variant.name, variant.meaning, variant.fix(best[0.0]), worst.gain, mends))
        left.remove(variant)
        bar.total += len(left)
    return first, faults, best


def promised_by(figures: Mapping[str, Any], length: int) -> dict[float, float]:
    """Tokens per call by temperature that a card has of chains of a length, which the doctor drafts, too.

    Args:
        figures: as of `TrainedDrafter`.
        length: tokens of a chain.
    """
    served = figures.get("served")
    return {
        float(each["temperature"]): float(each["mean_acceptance_length"])
        for each in (served if isinstance(served, list) else ())
        if isinstance(each, dict) and each.get("num_speculative_tokens") == length
    }


def _answered(case: Case, prompts: Sequence[Prompt], tokens: int, temperature: float) -> Case:
    """The case with the target's answers; those without two tokens are left out."""
    params = SamplingParams(max_tokens=tokens, temperature=temperature)
    asked = [(each.name, list(each.ids), params) for each in prompts]
    pairs = [
        (each.given, behind(case, trace.prompt, trace))
        for each, trace in zip(prompts, trace_answers(case.target, asked), strict=True)
        if trace.places
    ]
    if len(pairs) < LEAST_PROMPTS:
        raise DataError(f"only {len(pairs)} answers have two tokens or more; give prompts with longer answers")
    return replace(case, prompts=tuple(each for each, _ in pairs), traces=tuple(trace for _, trace in pairs))


def replay(case: Case) -> Replayed:
    """What decoding a case's answers with its drafter's chains comes to.

    Raises:
        TruedraftError: the drafter does not fit the target, or failed.
    """
    drafter = case.chain(case.part)
    drafter.check(case.beside)
    walks = walk_along(drafter, case.beside, case.seen())
    steps = [each.steps([drafter.limits.nodes]) for each in walks]
    by_depth = np.concatenate([_padded(each.reach[0], drafter.limits.depth) for each in steps])
    return Replayed(
        np.array([each.reach.sum() for each in steps]),
        np.array([each.tokens for each in walks], np.float64),
        np.array([each.calls[0] for each in steps]),
        tuple(by_depth.mean(axis=0).tolist()),
    )


def _padded(reach: Numbers, depth: int) -> Numbers:
    return np.pad(reach, ((0, 0), (0, max(0, depth - reach.shape[1]))))[:, :depth]


def _tried(variants: Sequence[Variant], case: Case, bar: _Bar) -> tuple[list[Trial], dict[str, Case]]:
    """Every variant beside a case, and by name what takes its place where one is better."""
    found: list[Trial] = []
    untried: list[Trial] = []
    better: dict[str, Case] = {}
    own = replay(case)
    for each in variants:
        bar.tell(each.name)
        try:
            pair = each.make(case)
            beside = own if pair.given is case else replay(pair.given)
            changed = replay(pair.changed)
        except TruedraftError as error:
            untried.append(Trial(each, reason=" ".join(str(error).split())))
            continue
        more = (changed.accepted - beside.accepted).reshape(-1, len(case.traces)).sum(axis=0)
        gain = difference_over_prompts(*(x.tolist() for x in (changed.places, changed.calls, beside.calls)))
        matters = changed.mean_accepted - beside.mean_accepted >= max(
            _LEAST_TOKENS, _LEAST_SHARE * beside.mean_accepted
        )
        found.append(Trial(each, changed.tokens_per_call, gain, sign_flips(more), matters))
        better[each.name] = pair.better
    corrected = holm([each.p_value for each in found])
    found = [
        replace(each, p_value=p_value, better=each.better and p_value < _FALSE_ALARM)
        for each, p_value in zip(found, corrected, strict=True)
    ]
    return [*found, *untried], better


def _gain(trial: Trial) -> float:
    return -math.inf if trial.gain is None else trial.gain.value


def _known(case: Case) -> list[Fault]:
    """Why what was given could not be loaded as it is."""
    return [Fault(each.name, each.meaning, each.fix(case), mends=True) for each in case.mended]


def _seen_at_once(case: Case, replayed: Replayed) -> list[Fault]:
    """Faults that no variant is: numbers that are none, and a draft model that reads other ids.

    A draft may be weak and know little more than how frequent tokens are, which ids exchanged among as frequent ones
    hardly change; so one that is accepted at times and does better than chance reads the right ones.
    """
    if isinstance(case.part, Head):
        broken = [name for name, each in case.part.state_dict().items() if not each.isfinite().all()]
        told = f"{', '.join(broken)} hold numbers that are infinite or none, as an overflow of float16 leaves them"
        return [Fault("numbers that are none", told, "save the weights again in bfloat16 or float32")] if broken else []
    if case.part.shared_ids is not None:
        return []  # it reads its own ids
    own, ids = _losses(case), torch.arange(case.target.vocab_size)
    if not np.isfinite(own).all():
        told = "it gives numbers that are none, as an overflow of float16 does"
        return [Fault("numbers that are none", told, "load it in bfloat16 or float32")]
    generator = torch.Generator().manual_seed(0)
    near = torch.cat([each[torch.randperm(len(each), generator=generator)] for each in ids.split(_NEAR)])
    others = _losses(case, near)
    mean, beside, chance = own.mean(), others.mean(), math.log(case.target.vocab_size)
    known = mean < _AS_OTHERS * beside and sign_flips(others - own) < _FALSE_ALARM
    if mean < chance and (known or replayed.tokens_per_call.low >= _HARDLY):
        return []
    told = (
        f"it knows the target's answers hardly better ({mean:.1f} nats a token) than with their ids exchanged "
        f"({beside:.1f}; chance {chance:.1f}), so its ids mean other tokens: it was trained with another tokenizer "
        "than its folder has"
    )
    return [Fault("other ids", told, "put the tokenizer that it was trained with into its folder")]


def _losses(case: Case, exchanged: Tensor | None = None) -> Numbers:
    """What a draft model gives to each answer, in nats a token, `[prompts]`; of texts with their ids exchanged."""
    found = []
    for trace in case.traces:
        ids = torch.tensor((*trace.prompt, *trace.tokens))
        ids = ids if exchanged is None else exchanged[ids]
        outputs = outputs_along(case.part, ids.tolist(), len(trace.prompt))
        log_probs = torch.cat([each.logits.float().log_softmax(-1).cpu() for each in outputs])[:-1]
        found.append(-float(log_probs.gather(1, ids[len(trace.prompt) + 1 :, None]).mean()))
    return np.array(found)
