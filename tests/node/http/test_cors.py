"""Web pages of other origins: what a browser asks before it lets them use the API, and what it is told afterwards."""

from __future__ import annotations

import json

import pytest

from tests.node.fakes import engine as fake
from tests.node.fakes.client import RawAnswer, ask
from tests.node.fakes.cluster import Cluster, Member
from tests.node.http.bodies import CHAT, chat

PAGE = "https://chat.example"
ALLOWED = "Access-Control-Allow-Origin"


async def preflight(member: Member, origin: str, path: str = CHAT) -> RawAnswer:
    asked = (
        ("Origin", origin),
        ("Access-Control-Request-Method", "POST"),
        ("Access-Control-Request-Headers", "authorization,content-type,x-stainless-os"),
    )
    return await ask(member.port, "OPTIONS", path, asked)


async def test_a_page_that_is_allowed_gets_permission_without_the_key_and_then_its_answer(nodes: Cluster) -> None:
    a = await nodes.add("a", cors_origin=(PAGE,), api_key=("k",))
    answer = await preflight(a, PAGE)
    assert (answer.status, answer.one(ALLOWED), answer.one("Vary")) == (204, PAGE, "Origin")
    assert "POST" in (answer.one("Access-Control-Allow-Methods") or "")
    assert answer.one("Access-Control-Allow-Headers") == "authorization,content-type,x-stainless-os"
    assert a.fake.received == []
    key = ("Authorization", "Bearer k")
    for method, path, body in (("POST", CHAT, chat()), ("GET", "/v1/models", b"")):
        answer = await ask(a.port, method, path, (("Origin", PAGE), key), body)
        assert (answer.status, answer.one(ALLOWED)) == (200, PAGE)
    answer = await ask(a.port, "GET", "/v1/models", (("Origin", PAGE),))
    assert (answer.status, answer.one(ALLOWED)) == (401, PAGE), "the page can read why"


async def test_any_page_where_all_are_allowed(nodes: Cluster) -> None:
    a = await nodes.add("a", cors_origin=("*",))
    assert (await preflight(a, "null")).one(ALLOWED) == "*"


@pytest.mark.parametrize("allowed", [(), ("https://other.example",), (PAGE + ":8443",)])
async def test_every_other_page_is_refused(nodes: Cluster, allowed: tuple[str, ...]) -> None:
    a = await nodes.add("a", cors_origin=allowed)
    answer = await preflight(a, PAGE)
    assert answer.status == 403 and json.loads(answer.body)["error"]["code"] == "origin_not_allowed"
    assert answer.one(ALLOWED) is None


@pytest.mark.parametrize("target", ["a", "b"], ids=["0 hops", "1 hop"])
async def test_an_engine_that_allows_everybody_is_not_heard(nodes: Cluster, target: str) -> None:
    """vLLM does, unless told otherwise: any page could read what a node on `localhost` answers."""
    a, b = await nodes.add("a"), await nodes.add("b")
    await nodes.agree()
    generous = fake.Reply(headers=(("Content-Type", "application/json"), (ALLOWED, "*")))
    for member in (a, b):
        member.fake.script = lambda exchange: exchange.send(generous)
    answer = await ask(a.port, "POST", CHAT, (("Origin", PAGE), ("x-grapevine-force-target", target)), chat())
    assert (answer.status, answer.one(ALLOWED), answer.one("Content-Type")) == (200, None, "application/json")


async def test_nothing_but_the_api_is_open_to_pages(nodes: Cluster) -> None:
    a = await nodes.add("a", cors_origin=("*",), admin_token="t")
    for path in ("/gossip/state", "/admin/drain", "/peer/v1/x"):
        for answer in (await preflight(a, PAGE, path), await ask(a.port, "GET", path, (("Origin", PAGE),))):
            assert answer.one(ALLOWED) is None
