"""KV in the node's state: what `/gossip/state` and `grapevine kv` show. Plain JSON values, no text of any prompt."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node.kv import KvSide

#: Prefixes shown.
TOP_SHOWN = 10


def snapshot(kv: KvSide) -> dict[str, object]:
    """Everything; without a pool only the size of the guessed digest."""
    if kv.pool is None or kv.server is None or kv.puller is None or kv.link is None:
        return {"enabled": False, "digest_size": len(kv.digest)}
    stats, pulled, status = kv.pool.stats(), kv.puller.stats(), kv.link.status()
    asked = stats.hits + stats.misses
    return {
        "enabled": True,
        "path": str(kv.settings.pool_path),
        "why": status.why,
        "connected": kv.connected,
        "encrypted": kv.settings.kv_tls,
        "digest_size": len(kv.digest),
        "block_tokens": kv.hello.block_size if kv.hello is not None else 0,
        "fingerprint": kv.fields(),
        "unlike": kv.unlike(),
        "pool": asdict(stats) | {"hit_ratio": round(stats.hits / asked, 4) if asked else 0.0},
        "tokens": dict(kv.tokens),
        "top": [prefix.as_dict() for prefix in kv.digest.top(TOP_SHOWN)],
        "served": asdict(kv.server.stats()),
        "pulls": asdict(pulled),
        "peers": kv.peers.snapshot(),
        "corrupt": stats.corrupt + pulled.corrupt,
        "rates_bytes_s": kv.rates.network(),
        "copy_bytes_s": round(kv.rates.copy_bytes_s),
    }
