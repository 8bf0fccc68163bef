"""What an entry tells its target of a request: nothing is lost, nothing is believed that matters for safety."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.errors import RemoteError
from node.peers import GIST_HEADER
from node.prompt import gist, parse_request
from node.prompt.carriage import Carriage
from tests.node.fakes.client import ask
from tests.node.fakes.cluster import cluster
from tests.node.http.bodies import CHAT, chat

PATHS = st.sampled_from([CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize"])
FIELDS = st.fixed_dictionaries(
    {"model": st.just("m")},
    optional={
        "messages": st.just([{"role": "user", "content": "hi " * 700}]),
        "prompt": st.text(max_size=5) | st.lists(st.integers(0, 9), max_size=5) | st.just("x" * 3000),
        "input": st.text(max_size=5),
        "stream": st.booleans(),
        "max_tokens": st.integers(0, 99),
        "n": st.integers(1, 3),
        "temperature": st.just(0),
        "return_token_ids": st.booleans(),
        "logprobs": st.booleans(),
        "echo": st.booleans(),
    },
)


@given(PATHS, FIELDS)
def test_a_target_knows_what_it_would_have_read(path: str, fields: dict[str, object]) -> None:
    body = json.dumps(fields).encode()
    read = parse_request(path, body)
    told = gist.decode(gist.encode(read), path, "m", body)
    ways = None
    if read.carriage is not None and told.carriage is not None:
        ways = replace(told.carriage, tokens=read.carriage.tokens, again=read.carriage.again)
        assert (not told.carriage.tokens, not told.carriage.again) == (
            not read.carriage.tokens,
            not read.carriage.again,
        )
    assert replace(told, carriage=ways) == replace(read, priority=None, least_tokens=0, refers_to=None)


@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params":{}}',
        b'{"vllm_xargs":{"kv_transfer_params":1}}',
        b'{"\\u006bv_transfer_params":{}}',
        b'{"kv\\u005Ftransfer_params":{}}',
        '{"kv_transfer_params":{}}'.encode("utf-16"),
        '{"kv_transfer_params":{}}'.encode("utf-32-le"),
    ],
)
def test_a_body_with_transfer_parameters_is_not_plain_however_they_are_spelt(body: bytes) -> None:
    assert not gist.plain(body)
    if body.startswith(b"{"):
        assert gist.encode(parse_request(CHAT, body)) == ""


@given(st.text())
def test_usual_bodies_are_plain(text: str) -> None:
    body = json.dumps({"model": "m", "prompt": text.replace("\0", "").replace("\x7f", "")}).encode()
    assert gist.plain(body) or b"kv_transfer_params" in body or b"\\\\u00" in body


@given(
    st.binary(max_size=60) | st.recursive(st.none() | st.booleans() | st.integers(-9, 9), st.lists).map(msgpack.packb)
)
def test_garbage_is_a_remote_error_and_nothing_else(packed: bytes) -> None:
    with pytest.raises(RemoteError):
        gist.decode(base64.b64encode(packed).decode(), CHAT, "m", b"{}")


GOOD = [2, True, False, None, [10, 3, 1, 1], [True, True, False, True, False, True], b"\0" * 8]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((0, 1), (1, 1), (2, 0), (3, -1), (3, 1.5), (4, [1, 2, 3]), (4, [1, 2, 0, 1]), (4, [1 << 41, 1, 1, 1])),
        *(
            (4, [True, 1, 1, 1]),
            (5, [1, 1, 1, 1, 1, 1]),
            (5, [True] * 5),
            (5, "x"),
            (6, b"\0"),
            (6, [1]),
            (6, "12345678"),
        ),
    ],
)
def test_each_field_has_its_range(place: int, value: object) -> None:
    def header(fields: list[object]) -> str:
        return base64.b64encode(msgpack.packb(fields)).decode()

    told = gist.decode(header(GOOD), CHAT, "m", b"{}")
    assert told.chunks == (0,) and told.carriage == Carriage(ask_ids=True, gathers=True)
    with pytest.raises(RemoteError):
        gist.decode(header([value if at == place else given for at, given in enumerate(GOOD)]), CHAT, "m", b"{}")
    with pytest.raises(RemoteError):
        gist.decode("ä", CHAT, "m", b"{}")
    with pytest.raises(RemoteError):
        gist.decode("A" * 20_000, CHAT, "m", b"{}")


def test_a_prompt_of_too_many_chunks_is_read_twice() -> None:
    body = json.dumps({"model": "m", "prompt": "x" * (512 * (gist.MAX_CHUNKS + 1))}).encode()
    assert gist.encode(parse_request("/v1/completions", body)) == ""
    longest = json.dumps({"model": "m", "prompt": "x" * 512 * gist.MAX_CHUNKS}).encode()
    header = gist.encode(parse_request("/v1/completions", longest))
    assert len(gist.decode(header, "/v1/completions", "m", longest).chunks) == gist.MAX_CHUNKS
    assert len(header) < 12_000


@pytest.mark.parametrize("twice", [False, True])
async def test_a_forwarded_body_is_read_once_unless_it_may_hold_what_must_not_pass(
    monkeypatch: pytest.MonkeyPatch, twice: bool
) -> None:
    from node.http import peer

    read: list[bytes] = []
    parse = peer.parse

    def counted(request: object, path: str, body: bytes) -> object:
        read.append(body)
        return parse(request, path, body)  # type: ignore[arg-type]

    monkeypatch.setattr(peer, "parse", counted)
    async with cluster() as nodes:
        a, b = await nodes.add("a", models=["other"]), await nodes.add("b")
        await nodes.agree()
        body = chat(user="kv_transfer_params") if twice else chat()
        answer = await ask(a.port, "POST", CHAT, ((GIST_HEADER, "forged"),), body)
        assert answer.status == 200 and answer.one("x-grapevine-target") == "b"
        assert b.engine.received[-1].body == body
        assert read == ([body] if twice else [])
