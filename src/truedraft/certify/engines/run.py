"""An engine asked and judged: which questions, in what order, until when."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
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
from truedraft.certify.engines.law import Allowance, Judge, Law, filtered, judging_logits, measured_allowance
from truedraft.certify.engines.report import EngineReport, evidence_words
from truedraft.core.params import SamplingParams
from truedraft.errors import OptionError, PeerError
from truedraft.models.base import LanguageModel
from truedraft.peers import Peer, Question, Reply

ENOUGH = 0.06
"""Total variation that must be detectable, or the evidence is not enough."""
TOKENS = 8000
_GREEDY_PROMPTS, _GREEDY_TOKENS = 6, 32
_RIVALS = 2
"""Likeliest tokens that are asked for, so that one sees near ties."""
_REPEATED_PROMPTS = 3
_STREAMS = 3
"""Least answers of a round that go on for long, beside those of repeated prompts, which are as many tokens together."""
_LEAST_GREEDY = 32
"""Greedy tokens away from near ties below which nothing is said."""

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
    asked = Asked(peer, together, params.seed or 0, sends_seeds, target.vocab_size)
    known = dict(drafts or {})
    greedy = _greedy_answers(asked, prompts, params, tokens, deadline)
    tell(Part.GREEDY, 1.0)
    raw = peer.facts.logprobs == "raw"  # others are of the distribution behind temperature and filters, or unknown
    told = [(question, reply if raw else replace(reply, logprobs=None)) for question, reply in greedy]
    measured, differences = measured_allowance(target, rounded, told)
    allowed = measured if allowance is None else Allowance(allowance, allowance, "as it was stated")
    judge = Judge(target, peer.facts.filters, allowed)
    findings = [_of_greedy(judge, greedy, known, asked)]
    all_answers = list(greedy)
    if not params.greedy:
        finding, answers = _sampled(judge, asked, prompts, params, known, deadline, tokens, tell)
        findings.insert(0, finding)
        all_answers += answers
    findings.append(behaviour.logprobs(differences, allowed, judged=rounded is not None or allowance is not None))
    findings += _promises(asked, prompts, params, greedy, all_answers, judge)
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


def _greedy_answers(
    asked: Asked, prompts: Sequence[Sequence[int]], params: SamplingParams, tokens: int, deadline: Deadline
) -> list[Answered]:
    """Greedy answers, with log-probabilities if the engine tells them; where greedy is what is certified, many."""
    cold = replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    many = max(_GREEDY_PROMPTS, tokens // _GREEDY_TOKENS) if params.greedy else _GREEDY_PROMPTS
    told = {"logprobs": _RIVALS} if asked.peer.facts.logprobs else {}
    questions = [asked.open(prompt, cold, _GREEDY_TOKENS, **told) for prompt in prompts[:many]]
    found: list[Answered] = []
    for first in range(0, len(questions), asked.together):
        if deadline.over and len(found) >= _GREEDY_PROMPTS:
            break
        found += asked.ask(questions[first : first + asked.together])
        if told and not found:  # there are servers that offer log-probabilities and refuse them
            asked.dropped.clear()
            plain = [Question(each.prompt, replace(each.params, logprobs=None)) for each in questions]
            return asked.ask(plain[:_GREEDY_PROMPTS])
    return found


# ---------------------------------------------------------------------------------------- tokens


def _of_greedy(
    judge: Judge, answered: Sequence[Answered], drafts: Mapping[str, LanguageModel], asked: Asked
) -> Finding:
    """Greedy tokens at their own prefixes: the likeliest one, or one that rounding cannot tell from it."""
    params = replace(answered[0][0].params, logprobs=None) if answered else SamplingParams()
    evidence = _evidence(judge, params, drafts)
    for law in judge.laws(answered):
        evidence.add(law, _drafted(law, drafts, judge), repeated=False)
    ties = evidence.tokens - evidence.sure
    summary = (
        f"{evidence.tokens:,} tokens, {ties} of them at near ties; {evidence.outside} are not the likeliest token by "
        f"more than rounding: evidence {evidence_words(evidence.log10)}"
    )
    facts = evidence.facts() | {"near_ties": ties}
    name = "greedy tokens at their own prefixes"
    return _tokens_finding(Part.GREEDY, name, evidence, asked, evidence.sure >= _LEAST_GREEDY, summary, facts)


def _tokens_finding(
    part: Part, name: str, evidence: Evidence, asked: Asked, enough: bool, summary: str, facts: dict[str, Any]
) -> Finding:
    """What evidence comes to: a fault only where the engine told its ids itself."""
    status = Status.HOLDS if enough else Status.NOT_ENOUGH
    if evidence.log10 >= math.log10(ALARM):
        unsure = sum(asked.unsure.values())
        status = Status.NOT_ENOUGH if unsure else Status.FAILS
        if unsure:
            summary += f"; the ids of {unsure} answers were read from their text and may be others than those drawn"
    return Finding(part, name, status, summary, facts)


def _sampled(
    judge: Judge, asked: Asked, prompts: Sequence[Sequence[int]], params: SamplingParams,
    drafts: Mapping[str, LanguageModel], deadline: Deadline, tokens: int, tell: Tell,
) -> tuple[Finding, list[Answered]]:  # fmt: skip
    """Sampled tokens until they are enough, the evidence is certain, or the time is over."""
    evidence = _evidence(judge, params, drafts)
    kept: list[Answered] = []
    for questions, repeated in _groups(asked, prompts, params):
        if evidence.tokens >= tokens or deadline.over or evidence.log10 >= math.log10(CERTAIN):
            break
        answered = asked.ask(questions)
        kept += answered
        evidence.lost = asked.dropped_share
        for law in judge.laws(answered):
            evidence.add(law, _drafted(law, drafts, judge), repeated=repeated)
        tell(Part.SAMPLED, min(1.0, max(evidence.tokens / tokens, deadline.fraction)))
    tell(Part.SAMPLED, 1.0)
    return _sampled_finding(evidence, judge, asked), kept


def _groups(
    asked: Asked, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> Iterator[tuple[list[Question], bool]]:
    """Questions that are asked together, and whether their prompt is one that is asked many times; without an end."""
    turns = streams(prompts)
    several = max(_STREAMS, asked.together)
    for beginning in itertools.cycle([prompt[:BEGINNING] for prompt in prompts[:_REPEATED_PROMPTS]]):
        repeats = several * STREAM_TOKENS // REPEATED_TOKENS
        for first in range(0, repeats, asked.together):
            count = min(asked.together, repeats - first)
            yield [asked.open(beginning, params, REPEATED_TOKENS) for _ in range(count)], True
        for first in range(0, several, asked.together):
            count = min(asked.together, several - first)
            yield [asked.open(next(turns), params, STREAM_TOKENS) for _ in range(count)], False


def _sampled_finding(evidence: Evidence, judge: Judge, asked: Asked) -> Finding:
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
    name, enough = "sampled tokens at their own prefixes", detectable <= ENOUGH
    return _tokens_finding(Part.SAMPLED, name, evidence, asked, enough, summary, evidence.facts())


def _evidence(judge: Judge, params: SamplingParams, drafts: Mapping[str, LanguageModel]) -> Evidence:
    return Evidence(
        judge.target.vocab_size, params, judge.filters, [*drafts, COPIED], judge.allowance.at(params)
    )  # fmt: skip


def _drafted(law: Law, drafts: Mapping[str, LanguageModel], judge: Judge) -> dict[str, Tensor]:
    """The drafts' distributions at the tokens of an answer, under its options."""
    found = {COPIED: ngram_candidates(law)}
    for name, model in drafts.items():
        found[name] = torch.zeros_like(law.probs)
        known = next((place for place, token in enumerate(law.text) if token >= model.vocab_size), len(law.text))
        first, last = len(law.question.prompt), min(known, model.context_length)
        if last <= first:  # a draft that cannot read the text guesses nothing
            continue
        (logits,) = judging_logits(model, [(law.question.prompt, law.text[first:last])])
        ids = min(model.vocab_size, judge.target.vocab_size)
        rows = torch.full((len(logits), judge.target.vocab_size), -math.inf, dtype=torch.float64)
        rows[:, :ids] = logits[:, :ids]
        found[name][: len(rows)] = filtered(rows, law.question.params, judge.filters).probs
    return found


