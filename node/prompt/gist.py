"""What an entry has read of a request, told to its target in a header: the target need not read the body again.

A peer is believed as far as routing, deadlines and the prefix digest go: wrong chunks cost speed and nothing else. It
is not believed in what keeps clients away from the engine's transfer parameters: `plain` is asked of the body itself.
`decode` raises `RemoteError` and nothing else.
"""

from __future__ import annotations

import base64
import sys
from array import array

import msgpack

from node.errors import RemoteError
from node.prompt.carriage import Carriage
from node.prompt.request import ParsedRequest
from node.prompt.splice import KV_PARAMS, NEEDLESS

#: Chunks named at most, those of half a megabyte of text: a header has its bound. Longer prompts are read twice.
MAX_CHUNKS = 1024
_MAX_HEADER = 4 * (MAX_CHUNKS * 8 + 256) // 3
_MAX = 1 << 40
_VERSION = 2
_KV_PARAMS = KV_PARAMS.encode()
#: Why a way to carry an answer is closed; the entry knows it better.
_CLOSED = "its entry said so"


def encode(parsed: ParsedRequest) -> str:
    """The header's value; empty where the target has to read the body itself."""
    if not parsed.is_json or parsed.has_kv_params or parsed.continues or len(parsed.chunks) > MAX_CHUNKS:
        return ""
    chunks, carriage = array("Q", parsed.chunks), parsed.carriage
    if sys.byteorder == "big":
        chunks.byteswap()
    ways = None
    if carriage is not None:
        ways = [not carriage.tokens, not carriage.again, carriage.own_ids, carriage.ask_ids]
        ways += [carriage.strip, carriage.gathers]
    numbers = [parsed.prompt_bytes, parsed.est_prompt_tokens, parsed.prompts, parsed.answers]
    packed = msgpack.packb(
        [_VERSION, parsed.stream, parsed.exact_tokens, parsed.max_tokens, numbers, ways, chunks.tobytes()]
    )
    return base64.b64encode(packed).decode()


def decode(header: str, path: str, model: str, body: bytes) -> ParsedRequest:
    """The request that an entry has read. `model` is the plan's."""
    if len(header) > _MAX_HEADER:
        raise RemoteError("gist: too long")
    try:
        version, stream, exact, limit, numbers, ways, packed = msgpack.unpackb(
            base64.b64decode(header.encode("ascii"), validate=True), max_array_len=16, max_map_len=0, max_ext_len=0
        )
        chunks = array("Q", packed)
        prompt_bytes, tokens, prompts, answers = numbers
    except Exception as error:  # msgpack raises half a dozen unrelated kinds
        raise RemoteError(f"gist: malformed ({type(error).__name__})") from error
    if version != _VERSION or type(stream) is not bool or type(exact) is not bool or type(packed) is not bytes:
        raise RemoteError("gist: not of this version")
    for value in (prompt_bytes, tokens, prompts, answers, 0 if limit is None else limit):
        if type(value) is not int or not 0 <= value <= _MAX:
            raise RemoteError("gist: a number out of range")
    if not prompts or not answers:
        raise RemoteError("gist: nothing is asked for")
    if sys.byteorder == "big":
        chunks.byteswap()
    return ParsedRequest(
        path=path,
        model=model or None,
        stream=stream,
        chunks=tuple(chunks),
        prompt_bytes=prompt_bytes,
        est_prompt_tokens=tokens,
        exact_tokens=exact,
        max_tokens=limit,
        body=body,
        is_json=True,
        prompts=prompts,
        answers=answers,
        carriage=None if ways is None else _carriage(ways),
    )


def _carriage(ways: object) -> Carriage:
    if type(ways) is not list or len(ways) != 6 or not all(type(way) is bool for way in ways):
        raise RemoteError("gist: no ways to carry it")
    tokens, again, own_ids, ask_ids, strip, gathers = ways
    return Carriage("" if tokens else _CLOSED, "" if again else _CLOSED, own_ids, ask_ids, strip, gathers)


def plain(body: bytes) -> bool:
    """Whether a JSON body surely holds no transfer parameters, whatever its entry says.

    No in its bytes (UTF-8 has no zeros), nor spelt with escapes.
    """
    return _KV_PARAMS not in body and b"\0" not in body and not (b"\\u00" in body and NEEDLESS.search(body) is not None)
