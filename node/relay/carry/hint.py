"""The header that tells a target what a continuation's prompt began as: chunk hashes of what the client sent.

A continuation's prompt is token ids; the caches of the cluster know its beginning by the chunks of the client's own
text (`node.chunks`). With them the target can pull those blocks, and claims for its digest what it then holds.
"""

from __future__ import annotations

import base64
import binascii
import sys
from array import array
from collections.abc import Sequence

from node.errors import RemoteError

#: Chunks named at most: those of a megabyte of text, 22 KB of header.
MAX_CHUNKS = 2048
#: Longest prompt that is believed, bytes.
MAX_BYTES = 1 << 34


def encode(chunks: Sequence[int], prompt_bytes: int) -> str:
    """As a header value."""
    packed = array("Q", chunks[:MAX_CHUNKS])
    if sys.byteorder == "big":
        packed.byteswap()
    return f"{prompt_bytes};{base64.b64encode(packed.tobytes()).decode()}"


def decode(header: str) -> tuple[tuple[int, ...], int]:
    """Chunks and prompt bytes. Raises `RemoteError` when it is malformed or out of range."""
    size, _, text = header.partition(";")
    if not size.isascii() or not size.isdecimal() or len(size) > 11 or int(size) > MAX_BYTES:
        raise RemoteError("chunks: bad size")
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise RemoteError("chunks: not base64") from error
    if len(data) % 8 or len(data) > MAX_CHUNKS * 8:
        raise RemoteError("chunks: bad length")
    packed = array("Q", data)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed), int(size)
