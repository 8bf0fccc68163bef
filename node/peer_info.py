"""One node as `/gossip/state` shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from node.load import LoadVector
from node.meta import NodeMeta
from node.models import ModelInfo
from node.view import Candidate


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """One node as `/gossip/state` shows it."""

    http: str | None = None
    url: str | None = None
    kv: str | None = None
    kv_encrypted: bool | None = None
    version: str = ""
    load: LoadVector | None = None
    load_age_s: float | None = None
    load_seq: int = 0
    models: Mapping[str, ModelInfo] = field(default_factory=dict)
    digest_size: int = 0
    avoided: bool = False
    #: How it stands with calls to it (`node.circuits`); None where nothing has failed.
    circuit: Mapping[str, object] | None = None


def peer_info(
    node: Candidate,
    meta: NodeMeta | None,
    *,
    own: LoadVector | None,
    digest_size: int,
    avoided: bool,
    circuit: Mapping[str, object] | None,
    now: float,
) -> PeerInfo:
    """Put together what is known; ``own`` is the live vector when the node is ourselves."""
    heard = node.seq > 0
    return PeerInfo(
        http=meta.http if meta else None,
        url=meta.url if meta else None,
        kv=meta.kv if meta else None,
        kv_encrypted=meta.kv_tls if meta else None,
        version=meta.version if meta else "",
        load=own or (node.load if heard else None),
        load_age_s=0.0 if own else node.age_s(now) if heard else None,
        load_seq=node.seq,
        models=node.models,
        digest_size=digest_size,
        avoided=avoided,
        circuit=circuit,
    )
