"""From the target's logits to a verdict for each item of a step."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.laws import finite_rows, laws_from_logits
from truedraft.core.noise import KeyedNoise
from truedraft.core.proposals import LawCheck, Proposal
from truedraft.core.sampling import SamplingParams
from truedraft.core.verdicts import Verdict
from truedraft.engine.batch import Batch, StepItem
from truedraft.engine.drafting import Drafting
from truedraft.models.base import ForwardOutput
from truedraft.verification import Rule
from truedraft.verification.deferred import DeferredRule

_AT_TEMPERATURE_ONE = SamplingParams(temperature=1.0)


@dataclass(frozen=True, slots=True)
class Judged:
    """What came of one item.

    Attributes:
        verdict: the accepted path and one more token; cut before the first row that gives no distribution.
        broken: whether there was such a row on its way.
    """

    verdict: Verdict
    broken: bool = False


@dataclass(slots=True, eq=False)
class Part:
    """An item while it is judged.

    Attributes:
        item: whose proposal is judged.
        rule: that judges it.
        argmax: whether the rule only looks at the largest entry of a row.
        laws: `[slots, vocab]`, or logits where `argmax`.
        sound: `[slots]`, on a device: which rows of logits give a law.
        broken: slots whose logits were NaN or infinite, as far as they matter.
        verdict: what the rule says.
    """

    item: StepItem
    rule: Rule
    argmax: bool
    laws: Tensor | None = None
    sound: Tensor | None = None
    broken: frozenset[int] = frozenset()
    verdict: Verdict | None = None

    @property
    def proposal(self) -> Proposal:
        return self.item.proposal

    @property
    def noise(self) -> KeyedNoise:
        return self.item.noise


class Verifier:
    """Judges the proposals of a step, those of one rule together.

    Args:
        rule: judges proposals of requests that are neither greedy nor coupled, or all if it is lossy.
        coupled: judges coupled requests, and greedy ones under a lossless rule, by comparison.
        drafting: is told of drafted ids that turn out not to exist, and of draws that were not made as they say.
        waits: whether reading a number makes the host wait.
    """

    def __init__(self, rule: Rule, coupled: Rule, drafting: Drafting, *, waits: bool) -> None:
        self._rule = rule
        self._coupled = coupled
        self._judging: Judging = (ReadingOnce if waits else LookingAsItGoes)(drafting)

    def rule_for(self, params: SamplingParams) -> Rule:
        """Greedy is the coupled rule without noise: the same verdict as any lossless rule's, by comparison alone.

        A coupled request keeps its promise, the same tokens whatever drafts and judges, under a lossy rule too.
        """
        if params.coupled or (params.greedy and self._rule.lossless):
            return self._coupled
        return self._rule.greedy_form if params.greedy else self._rule

    def verify(self, batch: Batch, output: ForwardOutput) -> list[Judged | None]:
        """Judge what was drafted for each item; None behind a part of a prompt that is not its last."""
        parts = [self._part(item) for item in batch if item.judged]
        if not parts:
            return [None] * len(batch)
        self._read(parts, output)
        by_rule: dict[Rule, list[Part]] = {}
        for part in parts:
            by_rule.setdefault(part.rule, []).append(part)
        self._judging.judge(by_rule)
        judged = iter(parts)
        return [_before_broken_slot(next(judged)) if item.judged else None for item in batch]

    def _part(self, item: StepItem) -> Part:
        rule = item.request.rule
        # The argmax of a row is that of its logits, so no distribution need be made of them.
        return Part(item, rule, argmax=item.request.params.greedy and rule is self._coupled)

    def _probs_params(self, part: Part) -> SamplingParams:
        """The options that make an item's laws: at temperature 0 a lossy rule looks at p at temperature 1."""
        params = part.item.request.params
        return _AT_TEMPERATURE_ONE if params.greedy and part.rule is not self._coupled else params

    def _read(self, parts: Sequence[Part], output: ForwardOutput) -> None:
        """Give each part the laws of its slots."""
        sizes = [len(part.proposal.tree) + 1 for part in parts]
        all_logits = output.logits
        if sum(sizes) < len(all_logits):  # there are rows of parts of prompts, which a drafter wanted
            all_logits = torch.cat([all_logits[part.item.slots] for part in parts])
        lawful = self._judging.before_laws(parts, all_logits)
        first = 0
        for argmax, run in itertools.groupby(zip(parts, sizes, strict=True), lambda one: one[0].argmax):
            group, own = zip(*run, strict=True)
            logits = (all_logits if argmax else lawful)[first : first + sum(own)]
            first += sum(own)
            rows = [(self._probs_params(part), size) for part, size in zip(group, own, strict=True)]
            for part, law in zip(group, logits.split(own) if argmax else laws_from_logits(logits, rows), strict=True):
                part.laws = law
            self._judging.after_laws(group, logits)


