"""An engine asked and judged: which questions, in what order, until when."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from truedraft.certify.checks import Deadline, Finding, Part, Status, now
from truedraft.certify.engines import behaviour
from truedraft.certify.engines.against import TwoSamples
from truedraft.certify.engines.alternatives import COPIED, ngram_candidates
from truedraft.certify.engines.asked import (
    BEGINNING,
    REPEATED_TOKENS,
    STREAM_TOKENS,
    Answered,
    Asked,
    check_prompts,
    streams,
)
from truedraft.certify.engines.evidence import ALARM, CERTAIN, Evidence
from truedraft.certify.engines.law import Allowance, Judge, Law, filtered, measured_allowance
from truedraft.certify.engines.report import EngineReport, evidence_words
from truedraft.certify.sampling import plain_logits
from truedraft.core.params import SamplingParams
from truedraft.errors import OptionError
from truedraft.models.base import LanguageModel
from truedraft.peers import Peer

ENOUGH = 0.06
"""Total variation that must be detectable, or the evidence is not enough."""
TOKENS = 4000
_GREEDY_PROMPTS, _GREEDY_TOKENS = 6, 32
_RIVALS = 2
"""Likeliest tokens that are asked for, so that one sees near ties."""
_REPEATED_PROMPTS = 3
_STREAMS = 3
"""Answers of a round that go on for long, beside those of repeated prompts, which are as many tokens together."""

Tell = Callable[[Part, float], None]


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
    sends_seeds: bool = True,
    tell: Tell = lambda part, done: None,
) -> EngineReport:
    """Check that an engine answers as a model alone would: its tokens under the model's own forward, and its promises.

    Args:
        peer: the engine.
        target: the model that it is said to run, best in float32.
        prompts: token ids; the more, the better.
        params: how it is asked: temperature, top-k, top-p, min-p, penalties; its seed is that of the first request.
        rounded: the same weights as coarse as the engine may hold them, to measure what rounding does.
        drafts: draft models that the engine may use, by name, so that faults of judging are named.
        allowance: how far its log-probabilities may lie from the target's; None measures it.
        together: requests that are asked at once.
        seconds: when to stop at the latest, answers under way apart.
        tokens: of sampled answers that are wanted; less where the evidence is certain before.
        sends_seeds: whether each request is sent a seed of its own.
        tell: is told a part and the fraction of it that is done.

    Raises:
        OptionError, PromptError: unusable options or prompts, or options that the engine does not take.
        PeerError: the engine could not be asked.
        TruedraftError: the target failed.
    """
    check_prompts(prompts, target.context_length)
    _refuse_unusable(peer, params, together, seconds, sends_seeds)
    if allowance is not None and not 0.0 <= allowance < math.inf:
        raise OptionError(f"must be a number of 0 or more, got {allowance}", field="allowance")
    began, deadline = now(), Deadline(seconds)
    asked = Asked(peer, together, params.seed or 0, sends_seeds)
    known = dict(drafts or {})
    greedy = _greedy_answers(asked, prompts, params)
    tell(Part.GREEDY, 1.0)
    measured, differences = measured_allowance(target, rounded, greedy)
    allowed = measured if allowance is None else Allowance(allowance, "as it was stated")
    judge = Judge(target, peer.facts.filters, allowed)
    findings = [_of_greedy(judge, greedy, known, asked)]
    all_answers = list(greedy)
    if not params.greedy:
        finding, answers = _sampled(judge, asked, prompts, params, known, deadline, tokens, tell)
        findings.insert(0, finding)
        all_answers += answers
    findings.append(behaviour.logprobs(differences, allowed, judged=rounded is not None or allowance is not None))
    findings += _promises(asked, prompts, params, greedy, all_answers, target)
    tell(Part.BEHAVIOUR, 1.0)
    more = {"allowance": allowed.log_ratio, "allowance_is": allowed.told}
    lost = {"dropped": dict(asked.dropped), "unsure": dict(+asked.unsure)}
    return EngineReport(findings, peer.facts, params, together, asked.tokens, now() - began, **lost, more=more)


def _refuse_unusable(peer: Peer, params: SamplingParams, together: int, seconds: float, sends_seeds: bool) -> None:
    if together < 1:
        raise OptionError(f"must be 1 or more, got {together}", field="batch")
    if not 0.0 < seconds < float("inf"):
        raise OptionError(f"the time must be above 0, got {seconds} seconds")
    if params.structured or params.bad_words or params.coupled:
        raise OptionError(
            "an engine is certified without structured answers, bad words and coupled noise; leave them out"
        )
    plain = replace(params, seed=params.seed if sends_seeds else None, stop=(), stop_token_ids=())
    refused = peer.refuses(plain)
    if refused:
        raise OptionError(f"{peer.facts.name} does not take {refused}; leave it out")


def _greedy_answers(asked: Asked, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Answered]:
    """Greedy answers, with log-probabilities if the engine tells them."""
    cold = replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    tells = bool(asked.peer.facts.logprobs)
    more = {"logprobs": _RIVALS} if tells else {}
    questions = [asked.open(prompt, cold, _GREEDY_TOKENS, **more) for prompt in prompts[:_GREEDY_PROMPTS]]
    return asked.ask(questions)


# ---------------------------------------------------------------------------------------- tokens


def _of_greedy(
    judge: Judge, answered: Sequence[Answered], drafts: Mapping[str, LanguageModel], asked: Asked
) -> Finding:
    """Greedy tokens at their own prefixes: the likeliest one, or one that rounding cannot tell from it."""
    params = replace(answered[0][0].params, logprobs=None) if answered else SamplingParams()
    evidence = _evidence(judge, params, drafts, asked)
    for law in judge.laws(answered):
        evidence.add(law, _drafted(law, drafts, judge), repeated=False)
    ties = evidence.tokens - evidence.sure
    facts = evidence.facts() | {"near_ties": ties}
    level = evidence.log10
    summary = (
        f"{evidence.tokens:,} tokens, {ties} of them at near ties; {evidence.outside} are not the likeliest token by "
        f"more than rounding: evidence {evidence_words(level)}"
    )
    return Finding(Part.GREEDY, "greedy tokens at their own prefixes", _status(evidence, enough=True), summary, facts)


def _sampled(
    judge: Judge, asked: Asked, prompts: Sequence[Sequence[int]], params: SamplingParams,
    drafts: Mapping[str, LanguageModel], deadline: Deadline, tokens: int, tell: Tell,
) -> tuple[Finding, list[Answered]]:  # fmt: skip
    """Sampled tokens until they are enough, the evidence is certain, or the time is over."""
    evidence = _evidence(judge, params, drafts, asked)
    turns, beginnings = (
        streams(prompts),
        itertools.cycle([prompt[:BEGINNING] for prompt in prompts[:_REPEATED_PROMPTS]]),
    )
    kept: list[Answered] = []
    repeats = _STREAMS * STREAM_TOKENS // REPEATED_TOKENS
    while evidence.tokens < tokens and not deadline.over and evidence.log10 < math.log10(CERTAIN):
        beginning = next(beginnings)
        rounds = (
            [asked.open(beginning, params, REPEATED_TOKENS) for _ in range(repeats)],
            [asked.open(next(turns), params, STREAM_TOKENS) for _ in range(_STREAMS)],
        )
        for number, questions in enumerate(rounds):
            answered = asked.ask(questions)
            kept += answered
            evidence.lost = asked.dropped_share
            for law in judge.laws(answered):
                evidence.add(law, _drafted(law, drafts, judge), repeated=number == 0)
        tell(Part.SAMPLED, min(1.0, max(evidence.tokens / tokens, deadline.fraction)))
    tell(Part.SAMPLED, 1.0)
    return _sampled_finding(evidence, judge), kept


def _sampled_finding(evidence: Evidence, judge: Judge) -> Finding:
    detectable = evidence.smallest_detectable()
    until = [one.tokens for one in evidence.milestones]
    summary = (
        f"{evidence.tokens:,} tokens, {evidence.sure:,} of them away from filters' edges: evidence "
        f"{evidence_words(evidence.log10)}; a total variation of {detectable:.3f} on any of the events would have "
        f"been found; log-probabilities may be off by {judge.allowance.log_ratio:.2g}"
    )
    if until[0] is not None:
        certain = f", 10^6 after {until[1]:,}" if until[1] is not None else ""
        summary += f"; evidence of 1,000 after {until[0]:,} tokens{certain}; what it looks like: {evidence.fault}"
    if evidence.outside:
        summary += f"; {evidence.outside} tokens that the options forbid"
    status = _status(evidence, enough=detectable <= ENOUGH)
    return Finding(Part.SAMPLED, "sampled tokens at their own prefixes", status, summary, evidence.facts())


def _evidence(judge: Judge, params: SamplingParams, drafts: Mapping[str, LanguageModel], asked: Asked) -> Evidence:
    slack = judge.allowance.at(params.temperature)
    names = [*drafts, COPIED]
    return Evidence(judge.target.vocab_size, params, judge.filters, names, slack)


def _drafted(law: Law, drafts: Mapping[str, LanguageModel], judge: Judge) -> dict[str, Tensor]:
    """The drafts' distributions at the tokens of an answer, under its options."""
    found = {COPIED: ngram_candidates(law)}
    for name, model in drafts.items():
        (logits,) = plain_logits(model, [(law.question.prompt, law.tokens)])
        rows = logits[:, : judge.target.vocab_size].double()
        found[name] = filtered(rows, law.question.params, judge.filters, 0.0).probs
    return found


