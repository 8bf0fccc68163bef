"""The TCP streams of one agent: one frame out, one frame back, a deadline, and a bound on their number."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from gossip import actions as io
from gossip.config import GossipConfig
from gossip.errors import RemoteError
from gossip.framing import read_frame, write_frame
from gossip.identity import Address
from gossip.joinwatch import reason_of

#: What a stream may fail with that is the peer's or the network's doing.
_STREAM_ERRORS = (OSError, EOFError, TimeoutError, RemoteError)


class Streams:
    """Incoming and outgoing ones. `feed` takes what happened; `ended(address, why)` how a dial ended, "" for well."""

    def __init__(
        self, config: GossipConfig, feed: Callable[[io.Input], None], ended: Callable[[Address, str], None]
    ) -> None:
        self._config = config
        self._feed = feed
        self._ended = ended
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._incoming: dict[int, asyncio.Future[bytes | None]] = {}
        self._count = 0
        self._closed = False

    async def listen(self, sock: socket.socket) -> None:
        """Serve a listening socket."""
        self._server = await asyncio.start_server(self._serve, sock=sock)

    async def close(self) -> None:
        """End all streams and release the socket."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        for waiter in self._incoming.values():
            if not waiter.done():
                waiter.set_result(None)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    # --- outgoing -----------------------------------------------------------------------------------------------------

    def dial(self, action: io.OpenStream) -> None:
        """Open a stream; its end is fed."""
        self._spawn(self._dial(action))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _dial(self, action: io.OpenStream) -> None:
        try:
            async with asyncio.timeout(action.timeout_s):
                reply = await _exchange(action.to, action.data)
        except _STREAM_ERRORS as error:
            self._ended(action.to, reason_of(error))
            self._feed(io.StreamFailed(action.session, type(error).__name__))
        else:
            self._ended(action.to, "")
            self._feed(io.StreamReplied(action.session, reply))

    # --- incoming -----------------------------------------------------------------------------------------------------

    def answer(self, stream: int, data: bytes | None) -> None:
        """Reply to a stream that a peer opened, or close it."""
        waiter = self._incoming.get(stream)
        if waiter is not None and not waiter.done():
            waiter.set_result(data)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One incoming stream: one frame in, one frame out."""
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            if not self._closed and len(self._incoming) < self._config.max_sessions:
                self._count += 1
                await self._serve_one(self._count, reader, writer)
        except _STREAM_ERRORS:
            pass  # the peer's loss; it dials again
        except asyncio.CancelledError:
            if not self._closed:  # by our own `close()` it ends quietly: asyncio reports cancelled handlers as errors
                raise
        finally:
            await _finish(writer)

    async def _serve_one(self, stream: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._incoming[stream] = answer
        try:
            async with asyncio.timeout(self._config.session_timeout_s):
                data = await read_frame(reader)
                source = writer.get_extra_info("peername") or ("", 0)
                self._feed(io.StreamRequested(stream, (str(source[0]), int(source[1])), data))
                reply = await answer
                if reply is not None:
                    await write_frame(writer, reply)
        finally:
            del self._incoming[stream]


async def _exchange(to: Address, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*to)
    try:
        await write_frame(writer, data)
        return await read_frame(reader)
    finally:
        await _finish(writer)


async def _finish(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        await writer.wait_closed()
    except OSError:
        return  # closed by the other side in its own way
