"""Requests sent to an engine under test, the usable replies with counts of dropped ones, and the report."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from truedraft.certify.checks import Deadline, Finding, Part, Status
from truedraft.certify.e_process import ALARM, CERTAIN
from truedraft.certify.report import Report, option_words
from truedraft.certify.sampling import beginnings
from truedraft.core.params import SamplingParams
from truedraft.errors import OptionError, PeerError
from truedraft.measure.peers import Peer, PeerFacts, Question, Reply

BEGINNING = 12
"""Tokens of a prompt that is sent many times."""
REPEATED_TOKENS = 4
STREAM_TOKENS = 48
TOKENS = 8000
"""Default number of sampled tokens."""
REPEATED_PROMPTS = 3
GREEDY_PROMPTS, _GREEDY_TOKENS = 6, 32
_RIVALS = 2
"""Top log-probabilities requested per token, to see near ties."""
_STREAMS = 3
"""Minimum number of long answers per round; the repeated prompts get as many tokens."""
_WHOLE = 4
_DROPPED = 0.5

Answered = tuple[Question, Reply]
ReportProgress = Callable[[Part, float], None]


@dataclass
class EngineUnderTest:
    """An engine under test, with counts of its replies."""

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

    def open(self, prompt: Sequence[int], length: int, **more: object) -> Question:
        """A question with the user's options, up to `length` tokens, no stop texts and its own seed."""
        plain = replace(self.params, max_tokens=length, stop=(), stop_token_ids=(), logprobs=None)
        options = replace(plain, **more)  # type: ignore[arg-type]
        unseeded = self.params.seed is None or options.greedy
        return Question(tuple(prompt), replace(options, seed=None if unseeded else next(self._seeds)))

    def send(self, questions: Sequence[Question]) -> list[Answered]:
        """Send the questions in groups of `together`. Unusable answers are counted and left out.

        Raises:
            PeerError: most answers so far were unusable.
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

    def _unusable(self, reply: Reply) -> str:
        most = max(reply.token_ids, default=0)
        if self.vocab_size is None or most < self.vocab_size:
            return ""
        return f"it answered token id {most}, and the model has {self.vocab_size}: its tokenizer is another one"


def refuse_unusable(peer: Peer, params: SamplingParams) -> None:
    """Raise if the options cannot be certified on this engine.

    Raises:
        OptionError: options that the engine does not support.
    """
    if params.structured or params.bad_words:
        raise OptionError("an engine is certified without structured answers and bad words; leave them out")
    refused = peer.refuses(replace(params, stop=(), stop_token_ids=()))
    if refused:
        raise OptionError(f"{peer.facts.name} does not take {refused}; leave it out")


def greedy_answers(engine: EngineUnderTest, tokens: int, deadline: Deadline) -> list[Answered]:
    """Greedy answers, with log-probabilities if the engine returns them; many if the user's options are greedy."""
    cold = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    many = max(GREEDY_PROMPTS, tokens // _GREEDY_TOKENS) if engine.params.greedy else GREEDY_PROMPTS
    extra = {"logprobs": _RIVALS} if engine.peer.facts.logprobs else {}
    questions = [engine.open(prompt, _GREEDY_TOKENS, **cold, **extra) for prompt in engine.prompts[:many]]
    found: list[Answered] = []
    for first in range(0, len(questions), engine.together):
        if deadline.over and len(found) >= GREEDY_PROMPTS:
            break
        answered = engine.send(questions[first : first + engine.together])
        if extra and not first and not answered:  # some servers offer log-probabilities and then reject them
            engine.dropped.clear()
            questions = [Question(each.prompt, replace(each.params, logprobs=None)) for each in questions]
            answered = engine.send(questions[: engine.together])
        found += answered
    return found


def groups(engine: EngineUnderTest) -> Iterator[tuple[list[Question], bool]]:
    """Endless groups of questions to send together, each with whether its prompt is one that is repeated."""
    streams = itertools.cycle(beginnings(engine.prompts, 2 * BEGINNING, _WHOLE))
    several = max(_STREAMS, engine.together)
    for beginning in itertools.cycle([prompt[:BEGINNING] for prompt in engine.prompts[:REPEATED_PROMPTS]]):
        repeats = several * STREAM_TOKENS // REPEATED_TOKENS
        for first in range(0, repeats, engine.together):
            count = min(engine.together, repeats - first)
            yield [engine.open(beginning, REPEATED_TOKENS) for _ in range(count)], True
        for first in range(0, several, engine.together):
            count = min(engine.together, several - first)
            yield [engine.open(next(streams), STREAM_TOKENS) for _ in range(count)], False


# ---------------------------------------------------------------------------------------- report


def engine_report(
    findings: Sequence[Finding], engines: Sequence[EngineUnderTest], seconds: float, **more: Any
) -> Report:
    """The report on an engine, with its findings in order; the second is one that it was compared with."""
    engine, params, together = engines[0].peer.facts, engines[0].params, engines[0].together
    tokens = sum(each.tokens for each in engines)
    dropped, unsure = (sum((getattr(each, name) for each in engines), Counter[str]()) for name in ("dropped", "unsure"))
    options = [f"{engine.name} {engine.version}".strip(), *option_words(params)]
    facts = {
        "engine": facts_of(engine) | {"filters": list(engine.filters)},
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


def facts_of(engine: PeerFacts) -> dict[str, Any]:
    """Name, version and further facts of an engine, for the record."""
    return {"name": engine.name, "version": engine.version, **engine.more}


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
