"""Our own `kv_transfer_params` in a client's body, and nobody else's; `return_token_ids` where an answer may be
carried, and what makes a stream of one that is gathered.

vLLM hands that field to the connector. Clients could use it to make an engine pull from anywhere, so theirs is
always removed. Ours is inserted behind the first brace: no copy is parsed or re-serialised for it, and every
other byte of the body stays as the client sent it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

import orjson

from node.prompt.carriage import IDS_FIELD, STREAM_FIELDS

KV_PARAMS = "kv_transfer_params"

#: vLLM merges this map into the same place.
EXTRA_ARGS = "vllm_xargs"

#: The escape of a character that no encoder has to escape: a name may be spelt with it.
NEEDLESS = re.compile(rb"\\u00[2-7]")

_STREAM = "stream"
_NO_STREAM = re.compile(rb'"stream"[ \t\r\n]*:[ \t\r\n]*(false|null)')


def carries_kv_params(body: Mapping[str, object]) -> bool:
    """Whether a parsed body holds transfer parameters that must not reach the engine."""
    if KV_PARAMS in body:
        return True
    extra = body.get(EXTRA_ARGS)
    return isinstance(extra, dict) and KV_PARAMS in extra


def splice(
    body: bytes,
    rid: str | None,
    *,
    has_kv_params: bool,
    hold_s: float = 0.0,
    ask_ids: bool = False,
    gather: bool = False,
    strip: bool = False,
) -> bytes:
    """The JSON object `body` with `{"grapevine": {"rid": rid}}` as its transfer parameters.

    `rid` None: insert none (an engine without our connector). `hold_s` is inserted beside it when it is not 0.
    `ask_ids`: insert `return_token_ids` as well; `gather`: and what makes a stream of it. `has_kv_params` and `strip`
    are what `parse_request` found; only then the body is parsed again. The body must be one that `parse_request`
    accepted as JSON.
    """
    ours: dict[str, object] = {IDS_FIELD: True} if ask_ids else {}
    ours |= STREAM_FIELDS if gather else {}
    if gather and strip and not has_kv_params and (turned := _turned(body, ours)) is not None:
        body, strip = turned, False
        del ours[_STREAM]
    if has_kv_params or (ours and strip):
        body = _strip(body, ours)
    members = []
    if rid is not None:
        told = {"rid": rid, "hold_s": hold_s} if hold_s else {"rid": rid}
        members.append(b'"%s":%s' % (KV_PARAMS.encode(), orjson.dumps({"grapevine": told})))
    if ours:
        members.append(orjson.dumps(ours)[1:-1])
    if not members:
        return body
    if not json.detect_encoding(body).startswith("utf-8"):
        body = _strip(body, ())  # the engine takes UTF-16 too: what we insert is UTF-8, so the rest must be
    brace = body.index(b"{") + 1
    inserted = b",".join(members)
    if not _is_empty(body, brace):
        inserted += b","
    return b"".join((body[:brace], inserted, memoryview(body)[brace:]))


def _turned(body: bytes, ours: Iterable[str]) -> bytes | None:
    """The body with true for what it says about a stream; None where that is not plain to see in its bytes.

    Clients say `"stream": false` often, and to parse a long prompt and write it again takes milliseconds.
    """
    if any(body.count(b'"%s"' % name.encode()) != (name == _STREAM) for name in ours):
        return None
    if b"\0" in body or (b"\\u00" in body and NEEDLESS.search(body) is not None):
        return None  # names may be spelt otherwise
    at = body.index(b'"%s"' % _STREAM.encode())
    value = _NO_STREAM.match(body, at)
    if value is None or body[at - 1 : at] == b"\\":
        return None
    return b"".join((body[: value.start(1)], b"true", memoryview(body)[value.end() :]))


def _is_empty(body: bytes, start: int) -> bool:
    """Whether the object opened before `start` has no members, however much white space it holds."""
    for index in range(start, len(body)):
        if body[index] not in b" \t\r\n":
            return body[index] == ord("}")
    return True


def _strip(body: bytes, ours: Iterable[str]) -> bytes:
    # The plain parser: it keeps integers of any size as they are, which orjson turns into floats.
    fields = json.loads(body)
    fields.pop(KV_PARAMS, None)
    for name in ours:
        fields.pop(name, None)
    extra = fields.get(EXTRA_ARGS)
    if isinstance(extra, dict):
        extra.pop(KV_PARAMS, None)
    return json.dumps(fields, separators=(",", ":")).encode()
