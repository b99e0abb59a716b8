"""Certification of an engine over its interface: which requests are sent, in what order, and until when.

Two engines are compared without the model's weights: do they answer alike? Each pair holds two answers to one prompt,
one from each engine. If both engines sample from the same distribution, the order within a pair carries no information,
so a guess of the order from earlier pairs gains nothing on average. 2 times the probability that was given to the right
order is an e-value of a pair, and the product over pairs is an e-process, whatever the distributions are. It is assumed
that each engine draws its answers independently of each other.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from truedraft.certify.checks import Deadline, Finding, Part, Status, check_run, now
from truedraft.certify.e_process import ALARM, CERTAIN, ENOUGH, EProcess, log_mean
from truedraft.certify.engines.answer_probs import Allowance, Judge, measured_allowance
from truedraft.certify.engines.evidence import COPIED, Evidence, drafted
from truedraft.certify.engines.under_test import (
    BEGINNING,
    REPEATED_PROMPTS,
    REPEATED_TOKENS,
    STREAM_TOKENS,
    TOKENS,
    Answered,
    EngineUnderTest,
    ReportProgress,
    check_lengths,
    check_logprobs,
    check_stops,
    engine_report,
)
from truedraft.certify.report import Report, evidence_words
from truedraft.core.params import SamplingParams
from truedraft.errors import OptionError, PeerError
from truedraft.measure.peers import Peer, Reply
from truedraft.models.base import LanguageModel

_LEAST_GREEDY = 32  # minimum number of greedy tokens away from near ties


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

    Raises OptionError for unusable options or prompts, PeerError if the engine did not answer, TruedraftError if the
    target failed.
    """
    check_run(prompts, target.context_length - STREAM_TOKENS - 1, together, seconds)
    engine = EngineUnderTest(peer, prompts, params, together, target.vocab_size)
    if allowance is not None and not 0.0 <= allowance < math.inf:
        raise OptionError(f"must be a number of 0 or more, got {allowance}", field="allowance")
    began, deadline = now(), Deadline(seconds)
    greedy = engine.greedy_answers(tokens, deadline)
    tell(Part.GREEDY, 1.0)
    raw = greedy
    if peer.facts.logprobs != "raw":  # processed ones include temperature and filters, or are unknown
        raw = [(question, replace(reply, logprobs=None)) for question, reply in greedy]
    measured, differences = measured_allowance(target, rounded, raw)
    allowed = measured if allowance is None else Allowance(allowance, allowance, "as it was stated")
    judge = Judge(target, peer.facts.filters, allowed, drafts or {})
    findings = [_of_greedy(judge, greedy, engine)]
    answers: list[Answered] = []
    if not params.greedy:
        finding, answers, failed = _sampled(judge, engine, deadline, tokens, tell)
        findings.insert(0, finding)
        if failed is not None and not any(each.status is Status.FAILS for each in findings):
            raise failed  # too few answers to decide anything
    findings.append(check_logprobs(differences, allowed, judged=rounded is not None or allowance is not None))
    findings += _promises(engine, greedy, [*greedy, *answers], judge)
    tell(Part.BEHAVIOUR, 1.0)
    more = {"allowance": allowed.log_ratio, "allowance_is": allowed.origin}
    return engine_report(findings, [engine], now() - began, **more)


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
    name, enough = "greedy tokens at their own prefixes", evidence.sure >= _LEAST_GREEDY
    return _tokens_finding(Part.GREEDY, name, evidence, engine, enough, summary, near_ties=ties)


def _tokens_finding(
    part: Part, name: str, evidence: Evidence, engine: EngineUnderTest, enough: bool, summary: str, **more: int
) -> Finding:
    """FAILS only if the engine returned its token ids itself."""
    status = Status.HOLDS if enough else Status.NOT_ENOUGH
    if ALARM in evidence.process.reached:
        unsure = sum(engine.unsure.values())
        status = Status.NOT_ENOUGH if unsure else Status.FAILS
        if unsure:
            summary += f"; the ids of {unsure} answers were read from their text and may be others than those drawn"
    return Finding(part, name, status, summary, evidence.facts() | more)


def _sampled(
    judge: Judge, engine: EngineUnderTest, deadline: Deadline, tokens: int, report: ReportProgress
) -> tuple[Finding, list[Answered], PeerError | None]:
    evidence = _evidence(judge, engine.params)
    kept: list[Answered] = []
    failed: PeerError | None = None
    for questions, repeated in engine.groups():
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
    return _tokens_finding(Part.SAMPLED, name, evidence, engine, enough, summary)


