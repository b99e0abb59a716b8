"""Engine behaviour other than its distribution: lengths, stop texts, ends of text, seeds, log-probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from truedraft.certify.checks import Finding, Part, Status
from truedraft.certify.engines.answer_probs import Allowance, Judge, unknown_end
from truedraft.certify.engines.under_test import Answered, EngineUnderTest
from truedraft.measure.peers import Question, Reply
from truedraft.models.base import LanguageModel
from truedraft.text import REPLACEMENT, Tokenizer

_STOP_TOKENS = 24
_STOP_PLACES = (3, 6, 10)
"""Token positions at which a stop text begins; some are inside blocks that speculation accepts as a whole."""
_SEED_TOKENS = 24
_SEED_PROMPTS = 3
_SHOWN = 60


def lengths(answered: Sequence[Answered], target: LanguageModel) -> list[Finding]:
    """Check that no answer exceeds `max_tokens`, continues after an end of text, or ends early without a reason."""
    long, trailing, short = [], [], []
    ends, unknown = set(target.eos_token_ids), Counter[int]()
    # An engine's context may be shorter than the model's: answers end where it is full.
    full = max((len(question.prompt) + len(reply.token_ids) for question, reply in answered), default=0)
    for question, reply in answered:
        count, most = len(reply.token_ids), question.params.max_tokens
        if count > most and not reply.unsure:
            long.append(f"{count} tokens where {most} were requested")
        if any(token in ends for token in reply.token_ids[:-1]) and not question.params.ignore_eos:
            trailing.append("tokens after an end of text")
        if (
            count < most
            and reply.finish_reason == "length"
            and not reply.unsure
            and len(question.prompt) + count < full
        ):
            short.append(f"{count} of {most} tokens, ended by its length")
        if (end := unknown_end(target, reply)) is not None:
            unknown[end] += 1
    found = [
        _counted("max_tokens is kept", long, len(answered)),
        _counted("nothing follows an end of text", trailing, len(answered)),
        _counted("an answer ended by its length has all its tokens", short, len(answered)),
    ]
    if unknown:
        summary = (
            f"{unknown.total()} of {len(answered)} answers ended with special tokens {sorted(unknown)}, with which "
        )
        summary += f"this model does not end a text; its ids for that are {sorted(ends)}"
        found.append(Finding(Part.BEHAVIOUR, "answers end as the model's do", Status.MEASURED, summary))
    return found


def stop_questions(engine: EngineUnderTest, tokenizer: Tokenizer, greedy: Sequence[Answered]) -> list[Question]:
    """The greedy questions again, each with a stop text from the middle of its first answer."""
    found = []
    for question, reply in greedy:
        for place in _STOP_PLACES:
            text = tokenizer.decode(reply.token_ids)
            stop = tokenizer.decode(reply.token_ids[place : place + 1])
            # Half a character is in no text, so no engine can search for it.
            usable = stop.strip() and stop in text and REPLACEMENT not in stop
            if place < len(reply.token_ids) and usable and "stop" in engine.peer.facts.takes:
                params = replace(question.params, stop=(stop,), max_tokens=_STOP_TOKENS)
                found.append(Question(question.prompt, params))
                break
    return found


def stops(
    answered: Sequence[Answered], greedy: Sequence[Answered], tokenizer: Tokenizer, judge: Judge
) -> Finding:  # fmt: skip
    """Check that answers end at their stop text, as far as they agree with the `greedy` ones without it."""
    whole = {question.prompt: tokenizer.decode(reply.token_ids) for question, reply in greedy}
    wrong: list[str] = []
    for question, reply in answered:
        text = reply.text if reply.text is not None else tokenizer.decode(reply.token_ids)
        stop = question.params.stop[0]
        expected = whole[question.prompt]
        cut = expected[: expected.index(stop)] if stop in expected else None
        if stop in text:
            wrong.append(f"continued past {stop!r}: {_shown(text)}")
        elif (
            reply.finish_reason == "stop"
            and cut is not None
            and len(text) < len(cut)
            and cut.startswith(text)
            and not _may_end(judge, question, reply)
        ):
            wrong.append(f"ended before {stop!r}, with {_shown(text)} of {_shown(cut)}")
    return _counted("answers end at their stop text", wrong, len(answered))


def _may_end(judge: Judge, question: Question, reply: Reply) -> bool:
    plain = replace(question.params, stop=(), max_tokens=len(reply.token_ids) + 1)
    answer = next(iter(judge.answer_probs([(Question(question.prompt, plain), reply)])), None)
    return answer is not None and len(answer.tokens) > len(reply.token_ids) and not bool(answer.outside[-1])


def seeds(engine: EngineUnderTest) -> list[Finding]:
    """Whether a seed reproduces its answer, also in a batch. Only measured, because few engines promise it."""
    if engine.params.greedy or "seed" not in engine.peer.facts.takes or engine.params.seed is None:
        return []
    questions = [engine.open(prompt, _SEED_TOKENS) for prompt in engine.prompts[:_SEED_PROMPTS]]
    # Separate counts, so that failures here are not outweighed by earlier answers.
    single, company = (
        EngineUnderTest(engine.peer, engine.prompts, engine.params, together, engine.vocab_size)
        for together in (1, engine.together + 1)
    )
    once, again = single.send(questions), single.send(questions)
    others = [engine.open(prompt, _SEED_TOKENS) for prompt in engine.prompts[-max(1, engine.together - 1) :]]
    batched = [pair for question in questions for pair in company.send([question, *others[: engine.together]])]
    for each in (single, company):
        engine.tokens, engine.answers = engine.tokens + each.tokens, engine.answers + each.answers
        engine.dropped += each.dropped
    return [
        _alike("the same seed, the same answer", once, again),
        _alike("the same seed with other requests, the same answer", once, batched),
    ]


def _alike(name: str, one: Sequence[Answered], other: Sequence[Answered]) -> Finding:
    others = {(question.prompt, question.params.seed): reply for question, reply in other}  # some may be dropped
    pairs = [(reply, others[key]) for each, reply in one if (key := (each.prompt, each.params.seed)) in others]
    same = sum(a.token_ids == b.token_ids for a, b in pairs)
    status = Status.HOLDS if pairs and same == len(pairs) else Status.MEASURED
    facts = {"answers": len(pairs), "same": same}
    return Finding(Part.BEHAVIOUR, name, status, f"{same} of {len(pairs)} answers are the same", facts)


def logprobs(differences: Tensor | None, allowance: Allowance, judged: bool) -> Finding:
    """Compare log-probabilities; `judged` is whether rounding was measured, so that larger differences are a fault."""
    name = "told log-probabilities are the target's"
    if differences is None or not len(differences):
        return Finding(Part.LOGPROBS, name, Status.DOES_NOT_APPLY, "the engine returns none")
    sizes = differences.abs()
    median, most = float(sizes.median()), float(sizes.quantile(0.99))
    facts: dict[str, Any] = {
        "tokens": len(sizes),
        "median": median,
        "most_of_99_percent": most,
        "largest": float(sizes.max()),
    }
    summary = f"{len(sizes)} tokens: they differ by {median:.2g} in the median and {most:.2g} at 99 %"
    # A median above the allowance, which nearly all tokens should keep, is no accident of single tokens.
    if judged and median > allowance.log_ratio:
        return Finding(
            Part.LOGPROBS, name, Status.FAILS, f"{summary}; {allowance.log_ratio:.2g} passes for rounding", facts
        )
    return Finding(Part.LOGPROBS, name, Status.HOLDS if judged else Status.MEASURED, summary, facts)


def _counted(name: str, wrong: Sequence[str], of: int) -> Finding:
    """FAILS on any wrong answer, because each contradicts the promise by itself."""
    facts = {"answers": of, "wrong": len(wrong)}
    if not of:
        return Finding(Part.BEHAVIOUR, name, Status.DOES_NOT_APPLY, "nothing could be tested", facts)
    if not wrong:
        return Finding(Part.BEHAVIOUR, name, Status.HOLDS, f"in all of {of} answers", facts)
    summary = f"not in {len(wrong)} of {of} answers; the first {wrong[0]}"
    return Finding(Part.BEHAVIOUR, name, Status.FAILS, summary, {**facts, "first": wrong[0]})


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
