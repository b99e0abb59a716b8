"""Candidates: from the words of drafters to every length and tree size that a plan tries, each with its own words."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from truedraft.core.params import SamplingParams
from truedraft.drafters.base import Drafter
from truedraft.drafters.kinds import KINDS
from truedraft.drafters.registry import find_drafters
from truedraft.drafters.specs import auto_members, from_spec
from truedraft.errors import OptionError
from truedraft.measure.replay import CURVE_NODES
from truedraft.measure.traces import is_drawn
from truedraft.measure.walks import check_walkable
from truedraft.models.base import LanguageModel
from truedraft.options import Words

if TYPE_CHECKING:
    from truedraft.drafters.draft_model import DraftModel

LONGEST = 12  # longest chain that is tried where no length is given
_LENGTH, _BRANCHING, _NODES = "num_speculative_tokens", "branching", "nodes"
_BEAMS, _PATHS = "beams", "length"
_CHAINS, _SAMPLED, _TREE = "chains", "sampled", "tree"
_COUNTS = (2, 3, 4)
_TREES = ("2-1-1-1", "2-2-1-1", "3-2-1")
_WIDTHS = (1, 2, 4, 8)
_FEW_NODES = (4, 8, 16)
_MOST_OF_A_KIND = 8


@dataclass(frozen=True)
class Candidate:
    """One drafter at its largest; each of its sizes is a node budget."""

    typed: str
    drafter: Drafter  # of the largest size; it is replayed
    timed: Drafter  # a drafter with proposals of the same cost, by their depth
    words: Mapping[int, str]  # by size, in rising order, for `--drafter`

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.words)


def fitting_drafters(target: LanguageModel, tell: Callable[[str], None] = warnings.warn) -> dict[str, Drafter]:
    """Drafters known to fit a target, by their words: those that `auto` chooses among, and more of each kind if any."""
    found: list[tuple[str, Drafter]] = []
    newest = {each.kind: str(each.folder) for each in reversed(find_drafters(target))}
    for words, drafter in auto_members(target, tell=tell, most=_MOST_OF_A_KIND):
        is_newest = words.path is not None and words.path == newest.get(words.kind)
        found.append((words.kind if is_newest else spelled(replace(words, options={}), {}), drafter))
    return dict(reversed(found))


def candidates_of(
    typed: str, target: LanguageModel, params: SamplingParams, made: Drafter | None = None
) -> list[Candidate]:
    """The candidates that a drafter's words leave open; a drafter with chosen sizes is one candidate.

    By default: chains of 1 to 12 tokens, of a draft model also a few trees and, for sampled requests, two to four
    chains at once; trees of heads of 1 to 64 nodes; 1 to 8 beams of every length; both widths of weights for drafts of
    the target.

    Args:
        made: the drafter, of any sizes, if it is loaded already; its model or heads are not loaded again.

    Raises TruedraftError if there is no such drafter, it cannot be loaded, does not fit, or cannot be replayed.
    """
    words = Words.parse("drafter", typed)
    paths = KINDS[words.kind].paths if words.kind in KINDS and words.path is None else ()
    if paths:
        spelt = [spelled(replace(words, path=path), {}) for path in paths]
        return [replace(each, typed=typed) for full in spelt for each in candidates_of(full, target, params)]
    base = made or from_spec(typed, target)
    known = KINDS[words.kind].options if words.kind in KINDS else {}
    chosen = set(words.options)
    has_beams = _PATHS in known
    if has_beams and is_drawn(params):
        base, words = _settled(words, cast("Any", base), target, params)
    check_walkable(base, is_drawn(params))
    if base.limits.is_zero:
        return []
    if has_beams:
        if chosen & {_BEAMS, _PATHS, _NODES}:
            return [_whole(typed, base, spelled(words, {}))]
        return _beams(words, typed, cast("Any", base), target, params)
    if _BEAMS in known:
        return _pairs(words, typed, base, target, params)
    if _NODES in known and _NODES not in chosen:
        by_ranks = _TREE in known and not chosen & {_TREE, _BRANCHING}
        full = spelled(words, {_NODES: CURVE_NODES[-1]})
        largest = cast("Any", base).with_nodes(CURVE_NODES[-1]) if by_ranks else from_spec(full, target)
        largest.check(target)
        most = largest.limits.nodes
        trees = {nodes: spelled(words, {_NODES: nodes}) for nodes in CURVE_NODES if nodes <= most}
        return [Candidate(typed, largest, largest, trees)]
    if words.options.get("async") == "1":
        raise OptionError(
            "a plan cannot predict the gain of async, which depends on the cores that the target leaves; plan "
            f"{spelled(replace(words, options={n: v for n, v in words.options.items() if n != 'async'}), {})!r}, and "
            "compare both by truedraft generate --compare"
        )
    if _CHAINS in known and not chosen & {_LENGTH, _BRANCHING}:
        return _drafts(words, typed, cast("DraftModel", base), params)
    if _LENGTH in known and _LENGTH not in chosen:
        return [_of_sizes(words, typed, target, _LENGTH, range(1, LONGEST + 1))]
    return [_whole(typed, base)]


def _whole(typed: str, drafter: Drafter, words: str | None = None) -> Candidate:
    return Candidate(typed, drafter, drafter, {drafter.limits.nodes: words or typed})


def _pairs(words: Words, typed: str, base: Drafter, target: LanguageModel, params: SamplingParams) -> list[Candidate]:
    if words.options.keys() & {_LENGTH, _BRANCHING, _NODES}:
        return [_whole(typed, base)]
    found = [_of_sizes(words, typed, target, _LENGTH, range(1, LONGEST + 1))]
    return found if is_drawn(params) else [*found, _of_sizes(words, typed, target, _NODES, CURVE_NODES)]


def _of_sizes(words: Words, typed: str, target: LanguageModel, option: str, sizes: Sequence[int]) -> Candidate:
    spelt = {size: spelled(words, {option: size}) for size in sizes}
    largest = from_spec(spelt[sizes[-1]], target)
    return Candidate(typed, largest, largest, spelt)


def _drafts(words: Words, typed: str, base: DraftModel, params: SamplingParams) -> list[Candidate]:
    if _CHAINS in words.options:
        return [_chains(words, typed, base, int(words.options[_CHAINS]))]
    longest = base.resized(num_speculative_tokens=LONGEST)
    lengths = {length: spelled(words, {_LENGTH: length}) for length in range(1, LONGEST + 1)}
    found = [Candidate(typed, longest, longest, lengths)]
    for tree in _TREES:
        drafter = base.resized(branching=tuple(map(int, tree.split("-"))))
        found.append(_whole(typed, drafter, spelled(words, {_BRANCHING: tree})))
    if is_drawn(params):
        found += [_chains(words, typed, base, count) for count in _COUNTS]
    return found


def _chains(words: Words, typed: str, base: DraftModel, count: int) -> Candidate:
    drafter = base.resized(num_speculative_tokens=LONGEST, chains=count)
    lengths = {count * length: spelled(words, {_CHAINS: count, _LENGTH: length}) for length in range(1, LONGEST + 1)}
    return Candidate(typed, drafter, drafter, lengths)


def _settled(words: Words, base: Any, target: LanguageModel, params: SamplingParams) -> tuple[Any, Words]:
    """A head that does not sample by default, because sampled beams cannot be replayed."""
    made = base.settled(params)
    if base.sampled is None and made.sampled:
        words = replace(words, options=dict(words.options) | {_SAMPLED: "false"})
        made = cast("Any", from_spec(spelled(words, {}), target))
    made.check(target)
    return made, words


def _beams(words: Words, typed: str, base: Any, target: LanguageModel, params: SamplingParams) -> list[Candidate]:
    """Every width and length, each replayed; seeded requests get beams in another order, so each is a candidate."""
    found: list[Candidate] = []
    longest = base.head.config.length
    for beams in _WIDTHS:
        timed = base.with_sizes(beams, longest, beams * longest)
        timed.check(target)
        for length in range(1, longest + 1):
            most = beams * length
            numbers = [nodes for nodes in (_FEW_NODES if params.seeded else CURVE_NODES) if nodes <= most] or [most]
            spelt = {nodes: spelled(words, {_BEAMS: beams, _PATHS: length, _NODES: nodes}) for nodes in numbers}
            for sizes in [[each] for each in numbers] if params.seeded else [numbers]:
                drafter = base.with_sizes(beams, length, sizes[-1])
                drafter.check(target)
                found.append(Candidate(typed, drafter, timed, {nodes: spelt[nodes] for nodes in sizes}))
    return found


def spelled(words: Words, more: Mapping[str, int | str]) -> str:
    """The words with further options, as they are typed.

    Worked example: `draft:a/b` with a length of 3 is `draft:a/b,num_speculative_tokens=3`.
    """
    path = "" if words.path is None else f":{_quoted(words.path)}"
    members = f"({';'.join(words.members)})" if words.members else ""
    options = dict(words.options) | {name: str(value) for name, value in more.items()}
    return words.kind + members + path + "".join(f",{name}={_quoted(value)}" for name, value in options.items())


def _quoted(part: str) -> str:
    return f'"{part}"' if "," in part else part