def _evidence(judge: Judge, params: SamplingParams) -> Evidence:
    slack = judge.allowance.at(params)
    return Evidence(judge.target.vocab_size, params, judge.filters, [*judge.drafts, COPIED], slack)


def _promises(
    engine: EngineUnderTest, greedy: Sequence[Answered], answered: Sequence[Answered], judge: Judge
) -> list[Finding]:
    found = check_lengths(answered, judge.target)
    tokenizer = judge.target.tokenizer
    try:
        questions = [] if tokenizer is None else engine.stop_questions(tokenizer, greedy)
        if questions and tokenizer is not None:
            found.insert(0, check_stops(engine.send(questions), greedy, tokenizer, judge))
        found += engine.check_seeds()
    except PeerError as error:
        name = "stop texts and seeds"
        found.append(
            Finding(Part.BEHAVIOUR, name, Status.NOT_ENOUGH, f"the engine answered no further requests: {error}")
        )
    return found


_TRUST = (1.0, 4.0, 16.0, 64.0)
_BEGINNING, _ANYWHERE = 0, 1


def compare_engines(
    peer: Peer,
    other: Peer,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    together: int = 8,
    seconds: float = 300.0,
    tokens: int = TOKENS,
    tell: ReportProgress = lambda part, done: None,
) -> Report:
    """Check that two engines answer the same prompts alike, without the model's weights.

    Sampled answers are compared by a two-sample test over repeated beginnings, greedy ones token by token. Args and
    errors are those of `certify_engine`; each engine generates half of the tokens.
    """
    check_run(prompts, math.inf, together, seconds)
    began, deadline = now(), Deadline(seconds)
    # The second engine gets other seeds, so that equal noise does not make answers alike.
    elsewhere = params if params.seed is None else replace(params, seed=params.seed + (1 << 31))
    both = [EngineUnderTest(peer, prompts, params, together), EngineUnderTest(other, prompts, elsewhere, together)]
    findings = [_alike_greedily(both, tokens, deadline)]
    if not params.greedy:
        findings.insert(0, _alike_sampled(both, deadline, tokens, tell))
    tell(Part.AGAINST, 1.0)
    return engine_report(findings, both, now() - began, against=both[1].facts)


def _alike_sampled(both: Sequence[EngineUnderTest], deadline: Deadline, tokens: int, report: ReportProgress) -> Finding:
    samples, judged = TwoSamples(), EProcess(pairs=1.0)
    beginnings = itertools.cycle([prompt[:BEGINNING] for prompt in both[0].prompts[: 2 * REPEATED_PROMPTS]])
    spoiled = False
    while sum(each.tokens for each in both) < tokens and not deadline.over:
        beginning = next(beginnings)
        answers = [each.send([each.open(beginning, REPEATED_TOKENS) for _ in range(each.together)]) for each in both]
        # The answers that one engine did not drop are a selection, and ids read from text may differ from another
        # engine's.
        spoiled = spoiled or any(each.dropped or any(each.unsure.values()) for each in both)
        for (_, one), (_, two) in zip(*answers, strict=False):
            samples.add(beginning, one.token_ids, two.token_ids)
        if not spoiled:
            judged.see({"pairs": samples.process.most}, sum(each.tokens for each in both))
        if CERTAIN in judged.reached:
            break
        report(Part.AGAINST, max(deadline.fraction, sum(each.tokens for each in both) / tokens))
    summary = (
        f"{samples.pairs:,} pairs of answers, {samples.different:,} different: evidence {evidence_words(judged.log10)}"
    )
    summary += f"; evidence of 1,000 after {judged.reached[ALARM]:,} tokens" if ALARM in judged.reached else ""
    enough = sum(each.tokens for each in both) >= tokens
    if spoiled and samples.process.most > judged.most:
        summary += (
            f"; {evidence_words(samples.process.log10)} with pairs since answers were dropped or read from their text"
        )
        enough = enough and ALARM not in samples.process.reached
    status = Status.FAILS if ALARM in judged.reached else (Status.HOLDS if enough else Status.NOT_ENOUGH)
    facts = {"pairs": samples.pairs, "different": samples.different, "log10_evidence": judged.log10}
    return Finding(Part.AGAINST, "both draw from the same distribution", status, summary, facts)


