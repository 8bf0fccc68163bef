"""Canonical text: the same prompt gives the same bytes, whatever the form it was sent in.

Rules
1. Order is that of the rendered prompt: what a chat template puts first (tools, documents), then the system
   message, then the messages. So a longer conversation begins with the bytes of the shorter one.
2. `"text"` and `[{"type": "text", "text": "text"}]` are the same content; unknown structures are their JSON with
   sorted keys.
3. Pictures, sound and files stand as a digest: equal content, equal text, and no megabytes in the hash.
4. Markers are control characters, so that no text of a message can pass for a marker by accident.

This is a hint for routing. It need not be the template's exact text, only separate what the cache separates.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import cast

import orjson
from xxhash import xxh3_128_hexdigest

from node.errors import BadRequest

#: Bytes of one packed token id.
TOKEN_BYTES = 4

_ROLE = "\x1e"
_CONTENT = "\x1f"
_MEDIA = "\x1d"
_JOINT = "\n"

#: Fields that a chat template renders in front of the messages, and fields that change how it renders.
_HEAD_FIELDS = ("tools", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort", "thinking")

_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})

#: Prefixes of the part types that are media; each part becomes one digest.
_MEDIA_PARTS = ("image", "input_image", "input_audio", "audio", "video", "input_video", "file", "input_file")

Fields = Mapping[str, object]


class Canonical:
    """Collects the pieces of one prompt."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        #: Pictures, sounds and files seen: each is worth many tokens.
        self.media = 0

    def encode(self) -> bytes:
        """The canonical text so far, in UTF-8 (lone surrogates allowed: JSON can carry them)."""
        return "".join(self._pieces).encode("utf-8", "surrogatepass")

    def head(self, fields: Fields) -> None:
        """What is rendered in front of every message."""
        for name in _HEAD_FIELDS:
            if name in fields and (value := fields[name]) is not None:
                self._pieces += (_ROLE, name, _CONTENT, dump(value))

    def message(self, role: object, content: object, rest: Fields | None = None) -> None:
        """One message: role, content, and whatever else it carries (tool calls, names)."""
        self._pieces += (_ROLE, role if isinstance(role, str) else dump(role), _CONTENT)
        self._content(content)
        if rest:
            self._pieces += (_CONTENT, dump(rest))

    def items(self, items: Sequence[object]) -> None:
        """Messages, or other items of a conversation (function calls and their results), in order."""
        for item in items:
            if isinstance(item, dict) and "content" in item:
                rest = None
                if not item.keys() <= _MESSAGE_KEYS:
                    rest = {key: value for key, value in item.items() if key not in _MESSAGE_KEYS and value is not None}
                self.message(item.get("role", item.get("type", "")), item["content"], rest)
            elif isinstance(item, dict):
                rest = {key: value for key, value in item.items() if key != "id"}
                self.message(item.get("role", item.get("type", "")), None, rest)
            else:
                self.message("", item)

    def plain(self, text: str) -> None:
        """Text without any marker: a completion's prompt."""
        self._pieces.append(text)

    def _content(self, content: object) -> None:
        if isinstance(content, str):
            self._pieces.append(content)
        elif isinstance(content, list):
            for index, part in enumerate(content):
                if index:
                    self._pieces.append(_JOINT)
                self._part(part)
        elif content is not None:
            self._pieces.append(dump(content))

    def _part(self, part: object) -> None:
        if isinstance(part, str):
            self._pieces.append(part)
            return
        if isinstance(part, dict):
            kind = part.get("type", "text")
            text = part.get("text", part.get("refusal"))
            if isinstance(text, str) and (kind in _TEXT_PARTS):
                self._pieces.append(text)
                return
            if isinstance(kind, str) and kind.startswith(_MEDIA_PARTS):
                self.media += 1
                digest = xxh3_128_hexdigest(dump(part).encode("utf-8", "surrogatepass"))
                self._pieces += (_MEDIA, kind, ":", digest, _MEDIA)
                return
        self._pieces.append(dump(part))


_MESSAGE_KEYS = frozenset({"role", "content", "type", "id", "status"})


def dump(value: object) -> str:
    """JSON with sorted keys. Raises `BadRequest` when it is nested too deep to be read."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except (TypeError, ValueError):  # lone surrogates, huge integers
        try:
            return json.dumps(value, sort_keys=True)
        except RecursionError as error:
            raise BadRequest("The request body is nested too deep.") from error


def pack_tokens(ids: Sequence[object]) -> bytes | None:
    """Token ids as 4 little-endian bytes each; None when they are no token ids (the engine says so)."""
    try:
        packed = array("I", cast("Sequence[int]", ids))
    except (TypeError, OverflowError, ValueError):
        return None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
