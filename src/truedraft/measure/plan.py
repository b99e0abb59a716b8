"""Plans: which drafter, how many tokens and which tree, from a target's own answers and this machine's costs.

Candidates are made of the words of drafters: every length and tree size that a plan tries, each with its own words.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

import torch

from truedraft.core.params import SamplingParams
from truedraft.core.theory import CostCurve, DraftCost, TargetCost
from truedraft.core.tree import chain_shape
from truedraft.drafters.base import Drafter
from truedraft.drafters.draft_model import DraftModel
from truedraft.drafters.kinds import KINDS
from truedraft.drafters.registry import find_drafters
from truedraft.drafters.specs import auto_members, from_spec
from truedraft.engine.policy import StepCosts
from truedraft.errors import CompositionError, DataError, OptionError, UnsupportedModelError
from truedraft.machine import dtype_name, machine_facts, this_machine
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
from truedraft.measure.replay import CURVE_NODES
from truedraft.measure.traces import PromptRequest, is_drawn, trace_answers
from truedraft.measure.walks import Walk, check_walkable, walk_along
from truedraft.models.base import LanguageModel, Segment
from truedraft.models.padding import unpadded_name
from truedraft.options import Words, read_record

LONGEST = 12  # longest chain that is tried where no length is given
_LENGTH, _BRANCHING, _NODES = "num_speculative_tokens", "branching", "nodes"
_BEAMS, _PATHS = "beams", "length"
_CHAINS, _SAMPLED, _TREE = "chains", "sampled", "tree"
_COUNTS = (2, 3, 4)
_TREES = ("2-1-1-1", "2-2-1-1", "3-2-1")
_WIDTHS = (1, 2, 4, 8)
_FEW_NODES = (4, 8, 16)
_MOST_OF_A_KIND = 8


@dataclass(frozen=True)
class Candidate:
    """One drafter at its largest; each of its sizes is a node budget."""

    typed: str
    drafter: Drafter  # of the largest size; it is replayed
    timed: Drafter  # a drafter with proposals of the same cost, by their depth
    words: Mapping[int, str]  # by size, in rising order, for `--drafter`

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.words)


def fitting_drafters(target: LanguageModel, tell: Callable[[str], None] = warnings.warn) -> dict[str, Drafter]:
    """Drafters known to fit a target, by their words: those that `auto` chooses among, and more of each kind if any."""
    found: list[tuple[str, Drafter]] = []
    newest = {each.kind: str(each.folder) for each in reversed(find_drafters(target))}
    for words, drafter in auto_members(target, tell=tell, most=_MOST_OF_A_KIND):
        is_newest = words.path is not None and words.path == newest.get(words.kind)
        bound = {name: value for name, value in words.options.items() if name == "context"}
        found.append((spelled(replace(words, path=None if is_newest else words.path, options=bound), {}), drafter))
    return dict(reversed(found))


def candidates_of(
    typed: str, target: LanguageModel, params: SamplingParams, made: Drafter | None = None
) -> list[Candidate]:
    """The candidates that a drafter's words leave open; a drafter with chosen sizes is one candidate.

    By default: chains of 1 to 12 tokens, of a draft model also a few trees and, for sampled requests, two to four
    chains at once; trees of heads of 1 to 64 nodes; 1 to 8 beams of every length; both widths of weights for drafts of
    the target.

    `made` is the drafter, of any sizes, if it is loaded already; its model or heads are not loaded again. Raises
    TruedraftError if there is no such drafter, it cannot be loaded, does not fit, or cannot be replayed.
    """
    words = Words.parse("drafter", typed)
    paths = KINDS[words.kind].paths if words.kind in KINDS and words.path is None else ()
    if paths:
        spelt = [spelled(replace(words, path=path), {}) for path in paths]
        return [replace(each, typed=typed) for full in spelt for each in candidates_of(full, target, params)]
    base = made or from_spec(typed, target)
    known = KINDS[words.kind].options if words.kind in KINDS else {}
    chosen = set(words.options)
    has_beams = _PATHS in known
    if has_beams and is_drawn(params):
        base, words = _settled(words, cast("Any", base), target, params)
    check_walkable(base, is_drawn(params))
    if base.limits.is_zero:
        return []
    if has_beams:
        if chosen & {_BEAMS, _PATHS, _NODES}:
            return [_whole(typed, base, spelled(words, {}))]
        return _beams(words, typed, cast("Any", base), target, params)
    if _BEAMS in known:
        if chosen & {_LENGTH, _BRANCHING, _NODES}:
            return [_whole(typed, base)]
        found = [_of_sizes(words, typed, target, _LENGTH, range(1, LONGEST + 1))]
        return found if is_drawn(params) else [*found, _of_sizes(words, typed, target, _NODES, CURVE_NODES)]
    if _NODES in known and _NODES not in chosen:
        by_ranks = _TREE in known and not chosen & {_TREE, _BRANCHING}
        full = spelled(words, {_NODES: CURVE_NODES[-1]})
        largest = cast("Any", base).with_nodes(CURVE_NODES[-1]) if by_ranks else from_spec(full, target)
        largest.check(target)
        most = largest.limits.nodes
        trees = {nodes: spelled(words, {_NODES: nodes}) for nodes in CURVE_NODES if nodes <= most}
        return [Candidate(typed, largest, largest, trees)]
    if words.options.get("async") == "1":
        raise OptionError(
            "a plan cannot predict the gain of async, which depends on the cores that the target leaves; plan "
            f"{spelled(replace(words, options={n: v for n, v in words.options.items() if n != 'async'}), {})!r}, and "
            "compare both by truedraft generate --compare"
        )
    if _CHAINS in known and not chosen & {_LENGTH, _BRANCHING}:
        return _drafts(words, typed, cast(DraftModel, base), params)
    if _LENGTH in known and _LENGTH not in chosen:
        return [_of_sizes(words, typed, target, _LENGTH, range(1, LONGEST + 1))]
    return [_whole(typed, base)]


def _whole(typed: str, drafter: Drafter, words: str | None = None) -> Candidate:
    return Candidate(typed, drafter, drafter, {drafter.limits.nodes: words or typed})


def _of_sizes(words: Words, typed: str, target: LanguageModel, option: str, sizes: Sequence[int]) -> Candidate:
    spelt = {size: spelled(words, {option: size}) for size in sizes}
    largest = from_spec(spelt[sizes[-1]], target)
    return Candidate(typed, largest, largest, spelt)


def _drafts(words: Words, typed: str, base: DraftModel, params: SamplingParams) -> list[Candidate]:
    if _CHAINS in words.options:
        return [_chains(words, typed, base, int(words.options[_CHAINS]))]
    longest = base.resized(num_speculative_tokens=LONGEST)
    lengths = {length: spelled(words, {_LENGTH: length}) for length in range(1, LONGEST + 1)}
    found = [Candidate(typed, longest, longest, lengths)]
    for tree in _TREES:
        drafter = base.resized(branching=tuple(map(int, tree.split("-"))))
        found.append(_whole(typed, drafter, spelled(words, {_BRANCHING: tree})))
    return found + [_chains(words, typed, base, count) for count in _COUNTS if is_drawn(params)]


def _chains(words: Words, typed: str, base: DraftModel, count: int) -> Candidate:
    drafter = base.resized(num_speculative_tokens=LONGEST, chains=count)
    lengths = {count * length: spelled(words, {_CHAINS: count, _LENGTH: length}) for length in range(1, LONGEST + 1)}
    return Candidate(typed, drafter, drafter, lengths)


def _settled(words: Words, base: Any, target: LanguageModel, params: SamplingParams) -> tuple[Any, Words]:
    """A head that does not sample by default, because sampled beams cannot be replayed."""
    made = base.settled(params)
    if base.sampled is None and made.sampled:
        words = replace(words, options=dict(words.options) | {_SAMPLED: "false"})
        made = cast("Any", from_spec(spelled(words, {}), target))
    made.check(target)
    return made, words


def _beams(words: Words, typed: str, base: Any, target: LanguageModel, params: SamplingParams) -> list[Candidate]:
    """Every width and length, each replayed; seeded requests get beams in another order, so each is a candidate."""
    found: list[Candidate] = []
    longest = base.head.config.length
    for beams in _WIDTHS:
        timed = base.with_sizes(beams, longest, beams * longest)
        timed.check(target)
        for length in range(1, longest + 1):
            most = beams * length
            numbers = [nodes for nodes in (_FEW_NODES if params.seeded else CURVE_NODES) if nodes <= most] or [most]
            spelt = {nodes: spelled(words, {_BEAMS: beams, _PATHS: length, _NODES: nodes}) for nodes in numbers}
            for sizes in [[each] for each in numbers] if params.seeded else [numbers]:
                drafter = base.with_sizes(beams, length, sizes[-1])
                drafter.check(target)
                found.append(Candidate(typed, drafter, timed, {nodes: spelt[nodes] for nodes in sizes}))
    return found


def spelled(words: Words, more: Mapping[str, int | str]) -> str:
    """The words with further options, as they are typed.

    Worked example: `draft:a/b` with a length of 3 is `draft:a/b,num_speculative_tokens=3`.
    """
    path = "" if words.path is None else f":{_quoted(words.path)}"
    members = f"({';'.join(words.members)})" if words.members else ""
    options = dict(words.options) | {name: str(value) for name, value in more.items()}
    return words.kind + members + path + "".join(f",{name}={_quoted(value)}" for name, value in options.items())


def _quoted(part: str) -> str:
    return f'"{part}"' if "," in part else part


_FORMAT = 2
_AGAIN = "run truedraft plan again"


@dataclass(frozen=True)
class Plan:
    """The measurements of a plan, and where they are valid."""

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
    measured: Mapping[str, float] = field(default_factory=dict)  # speed-ups over plain decoding, by the drafter's words

    def best(self, batch: int | None = None, what_if: WhatIf | None = None) -> list[Prediction]:
        """For each drafter its best size, the best drafter first; `batch` None is the plan's own."""
        found = self._sizes(self.drafters, batch, what_if or WhatIf())
        first = {each.drafting.drafter: each for each in reversed(found)}  # the best of widths with different costs
        return [each for each in found if first[each.drafting.drafter] is each]

    def ways(self, words: str, batch: int | None = None) -> list[Prediction]:
        """The best size of each way in which one drafter may draft (a chain, several, trees), the best way first."""
        return self._sizes([each for each in self.drafters if each.drafter == words], batch, WhatIf())

    def _sizes(self, drafters: Sequence[Drafting], batch: int | None, what_if: WhatIf) -> list[Prediction]:
        there = self.there(what_if)
        there_drafting = [what_if.drafting(each, self.memory, self.forwards) for each in drafters]
        found = [there.best_of(each, batch or self.batch) for each in there_drafting]
        return sorted(found, key=lambda each: -each.speedup.value)

    def there(self, what_if: WhatIf | None = None) -> Circumstance:
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

    def break_even(self, prediction: Prediction, what_if: WhatIf | None = None) -> int | None:
        """The smallest batch in which an option is predicted to gain nothing; None where it always gains."""
        return self.there(what_if).break_even(prediction)

    def check(self, target: LanguageModel) -> None:
        """Refuse another model, machine or version than the plan's; CompositionError says which."""
        if self.truedraft != (version := machine_facts()["truedraft"]):
            raise CompositionError(f"the plan is of truedraft {self.truedraft}, and this is {version}; {_AGAIN}")
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
    """Read a plan that `truedraft plan --out` wrote, from the file or its folder; DataError if there is none."""
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

    `params` are of the answers; the prompts' own may differ only in the seed. Drafters that are loaded already are in
    `made`, by their words; costs of the target's steps are loaded or measured where none are given. Raises DataError
    where answers are too short to plan with, OptionError if no drafter drafts, or replay does not support an option in
    `params`, TruedraftError if a drafter does not exist or fit, or something failed.
    """
    if params.shapes_logits:
        raise OptionError(
            "penalties, biases and bans cannot be planned with, for replay does not know them; leave them out"
        )
    costs, made = costs or StepCosts(target), made or {}
    progress(0.0, "loading drafters")
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
    tokens, drafting = sum(trace.places for trace in traces), []
    cached = sum((len(trace.prompt) + trace.places / 2) * trace.places for trace in traces)
    context = max(1, round(cached / max(1, tokens)))
    for number, each in enumerate(candidates):
        progress(0.3 + 0.7 * number / len(candidates), f"replaying {each.words[each.sizes[-1]]}")
        walks = walk_along(each.drafter, target, traces)
        progress(0.3 + 0.7 * (number + 0.5) / len(candidates), f"costs of {each.typed}")
        drafting.append(_drafting(each, walks, costs, params, context))
    progress(1.0, "")
    return Plan(
        str(machine_facts()["truedraft"]),
        model_facts(target),
        this_machine(target.device),
        asdict(params),
        len(prompts),
        tokens,
        context,
        batch,
        costs.forwards(),
        footprint_of(target),
        tuple(_together(drafting)),
    )


def _drafting(
    candidate: Candidate, walks: Sequence[Walk], costs: StepCosts, params: SamplingParams, context: int
) -> Drafting:
    drafter = candidate.drafter
    options, survival = options_of(walks, candidate.words)
    cost = costs.drafting(candidate.timed, params)
    guessed = sum(walk.guessed * walk.tokens for walk in walks) / max(sum(walk.tokens for walk in walks), 1)
    if guessed:
        cost = cost.guessed(guessed, drafter.limits.depth)
    growth = _growth(drafter, costs, context)
    return Drafting(candidate.typed, drafter.name, tuple(options), survival, cost, growth, memory_of(drafter))


def _together(drafting: Sequence[Drafting]) -> list[Drafting]:
    found: dict[tuple[str, DraftCost], Drafting] = {}
    for each in drafting:
        key = each.drafter, each.cost
        if before := found.get(key):
            fullest = max(before, each, key=lambda one: max(option.tokens_per_call.value for option in one.options))
            each = replace(fullest, options=(*before.options, *each.options))
        found[key] = each
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
    if own := [footprint_of(model) for model in models.values()]:
        return Footprint(sum(each.weights for each in own), sum(each.cached_token for each in own), each_token=True)
    head = getattr(drafter, "head", None)
    if isinstance(head, torch.nn.Module):
        return Footprint(sum(weight.numel() * weight.element_size() for weight in head.parameters()))
    return Footprint(0)
