"""Reading a request: one pass over the body, whatever the endpoint.

Rules
1. Only what routing needs is looked at. A field of the wrong type is not our error: it counts as absent, and
   the engine answers exactly.
2. A body that should be a JSON object and is none is refused here: there is nothing to route by.
3. Endpoints that never touch the KV cache (tokenize, render, counting) get no chunks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import orjson

from node.chunks import CHUNK_BYTES, chunk_hashes, chunk_seed
from node.errors import BadRequest
from node.prompt.carriage import carriage
from node.prompt.multipart import form_fields
from node.prompt.request import MEDIA_TOKENS, TYPICAL_BYTES_PER_TOKEN, ParsedRequest
from node.prompt.splice import carries_kv_params, splice
from node.prompt.text import TOKEN_BYTES, Canonical, Fields, dump, pack_tokens

#: Endpoints whose work is done without a prefill.
_NO_CACHE = ("/tokenize", "/detokenize", "/render", "/derender", "/count_tokens", "/cancel")

#: Fields that limit the answer, the first one present counts.
_LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")

#: Prompts of rerank and score requests, in the order in which the engine joins them.
_PAIR_FIELDS = ("text_1", "queries", "query", "text_2", "documents")

_RESPONSES = "/responses/"
_JSON = "application/json"

#: No tokenizer is known whose longest token (runs of blanks, mostly) has more bytes than half of this.
MOST_TOKEN_BYTES = 512


def parse_request(path: str, body: bytes, content_type: str = "application/json") -> ParsedRequest:
    """Read the request for `path` (without its query). Raises `BadRequest` with a message for the client."""
    refers_to = _stored_response(path)
    if not body:
        return ParsedRequest(path=path, model=None, refers_to=refers_to)
    if content_type == _JSON:  # nearly always
        return _parse_fields(path, body, load_object(body), refers_to)
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return _parse_form(path, body, content_type)
    if kind and kind != _JSON and not kind.endswith("+json") and kind.startswith(_OPAQUE):
        return ParsedRequest(path=path, model=None, body=body, refers_to=refers_to)
    return _parse_fields(path, body, load_object(body), refers_to)


#: Content types whose body we pass on unread.
_OPAQUE = ("audio/", "image/", "video/", "application/octet-stream")


def load_object(body: bytes) -> dict[str, object]:
    """The JSON object in `body`. Raises `BadRequest`."""
    try:
        value: object = orjson.loads(body)
    except ValueError as error:
        value = _load_lenient(body, str(error))
    if not isinstance(value, dict):
        raise BadRequest(f"The request body must be a JSON object, not {_json_name(value)}.")
    return value


def _load_lenient(body: bytes, reason: str) -> object:
    """What the engine's own parser would take and orjson does not: NaN, lone surrogates."""
    try:
        value: object = json.loads(body)
    except (ValueError, RecursionError):
        raise BadRequest(f"We could not parse the JSON body of your request: {reason}") from None
    return value


