"""The invariants of an endpoint, each stated once. Tests call them at every teardown.

1. A suspicion and its timer exist exactly for the members that are SUSPECT.
2. Rows, copies of slow state, round-trip times and coordinates belong to members that are up.
3. At every address at most one member is the tenant, and it is up.
4. We are never in our own table, and never hold ourselves for dead while we run.
5. Every queue and table is within its bound.
6. A slow map's versions rise along its log, never exceed its version, and its live keys are all in the log.
"""

from __future__ import annotations

from gossip.endpoint import Endpoint
from gossip.errors import InvariantError
from gossip.member import MemberState
from gossip.prober import MAX_RELAYS


def check(endpoint: Endpoint) -> None:
    """Check them all. :raises InvariantError: the first that does not hold."""
    _suspicions(endpoint)
    _belongings(endpoint)
    _ourselves(endpoint)
    _bounds(endpoint)
    endpoint.slow.validate()


def _require(holds: bool, story: str) -> None:
    if not holds:
        raise InvariantError(story)


def _suspicions(endpoint: Endpoint) -> None:
    timers = endpoint.timers
    for m in endpoint.membership:
        suspected = m.state is MemberState.SUSPECT
        _require((m.suspicion is not None) == suspected, f"{m.name} is {m.state} with suspicion {m.suspicion}")
        _require((timers[m.name] is not None) == suspected, f"{m.name} is {m.state}, timer {timers[m.name]}")


def _belongings(endpoint: Endpoint) -> None:
    up = {m.name for m in endpoint.membership if m.state.is_up}
    me = endpoint.identity.name
    _require(endpoint.rows.names() <= up | {me}, "a row without a living owner")
    _require(endpoint.slow.names() <= up, "slow state without a living owner")
    _require(endpoint.rtts.names() <= up, "a round-trip time without a living peer")
    _require(endpoint.coordinates.names() <= up, "a coordinate without a living member")
    _require(endpoint.membership.size() == len(up) + 1, "the cluster's size is miscounted")
    for m in endpoint.membership:
        tenant = endpoint.membership.tenant(m.address)
        _require(tenant is None or tenant.address == m.address, f"{m.address} is rented to {tenant}")


def _ourselves(endpoint: Endpoint) -> None:
    me = endpoint.identity.name
    _require(endpoint.membership.get(me) is None, "we are in our own table")
    own = endpoint.own_view(0.0)
    _require(own.state is (MemberState.LEFT if endpoint.leaving else MemberState.ALIVE), "we hold ourselves for dead")


def _bounds(endpoint: Endpoint) -> None:
    config, members = endpoint.config, len(endpoint.membership)
    _require(members <= config.max_members, "too many members")
    _require(len(endpoint.membership.broadcasts) <= members + 1, "more rumours than members")
    _require(len(endpoint.exchange.book) <= config.max_addresses, "too many addresses")
    _require(len(endpoint.sessions) <= config.max_sessions, "too many sessions")
    probes, relays = endpoint.prober.under_way()
    _require(relays <= MAX_RELAYS, "too many relays")
    _require(probes <= members, "more probes than members")
