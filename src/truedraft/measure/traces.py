"""Traces: the target's own answers, and the features from which drafters are replayed without it."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from truedraft.core.params import SamplingParams
from truedraft.core.probs import probs_from_logits
from truedraft.core.proposal import DrawKind, Proposal
from truedraft.core.tree import chain_shape
from truedraft.drafters.base import Drafter, DraftRequest, Features, NoDrafter, StepOutcome
from truedraft.engine import Engine
from truedraft.engine.prompts import TextPrompt, encode_prompt
from truedraft.errors import ModelError
from truedraft.models.base import ForwardOutput, LanguageModel, Segment

_BATCH = 8
_READ, _ROWS = 512, 32  # tokens per forward, without and with logits


@dataclass(frozen=True)
class AnswerTrace:
    """One answer of the target.

    At position i the text is the prompt and the first i + 1 tokens, and a drafter guesses `tokens[i + 1]` and onwards.
    """

    name: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # the first is given by the prompt's forward
    params: SamplingParams
    seed: int
    limit: int  # most tokens of prompt and answer together
    stopped: bool  # whether the last token ended the answer and is no part of it
    seen: tuple[StepOutcome, ...]  # of plain decoding in order: parts of the prompt, then one token each
    probs: tuple[float, ...] = ()  # the target's processed ones of the tokens; empty for greedy and seeded answers
    layers: tuple[int, ...] = ()
    dists: tuple[Tensor, ...] = ()  # `[vocab]` each, kept where a drafter draws several tokens at one position

    @property
    def places(self) -> int:
        """Steps of plain decoding after the prompt's."""
        return max(0, len(self.tokens) - 1)

    def remaining(self, place: int) -> int:
        return self.limit - len(self.prompt) - place - 1


PromptRequest: TypeAlias = tuple[str, TextPrompt, SamplingParams]
"""A prompt: its name, its text or token ids, and how its answer is drawn."""


def is_drawn(params: SamplingParams) -> bool:
    """Whether verdicts for such requests are random; for greedy and seeded ones tokens are compared."""
    return not (params.greedy or params.seeded)


def draws_several(drafter: Drafter) -> bool:
    """Whether sampled requests get several draws at one position with known acceptance along a trace."""
    several = {DrawKind.INDEPENDENT}, {DrawKind.WITHOUT_REPLACEMENT}
    return len(drafter.branching) > 0 and drafter.limits.width > 1 and set(drafter.kinds) in several


def trace_answers(
    target: LanguageModel,
    prompts: Sequence[PromptRequest],
    drafters: Iterable[Drafter] = (),
    *,
    batch: int = _BATCH,
    entropy: int = 0,
    progress: Callable[[int, str], None] = lambda done, remark: None,
) -> list[AnswerTrace]:
    """Let the target answer prompts, none with stop strings, once by plain decoding, and keep what drafters need.

    `entropy` seeds the noise of prompts without a seed. Raises PromptError if a prompt cannot be run, ModelError if the
    target failed, or cannot show what a drafter declares.
    """
    watcher = StepWatcher.of(drafters, drawn=any(is_drawn(params) for _, _, params in prompts))
    engine = Engine(target, watcher, max_batch=batch, controller="fixed", entropy=entropy)
    ids = [encode_prompt(target, prompt) for _, prompt, _ in prompts]
    # End-of-text tokens are ignored, so that the token that ended an answer is recorded.
    whole = [dataclasses.replace(params, ignore_eos=True, stop_token_ids=()) for _, _, params in prompts]
    requests = [engine.submit(prompt, params) for prompt, params in zip(ids, whole, strict=True)]
    ends = [{*params.stop_token_ids, *(() if params.ignore_eos else target.eos_token_ids)} for _, _, params in prompts]
    running = dict(enumerate(requests))
    try:
        while running:
            engine.step()
            for number, request in list(running.items()):
                if request.emitted and request.tokens[-1] in ends[number]:
                    engine.cancel(request)
                if request.finish_reason is not None:
                    del running[number]
            progress(len(requests) - len(running), "")
    finally:
        for request in running.values():
            engine.cancel(request)
    found = []
    for (name, _, params), request, last in zip(prompts, requests, ends, strict=True):
        if request.error is not None:
            raise ModelError(f"the target failed at prompt {name}: {request.error}") from request.error
        if request.warnings:
            raise ModelError(f"prompt {name} could not be followed: {request.warnings[0]}")
        prompt, tokens = request.tokens[: request.prompt_tokens], tuple(request.tokens[request.prompt_tokens :])
        stopped, limit = bool(tokens) and tokens[-1] in last, request.most_tokens
        seen = watcher.seen_of(request.id)
        found.append(AnswerTrace(name, tuple(prompt), tokens, params, request.noise_seed, limit, stopped, **seen))
    return found


