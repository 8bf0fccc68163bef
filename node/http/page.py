"""The page at ``/``, its files under ``/page/``, and its events. Open like ``/gossip/state``, and as little secret."""

from __future__ import annotations

import hashlib
from importlib import resources

from aiohttp import web

from node.http.events import EventHub
from node.http.router import Handler, Router

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
#: The page runs its own scripts, asks its own node, loads nothing from elsewhere, and cannot be framed. Text of the
#: cluster can never become markup: without a trusted-types policy the browser refuses every sink that would parse it.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_files() -> dict[str, bytes]:
    """Return the page's files by name."""
    folder = resources.files("node").joinpath("page")
    return {item.name: item.read_bytes() for item in folder.iterdir() if item.name.rpartition(".")[2] in _TYPES}


def build_of(files: dict[str, bytes]) -> str:
    """Return what tells one build of the page from another: an open page loads itself anew when it changes."""
    whole = hashlib.blake2b(digest_size=8)
    for name in sorted(files):
        whole.update(name.encode() + b"\0" + files[name] + b"\0")
    return whole.hexdigest()


class PageRoutes:
    """The routes of the page."""

    def __init__(self, files: dict[str, bytes], hub: EventHub) -> None:
        self._files = files
        self.hub = hub

    def add_to(self, router: Router) -> None:
        """Add the routes."""
        for name, content in self._files.items():
            path = "/" if name == "index.html" else f"/page/{name}"
            router.add("GET", path, _file(content, _TYPES[name.rpartition(".")[2]]))
        router.add("GET", "/page/events", self.hub.serve)


def _file(content: bytes, kind: str) -> Handler:
    tag = f'"{hashlib.blake2b(content, digest_size=8).hexdigest()}"'
    headers = _HEADERS | {"Content-Type": kind, "ETag": tag}

    async def serve(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=content, headers=headers)

    return serve
