"""A record of the noise that a whole answer takes: no number may serve two decisions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from truedraft.core.noise import KeyedNoise, Purpose, mix, open_unit
from truedraft.core.verdict import Origin
from truedraft.engine import Answer

FINALS = {Origin.RECOVERED: Purpose.RECOVERED, Origin.BONUS: Purpose.BONUS}


@dataclass(frozen=True)
class Read:
    """One look at a number between 0 and 1: for what, for which place of the text, in which step of the request."""

    purpose: Purpose
    place: int
    step: int
    index: int


@dataclass
class NoiseRecord:
    """What one answer took, by the numbers themselves: however keys are made, equal ones give equal numbers.

    Attributes:
        reads: by number, all looks at it; by chance two keys give one number with probability below 1e-6.
        places: by the key of a vocabulary's Gumbel noise, the places of the text it was taken for.
    """

    reads: dict[float, list[Read]] = field(default_factory=dict)
    places: dict[int, set[int]] = field(default_factory=dict)

    def check(self, answer: Answer, vocab: int) -> None:
        """Nothing was used twice, and each token that was not drafted came by a number of its own place."""
        twice = [reads for reads in self.reads.values() if len(reads) > 1]
        assert not twice, f"one number served several decisions: {twice[:3]}"
        # The noise of a place is shared by draft and target, in every step that comes by it, and by nothing else.
        shared = {key: places for key, places in self.places.items() if len(places) > 1}
        assert not shared, f"the noise of one place served others: {list(shared.values())[:3]}"
        assert len(self.places) == len(set().union(*self.places.values()))
        assert not self.reads.keys() & {open_unit(mix(key, token)) for key in self.places for token in range(vocab)}
        finals = sorted(
            (read.place, read.purpose)
            for several in self.reads.values()
            for read in several
            if read.purpose in FINALS.values() and read.index == 0  # a lossy rule's measurement takes others
        )
        if finals:  # typical acceptance goes on with the argmax, which takes none
            origins = enumerate(answer.origins, answer.prompt_tokens)
            assert finals == [(place, FINALS[origin]) for place, origin in origins if origin in FINALS]


@contextmanager
def recorded(patch: pytest.MonkeyPatch) -> Iterator[NoiseRecord]:
    """Record all noise that is taken within; one request at a time, as requests of one seed share it."""
    record = NoiseRecord()
    uniform, gumbel_key = KeyedNoise.uniform, KeyedNoise.gumbel_key

    def recording_uniform(noise: KeyedNoise, purpose: Purpose, depth: int, index: int = 0) -> float:
        number = uniform(noise, purpose, depth, index)
        read = Read(purpose, noise._position + depth, noise._step, index)
        record.reads.setdefault(number, []).append(read)
        return number

    def recording_key(noise: KeyedNoise, depth: int) -> int:
        key = gumbel_key(noise, depth)
        record.places.setdefault(key, set()).add(noise._position + depth)
        return key

    with patch.context() as within:
        within.setattr(KeyedNoise, "uniform", recording_uniform)
        within.setattr("truedraft.core.noise._FEW", 1 << 30)  # all are made one by one
        within.setattr(KeyedNoise, "gumbel_key", recording_key)
        yield record
