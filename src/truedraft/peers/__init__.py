"""Other engines behind one small contract: the one place where their names become code."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from truedraft.errors import MissingExtraError, UnknownOptionError
from truedraft.peers.asking import FILTERS, Peer, PeerFacts, Question, Reply
from truedraft.peers.base import Outcome, PeerSetup, PeerSystems, System
from truedraft.peers.calling import Patience
from truedraft.peers.endpoint import Endpoint
from truedraft.peers.process import ProcessPeer, load_function
from truedraft.peers.transcript import Recorded

__all__ = [
    "FILTERS",
    "Endpoint",
    "Outcome",
    "Patience",
    "Peer",
    "PeerFacts",
    "PeerSetup",
    "PeerSystems",
    "ProcessPeer",
    "Question",
    "Recorded",
    "Reply",
    "System",
    "check_peer",
    "load_function",
    "peer_systems",
]


@dataclass(frozen=True, slots=True)
class _Peer:
    """A library.

    Attributes:
        library: what must be importable.
        install: the line that brings it.
        make: from the setup to its ways of answering.
    """

    library: str
    install: str
    make: Callable[[PeerSetup], PeerSystems]


def _transformers(setup: PeerSetup) -> PeerSystems:
    from truedraft.peers.transformers import transformers_systems

    return transformers_systems(setup)


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


def peer_systems(name: str, setup: PeerSetup) -> PeerSystems:
    """The ways in which a peer answers.

    Raises:
        TruedraftError: it is unknown, not installed, or cannot load the model.
    """
    check_peer(name)
    return _PEERS[name].make(setup)
