"""Errors of gossip, split by whose fault they are.

- `LocalError`: the caller of this process did something that is not allowed (a row too large, a bad name). State is
  unchanged.
- `RemoteError`: bytes from the network were wrong. The only kind that a decoder raises; the message is dropped and
  counted, and nothing in the state has changed. `WrongClusterError` is the case of another cluster's label,
  `SealError` that of a packet without a seal of ours.
- `GossipBindError`: the operating system refused the port.
- `InvariantError`: a bug of ours, found by `validate()`.
"""

from __future__ import annotations


class GossipError(Exception):
    """Base of everything that gossip raises."""


class LocalError(GossipError, ValueError):
    """The calling code of this process is at fault; nothing was changed."""


class RemoteError(GossipError):
    """Bytes received from elsewhere are malformed or out of bounds; they were dropped whole."""


class WrongClusterError(RemoteError):
    """A well-formed packet that carries another cluster's label."""


class SealError(RemoteError):
    """A packet that was not sealed with one of our keys, or came before.

    `reason` is the counter: unsealed, sealed_without_key, unknown_key, forged, replayed.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class GossipBindError(GossipError, OSError):
    """The UDP or TCP port cannot be bound; the text says which, and what to do."""


class InvariantError(GossipError, AssertionError):
    """`validate()` found a state that must never exist: a bug in gossip itself."""