# ---------------------------------------------------------------------------------------- promises


def _promises(
    asked: Asked, prompts: Sequence[Sequence[int]], params: SamplingParams, greedy: Sequence[Answered],
    answered: Sequence[Answered], judge: Judge,
) -> list[Finding]:  # fmt: skip
    """Lengths, stop texts and seeds; an engine that fails meanwhile loses nothing of what was found before."""
    found = behaviour.lengths(answered, judge.target)
    tokenizer = judge.target.tokenizer
    try:
        questions = [] if tokenizer is None else behaviour.stop_questions(asked, tokenizer, greedy[:_GREEDY_PROMPTS])
        if questions and tokenizer is not None:
            found.insert(0, behaviour.stops(asked.ask(questions), greedy, tokenizer, judge))
        found += behaviour.seeds(asked, prompts, params)
    except PeerError as error:
        name = "stop texts and seeds"
        found.append(Finding(Part.BEHAVIOUR, name, Status.NOT_ENOUGH, f"the engine could be asked no further: {error}"))
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
    findings = [_alike_greedily(both, prompts, params, tokens, deadline)]
    if not params.greedy:
        findings.insert(0, _alike_sampled(both, prompts, params, deadline, tokens, tell))
    tell(Part.AGAINST, 1.0)
    spent = sum(each.tokens for each in both)
    dropped = both[0].dropped + both[1].dropped
    more = {"against": {"name": other.facts.name, "version": other.facts.version, **other.facts.more}}
    unsure = dict(+(both[0].unsure + both[1].unsure))
    return EngineReport(findings, peer.facts, params, together, spent, now() - began, dict(dropped), unsure, more)


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


