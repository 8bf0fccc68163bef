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
7. What comes in waits until somebody looks: the next tick, whoever reads a row, or the end of the loop's turn. Many
   rows at once cost less than each by itself, and nobody can tell the difference: every reading merges first.
"""

from __future__ import annotations

from collections.abc import Callable

from gossip.actions import RowsReceived
from gossip.encode import make_row
from gossip.errors import LocalError
from gossip.events import RowView
from gossip.hub import Hub
from gossip.member import Member
from gossip.membership import Membership
from gossip.messages import Row, Rows
from gossip.parcel import Parcel
from gossip.row_table import RowTable

#: Datagrams per peer and tick: so many, and one more per so many members whose rows are of the usual size. 1.2 at 100
#: members (25 KB/s per node), 5.9 at 1000 (120 KB/s); the last one is cut to its fraction. What that gives is in
#: docs/benchmarks.md.
BASE_DATAGRAMS = 0.68
MEMBERS_PER_DATAGRAM = 190
#: Encoded bytes of a usual row, with a payload of 32; rows that are larger get as many more datagrams.
USUAL_ROW_BYTES = 48
#: How many rows are asked for their size.
_WEIGHED = 16
#: Datagrams whose rows wait at most (rule 7).
MOST_WAITING = 64


class LoadRows:
    """Every node's latest row, our own included."""

    def __init__(self, hub: Hub, membership: Membership) -> None:
        self._hub = hub
        self._membership = membership
        self._table = RowTable()
        #: Rows that came, from whom and when, and were not looked at yet.
        self._waiting: list[tuple[Rows, str, float]] = []
        #: Whose row was renewed since `take`, and whether the shell was told that there is something to take.
        self._news: dict[str, None] = {}
        self._told = False
        #: Our own row, and when it was set.
        self._own: tuple[Row, float] | None = None
        #: Shown the rows of others at each tick, and before when a row must have been set not to be passed on any more.
        self.heartbeat: Callable[[RowTable, float, float], None] = lambda table, oldest, now: None

    def set_own(self, payload: bytes, now: float) -> None:
        """Replace our own row.

        :raises LocalError: the payload exceeds `max_row_bytes`; nothing is changed.
        """
        if len(payload) > self._hub.config.max_row_bytes:
            raise LocalError(f"row has {len(payload)} bytes, {self._hub.config.max_row_bytes} is the limit")
        seq = self._own[0].seq + 1 if self._own is not None else 1
        self._own = make_row(self._hub.name, self._hub.boot, seq, payload), now

    def receive(self, rows: Rows, sender: str, now: float) -> None:
        """Take rows; they are compared with those held when somebody looks (rule 7)."""
        self._waiting.append((rows, sender, now))
        if len(self._waiting) >= MOST_WAITING:
            self._merge()
        if not self._told:
            self._told = True
            self._hub.emit(RowsReceived())

    def take(self, now: float) -> list[RowView]:
        """Give those rows of peers that were renewed since the last call."""
        self._merge()
        self._told = False
        news, self._news = self._news, {}
        return [view for view in (self.get(name, now) for name in news) if view is not None]

    def _merge(self) -> None:
        for rows, sender, at in self._waiting:
            self._table.merge(rows, sender, at, self._admits, self._news)
        self._waiting.clear()

    def _admits(self, row: Row) -> bool:
        """Whether the owner is a member, in that boot. Asked for the first row only: rows die with the boot."""
        owner = self._membership.up(row.name)
        if owner is not None and row.boot == owner.boot:
            return True
        self._hub.counters["rows_without_member"] += row.name != self._hub.name
        return False

    def parcel(self, now: float) -> Parcel:
        """Prepare one tick: what is worth passing on, ours and then the freshest first."""
        self._merge()
        config, table = self._hub.config, self._table
        oldest = now - config.row_relay_s
        self.heartbeat(table, oldest, now)
        usual = max(1.0, self._mean_bytes() / USUAL_ROW_BYTES)
        datagrams = min(config.row_datagrams, BASE_DATAGRAMS + self._membership.size() * usual / MEMBERS_PER_DATAGRAM)
        # Enough for one datagram more than will be filled: from the first are left out those that a peer gave us.
        enough = (datagrams + 1) * config.datagram_budget / (usual * USUAL_ROW_BYTES)
        slots = table.freshest(int(enough) + 1, now)
        while slots and table.set_at[slots[-1]] < oldest:
            slots.pop()
        return Parcel(self._hub, table, slots, self._current_own(), datagrams=datagrams, now=now)

    def _mean_bytes(self) -> float:
        some = [len(row.encoded) for row in self._table.rows[:_WEIGHED]]
        if self._own is not None:
            some.append(len(self._own[0].encoded))
        return sum(some) / max(1, len(some))

    def get(self, name: str, now: float) -> RowView | None:
        """Give the latest row of a node, with its age in seconds."""
        self._merge()
        held = self._current_own() if name == self._hub.name else self._table.get(name)
        if held is None:
            return None
        row, set_at = held
        return RowView(name, row.boot, row.seq, row.payload, max(0.0, now - set_at))

    def set_at(self, name: str) -> float:
        """When a peer's latest row was set, on our clock: it lived then. Minus infinity if there is none."""
        self._merge()
        held = self._table.get(name)
        return held[1] if held is not None else float("-inf")

    def names(self) -> set[str]:
        """Whose rows are held."""
        self._merge()
        return self._table.names()

    def _current_own(self) -> tuple[Row, float] | None:
        if self._own is not None and self._own[0].boot != self._hub.boot:
            row, set_at = self._own  # our boot was raised: peers want it in the new one
            self._own = make_row(row.name, self._hub.boot, row.seq, row.payload), set_at
        return self._own

    # --- following the members ----------------------------------------------------------------------------------------

    def member_up(self, member: Member, now: float) -> None:
        """Nothing to do: the row comes by itself."""

    def member_down(self, member: Member, now: float) -> None:
        """Rows die with the member (rule 4)."""
        self._table.remove(member.name)

    def member_doubted(self, member: Member, now: float) -> None:
        """Nothing to do."""
