"""What our engine serves, as the records that peers read: the engine's own list joined with the connector's facts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from kvmigrate.fingerprint import NO_FINGERPRINT
from kvmigrate.layout import FINGERPRINT_BYTES
from kvmigrate.link import Hello
from node.engine.events import EngineModel
from node.models import MAX_KV_TOKENS, ModelInfo


def own_models(
    models: Iterable[EngineModel], hello: Hello | None, *, name: str, created: int, kv_tokens: int = 0
) -> dict[str, ModelInfo]:
    """Return the records. ``hello`` is the connector's, None while it is not there; ``created`` in unix seconds.

    ``kv_tokens`` are those that the engine's KV cache holds, for all of them together; 0 = not known.
    Adapters get no fingerprint: their contents are in no hash, so their blocks are never exchanged. An incomplete one
    is told as one that only the node ``name`` has: it equals nobody's, and peers see that.
    """
    records: dict[str, ModelInfo] = {}
    for model in models:
        adapter = model.parent is not None
        kv = hello if hello is not None and hello.supported and not adapter else None
        records[model.id] = ModelInfo(
            id=model.id,
            kind="adapter" if adapter else "base",
            max_model_len=model.max_model_len or 0,
            root=model.root,
            parent=model.parent or "",
            block_size=kv.block_size if kv else 0,
            kv_token_bytes=kv.block_bytes * kv.ranks // max(1, kv.block_size) if kv else 0,
            fingerprint=_told(kv.fingerprint, name) if kv else b"",
            kv_tokens=min(kv_tokens, MAX_KV_TOKENS),
            created=created,
        )
    return records


def _told(fingerprint: bytes, name: str) -> bytes:
    if fingerprint != NO_FINGERPRINT:
        return fingerprint
    return hashlib.blake2b(name.encode(), digest_size=FINGERPRINT_BYTES, person=b"gv-incomplete").digest()