@torch.inference_mode()
def traces_of_answers(
    target: LanguageModel,
    answers: Sequence[tuple[Sequence[int], Sequence[int], bool]],
    params: SamplingParams,
    drafters: Iterable[Drafter],
) -> list[AnswerTrace]:
    """Traces of known `answers` (prompt, answer, and whether its last token ended it), each read once by the target.

    Raises ModelError if the target failed, or cannot show what a drafter declares.
    """
    watcher = StepWatcher.of(drafters, drawn=is_drawn(params))
    room = max((len(answer) for _, answer, _ in answers), default=0)
    whole = watcher.features is not None and watcher.features.of_prompts
    found = []
    for number, (prompt, answer, stopped) in enumerate(answers):
        for outcome in _plain_steps(target, watcher.layers, prompt, answer, whole=whole):
            watcher.observe([DraftRequest(number, params)], [outcome])
        limit, seen = len(prompt) + room, watcher.seen_of(number)
        found.append(AnswerTrace(str(number), tuple(prompt), tuple(answer), params, number, limit, stopped, **seen))
    return found


def _plain_steps(
    target: LanguageModel, layers: Sequence[int], prompt: Sequence[int], answer: Sequence[int], *, whole: bool
) -> Iterator[StepOutcome]:
    end = len(prompt)
    for first, last, output in _blocks(target, [*prompt, *answer[:-1]], end, layers=layers, shows_prompt=True):
        count = last - first
        first_row = count - 1 if last <= end and not whole else 0
        parts = [slice(first_row, count)] if last <= end else [slice(row, row + 1) for row in range(count)]
        for part in parts:
            preceding = first + part.stop - end  # tokens of the answer that came before
            yield StepOutcome(
                Proposal.empty(),
                (),
                tuple(answer[preceding : preceding + 1]) if preceding >= 0 else (),
                output.hidden[part],
                output.logits[part],
                tuple(each[part] for each in output.layers),
                preceding < 0,
            )


def _blocks(
    model: LanguageModel,
    ids: Sequence[int],
    first: int,
    *,
    adapter: str | None = None,
    layers: Sequence[int] = (),
    shows_prompt: bool = False,
) -> Iterator[tuple[int, int, ForwardOutput]]:
    """Outputs along a text in blocks, with the place of each; tokens before number `first` are a prompt."""
    cache = model.new_cache()
    edges = [*range(0, first, _READ), *range(first, len(ids), _ROWS), len(ids)]
    try:
        for start, end in itertools.pairwise(edges):
            count, prompt = end - start, end - start if start < first else 0
            rows = () if prompt and not shows_prompt else range(count)
            tokens = torch.tensor(ids[start:end])
            segments = [Segment(cache, tokens, chain_shape(count), rows, prompt=prompt, adapter=adapter)]
            output = model.forward_showing(segments, layers) if layers else model.forward(segments)
            cache.commit(range(count))
            yield start, end, output
    finally:
        model.release_cache(cache)


