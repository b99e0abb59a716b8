"""Plans: which drafter, how many tokens and which tree, from a target's own answers and this machine's costs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from truedraft.core.params import SamplingParams
from truedraft.core.theory import CostCurve, DraftCost, TargetCost
from truedraft.core.tree import chain_shape
from truedraft.drafters.base import Drafter
from truedraft.engine.policy import StepCosts
from truedraft.errors import CompositionError, DataError, OptionError, UnsupportedModelError
from truedraft.machine import dtype_name, machine_facts, this_machine
from truedraft.measure.candidates import Candidate, candidates_of
from truedraft.measure.predictions import (
    BATCHES,
    NONE,
    Circumstance,
    Drafting,
    Footprint,
    Prediction,
    WhatIf,
    options_of,
)
from truedraft.measure.traces import AnswerTrace, PromptRequest, trace_answers
from truedraft.measure.walks import Walk, walk_along
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.padding import unpadded_name
from truedraft.options import read_record

_FORMAT = 2
_AGAIN = "run truedraft plan again"


@dataclass(frozen=True)
class Plan:
    """The measurements of a plan, and where they are valid.

    Attributes:
        measured: measured speed-ups over plain decoding, by the drafter's words.
    """

    truedraft: str
    model: Mapping[str, Any]  # name, fingerprint (or None), dtype, bytes of weights and device of the target
    machine: Mapping[str, Any]
    sampling: Mapping[str, Any]
    prompts: int
    tokens: int
    context: int  # mean number of cached tokens
    batch: int
    forwards: TargetCost  # V of the target
    memory: Footprint
    drafters: tuple[Drafting, ...]
    measured: Mapping[str, float] = field(default_factory=dict)

    def best(self, batch: int | None = None, what_if: WhatIf | None = None) -> list[Prediction]:
        """For each drafter its best size, the best drafter first; `batch` None is the plan's own."""
        found = self._sizes(self.drafters, batch, what_if or WhatIf())
        first = {each.drafting.drafter: each for each in reversed(found)}  # the best of widths with different costs
        return [each for each in found if first[each.drafting.drafter] is each]

    def ways(self, words: str, batch: int | None = None) -> list[Prediction]:
        """The best size of each way in which one drafter may draft (a chain, several, trees), the best way first."""
        return self._sizes([each for each in self.drafters if each.drafter == words], batch, WhatIf())

    def _sizes(self, drafters: Sequence[Drafting], batch: int | None, what_if: WhatIf) -> list[Prediction]:
        there = self._there(what_if)
        there_drafting = [what_if.drafting(each, self.memory, self.forwards) for each in drafters]
        found = [there.best_of(each, batch or self.batch) for each in there_drafting]
        return sorted(found, key=lambda each: -each.speedup.value)

    def _there(self, what_if: WhatIf | None) -> Circumstance:
        return Circumstance((what_if or WhatIf()).forwards(self.forwards), self.context)

    def recommended(self, batch: int | None = None, what_if: WhatIf | None = None) -> str:
        """The words of the drafter with the largest predicted gain; `none` where none gains.

        For the plan's own batch and machine a measured speed-up replaces the predicted one.
        """
        found = self.best(batch, what_if)
        if not found:
            return NONE
        words, gain = found[0].option.drafter, found[0].speedup.value
        if batch in (None, self.batch) and what_if in (None, WhatIf()):
            gain = self.measured.get(words, gain)
        return words if gain > 1.0 else NONE

    @property
    def survival(self) -> dict[str, tuple[float, ...]]:
        """Survival of the recommended drafter, by its name, for `Controller.expect`; empty without one."""
        chosen = self.recommended()
        of = (each for each in self.drafters if any(option.drafter == chosen for option in each.options))
        return {each.name: each.survival for each in itertools.islice(of, 1)}

    def over_batches(self, prediction: Prediction, what_if: WhatIf | None = None) -> list[tuple[int, float]]:
        there = self._there(what_if)
        return [(n, there.predict(prediction.drafting, prediction.option, n).speedup.value) for n in BATCHES]

    def break_even(self, prediction: Prediction, what_if: WhatIf | None = None) -> int | None:
        """The smallest batch in which an option is predicted to gain nothing; None where it always gains."""
        return self._there(what_if).break_even(prediction.drafting, prediction.option)

    def check(self, target: LanguageModel) -> None:
        """Refuse another model, machine or version than the plan's; CompositionError says which."""
        if self.truedraft != _version():
            raise CompositionError(f"the plan is of truedraft {self.truedraft}, and this is {_version()}; {_AGAIN}")
        model = model_facts(target)
        if model["fingerprint"] is not None:
            del model["model"]  # one model may be called by several names
        for kept, here in ((self.model, model), (self.machine, this_machine(target.device))):
            for name, value in here.items():
                if kept.get(name) != value:
                    there, now = ("none" if each in ("", None) else each for each in (kept.get(name), value))
                    raise CompositionError(f"the plan was made for another {name} ({there}, and here {now}); {_AGAIN}")

    def to_dict(self) -> dict[str, Any]:
        return {"format": _FORMAT, **asdict(self), "recommended": self.recommended()}

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """The inverse of `to_dict`; DataError if it is no plan."""
        try:
            if data["format"] != _FORMAT:
                raise DataError(f"the plan is of format {data['format']}, and {_FORMAT} is read; {_AGAIN}")
            plan: Plan = read_record(cls, {each.name: data[each.name] for each in fields(cls)})
        except (KeyError, TypeError, OptionError) as error:
            raise DataError(f"this is no plan ({type(error).__name__}: {error}); {_AGAIN}") from error
        return plan


