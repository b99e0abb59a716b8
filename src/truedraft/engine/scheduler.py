"""Which requests take part in the next step, and how many tokens of which prompts it reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean

import torch

from truedraft.core import transfers
from truedraft.core.stats import StepRecord
from truedraft.drafters.base import Features
from truedraft.engine.batch import Batch, StepItem
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
_READING = 6.0
"""Seconds of reading prompts, on a CPU, per second of decoding meanwhile: a first token takes 7/6 of the time."""
_BETWEEN = 20
"""Steps that decode between two stretches of reading: 19 of 20 intervals between tokens are as usual."""
_LONGEST_STRETCH_S = 3.0
"""Bound of a stretch where decoding is slow, which makes pauses shorter but more than one interval in 20 long."""


class Scheduler:
    """Requests join and leave between steps; first come, first served."""

    def __init__(self, max_batch: int, reading: PromptReading) -> None:
        self.max_batch = max_batch
        self.reading = reading
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def admit(self, fits: Callable[[Sequence[Request], Request], bool]) -> list[Request]:
        admitted: list[Request] = []
        while self.waiting and len(self.running) < self.max_batch and fits(self.running, self.waiting[0]):
            request = self.waiting.popleft()
            self.running.append(request)
            admitted.append(request)
        return admitted

    def next(self) -> Batch:
        ready = [each for each in self.running if each.awaits is None and each.finish_reason is None]
        reading = [request for request in ready if not request.decodes]
        parts = self.reading.parts(reading, len(reading) < len(ready)) if reading else ()
        fed = dict(zip(reading, parts, strict=True))
        decoded = 0 if reading and self.reading.alone else 1
        return Batch([StepItem(request, tokens) for request in ready if (tokens := fed.get(request, decoded))])

    def put_back(self, request: Request) -> None:
        self.running.remove(request)
        self.waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running


def reading_on(device: torch.device, features: Features | None) -> PromptReading:
    """The policy of reading prompts on a device."""
    if not transfers.waits(device):
        return FixedParts()
    return TimedParts(MOST_SHOWN if features is not None and features.of_prompts else MOST_TOKENS)


class PromptReading(ABC):
    """Distributes the prompt tokens of a step among the requests in prefill.

    Attributes:
        alone: whether the step of the last `parts` decodes nothing.
    """

    alone = False

    @abstractmethod
    def parts(self, reading: Sequence[Request], decoding: bool) -> list[int]:
        """Tokens that each of these reads in the next step, in which others may be `decoding`; 0 to wait."""

    def observe(self, record: StepRecord) -> None:  # noqa: B027 - optional
        """Learn from a step."""

    def read_less(self, tokens: int) -> bool:
        """After a step that read `tokens` prompt tokens ran out of memory; returns whether later steps read fewer."""
        return False


class FixedParts(PromptReading):
    """A fixed number of tokens per step, for CPUs: parts end at multiples of their size, so that their rows have the
    same bits whatever else is read. At most `most` tokens, of the first prompt and of those with the least left.

    While answers are being decoded, at most two parts, and reading alternates with decoding: stretches of reading, in
    which only steps that end a prompt decode as well, take six times as long as the decoding between them.
    """

    def __init__(self, part: int = PIECE, most: int = 1024) -> None:
        self._part, self._most = part, most
        self._beside = False  # whether others decode while the last parts are read
        self._ahead = 0.0  # seconds of reading beside others, less those that decoding has earned
        self._decode_s = 0.0  # of the last step that only decoded
        self._waits = False  # until decoding has caught up

    def parts(self, reading: Sequence[Request], decoding: bool) -> list[int]:
        self._beside = decoding
        if not decoding:
            self._ahead, self._waits = 0.0, False
        if self._waits:
            self.alone = False
            return [0] * len(reading)
        most = 2 * self._part if decoding else self._most
        fed, total = dict.fromkeys(reading, 0), 0
        for request in (reading[0], *sorted(reading[1:], key=lambda each: each.uncomputed)):
            own = _whole(request) or min(request.uncomputed, self._part - request.computed % self._part)
            if not total or total + own <= most:
                fed[request] = own
                total += own
        self.alone = decoding and all(tokens < request.uncomputed for request, tokens in fed.items())
        return list(fed.values())

    def observe(self, record: StepRecord) -> None:
        if record.prefill:
            self._ahead += record.total_s * self._beside
            longest = min(_READING * _BETWEEN * self._decode_s, _LONGEST_STRETCH_S)
            self._waits = self._beside and self._ahead >= longest
        else:
            self._decode_s = record.total_s
            self._ahead = max(0.0, self._ahead - _READING * record.total_s)
            self._waits = self._waits and self._ahead > 0.0


class TimedParts(PromptReading):
    """As many tokens per step as a bound on its seconds allows, for devices, which read thousands as fast as hundreds.

    The number is a power of two: a step that exceeds the bound halves it; it doubles if twice the seconds are within
    the bound, and after 64 steps. Steps that also decode have their own number and a tighter bound. A part that is not
    the last of its prompt counts for the next step that is waited for.

    Half of a step's tokens are for the oldest prompt, so that none starves, the other half for those with the least
    left to read. Parts end with their prompts or at multiples of 256 tokens.

    Args:
        most: limit of a step's tokens, for memory; a power of two from 256 on.
    """

    def __init__(self, most: int = MOST_TOKENS) -> None:
        self._most = most
        self._sizes = {decoding: min(_START, most) for decoding in (False, True)}
        self._unchanged = {False: 0, True: 0}  # steps timed since the last change
        self._queued: list[tuple[int, float, bool]] = []  # tokens, seconds and whether settled, since the host waited

    def tokens(self, decoding: bool) -> int:
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
            self._queued = []  # it is unknown how much of it this step waited for
            return
        self._queued.append((tokens, record.total_s, record.settled))
        if not any(not each.prefill or each.emitted or each.stop_tokens for each in record.requests):
            return
        queued, self._queued = self._queued, []
        if all(settled for *_, settled in queued):
            decoding = any(not each.prefill for each in record.requests)
            self._learn(decoding, fmean(tokens for tokens, *_ in queued), fmean(seconds for _, seconds, _ in queued))

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


def _whole(request: Request) -> int:
    return request.prompt_tokens if request.inputs is not None and not request.computed else 0


def _part(request: Request, room: int) -> int:
    """The rest of a prompt, or up to the last multiple of 256 within `room`; with logprobs 256, as all logits are in
    memory. Of 1,000 tokens with 100 computed, room for 900 takes the rest, 700 takes 668 (up to 768), 100 none.
    """
    if request.params.prompt_logprobs is not None:
        room = min(room, PIECE)
    left = _whole(request) or request.uncomputed
    if left <= room:
        return left
    return 0 if _whole(request) else max(0, room - (request.computed + room) % PIECE)
