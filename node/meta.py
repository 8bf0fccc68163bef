"""What travels with a member record: where a node's HTTP and KV servers are. msgpack, at most 512 bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from node.addresses import MAX_PORT
from node.errors import RemoteError
from node.wire import pack, text, unpack_map

#: Gossip's limit for the meta of a member.
MAX_META = 512
_MAX_ADDRESS = 160
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_MAX_VERSION = 64
_MAX_BOOT = 32


@dataclass(frozen=True, slots=True)
class NodeMeta:
    """Addresses are host:port; ``kv`` is empty where no KV is served.

    ``tls``: the HTTP server speaks TLS. ``boot`` names the process, so that calls can be signed for it alone.
    ``kv_tls``: KV blocks travel over TLS; None where an older node does not say.
    """

    http: str
    kv: str = ""
    version: str = ""
    tls: bool = False
    boot: str = ""
    kv_tls: bool | None = None

    def encode(self) -> bytes:
        """Pack for the member record."""
        fields = {"h": self.http, "k": self.kv, "v": self.version, "s": self.tls, "b": self.boot}
        return pack(fields if self.kv_tls is None else {**fields, "e": self.kv_tls})

    @property
    def url(self) -> str:
        """The URL of its HTTP server, without a slash at its end."""
        return f"{'https' if self.tls else 'http'}://{self.http}"


def decode_meta(data: bytes) -> NodeMeta:
    """Unpack a peer's meta. Raises `RemoteError` and nothing else."""
    fields = unpack_map(data, MAX_META, "meta")
    http, kv = text(fields, "h", _MAX_ADDRESS), text(fields, "k", _MAX_ADDRESS, "")
    if not _is_address(http):
        raise RemoteError("meta: no HTTP address")
    if kv and not _is_address(kv):
        raise RemoteError("meta: no KV address")
    tls = fields.get("s", False)
    if not isinstance(tls, bool):
        raise RemoteError("meta: bad mark of TLS")
    kv_tls = fields.get("e")
    if kv_tls is not None and not isinstance(kv_tls, bool):
        raise RemoteError("meta: bad mark of TLS for KV blocks")
    return NodeMeta(http, kv, text(fields, "v", _MAX_VERSION, ""), tls, text(fields, "b", _MAX_BOOT, ""), kv_tls)


def _is_address(value: str) -> bool:
    match = _ADDRESS.fullmatch(value)
    return match is not None and 0 < int(match[1]) <= MAX_PORT