def read_plan(path: Path) -> Plan:
    """Read a plan that `truedraft plan --out` wrote, from the file or its folder.

    Raises DataError if it cannot be read, or is none.
    """
    file = path / PLAN_FILE if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read the plan {str(file)!r}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{str(file)!r} is not JSON and so no plan; {_AGAIN}") from error
    return Plan.from_dict(data)


PLAN_FILE = "plan.json"  # file name of a plan in a folder


def make_plan(
    target: LanguageModel,
    drafters: Sequence[str],
    prompts: Sequence[PromptRequest],
    params: SamplingParams,
    *,
    batch: int = 1,
    made: Mapping[str, Drafter] | None = None,
    costs: StepCosts | None = None,
    progress: Callable[[float, str], None] = lambda done, remark: None,
) -> Plan:
    """Run the target once over prompts, replay every size of every drafter on its answers, and measure the costs.

    Args:
        params: of the answers; the prompts' own may differ only in the seed.
        made: drafters that are loaded already, by their words.
        costs: of the target's steps; None loads or measures them.

    Raises:
        DataError: the answers are too short to plan with.
        OptionError: no drafter drafts, or replay does not support an option in `params`.
        TruedraftError: a drafter does not exist or fit, or something failed.
    """
    if params.shapes_logits:
        raise OptionError(
            "penalties, biases and bans cannot be planned with, for replay does not know them; leave them out"
        )
    costs = costs or StepCosts(target)
    progress(0.0, "loading drafters")
    made = made or {}
    candidates = [each for words in drafters for each in candidates_of(words, target, params, made.get(words))]
    if not candidates:
        raise OptionError("there is no drafter to plan with; name one that drafts", field="drafter")
    progress(0.05, "the target's answers")
    traces = trace_answers(
        target,
        prompts,
        [each.drafter for each in candidates],
        progress=lambda done, _: progress(0.05 + 0.25 * done / len(prompts), "the target's answers"),
    )
    context, drafting = _mean_context(traces), []
    for number, each in enumerate(candidates):
        progress(0.3 + 0.7 * number / len(candidates), f"replaying {each.words[each.sizes[-1]]}")
        walks = walk_along(each.drafter, target, traces)
        progress(0.3 + 0.7 * (number + 0.5) / len(candidates), f"costs of {each.typed}")
        drafting.append(_drafting(each, walks, costs, params, context))
    progress(1.0, "")
    return Plan(
        _version(),
        model_facts(target),
        this_machine(target.device),
        asdict(params),
        len(prompts),
        sum(trace.places for trace in traces),
        context,
        batch,
        costs.forwards(),
        footprint_of(target),
        tuple(_together(drafting)),
    )