def _status(evidence: Evidence, *, enough: bool) -> Status:
    if evidence.log10 >= math.log10(ALARM):
        return Status.FAILS
    return Status.HOLDS if enough else Status.NOT_ENOUGH


# ---------------------------------------------------------------------------------------- promises


def _promises(
    asked: Asked, prompts: Sequence[Sequence[int]], params: SamplingParams, greedy: Sequence[Answered],
    answered: Sequence[Answered], target: LanguageModel,
) -> list[Finding]:  # fmt: skip
    """Lengths, stop texts and seeds."""
    found: list[Finding] = []
    tokenizer = target.tokenizer
    if tokenizer is not None:
        questions = behaviour.stop_questions(asked, tokenizer, greedy)
        if questions:
            stopped = asked.ask(questions)
            found.append(behaviour.stops(stopped, greedy, tokenizer))
    found += behaviour.lengths(answered, target)
    found += behaviour.seeds(asked, prompts, params)
    return found


# ---------------------------------------------------------------------------------------- against another engine


def compare_engines(
    peer: Peer,
    other: Peer,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    together: int = 8,
    seconds: float = 300.0,
    tokens: int = TOKENS,
    sends_seeds: bool = True,
    tell: Tell = lambda part, done: None,
) -> EngineReport:
    """Check that two engines answer alike, without anybody's weights: the same prompts, asked of both.

    Sampled answers by a two-sample test over repeated beginnings, greedy ones by comparison.

    Args and errors are those of `certify_engine`; each engine is asked for half of the tokens.
    """
    for each in (peer, other):
        _refuse_unusable(each, params, together, seconds, sends_seeds)
    began, deadline = now(), Deadline(seconds)
    both = [Asked(each, together, params.seed or 0, sends_seeds) for each in (peer, other)]
    # Seeds of the second engine lie elsewhere, so that equal noise does not make answers alike.
    both[1] = Asked(other, together, (params.seed or 0) + (1 << 31), sends_seeds)
    findings = [_alike_greedily(both, prompts, params)]
    if not params.greedy:
        findings.insert(0, _alike_sampled(both, prompts, params, deadline, tokens, tell))
    tell(Part.AGAINST, 1.0)
    spent = sum(each.tokens for each in both)
    dropped = both[0].dropped + both[1].dropped
    more = {"against": {"name": other.facts.name, "version": other.facts.version, **other.facts.more}}
    return EngineReport(findings, peer.facts, params, together, spent, now() - began, dict(dropped), {}, more)


