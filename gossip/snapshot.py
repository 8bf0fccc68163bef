"""The view of one node as plain JSON types, for `/gossip/state`."""

from __future__ import annotations

from typing import Any

from gossip.build import is_compiled
from gossip.endpoint import Endpoint
from gossip.member import MemberView


def snapshot(endpoint: Endpoint, now: float) -> dict[str, Any]:
    """Give members, rows and slow state in brief; times in seconds unless the name says ms."""
    me = endpoint.identity
    return {
        "name": me.name,
        "cluster": me.cluster,
        "incarnation": me.incarnation,
        "address": f"{_bracketed(me.host)}:{me.port}",
        "leaving": endpoint.leaving,
        "compiled": is_compiled(),
        "health_score": endpoint.health.score,
        "keys": list(endpoint.envelope.keyring.ids),
        "members": [_member(endpoint, view, now) for view in endpoint.members(now)],
        "coordinate": _coordinate(endpoint, me.name),
        "row_age_bound_s": round(endpoint.heartbeat.bound_s, 3),
        "broadcasts_queued": len(endpoint.membership.broadcasts),
        "addresses_remembered": len(endpoint.exchange.book),
        "counters": {name: count for name, count in sorted(endpoint.counters.items()) if count},
    }


def _member(endpoint: Endpoint, view: MemberView, now: float) -> dict[str, Any]:
    row = endpoint.row(view.name, now)
    return {
        "name": view.name,
        "state": view.state.value,
        "is_self": view.is_self,
        "verified": view.verified,
        "incarnation": view.incarnation,
        "refutations": view.refutations,
        "address": f"{_bracketed(view.host)}:{view.port}",
        "state_age_s": round(view.state_age_s, 3),
        "rtt_ms": _ms(view.rtt_s),
        "estimated_rtt_ms": _ms(endpoint.estimate_rtt_s(endpoint.identity.name, view.name)),
        "coordinate": _coordinate(endpoint, view.name),
        "suspected_by": list(view.suspected_by),
        "row_seq": row.seq if row else None,
        "row_age_s": round(row.age_s, 3) if row else None,
        "row_bytes": len(row.payload) if row else None,
        "slow_version": endpoint.slow.version(view.name),
        "slow_keys": len(endpoint.slow_of(view.name)),
        "meta": view.meta.hex(),
    }


def _coordinate(endpoint: Endpoint, name: str) -> dict[str, Any] | None:
    """Give a node's place: milliseconds, and how sure it is of it (0 for sure)."""
    place = endpoint.coordinates.of(name)
    if place is None:
        return None
    return {
        "vector_ms": [round(v * 1000, 3) for v in place.vector],
        "height_ms": _ms(place.height),
        "adjustment_ms": _ms(place.adjustment),
        "error": round(place.error, 3),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
