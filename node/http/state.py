"""``/gossip/state`` and ``/gossip/members``: the whole view as this node sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

from aiohttp import web

from gossip import MemberView
from node.http.errors import json_response
from node.load import LoadVector
from node.registry import Registry

Members = Callable[[], list[MemberView]]
Snapshot = Callable[[], dict[str, object] | list[dict[str, object]]]


class StateRoutes:
    """The routes that show the cluster."""

    def __init__(
        self,
        name: str,
        cluster: str,
        *,
        members: Members,
        registry: Registry,
        sections: Mapping[str, Snapshot],
        decisions: Callable[[], list[dict[str, object]]],
    ) -> None:
        self._name = name
        self._cluster = cluster
        self._members = members
        self._registry = registry
        self._sections = sections
        self._decisions = decisions

    async def state(self, request: web.BaseRequest) -> web.Response:
        """The whole view."""
        told: dict[str, object] = {
            "self": self._name,
            "cluster": self._cluster,
            "members": [self._member(view) for view in self._sorted()],
        }
        told |= {name: snapshot() for name, snapshot in self._sections.items()}
        told["decisions"] = self._decisions()
        return json_response(told)

    async def members(self, request: web.BaseRequest) -> web.Response:
        """A short list."""
        short = []
        for view in self._sorted():
            meta = self._registry.meta(view.name)
            where = {"http": meta.http if meta else None, "url": meta.url if meta else None}
            short.append({"name": view.name, "state": view.state.value, **where})
        return json_response({"self": self._name, "cluster": self._cluster, "members": short})

    def _sorted(self) -> list[MemberView]:
        return sorted(self._members(), key=lambda view: (not view.is_self, view.name))

    def _member(self, view: MemberView) -> dict[str, object]:
        peer = self._registry.describe(view.name)
        load = peer.load
        return {
            "name": view.name,
            "state": view.state.value,
            "incarnation": view.incarnation,
            "address": f"{view.host}:{view.port}",
            "http": peer.http,
            "url": peer.url,
            "kv": peer.kv,
            "kv_encrypted": peer.kv_encrypted,
            "version": peer.version,
            "state_age_s": round(view.state_age_s, 3),
            "rtt_ms": None if view.rtt_s is None else round(view.rtt_s * 1000.0, 3),
            "models": sorted(peer.models),
            "fingerprints": {model: info.fingerprint.hex()[:12] for model, info in sorted(peer.models.items())},
            "load": None if load is None else _load(load),
            "load_age_s": None if peer.load_age_s is None else round(peer.load_age_s, 3),
            "load_seq": peer.load_seq,
            "latency": {} if load is None else dict(load.rtts),
            "transfer": {} if load is None else dict(load.rates),
            "digest_size": peer.digest_size,
            "suspected_by": list(view.suspected_by),
            "avoided": peer.avoided,
            "circuit": peer.circuit,
            "engine": {"ready": load is not None and load.ready, "slots": load.slots if load else 0},
        }


def _load(load: LoadVector) -> dict[str, object]:
    fields = asdict(load)
    del fields["rtts"], fields["rates"]  # shown beside it, as latency and transfer
    fields["prefill"] = load.prefill._asdict()
    fields["prefill_tps"] = load.prefill_tps
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in fields.items()}