def _alike_sampled(
    both: Sequence[Asked], prompts: Sequence[Sequence[int]], params: SamplingParams, deadline: Deadline, tokens: int,
    tell: Tell,
) -> Finding:  # fmt: skip
    samples = TwoSamples()
    beginnings = itertools.cycle([prompt[:BEGINNING] for prompt in prompts[: 2 * _REPEATED_PROMPTS]])
    first = 0
    while sum(each.tokens for each in both) < tokens and not deadline.over:
        beginning = next(beginnings)
        answers = [
            each.ask([each.open(beginning, params, REPEATED_TOKENS) for _ in range(each.together)]) for each in both
        ]
        for (_, one), (_, two) in zip(*answers, strict=False):
            samples.add(beginning, one.token_ids, two.token_ids)
        level = samples.log10
        if level >= math.log10(ALARM):
            first = first or sum(each.tokens for each in both)
        if level >= math.log10(CERTAIN):
            break
        tell(Part.AGAINST, max(deadline.fraction, sum(each.tokens for each in both) / tokens))
    level = samples.log10
    summary = f"{samples.pairs:,} pairs of answers, {samples.different:,} different: evidence {evidence_words(level)}"
    summary += f"; evidence of 1,000 after {first:,} tokens" if first else ""
    enough = sum(each.tokens for each in both) >= tokens
    status = Status.FAILS if level >= math.log10(ALARM) else (Status.HOLDS if enough else Status.NOT_ENOUGH)
    facts = {"pairs": samples.pairs, "different": samples.different, "log10_evidence": level}
    return Finding(Part.AGAINST, "both draw from the same distribution", status, summary, facts)


