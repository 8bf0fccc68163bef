"""The rows of one gossip tick as datagrams: the head goes to each peer its own way, the rest to all alike."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Any

from gossip.encode import PacketBuilder, encode_rows
from gossip.hub import Hub
from gossip.limits import AGE_UNIT_S, MAX_AGE, MAX_ROWS
from gossip.messages import Row
from gossip.row_table import RowTable

#: Bytes of a `Rows` part beside its rows.
_PART_HEADER = 8


class Parcel:
    """Our own row, if there is one, with the time it was set; then those in these slots of the table, in this order.
    `datagrams`: how many may be filled, the last one to its fraction only. It is used up within the tick.
    """

    def __init__(
        self,
        hub: Hub,
        table: RowTable,
        slots: list[int],
        own: tuple[Row, float] | None,
        *,
        datagrams: float,
        now: float,
    ) -> None:
        self._hub, self._table, self._slots, self._datagrams = hub, table, slots, datagrams
        rows, set_at, givers = table.rows, table.set_at, table.sources
        self._givers = [givers[slot] for slot in slots]
        self._owners = [rows[slot].name for slot in slots]
        self._encoded = [rows[slot].encoded for slot in slots]
        self._ages = [int((now - set_at[slot]) / AGE_UNIT_S + 0.5) for slot in slots]
        if own is not None:
            row, since = own
            self._givers.insert(0, row.name)
            self._owners.insert(0, row.name)
            self._encoded.insert(0, row.encoded)
            self._ages.insert(0, min(MAX_AGE - 1, int((now - since) / AGE_UNIT_S + 0.5)))
        self._own = len(self._encoded) - len(slots)
        self._sizes = list(map(_size, self._encoded, self._ages))
        #: Where the rest begins: no peer's first datagram ended before it.
        self._taken = len(self._encoded)

    def fill(self, packet: PacketBuilder, target: str) -> None:
        """Put the head into a peer's first datagram, without its own row and those that it gave us."""
        flat: list[Any] = []
        room, end, sizes = packet.room - _PART_HEADER, 0, self._sizes
        for giver, owner in zip(self._givers[:MAX_ROWS], self._owners, strict=False):
            if target not in (giver, owner):
                room -= sizes[end]
                if room < 0:
                    break
                flat += (self._ages[end], self._encoded[end])
            end += 1
        if flat:
            packet.add(encode_rows(flat))
        self._taken = min(self._taken, end)

    def rest(self) -> list[bytes]:
        """Give the further datagrams. With that the rows are passed on, and have their rank lowered."""
        packets: list[bytes] = []
        start, filled = self._taken, list(accumulate(self._sizes[self._taken :]))
        while (share := self._datagrams - 1 - len(packets)) > 0 and self._taken < len(self._encoded):
            packet = self._hub.packet(min(1.0, share))
            before = filled[self._taken - start - 1] if self._taken > start else 0
            end = start + bisect_right(filled, before + packet.room - _PART_HEADER)
            end = min(end, self._taken + MAX_ROWS)
            if end == self._taken:
                break
            flat: list[Any] = [None] * (2 * (end - self._taken))
            flat[::2], flat[1::2] = self._ages[self._taken : end], self._encoded[self._taken : end]
            packet.add(encode_rows(flat))
            packets.append(packet.build())
            self._taken = end
        self._table.passed_on(self._slots[: max(0, self._taken - self._own)])
        return packets


def _size(encoded: bytes, age: int) -> int:
    """Bytes of a row in its packet, its age and the headers of both included."""
    size = len(encoded)
    return size + (2 if size < 256 else 3) + (1 if age < 128 else 2 if age < 256 else 3 if age < 65536 else 5)
