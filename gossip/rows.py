"""The load plane: one latest-value row per node, pushed freshest first.

Rules
1. A row is written by its owner only and ordered by (boot, seq); it is never queued and has no tombstone.
2. Its age travels with it, relative: the owner's clock and ours are never compared. Time on the wire is not counted.
3. At each gossip tick every chosen peer gets the freshest rows that fit, never its own and never those that it gave us.
4. A row dies with its member, and a row of somebody who is not a member is not kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from gossip.codec import PacketBuilder, encode_part
from gossip.errors import LocalError
from gossip.events import RowReceived, RowView
from gossip.hub import Hub
from gossip.limits import MAX_AGE_MS
from gossip.member import Member
from gossip.membership import Membership
from gossip.messages import Row

#: Rows considered per tick: what six full datagrams of the smallest rows can hold.
MAX_ROWS_PER_TICK = 256


@dataclass(slots=True)
class _Held:
    boot: int
    seq: int
    payload: bytes
    #: When the owner set it, on our own clock.
    set_at: float
    #: Who gave it to us.
    source: str


class LoadRows:
    """Every node's latest row, our own included."""

    def __init__(self, hub: Hub, membership: Membership) -> None:
        self._hub = hub
        self._membership = membership
        self._rows: dict[str, _Held] = {}
        self._seq = 0

    def set_own(self, payload: bytes, now: float) -> None:
        """Replace our own row.

        :raises LocalError: the payload exceeds `max_row_bytes`; nothing is changed.
        """
        if len(payload) > self._hub.config.max_row_bytes:
            raise LocalError(f"row has {len(payload)} bytes, {self._hub.config.max_row_bytes} is the limit")
        self._seq += 1
        self._rows[self._hub.name] = _Held(self._hub.boot, self._seq, payload, now, self._hub.name)

    def receive(self, row: Row, sender: str, now: float) -> None:
        """Keep a peer's row if it is newer than the one held."""
        owner = self._membership.up(row.name)
        if owner is None or row.boot != owner.boot:
            self._hub.counters["rows_without_member"] += row.name != self._hub.name
            return
        held = self._rows.get(row.name)
        if held is not None and (row.boot, row.seq) <= (held.boot, held.seq):
            return
        self._rows[row.name] = _Held(row.boot, row.seq, row.payload, now - row.age_ms / 1000, sender)
        self._hub.notify(RowReceived(self._view(row.name, now)))

    def freshest(self, now: float) -> list[tuple[str, str, bytes]]:
        """Give (owner, source, encoded row), freshest first, of what is worth passing on."""
        oldest = now - self._hub.config.row_relay_s
        fresh = [(-held.set_at, name) for name, held in self._rows.items() if held.set_at >= oldest]
        own = self._rows.get(self._hub.name)
        if own is not None and own.set_at < oldest:
            fresh.append((-own.set_at, self._hub.name))  # ours always goes out: nobody else vouches for it
        best = heapq.nsmallest(MAX_ROWS_PER_TICK, fresh)
        return [(name, self._rows[name].source, self._encode(name, now)) for _, name in best]

    def fill(
        self,
        rows: list[tuple[str, str, bytes]],
        target: str,
        first: PacketBuilder,
        more: Callable[[], PacketBuilder],
    ) -> list[PacketBuilder]:
        """Put rows for one target into `first` and as many further packets as the budget allows."""
        packets = [first]
        for owner, source, encoded in rows:
            if target in (owner, source) or packets[-1].add(encoded):
                continue
            if len(packets) >= self._hub.config.row_datagrams:
                break
            packets.append(more())
            packets[-1].add(encoded)
        return packets

    def get(self, name: str, now: float) -> RowView | None:
        """Give the latest row of a node, with its age in seconds."""
        return self._view(name, now) if name in self._rows else None

    def names(self) -> set[str]:
        """Whose rows are held."""
        return set(self._rows)

    # --- following the members ----------------------------------------------------------------------------------------

    def member_up(self, member: Member, now: float) -> None:
        """Nothing to do: the row comes by itself."""

    def member_down(self, member: Member, now: float) -> None:
        """Rows die with the member (rule 4)."""
        self._rows.pop(member.name, None)

    def member_doubted(self, member: Member, now: float) -> None:
        """Nothing to do."""

    def _view(self, name: str, now: float) -> RowView:
        held = self._rows[name]
        return RowView(name, self._boot(name, held), held.seq, held.payload, max(0.0, now - held.set_at))

    def _boot(self, name: str, held: _Held) -> int:
        return self._hub.boot if name == self._hub.name else held.boot

    def _encode(self, name: str, now: float) -> bytes:
        held = self._rows[name]
        age_ms = min(MAX_AGE_MS - 1, max(0, round((now - held.set_at) * 1000)))
        return encode_part(Row(name, self._boot(name, held), held.seq, age_ms, held.payload))
