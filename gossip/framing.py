"""Frames on a TCP stream: four bytes of length, big-endian, then that many bytes."""

from __future__ import annotations

import asyncio

from gossip.errors import RemoteError
from gossip.limits import MAX_FRAME_BYTES, MAX_SEAL_BYTES


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Read one frame.

    :raises RemoteError: its length is zero or beyond the limit.
    :raises asyncio.IncompleteReadError: the stream ended early.
    """
    length = int.from_bytes(await reader.readexactly(4), "big")
    if not 0 < length <= MAX_FRAME_BYTES + MAX_SEAL_BYTES:
        raise RemoteError(f"a frame of {length} bytes")
    return await reader.readexactly(length)


async def write_frame(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write one frame and wait until it is handed over."""
    writer.write(len(data).to_bytes(4, "big") + data)
    await writer.drain()
