"""Our own `kv_transfer_params` in a client's body, and nobody else's.

vLLM hands that field to the connector. Clients could use it to make an engine pull from anywhere, so theirs is
always removed. Ours is inserted behind the first brace: no copy is parsed or re-serialised for it, and every
other byte of the body stays as the client sent it.
"""

from __future__ import annotations

import json

import orjson

KV_PARAMS = "kv_transfer_params"

#: vLLM merges this map into the same place.
EXTRA_ARGS = "vllm_xargs"


def carries_kv_params(body: dict[str, object]) -> bool:
    """Whether a parsed body holds transfer parameters that must not reach the engine."""
    if KV_PARAMS in body:
        return True
    extra = body.get(EXTRA_ARGS)
    return isinstance(extra, dict) and KV_PARAMS in extra


def splice(body: bytes, rid: str | None, *, has_kv_params: bool) -> bytes:
    """The JSON object `body` with `{"grapevine": {"rid": rid}}` as its transfer parameters.

    `rid` None: insert nothing (an engine without our connector). `has_kv_params` is what `parse_request` found;
    only then the body is parsed again. The body must be one that `parse_request` accepted as JSON.
    """
    if has_kv_params:
        body = _strip(body)
    if rid is None:
        return body
    if not json.detect_encoding(body).startswith("utf-8"):
        body = _strip(body)  # the engine takes UTF-16 too: what we insert is UTF-8, so the rest must be
    brace = body.index(b"{") + 1
    inserted = b'"%s":%s' % (KV_PARAMS.encode(), orjson.dumps({"grapevine": {"rid": rid}}))
    if not _is_empty(body, brace):
        inserted += b","
    return b"".join((body[:brace], inserted, memoryview(body)[brace:]))


def _is_empty(body: bytes, start: int) -> bool:
    """Whether the object opened before `start` has no members, however much white space it holds."""
    for index in range(start, len(body)):
        if body[index] not in b" \t\r\n":
            return body[index] == ord("}")
    return True


def _strip(body: bytes) -> bytes:
    # The plain parser: it keeps integers of any size as they are, which orjson turns into floats.
    fields = json.loads(body)
    fields.pop(KV_PARAMS, None)
    extra = fields.get(EXTRA_ARGS)
    if isinstance(extra, dict):
        extra.pop(KV_PARAMS, None)
    return json.dumps(fields, separators=(",", ":")).encode()
