"""The answer in one piece that a gathered stream stands for, as vLLM 0.32 writes it where nobody asks for a stream.

Written after `ChatCompletionResponse` and `CompletionResponse` of vLLM's `entrypoints/openai`, and the JSON of its
server: every member, in its order, those that are null too; `tests/node/carry/test_whole.py` compares with those
classes. `node.engine.form` says which engines answer so.

Nothing is guessed: what holds anything that is not known here (`UnlikeError`) is asked for again, not as a stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from node.relay.carry.record import Choice, Record

Fields = Mapping[str, object]

_USAGE = ("prompt_tokens", "total_tokens", "completion_tokens")
#: Members of a stream's last event, of its usage and of what is within that: all that are known.
_TAIL = frozenset(("usage", "system_fingerprint", "metrics"))
_DETAILS = ("cached_tokens", "created_cache_tokens", "multimodal_tokens")
_METRICS = (
    "time_to_first_token_ms",
    "generation_time_ms",
    "queue_time_ms",
    "mean_itl_ms",
    "tokens_per_second",
    "speculative_decoding",
)


class UnlikeError(Exception):
    """Its answer in one piece cannot be told from its stream; the message says why, for logs."""


def whole(record: Record, *, chat: bool, own_ids: bool) -> bytes:
    """The body of the answer. ``own_ids``: the client asked for token ids.

    :raises UnlikeError: it may have another form than is known here.
    """
    if not record.plain or not record.complete:
        raise UnlikeError("its events say more than text")
    tail = record.tail
    _known(tail, _TAIL)
    ids = _ids(record.prompt_ids) if own_ids else None
    choices = [
        _message(index, choice, own_ids) if chat else _text(index, choice, own_ids, ids)
        for index, choice in sorted(record.choices.items())
    ]
    answer = {
        "id": record.head.get("id"),
        "object": "chat.completion" if chat else "text_completion",
        "created": record.head.get("created"),
        "model": record.head.get("model"),
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": tail.get("system_fingerprint"),
        "usage": _usage(tail.get("usage")),
    }
    if chat:
        answer |= {"prompt_logprobs": None, "prompt_token_ids": ids, "prompt_text": None}
    answer |= {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": _metrics(tail.get("metrics"))}
    try:
        return json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:  # NaN, or a lone surrogate: vLLM's server does not write it either
        raise UnlikeError(f"it holds what is no JSON ({error})") from error


def _message(index: int, choice: Choice, own_ids: bool) -> dict[str, object]:
    if not isinstance(choice.role, str) or not choice.length:
        raise UnlikeError("a message without a role, or without text")  # a parser would write null for no text
    message = {
        "role": choice.role,
        "content": choice.text.getvalue(),
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    return {"index": index, "message": message, **_end(choice, own_ids), "routed_experts": None}


def _text(index: int, choice: Choice, own_ids: bool, prompt_ids: list[int] | None) -> dict[str, object]:
    said = {"index": index, "text": choice.text.getvalue(), **_end(choice, own_ids)}
    return {**said, "prompt_logprobs": None, "prompt_token_ids": prompt_ids, "routed_experts": None}


def _end(choice: Choice, own_ids: bool) -> dict[str, object]:
    return {
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": _ids(choice.ids) if own_ids else None,
    }


def _ids(ids: Iterable[int] | None) -> list[int]:
    if ids is None:
        raise UnlikeError("its prompt's token ids are missing")
    return list(ids)


def _usage(usage: object) -> dict[str, object]:
    """With the members that a stream leaves out where they are null."""
    if not isinstance(usage, dict) or not all(name in usage for name in _USAGE):
        raise UnlikeError("its usage is missing")
    _known(usage, (*_USAGE, "prompt_tokens_details"))  # a reasoning parser adds details of the answer
    details = usage.get("prompt_tokens_details")
    told: dict[str, object] = {name: usage[name] for name in _USAGE}
    told["prompt_tokens_details"] = None if details is None else _filled(details, _DETAILS)
    return {**told, "completion_tokens_details": None}


def _metrics(metrics: object) -> dict[str, object] | None:
    return None if metrics is None else _filled(metrics, _METRICS)


def _filled(given: object, names: tuple[str, ...]) -> dict[str, object]:
    if not isinstance(given, dict):
        raise UnlikeError("a member of another type")
    _known(given, names)
    return {name: given.get(name) for name in names}


def _known(given: Fields, names: frozenset[str] | tuple[str, ...]) -> None:
    strange = [name for name, value in given.items() if value is not None and name not in names]
    if strange:
        raise UnlikeError(f"it says {strange[0][:40]!r}, which is not known here")
