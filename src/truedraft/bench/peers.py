"""Other libraries as contestants: the one place where their names become code."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from truedraft.bench.contestants import Contestant
from truedraft.errors import MissingExtraError, UnknownOptionError
from truedraft.models.base import LanguageModel


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """What a peer is to run, so that it runs the same.

    Attributes:
        target: our target; the peer loads the same weights again, in its own way.
        model: the target's name or folder, as it was typed.
        pad_to: size that it is padded to, or None.
        draft: our draft model, which shares its name with the folder it came from; None without one.
        batch: prompts that are answered together.
    """

    target: LanguageModel
    model: str
    pad_to: str | None
    draft: LanguageModel | None
    batch: int


@dataclass(frozen=True, slots=True)
class PeerContestants:
    """What a peer brings.

    Attributes:
        contestants: its ways of answering.
        best_of: names of which only the best is shown in tables, under one title.
        notes: what it cannot do here, a sentence each.
    """

    contestants: Sequence[Contestant]
    best_of: dict[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Peer:
    """A library.

    Attributes:
        library: what must be importable.
        install: the line that brings it.
        make: from the setup to contestants.
    """

    library: str
    install: str
    make: Callable[[PeerSetup], PeerContestants]


def _transformers(setup: PeerSetup) -> PeerContestants:
    from truedraft.bench.transformers_peer import transformers_contestants

    return transformers_contestants(setup)


_PEERS = {"transformers": _Peer("transformers", "pip install truedraft", _transformers)}


def check_peer(name: str) -> None:
    """Refuse a peer that cannot run, before anything is loaded.

    Raises:
        UnknownOptionError: no such peer; names those that there are.
        MissingExtraError: it is not installed; says which line brings it.
    """
    if name not in _PEERS:
        raise UnknownOptionError.nearest("peer", name, _PEERS)
    peer = _PEERS[name]
    if importlib.util.find_spec(peer.library) is None:
        raise MissingExtraError(f"the peer {name!r} is not installed; `{peer.install}` brings it")


def peer_contestants(name: str, setup: PeerSetup) -> PeerContestants:
    """The ways in which a peer answers.

    Raises:
        TruedraftError: it is unknown, not installed, or cannot load the model.
    """
    check_peer(name)
    return _PEERS[name].make(setup)
