"""The rows of one gossip tick as datagrams: the head goes to each peer its own way, the rest to all alike."""

from __future__ import annotations

from typing import Any

from gossip.codec import PacketBuilder, encode_rows
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
        self._rows = [table.rows[slot] for slot in slots]
        self._sources = [table.sources[slot] for slot in slots]
        self._ages = [_on_the_wire(now - table.set_at[slot]) for slot in slots]
        self._own = 0
        if own is not None:
            self._own = 1
            self._rows.insert(0, own[0])
            self._sources.insert(0, own[0].name)
            self._ages.insert(0, _on_the_wire(now - own[1]))
        self._sizes = [_size(len(row.encoded), age) for row, age in zip(self._rows, self._ages, strict=True)]
        #: Where the rest begins: no peer's first datagram ended before it.
        self._taken = len(self._rows)

    def fill(self, packet: PacketBuilder, target: str) -> None:
        """Put the head into a peer's first datagram."""
        self._taken = min(self._taken, self._pack(packet, 0, target))

    def rest(self) -> list[bytes]:
        """Give the further datagrams. With that the rows are passed on, and have their rank lowered."""
        packets: list[bytes] = []
        while (share := self._datagrams - 1 - len(packets)) > 0 and self._taken < len(self._rows):
            packet = self._hub.packet(min(1.0, share))
            self._taken = self._pack(packet, self._taken, None)
            if not len(packet):
                break
            packets.append(packet.build())
        self._table.passed_on(self._slots[: self._taken - self._own])
        return packets

    def _pack(self, packet: PacketBuilder, start: int, target: str | None) -> int:
        """Add rows from `start` on; gives the index of the first that did not fit."""
        flat: list[Any] = []
        room, end, sizes, sources = packet.room - _PART_HEADER, start, self._sizes, self._sources
        for row in self._rows[start : start + MAX_ROWS]:
            if target is None or (target != sources[end] and target != row.name):
                room -= sizes[end]
                if room < 0:
                    break
                flat.append(self._ages[end])
                flat.append(row.encoded)
            end += 1
        if flat:
            packet.add(encode_rows(flat))
        return end


def _on_the_wire(age_s: float) -> int:
    age = int(age_s / AGE_UNIT_S + 0.5)
    return age if age < MAX_AGE else MAX_AGE - 1


def _size(encoded: int, age: int) -> int:
    """Bytes of a row in its packet, its age and the headers of both included."""
    return encoded + (2 if encoded < 256 else 3) + (1 if age < 128 else 2 if age < 256 else 3 if age < 65536 else 5)
