"""Web pages of other origins: which may use the API from a browser, and what they are told (the Fetch standard's CORS).

Rules:
1. Nobody is allowed unless `--cors-origin` names the origin: a page that somebody happens to look at could otherwise
   use a node on `localhost` or of an intranet, and read its answers.
2. What the engine says about origins is replaced by what we say: vLLM on its own allows everybody.
3. Credentials of the browser (cookies) are never allowed. An API key that a page sends as `Authorization` is no such.
"""

from __future__ import annotations

import re

from aiohttp import web

from node.http.errors import ApiError, ApiFailure
from node.http.writer import Writer

#: Says that every origin is allowed.
ANY = "*"
#: Seconds that a browser may keep the answer to a preflight.
MAX_AGE_S = 600
_METHODS = "GET, HEAD, POST, PUT, PATCH, DELETE"
#: What a page may read beside the headers that every page may.
_EXPOSED = "x-request-id, x-grapevine-target, x-grapevine-reason, x-grapevine-hops, retry-after"
#: Names of headers that a page wants to send, as a browser lists them.
_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:, ?[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")


class Cors:
    """What `allowed` origins may do."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = frozenset(origin.lower() for origin in allowed)

    def meet(self, request: web.BaseRequest, origin: str) -> web.Response | None:
        """Prepare the answer to a page of `origin`; returns it when the request only asks for permission.

        :raises ApiFailure: 403, it asks for permission and gets none.
        """
        granted = self._granted(origin)
        writer = request.writer
        assert isinstance(writer, Writer)
        writer.cross_origin = granted
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            return None
        if not granted:
            message = f"Pages of {origin[:200]} may not use this node: --cors-origin names those that may."
            raise ApiFailure(ApiError(403, "origin_not_allowed", message))
        headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": str(MAX_AGE_S)}
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        if _NAMES.fullmatch(wanted):
            headers["Access-Control-Allow-Headers"] = wanted
        writer.cross_origin += tuple(headers.items())
        return web.Response(status=204)

    def _granted(self, origin: str) -> tuple[tuple[str, str], ...]:
        if ANY in self._allowed:
            return (("Access-Control-Allow-Origin", ANY), ("Access-Control-Expose-Headers", _EXPOSED))
        if origin.lower() not in self._allowed:
            return ()
        return (
            ("Access-Control-Allow-Origin", origin),
            ("Access-Control-Expose-Headers", _EXPOSED),
            ("Vary", "Origin"),
        )
