"""From the target's logits to a verdict for each item of a step."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from truedraft.core import transfers
from truedraft.core.logprobs import TokenLogprobs, token_logprobs
from truedraft.core.noise import KeyedNoise
from truedraft.core.params import SamplingParams
from truedraft.core.probs import RowProbs, batch_probs, probs_from_logits, sound_rows, usable_rows
from truedraft.core.proposal import DrawCheck, Proposal
from truedraft.core.shaping import shaped_trees
from truedraft.core.verdict import Verdict
from truedraft.engine.batch import NOTHING_DRAFTED, Batch, StepItem
from truedraft.engine.drafting import Drafting
from truedraft.models.base import ForwardOutput
from truedraft.verification import Rule
from truedraft.verification.rule import read_verdicts


class Verifier:
    """Verifies the proposals of a step, all of one rule together. On a device the host synchronizes once.

    Args:
        rule: verifies requests that are neither greedy nor seeded, or all of them if it is lossy.
        coupled: verifies seeded requests, and in its greedy form greedy ones under a lossless rule, by comparison.
    """

    def __init__(self, rule: Rule, coupled: Rule, drafting: Drafting) -> None:
        self._rule = rule
        self._coupled = coupled
        self._drafting = drafting

    def rule_for(self, params: SamplingParams, own: Rule | None = None) -> Rule:
        """A request's own rule or the engine's. Greedy ones under a lossless rule are verified by comparison, because
        every such rule keeps exactly the argmax; so are seeded ones, so that tokens do not depend on drafter and rule.
        """
        rule = own if own is not None else self._rule
        if params.seeded:
            rule.check_seed()
            return self._coupled
        if not params.greedy:
            return rule
        return (self._coupled if rule.lossless else rule).greedy_form

    def verify(self, batch: Batch, output: ForwardOutput) -> None:
        """Set each item's verdict, except for parts of a prompt that are not the last."""
        for item in batch:
            if item.prefill and item.request.params.prompt_logprobs is not None:
                _note_prompt(item, output.logits)
        items = [item for item in batch if item.judged]
        if not items:
            return
        logits = output.logits
        sizes = [len(item.proposal.tree) + 1 for item in items]
        if sum(sizes) < len(logits):  # there are rows of prompts, which drafters or logprobs need
            logits = torch.cat([logits[item.judged_rows] for item in items])
        sound = self._take_rows(items, sizes, logits)
        self._judge(items, sizes, sound)
        for item in items:
            _settle(item)

    def _take_rows(self, items: Sequence[StepItem], sizes: Sequence[int], logits: Tensor) -> Tensor | None:
        own = logits.split_with_sizes(list(sizes))
        if any(item.request.shaping is not None for item in items):
            trees, shapings = [item.proposal.tree for item in items], [item.request.shaping for item in items]
            logits = shaped_trees(logits, trees, shapings, [_argmax_will_do(item) for item in items])
            shaped: Sequence[Tensor] = logits.split_with_sizes(list(sizes))
        else:
            shaped = own
        judged = [(item.request.rule, item.request.params) for item in items]
        options = [None if rule.sees == "argmax" else rule.options(params) for rule, params in judged]
        if not transfers.waits(logits.device) and all(rule.reads_rows and not params.greedy for rule, params in judged):
            for item, *tensors, options_of_it in zip(items, own, shaped, options, strict=True):
                item.logits, item.shaped = tensors
                item.probs = RowProbs(item.shaped, options_of_it)
            return None
        sound = sound_rows(logits)
        probs = shaped
        if any(options):
            usable = logits if sound is None else usable_rows(logits, sound)
            probs = batch_probs(usable, list(zip(options, sizes, strict=True)))
        for item, *tensors in zip(items, own, shaped, probs, strict=True):
            item.logits, item.shaped, item.probs = tensors
        return sound

    def _judge(self, items: Sequence[StepItem], sizes: Sequence[int], sound: Tensor | None) -> None:
        by_rule: dict[Rule, list[StepItem]] = {}
        for item in items:
            by_rule.setdefault(item.request.rule, []).append(item)
        inputs = {rule: _inputs_of(group) for rule, group in by_rule.items()}
        decided = [(rule.accept(*own), own[0]) for rule, own in inputs.items()]
        check = DrawCheck([item.proposal for item in items], items[0].probs.device)
        on_device = [item for item in items if item.proposal.tree.on_device]
        read, numbers = read_verdicts(decided, check.wanted if sound is None else [*check.wanted, sound])
        if sound is not None:
            flags = iter(numbers.pop())
            for item, size in zip(items, sizes, strict=True):
                of_item = itertools.islice(flags, size)
                item.broken_rows = frozenset(row for row, is_sound in enumerate(of_item) if not is_sound)
        unsound = check.unsound(numbers)
        for group, own in zip(by_rule.values(), read, strict=True):
            for item, verdict in zip(group, own, strict=True):
                item.verdict = verdict
        again = self._changed(items, set(on_device), unsound) if on_device or unsound else []
        for item in again:
            item.verdict = item.request.rule.verify(*_inputs_of([item]))[0]
        for rule, group in by_rule.items():
            fine = [item for item in group if item not in again] if again else group
            verdicts = [item.verdict for item in fine if item.verdict is not None]
            for item, verdict in zip(fine, rule.measured(verdicts, *_inputs_of(fine)), strict=True):
                item.verdict = verdict

    def _changed(
        self, items: Sequence[StepItem], on_device: Collection[StepItem], unsound: Mapping[int, Collection[int]]
    ) -> list[StepItem]:
        changed = []
        for number, item in enumerate(items):
            if item in on_device and not self._drafting.admits(item):
                assert isinstance(item.probs, Tensor)
                item.rows = slice(item.rows.start, item.judged_rows.start + 1)
                item.drafted, item.proposal, item.probs = NOTHING_DRAFTED, NOTHING_DRAFTED.proposal, item.probs[:1]
            elif number in unsound:
                item.proposal = self._drafting.drop_invalid_draws(item, unsound[number])
            else:
                continue
            changed.append(item)
        return changed


