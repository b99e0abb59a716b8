"""Other engines with one small interface: the only place with code for particular engines."""

from truedraft.measure.peers.asking import FILTERS as FILTERS
from truedraft.measure.peers.asking import Peer as Peer
from truedraft.measure.peers.asking import PeerFacts as PeerFacts
from truedraft.measure.peers.asking import Question as Question
from truedraft.measure.peers.asking import Recorded as Recorded
from truedraft.measure.peers.asking import Reply as Reply
from truedraft.measure.peers.calling import Patience as Patience
from truedraft.measure.peers.endpoint import Endpoint as Endpoint
from truedraft.measure.peers.process import ProcessPeer as ProcessPeer
from truedraft.measure.peers.process import load_function as load_function