def _before_broken_slot(part: Part) -> Judged:
    """The verdict up to the first slot without a law, and whether there was one: what plain decoding would emit."""
    assert part.verdict is not None
    if part.broken:
        slots = (0, *(node + 1 for node in part.verdict.path))
        place = next((i for i, slot in enumerate(slots) if slot in part.broken), None)
        if place is not None:
            return Judged(part.verdict.cut(place), broken=True)
    return Judged(part.verdict)


class Judging(ABC):
    """From logits to verdicts. Logits that are no numbers concern only requests whose verdict comes by them.

    Draws that were not made as their proposal says are not judged; see `LawCheck`.

    Args:
        drafting: is told of drafted ids that turn out not to exist, and of such draws.
    """

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting

    def _drop_unsound(self, parts: Sequence[Part], unsound: Mapping[int, Collection[int]]) -> list[Part]:
        """Take draws out of the proposals of some of the parts, given by number; returns these parts."""
        dropped = [parts[number] for number in unsound]
        for part, slots in zip(dropped, unsound.values(), strict=True):
            part.item.proposal = self._drafting.disown(part.item.request, part.proposal, slots)
        return dropped

    @abstractmethod
    def before_laws(self, parts: Sequence[Part], logits: Tensor) -> Tensor:
        """Called with all logits `[rows, vocab]` of a step and the parts they are of; returns what laws are made of."""

    @abstractmethod
    def after_laws(self, group: Sequence[Part], logits: Tensor) -> None:
        """Called with each group of parts, alike in `argmax`, once they have laws, and with the logits of these."""

    @abstractmethod
    def judge(self, by_rule: Mapping[Rule, Sequence[Part]]) -> None:
        """Set the parts' verdicts, and the broken slots on the way to them."""


class LookingAsItGoes(Judging):
    """For the CPU, where a look costs nothing: only what turns out to matter is worked out."""

    def before_laws(self, parts: Sequence[Part], logits: Tensor) -> Tensor:
        return logits

    def after_laws(self, group: Sequence[Part], logits: Tensor) -> None:
        # -inf is a legal logit, so an infinite sum only means that rows must be looked at.
        if not group[0].argmax and not bool(logits.sum(dtype=torch.float32).isfinite()):
            for part in group:
                _isolate_broken_rows(part)

    def judge(self, by_rule: Mapping[Rule, Sequence[Part]]) -> None:
        drafted = [part for group in by_rule.values() for part in group if part.proposal.laws is not None]
        if drafted:
            check = LawCheck([part.proposal for part in drafted], _device(drafted))
            self._drop_unsound(drafted, check.unsound([each.tolist() for each in check.wanted]))
        for rule, parts in by_rule.items():
            verdicts = rule.verify(*_asked(parts))
            for part, verdict in zip(parts, verdicts, strict=True):
                part.verdict = verdict
                if part.argmax:
                    part.broken = _broken_choices(part.laws, verdict)