def _settle(item: StepItem) -> None:
    """Cut an item's verdict after the first uncomputed token and before the first broken tree row."""
    verdict = item.verdict
    assert verdict is not None
    if isinstance(item.probs, RowProbs):
        item.broken_rows = frozenset(item.probs.broken)
    if item.kept is not None:
        verdict = verdict.within(item.kept)
    if item.broken_rows:
        rows = (0, *(node + 1 for node in verdict.path))
        place = next((i for i, row in enumerate(rows) if row in item.broken_rows), None)
        if place is not None:
            verdict, item.broken = verdict.cut(place), True
            item.banned = item.shaped is not item.logits and bool(item.logits[rows[place]].amax().isfinite())
    item.verdict, item.logprobs = verdict, _logprobs(item, verdict)
    del item.logits, item.shaped, item.probs  # large tensors, and the request keeps the item until the next step


def _logprobs(item: StepItem, verdict: Verdict) -> tuple[TokenLogprobs, ...]:
    params = item.request.params
    if params.logprobs is None or not verdict.tokens:
        return ()
    rows = [0, *(node + 1 for node in verdict.path)][: len(verdict.tokens)]
    logits = item.logits[rows]
    if params.logprobs_mode == "processed":
        logits = item.shaped[rows]
        logits = logits if params.greedy else probs_from_logits(logits, params).log()
    return token_logprobs(logits, verdict.tokens, params.logprobs)


def _argmax_will_do(item: StepItem) -> bool:
    params = item.request.params
    processed = params.logprobs is not None and params.logprobs_mode == "processed"
    return item.request.rule.sees == "argmax" and not processed


def _note_prompt(item: StepItem, logits: Tensor) -> None:
    request = item.request
    following = request.tokens[item.context + 1 : min(item.context + item.fed + 1, request.prompt_tokens)]
    del request.prompt_logprobs[item.context :]  # left by a step that failed half-way
    rows = logits[item.rows.start : item.rows.start + len(following)]
    request.prompt_logprobs += token_logprobs(rows, following, request.params.prompt_logprobs or 0)


def _inputs_of(items: Sequence[StepItem]) -> tuple[list[Proposal], list[Tensor], list[KeyedNoise]]:
    probs = cast("list[Tensor]", [item.probs for item in items])  # or `RowProbs`, for rules that take them
    return [item.proposal for item in items], probs, [item.noise for item in items]
