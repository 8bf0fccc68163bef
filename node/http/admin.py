"""``/admin/*``: drain, undrain, leave, join, keys, kv/warm. Needs the admin token; closed when none is set."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import orjson
from aiohttp import web

from node.addresses import split_address
from node.errors import SettingsError
from node.http.auth import check_admin
from node.http.errors import ApiError, ApiFailure, json_response
from node.http.intake import read_small_body
from node.http.keys import KeyControl, KeyRoutes
from node.http.kv import KvControl, KvRoutes
from node.http.router import Handler, Router

#: Addresses taken in one call.
MAX_SEEDS = 64


class Control(Protocol):
    """What an administrator can make the node do; `node.app` implements it."""

    def drain(self, on: bool) -> None:
        """Stop or resume taking new requests."""
        ...

    def leave(self) -> None:
        """Begin to stop: drain, tell the peers, end."""
        ...

    def join(self, addresses: Sequence[str]) -> None:
        """Dial these gossip addresses."""
        ...


class Admin:
    """The administrator's routes."""

    def __init__(
        self, token: str, control: Control, *, keys: KeyControl, kv: KvControl, active: Callable[[], int]
    ) -> None:
        self._token = token
        self._control = control
        self._keys = KeyRoutes(keys)
        self._kv = KvRoutes(kv)
        self._active = active

    def add_to(self, router: Router) -> None:
        """Add the routes."""
        router.add("POST", "/admin/drain", self._guarded(self._drain))
        router.add("POST", "/admin/undrain", self._guarded(self._undrain))
        router.add("POST", "/admin/leave", self._guarded(self._leave))
        router.add("POST", "/admin/join", self._guarded(self._join))
        router.add("GET", "/admin/keys", self._guarded(self._keys.show))
        router.add("POST", "/admin/keys", self._guarded(self._keys.change))
        router.add("POST", "/admin/kv/warm", self._guarded(self._kv.warm))
        router.add_prefix("/admin", self._guarded(self._unknown))

    def _guarded(self, handler: Callable[[web.BaseRequest], Awaitable[web.Response]]) -> Handler:
        async def guarded(request: web.BaseRequest) -> web.StreamResponse:
            error = check_admin(request.headers.get("Authorization"), self._token)
            if error is not None:
                raise ApiFailure(error)
            return await handler(request)

        return guarded

    async def _drain(self, request: web.BaseRequest) -> web.Response:
        self._control.drain(True)
        return json_response({"draining": True, "active": self._active()})

    async def _undrain(self, request: web.BaseRequest) -> web.Response:
        self._control.drain(False)
        return json_response({"draining": False, "active": self._active()})

    async def _leave(self, request: web.BaseRequest) -> web.Response:
        self._control.leave()
        return json_response({"leaving": True, "active": self._active()}, status=202)

    async def _join(self, request: web.BaseRequest) -> web.Response:
        addresses = _addresses(await read_small_body(request))
        self._control.join(addresses)
        return json_response({"dialled": addresses}, status=202)

    async def _unknown(self, request: web.BaseRequest) -> web.Response:
        raise ApiFailure(
            ApiError(404, "not_found", "There are /admin/drain, undrain, leave, join, keys and kv/warm, by POST.")
        )


def _addresses(body: bytes) -> list[str]:
    try:
        value = orjson.loads(body)
        addresses = value["addresses"] if isinstance(value, dict) else None
    except (ValueError, KeyError):
        addresses = None
    given = addresses if isinstance(addresses, list) else []
    if not 0 < len(given) <= MAX_SEEDS or not all(isinstance(address, str) for address in given):
        message = 'Send {"addresses": ["HOST:GOSSIP_PORT", ...]}.'
        raise ApiFailure(ApiError(400, "bad_addresses", message, param="addresses"))
    for address in given:
        try:
            split_address(address)
        except SettingsError as error:
            raise ApiFailure(ApiError(400, "bad_addresses", str(error), param="addresses")) from error
    return given
