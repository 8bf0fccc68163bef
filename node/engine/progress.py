"""What a starting engine does, in a few words, from the lines of its log."""

from __future__ import annotations

import re

_PERCENT = re.compile(r"Loading .*checkpoint shards:\s+(\d+)% Completed \| (\d+)/(\d+)")
_DOWNLOAD = re.compile(r"(?:Downloading|Fetching)[^:]*:\s+(\d+)%")
_STEPS = (
    (re.compile(r"Downloading|Fetching|Time spent downloading"), "downloading the model"),
    (re.compile(r"Initializing a V1 LLM engine"), "starting the engine core"),
    (re.compile(r"Starting to load model"), "loading weights"),
    (re.compile(r"Loading weights took ([\d.]+)"), "weights loaded"),
    (
        re.compile(
            r"Warming up model for the compilation|torch\.compile|Dynamo bytecode|Compiling a graph|[Cc]ompilation took"
        ),
        "compiling, that may take minutes",
    ),
    (re.compile(r"Capturing (?:CUDA|cuda) ?graph|Graph capturing"), "capturing CUDA graphs"),
    (re.compile(r"KV cache size: ([\d,]+) tokens"), "KV cache for {} tokens, warming up"),
    (re.compile(r"Resolved architecture: (\S+)"), "reading the model ({})"),
    (re.compile(r"Starting vLLM server"), "starting the HTTP server"),
)
#: Lines that mention a step only to say that it is off.
_OFF = re.compile(r"disabl|DeprecationWarning|FutureWarning|non-default args| config: ")


def describe(line: str) -> str | None:
    """The step that `line` of the log begins, None when it begins none."""
    shards = _PERCENT.search(line)
    if shards:
        return f"loading weights, {shards[1]} % ({shards[2]} of {shards[3]})"
    download = _DOWNLOAD.search(line)
    if download:
        return f"downloading the model, {download[1]} %"
    for pattern, text in _STEPS:
        match = pattern.search(line)
        if match and (text == "starting the engine core" or not _OFF.search(line)):
            return text.format(*match.groups())
    return None
