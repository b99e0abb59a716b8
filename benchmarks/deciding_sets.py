"""The prompts of `make bench-deciding`.

| set | prompts | drawn |
|---|---|---|
| code | the held-out prompts that ship with the embedded models | greedy |
| repeat | the same texts, each followed by its own first lines, so that an answer can copy | greedy |
| prose | openings of old novels and a speech, far from the source code that the models were trained on | greedy |
| random | random token ids | greedy |
| hot | the held-out prompts again | temperature 1.5, with fresh seeds, as where nobody gives any |
| mix | one request of each of the first four in turn, so that the domain changes every 64 tokens | greedy |
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from truedraft import SamplingParams
from truedraft.measure.bench import Group

PROSE = Path(__file__).with_name("deciding_prose.txt")
MIX = "mix"
SETS = ("code", "repeat", "prose", "random", "hot", MIX)
NEW_TOKENS = 64  # of each answer; what `mix` calls a domain lasts as long
REQUESTS = 32  # of each set
_PROMPT_TOKENS = 64  # of prose and random
_REPEATED_CHARACTERS = 80  # at least, in whole lines
_HOT = 1.5


def prompt_sets(
    heldout: Sequence[str], prose: str, encode: Callable[[str], Sequence[int]], vocab_size: int
) -> dict[str, list[tuple[int, ...]]]:
    """Token ids of the six sets by name, `REQUESTS` of each."""
    texts = [heldout[number % len(heldout)] for number in range(REQUESTS)]
    code, whole = [tuple(encode(text)) for text in texts], encode(prose)
    starts = [number * (len(whole) - _PROMPT_TOKENS) // (REQUESTS - 1) for number in range(REQUESTS)]
    draw = random.Random("random prompts")
    domains = {
        "code": code,
        "repeat": [tuple(encode(repeated(text))) for text in texts],
        "prose": [tuple(whole[start : start + _PROMPT_TOKENS]) for start in starts],
        "random": [tuple(draw.randrange(vocab_size) for _ in range(_PROMPT_TOKENS)) for _ in range(REQUESTS)],
    }
    return domains | {"hot": code, MIX: list(chain.from_iterable(zip(*domains.values(), strict=True)))[:REQUESTS]}


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


def groups_of(name: str, prompts: Sequence[tuple[int, ...]], batch: int, *, few: bool = False) -> list[Group]:
    """What is answered together in one round: groups of `batch` requests, in the order of the set.

    At batch 1 eight of them, at 4 four, at more two; where `few` are asked, of models that need seconds for an answer,
    four, three and one.
    """
    most = ({1: 4, 4: 3} if few else {1: 8, 4: 4}).get(batch, 1 if few else 2)
    params = SamplingParams(NEW_TOKENS, temperature=_HOT if name == "hot" else 0.0, ignore_eos=True)
    parts = [range(first, first + batch) for first in range(0, most * batch, batch)]
    return [Group(tuple(map(str, part)), tuple(prompts[each] for each in part), params) for part in parts]
