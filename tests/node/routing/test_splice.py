from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.errors import BadRequest
from node.prompt import parse_request, splice

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=10,
)
SPACE = st.text(alphabet=" \t\r\n", max_size=4)
KEYS = st.text(max_size=6) | st.sampled_from(["model", "kv_transfer_params", "vllm_xargs"])


@given(
    st.dictionaries(KEYS, JSON, max_size=5),
    SPACE,
    st.sampled_from([None, 1, "\t"]),
    st.booleans(),
    st.text(min_size=1, max_size=12),
)
def test_everything_else_keeps_its_meaning(
    fields: dict[str, object], space: str, indent: int | str | None, ascii_only: bool, rid: str
) -> None:
    body = (space + json.dumps(fields, indent=indent, ensure_ascii=ascii_only) + space).encode("utf-8", "surrogatepass")
    parsed = parse_request("/v1/completions", body)
    spliced = json.loads(splice(body, rid, has_kv_params=parsed.has_kv_params))
    assert spliced.pop("kv_transfer_params") == {"grapevine": {"rid": rid}}
    fields.pop("kv_transfer_params", None)
    extra = fields.get("vllm_xargs")
    if isinstance(extra, dict):
        extra.pop("kv_transfer_params", None)
    assert spliced == fields
    stripped = json.loads(splice(body, None, has_kv_params=parsed.has_kv_params))
    assert stripped == fields


def test_the_bytes_behind_the_insertion_are_the_clients_own() -> None:
    body = b'  { "model" : "m",\n "x":1.10, "big":123456789012345678901234567890 }\n'
    spliced = splice(body, "r", has_kv_params=False)
    assert spliced == b'  {"kv_transfer_params":{"grapevine":{"rid":"r"}},' + body[3:]
    assert splice(body, None, has_kv_params=False) is body


@pytest.mark.parametrize("body", [b"{}", b"{ \n }", b"\t{" + b" " * 200 + b"}"])
def test_an_empty_object_gets_no_comma(body: bytes) -> None:
    assert json.loads(splice(body, "r", has_kv_params=False)) == {"kv_transfer_params": {"grapevine": {"rid": "r"}}}


@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params":{"remote_host":"evil"},"x":1}',
        b'{"x":1,"kv_transfer\\u005fparams":{"remote_host":"evil"}}',
        b'{"kv_transfer_params":null,"x":1,"kv_transfer_params":{"remote_host":"evil"}}',
        b'{"x":1,"vllm_xargs":{"kv_transfer_params":"evil"}}',
    ],
)
def test_a_clients_own_parameters_never_get_through(body: bytes) -> None:
    parsed = parse_request("/v1/completions", body)
    assert parsed.has_kv_params
    for rid in ("r", None):
        assert b"evil" not in splice(body, rid, has_kv_params=True)
    assert json.loads(splice(body, "r", has_kv_params=True))["x"] == 1


def test_stripping_keeps_integers_of_any_size() -> None:
    body = b'{"kv_transfer_params":{},"seed":123456789012345678901234567890}'
    assert json.loads(splice(body, None, has_kv_params=True)) == {"seed": 123456789012345678901234567890}


def test_the_rid_is_escaped() -> None:
    rid = 'a"},"x":{"'
    assert json.loads(splice(b"{}", rid, has_kv_params=False))["kv_transfer_params"]["grapevine"]["rid"] == rid


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "utf-8-sig"])
def test_a_body_in_another_encoding_stays_the_same_json(encoding: str) -> None:
    fields = {"model": "m", "prompt": "caf\u00e9 \U0001f347"}
    body = json.dumps(fields, ensure_ascii=False).encode(encoding)
    ours = json.loads(splice(body, "r", has_kv_params=False))
    assert ours == {"kv_transfer_params": {"grapevine": {"rid": "r"}}, **fields}


def test_what_cannot_be_stripped_is_refused_when_it_is_read() -> None:
    deep = b'{"kv_transfer_params": {}, "a": ' + b"[" * 995 + b"]" * 995 + b"}"
    with pytest.raises(BadRequest, match="too deep"):
        parse_request("/v1/completions", deep)


def test_how_long_to_hold_it_goes_to_the_engine_beside_its_id() -> None:
    spliced = json.loads(splice(b'{"prompt": "x"}', "r", has_kv_params=False, hold_s=2.5))
    assert spliced == {"kv_transfer_params": {"grapevine": {"rid": "r", "hold_s": 2.5}}, "prompt": "x"}


@pytest.mark.parametrize(
    "body", [b'{"x":1}', b'{"x":1,"stream":false}', b'{"str\\u0065am":null,"x":1,"stream_options":null}']
)
def test_what_makes_a_stream_of_an_answer_in_one_piece(body: bytes) -> None:
    """The fields that were there must go: of two of the same name an engine takes the last."""
    fields = json.loads(body)
    strip = "stream" in fields
    raw = splice(body, "r", has_kv_params=False, ask_ids=True, gather=True, strip=strip)
    assert raw.count(b'"stream"') == 1 and raw.count(b'"stream_options"') == 1
    told = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, "x": 1}
    assert json.loads(raw) == {**told, "kv_transfer_params": {"grapevine": {"rid": "r"}}}
    assert json.loads(splice(body, None, has_kv_params=False, gather=True, strip=strip)) == {
        key: value for key, value in told.items() if key != "return_token_ids"
    }


@given(
    st.dictionaries(KEYS | st.sampled_from(["stream", "stream_options", "return_token_ids", "a"]), JSON, max_size=5),
    st.sampled_from([False, None]),
    st.booleans(),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_a_stream_is_made_of_any_body_that_asks_for_none(
    fields: dict[str, object], said: bool | None, first: bool, indent: int | None, ascii_only: bool
) -> None:
    for name in ("kv_transfer_params", "vllm_xargs"):
        fields.pop(name, None)
    fields.pop("stream", None)
    fields = {"stream": said, **fields} if first else {**fields, "stream": said}
    body = json.dumps(fields, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    raw = splice(body, None, has_kv_params=False, ask_ids=True, gather=True, strip=True)
    made = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    assert json.loads(raw) == {**fields, **made}


@pytest.mark.parametrize(
    ("body", "turned"),
    [
        (b'{"x":1.10,"stream":false}', b'"x":1.10,"stream":true}'),
        (b'{"stream" :\n null ,"x":"stream it"}', b'"stream" :\n true ,"x":"stream it"}'),
        (b'{"x":{"stream":false},"stream":false}', b""),
        (b'{"x":"stream","stream":false}', b""),
        (b'{"a \\"stream":false,"stre\\u0061m":false}', b""),
        (b'{"a":{"stream":false},"stream_options":null}', b""),
        (b'{"a":{"stream":false},"return_token_ids":false}', b""),
    ],
)
def test_no_stream_is_made_a_stream_in_place_where_it_is_plain_to_see(body: bytes, turned: bytes) -> None:
    raw = splice(body, None, has_kv_params=False, ask_ids=True, gather=True, strip=True)
    assert raw.endswith(turned) and (not turned or raw.startswith(b'{"return_token_ids":true,"stream_options":'))
    made = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    assert json.loads(raw) == {**json.loads(body), **made}