class ReadingOnce(Judging):
    """For a device, where each look waits: everything that may matter is worked out there and read in one transfer.

    Rules that cannot say beforehand what they need (`DeferredRule.defers`) are asked afterwards, and wait on their own.
    """

    def before_laws(self, parts: Sequence[Part], logits: Tensor) -> Tensor:
        """See `Judging.before_laws`. A row that gives no law is made one that gives the one-hot law of token 0."""
        sound = logits.amax(dim=-1).isfinite()  # of a row with NaN the largest entry is NaN
        for part, own in zip(parts, sound.split([len(part.proposal.tree) + 1 for part in parts]), strict=True):
            part.sound = own
        if all(part.argmax for part in parts):
            return logits
        lawful = logits.masked_fill(~sound[:, None], -torch.inf)
        lawful[:, 0].masked_fill_(~sound, 0.0)
        return lawful

    def after_laws(self, group: Sequence[Part], logits: Tensor) -> None:
        """See `Judging.after_laws`: nothing is left to do."""

    def judge(self, by_rule: Mapping[Rule, Sequence[Part]]) -> None:
        parts = [part for group in by_rule.values() for part in group]
        deferred = {rule: rule.prepare(*_asked(group)) for rule, group in by_rule.items() if _defers(rule)}
        unknown = [part for part in parts if not part.proposal.tree.is_known]
        flags = [part.sound for part in parts if part.sound is not None]
        check = LawCheck([part.proposal for part in parts], _device(parts))
        wanted = [*flags, *check.wanted, *(part.proposal.tree.tokens for part in unknown)]
        for prepared in deferred.values():
            wanted.extend(prepared.wanted)
        numbers = iter(transfers.fetch(wanted))
        for part in parts:
            part.broken = frozenset(slot for slot, sound in enumerate(next(numbers)) if not sound)
        unsound = check.unsound([next(numbers) for _ in check.wanted])
        refused = [part for part in unknown if not self._learn(part, next(numbers))]
        known = {number: slots for number, slots in unsound.items() if parts[number] not in refused}
        refused += self._drop_unsound(parts, known)
        for rule, group in by_rule.items():
            if rule in deferred:
                verdicts = deferred[rule].conclude([next(numbers) for _ in deferred[rule].wanted])
            else:
                verdicts = rule.verify(*_asked(group))
            for part, verdict in zip(group, verdicts, strict=True):
                # What was judged with ids that do not exist, or with draws that were dropped, is judged again.
                part.verdict = rule.verify(*_asked([part]))[0] if part in refused else verdict

    def _learn(self, part: Part, ids: Sequence[float]) -> bool:
        """Take note of drafted tokens; where some do not exist, drop them all and return False."""
        part.proposal.tree.learn([int(token) for token in ids])
        if self._drafting.admits(part.item.request, part.proposal):
            return True
        assert part.laws is not None
        part.item.proposal, part.laws = Proposal.empty(), part.laws[:1]
        return False


def _device(parts: Sequence[Part]) -> torch.device:
    """Where the parts' laws lie."""
    assert parts[0].laws is not None
    return parts[0].laws.device


def _defers(rule: Rule) -> TypeGuard[DeferredRule]:
    return isinstance(rule, DeferredRule) and rule.defers


def _asked(parts: Sequence[Part]) -> tuple[list[Proposal], list[Tensor], list[KeyedNoise]]:
    """What a rule is given."""
    laws = [part.laws for part in parts if part.laws is not None]
    return [part.proposal for part in parts], laws, [part.noise for part in parts]


def _isolate_broken_rows(part: Part) -> None:
    """Note slots without a law, and put one in its place so that the others can be judged.

    A broken slot matters only if the verdict's path comes by it.
    """
    assert part.laws is not None
    sound = finite_rows(part.laws)
    part.broken = frozenset((~sound).nonzero().flatten().tolist())
    stand_in = torch.zeros_like(part.laws[0])
    stand_in[0] = 1.0
    part.laws = torch.where(sound[:, None], part.laws, stand_in)


def _broken_choices(logits: Tensor | None, verdict: Verdict) -> frozenset[int]:
    """Slots on a verdict's path whose largest logit is NaN or infinite; the argmax of a row with NaN is a NaN."""
    assert logits is not None
    slots = [0, *(node + 1 for node in verdict.path)]
    sound = logits[slots, list(verdict.tokens)].isfinite().tolist()
    return frozenset(slot for slot, finite in zip(slots, sound, strict=True) if not finite)
