"""Every knob of gossip, with its unit, range and trade-off. A config is immutable and the same for a node's life."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

from gossip import limits
from gossip.errors import LocalError

#: Cluster size that the presets leave room for unless they are told.
DEFAULT_NODES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipConfig:
    """Settings of one endpoint. The defaults are the `lan` preset.

    Nodes of one cluster should share a preset, but nothing breaks where they differ: the timers are local.

    :raises LocalError: a value is outside its range or contradicts another.
    """

    # --- failure detection
    #: Seconds between two round-robin probes. 0.1 to 30. A crash is first noticed after about 1.6 of these whatever
    #: the cluster's size; bytes and false alarms grow as it shrinks. Scaled up by local health.
    probe_interval_s: float = 0.5
    #: Seconds until an unanswered ping goes indirect (and over TCP). Above the worst usual round trip, below the probe
    #: interval; the difference is what the indirect probes have to answer in.
    probe_timeout_s: float = 0.2
    #: Peers asked to probe in our stead, 0 to 8. More of them survive a bad path between two nodes, at 3 packets each.
    indirect_probes: int = 3
    #: Suspicion lasts at least this many probe intervals (times log100 n above a hundred nodes). 1 to 16. Lower kills
    #: sooner and forgives shorter stalls.
    suspicion_mult: float = 3.5
    #: An unconfirmed suspicion lasts this many times longer than a confirmed one. 1 to 8.
    suspicion_max_mult: float = 4
    #: Further accusers that bring a suspicion down to its shortest, 0 to 16. In a cluster too small for them, none.
    suspicion_confirmations: int = 2
    #: Worst score of local health, 1 to 16: a node that misses acks itself probes up to this many times slower.
    health_max: int = 8
    #: A handler that runs this much later than asked, in seconds, was itself stopped; it then blames nobody for it.
    #: Above the scheduling delay of a busy host, below the suspicion time.
    stall_s: float = 1.0

    # --- dissemination
    #: Seconds between two gossip ticks, 0.05 to 5. Rows and rumours wait up to this long at every hop.
    gossip_interval_s: float = 0.2
    #: Peers that hear from us at each tick, 1 to 16. 3 is enough for 1000 nodes; bytes grow with it.
    fanout: int = 3
    #: A rumour is sent `mult * ceil(log10(n+1))` times by each node that holds it. 1 to 16.
    retransmit_mult: int = 4
    #: Bytes of payload of one datagram, 1400 to 8900. 1400 passes any Ethernet unfragmented, and holds the largest row
    #: and the largest slow-state entry, which is why it must not be less. Sealing (38 bytes) comes out of it.
    datagram_budget: int = 1400
    #: Most datagrams with load rows per peer and tick, 1 to 6. How many are used follows the cluster's size: 1 up to 60
    #: members, 1.2 at 100, 5.9 at 1000. One holds about 31 rows of 32 bytes; at fan-out 3 and 200 ms each is 21 KB/s.
    row_datagrams: int = 6
    #: Seconds between two exchanges of the whole member table over TCP, 1 to 600. It repairs what rumours missed; above
    #: 32 nodes it is stretched by `ceil(log2 n - 5) + 1`.
    push_pull_interval_s: float = 15.0

    # --- the dead
    #: Seconds for which a dead member still gets gossip, so that a false death is refuted. Below `dead_keep_s`.
    gossip_to_dead_s: float = 30.0
    #: Seconds until a dead or departed member is forgotten entirely. Above twice the push/pull interval, so that
    #: every peer hears of the death before anyone forgets it.
    dead_keep_s: float = 120.0
    #: First and longest pause, in seconds, between two dials of a silent seed or of a dead member's address. A healed
    #: partition is found within the longest one.
    redial_min_s: float = 0.5
    redial_max_s: float = 8.0
    #: Addresses of seeds and of the dead that are remembered for dialling, 8 to 4096.
    max_addresses: int = 256
    #: Members held, the dead included, 8 to 4096. Further ones are ignored and counted.
    max_members: int = 4096

    # --- load rows
    #: Largest own row, in bytes, up to 1024: a row must fit one datagram.
    max_row_bytes: int = limits.MAX_ROW_BYTES
    #: Seconds after which a row is no longer passed on. It stays readable with its age.
    row_relay_s: float = 5.0

    # --- slow state
    #: Bytes of version marks in a gossip datagram, 100 to 800.
    slow_digest_bytes: int = 300
    #: A copy that is behind by at most this many versions asks by datagram, beyond that over TCP. 1 to 1000.
    slow_datagram_gap: int = 64
    #: Datagrams that answer one such request at most, 1 to 16.
    slow_datagrams: int = 4
    #: Bytes of one TCP chunk, 4096 to 1 MiB. Decoding one holds the event loop for about 10 ms per 128 KiB.
    slow_chunk_bytes: int = 131_072
    #: TCP pulls of slow state at a time, 1 to 16.
    slow_pulls: int = 4
    #: Keys per owner, 1 to 65536: ours are refused beyond it, a peer's copy stops growing.
    max_slow_keys: int = 65_536
    #: Entries of all copies together, 1000 to 100 million: beyond it they stop growing. One takes about 250 bytes here.
    max_slow_entries: int = 4_000_000
    #: Tombstones per owner, 16 to 65536, and seconds until one is collected. A copy that is further behind than the
    #: collected ones is read anew from the beginning.
    max_tombstones: int = 16_384
    tombstone_keep_s: float = 60.0

    # --- streams
    #: Seconds for a whole TCP exchange, and how many run at a time in each direction, 4 to 256.
    session_timeout_s: float = 3.0
    max_sessions: int = 32
    #: Seconds that `leave()` takes at most.
    leave_timeout_s: float = 0.6

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise LocalError(f"{name} = {value}: allowed is {least} to {most}")
        if self.probe_timeout_s >= self.probe_interval_s:
            raise LocalError("probe_timeout_s must be below probe_interval_s")
        if self.gossip_to_dead_s > self.dead_keep_s:
            raise LocalError("gossip_to_dead_s must not exceed dead_keep_s")
        if self.redial_min_s > self.redial_max_s:
            raise LocalError("redial_min_s must not exceed redial_max_s")

    @classmethod
    def loopback(cls, *, nodes: int = DEFAULT_NODES, **changes: Any) -> Self:
        """Several nodes on one host, whose cores the engines may keep busy: quick, but patient with stalls."""
        return replace(
            cls(
                probe_timeout_s=0.25,
                suspicion_mult=5,
                suspicion_max_mult=2,
                push_pull_interval_s=10.0,
                gossip_to_dead_s=20.0,
                dead_keep_s=60.0,
                redial_max_s=5.0,
            ),
            **(sized(nodes) | changes),
        )

    @classmethod
    def lan(cls, *, nodes: int = DEFAULT_NODES, **changes: Any) -> Self:
        """One data centre: round trips of a few milliseconds."""
        return replace(cls(), **(sized(nodes) | changes))

    @classmethod
    def wan(cls, *, nodes: int = DEFAULT_NODES, **changes: Any) -> Self:
        """Sites far apart: round trips up to half a second, some loss."""
        return replace(
            cls(
                probe_interval_s=2.0,
                probe_timeout_s=1.0,
                suspicion_mult=5,
                suspicion_max_mult=6,
                gossip_interval_s=0.5,
                fanout=4,
                push_pull_interval_s=45.0,
                gossip_to_dead_s=60.0,
                dead_keep_s=300.0,
                redial_min_s=1.0,
                redial_max_s=20.0,
                session_timeout_s=8.0,
                leave_timeout_s=2.0,
                stall_s=2.0,
            ),
            **(sized(nodes) | changes),
        )


def sized(nodes: int) -> dict[str, Any]:
    """Give the fields that bound memory, with room for four times the expected number of nodes.

    What time and bytes depend on (datagrams of rows, retransmits, suspicion, exchanges of tables, doubts) follows the
    real size at run time, so that nothing has to be set again as a cluster grows.

    :raises LocalError: not 1 to 4096.
    """
    if not 1 <= nodes <= limits.MAX_RECORDS:
        raise LocalError(f"nodes = {nodes}: allowed is 1 to {limits.MAX_RECORDS}")
    return {
        "max_members": min(limits.MAX_RECORDS, max(64, 4 * nodes)),
        "max_addresses": min(4096, max(64, nodes)),
        "max_slow_entries": max(500_000, 4000 * nodes),
    }


_RANGES: dict[str, tuple[float, float]] = {
    "probe_interval_s": (0.1, 30),
    "probe_timeout_s": (0.01, 30),
    "indirect_probes": (0, 8),
    "suspicion_mult": (1, 16),
    "suspicion_confirmations": (0, 16),
    "suspicion_max_mult": (1, 8),
    "health_max": (1, 16),
    "stall_s": (0.1, 60),
    "gossip_interval_s": (0.05, 5),
    "fanout": (1, 16),
    "retransmit_mult": (1, 16),
    "datagram_budget": (1400, 8900),
    "row_datagrams": (1, 6),
    "push_pull_interval_s": (1, 600),
    "gossip_to_dead_s": (0, 3600),
    "dead_keep_s": (1, 86_400),
    "redial_min_s": (0.05, 600),
    "redial_max_s": (0.05, 3600),
    "max_addresses": (8, 4096),
    "max_members": (8, limits.MAX_RECORDS),
    "max_row_bytes": (1, limits.MAX_ROW_BYTES),
    "row_relay_s": (0.1, 600),
    "slow_digest_bytes": (100, 800),
    "slow_datagram_gap": (1, 1000),
    "slow_datagrams": (1, 16),
    "slow_chunk_bytes": (4096, 1 << 20),
    "slow_pulls": (1, 16),
    "max_slow_keys": (1, 65_536),
    "max_slow_entries": (1000, 100_000_000),
    "max_tombstones": (16, 65_536),
    "tombstone_keep_s": (1, 86_400),
    "session_timeout_s": (0.1, 60),
    "max_sessions": (4, 256),
    "leave_timeout_s": (0, 30),
}
if missing := {f.name for f in fields(GossipConfig)} ^ set(_RANGES):  # pragma: no cover - a slip while editing
    raise AssertionError(f"ranges and fields differ: {missing}")
