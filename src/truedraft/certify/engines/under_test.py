"""Requests sent to an engine under test, the usable replies with counts of dropped ones, and the report.

Also its behaviour other than its distribution: lengths, stop texts, ends of text, seeds, log-probabilities.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from truedraft.certify.checks import Deadline, Finding, Part, Status
from truedraft.certify.e_process import ALARM, CERTAIN
from truedraft.certify.engines.answer_probs import Allowance, Judge, unknown_end
from truedraft.certify.report import Report, option_words
from truedraft.certify.sampling import beginnings
from truedraft.core.params import SamplingParams
from truedraft.errors import OptionError, PeerError
from truedraft.measure.peers import Peer, Question, Reply
from truedraft.models.base import LanguageModel
from truedraft.text import REPLACEMENT, Tokenizer

BEGINNING = 12  # tokens of a prompt that is sent many times
REPEATED_TOKENS = 4
STREAM_TOKENS = 48
TOKENS = 8000  # default number of sampled tokens
REPEATED_PROMPTS = 3
_GREEDY_PROMPTS, _GREEDY_TOKENS = 6, 32
_RIVALS = 2  # top log-probabilities requested per token, to see near ties
_STREAMS = 3  # minimum number of long answers per round; the repeated prompts get as many tokens
_WHOLE = 4
_DROPPED = 0.5

Answered = tuple[Question, Reply]
ReportProgress = Callable[[Part, float], None]


@dataclass
class EngineUnderTest:
    """An engine under test, with counts of its replies.

    Raises OptionError for options that the engine does not take, or that cannot be certified on engines.
    """

    peer: Peer
    prompts: Sequence[Sequence[int]]
    params: SamplingParams  # requests get consecutive seeds from `params.seed` on; None sends none
    together: int  # requests per call
    vocab_size: int | None = None  # answers with larger ids are dropped; None accepts all
    tokens: int = 0
    answers: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # unusable answers, by reason
    unsure: Counter[str] = field(default_factory=Counter)  # ids not returned by the engine, by reason

    def __post_init__(self) -> None:
        self._seeds = itertools.count(self.params.seed or 0)
        if self.params.structured or self.params.bad_words:
            raise OptionError("an engine is certified without structured answers and bad words; leave them out")
        refused = self.peer.refuses(replace(self.params, stop=(), stop_token_ids=()))
        if refused:
            raise OptionError(f"{self.peer.facts.name} does not take {refused}; leave it out")

    @property
    def facts(self) -> dict[str, Any]:
        """Name, version and further facts of the engine, for the record."""
        return {"name": self.peer.facts.name, "version": self.peer.facts.version, **self.peer.facts.more}

    def open(self, prompt: Sequence[int], length: int, **more: object) -> Question:
        """A question with the user's options, up to `length` tokens, no stop texts and its own seed."""
        plain = replace(self.params, max_tokens=length, stop=(), stop_token_ids=(), logprobs=None)
        options = replace(plain, **more)  # type: ignore[arg-type]
        unseeded = self.params.seed is None or options.greedy
        return Question(tuple(prompt), replace(options, seed=None if unseeded else next(self._seeds)))

    def send(self, questions: Sequence[Question]) -> list[Answered]:
        """Send the questions in groups of `together`. Unusable answers are counted and left out.

        Raises PeerError if most answers so far were of no use.
        """
        found: list[Answered] = []
        for first in range(0, len(questions), self.together):
            batch = questions[first : first + self.together]
            for question, reply in zip(batch, self.peer.ask(batch), strict=True):
                refused = str(reply) if isinstance(reply, PeerError) else self._unusable(reply)
                if isinstance(reply, PeerError) or refused:
                    self.dropped[refused] += 1
                    continue
                found.append((question, reply))
                self.answers += 1
                self.tokens += len(reply.token_ids)
                self.unsure[reply.unsure] += bool(reply.unsure)
            if sum(self.dropped.values()) > max(self.together, _DROPPED * self.answers):
                reason, count = self.dropped.most_common(1)[0]
                raise PeerError(
                    f"{count} of {self.answers + sum(self.dropped.values())} answers were of no use: {reason}"
                )
        return found

    def greedy_answers(self, tokens: int, deadline: Deadline) -> list[Answered]:
        """Greedy answers, with log-probabilities if the engine returns them; many if the user's options are greedy."""
        cold = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        many = max(_GREEDY_PROMPTS, tokens // _GREEDY_TOKENS) if self.params.greedy else _GREEDY_PROMPTS
        extra = {"logprobs": _RIVALS} if self.peer.facts.logprobs else {}
        questions = [self.open(prompt, _GREEDY_TOKENS, **cold, **extra) for prompt in self.prompts[:many]]
        found: list[Answered] = []
        for first in range(0, len(questions), self.together):
            if deadline.over and len(found) >= _GREEDY_PROMPTS:
                break
            answered = self.send(questions[first : first + self.together])
            if extra and not first and not answered:  # some servers offer log-probabilities and then reject them
                self.dropped.clear()
                questions = [Question(each.prompt, replace(each.params, logprobs=None)) for each in questions]
                answered = self.send(questions[: self.together])
            found += answered
        return found

    def groups(self) -> Iterator[tuple[list[Question], bool]]:
        """Endless groups of questions to send together, each with whether its prompt is one that is repeated."""
        streams = itertools.cycle(beginnings(self.prompts, 2 * BEGINNING, _WHOLE))
        several = max(_STREAMS, self.together)
        for beginning in itertools.cycle([prompt[:BEGINNING] for prompt in self.prompts[:REPEATED_PROMPTS]]):
            repeats = several * STREAM_TOKENS // REPEATED_TOKENS
            again = itertools.repeat(beginning)
            for prompts, count, length in ((again, repeats, REPEATED_TOKENS), (streams, several, STREAM_TOKENS)):
                for first in range(0, count, self.together):
                    some = itertools.islice(prompts, min(self.together, count - first))
                    yield [self.open(prompt, length) for prompt in some], prompts is again

    def stop_questions(self, tokenizer: Tokenizer, greedy: Sequence[Answered]) -> list[Question]:
        """The greedy questions again, each with a stop text from the middle of its first answer."""
        found = []
        for question, reply in greedy[:_GREEDY_PROMPTS]:
            for place in _STOP_PLACES:
                text = tokenizer.decode(reply.token_ids)
                stop = tokenizer.decode(reply.token_ids[place : place + 1])
                # Half a character is in no text, so no engine can search for it.
                usable = stop.strip() and stop in text and REPLACEMENT not in stop
                if place < len(reply.token_ids) and usable and "stop" in self.peer.facts.takes:
                    params = replace(question.params, stop=(stop,), max_tokens=_STOP_TOKENS)
                    found.append(Question(question.prompt, params))
                    break
        return found

    def check_seeds(self) -> list[Finding]:
        """Whether a seed reproduces its answer, also in a batch. Only measured, because few engines promise it."""
        if self.params.greedy or "seed" not in self.peer.facts.takes or self.params.seed is None:
            return []
        questions = [self.open(prompt, _SEED_TOKENS) for prompt in self.prompts[:_SEED_PROMPTS]]
        # Separate counts, so that failures here are not outweighed by earlier answers.
        single, company = (
            EngineUnderTest(self.peer, self.prompts, self.params, together, self.vocab_size)
            for together in (1, self.together + 1)
        )
        once, again = single.send(questions), single.send(questions)
        others = [self.open(prompt, _SEED_TOKENS) for prompt in self.prompts[-max(1, self.together - 1) :]]
        batched = [pair for question in questions for pair in company.send([question, *others[: self.together]])]
        for each in (single, company):
            self.tokens, self.answers = self.tokens + each.tokens, self.answers + each.answers
            self.dropped += each.dropped
        return [
            _alike("the same seed, the same answer", once, again),
            _alike("the same seed with other requests, the same answer", once, batched),
        ]

    def _unusable(self, reply: Reply) -> str:
        most = max(reply.token_ids, default=0)
        if self.vocab_size is None or most < self.vocab_size:
            return ""
        return f"it answered token id {most}, and the model has {self.vocab_size}: its tokenizer is another one"


def engine_report(
    findings: Sequence[Finding], engines: Sequence[EngineUnderTest], seconds: float, **more: Any
) -> Report:
    """The report on an engine, with its findings in order; the second is one that it was compared with."""
    engine, params, together = engines[0].peer.facts, engines[0].params, engines[0].together
    tokens = sum(each.tokens for each in engines)
    dropped, unsure = (sum((getattr(each, name) for each in engines), Counter[str]()) for name in ("dropped", "unsure"))
    options = [f"{engine.name} {engine.version}".strip(), *option_words(params)]
    facts = {
        "engine": engines[0].facts | {"filters": list(engine.filters)},
        "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k, "min_p": params.min_p,
        "together": together, "tokens": tokens, "dropped": dict(dropped), "unsure": dict(+unsure), **more,
    }  # fmt: skip
    return Report(
        "Certificate of an engine",
        findings,
        ", ".join([*options, f"{together} together", f"{tokens:,} tokens"]),
        _notes(findings, dropped.total(), unsure.total()),
        facts,
        seconds=seconds,
    )


def _notes(findings: Sequence[Finding], dropped: int, unsure: int) -> list[str]:
    notes = [
        f"A sound engine reaches evidence of {ALARM:g} in any one check with probability {1.0 / ALARM:g} at most, "
        "at any stopping time; each line says what would have been found.",
        "It holds for these options, this version and these prompts, as far as was tested here.",
    ]
    if any(finding.status is Status.FAILS for finding in findings):
        again = "and comes back in another run, with other seeds"
        notes.insert(1, f"Call it a fault where the evidence reaches {CERTAIN:g} {again}.")
    if any(finding.status is Status.NOT_ENOUGH for finding in findings):
        notes.append("Where the evidence is not enough, give more --minutes or --tokens.")
    if dropped or unsure:
        notes.append(
            f"{dropped} answers were dropped, which evidence paid for, and the token ids of {unsure} read from their "
            "text, by which nothing is called a fault."
        )
    return notes


_STOP_TOKENS = 24
_STOP_PLACES = (3, 6, 10)
"""Token positions at which a stop text begins; some are inside blocks that speculation accepts as a whole."""
_SEED_TOKENS = 24
_SEED_PROMPTS = 3
_SHOWN = 60


def check_lengths(answered: Sequence[Answered], target: LanguageModel) -> list[Finding]:
    """Check that no answer exceeds `max_tokens`, continues after an end of text, or ends early without a reason."""
    long, trailing, short = [], [], []
    ends, unknown = set(target.eos_token_ids), Counter[int]()
    # An engine's context may be shorter than the model's: answers end where it is full.
    full = max((len(question.prompt) + len(reply.token_ids) for question, reply in answered), default=0)
    for question, reply in answered:
        count, most = len(reply.token_ids), question.params.max_tokens
        cut = reply.finish_reason == "length" and len(question.prompt) + count < full
        if count > most and not reply.unsure:
            long.append(f"{count} tokens where {most} were requested")
        if any(token in ends for token in reply.token_ids[:-1]) and not question.params.ignore_eos:
            trailing.append("tokens after an end of text")
        if count < most and cut and not reply.unsure:
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


def check_stops(
    answered: Sequence[Answered], greedy: Sequence[Answered], tokenizer: Tokenizer, judge: Judge
) -> Finding:  # fmt: skip
    """Check that answers end at their stop text, as far as they agree with the `greedy` ones without it."""
    whole = {question.prompt: tokenizer.decode(reply.token_ids) for question, reply in greedy}
    wrong: list[str] = []
    for question, reply in answered:
        text = reply.text if reply.text is not None else tokenizer.decode(reply.token_ids)
        stop = question.params.stop[0]
        cut, found, _ = whole[question.prompt].partition(stop)
        early = bool(found) and len(text) < len(cut) and cut.startswith(text)
        if stop in text:
            wrong.append(f"continued past {stop!r}: {_shown(text)}")
        elif early and reply.finish_reason == "stop" and not _may_end(judge, question, reply):
            wrong.append(f"ended before {stop!r}, with {_shown(text)} of {_shown(cut)}")
    return _counted("answers end at their stop text", wrong, len(answered))


def _may_end(judge: Judge, question: Question, reply: Reply) -> bool:
    plain = replace(question.params, stop=(), max_tokens=len(reply.token_ids) + 1)
    answer = next(iter(judge.answer_probs([(Question(question.prompt, plain), reply)])), None)
    return answer is not None and len(answer.tokens) > len(reply.token_ids) and not bool(answer.outside[-1])


def _alike(name: str, one: Sequence[Answered], other: Sequence[Answered]) -> Finding:
    others = {(question.prompt, question.params.seed): reply for question, reply in other}  # some may be dropped
    pairs = [(reply, others[key]) for each, reply in one if (key := (each.prompt, each.params.seed)) in others]
    same = sum(a.token_ids == b.token_ids for a, b in pairs)
    status = Status.HOLDS if pairs and same == len(pairs) else Status.MEASURED
    facts = {"answers": len(pairs), "same": same}
    return Finding(Part.BEHAVIOUR, name, status, f"{same} of {len(pairs)} answers are the same", facts)


def check_logprobs(differences: Tensor | None, allowance: Allowance, judged: bool) -> Finding:
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
