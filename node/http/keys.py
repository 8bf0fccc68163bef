"""``/admin/keys``: the ids of the cluster keys, and their rotation. A key itself is taken, never given."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

import orjson
from aiohttp import web

from node.errors import LocalError
from node.http.errors import ApiError, ApiFailure, json_response
from node.http.intake import read_small_body

_USAGE = 'Send one of {"add": "TEXT OF THE KEY"}, {"use": "ID"}, {"remove": "ID"}.'


class KeyControl(Protocol):
    """The ring of the node; `node.assembly` implements it."""

    def list(self) -> list[dict[str, object]]:
        """Ids, which one seals, and how much each has opened."""
        ...

    def add(self, text: str) -> Awaitable[object]:
        """Open with this key too."""
        ...

    def use(self, key_id: str) -> None:
        """Seal with this key."""
        ...

    def remove(self, key_id: str) -> None:
        """Forget a key."""
        ...


class KeyRoutes:
    """The handlers; `node.http.admin` guards them."""

    def __init__(self, control: KeyControl) -> None:
        self._control = control

    async def show(self, request: web.BaseRequest) -> web.Response:
        """The ring, without its keys."""
        return json_response({"keys": self._control.list()})

    async def change(self, request: web.BaseRequest) -> web.Response:
        """One step of a rotation; answers with the ring after it."""
        action, value = _read(await read_small_body(request))
        try:
            if action == "add":
                await self._control.add(value)
            elif action == "use":
                self._control.use(value)
            else:
                self._control.remove(value)
        except LocalError as error:
            raise ApiFailure(ApiError(409, "bad_key", str(error), param=action)) from error
        return await self.show(request)


def _read(body: bytes) -> tuple[str, str]:
    try:
        told = orjson.loads(body)
    except ValueError:
        told = None
    if isinstance(told, dict) and len(told) == 1:
        ((action, value),) = told.items()
        if action in ("add", "use", "remove") and isinstance(value, str):
            return action, value
    raise ApiFailure(ApiError(400, "bad_key", _USAGE))
