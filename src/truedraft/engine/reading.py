"""How much of prompts a step reads, and whose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from truedraft.core import transfers
from truedraft.core.stats import StepRecord
from truedraft.drafters.base import Features
from truedraft.engine.request import Request
from truedraft.models.cache.carried import PIECE

MOST_TOKENS = 8192
"""Of prompts that a step reads on a device. What a layer computes for them is in memory together: 470 MB of an MLP of
14,336 channels in bfloat16."""
MOST_SHOWN = 2048
"""Likewise where a drafter sees the logits of all of them: 500 MB at 128,000 ids in bfloat16."""
LONGEST_S = 0.4
"""That a step may take which reads prompts, while no answer is being written."""
LONGEST_DECODING_S = 0.1
"""Likewise, while others are: so long may the next token of each of these take."""
_START = 2048  # tokens, until steps were timed
_RETRY = 64  # timed steps after which more is tried


def reading_on(device: torch.device, features: Features | None) -> PromptReading:
    """How prompts are read there.

    Args:
        device: of the target.
        features: that drafters want to see of its forwards.
    """
    if not transfers.waits(device):
        return FixedParts()
    return TimedParts(MOST_SHOWN if features is not None and features.of_prompts else MOST_TOKENS)


class PromptReading(ABC):
    """Shares the tokens of prompts that a step reads out among the requests whose prompts are not computed yet."""

    @abstractmethod
    def parts(self, reading: Sequence[Request], decoding: bool) -> list[int]:
        """Tokens that each of these reads in the next step; 0 where it waits.

        Args:
            reading: requests, at least one, in the order in which they came.
            decoding: whether answers of others are being written in the same step.
        """

    @abstractmethod
    def observe(self, record: StepRecord) -> None:
        """Learn from a step."""

    @abstractmethod
    def read_less(self, tokens: int) -> bool:
        """A step that read so many tokens of prompts lacked memory; returns whether later ones read fewer."""


class FixedParts(PromptReading):
    """A fixed number of tokens a step, for processors: rows of a part have the same bits whoever else is read.

    While answers are being written, no step reads more than one part, so that they go on. Parts end at multiples of
    their size, whatever was copied before them.

    Args:
        part: most tokens of one prompt in one step.
        most: of all prompts together, while no answer is being written.
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
    """As many tokens a step as a bound on its seconds allows, for devices, which read thousands as fast as hundreds.

    The number is a power of two. A step that took longer than the bound halves it; it doubles where twice the seconds
    are within the bound, and after 64 steps in any case, as what was slow may have been something else. It is known
    apart for steps beside answers that are being written, whose bound is tighter. Only steps for which the host waited
    tell what reading takes: behind parts that are not the last of their prompts nothing is drawn, so they are only
    queued, and count for the next step that is waited for.

    Half of a step's tokens are for the prompt that came first, so that none waits for ever; the other half goes to
    those that have the least left to read, so that a long prompt holds no short ones up. What one half leaves the other
    takes. Parts end with their prompts or at multiples of 256 tokens.

    Args:
        most: tokens that no step exceeds, for memory; a power of two from 256 on.
    """

    def __init__(self, most: int = MOST_TOKENS) -> None:
        self._most = most
        self._sizes = {decoding: min(_START, most) for decoding in (False, True)}
        self._unchanged = {False: 0, True: 0}  # steps that were timed since
        self._queued = _Queued()

    def tokens(self, decoding: bool) -> int:
        """Of prompts that the next step reads at most."""
        return self._sizes[decoding]

    def parts(self, reading: Sequence[Request], decoding: bool) -> list[int]:
        most = self.tokens(decoding)
        first, *behind = reading
        kept = _whole(first) or _part(first, max(PIECE, most // 2))
        fed, left = dict.fromkeys(reading, 0), most - kept
        for request in sorted(behind, key=lambda each: each.uncomputed):
            fed[request] = _part(request, left)
            left -= fed[request]
        fed[first] = _whole(first) or _part(first, kept + left)
        return list(fed.values())

    def observe(self, record: StepRecord) -> None:
        tokens = sum(each.rows for each in record.requests if each.prefill)
        if not tokens:
            self._queued = _Queued()  # nobody knows what of it this step waited for
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
        """A step that read so many tokens took so long."""
        size, longest = self._sizes[decoding], LONGEST_DECODING_S if decoding else LONGEST_S
        if seconds > longest:
            self._resize(decoding, size // 2)
        elif 2 * tokens > size:  # smaller ones say little of it
            self._unchanged[decoding] += 1
            if 2 * seconds * size / tokens <= longest or self._unchanged[decoding] >= _RETRY:
                self._resize(decoding, 2 * size)

    def _resize(self, decoding: bool, size: int) -> None:
        self._sizes[decoding] = max(PIECE, min(size, self._most))
        self._unchanged[decoding] = 0

    def read_less(self, tokens: int) -> bool:
        fewer = 1 << (tokens - 1).bit_length() - 1  # the last power of two below
        if not PIECE <= fewer < self._most:
            return False  # as of a prompt with images, which is read at once
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
    """All tokens of a prompt that is read at once: what images gave a token is known only then. 0 for others."""
    return request.prompt_tokens if request.inputs is not None and not request.computed else 0


def _part(request: Request, room: int) -> int:
    """Tokens of a prompt's next part: what is left of it, or up to the last multiple of 256 within `room` tokens.

    A prompt whose logprobs are asked is read in parts of 256, for the logits of all of them are in memory then.

    Worked example: of a prompt of 1,000 tokens 100 are computed. Room for 900 takes the rest, room for 700 takes 668 of
    them (up to 768), and room for 100 none.
    """
    if request.params.prompt_logprobs is not None:
        room = min(room, PIECE)
    left = _whole(request) or request.uncomputed
    if left <= room:
        return left
    return 0 if _whole(request) else max(0, room - (request.computed + room) % PIECE)
