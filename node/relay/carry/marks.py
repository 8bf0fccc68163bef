"""What a target tells the entry within a stream that it runs for it, beside the engine's events.

All are server-sent events that a reader who does not know them ignores or shows as an error; none reaches a client.
"""

from __future__ import annotations

import orjson

from node.relay.upstream import UpstreamError, UpstreamMovedError, UpstreamStalledError

#: On a request to a peer: the entry understands the rest of this file and hides token ids. It names the attempt.
CARRY_HEADER = "x-grapevine-carry"
#: On a request to a peer that goes on with an answer: chunks of the client's own prompt (`node.relay.carry.hint`).
CHUNKS_HEADER = "x-grapevine-chunks"

#: Below the peers' prefix: answered when the attempt that `CARRY_HEADER` names runs no more.
GONE_PATH = "/gone"
#: Seconds after which it is answered all the same, and the longest name that is looked for.
GONE_MAX_S = 1.0
MAX_LEG = 64

#: The target lives and watches its engine; sent after each `ALIVE_EVERY_S` seconds of silence.
ALIVE = b": grapevine-alive\n\n"
ALIVE_EVERY_S = 0.5
#: Please carry this stream to another node; goes on here when that is impossible.
MOVE = b": grapevine-move\n\n"

#: Codes of the error events that end a stream.
BROKE = "upstream_failed"
STALLED = "upstream_stalled"
MOVED = "upstream_moved"
DIVERGED = "carry_diverged"

#: Those by which a target ends a stream that it relays.
CODES = (BROKE, STALLED, MOVED)

_CODES = {UpstreamStalledError: STALLED, UpstreamMovedError: MOVED}


def code_of(error: UpstreamError) -> str:
    """The code that tells an entry how a stream broke."""
    return _CODES.get(type(error), BROKE)


def error_event(message: str, code: str) -> bytes:
    """The server-sent event that ends a broken stream, in OpenAI's form."""
    error = {"message": message, "type": "server_error", "param": None, "code": code}
    return b"data: " + orjson.dumps({"error": error}) + b"\n\n"