def _alike_greedily(both: Sequence[EngineUnderTest], tokens: int, deadline: Deadline) -> Finding:
    answers = [each.greedy_answers(tokens // 2, deadline) for each in both]
    others = {question.prompt: reply for question, reply in answers[1]}  # some may have been dropped, for either engine
    pairs = [(question, one, others[question.prompt]) for question, one in answers[0] if question.prompt in others]
    same = ties = 0
    differing: list[str] = []
    unknown: list[str] = []
    for question, one, two in pairs:
        if one.token_ids == two.token_ids:
            same += 1
            continue
        place = next(
            (i for i, (a, b) in enumerate(zip(one.token_ids, two.token_ids, strict=False)) if a != b),
            min(len(one.token_ids), len(two.token_ids)),
        )
        # If one has ended, the other shows how likely it was to continue.
        margins = [each for each in (_margin(one, place), _margin(two, place)) if each is not None]
        where = f"token {place} of a prompt of {len(question.prompt)} tokens"
        if margins and margins[0] <= _TIE:
            ties += 1
        else:
            (differing if margins else unknown).append(where)
    elsewhere = differing + unknown
    total = same + ties + len(elsewhere)
    summary = f"{same} of {total} greedy answers are the same, {ties} part at a near tie, {len(elsewhere)} elsewhere"
    if not total:
        status = Status.NOT_ENOUGH
    else:  # without margins a tie cannot be distinguished from a fault
        status = Status.FAILS if differing else Status.MEASURED if unknown else Status.HOLDS
    facts = {"answers": total, "same": same, "near_ties": ties, "apart": elsewhere[:5]}
    return Finding(Part.AGAINST, "greedy answers are the same", status, summary, facts)


_TIE = 0.25
"""Two log-probabilities that are nearer may change places by rounding: two steps of bfloat16 for logits of 16 to 32."""


def _margin(reply: Reply, place: int) -> float | None:
    """Difference of the two largest log-probabilities that the engine returned; None if it returned none."""
    if reply.top_logprobs is None or place >= len(reply.top_logprobs):
        return None
    rivals = sorted(reply.top_logprobs[place].values(), reverse=True)
    return rivals[0] - rivals[1] if len(rivals) > 1 else None


class TwoSamples:
    """Guesses which answer is from which engine."""

    def __init__(self) -> None:
        self._counts: tuple[dict[tuple[int, ...], Counter[int]], ...] = (defaultdict(Counter), defaultdict(Counter))
        self._logs = torch.zeros(2 * len(_TRUST), dtype=torch.float64)
        self.pairs = self.different = 0
        self.process = EProcess(guesses=1.0)

    def add(self, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> None:
        self.pairs += 1
        if list(one) != list(other):
            self.different += 1
            for row, trust in enumerate(_TRUST):
                for kind in (_BEGINNING, _ANYWHERE):
                    odds = self._odds(prompt, one, trust, kind) - self._odds(prompt, other, trust, kind)
                    # log(2 / (1 + exp(-odds))), without overflow
                    self._logs[2 * row + kind] += math.log(2.0) - math.log1p(math.exp(-abs(odds))) + min(0.0, odds)
            self.process.see({"guesses": log_mean(self._logs)}, self.pairs)
        for number, answer in enumerate((one, other)):
            for kind in (_BEGINNING, _ANYWHERE):
                for place, token in enumerate(answer):
                    self._counts[number][_node(prompt, answer[:place], kind)][token] += 1

    def _odds(self, prompt: Sequence[int], answer: Sequence[int], trust: float, kind: int) -> float:
        found = 0.0
        for place, token in enumerate(answer):
            node = _node(prompt, answer[:place], kind)
            first, second = (counts[node] for counts in self._counts)
            n, m = sum(first.values()), sum(second.values())
            if not n + m:
                break
            both = (first[token] + second[token] + 0.5) / (n + m + 1.0)
            found += math.log((first[token] + trust * both) / (n + trust))
            found -= math.log((second[token] + trust * both) / (m + trust))
        return found


def _node(prompt: Sequence[int], before: Sequence[int], kind: int) -> tuple[int, ...]:
    """The context that a token's counts are kept under: the whole text, or its last token at any position."""
    if kind == _BEGINNING:
        return (*prompt, -1, *before)
    return (before[-1] if before else prompt[-1],)
