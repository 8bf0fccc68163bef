"""``/admin/kv/warm``: copy the KV blocks that a peer uses most, in steps of bounded time."""

from __future__ import annotations

from typing import Protocol

import orjson
from aiohttp import web

from kvmigrate.warm import WarmResult
from node.http.errors import ApiError, ApiFailure, json_response
from node.http.intake import read_small_body

_USAGE = 'Send {"from": "NODE", "max_bytes": BYTES}; repeat it until the answer says "whole": true.'
#: Largest `max_bytes`.
MAX_BYTES = 1 << 50


class KvControl(Protocol):
    """What the route needs of `node.kv.KvSide`."""

    async def warm(self, source: str, max_bytes: int) -> WarmResult | str:
        """Copy; a text says why it cannot be done."""
        ...


class KvRoutes:
    """The handler; `node.http.admin` guards it."""

    def __init__(self, control: KvControl) -> None:
        self._control = control

    async def warm(self, request: web.BaseRequest) -> web.Response:
        """One step: what came in it, and whether that is all."""
        source, max_bytes = _read(await read_small_body(request))
        result = await self._control.warm(source, max_bytes)
        if isinstance(result, str):
            raise ApiFailure(ApiError(409, "cannot_warm", result, param="from"))
        return json_response(
            {
                "from": source,
                "whole": result.whole,
                "reason": result.reason,
                "detail": result.detail,
                "prefixes": len(result.chains),
                "blocks": result.blocks,
                "bytes": result.bytes,
                "seconds": round(result.seconds, 4),
            }
        )


def _read(body: bytes) -> tuple[str, int]:
    try:
        value = orjson.loads(body)
    except ValueError:
        value = None
    source = value.get("from") if isinstance(value, dict) else None
    most = value.get("max_bytes", MAX_BYTES) if isinstance(value, dict) else None
    if not isinstance(source, str) or type(most) is not int or not 0 < most <= MAX_BYTES:
        raise ApiFailure(ApiError(400, "bad_warm", _USAGE))
    return source, most
