"""The load plane: one latest-value row per node, pushed freshest first.

Rules
1. A row is written by its owner only and ordered by (boot, seq); it is never queued and has no tombstone.
2. Its age travels with it, relative: the owner's clock and ours are never compared. Time on the wire is not counted.
3. At each gossip tick every chosen peer gets the freshest rows that fit. The first datagram, which is all there is in
   a small cluster, leaves out its own and those that it gave us; further ones are the same for all peers of the tick.
4. A row dies with its member, and a row of somebody who is not a member is not kept.
5. The bytes of a row are the owner's, passed on as they came: only ages are written anew at each hop.
6. What counts as fresh is not age alone. A row that renewed a very old one here is worth more, for it will be news
   elsewhere too; one that was passed on in an earlier tick is worth less. By age alone whoever was late once would be
   late always: at 1000 nodes the p99 age would be 3.5 s instead of 2.4 s, for the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from gossip.actions import RowsReceived
from gossip.codec import PacketBuilder, encode_rows, make_row
from gossip.errors import LocalError
from gossip.events import RowView
from gossip.hub import Hub
from gossip.limits import AGE_UNIT_S, MAX_AGE, MAX_ROWS
from gossip.member import Member
from gossip.membership import Membership
from gossip.messages import Row, Rows

#: Datagrams per peer and tick: so many, and one more per so many members whose rows are of the usual size. 1.2 at 100
#: members (25 KB/s per node), 5.9 at 1000 (120 KB/s); the last one is cut to its fraction. What that gives is in
#: docs/benchmarks.md.
BASE_DATAGRAMS = 0.68
MEMBERS_PER_DATAGRAM = 190
#: Encoded bytes of a usual row, with a payload of 32; rows that are larger get as many more datagrams. How many of the
#: first ones are asked.
USUAL_ROW_BYTES = 48
_WEIGHED = 16
#: Bytes of a `Rows` part beside its rows.
_PART_HEADER = 8
#: Rule 6, in seconds of age: what a row gains per second by which it is younger than the one before it, up to a limit,
#: and what it loses each time that it is passed on.
GAP_GAIN, MOST_GAP_S = 1.0, 3.0
PASSED_ON_LOSS_S = 1.0


@dataclass(slots=True)
class Held:
    """A row as it is held here."""

    row: Row
    #: When the owner set it, on our own clock.
    set_at: float
    #: Who gave it to us.
    source: str
    #: Sequence number and time of the first row of that boot that came here.
    first_seq: int
    first_at: float
    #: Whether we have probed the owner because this row is old.
    doubted: bool = False
    #: Its place among the freshest when rows are passed on (rule 6): `set_at`, and what it gains and loses.
    rank: float = 0.0

    @property
    def renewals(self) -> int:
        """How often the owner has renewed its row since we first heard of one."""
        return self.row.seq - self.first_seq

    @property
    def period_s(self) -> float:
        """Seconds between two renewals on average; only where there were some."""
        return (self.set_at - self.first_at) / self.renewals


_BY_RANK = attrgetter("rank")


class Parcel:
    """The rows of one gossip tick, freshest first: the head goes to each peer its own way, the rest to all alike."""

    def __init__(self, hub: Hub, rows: list[Held], datagrams: float, now: float) -> None:
        self._hub = hub
        self._rows = rows
        self._datagrams = datagrams
        self._now = now
        #: Age and size of the first rows, as far as they were needed: the head is packed once per peer.
        self._priced: list[tuple[int, int]] = []
        #: Where the rest begins: no peer's first datagram ended before it.
        self._taken = len(rows)

    def fill(self, packet: PacketBuilder, target: str) -> None:
        """Put the head into a peer's first datagram."""
        self._taken = min(self._taken, self._pack(packet, 0, target))

    def rest(self) -> list[bytes]:
        """Give the further datagrams."""
        packets: list[bytes] = []
        while (share := self._datagrams - 1 - len(packets)) > 0 and self._taken < len(self._rows):
            packet = self._hub.packet(min(1.0, share))
            self._taken = self._pack(packet, self._taken, None)
            if not len(packet):
                break
            packets.append(packet.build())
        for held in self._rows[: self._taken]:
            held.rank -= PASSED_ON_LOSS_S
        return packets

    def _pack(self, packet: PacketBuilder, start: int, target: str | None) -> int:
        """Add rows from `start` on; gives the index of the first that did not fit."""
        flat: list[Any] = []
        room, end, priced = packet.room - _PART_HEADER, start, self._priced
        for held in self._rows[start : start + MAX_ROWS]:
            if end == len(priced):
                priced.append(self._price(held))
            row = held.row
            if target is None or target not in (row.name, held.source):
                age, size = priced[end]
                room -= size
                if room < 0:
                    break
                flat.append(age)
                flat.append(row.encoded)
            end += 1
        if flat:
            packet.add(encode_rows(flat))
        return end

    def _price(self, held: Held) -> tuple[int, int]:
        """Age on the wire, and bytes in the packet."""
        age = max(0, min(MAX_AGE - 1, int((self._now - held.set_at) / AGE_UNIT_S + 0.5)))
        size = len(held.row.encoded)
        return age, size + (2 if size < 256 else 3) + (1 if age < 128 else 2 if age < 256 else 3 if age < 65536 else 5)


