"""Reading a request: its head as it came, its body whole and bounded."""

from __future__ import annotations

import asyncio
import os
from typing import Self

from aiohttp import HttpVersion11, web

from node.errors import BadRequest
from node.http.errors import ApiError, ApiFailure
from node.http.request import Request
from node.prompt import ParsedRequest, parse_request
from node.relay.headers import LOWER, HeaderList, valid_request_id

#: Seconds between two pieces of a body; a client that sends slower than this holds memory for nothing.
BODY_IDLE_S = 30.0

#: Seconds for a body as a whole: one that trickles must not be held for ever either.
BODY_MAX_S = 600.0
#: Bodies of the largest size that are held at a time, all clients together.
BODIES = 16
#: Bytes of each body that do not count: usual prompts are below, and must not suffer from somebody's large ones.
UNCOUNTED = 256 * 1024

_MIB = 1024 * 1024


#: Largest body of an administrator's call, MiB.
SMALL_BODY_MIB = 1


class BodyRoom:
    """Bytes of large request bodies that the node holds: each until its request is answered.

    ``share``: so many processes of the node hold bodies.
    """

    def __init__(self, max_body_mib: int, share: int = 1) -> None:
        self.limit = max(1, BODIES // share) * max_body_mib * _MIB
        self.used = 0

    def hold(self) -> Held:
        """Hold one body within a `with` block."""
        return Held(self)


class Held:
    """One body's share of the room."""

    __slots__ = ("_room", "counted")

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self.counted = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._room.used -= self.counted

    def grow(self, size: int) -> None:
        """The body has ``size`` bytes now.

        :raises ApiFailure: 429, there is no room.
        """
        more = size - UNCOUNTED - self.counted
        if more <= 0:
            return
        if self._room.used + more > self._room.limit:
            message = "The node holds too many large request bodies. Try again later."
            raise ApiFailure(ApiError(429, "too_many_bodies", message, retry_after_s=1))
        self._room.used += more
        self.counted += more


def header_list(request: web.BaseRequest) -> HeaderList:
    """The request's headers in order, duplicates kept."""
    if type(request) is Request:
        return request.pairs
    return [
        (name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))
        for name, value in request.raw_headers
    ]


def first_headers(request: web.BaseRequest) -> dict[str, str]:
    """The first value of each header by its lower-case name."""
    if type(request) is Request:
        return request.first
    return {LOWER[name]: value for name, value in reversed(header_list(request))}


def request_id(request: web.BaseRequest) -> str:
    """The client's X-Request-Id when it is valid, otherwise a new one."""
    given = first_headers(request).get("x-request-id")
    if given is not None and valid_request_id(given):
        return given
    return os.urandom(16).hex()


async def read_small_body(request: web.BaseRequest) -> bytes:
    """Read a body that an administrator sends. Raises what `read_body` raises."""
    with BodyRoom(SMALL_BODY_MIB).hold() as held:
        return await read_body(request, SMALL_BODY_MIB, held)


async def read_body(request: web.BaseRequest, limit_mib: int, held: Held) -> bytes:
    """Read the whole body.

    :raises ApiFailure: 413 when it is larger than ``limit_mib``, 429 when the node holds too many, 408 when it stops
        coming, 400 when it is cut.
    """
    limit = limit_mib * _MIB
    headers = first_headers(request)
    if "content-length" in headers and (request.content_length or 0) > limit:
        raise _too_large(limit_mib)
    if "expect" in headers:
        await _go_on(request, headers["expect"].lower())
    try:
        if request.content.is_eof():  # usual prompts come with their head
            body = request.content.read_nowait()
            if len(body) > limit:
                raise _too_large(limit_mib)
            held.grow(len(body))
            return body
        return await _read_pieces(request, limit_mib, held)
    except TimeoutError as error:
        raise ApiFailure(ApiError(408, "body_timeout", "The request body stopped coming.")) from error
    except web.RequestPayloadError as error:
        raise ApiFailure(ApiError(400, "bad_body", f"The request body is broken: {error}.")) from error


async def _read_pieces(request: web.BaseRequest, limit_mib: int, held: Held) -> bytes:
    """Read a body that is still coming. :raises TimeoutError: it stops, or takes too long as a whole."""
    parts: list[bytes] = []
    size = 0
    async with asyncio.timeout(BODY_IDLE_S) as timer:
        clock = asyncio.get_running_loop().time
        end = clock() + BODY_MAX_S
        while piece := await request.content.readany():
            size += len(piece)
            if size > limit_mib * _MIB:
                raise _too_large(limit_mib)
            held.grow(size)
            parts.append(piece)
            timer.reschedule(min(end, clock() + BODY_IDLE_S))
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _go_on(request: web.BaseRequest, expect: str) -> None:
    """Answer ``Expect: 100-continue``: the head was good, the body may come."""
    if not expect:
        return
    if expect != "100-continue":
        raise ApiFailure(ApiError(417, "expectation_failed", "Only `Expect: 100-continue` is known here."))
    if request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun


def _too_large(limit_mib: int) -> ApiFailure:
    message = f"The request body is larger than the {limit_mib} MiB that this node takes (--max-body-mib)."
    return ApiFailure(ApiError(413, "request_too_large", message))


def parse(request: web.BaseRequest, path: str, body: bytes) -> ParsedRequest:
    """Read what routing needs.

    :raises ApiFailure: 400 when the body is no JSON object where it has to be one, 415 when it is compressed.
    """
    headers = first_headers(request)
    if body and "content-encoding" in headers and headers["content-encoding"].lower() != "identity":
        message = "Compressed request bodies are not taken: the model's name could not be read."
        raise ApiFailure(ApiError(415, "compressed_body", message))
    try:
        return parse_request(path, body, headers.get("content-type", ""))
    except BadRequest as error:
        raise ApiFailure(ApiError(400, "invalid_json", str(error))) from error
