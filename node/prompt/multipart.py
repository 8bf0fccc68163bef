"""The fields that routing needs from a multipart form, without reading the files in it."""

from __future__ import annotations

import re

from node.errors import BadRequest
from node.wire import MAX_MODEL_ID

_BOUNDARY = re.compile(r'boundary\s*=\s*(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)

#: Parts looked at, and bytes of one part's header.
_MAX_PARTS = 64
_MAX_HEADER = 1024


def form_fields(body: bytes, content_type: str, names: tuple[str, ...]) -> dict[str, str]:
    """The small text fields `names` of the form. Raises `BadRequest` without a boundary.

    Only the separators are searched for: a file's bytes are passed over at memory speed and never copied.
    """
    match = _BOUNDARY.search(content_type)
    if match is None:
        raise BadRequest("The multipart form has no boundary in its content type.")
    separator = b"--" + (match[1] or match[2]).encode("latin-1", "replace")
    wanted = {name.encode(): name for name in names}
    found: dict[str, str] = {}
    at = body.find(separator)
    for _ in range(_MAX_PARTS):
        if at < 0 or len(found) == len(wanted):
            break
        start = at + len(separator)
        head_end = body.find(b"\r\n\r\n", start, start + _MAX_HEADER)
        at = body.find(b"\r\n" + separator, start)
        if head_end < 0 or at < 0:
            continue
        part = _part_name(body[start:head_end])
        if part in wanted and at - head_end - 4 <= MAX_MODEL_ID:
            found[wanted[part]] = body[head_end + 4 : at].decode("utf-8", "replace").strip()
        at += 2
    return found


_NAME = re.compile(rb'[;\s]name\s*=\s*(?:"([^"]*)"|([^\s;]+))', re.IGNORECASE)


def _part_name(header: bytes) -> bytes:
    match = _NAME.search(header)
    return (match[1] or match[2] or b"") if match else b""
