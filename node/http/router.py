"""Paths to handlers: exact ones first, then prefixes. Errors become answers here and nowhere else."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from urllib.parse import unquote

from aiohttp import web

from node.http.errors import ApiError, ApiFailure

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_log = logging.getLogger("grapevine.http")

#: Refusals whose body was not read: the connection cannot be used again.
_UNREAD = frozenset({408, 413, 417, 429})


class Router:
    """A small table; matching works on the raw path, so that nothing is decoded or normalised."""

    def __init__(self) -> None:
        self._exact: dict[str, dict[str, Handler]] = {}
        self._prefixes: list[tuple[str, Handler]] = []

    def add(self, method: str, path: str, handler: Handler) -> None:
        """Route one method of one path."""
        self._exact.setdefault(path, {})[method] = handler

    def add_all(self, path: str, handler: Handler) -> None:
        """Route every method of one path."""
        self._exact.setdefault(path, {})["*"] = handler

    def add_prefix(self, prefix: str, handler: Handler) -> None:
        """Route every method of every path that begins with ``prefix``; the first match wins."""
        self._prefixes.append((prefix, handler))

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        try:
            return await self._find(request)(request)
        except ApiFailure as failure:
            response = failure.error.response(failure.headers)
            if failure.error.status in _UNREAD:
                response.force_close()
            return response
        except ConnectionError:
            raise  # the client is gone, nobody reads an answer
        except Exception:
            _log.exception("a handler failed: %s %s", request.method, request.path)
            if request.writer.output_size:  # an answer has begun: only a cut says that it is not whole
                raise ConnectionResetError("the answer broke off") from None
            return ApiError(500, "internal_error", "The node failed; its log says how.").response()

    def _find(self, request: web.BaseRequest) -> Handler:
        path = request.raw_path.partition("?")[0]
        if _climbs(path):
            # We match what was sent, a server behind us may match what it means: nothing outside of /v1 is for clients.
            raise ApiFailure(ApiError(400, "bad_path", "The path must not hold the segments `.` and `..`."))
        methods = self._exact.get(path)
        if methods is not None:
            return self._of_method(request, methods)
        for prefix, handler in self._prefixes:
            if path.startswith(prefix):
                return handler
        raise ApiFailure(ApiError(404, "not_found", f"There is nothing at {path[:200]}."))

    @staticmethod
    def _of_method(request: web.BaseRequest, methods: dict[str, Handler]) -> Handler:
        method = "GET" if request.method == "HEAD" and "HEAD" not in methods else request.method
        handler = methods.get(method) or methods.get("*")
        if handler is None:
            allowed = ", ".join(sorted(methods))
            raise ApiFailure(ApiError(405, "method_not_allowed", f"Use {allowed} here."), {"Allow": allowed})
        return handler


def _climbs(path: str) -> bool:
    """Say whether a path has dot segments, also as a server may see it that decodes before it resolves them."""
    if "." not in path and "%" not in path:
        return False
    segments = unquote(path.partition("#")[0]).replace("\\", "/").split("/")
    return "." in segments or ".." in segments
