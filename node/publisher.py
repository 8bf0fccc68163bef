"""What this node tells the others: its load row at every tick, its models and prefix chunks when they change.

Chunks go out a few at a time: a prompt of 200 KB confirms hundreds of them at once, and neither the event loop
nor gossip should notice. The newest change of a chunk wins; what was added and withdrawn in between is never sent.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from gossip import GossipError
from node.digest import Changes
from node.errors import LocalError
from node.models import ModelInfo
from node.registry import HELD, PROMISED, chunk_key

#: Chunk changes sent per tick, and changes that wait; beyond it the oldest are dropped (a hint is lost).
CHUNKS_PER_TICK = 256
MAX_PENDING = 65_536

_log = logging.getLogger("grapevine.cluster")


class Gossip(Protocol):
    """What is needed of `gossip.GossipAgent`."""

    def set_row(self, payload: bytes) -> None:
        """Set the own load row."""
        ...

    def put(self, key: bytes, value: bytes) -> None:
        """Set a key of the own slow state."""
        ...

    def delete(self, key: bytes) -> None:
        """Remove a key of the own slow state."""
        ...


class Publisher:
    """Writes our own rows and keys."""

    def __init__(self, gossip: Gossip) -> None:
        self._gossip = gossip
        self._models: dict[bytes, bytes] = {}
        #: Changes that wait: what a chunk's key is to hold, None = nothing; and what it holds.
        self._chunks: dict[int, bytes | None] = {}
        self._published: dict[int, bytes] = {}
        self.dropped = 0

    def models(self, models: Mapping[str, ModelInfo]) -> None:
        """Publish exactly these models."""
        wanted: dict[bytes, bytes] = {}
        for info in models.values():
            try:
                wanted[info.key] = info.encode()
            except LocalError as error:
                _log.error("a model cannot be published: %s", error)
        for key in self._models.keys() - wanted.keys():
            self._gossip.delete(key)
        for key, value in wanted.items():
            if self._models.get(key) != value:
                self._put(key, value)
        self._models = wanted

    def chunks(self, changes: Changes) -> None:
        """Publish these changes of the prefix digest with the next ticks."""
        for chunk in changes.added:
            self._pend(chunk, HELD)
        for chunk in changes.promised:
            self._pend(chunk, PROMISED)
        for chunk in changes.withdrawn:
            self._pend(chunk, None)

    def tick(self, row: bytes) -> None:
        """Send the load row and some of the waiting changes."""
        self._gossip.set_row(row)
        for _ in range(min(CHUNKS_PER_TICK, len(self._chunks))):
            chunk = next(iter(self._chunks))
            claim = self._chunks.pop(chunk)
            if claim is None:
                if self._published.pop(chunk, None) is not None:
                    self._gossip.delete(chunk_key(chunk))
            elif claim != self._published.get(chunk) and self._put(chunk_key(chunk), claim):
                self._published[chunk] = claim

    def _pend(self, chunk: int, claim: bytes | None) -> None:
        self._chunks.pop(chunk, None)
        if len(self._chunks) >= MAX_PENDING:
            del self._chunks[next(iter(self._chunks))]
            self.dropped += 1
        self._chunks[chunk] = claim

    def _put(self, key: bytes, value: bytes) -> bool:
        try:
            self._gossip.put(key, value)
        except GossipError as error:  # too many keys: what is not published is only not found
            self.dropped += 1
            _log.debug("a key was not published: %s", error)
            return False
        return True
