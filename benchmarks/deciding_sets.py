"""The prompt sets of `make bench-deciding`: six domains, none chosen by its speed.

| set | prompts | drawn |
|---|---|---|
| code | the held-out prompts that ship with the embedded models | greedy |
| repeat | the same texts, each followed by its own first lines, so that an answer can copy | greedy |
| prose | openings of old novels and a speech, far from the source code that the models were trained on | greedy |
| random | random token ids | greedy |
| hot | the held-out prompts again | temperature 1.5, with fresh seeds, as where nobody gives any |
| mix | one request of each of the five in turn, so that the domain changes every 64 tokens | as they are |
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from truedraft import SamplingParams

PROSE = Path(__file__).with_name("deciding_prose.txt")
DOMAINS = ("code", "repeat", "prose", "random", "hot")
MIX = "mix"
SETS = (*DOMAINS, MIX)
NEW_TOKENS = 64  # of each answer; what `mix` calls a domain lasts as long
REQUESTS = 32  # of each set
_PROMPT_TOKENS = 64  # of prose and random
_REPEATED_CHARACTERS = 80  # at least, in whole lines
_HOT = 1.5

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class SetRequest:
    domain: str
    prompt: tuple[int, ...]
    params: SamplingParams


def prompt_sets(heldout: Sequence[str], prose: str, encode: Encode, vocab_size: int) -> dict[str, list[SetRequest]]:
    """The six sets by name, of `REQUESTS` requests each."""
    texts = [heldout[number % len(heldout)] for number in range(REQUESTS)]
    code = [tuple(encode(text)) for text in texts]
    prompts = {
        "code": code,
        "repeat": [tuple(encode(repeated(text))) for text in texts],
        "prose": windows(encode(prose), REQUESTS),
        "random": [_random_ids(number, vocab_size) for number in range(REQUESTS)],
        "hot": code,
    }
    sets = {domain: [SetRequest(domain, prompt, params_of(domain)) for prompt in prompts[domain]] for domain in DOMAINS}
    return sets | {MIX: mixed(sets)}


def params_of(domain: str) -> SamplingParams:
    hot = domain == "hot"
    return SamplingParams(max_tokens=NEW_TOKENS, temperature=_HOT if hot else 0.0, ignore_eos=True)


def repeated(text: str) -> str:
    """A text followed by its own first lines.

    Worked example: "a\\nb\\nc\\n" with lines long enough becomes "a\\nb\\nc\\n" + "\\n" + "a\\n".
    """
    first = ""
    for line in text.splitlines(keepends=True):
        first += line
        if len(first) >= _REPEATED_CHARACTERS:
            break
    return text.rstrip("\n") + "\n\n" + first


def windows(ids: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """So many prompts of equal length, evenly over a text; they overlap where it is short."""
    last = len(ids) - _PROMPT_TOKENS
    starts = [number * last // max(count - 1, 1) for number in range(count)]
    return [tuple(ids[start : start + _PROMPT_TOKENS]) for start in starts]


def mixed(sets: dict[str, list[SetRequest]]) -> list[SetRequest]:
    return [sets[DOMAINS[number % len(DOMAINS)]][number // len(DOMAINS)] for number in range(REQUESTS)]


def groups_of(name: str, asked: Sequence[SetRequest], batch: int, *, few: bool = False) -> list[list[SetRequest]]:
    """What is answered together in one round: groups of `batch` requests, in the order of the set.

    At batch 1 eight of them (of `mix` ten, two of each domain), at 4 four (five), at more two.

    Args:
        name: of the set.
        asked: its requests.
        batch: requests of a group.
        few: five, three (five) and one, for models that need seconds for an answer.
    """
    most = ({1: 5, 4: 3} if few else {1: 8, 4: 4}).get(batch, 1 if few else 2)
    if name == MIX:
        most = ({1: 5, 4: 5} if few else {1: 10, 4: 5}).get(batch, most)
    found = [list(asked[first : first + batch]) for first in range(0, len(asked) - batch + 1, batch)]
    return found[:most]


def _random_ids(number: int, vocab_size: int) -> tuple[int, ...]:
    draw = random.Random(f"random prompt {number}")
    return tuple(draw.randrange(vocab_size) for _ in range(_PROMPT_TOKENS))