def _alike_greedily(both: Sequence[Asked], prompts: Sequence[Sequence[int]], params: SamplingParams) -> Finding:
    """Greedy answers of both; where they part, the first engine's own log-probabilities tell near ties."""
    answers = [_greedy_answers(each, prompts, params) for each in both]
    others = {question.prompt: reply for question, reply in answers[1]}  # some may have been dropped, on either side
    pairs = [(question, one, others[question.prompt]) for question, one in answers[0] if question.prompt in others]
    same = ties = 0
    apart: list[str] = []
    for question, one, two in pairs:
        if one.token_ids == two.token_ids:
            same += 1
            continue
        place = next(
            (i for i, (a, b) in enumerate(zip(one.token_ids, two.token_ids, strict=False)) if a != b),
            min(len(one.token_ids), len(two.token_ids)),
        )
        margin = _margin(one.top_logprobs, one.logprobs, place)
        if margin is not None and margin <= _TIE:
            ties += 1
        else:
            apart.append(f"token {place} of a prompt of {len(question.prompt)} tokens")
    total = same + ties + len(apart)
    summary = f"{same} of {total} greedy answers are the same, {ties} part at a near tie, {len(apart)} elsewhere"
    told = all(reply.top_logprobs is not None for _, reply in answers[0])
    # Without margins one cannot tell a tie from a fault.
    status = Status.HOLDS if not apart else (Status.FAILS if told else Status.MEASURED)
    facts = {"answers": total, "same": same, "near_ties": ties, "apart": apart[:5]}
    return Finding(Part.AGAINST, "greedy answers are the same", status, summary, facts)


_TIE = 0.1
"""Log-probabilities of the two likeliest tokens that lie nearer may change places by rounding."""


def _margin(tops: Sequence[Mapping[int, float]] | None, own: Sequence[float] | None, place: int) -> float | None:
    """How far the likeliest token is from the next one, as the engine tells; None where it does not."""
    if tops is None or own is None or place >= len(tops):
        return None
    rivals = sorted(tops[place].values(), reverse=True)
    return rivals[0] - rivals[1] if len(rivals) > 1 else None