class LoadRows:
    """Every node's latest row, our own included."""

    def __init__(self, hub: Hub, membership: Membership) -> None:
        self._hub = hub
        self._membership = membership
        self._rows: dict[str, Held] = {}
        self._own: Held | None = None
        #: Shown the rows of others at each tick, freshest first.
        self.heartbeat: Callable[[Sequence[Held], float], None] = lambda rows, now: None

    def set_own(self, payload: bytes, now: float) -> None:
        """Replace our own row.

        :raises LocalError: the payload exceeds `max_row_bytes`; nothing is changed.
        """
        if len(payload) > self._hub.config.max_row_bytes:
            raise LocalError(f"row has {len(payload)} bytes, {self._hub.config.max_row_bytes} is the limit")
        seq = self._own.row.seq + 1 if self._own is not None else 1
        row = make_row(self._hub.name, self._hub.boot, seq, payload)
        self._own = Held(row, now, self._hub.name, 1, now)

    def receive(self, rows: Rows, sender: str, now: float) -> None:
        """Keep those rows that are newer than the ones held."""
        table, fresh = self._rows, []
        # This loop runs some thousand times a second in a large cluster: rows are compared first, and moved in place.
        for row, age in zip(rows.rows, rows.ages, strict=True):
            name = row.name
            held = table.get(name)
            if held is not None and row.seq <= held.row.seq and row.boot == held.row.boot:
                continue
            if held is not None and row.boot == held.row.boot:
                del table[name]  # to enter it again at the end: a table in the order of arrival is soon sorted
                table[name] = held
                set_at = now - age * AGE_UNIT_S
                gap = set_at - held.set_at
                held.row = row
                held.set_at = set_at
                held.rank = set_at + GAP_GAIN * (gap if gap < MOST_GAP_S else MOST_GAP_S)
                held.source = sender
                held.doubted = False
            elif self._admits(row):
                set_at = now - age * AGE_UNIT_S
                table[name] = Held(row, set_at, sender, row.seq, set_at, rank=set_at + GAP_GAIN * MOST_GAP_S)
            else:
                continue
            fresh.append(name)
        if fresh:
            self._hub.emit(RowsReceived(tuple(fresh)))

    def _admits(self, row: Row) -> bool:
        """Whether the owner is a member, in that boot. Asked for the first row only: rows die with the boot."""
        owner = self._membership.up(row.name)
        if owner is not None and row.boot == owner.boot:
            return True
        self._hub.counters["rows_without_member"] += row.name != self._hub.name
        return False

    def parcel(self, now: float) -> Parcel:
        """Prepare one tick: what is worth passing on, ours and then the freshest first."""
        oldest = now - self._hub.config.row_relay_s
        rows = sorted(self._rows.values(), key=_BY_RANK)
        rows.reverse()
        while rows and rows[-1].set_at < oldest:
            rows.pop()
        self.heartbeat(rows, now)
        own = self._current_own()
        if own is not None:
            rows.insert(0, own)
        wanted = BASE_DATAGRAMS + self._membership.size() * _weight(rows) / MEMBERS_PER_DATAGRAM
        return Parcel(self._hub, rows, min(self._hub.config.row_datagrams, wanted), now)

    def get(self, name: str, now: float) -> RowView | None:
        """Give the latest row of a node, with its age in seconds."""
        held = self._current_own() if name == self._hub.name else self._rows.get(name)
        if held is None:
            return None
        return RowView(name, held.row.boot, held.row.seq, held.row.payload, max(0.0, now - held.set_at))

    def set_at(self, name: str) -> float:
        """When a peer's latest row was set, on our clock: it lived then. Minus infinity if there is none."""
        held = self._rows.get(name)
        return held.set_at if held is not None else float("-inf")

    def names(self) -> set[str]:
        """Whose rows are held."""
        return set(self._rows)

    def _current_own(self) -> Held | None:
        own = self._own
        if own is not None and own.row.boot != self._hub.boot:  # our boot was raised: peers want it in the new one
            own.row = make_row(own.row.name, self._hub.boot, own.row.seq, own.row.payload)
        return own

    # --- following the members ----------------------------------------------------------------------------------------

    def member_up(self, member: Member, now: float) -> None:
        """Nothing to do: the row comes by itself."""

    def member_down(self, member: Member, now: float) -> None:
        """Rows die with the member (rule 4)."""
        self._rows.pop(member.name, None)

    def member_doubted(self, member: Member, now: float) -> None:
        """Nothing to do."""


def _weight(rows: Sequence[Held]) -> float:
    """How many times larger than usual the rows are, at least 1."""
    some = rows[:_WEIGHED]
    return max(1.0, sum(len(held.row.encoded) for held in some) / (USUAL_ROW_BYTES * max(1, len(some))))
