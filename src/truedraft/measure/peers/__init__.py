"""Other engines behind one small contract: the one place where their names become code."""

from truedraft.measure.peers.asking import FILTERS, Peer, PeerFacts, Question, Reply
from truedraft.measure.peers.calling import Patience
from truedraft.measure.peers.endpoint import Endpoint
from truedraft.measure.peers.process import ProcessPeer, load_function
from truedraft.measure.peers.transcript import Recorded

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
