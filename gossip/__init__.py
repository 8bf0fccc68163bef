"""Membership, load rows and slow state of a cluster without a centre.

`GossipAgent` is the asyncio shell for real sockets; `Endpoint` is the same protocol without IO, for the simulator.
"""

from gossip.agent import GossipAgent
from gossip.config import GossipConfig
from gossip.endpoint import Endpoint
from gossip.errors import (
    GossipBindError,
    GossipError,
    InvariantError,
    LocalError,
    RemoteError,
    SealError,
    WrongClusterError,
)
from gossip.events import (
    GossipEvent,
    IncarnationRaised,
    MemberChanged,
    NameConflict,
    RowReceived,
    RowView,
    SlowChanged,
    SlowReset,
)
from gossip.identity import Address, Identity
from gossip.keyring import ClusterKey, Keyring
from gossip.member import MemberState, MemberView
from gossip.seeds import parse_seed

__all__ = [
    "Address",
    "ClusterKey",
    "Endpoint",
    "GossipAgent",
    "GossipBindError",
    "GossipConfig",
    "GossipError",
    "GossipEvent",
    "Identity",
    "IncarnationRaised",
    "InvariantError",
    "Keyring",
    "LocalError",
    "MemberChanged",
    "MemberState",
    "MemberView",
    "NameConflict",
    "RemoteError",
    "RowReceived",
    "RowView",
    "SealError",
    "SlowChanged",
    "SlowReset",
    "WrongClusterError",
    "parse_seed",
]
