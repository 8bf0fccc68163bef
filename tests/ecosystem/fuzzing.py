"""Requests that nobody would send: any method, path, header and body, most of them near to something valid."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

MODEL = "demo"
TOKEN = "t"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "PROPFIND", "X")
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ],
    "max_tokens": 4, "temperature": 0, "top_p": 1, "n": 1, "stream": True, "stream_options": {"include_usage": True},
    "stop": ["x"], "seed": 1, "logprobs": False, "logit_bias": {"1": 1}, "tools": [],
    "response_format": {"type": "text"},
    "priority": 0, "cache_salt": "s", "user": "u", "kv_transfer_params": {"a": 1}, "ignore_eos": True, "min_tokens": 1,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "model": MODEL, "prompt": ["a b", "c"], "max_tokens": 4, "n": 1, "stream": True, "echo": False, "suffix": None,
    "return_token_ids": True, "stop": "x", "logprobs": 0, "best_of": 1, "seed": 2, "lora": None,
}  # fmt: skip
#: What a request to each path may hold.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": {"model": MODEL, "input": "a", "previous_response_id": "resp_1", "store": True},
    "/v1/embeddings": {"model": MODEL, "input": ["a", [1, 2]], "encoding_format": "float"},
    "/tokenize": {"model": MODEL, "prompt": "a b", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"model": MODEL, "tokens": [1, 2]},
    "/route/explain": CHAT,
    "/admin/drain": {"timeout_s": 0},
    "/admin/leave": {"timeout_s": 0},
    "/admin/join": {"addresses": ["127.0.0.1:9"]},
    "/admin/keys": {"add": "a key that is long enough", "use": "0", "remove": "0"},
    "/admin/kv/warm": {"from": "b", "max_bytes": 1},
}
_TEXTS = st.one_of(
    st.sampled_from(["", "a", "b", "\0", "\ud800", "é" * 300, "../..", "-1", "1e400", "null", "[", "{{x}}", MODEL]),
    st.text(max_size=12),
)
_SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2**31, -(2**63) - 1, 2**64, 10**40, 0.5, -0.0, 1e308, float("nan"), float("inf")]),
    _TEXTS,
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_TEXTS, inner, max_size=3)),
    max_leaves=6,
)
_DEEP = st.sampled_from([40, 1000, 20_000])
_HEADERS: dict[str, tuple[str, ...]] = {
    "Authorization": (f"Bearer {TOKEN}", "Bearer", "Basic eDp5", "Bearer \u00ff"),
    "Content-Type": ("application/json", "text/plain", "multipart/form-data; boundary=b", "multipart/form-data", ";;"),
    "Content-Encoding": ("gzip", "identity"),
    "Accept": ("text/event-stream", "*/*"),
    "Expect": ("100-continue", "something"),
    "Connection": ("close", "keep-alive, x-a", "Upgrade"),
    "Upgrade": ("websocket", "h2c"),
    "Origin": ("https://chat.example", "null"),
    "Access-Control-Request-Method": ("POST",),
    "If-None-Match": ("*", '"x"'),
    "Range": ("bytes=0-1",),
    "Cookie": ("a=b",),
    "X-Request-Id": ("mine", "a b", "x" * 200),
    "x-request-timeout": ("0.05", "5", "0", "-1", "nan", "1e9", "\u0661"),
    "x-request-priority": ("0", "-100", "101", "x", "\u0661"),
    "x-vllm-priority": ("1", "9" * 400),
    "x-grapevine-force-target": ("a", "b", "nobody", ""),
    "x-grapevine-force-source": ("a", "b", "nobody"),
    "x-grapevine-no-pull": ("1", "0"),
    "x-grapevine-plan": ("{}", "x", "e30="),
    "x-grapevine-auth": ("a.b", ""),
    "x-grapevine-hops": ("1", "9"),
}
_VALUE = st.text(st.characters(min_codepoint=33, max_codepoint=255, exclude_characters="\x7f"), max_size=20)


@dataclass(frozen=True, slots=True)
class Wild:
    """One request."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


def _paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(found for key, inner in keys for found in _paths(inner, (*at, key)))]


@st.composite
def mutated(draw: st.DrawFn, valid: dict[str, Any]) -> bytes:
    """A valid body with up to three of its parts changed, taken away or added."""
    holder: list[Any] = [copy.deepcopy(valid)]
    for _ in range(draw(st.integers(0, 3))):
        *way, last = (0, *draw(st.sampled_from(_paths(holder[0]))))
        place: Any = holder
        for key in way:
            place = place[key]
        change = draw(st.sampled_from(["set", "set", "drop", "add"]))
        if change == "drop" and isinstance(place, dict):
            del place[last]
        elif change == "add" and isinstance(place[last], dict):
            place[last][draw(_TEXTS)] = draw(_VALUES)
        else:
            place[last] = draw(_VALUES)
    return json.dumps(holder[0]).encode()


def bodies(path: str) -> st.SearchStrategy[bytes]:
    """Bodies for a path: of what it takes, and of anything."""
    valid = BODIES.get(path) or BODIES.get(path.removeprefix("/peer")) or CHAT
    return st.one_of(
        mutated(valid),
        mutated(valid),
        st.just(json.dumps(valid).encode()),
        st.just(b""),
        st.binary(max_size=40),
        _VALUES.map(lambda value: json.dumps(value).encode()),
        _DEEP.map(lambda depth: b'{"model":"demo","messages":' + b"[" * depth + b"]" * depth + b"}"),
        st.just(b'{"model": "demo", "model": 1, "messages": []}'),
        st.just(json.dumps(valid).encode("utf-16")),
    )


_HEADER = st.sampled_from(sorted(_HEADERS)).flatmap(
    lambda name: st.tuples(st.just(name), st.one_of(st.sampled_from(_HEADERS[name]), _VALUE))
)


@st.composite
def requests(draw: st.DrawFn, method: str, path: str) -> Wild:
    """Requests to a route; most of them with its method and the administrator's token."""
    used = draw(st.one_of(st.just(method), st.just(method), st.sampled_from(METHODS)))
    target = path
    if path.endswith("/"):
        target += draw(
            st.sampled_from(["", "x", "models/x", "files/f-1", "%00", "a%2fb", "\u00e9", "responses/r1/cancel"])
        )
    target += draw(st.sampled_from(["", "", "?limit=1", "?limit=-1", "?path=%2Fv1%2Fx", "?a=%ff&&=", "#x"]))
    headers = draw(st.lists(_HEADER, max_size=4, unique_by=lambda item: item[0].lower()))
    if path.startswith("/admin") and draw(st.booleans()):
        headers = [item for item in headers if item[0] != "Authorization"] + [("Authorization", f"Bearer {TOKEN}")]
    return Wild(used, target, tuple(headers), draw(bodies(path)))
