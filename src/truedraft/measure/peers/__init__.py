"""Other engines with one small interface: the only place with code for particular engines."""

from truedraft.measure.peers.asking import FILTERS, Peer, PeerFacts, Question, Recorded, Reply
from truedraft.measure.peers.calling import Patience
from truedraft.measure.peers.endpoint import Endpoint
from truedraft.measure.peers.process import ProcessPeer, load_function

__all__ = [
    "FILTERS",
    "Endpoint",
    "Patience",
    "Peer",
    "PeerFacts",
    "ProcessPeer",
    "Question",
    "Recorded",
    "Reply",
    "load_function",
]