class StepWatcher(NoDrafter):
    """Never drafts; keeps outcomes of steps, with token probabilities if `drawn`, or `whole` distributions."""

    observes_lazily = False

    def __init__(self, needed: Sequence[Features], drawn: bool = False, *, whole: bool = False) -> None:
        self._keeps_dists = whole
        self._keeps_logits = any(each.logits for each in needed)
        self.layers = tuple(sorted({layer for each in needed for layer in each.layers}))
        if needed or drawn:
            rows = any(each.of_prompts for each in needed)
            self.features = Features("all" if rows else "last", self._keeps_logits or drawn, self.layers)
        self.seen: defaultdict[int, list[StepOutcome]] = defaultdict(list)
        self.probs: defaultdict[int, list[float]] = defaultdict(list)
        self.dists: defaultdict[int, list[Tensor]] = defaultdict(list)

    @classmethod
    def of(cls, drafters: Iterable[Drafter], *, drawn: bool) -> StepWatcher:
        drafters = list(drafters)
        needed = [each.features for each in drafters if each.features is not None]
        return cls(needed, drawn, whole=any(map(draws_several, drafters)))

    def seen_of(self, request: int) -> dict[str, Any]:
        kept: dict[str, dict[int, Any]] = {"seen": self.seen, "probs": self.probs, "dists": self.dists}
        return {name: tuple(each.pop(request, ())) for name, each in kept.items()} | {"layers": self.layers}

    def observe(self, batch: Sequence[DraftRequest], outcomes: Sequence[StepOutcome]) -> None:
        for request, outcome in zip(batch, outcomes, strict=True):
            if is_drawn(request.params) and outcome.tokens and outcome.logits is not None:
                dist = probs_from_logits(outcome.logits[-1:], request.params)
                self.probs[request.id].append(float(dist[0, outcome.tokens[0]]))
                if self._keeps_dists:
                    self.dists[request.id].append(dist[0].cpu())
            self.seen[request.id].append(_copied(outcome, self._keeps_logits))


def _copied(outcome: StepOutcome, logits: bool = False) -> StepOutcome:
    return dataclasses.replace(
        outcome,
        hidden=None if outcome.hidden is None else outcome.hidden.clone(),
        logits=outcome.logits.clone() if logits and outcome.logits is not None else None,
        layers=tuple(layer.clone() for layer in outcome.layers),
    )


def outputs_along(
    model: LanguageModel, ids: Sequence[int], first: int, adapter: str | None = None
) -> Iterator[ForwardOutput]:
    """Yield a model's outputs at the tokens of a text from number `first` on, in blocks; earlier tokens are a prompt.

    An output may be overwritten when the next one is computed.
    """
    return (output for start, _, output in _blocks(model, ids, first, adapter=adapter) if start >= first)


@torch.inference_mode()
def trace_after(
    target: LanguageModel,
    prompt: tuple[int, ...],
    trace: AnswerTrace,
    features: Features | None,
    layers: tuple[int, ...] = (),
) -> AnswerTrace:
    """An answer as if it followed another prompt, with the features that the target shows there."""
    if features is None:
        seen, layers = [StepOutcome(Proposal.empty(), (), (token,)) for token in trace.tokens], trace.layers
    else:
        seen = [_copied(each) for each in _plain_steps(target, layers, prompt, trace.tokens, whole=features.of_prompts)]
    limit = trace.limit - len(trace.prompt) + len(prompt)
    return dataclasses.replace(trace, prompt=prompt, seen=tuple(seen), limit=limit, layers=layers)


def shown_to(features: Features | None, trace: AnswerTrace, step: int, proposal: Proposal) -> StepOutcome:
    """The outcome that a drafter receives for step `trace.seen[step]`, with nothing of its proposal accepted."""
    kept = trace.seen[step]
    if features is None or kept.hidden is None:
        return StepOutcome(proposal, (), kept.tokens, partial=kept.partial)
    rows = slice(None) if features.of_prompts else slice(-1, None)
    # Only one row was computed, so a drafter that needs rows of its nodes receives an empty proposal.
    reported = Proposal.empty() if features.rows == "all" else proposal
    return StepOutcome(
        reported,
        (),
        kept.tokens,
        kept.hidden[rows],
        kept.logits[rows] if features.logits and kept.logits is not None else None,
        tuple(kept.layers[trace.layers.index(layer)][rows] for layer in features.layers),
        kept.partial,
    )
