"""Several drafters for one target: a controller chooses among them at each step, and may merge their proposals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from truedraft.core.budget import Budget
from truedraft.core.noise import Noise
from truedraft.core.proposal import DrawKind, Proposal, merge
from truedraft.core.stats import DraftShare
from truedraft.drafters.base import Drafter, DraftRequest, Features
from truedraft.errors import OptionError
from truedraft.models.base import LanguageModel


class Portfolio(Drafter):
    """Drafters for one target; the engine calls its members directly, by their names here.

    Members observe their own proposals; one that must observe merged ones too does not observe lazily. Members of a
    list have their own names; a second one of the same name is "draft-2". Raises `OptionError` without members, or if
    one is a portfolio.
    """

    name = "portfolio"
    observes_lazily = True

    def __init__(self, members: Mapping[str, Drafter] | Sequence[Drafter]) -> None:
        named = dict(members) if isinstance(members, Mapping) else _named(members)
        if not named:
            raise OptionError("a portfolio needs at least one drafter, got none")
        for name, member in named.items():
            if list(member.members.values()) != [member]:
                raise OptionError(f"a portfolio's members are drafters, and {name!r} is a portfolio; list its members")
        self._members = named
        limits = [member.limits for member in named.values()]
        self.limits = Budget(
            max(each.depth for each in limits), sum(each.width for each in limits), sum(each.nodes for each in limits)
        )

    @property
    def members(self) -> Mapping[str, Drafter]:
        return self._members

    @property
    def kinds(self) -> frozenset[DrawKind]:
        return frozenset().union(*(member.kinds for member in self._members.values()))

    def kinds_for(self, judged: frozenset[DrawKind]) -> frozenset[DrawKind]:
        return frozenset().union(*(member.kinds_for(judged) for member in self._members.values()))

    def check(self, target: LanguageModel) -> None:
        for member in self._members.values():
            member.check(target)

    def propose(
        self, batch: Sequence[DraftRequest], budgets: Sequence[Budget], noise: Sequence[Noise]
    ) -> list[Proposal]:
        """Not supported: raises `OptionError`."""
        raise OptionError("a portfolio's members are asked one by one, by the engine; call them, or merge their trees")


def _named(members: Sequence[Drafter]) -> dict[str, Drafter]:
    named: dict[str, Drafter] = {}
    for member in members:
        name, number = member.name, 1
        while name in named:
            number += 1
            name = f"{member.name}-{number}"
        named[name] = member
    return named


def with_members(drafter: Drafter, members: Mapping[str, Drafter]) -> Drafter:
    """A drafter with its members replaced, by name."""
    return members[drafter.name] if drafter.members == {drafter.name: drafter} else Portfolio(members)


def joint_features(drafter: Drafter, watcher: Drafter | None = None) -> Features | None:
    """All features that a drafter's members, and a further watcher, require."""
    members = [*drafter.members.values(), *([] if watcher is None else [watcher])]
    requested = [member.features for member in members if member.features is not None]
    if not requested:
        return None
    layers = sorted({layer for each in requested for layer in each.layers})
    rows = max((each.rows for each in requested), key=("last", "tree", "accepted", "kept", "all").index)
    return Features(rows, any(each.logits for each in requested), tuple(layers))


@dataclass(frozen=True)
class MergedProposal:
    """The proposal for one request, and each drafter's part of it, by name, in the order of merging.

    `nodes` maps each drafter's own nodes to those of `proposal`.
    """

    proposal: Proposal
    parts: Mapping[str, Proposal]
    nodes: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, parts: Mapping[str, Proposal]) -> MergedProposal:
        if not parts:
            return cls(Proposal.empty(), {}, {})
        if len(parts) == 1:
            ((name, single),) = parts.items()
            return cls(single, parts, {name: range(len(single.tree))})
        proposal, nodes = merge(list(parts.values()))
        return cls(proposal, parts, dict(zip(parts, nodes, strict=True)))

    def own(self, name: str) -> tuple[Proposal, Sequence[int] | None]:
        """A drafter's proposal, and its nodes here; None if it is all of it."""
        part = self.parts.get(name)
        if part is None:
            return Proposal.empty(), () if len(self.proposal.tree) else None
        return part, None if part is self.proposal else self.nodes[name]

    def own_path(self, name: str, path: Sequence[int]) -> tuple[int, ...]:
        """The prefix of an accepted path that a drafter proposed, as its own nodes. Worked example: of two merged
        chains, the second chain's nodes became 0 and 2; the path (0, 2) is (0, 1) of its own.
        """
        part = self.parts.get(name)
        if part is None:
            return ()
        if part is self.proposal:
            return tuple(path)
        own_of = self._own_numbers[name]
        found = []
        for node in path:
            if node not in own_of:
                break
            found.append(own_of[node])
        return tuple(found)

    @cached_property
    def _own_numbers(self) -> dict[str, dict[int, int]]:
        return {name: {node: own for own, node in enumerate(nodes)} for name, nodes in self.nodes.items()}

    def shares(self, path: Sequence[int], rejected: bool) -> tuple[DraftShare, ...]:
        found = []
        for name, part in self.parts.items():
            shape, own = part.tree.shape, self.own_path(name, path)
            row = own[-1] + 1 if own else 0
            left = len(own) < len(path)  # the path continued in another part
            tried = bool(part.draws[row]) and (left or rejected)
            confidence = part.confidence[: len(own) + tried] if shape.is_chain else ()
            found.append(DraftShare(name, len(shape), shape.depth, own, len(own) + tried, confidence))
        return tuple(found)
