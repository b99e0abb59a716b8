"""How many prompt tokens a step reads, and of which requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from truedraft.core import transfers
from truedraft.core.stats import StepRecord
from truedraft.drafters.base import Features
from truedraft.engine.request import Request
from truedraft.models.cache.family import PIECE

MOST_TOKENS = 8192
"""Limit of prompt tokens that a step reads on a device. A layer's activations for all of them are in memory: 470 MB
for an MLP of 14,336 channels in bfloat16."""
MOST_SHOWN = 2048
"""The limit if a drafter reads the logits of all of them: 500 MB at 128,000 ids in bfloat16."""
LONGEST_S = 0.4
"""Bound of seconds for a step that reads prompts while no answer is being decoded."""
LONGEST_DECODING_S = 0.1
"""The bound while others are being decoded; their next token may take as long."""
_START = 2048  # tokens, until steps have been timed
_RETRY = 64  # timed steps after which more tokens are tried


def reading_on(device: torch.device, features: Features | None) -> PromptReading:
    """The policy of reading prompts on a device."""
    if not transfers.waits(device):
        return FixedParts()
    return TimedParts(MOST_SHOWN if features is not None and features.of_prompts else MOST_TOKENS)


class PromptReading(ABC):
    """Distributes the prompt tokens of a step among the requests in prefill."""

    @abstractmethod
    def parts(self, reading: Sequence[Request], decoding: bool) -> list[int]:
        """Tokens that each of these reads in the next step; 0 to wait.

        Args:
            decoding: whether other requests decode in the same step.
        """

    @abstractmethod
    def observe(self, record: StepRecord) -> None:
        """Learn from a step."""

    @abstractmethod
    def read_less(self, tokens: int) -> bool:
        """After a step that read `tokens` prompt tokens ran out of memory; returns whether later steps read fewer."""


class FixedParts(PromptReading):
    """A fixed number of tokens per step, for CPUs: the rows of a part have the same bits whatever else is read.

    While answers are being decoded, no step reads more than one part, so that they are not delayed. Parts end at
    multiples of their size, whatever was copied before them.

    Args:
        part: most tokens of one prompt in one step.
        most: of all prompts together, while no answer is being decoded.
    """

    def __init__(self, part: int = PIECE, most: int = 1024) -> None:
        self._part, self._most = part, most

    def parts(self, reading: Sequence[Request], decoding: bool) -> list[int]:
        most = self._part if decoding else self._most
        fed: list[int] = []
        total = 0
        for request in reading:
            own = _whole(request) or min(request.uncomputed, self._part - request.computed % self._part)
            fed.append(own if not total or total + own <= most else 0)
            total += fed[-1]
        return fed

    def observe(self, record: StepRecord) -> None:
        pass

    def read_less(self, tokens: int) -> bool:
        return False


class TimedParts(PromptReading):
    """As many tokens per step as a bound on its seconds allows, for devices, which read thousands as fast as hundreds.

    The number is a power of two. A step that exceeds the bound halves it. It doubles if twice the seconds are within
    the bound, and after 64 steps in any case, because something else may have been slow. Steps that also decode have
    their own number and a tighter bound. Only steps for which the host waited show the time of reading: after a part
    that is not the last of its prompt nothing is drawn, so it is only queued and counts for the next step that is
    waited for.

    Half of a step's tokens are for the oldest prompt, so that none starves. The other half is for the prompts with the
    least left to read, so that a long prompt does not delay short ones. What one half leaves the other takes. Parts end
    with their prompts or at multiples of 256 tokens.

    Args:
        most: limit of a step's tokens, for memory; a power of two from 256 on.
    """

    def __init__(self, most: int = MOST_TOKENS) -> None:
        self._most = most
        self._sizes = {decoding: min(_START, most) for decoding in (False, True)}
        self._unchanged = {False: 0, True: 0}  # steps timed since the last change
        self._queued = _Queued()

    def tokens(self, decoding: bool) -> int:
        """Most prompt tokens of the next step."""
        return self._sizes[decoding]

    def parts(self, reading: Sequence[Request], decoding: bool) -> list[int]:
        most = self.tokens(decoding)
        first, *others = reading
        kept = _whole(first) or _part(first, max(PIECE, most // 2))
        fed, left = dict.fromkeys(reading, 0), most - kept
        for request in sorted(others, key=lambda each: each.uncomputed):
            fed[request] = _part(request, left)
            left -= fed[request]
        fed[first] = _whole(first) or _part(first, kept + left)
        return list(fed.values())

    def observe(self, record: StepRecord) -> None:
        tokens = sum(each.rows for each in record.requests if each.prefill)
        if not tokens:
            self._queued = _Queued()  # it is unknown how much of it this step waited for
            return
        queued = self._queued
        queued.add(tokens, record)
        if not any(not each.prefill or each.emitted or each.stop_tokens for each in record.requests):
            return
        self._queued = _Queued()
        if queued.settled:
            decoding = any(not each.prefill for each in record.requests)
            self._learn(decoding, queued.tokens / queued.steps, queued.seconds / queued.steps)

    def _learn(self, decoding: bool, tokens: float, seconds: float) -> None:
        size, longest = self._sizes[decoding], LONGEST_DECODING_S if decoding else LONGEST_S
        if seconds > longest:
            self._resize(decoding, size // 2)
        elif 2 * tokens > size:  # smaller steps say little about it
            self._unchanged[decoding] += 1
            if 2 * seconds * size / tokens <= longest or self._unchanged[decoding] >= _RETRY:
                self._resize(decoding, 2 * size)

    def _resize(self, decoding: bool, size: int) -> None:
        self._sizes[decoding] = max(PIECE, min(size, self._most))
        self._unchanged[decoding] = 0

    def read_less(self, tokens: int) -> bool:
        fewer = 1 << (tokens - 1).bit_length() - 1  # the last power of two below
        if not PIECE <= fewer < self._most:
            return False  # as after a prompt with images, which is read in one step
        self._most = fewer
        for decoding, size in self._sizes.items():
            self._resize(decoding, size)
        return True


class _Queued:
    """Steps since the host last waited."""

    def __init__(self) -> None:
        self.steps = self.tokens = 0
        self.seconds = 0.0
        self.settled = True

    def add(self, tokens: int, record: StepRecord) -> None:
        self.steps += 1
        self.tokens += tokens
        self.seconds += record.total_s
        self.settled = self.settled and record.settled


def _whole(request: Request) -> int:
    """All tokens of a prompt with inputs such as images, which is read in one step; 0 for others."""
    return request.prompt_tokens if request.inputs is not None and not request.computed else 0


def _part(request: Request, room: int) -> int:
    """Tokens of a prompt's next part: all that is left, or up to the last multiple of 256 within `room` tokens.

    A prompt with logprobs is read in parts of 256, because the logits of all its tokens are in memory then.

    Worked example: of a prompt of 1,000 tokens 100 are computed. Room for 900 takes the rest, room for 700 takes 668 of
    them (up to 768), and room for 100 none.
    """
    if request.params.prompt_logprobs is not None:
        room = min(room, PIECE)
    left = _whole(request) or request.uncomputed
    if left <= room:
        return left
    return 0 if _whole(request) else max(0, room - (request.computed + room) % PIECE)
