"""The engine's own metrics, passed on with the name of the node, so that a dashboard can join them with ours."""

from __future__ import annotations

import re

#: Name of a sample, its labels in braces (a quoted value may hold braces), and the rest of the line.
_SAMPLE = re.compile(rb'([A-Za-z_:][A-Za-z0-9_:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?(\s.*)')
_LABEL = b"node"


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
