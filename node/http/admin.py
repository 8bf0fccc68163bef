"""``/admin/*``: drain, undrain, leave, join, keys, kv/warm. Needs the admin token; closed when none is set."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import orjson
from aiohttp import web
from prometheus_client import Counter

from node.addresses import split_address
from node.errors import SettingsError
from node.http.auth import check_admin
from node.http.errors import ApiError, ApiFailure, json_response
from node.http.intake import read_small_body, request_id
from node.http.keys import KeyControl, KeyRoutes
from node.http.kv import KvControl, KvRoutes
from node.http.router import Handler, Router
from node.logs import set_request
from node.settings import RANGES, Settings

#: Addresses taken in one call.
MAX_SEEDS = 64

_log = logging.getLogger("grapevine.admin")


class Control(Protocol):
    """What an administrator can make the node do; `node.assembly` implements it."""

    def drain(self, timeout_s: float) -> None:
        """Take nothing new, move what can move, wait for the rest."""
        ...

    async def resume(self) -> None:
        """Take work again."""
        ...

    def leave(self, timeout_s: float) -> None:
        """Begin to stop: drain, tell the peers, end."""
        ...

    def join(self, addresses: Sequence[str]) -> None:
        """Dial these gossip addresses."""
        ...

    def drain_status(self) -> dict[str, object]:
        """How the drain goes, JSON-able."""
        ...


class Admin:
    """The administrator's routes."""

    def __init__(
        self, settings: Settings, control: Control, *, keys: KeyControl, kv: KvControl, calls: Counter
    ) -> None:
        self._settings = settings
        self._control = control
        self._calls = calls
        self._keys = KeyRoutes(keys)
        self._kv = KvRoutes(kv)

    def add_to(self, router: Router) -> None:
        """Add the routes."""
        router.add("GET", "/admin/drain", self._guarded(self._status))
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
            error = check_admin(request.headers.get("Authorization"), self._settings.admin_token)
            if error is not None:
                self._calls.labels("refused").inc()
                raise ApiFailure(error)
            self._calls.labels("done").inc()
            set_request(request_id(request))
            if request.method != "GET":
                _log.info("%s %s by an administrator at %s", request.method, request.path[:200], request.remote)
            return await handler(request)

        return guarded

    async def _status(self, request: web.BaseRequest) -> web.Response:
        return self._told()

    async def _drain(self, request: web.BaseRequest) -> web.Response:
        self._control.drain(await self._timeout(request))
        return self._told(202)

    async def _undrain(self, request: web.BaseRequest) -> web.Response:
        if self._control.drain_status()["leaving"]:
            raise ApiFailure(ApiError(409, "leaving", "This node is about to end: start it again under the same name."))
        await self._control.resume()
        return self._told()

    async def _leave(self, request: web.BaseRequest) -> web.Response:
        self._control.leave(await self._timeout(request))
        return self._told(202)

    async def _join(self, request: web.BaseRequest) -> web.Response:
        addresses = _addresses(await read_small_body(request))
        self._control.join(addresses)
        return json_response({"dialled": addresses}, status=202)

    async def _unknown(self, request: web.BaseRequest) -> web.Response:
        raise ApiFailure(
            ApiError(404, "not_found", "There are /admin/drain, undrain, leave, join, keys and kv/warm, by POST.")
        )

    def _told(self, status: int = 200) -> web.Response:
        return json_response({"name": self._settings.name, **self._control.drain_status()}, status=status)

    async def _timeout(self, request: web.BaseRequest) -> float:
        """The seconds that the body asks for; those of the settings without one."""
        body = await read_small_body(request)
        try:
            value = orjson.loads(body) if body.strip() else {}
        except ValueError:
            value = None
        timeout = value.get("timeout_s", self._settings.stop_grace_s) if isinstance(value, dict) else None
        most = RANGES["stop_grace_s"][1]
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout <= most:
            message = f'Send {{"timeout_s": SECONDS}} with a number from 0 to {most:g}, or no body.'
            raise ApiFailure(ApiError(400, "bad_timeout", message, param="timeout_s"))
        return float(timeout)


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
