"""A chat as one text: the template of the emulated model."""

from __future__ import annotations

from collections.abc import Mapping

import orjson
from xxhash import xxh3_64_hexdigest

from node.emulator.tokens import Tokenizer

#: What a template renders in front of the messages.
_HEAD = ("tools", "documents", "chat_template_kwargs")


class BadChat(ValueError):
    """Messages that no template can render; the text says why."""


def render(fields: Mapping[str, object], tokenizer: Tokenizer) -> list[int]:
    """The token ids of the messages, ready for an answer; empty when there are none. Raises `BadChat`."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        return []
    parts = [_dump(fields[name]) for name in _HEAD if fields.get(name)]
    parts += [_message(message) for message in messages]
    return tokenizer.encode("".join(parts) + "<|im_start|>assistant\n")


def _message(message: object) -> str:
    if not isinstance(message, dict):
        return _dump(message)
    rest = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
    tail = _dump(rest) if rest else ""
    return f"<|im_start|>{message.get('role', '')}\n{_content(message.get('content'))}{tail}<|im_end|>\n"


def _content(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part(part) for part in content)
    return "" if content is None else _dump(content)


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    return f"<{xxh3_64_hexdigest(_dump(part).encode())}>"  # a picture or a sound


def _dump(value: object) -> str:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError as error:  # it was JSON, so it is too deep
        raise BadChat("the messages are nested too deeply") from error
