"""The main process's side of `passed.py`: its whole router on a Unix socket that only its workers use."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from node.errors import SettingsError
from node.http.request import Request
from node.http.router import Router

#: Connections that wait to be accepted.
BACKLOG = 1024


class InnerRouter:
    """Answers what workers pass on. ``settled`` waits until what the workers have said before is taken in."""

    def __init__(self, router: Router, settled: Callable[[], Awaitable[None]]) -> None:
        self._router = router
        self._settled = settled

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request as if its client had sent it here."""
        assert type(request) is Request
        request.passed_on()
        await self._settled()
        return await self._router.handle(request)


def listen_inside(path: Path) -> socket.socket:
    """Listen on a Unix socket of this user's. :raises SettingsError: it cannot be made."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(os.fspath(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise SettingsError(f"{path} cannot be made ({error.strerror}): choose another --run-dir") from error
    return listener