def _version() -> str:
    return str(machine_facts()["truedraft"])


def _mean_context(traces: Sequence[AnswerTrace]) -> int:
    cached = sum((len(trace.prompt) + trace.places / 2) * trace.places for trace in traces)
    return max(1, round(cached / max(1, sum(trace.places for trace in traces))))


def _drafting(
    candidate: Candidate, walks: Sequence[Walk], costs: StepCosts, params: SamplingParams, context: int
) -> Drafting:
    drafter = candidate.drafter
    options, survival = options_of(walks, candidate.words)
    cost = costs.drafting(candidate.timed, params)
    tokens = sum(walk.tokens for walk in walks)
    guessed = sum(walk.guessed * walk.tokens for walk in walks) / max(tokens, 1)
    if guessed:
        cost = cost.guessed(guessed, drafter.limits.depth)
    growth, memory = _growth(drafter, costs, context), memory_of(drafter)
    return Drafting(candidate.typed, drafter.name, tuple(options), survival, cost, growth, memory)


def _together(drafting: Sequence[Drafting]) -> list[Drafting]:
    found: dict[tuple[str, DraftCost], Drafting] = {}
    for each in drafting:
        key = each.drafter, each.cost
        before = found.get(key)
        if before is None:
            found[key] = each
        else:
            fullest = max(before, each, key=lambda one: max(option.tokens_per_call.value for option in one.options))
            found[key] = replace(fullest, options=(*before.options, *each.options))
    return list(found.values())


def _growth(drafter: Drafter, costs: StepCosts, context: int) -> CostCurve:
    if drafter.model is None and drafter.features is None:
        return CostCurve(tuple(map(float, BATCHES)), tuple(map(float, BATCHES)))
    forwards = costs.forwards() if drafter.model is None else StepCosts(drafter.model).forwards()
    single = forwards(1, [context])
    times = [max(1.0, forwards(n, [context] * n) / single) if single > 0.0 else 1.0 for n in BATCHES]
    return CostCurve.fit(zip(map(float, BATCHES), times, strict=True))


def model_facts(target: LanguageModel) -> dict[str, Any]:
    """Properties of the target that a plan is bound to."""
    try:
        fingerprint: str | None = target.fingerprint
    except UnsupportedModelError:
        fingerprint = None
    return {
        "model": target.name,
        "fingerprint": fingerprint,
        "padding": target.name.removeprefix(unpadded_name(target.name)).strip(),
        "dtype": dtype_name(target.dtype),
        "dtype of keys and values": target.kv_dtype,
        "bytes of weights": target.weight_bytes,
        "model device": str(target.device),
    }


def footprint_of(model: LanguageModel) -> Footprint:
    """Bytes of a language model, and of a token in its cache."""
    with model.trying() as cache, torch.inference_mode():
        model.forward([Segment(cache, torch.zeros(1, dtype=torch.int64), chain_shape(1), (0,))])
        each = cache.n_bytes // max(1, cache.capacity)
    return Footprint(model.weight_bytes, each, each_token=True)


def memory_of(drafter: Drafter) -> Footprint:
    """Bytes of a drafter: its model, with a token of its own cache if it has one, or its heads; 0 without either."""
    if drafter.model is not None and drafter.held.in_target:
        return Footprint(drafter.model.weight_bytes, each_token=True)
    models = {id(each.model): each.model for each in drafter.held.models}
    if models:
        each = [footprint_of(model) for model in models.values()]
        weights, tokens = sum(own.weights for own in each), sum(own.cached_token for own in each)
        return Footprint(weights, tokens, each_token=True)
    head = getattr(drafter, "head", None)
    if isinstance(head, torch.nn.Module):
        return Footprint(sum(weight.numel() * weight.element_size() for weight in head.parameters()))
    return Footprint(0)