def _json_name(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _parse_form(path: str, body: bytes, content_type: str) -> ParsedRequest:
    fields = form_fields(body, content_type, ("model", "stream"))
    stream = fields.get("stream", "").lower() in ("true", "1")
    return ParsedRequest(path=path, model=fields.get("model") or None, stream=stream, body=body)


def _parse_fields(path: str, body: bytes, fields: Fields, refers_to: str | None) -> ParsedRequest:
    name = _model_name(fields.get("model"))
    text, count, ids, media = _prompt(path, fields)
    cached = not path.rstrip("/").endswith(_NO_CACHE)
    if ids:
        tokens = len(text) // TOKEN_BYTES if count == 1 else _count_ids(fields)
    else:
        tokens = round(_all_bytes(fields, text, count) / TYPICAL_BYTES_PER_TOKEN) + media * MEDIA_TOKENS
    strip = carries_kv_params(fields)
    carried = carriage(path, fields)
    if strip or (carried is not None and carried.strip):
        _check_depth(body)
    previous = fields.get("previous_response_id")
    return ParsedRequest(
        path=path,
        model=name,
        stream=fields.get("stream") is True,
        chunks=tuple(chunk_hashes(_seed(name, fields, ids), text)) if cached and len(text) >= CHUNK_BYTES else (),
        prompt_bytes=len(text),
        est_prompt_tokens=tokens if cached else 0,
        exact_tokens=ids,
        max_tokens=_limit(fields),
        body=body,
        has_kv_params=strip,
        is_json=True,
        prompts=count,
        answers=_answers(fields),
        priority=_priority(fields),
        least_tokens=_least_tokens(fields) if cached else 0,
        refers_to=previous if isinstance(previous, str) else refers_to,
        carriage=carried,
    )


def _check_depth(body: bytes) -> None:
    """Refuse here what could not be written again without its transfer parameters."""
    try:
        splice(body, None, has_kv_params=True)
    except RecursionError as error:
        raise BadRequest("The request body is nested too deep.") from error


def _model_name(value: object) -> str | None:
    """The model that is asked for. Lone surrogates, that JSON can carry, go into no answer, header or log of ours."""
    if not isinstance(value, str) or not value:
        return None
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def _seed(model: str | None, fields: Fields, ids: bool) -> bytes:
    """Everything that separates caches and is not in the text. An adapter is a model name of its own."""
    salt = fields.get("cache_salt")
    return chunk_seed("ids" if ids else "text", model or "", salt if isinstance(salt, str) else "")


def _prompt(path: str, fields: Fields) -> tuple[bytes, int, bool, int]:
    """Canonical text of the first prompt, number of prompts, whether it is token ids, media parts."""
    canonical = Canonical()
    messages = fields.get("messages")
    if isinstance(messages, list):
        conversations = _conversations(messages)
        canonical.head(fields)
        if "system" in fields and fields["system"] is not None:  # Anthropic's form
            canonical.message("system", fields["system"])
        canonical.items(conversations[0] if conversations else messages)
        return canonical.encode(), max(1, len(conversations)), False, canonical.media
    if "/responses" in path:
        return _input(fields, canonical)
    for name in ("prompt", "input", "token_ids"):
        if name in fields:
            return _bare(fields[name], canonical)
    pairs = [fields[name] for name in _PAIR_FIELDS if name in fields]
    if pairs:
        canonical.plain("\n".join(value if isinstance(value, str) else dump(value) for value in pairs))
    return canonical.encode(), 1, False, 0


def _conversations(messages: list[object]) -> list[list[object]]:
    """A batch of conversations (a list of lists), or nothing for a single one."""
    return [entry for entry in messages if isinstance(entry, list)]


def _input(fields: Fields, canonical: Canonical) -> tuple[bytes, int, bool, int]:
    """A responses body: instructions, then a text or a list of items."""
    canonical.head(fields)
    if fields.get("instructions") is not None:
        canonical.message("system", fields["instructions"])
    value = fields.get("input")
    if isinstance(value, list):
        canonical.items(value)
    elif value is not None:
        canonical.message("user", value)
    return canonical.encode(), 1, False, canonical.media


def _bare(prompt: object, canonical: Canonical) -> tuple[bytes, int, bool, int]:
    """A prompt without roles: text, texts, token ids, or lists of token ids."""
    count = 1
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        count, prompt = len(prompt), prompt[0]
    if isinstance(prompt, list) and prompt:
        packed = pack_tokens(prompt)
        return (packed, count, True, 0) if packed is not None else (b"", count, False, 0)
    if isinstance(prompt, str):
        canonical.plain(prompt)
    return canonical.encode(), count, False, 0


def _all_bytes(fields: Fields, text: bytes, count: int) -> int:
    """Bytes of all prompts of a body together."""
    if count == 1:
        return len(text)
    for name in ("prompt", "input"):
        value = fields.get(name)
        if isinstance(value, list):
            return sum(len(entry) for entry in value if isinstance(entry, str))
    return len(text) * count


def _count_ids(fields: Mapping[str, object]) -> int:
    for name in ("prompt", "input"):
        value = fields.get(name)
        if isinstance(value, list):
            return sum(len(entry) for entry in value if isinstance(entry, list))
    return 0


def _limit(fields: Fields) -> int | None:
    for name in _LIMITS:
        if name in fields and type(value := fields[name]) is int and 0 <= value < 1 << 31:
            return value
    return None


def _answers(fields: Fields) -> int:
    for name in ("best_of", "n"):
        if name in fields and type(value := fields[name]) is int and 0 < value < 1 << 16:
            return value
    return 1


def _priority(fields: Fields) -> int | None:
    return value if "priority" in fields and type(value := fields["priority"]) is int else None


def _least_tokens(fields: Fields) -> int:
    """Tokens of the longest prompt, as far as they are certain: ids count, text is at least so long.

    Only what surely goes into the prompt: no tools (a template may leave them out), no pictures, and nothing where the
    engine is asked to cut the prompt.
    """
    if "truncate_prompt_tokens" in fields and fields["truncate_prompt_tokens"] is not None:
        return 0
    for name in ("prompt", "input"):
        value = fields.get(name)
        if isinstance(value, str) or (isinstance(value, list) and value):
            many = isinstance(value, list) and isinstance(value[0], str | list)
            return max(map(_least_of, value if many else [value]))
    messages = fields.get("messages")
    if not isinstance(messages, list):
        return 0
    total = 0
    for message in messages:
        if type(message) is dict and "content" in message and type(text := message["content"]) is str:
            total += len(text)
    return total // MOST_TOKEN_BYTES


def _least_of(prompt: object) -> int:
    if isinstance(prompt, str):
        return len(prompt) // MOST_TOKEN_BYTES  # a character has at least one byte
    return len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) else 0


def _stored_response(path: str) -> str | None:
    """The id in `/v1/responses/{id}` and below it."""
    if _RESPONSES not in path:
        return None
    _, found, rest = path.partition(_RESPONSES)
    first = rest.partition("/")[0]
    return first if found and first and first != "render" else None
