"""The systems under test: one target, engines for it, and Hugging Face's `generate` as a peer on the same weights."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.nn import Module

from truedraft.core.params import SamplingParams
from truedraft.core.stats import Counters
from truedraft.drafters.base import Drafter
from truedraft.drafters.specs import from_spec
from truedraft.engine import Engine, StepRecord
from truedraft.engine.policy.specs import controller_from_spec
from truedraft.errors import ModelError, UnknownOptionError
from truedraft.machine import dtype_name, has_bfloat16
from truedraft.measure.bench.runs import System, SystemOutput
from truedraft.measure.peers.transformers import AssistedSetting, Generate, Way, assisted_way, load_stock, lookup_way
from truedraft.models.base import LanguageModel
from truedraft.models.loading import load_model
from truedraft.options import MachineOptions, ModelOptions, Words
from truedraft.verification.specs import rule_from_spec

ASSISTED = "transformers assisted"
# The length of our draft's default, transformers' own adaptation, and its default behaviour.
_SETTINGS = (
    AssistedSetting("4 tokens", 4, "constant", 0.0),
    AssistedSetting("heuristic from 5", 5, "heuristic", 0.0),
    AssistedSetting("its defaults", 20, "constant", 0.4),
)


def generate_systems(
    target: LanguageModel, loaded: ModelOptions, draft: LanguageModel | None, batch: int
) -> tuple[list[System], str]:
    """Plain generation; with one prompt at a time also prompt lookup and, with a draft, assisted generation.

    Also a sentence on systems left out, "" where there are none. Raises ModelError if a model cannot be loaded again.
    """
    model = load_stock(loaded.model, target, loaded.pad_to)
    ways, left_out = {"transformers": Way()}, ""
    if batch > 1:
        left_out = (
            "transformers' assisted generation and prompt lookup take one prompt at a time, so they are left out at "
            f"batch {batch}"
        )
    else:
        ways["transformers lookup"] = lookup_way()
        if draft is None:
            left_out = "transformers' assisted generation is left out: no draft model is among the drafters"
        else:
            assistant = load_stock(draft.name, draft, None)
            ways |= {f"{ASSISTED}, {setting.words}": assisted_way(assistant, setting) for setting in _SETTINGS}
    return [GenerateSystem(name, Generate(model, target.eos_token_ids, way)) for name, way in ways.items()], left_out


class GenerateSystem(System):
    """One way of calling `generate`.

    Target calls are counted by a hook, calls that verify a draft included. The first call of assisted generation
    already verifies one, so its mean acceptance length includes it.
    """

    def __init__(self, name: str, engine: Generate) -> None:
        self.name = name
        self.engine = engine

    def answer(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> SystemOutput:
        drafts, started = self.engine.way.drafts, time.perf_counter()
        came: list[tuple[float, int]] = []  # seconds until tokens arrived, and how many for each prompt
        with _counting(self.engine.model) as target, _counting(self.engine.way.assistant) as draft:
            replies = self.engine.call(
                prompts, params, lambda count: came.append((time.perf_counter() - started, count))
            )
        answers = tuple(reply.token_ids for reply in replies)
        tokens = sum(map(len, answers))
        first, first_tokens = came[0] if came else (None, 1)
        later = max(len(target) - 1, 0)
        judged = len(target) if drafts else later
        emitted = tokens if drafts else tokens - len(answers)
        return SystemOutput(
            token_ids=answers,
            first_token_s=(first,) * len(answers),
            prefill_s=first or 0.0,
            forwards=later,
            draft_forwards=len(draft),
            context_tokens=later * (sum(map(len, prompts)) + tokens // 2),  # answers grow from none to all tokens
            target_calls=judged * len(answers) if drafts else emitted,
            mean_acceptance_length=(emitted / judged if judged else 0.0) if drafts else 1.0,
            first_tokens=first_tokens,
        )


@contextlib.contextmanager
def _counting(model: Module | None) -> Iterator[list[None]]:
    calls: list[None] = []
    handle = None if model is None else model.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield calls
    finally:
        if handle is not None:
            handle.remove()


PLAIN = "plain"
ENTROPY = 0  # entropy of the measured engines, so that requests without a seed draw the same noise each time
_LEAST_BATCH = 32  # the engine's own limit; a larger batch raises it
_NO_DRAFTER = "none"
PEERS = ("transformers",)  # names of other libraries that can be measured together with our engines


class OurEngine(System):
    """Our engine, which guarantees the tokens of plain decoding."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine

    @classmethod
    def of(cls, name: str, target: LanguageModel, batch: int, drafter: Drafter | None = None, **how: Any) -> OurEngine:
        """An engine for `batch` prompts at once; `how` are further arguments of `Engine`."""
        return cls(name, Engine(target, drafter, max_batch=max(_LEAST_BATCH, batch), entropy=ENTROPY, **how))

    def answer(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> SystemOutput:
        """Answer prompts together; each may have options of its own."""
        steps: list[StepRecord] = []
        self.engine.listeners.append(steps.append)
        try:
            answers = self.engine.generate([list(prompt) for prompt in prompts], params)
        finally:
            self.engine.listeners.pop()
        broken = next((answer.error for answer in answers if answer.error is not None), None)
        if broken is not None:
            raise ModelError(broken)
        counters = sum((answer.stats for answer in answers), Counters())
        decoding = [step for step in steps if not step.prefill]
        return SystemOutput(
            token_ids=tuple(tuple(answer.token_ids) for answer in answers),
            first_token_s=tuple(answer.timing.first_token_s for answer in answers),
            prefill_s=sum(step.total_s for step in steps if step.prefill),
            forwards=len(decoding),
            draft_forwards=sum(map(self._draft_forwards, decoding)),
            context_tokens=sum(sum(step.contexts) for step in decoding),
            target_calls=counters.target_calls,
            mean_acceptance_length=counters.mean_acceptance_length,
            counters=counters,
            steps=steps,
            finish_reasons=tuple(answer.finish_reason for answer in answers),
            warnings=tuple(warning for answer in answers for warning in answer.warnings),
        )

    def _draft_forwards(self, step: StepRecord) -> int:
        """One draft forward per level for the whole batch."""
        nodes = Counter[str]()
        for share in (share for request in step.requests for share in request.shares):
            nodes[share.drafter] += share.nodes
        members = self.engine.drafter.members
        return sum(min(each.limits.depth, nodes[name]) for name, each in members.items() if each.model is not None)

    def title_of(self, member: str) -> str:
        """The name of a drafter in reports: the system's own where there is only one."""
        return self.name if len(self.engine.drafter.members) == 1 else f"{self.name}: {member}"

    @property
    def draft_model(self) -> LanguageModel | None:
        drafting = [each for each in self.engine.drafter.members.values() if each.model is not None]
        return min(drafting, key=lambda each: each.held.in_target).model if drafting else None


@dataclass(slots=True)
class Suite:
    """Our engines, plain decoding first, and peers; of the systems under a title in `best_of` the best is shown."""

    target: LanguageModel
    lossless: bool
    ours: list[OurEngine]
    peers: list[System] = field(default_factory=list)
    best_of: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    batch: int = 1
    controller: str = "goodput"

    @property
    def systems(self) -> list[System]:
        return [*self.ours, *self.peers]

    @property
    def our_names(self) -> list[str]:
        return [each.name for each in self.ours]

    @property
    def assistant(self) -> LanguageModel | None:
        members = (member for each in self.ours for member in each.engine.drafter.members.values())
        return next((each.model for each in members if each.model is not None and not each.held.in_target), None)

    def must_agree(self, params: SamplingParams) -> bool:
        return self.lossless and (params.greedy or params.seeded)

    def redraft(self, system: OurEngine, drafter: Drafter) -> None:
        """Replace the drafter of one of our engines; CompositionError if the drafter does not fit."""
        how = {"rule": system.engine.rule, "controller": controller_from_spec(self.controller)}
        system.engine = OurEngine.of(system.name, self.target, self.batch, drafter, **how).engine


def load_suite(
    model: ModelOptions,
    machine: MachineOptions,
    drafters: Sequence[str] = ("auto",),
    *,
    drafters_dir: Sequence[str | Path] = (),
    peers: Sequence[str] = (),
    rule: str = "speculative",
    controller: str = "goodput",
    batch: int = 1,
) -> Suite:
    """Load the target once for our engines, and once more for each peer.

    The drafter "none" adds nothing to plain decoding, which is always measured; `drafters_dir` are further folders for
    "auto", and for kinds without a path. Raises TruedraftError if something does not exist, cannot be loaded, or does
    not fit.
    """
    lossless = rule_from_spec(rule).lossless
    target = load_model(model.model, **model.of_target, **machine.of_models)
    ours = [OurEngine.of(PLAIN, target, batch)]
    notes = _dtype_notes(machine.dtype, target)
    for spec in drafters:
        if spec != _NO_DRAFTER:
            drafter = from_spec(spec, target, drafters_dir, tell=notes.append)
            name = _short_name(spec, [each.name for each in ours])
            how = {"rule": rule_from_spec(rule), "controller": controller}
            ours.append(OurEngine.of(name, target, batch, drafter, **how))
            if len(drafter.members) > 1:
                notes.append(f"{name} is {' + '.join(drafter.members)}")
    suite = Suite(target, lossless, ours, notes=notes, batch=batch, controller=controller)
    draft = suite.assistant
    check_peers(peers)
    if peers:
        suite.peers, left_out = generate_systems(target, model, draft, batch)
        suite.best_of = {ASSISTED: tuple(each.name for each in suite.peers if each.name.startswith(ASSISTED))}
        suite.notes += [left_out] if left_out else []
        if draft is not None and suite.best_of[ASSISTED]:
            suite.notes.append(f"transformers' assistant is {draft.name}")
    return suite


def check_peers(names: Sequence[str]) -> None:
    """Refuse libraries that cannot be measured, before anything is loaded; UnknownOptionError names the known ones."""
    for name in names:
        if name not in PEERS:
            raise UnknownOptionError.nearest("peer", name, PEERS)


def _short_name(spec: str, taken: Sequence[str]) -> str:
    def shortened(member: str) -> str:
        head, comma, options = member.partition(",")
        kind, colon, path = head.partition(":")
        return f"{kind}{colon}{Path(path).name if '/' in path else path}{comma}{options}"

    members = Words.parse("drafter", spec).members
    short = f"{spec.partition('(')[0]}({';'.join(map(shortened, members))})" if members else shortened(spec)
    name = spec if short in taken else short
    return name if name not in taken else f"{name} ({taken.count(name) + 1})"


def _dtype_notes(requested: str, target: LanguageModel) -> list[str]:
    if target.device.type != "cpu" or has_bfloat16(target.device):
        return []
    none = "this CPU has no bfloat16 instructions"
    if dtype_name(target.dtype) != "bfloat16":
        return [f"{none}, so {dtype_name(target.dtype)} is used"] if requested == "auto" else []
    if "native forward" in target.fast_paths:
        return [f"{none}: weights are read in bfloat16, and products are made in float32"]
    return [f"{none}, so bfloat16 is emulated, and slower than float32"]
