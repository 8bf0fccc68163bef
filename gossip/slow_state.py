"""The slow plane: everybody's slow state, spread by marks, pulls and deltas.

Rules
1. Nothing is pushed: at each tick a few version marks travel; whoever is behind pulls exactly what it lacks.
2. A small gap is pulled by datagram, a large one over TCP in chunks, each chunk from where the last one ended.
3. At most one pull per owner is under way; a lost one is forgotten after a while and the next mark starts another.
4. A copy belongs to one boot of its owner and dies with it (`SlowReset`). Only members that are up have copies.
5. No message grows with the cluster: a tick carries `slow_digest_bytes` of marks. Half of them are for what moved last;
   the rest takes turns over all owners, so that whatever was missed is noticed within n / (marks per turn) datagrams.
   The exchange of whole tables compares all versions as well.
6. All copies together hold at most `max_slow_entries`; beyond it they stop growing, which is counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType

from gossip.encode import PacketBuilder, encode_part
from gossip.errors import InvariantError, RemoteError
from gossip.events import SlowChanged, SlowReset
from gossip.hub import Hub
from gossip.identity import Address
from gossip.member import Member
from gossip.membership import Membership
from gossip.messages import SlowDelta, SlowDigest, SlowMark, SlowPull
from gossip.sessions import Purpose, Sessions
from gossip.slow_map import SlowMap

#: Seconds after which an unanswered datagram pull may be repeated, and after which one is over whose answer has begun.
DATAGRAM_PULL_S = 0.5
DATAGRAM_BURST_S = 0.05
#: Bytes that a `SlowDelta` has beside its entries, at most, and the header of the packet around it.
_DELTA_OVERHEAD = 250
_EMPTY: Mapping[bytes, bytes] = MappingProxyType({})


class SlowState:
    """Our own map and one copy per other member."""

    def __init__(self, hub: Hub, membership: Membership, sessions: Sessions) -> None:
        self._hub = hub
        self._membership = membership
        self._sessions = sessions
        self._own = SlowMap(hub.name, hub.boot)
        #: Copies; the one that moved last is at the end.
        self._copies: dict[str, SlowMap] = {}
        #: Owner to the time until which its pull is under way.
        self._pulls: dict[str, float] = {}
        #: Owners whose last datagram answer did not reach the end: too much for datagrams, so TCP is next.
        self._large: set[str] = set()
        #: Owners of copies, whose mark was sent least lately first.
        self._turns: deque[str] = deque()
        #: Entries of all copies together, tombstones included.
        self._entries = 0

    # --- our own ------------------------------------------------------------------------------------------------------

    def put(self, key: bytes, value: bytes) -> None:
        """Set a key of ours. :raises LocalError: too large or too many."""
        self._own.put(key, value, self._hub.config.max_slow_keys)

    def delete(self, key: bytes, now: float) -> None:
        """Remove a key of ours."""
        self._own.delete(key, now)

    def collect(self, now: float) -> None:
        """Collect our own old tombstones and forget expired pulls."""
        self._own.collect(now, self._hub.config.tombstone_keep_s, self._hub.config.max_tombstones)
        self._pulls = {name: until for name, until in self._pulls.items() if until > now}

    # --- reading ------------------------------------------------------------------------------------------------------

    def of(self, name: str) -> Mapping[bytes, bytes]:
        """Give a node's keys; empty for a stranger."""
        found = self._find(name)
        return found.live if found is not None else _EMPTY

    def version(self, name: str) -> int:
        """How far we are in a node's slow state."""
        found = self._find(name)
        return found.version if found is not None else 0

    def names(self) -> set[str]:
        """Of whom there are copies."""
        return set(self._copies)

    def pulls(self) -> int:
        """How many pulls are under way."""
        return len(self._pulls)

    def _find(self, name: str) -> SlowMap | None:
        if name == self._hub.name:
            self._own.boot = self._hub.boot  # the boot number may have been raised meanwhile
            return self._own
        return self._copies.get(name)

    # --- marks --------------------------------------------------------------------------------------------------------

    def fill(self, builder: PacketBuilder, digest: bytes) -> None:
        """Add the marks of this tick to a packet, or ours alone where rumours have left little room."""
        if not builder.add(digest):
            builder.add(encode_part(SlowDigest((self._mark(self._hub.name),))))

    def digest(self) -> bytes:
        """Give the encoded marks of one tick: ours, those that moved last, then the others in turn (rule 5)."""
        budget = self._hub.config.slow_digest_bytes
        own = self._mark(self._hub.name)
        room = budget - _mark_bytes(own)
        marks = {own.name: own}
        for name in reversed(self._copies):
            if room < budget / 2 or not self._enter(marks, name, room):
                break
            room -= _mark_bytes(marks[name])
        for _ in range(len(self._turns)):
            self._turns.rotate(-1)
            name = self._turns[-1]
            if name in marks:
                continue
            if not self._enter(marks, name, room):
                self._turns.rotate(1)  # its turn is the next one
                break
            room -= _mark_bytes(marks[name])
        return encode_part(SlowDigest(tuple(marks.values())))

    def _enter(self, marks: dict[str, SlowMark], name: str, room: int) -> bool:
        mark = self._mark(name)
        fits = _mark_bytes(mark) <= room
        if fits:
            marks[name] = mark
        return fits

    def _mark(self, name: str) -> SlowMark:
        found = self._find(name)
        if found is None:
            return SlowMark(name, 1, 0)
        return SlowMark(name, found.boot, found.version)

    def digested(self, digest: SlowDigest, giver: Address, now: float) -> None:
        """A peer says how far it is."""
        for mark in digest.marks:
            self.offered(mark.name, mark.boot, mark.version, giver, now)

    def offered(self, name: str, boot: int, version: int, giver: Address, now: float) -> None:
        """Pull from `giver` if it is ahead of us in `name`'s slow state."""
        owner = self._membership.up(name)
        if owner is None or owner.boot != boot or self._hub.leaving:
            return
        gap = version - self.version(name)
        if gap <= 0 or self._pulls.get(name, now) > now:
            return
        if gap <= self._hub.config.slow_datagram_gap and name not in self._large:
            self._pulls[name] = now + DATAGRAM_PULL_S
            self._hub.send(giver, self._pull(owner))
        else:
            self._pull_stream(owner, giver, now)

    def _pull(self, owner: Member) -> SlowPull:
        copy = self._copies.get(owner.name)
        if copy is None:
            return SlowPull(owner.name, owner.boot, 0, 0)
        return SlowPull(owner.name, owner.boot, copy.version, copy.floor)

    def _pull_stream(self, owner: Member, giver: Address, now: float) -> None:
        if self._sessions.count(Purpose.SLOW) >= self._hub.config.slow_pulls:
            return
        if self._sessions.open(Purpose.SLOW, giver, (self._pull(owner),), owner.name, now):
            self._pulls[owner.name] = now + self._hub.config.session_timeout_s + 1

    # --- deltas -------------------------------------------------------------------------------------------------------

    def pulled_by_datagram(self, pull: SlowPull, source: Address) -> None:
        """Answer a pull with a few datagrams, each taking up where the last one ended."""
        base, floor = pull.base, pull.floor
        for _ in range(self._hub.config.slow_datagrams):
            packet = self._hub.packet()
            delta = self.give(SlowPull(pull.name, pull.boot, base, floor), packet.room - _DELTA_OVERHEAD)
            if delta is None:
                return
            self._hub.send(source, delta)
            if delta.upto == delta.latest:
                return
            base, floor = delta.upto, max(floor, delta.floor)

    def give(self, pull: SlowPull, max_bytes: int) -> SlowDelta | None:
        """Give the delta that a pull asks for, or None where we cannot help."""
        found = self._find(pull.name)
        if found is None or found.boot != pull.boot or found.version <= pull.base:
            return None
        return found.delta(pull.base, pull.floor, max_bytes)

    def receive(self, delta: SlowDelta, now: float) -> None:
        """Apply a delta that came by datagram.

        :raises RemoteError: more than we are willing to copy.
        """
        if not self._apply(delta) or delta.name not in self._pulls:
            return
        if delta.upto < delta.latest:
            self._large.add(delta.name)
            self._pulls[delta.name] = now + DATAGRAM_BURST_S
        else:
            self._finished(delta.name)

    def stream_replied(self, name: str, delta: SlowDelta | None, giver: Address, now: float) -> None:
        """A chunk came over TCP: apply it and fetch the next. :raises RemoteError: more than we are willing to copy."""
        self._finished(name)
        if delta is None or delta.name != name or not self._apply(delta):
            return
        owner = self._membership.up(name)
        if owner is not None and delta.upto < delta.latest:
            self._pull_stream(owner, giver, now)

    def _apply(self, delta: SlowDelta) -> bool:
        owner = self._membership.up(delta.name)
        if owner is None or owner.boot != delta.boot:
            return False
        copy = self._copies.get(delta.name) or SlowMap(delta.name, delta.boot)
        if self._entries + len(delta.entries) > self._hub.config.max_slow_entries:
            raise RemoteError("all slow state together is larger than allowed here")
        before = copy.entries
        applied = copy.apply(delta, self._hub.config.max_slow_keys, self._hub.config.max_tombstones)
        self._entries += copy.entries - before
        if applied is None:
            self._hub.counters["deltas_unused"] += 1
            return False
        if self._copies.pop(delta.name, None) is None:
            self._turns.append(delta.name)
        self._copies[delta.name] = copy
        if applied.reset:
            self._hub.notify(SlowReset(delta.name))
        if applied.changes:
            self._hub.notify(SlowChanged(delta.name, applied.changes))
        return True

    def _finished(self, name: str) -> None:
        self._pulls.pop(name, None)
        self._large.discard(name)

    def stream_failed(self, name: str) -> None:
        """A TCP pull came to nothing; the next mark starts another."""
        self._finished(name)

    def validate(self) -> None:
        """Check every map. :raises InvariantError: one contradicts itself."""
        for held in (self._own, *self._copies.values()):
            held.validate()
        if sorted(self._turns) != sorted(self._copies):
            raise InvariantError("slow state: a copy without a turn, or the reverse")
        if self._entries != sum(copy.entries for copy in self._copies.values()):
            raise InvariantError("slow state: the entries are miscounted")

    # --- following the members ----------------------------------------------------------------------------------------

    def member_up(self, member: Member, now: float) -> None:
        """Nothing to do: its marks will come."""

    def member_down(self, member: Member, now: float) -> None:
        """Copies die with the member (rule 4)."""
        self._finished(member.name)
        copy = self._copies.pop(member.name, None)
        if copy is not None:
            self._turns.remove(member.name)
            self._entries -= copy.entries
            self._hub.notify(SlowReset(member.name))

    def member_doubted(self, member: Member, now: float) -> None:
        """Nothing to do."""


def _mark_bytes(mark: SlowMark) -> int:
    return len(mark.name) + 18
