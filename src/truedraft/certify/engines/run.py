"""Certification of an engine over its interface: which requests are sent, in what order, and until when."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from truedraft.certify.checks import Deadline, Finding, Part, Status, check_run, now
from truedraft.certify.e_process import ALARM, CERTAIN, ENOUGH
from truedraft.certify.engines import behaviour
from truedraft.certify.engines.alternatives import COPIED, ngram_candidates
from truedraft.certify.engines.answer_probs import (
    Allowance,
    AnswerProbs,
    Judge,
    filtered,
    judging_logits,
    measured_allowance,
    with_one_end,
)
from truedraft.certify.engines.evidence import Evidence
from truedraft.certify.engines.under_test import (
    GREEDY_PROMPTS,
    STREAM_TOKENS,
    TOKENS,
    Answered,
    EngineUnderTest,
    ReportProgress,
    engine_report,
    greedy_answers,
    groups,
    refuse_unusable,
)
from truedraft.certify.report import Report, evidence_words
from truedraft.core.params import SamplingParams
from truedraft.errors import OptionError, PeerError
from truedraft.measure.peers import Peer
from truedraft.models.base import LanguageModel

_LEAST_GREEDY = 32
"""Minimum number of greedy tokens away from near ties."""


def certify_engine(
    peer: Peer,
    target: LanguageModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    rounded: LanguageModel | None = None,
    drafts: Mapping[str, LanguageModel] | None = None,
    allowance: float | None = None,
    together: int = 8,
    seconds: float = 300.0,
    tokens: int = TOKENS,
    tell: ReportProgress = lambda part, done: None,
) -> Report:
    """Check that an engine's tokens follow the model's own forward, and its lengths, stops and seeds.

    Args:
        target: the model that the engine is said to run, preferably in float32.
        prompts: token ids; more prompts give more power.
        params: temperature, filters, penalties. With a seed, requests get consecutive seeds from it on.
        rounded: the same weights in the engine's likely precision, to measure the effect of rounding.
        drafts: draft models that the engine may use, by name, so that faults of verification can be named.
        allowance: largest difference of its log-probabilities from the target's; None measures it.
        together: concurrent requests.
        seconds: time limit; answers in progress may exceed it.
        tokens: number of sampled tokens; fewer if the evidence is certain before.
        tell: callback with a part and its completed fraction.

    Raises:
        OptionError: unusable options or prompts, or options that the engine does not support.
        PeerError: the engine did not answer.
        TruedraftError: the target failed.
    """
    check_run(prompts, target.context_length - STREAM_TOKENS - 1, together, seconds)
    refuse_unusable(peer, params)
    if allowance is not None and not 0.0 <= allowance < math.inf:
        raise OptionError(f"must be a number of 0 or more, got {allowance}", field="allowance")
    began, deadline = now(), Deadline(seconds)
    engine = EngineUnderTest(peer, prompts, params, together, target.vocab_size)
    greedy = greedy_answers(engine, tokens, deadline)
    tell(Part.GREEDY, 1.0)
    measured, differences = measured_allowance(target, rounded, _with_raw(peer, greedy))
    allowed = measured if allowance is None else Allowance(allowance, allowance, "as it was stated")
    judge = Judge(target, peer.facts.filters, allowed, drafts)
    findings = [_of_greedy(judge, greedy, engine)]
    answers: list[Answered] = []
    if not params.greedy:
        finding, answers, failed = _sampled(judge, engine, deadline, tokens, tell)
        findings.insert(0, finding)
        if failed is not None and not any(each.status is Status.FAILS for each in findings):
            raise failed  # too few answers to decide anything
    findings.append(behaviour.logprobs(differences, allowed, judged=rounded is not None or allowance is not None))
    findings += _promises(engine, greedy, [*greedy, *answers], judge)
    tell(Part.BEHAVIOUR, 1.0)
    more = {"allowance": allowed.log_ratio, "allowance_is": allowed.origin}
    return engine_report(findings, [engine], now() - began, **more)


def _with_raw(peer: Peer, answered: Sequence[Answered]) -> Sequence[Answered]:
    """Answers with raw log-probabilities or none: processed ones include temperature and filters, or are unknown."""
    if peer.facts.logprobs == "raw":
        return answered
    return [(question, replace(reply, logprobs=None)) for question, reply in answered]


# ---------------------------------------------------------------------------------------- tokens


def _of_greedy(judge: Judge, answered: Sequence[Answered], engine: EngineUnderTest) -> Finding:
    """Greedy tokens at their own prefixes: the most likely one, or one that rounding cannot separate from it."""
    params = replace(answered[0][0].params, logprobs=None) if answered else SamplingParams()
    evidence = _evidence(judge, params)
    for answer in judge.answer_probs(answered):
        evidence.add(answer, drafted(answer, judge), repeated=False)
    ties = evidence.tokens - evidence.sure
    summary = (
        f"{evidence.tokens:,} tokens, {ties} of them at near ties; {evidence.outside} are not the likeliest token by "
        f"more than rounding: evidence {evidence_words(evidence.process.log10)}"
    )
    facts = evidence.facts() | {"near_ties": ties}
    name = "greedy tokens at their own prefixes"
    return _tokens_finding(Part.GREEDY, name, evidence, engine, evidence.sure >= _LEAST_GREEDY, summary, facts)


def _tokens_finding(
    part: Part,
    name: str,
    evidence: Evidence,
    engine: EngineUnderTest,
    enough: bool,
    summary: str,
    facts: dict[str, Any],
) -> Finding:
    """FAILS only if the engine returned its token ids itself."""
    status = Status.HOLDS if enough else Status.NOT_ENOUGH
    if ALARM in evidence.process.reached:
        unsure = sum(engine.unsure.values())
        status = Status.NOT_ENOUGH if unsure else Status.FAILS
        if unsure:
            summary += f"; the ids of {unsure} answers were read from their text and may be others than those drawn"
    return Finding(part, name, status, summary, facts)


def _sampled(
    judge: Judge, engine: EngineUnderTest, deadline: Deadline, tokens: int, report: ReportProgress
) -> tuple[Finding, list[Answered], PeerError | None]:
    evidence = _evidence(judge, engine.params)
    kept: list[Answered] = []
    failed: PeerError | None = None
    for questions, repeated in groups(engine):
        if evidence.tokens >= tokens or deadline.over or CERTAIN in evidence.process.reached:
            break
        try:
            answered = engine.send(questions)
        except PeerError as error:
            failed = error
            break
        kept += answered
        evidence.lose(len(questions) - len(answered), questions[0].params.max_tokens)
        for answer in judge.answer_probs(answered):
            evidence.add(answer, drafted(answer, judge), repeated=repeated)
        report(Part.SAMPLED, min(1.0, max(evidence.tokens / tokens, deadline.fraction)))
    report(Part.SAMPLED, 1.0)
    return _sampled_finding(evidence, judge, engine), kept, failed


def _sampled_finding(evidence: Evidence, judge: Judge, engine: EngineUnderTest) -> Finding:
    detectable = evidence.smallest_detectable()
    until = evidence.process.reached
    summary = (
        f"{evidence.tokens:,} tokens, {evidence.sure:,} of them away from filters' edges: evidence "
        f"{evidence_words(evidence.process.log10)}; a total variation of {detectable:.3f} on any of the events would "
        f"have been found; log-probabilities may be off by {judge.allowance.log_ratio:.2g}"
    )
    if ALARM in until:
        certain = f", 10^6 after {until[CERTAIN]:,}" if CERTAIN in until else ""
        summary += f"; evidence of 1,000 after {until[ALARM]:,} tokens{certain}; what it looks like: {evidence.fault}"
    if evidence.outside:
        summary += f"; {evidence.outside} tokens that the options forbid"
    if evidence.dropped:
        summary += f"; {evidence.dropped} answers were dropped: bets paid for them, and other evidence was frozen"
    name, enough = "sampled tokens at their own prefixes", detectable <= ENOUGH
    return _tokens_finding(Part.SAMPLED, name, evidence, engine, enough, summary, evidence.facts())


def _evidence(judge: Judge, params: SamplingParams) -> Evidence:
    slack = judge.allowance.at(params)
    return Evidence(judge.target.vocab_size, params, judge.filters, [*judge.drafts, COPIED], slack)


def drafted(answer: AnswerProbs, judge: Judge) -> dict[str, Tensor]:
    """The drafts' distributions at the tokens of an answer, under its options."""
    found = {COPIED: ngram_candidates(answer)}
    for name, model in judge.drafts.items():
        found[name] = torch.zeros_like(answer.probs)
        known = next((place for place, token in enumerate(answer.text) if token >= model.vocab_size), len(answer.text))
        # A row depends only on tokens before its own, so its own token may be one that the draft does not have.
        first, last = len(answer.question.prompt), min(known + 1, len(answer.text), model.context_length)
        if known < first or last <= first:  # a draft that cannot read the text proposes nothing
            continue
        following = [*answer.text[first : last - 1], 0]  # no row sees the last
        (logits,) = judging_logits(model, [(answer.question.prompt, following)])
        ids = min(model.vocab_size, judge.target.vocab_size)
        rows = torch.full((len(logits), judge.target.vocab_size), -math.inf, dtype=torch.float64)
        rows[:, :ids] = logits[:, :ids]
        probs = filtered(rows, answer.question.params, judge.filters).probs
        found[name][: len(rows)] = with_one_end(probs, answer.ends)
    return found


# ---------------------------------------------------------------------------------------- promises


def _promises(
    engine: EngineUnderTest, greedy: Sequence[Answered], answered: Sequence[Answered], judge: Judge
) -> list[Finding]:
    found = behaviour.lengths(answered, judge.target)
    tokenizer = judge.target.tokenizer
    try:
        questions = [] if tokenizer is None else behaviour.stop_questions(engine, tokenizer, greedy[:GREEDY_PROMPTS])
        if questions and tokenizer is not None:
            found.insert(0, behaviour.stops(engine.send(questions), greedy, tokenizer, judge))
        found += behaviour.seeds(engine)
    except PeerError as error:
        name = "stop texts and seeds"
        found.append(
            Finding(Part.BEHAVIOUR, name, Status.NOT_ENOUGH, f"the engine answered no further requests: {error}")
        )
    return found
