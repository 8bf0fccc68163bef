"""What travels with a member record: where a node's HTTP and KV servers are. msgpack, at most 512 bytes."""

from __future__ import annotations

from dataclasses import dataclass

from node.errors import RemoteError
from node.wire import pack, text, unpack_map

#: Gossip's limit for the meta of a member.
MAX_META = 512
_MAX_ADDRESS = 160
_MAX_VERSION = 64


@dataclass(frozen=True, slots=True)
class NodeMeta:
    """Addresses are host:port; ``kv`` is empty where no KV is served."""

    http: str
    kv: str = ""
    version: str = ""

    def encode(self) -> bytes:
        """Pack for the member record."""
        return pack({"h": self.http, "k": self.kv, "v": self.version})


def decode_meta(data: bytes) -> NodeMeta:
    """Unpack a peer's meta. Raises `RemoteError` and nothing else."""
    fields = unpack_map(data, MAX_META, "meta")
    http = text(fields, "h", _MAX_ADDRESS)
    host, _, port = http.rpartition(":")
    if not host or not port.isdigit() or set(http) & set("/@?# "):
        raise RemoteError("meta: no HTTP address")
    return NodeMeta(http, text(fields, "k", _MAX_ADDRESS, ""), text(fields, "v", _MAX_VERSION, ""))
