"""The engine's own page of metrics: read for the node itself (`node.onlooker`), and passed on with the node's name, so
that a dashboard can join them with ours.
"""

from __future__ import annotations

import asyncio
import re

from node.engine.client import EngineAddress
from node.relay.session import Session
from node.relay.upstream import Base, UpstreamError, UpstreamRequest, open_upstream

#: Deadline in seconds, most bytes.
ENGINE_METRICS_S = 3.0
MAX_ENGINE_METRICS = 8 * 1024 * 1024

#: Name of a sample, its labels in braces (a quoted value may hold braces), and the rest of the line.
_SAMPLE = re.compile(rb'([A-Za-z_:][A-Za-z0-9_:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?(\s.*)')
_LABEL = b"node"


async def read_page(session: Session, address: EngineAddress) -> bytes:
    """Return what an engine answers; nothing when it does not. Never raises for a fault of the engine."""
    base = Base(session, address.base.rstrip("/"))
    request = UpstreamRequest("GET", "/metrics", [], b"")
    try:
        async with asyncio.timeout(ENGINE_METRICS_S):
            answer = await open_upstream(base, request, first_byte_s=ENGINE_METRICS_S)
            body = await answer.read_all(MAX_ENGINE_METRICS)
    except (UpstreamError, TimeoutError):
        return b""
    return body if answer.status == 200 else b""


def with_node(text: bytes, name: str) -> bytes:
    """Add ``node="NAME"`` to every sample in Prometheus' text format.

    A label of that name which is there already stays. Lines that are no samples, and comments, are passed on as they
    are: what the engine words is for whoever scrapes it to judge.
    """
    ours = _LABEL + b'="' + name.encode() + b'"'  # a node's name needs no escaping (`node.addresses.NAME_PATTERN`)
    lines = [line if line.startswith(b"#") else _labelled(line, ours) for line in text.split(b"\n")]
    return b"\n".join(lines)


def _labelled(line: bytes, ours: bytes) -> bytes:
    match = _SAMPLE.fullmatch(line)
    if match is None:
        return line
    labels = match[2]
    if labels and re.search(rb"(?:^|,)\s*" + _LABEL + rb"\s*=", labels):
        return line
    return match[1] + b"{" + ours + (b"," + labels if labels and labels.strip() else b"") + b"}" + match[3]
