"""Other engines behind one small contract: the one place where their names become code."""

from truedraft.peers.asking import FILTERS, Peer, PeerFacts, Question, Reply
from truedraft.peers.calling import Patience
from truedraft.peers.endpoint import Endpoint
from truedraft.peers.process import ProcessPeer, load_function
from truedraft.peers.transcript import Recorded

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