def _alike_greedily(
    both: Sequence[Asked], prompts: Sequence[Sequence[int]], params: SamplingParams, tokens: int, deadline: Deadline
) -> Finding:
    """Greedy answers of both; where they part, their own log-probabilities tell near ties."""
    answers = [_greedy_answers(each, prompts, params, tokens // 2, deadline) for each in both]
    others = {question.prompt: reply for question, reply in answers[1]}  # some may have been dropped, on either side
    pairs = [(question, one, others[question.prompt]) for question, one in answers[0] if question.prompt in others]
    same = ties = 0
    apart: list[str] = []
    unknown: list[str] = []
    for question, one, two in pairs:
        if one.token_ids == two.token_ids:
            same += 1
            continue
        place = next(
            (i for i, (a, b) in enumerate(zip(one.token_ids, two.token_ids, strict=False)) if a != b),
            min(len(one.token_ids), len(two.token_ids)),
        )
        # Where one has ended, the other tells how near going on was.
        margins = [each for each in (_margin(one, place), _margin(two, place)) if each is not None]
        where = f"token {place} of a prompt of {len(question.prompt)} tokens"
        if margins and margins[0] <= _TIE:
            ties += 1
        else:
            (apart if margins else unknown).append(where)
    elsewhere = apart + unknown
    total = same + ties + len(elsewhere)
    summary = f"{same} of {total} greedy answers are the same, {ties} part at a near tie, {len(elsewhere)} elsewhere"
    if not total:
        status = Status.NOT_ENOUGH
    else:  # without margins one cannot tell a tie from a fault
        status = Status.FAILS if apart else Status.MEASURED if unknown else Status.HOLDS
    facts = {"answers": total, "same": same, "near_ties": ties, "apart": elsewhere[:5]}
    return Finding(Part.AGAINST, "greedy answers are the same", status, summary, facts)


_TIE = 0.25
"""Log-probabilities of the two likeliest tokens that lie nearer may change places by rounding: two steps of bfloat16
for logits of 16 to 32."""


def _margin(reply: Reply, place: int) -> float | None:
    """How far the likeliest token is from the next one, as the engine tells; None where it does not."""
    if reply.top_logprobs is None or place >= len(reply.top_logprobs):
        return None
    rivals = sorted(reply.top_logprobs[place].values(), reverse=True)
    return rivals[0] - rivals[1] if len(rivals) > 1 else None
