"""The plainest proxy that aiohttp gives: what a careful one has to be measured against.

python -m benches.proxy.plain PORT BACKEND_URL...
"""

from __future__ import annotations

import itertools
import sys

import aiohttp
import uvloop
from aiohttp import web


async def _make(urls: list[str]) -> web.Application:
    turn = itertools.cycle(urls)
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)

    async def relay(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {"content-type": request.headers.get("content-type", "application/json")}
        async with session.request(request.method, next(turn) + request.path_qs, data=body, headers=headers) as answer:
            kept = {"content-type": answer.headers.get("content-type", "application/json")}
            if answer.content_length is not None:
                return web.Response(status=answer.status, headers=kept, body=await answer.read())
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", relay)
    return app


if __name__ == "__main__":
    web.run_app(
        _make(sys.argv[2:]), host="127.0.0.1", port=int(sys.argv[1]), access_log=None, loop=uvloop.new_event_loop()
    )
