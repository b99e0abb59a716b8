"""What an engine is asked, and what came back: rounds of questions, counted, dropped answers kept in mind."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from truedraft.certify.checks import Deadline, Part
from truedraft.certify.sampling import beginnings
from truedraft.core.params import SamplingParams
from truedraft.errors import OptionError, PeerError
from truedraft.peers import Peer, Question, Reply

BEGINNING = 12
"""Tokens of a prompt that is asked many times."""
REPEATED_TOKENS = 4
STREAM_TOKENS = 48
TOKENS = 8000
"""Sampled tokens that are asked for, if no other number is wanted."""
REPEATED_PROMPTS = 3
GREEDY_PROMPTS, _GREEDY_TOKENS = 6, 32
_RIVALS = 2
"""Likeliest tokens that are asked for, so that one sees near ties."""
_STREAMS = 3
"""Least answers of a round that go on for long, beside those of repeated prompts, which are as many tokens together."""
_WHOLE = 4
_DROPPED = 0.5

Answered = tuple[Question, Reply]
Tell = Callable[[Part, float], None]


@dataclass
class AskedEngine:
    """An engine, asked.

    Args:
        peer: the engine.
        together: questions that are asked at once.
        seed: of the first question that is sent one; the next ones count up.
        sends_seeds: whether seeds are sent at all.
        vocab_size: of the model that judges; answers with other ids are of no use. None takes all.

    Attributes:
        tokens: of all answers so far.
        answers: so far.
        dropped: answers that could not be used, by reason.
        unsure: answers whose ids the engine did not tell itself, by reason.
    """

    peer: Peer
    together: int
    seed: int = 0
    sends_seeds: bool = True
    vocab_size: int | None = None
    tokens: int = 0
    answers: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    unsure: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._seeds = itertools.count(self.seed)

    def open(self, prompt: Sequence[int], params: SamplingParams, length: int, **more: object) -> Question:
        """The user's options for an answer of at most so many tokens, that stops at no text; with a seed of its own."""
        seed = next(self._seeds) if self.sends_seeds and not params.greedy else None
        plain = replace(params, seed=seed, max_tokens=length, stop=(), stop_token_ids=(), logprobs=None)
        return Question(tuple(prompt), replace(plain, **more))  # type: ignore[arg-type]

    def ask(self, questions: Sequence[Question]) -> list[Answered]:
        """Ask so many at once as are to be asked together; answers that could not be used are counted and left out.

        Raises:
            PeerError: most of what was asked so far could not be used.
        """
        found: list[Answered] = []
        for first in range(0, len(questions), self.together):
            asked = questions[first : first + self.together]
            for question, reply in zip(asked, self.peer.ask(asked), strict=True):
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
        """Why an answer cannot be judged; "" where it can."""
        most = max(reply.token_ids, default=0)
        if self.vocab_size is None or most < self.vocab_size:
            return ""
        return f"it answered token id {most}, and the model has {self.vocab_size}: its tokenizer is another one"


def refuse_unusable(peer: Peer, params: SamplingParams, sends_seeds: bool) -> None:
    """Refuse what cannot be asked.

    Raises:
        OptionError: options that the engine does not take.
    """
    if params.structured or params.bad_words:
        raise OptionError("an engine is certified without structured answers and bad words; leave them out")
    plain = replace(params, seed=params.seed if sends_seeds else None, stop=(), stop_token_ids=())
    refused = peer.refuses(plain)
    if refused:
        raise OptionError(f"{peer.facts.name} does not take {refused}; leave it out")


def greedy_answers(
    asked: AskedEngine, prompts: Sequence[Sequence[int]], params: SamplingParams, tokens: int, deadline: Deadline
) -> list[Answered]:
    """Greedy answers, with log-probabilities if the engine tells them; where greedy is what is certified, many."""
    cold = replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    many = max(GREEDY_PROMPTS, tokens // _GREEDY_TOKENS) if params.greedy else GREEDY_PROMPTS
    told = {"logprobs": _RIVALS} if asked.peer.facts.logprobs else {}
    questions = [asked.open(prompt, cold, _GREEDY_TOKENS, **told) for prompt in prompts[:many]]
    found: list[Answered] = []
    for first in range(0, len(questions), asked.together):
        if deadline.over and len(found) >= GREEDY_PROMPTS:
            break
        answered = asked.ask(questions[first : first + asked.together])
        if told and not first and not answered:  # there are servers that offer log-probabilities and refuse them
            asked.dropped.clear()
            questions = [Question(each.prompt, replace(each.params, logprobs=None)) for each in questions]
            answered = asked.ask(questions[: asked.together])
        found += answered
    return found


def groups(
    asked: AskedEngine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> Iterator[tuple[list[Question], bool]]:
    """Questions that are asked together, and whether their prompt is one that is asked many times; without an end."""
    turns = itertools.cycle(beginnings(prompts, 2 * BEGINNING, _WHOLE))
    several = max(_STREAMS, asked.together)
    for beginning in itertools.cycle([prompt[:BEGINNING] for prompt in prompts[:REPEATED_PROMPTS]]):
        repeats = several * STREAM_TOKENS // REPEATED_TOKENS
        for first in range(0, repeats, asked.together):
            count = min(asked.together, repeats - first)
            yield [asked.open(beginning, params, REPEATED_TOKENS) for _ in range(count)], True
        for first in range(0, several, asked.together):
            count = min(asked.together, several - first)
            yield [asked.open(next(turns), params, STREAM_TOKENS) for _ in range(count)], False
